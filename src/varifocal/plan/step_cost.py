"""What a training step costs, before it is run: operations, bytes moved and bytes kept, counted from the code.

docs/scaling.md explains every term. The counts of passes, operators and kept numbers follow from what the model's
layers do, and tests compare them with what torch counts while such a layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import typical_equation
from varifocal.equations.branches import Prefix, SoftWindow, TopK, Window, members
from varifocal.equations.equation import Equation
from varifocal.kernels.flex.backend import why_not_equation
from varifocal.kernels.flex.counting import BACKWARD, FORWARD, tile_pairs
from varifocal.model.config import VarifocalConfig
from varifocal.model.loss import ROWS_AT_A_TIME, ROWS_ON_GPU
from varifocal.plan.cost import layer_mechanisms
from varifocal.plan.hardware import Precision
from varifocal.plan.work import work_of

Execution = Literal["kernels", "written out"]
"""How attention runs: in kernels that never hold the scores of all pairs, or with those scores written out."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one device computes at once."""

    rows: int
    length: int
    precision: Precision = "bfloat16"
    checkpointing: bool = False
    execution: Execution = "kernels"
    tiles: bool = False
    """Whether kernels multiply every pair of a tile that holds one that is read, as flex does on a GPU."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def narrow(self) -> int:
        """Bytes of each number that products read."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def rows_of_loss(self) -> int:
        """Rows whose logits exist at once; what trains in bfloat16 is a GPU."""
        return min(self.tokens, ROWS_ON_GPU if self.precision == "bfloat16" else ROWS_AT_A_TIME)

    @property
    def chunks_of_loss(self) -> int:
        return -(-self.tokens // self.rows_of_loss)


class StepWork(NamedTuple):
    """The forward and backward pass of a micro-batch."""

    products: float
    """Operations of products with the layers' weights, including those that the backward pass repeats."""
    head: float
    """Operations of products with the head's weights."""
    operands: float
    """Bytes that the layers' products read and write, apart from their weights."""
    logits: float
    """Bytes that the head's products read and write."""
    reading: float
    """Operations of attention to the keys that are read."""
    rating: float
    """Operations that decide which keys are read and how much they count."""
    exponentials: float
    """Exponentials of softmaxes, and similar functions in pair networks."""
    traffic: float
    """Bytes read and written by operators other than products."""
    calls: float
    """Number of operators that are started."""

    @property
    def flops(self) -> float:
        return self.products + self.head + self.reading + self.rating


class LayerSizes(NamedTuple):
    """Widths of a layer: how many numbers each token has."""

    stream: int
    """C."""
    queries: int
    """H D."""
    keys: int
    """G D, and as many values."""
    inner: int
    """The inner width of the feed-forward part."""
    heads: int


def layer_sizes(config: VarifocalConfig) -> LayerSizes:
    """The widths of every layer."""
    shape = config.head_shape()
    return LayerSizes(
        shape.model_width,
        shape.heads * shape.head_width,
        shape.kv_heads * shape.head_width,
        config.intermediate_size,
        shape.heads,
    )


class Passes(NamedTuple):
    """What the operators between products read and write per token, forward and backward, and how many there are."""

    stream: float
    """Bytes for each number of the layer's width: norms, residuals, sums of gradients."""
    heads: float
    """Bytes for each number of queries and keys: norms and rotation."""
    inner: float
    """Bytes for each inner number of the feed-forward part."""
    logits: float
    """Bytes for each logit."""
    weights: float
    """Bytes for each weight of the layers, once per pass: copies to the narrow type and back."""
    calls: float
    """Operators per layer, products included."""


PASSES: dict[str, Passes] = {
    "native": Passes(stream=124, heads=36, inner=44, logits=12, weights=0, calls=75),
    "float32": Passes(stream=380, heads=308, inner=76, logits=36, weights=0, calls=190),
    "bfloat16": Passes(stream=490, heads=378, inner=47, logits=36, weights=12, calls=230),
}
""""native" means our CPU kernels, which make one pass each; the others count transformers' modules by operator."""
CALLS_OUTSIDE = 75
"""Operators before and after the layers."""
CALLS_OF_LOSS = 15
"""Operators for each chunk of the loss."""


def step_work(config: VarifocalConfig, part: MicroBatch, *, native: bool = False) -> StepWork:
    """The work of a micro-batch's forward and backward pass; `native` if the steps between products are our kernels."""
    sizes, tokens = layer_sizes(config), part.tokens
    passes = PASSES["native" if native else part.precision]
    layers = config.num_hidden_layers
    head = float(config.vocab_size * config.hidden_size)
    weights = layer_weights(sizes)
    # Each weight takes three products; with checkpointing a layer is computed again, except for its last product.
    repeated = weights - sizes.stream * sizes.inner if part.checkpointing else 0
    products = 2.0 * tokens * layers * (3 * weights + repeated)
    mechanisms = layer_mechanisms(config)
    works = {one: attention_work(one, part) for one in set(mechanisms)}
    attention = [works[one] for one in mechanisms]
    reading, rating, exponentials, traffic, calls = (float(sum(column)) for column in zip(*attention, strict=True))
    between = passes.stream * sizes.stream + passes.heads * (sizes.queries + sizes.keys) + passes.inner * sizes.inner
    again = 1 + part.checkpointing / 3
    return StepWork(
        products=products,
        head=2.0 * tokens * 3 * head,
        operands=float(part.narrow * tokens * layers * operand_numbers(sizes, part)),
        logits=head_bytes(config, part),
        reading=tokens * reading,
        rating=tokens * rating,
        exponentials=tokens * exponentials,
        traffic=tokens * (layers * between * again + passes.logits * config.vocab_size + traffic)
        + layers * passes.weights * weights,
        calls=layers * passes.calls * again + calls + CALLS_OUTSIDE + CALLS_OF_LOSS * part.chunks_of_loss,
    )


def head_bytes(config: VarifocalConfig, part: MicroBatch) -> float:
    """Bytes that the head's products read and write."""
    vocabulary: int = config.vocab_size
    width: int = config.hidden_size
    if part.narrow == 4:
        # The logits are written, and their gradient is read twice.
        return 12.0 * part.tokens * (vocabulary + width)
    # Logits are written in float32, their gradient is read twice in 16 bits. A product cannot add to a sum of another
    # type: for each chunk the weight's part is written, and read with the sum that it is added to.
    return 8.0 * part.tokens * (vocabulary + width) + 16.0 * part.chunks_of_loss * vocabulary * width


def layer_weights(sizes: LayerSizes) -> int:
    """Weights that a layer multiplies by: four projections of its attention, three of its feed-forward part."""
    return sizes.stream * (2 * sizes.queries + 2 * sizes.keys + 3 * sizes.inner)


def operand_numbers(sizes: LayerSizes, part: MicroBatch) -> int:
    """How many numbers the products of a layer read and write per token."""
    projections = 4 * sizes.stream + 2 * sizes.queries + 2 * sizes.keys
    feed_forward = 3 * sizes.stream + 3 * sizes.inner
    return (projections + feed_forward) * (3 + part.checkpointing)


class AttentionWork(NamedTuple):
    """A token's attention in one layer, forward and backward."""

    reading: float
    rating: float
    exponentials: float
    traffic: float
    calls: float


def attention_work(mechanism: Mechanism[Any], part: MicroBatch) -> AttentionWork:
    """The work of one layer's attention for an average token."""
    equation = typical_equation(mechanism, part.length)
    one = work_of(mechanism, equation, part.length)
    heads, again = mechanism.shape.heads, float(part.checkpointing)
    functions = equation.score.pair_functions()
    if part.execution == "written out":
        written = written_scores(equation, part, keys_read=one.keys_read)
        pairs = heads * written.keys * written.branches
        return AttentionWork(
            reading=4 * mechanism.shape.head_width * pairs * (3 + again),
            rating=one.rating_flops * (3 + again),
            exponentials=pairs * max(1.0, functions) * (1 + again),
            traffic=heads * written.keys * written.moved * (1 + again / 3),
            calls=30.0 * written.branches,
        )
    overhead = mechanism.overhead(part.length, part.narrow)
    # The forward pass takes 2 products, the backward pass 5: it computes the scores again instead of keeping them.
    reading, exponentials = one.reading_flops * (3.5 + again), one.keys_read * heads * (2 + again)
    multiplied = multiplied_pairs(equation, part, heads=heads)
    if multiplied is not None:
        reading = 4 * mechanism.shape.head_width * heads * multiplied * ((FORWARD + BACKWARD) / 2 + again)
        # Each of its two passes backward makes the probabilities for itself.
        exponentials = heads * multiplied * (3 + again)
    return AttentionWork(
        reading=reading,
        # A selection has no gradient. What weighs keys has one, which takes twice the forward work.
        rating=one.ranking_flops * (1 + again)
        + one.weighing_flops * (3 + again)
        + mechanism.training_flops(equation, part.length),
        exponentials=exponentials * (1 + functions),
        traffic=overhead.traffic,
        calls=overhead.operators,
    )


def multiplied_pairs(equation: Equation, part: MicroBatch, *, heads: int) -> float | None:
    """Keys that flex multiplies with an average query: those of whole tiles; None where it does not run."""
    if not part.tiles or why_not_equation(equation) is not None or equation.relative_values is not None:
        return None
    pairs = tile_pairs(equation.branches, length=part.length, heads=heads)
    return None if pairs is None else pairs / part.length


class Written(NamedTuple):
    """The scores that are written out for one query of one head."""

    keys: float
    branches: int
    kept: float
    """Bytes that are kept for the backward pass, per key."""
    moved: float
    """Bytes that are moved forward and backward, per key."""


def written_scores(equation: Equation, part: MicroBatch, *, keys_read: float) -> Written:
    """What a plain implementation writes: for each branch a softmax in float32 and its narrow copy, and masks."""
    softmax, passes, length = 4.0 + part.narrow, 38.0, part.length
    count = len(equation.branches)
    kept, moved = count * softmax, count * passes
    for member in (member for branch in equation.branches for member in members(branch)):
        if isinstance(member, TopK):
            # A top-k keeps a mask, after several passes over the scores.
            kept, moved = kept + 5, moved + 32
        elif isinstance(member, SoftWindow):
            # A soft edge and its logarithm take passes of their own.
            kept, moved = kept + 4, moved + 32
    functions = equation.score.pair_functions()
    if functions:
        # A pair network keeps each hidden unit before and after its GELU, and the gate and score that are multiplied.
        kept, moved = kept + 8 * functions, moved + 32 * functions - 8
    if count > 1 and not any(isinstance(one, SoftWindow | TopK) for one in equation.branches):
        kept += 1  # the mask that tells the branches apart
    place = torch.tensor([length - 1])
    if count == 1 and not equation.branches[0].follows_positions and not equation.branches[0].ranks:
        return Written(keys_read, count, kept, moved)  # a plain implementation has as few summaries
    if count == 1 and all(isinstance(member, Window | Prefix) for member in members(equation.branches[0])):
        # A window is computed in blocks of its length: each query reads its own block and the one before.
        near = int(equation.branches[0].near(place).max())
        return Written(min(length, 2 * near), count, kept, moved)
    return Written(length, count, kept, moved)


def memory_by_part(
    config: VarifocalConfig,
    part: MicroBatch,
    *,
    parameters: int,
    devices: int = 1,
    accumulated: int = 1,
    native: bool = False,
) -> dict[str, float]:
    """The bytes that one device holds, by part, at the moment of a step at which their sum is largest."""
    sizes, tokens = layer_sizes(config), part.tokens
    table = float(config.vocab_size * config.hidden_size)
    weights = layer_weights(sizes)
    kept = tokens * kept_numbers(config, part)
    mechanisms = layer_mechanisms(config)
    kept_by = {one: kept_by_mechanism(one, part) for one in set(mechanisms)}
    gates = tokens * sum(kept_by[one] for one in mechanisms)
    if part.checkpointing:
        # Kept are the input of every layer, and everything of the layer that is being computed again.
        inputs = 4.0 * tokens * sizes.stream * config.num_hidden_layers
        kept, gates = inputs + kept / config.num_hidden_layers, gates / config.num_hidden_layers
    moments = {
        # The logits of a chunk exist while all activations are kept; of the gradients, only the head's exists yet.
        "loss": {"gradients": 4 * table, "loss": chunk_bytes(config, part), "workspace": 0.0},
        # The backward pass of the last layer, when all activations are still kept.
        "backward": {"gradients": 4 * table, "loss": 0.0, "workspace": workspace_bytes(sizes, part, native=native)},
        "end": {
            "gradients": 4.0 * parameters,
            "loss": 0.0,
            # The tokens' gradient of a tied table is added to the head's row by row: it takes no table of its own.
            "workspace": 0.0,
            "activations": 0.0,
            "gates and choices": 0.0,
        },
    }
    constant = {
        "weights": 4.0 * parameters,
        "narrow weights": 2.0 * weights * config.num_hidden_layers if part.precision == "bfloat16" else 0.0,
        "optimizer": 8.0 * parameters,
        "exchange": 4.0 * parameters if devices > 1 else 0.0,
    }
    found = []
    for one in moments.values():
        if accumulated > 1:
            one["gradients"] = 4.0 * parameters
        found.append(constant | {"gradients": 0.0, "activations": kept, "gates and choices": gates} | one)
    return max(found, key=lambda parts: sum(parts.values()))


def kept_numbers(config: VarifocalConfig, part: MicroBatch) -> float:
    """Bytes per token that all layers keep for the backward pass, apart from what mechanisms add."""
    sizes = layer_sizes(config)
    if part.narrow == 4:
        # The results of two norms; queries, keys, values and outputs; gate and up; sums of the softmaxes; the factors
        # of the norms.
        numbers = 2 * sizes.stream + 2 * (sizes.queries + sizes.keys) + 2 * sizes.inner + 4 * sizes.heads
        numbers += sizes.heads + config.head_shape().kv_heads + 4
        layer = 4.0 * numbers
    else:
        # The stream before two norms in float32, and a narrow copy for each of five projections; queries and keys
        # before and after norm and rotation, values and outputs; gate and up.
        stream = (8.0 + 5 * part.narrow) * sizes.stream
        layer = stream + part.narrow * (3.0 * (sizes.queries + sizes.keys) + 2 * sizes.inner) + 12.0 * sizes.heads
    layers: int = config.num_hidden_layers
    return layers * layer + 12.0 * sizes.stream


def kept_by_mechanism(mechanism: Mechanism[Any], part: MicroBatch) -> float:
    """Bytes per token that one layer's mechanism keeps: gates, widths, selected keys, an output, halves of pairs."""
    if part.execution != "written out":
        return mechanism.overhead(part.length, part.narrow).kept
    equation = typical_equation(mechanism, part.length)
    keys = work_of(mechanism, equation, part.length).keys_read
    written = written_scores(equation, part, keys_read=keys)
    return mechanism.shape.heads * written.keys * written.kept


def chunk_bytes(config: VarifocalConfig, part: MicroBatch) -> float:
    """Bytes of a chunk's logits, float32 in any precision, and of the gradient of the last hidden states.

    In bfloat16 also a narrow copy of the logits and one of the weight, and what a chunk adds to the weight's gradient.
    """
    vocabulary: int = config.vocab_size
    width: int = config.hidden_size
    narrow = 0.0 if part.narrow == 4 else 2.0 * part.rows_of_loss + 6.0 * width
    return vocabulary * (4.0 * part.rows_of_loss + narrow) + 4.0 * width * part.tokens


def workspace_bytes(sizes: LayerSizes, part: MicroBatch, *, native: bool) -> float:
    """Temporary bytes of one layer's backward pass: the larger of its attention and feed-forward parts."""
    streams, inner = (2, 4) if native else (4, 7)
    feed_forward = 4.0 * streams * sizes.stream + part.narrow * inner * sizes.inner
    attention = 8.0 * sizes.stream + part.narrow * 3.0 * (sizes.queries + sizes.keys)
    return part.tokens * max(feed_forward, attention)
