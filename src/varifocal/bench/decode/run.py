"""Runs the benchmark: all contenders decode in turns, beside a plain loop over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from varifocal.bench.decode.contenders import (
    BASELINE,
    INT8,
    Contender,
    ModelContender,
    build,
    mechanisms_of,
    usual_names,
)
from varifocal.bench.decode.llama import LlamaProcess
from varifocal.bench.decode.memory_speed import MemoryReader
from varifocal.bench.decode.speculation import prompts, time_speculation
from varifocal.bench.decode.text_loss import FEWEST, beginnings, loss_of_weights
from varifocal.bench.decode.turn import Turn
from varifocal.bench.step import Step
from varifocal.bench.timing import Times, turns
from varifocal.environment import environment
from varifocal.model.weights import weight_bytes
from varifocal.results.decode_bench import DecodeBench, DecodeRow, LossOfWeights, SpeculationRow
from varifocal.retrofit.opening import tokenizer_of

MEMORY = "memory"
SPECULATED = 48
"""Tokens that are generated speculatively."""
SPECULATED_ROUNDS = 2
OnStep = Callable[[Step], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    source: str
    contexts: tuple[int, ...] = (128, 2048, 8000)
    texts: tuple[int, ...] = (1,)
    """How many texts are decoded at once; each number is measured."""
    names: tuple[str, ...] | None = None
    """Contenders; None for the usual ones."""
    rounds: int = 10
    """Rounds in which all take turns, after a first round to warm up."""
    tokens: int = 4
    """Decoded by each in a round."""
    prompt: int = 2048
    """Contexts up to this one are read from a prompt, which is timed; longer ones are filled at random."""
    llama_python: str | None = None
    text: Path | None = None
    """A text on which the loss of int8 weights is measured, and speculative generation."""
    documents: int = 100
    length: int = 512
    """Documents of the text, and tokens of each."""
    buffer: int = 512 << 20
    """Bytes that the plain loop reads."""

    def __post_init__(self) -> None:
        for what in ("contexts", "texts"):
            if not getattr(self, what) or min(getattr(self, what)) < 1:
                raise ValueError(f"{what} must be whole numbers of at least 1, got {getattr(self, what)}")
        mechanisms_of(self.contenders)
        if self.text is not None and not self.text.is_file():
            raise ValueError(f"{self.text} does not exist; give a .parquet file with a column text, or a text in UTF-8")
        if self.text is not None and self.pair is None:
            raise ValueError("--text compares a mechanism with its int8 weights; name both: -c dense -c 'dense int8'")

    @property
    def pair(self) -> str | None:
        """The first mechanism of which both kinds of weights take part."""
        return next((name for name in self.contenders if f"{name}{INT8}" in self.contenders), None)

    @property
    def spoken(self) -> tuple[int, ...]:
        """The lengths of the prompts of speculative generation: contexts that are read, and long enough to propose."""
        return tuple(one for one in self.contexts if FEWEST <= one <= self.prompt)

    @property
    def contenders(self) -> tuple[str, ...]:
        """The names of those that take part; the speed of the first is 1."""
        return usual_names() if self.names is None else tuple(dict.fromkeys(self.names))


def bench_decode(plan: Plan, *, on_step: OnStep = lambda step: None) -> DecodeBench:
    """The result: a row for each contender, context and number of texts."""
    total = len(plan.texts) * len(plan.contexts) * (len(plan.contenders) + 1) + 1
    total += 0 if plan.text is None else plan.documents + 2 * len(plan.spoken)
    done = 0

    def step(doing: str) -> None:
        nonlocal done
        on_step(Step(done, total, doing))
        done += 1

    rows: list[DecodeRow] = []
    losses: list[LossOfWeights] = []
    speculation: list[SpeculationRow] = []
    read: list[float] = []
    with TemporaryDirectory() as folder:
        step("reading the model")
        contenders = build(plan.source, plan.contenders, llama_python=plan.llama_python, folder=Path(folder))
        memory = MemoryReader(plan.buffer)
        try:
            for texts in plan.texts:
                for context in plan.contexts:
                    rows += time_contenders(contenders, memory, plan, texts, context, read=read, say=step)
            if plan.text is not None:
                losses, speculation = measure_on_text(contenders, plan, plan.text, say=step)
        finally:
            for one in contenders:
                if isinstance(one, LlamaProcess):
                    with suppress(OSError), closing(one):
                        pass
        return DecodeBench(
            environment=environment(),
            source=Path(plan.source).name,
            rounds=plan.rounds,
            tokens=plan.tokens,
            memory_gigabytes_per_second=memory.bytes / Times(tuple(read)).median / 1e9,
            weight_bytes={one.name: weight_bytes(one.model) for one in contenders if isinstance(one, ModelContender)},
            notes=notes_of(plan),
            rows=tuple(rows),
            losses=tuple(losses),
            speculation=tuple(speculation),
        )


def measure_on_text(
    contenders: Sequence[Contender], plan: Plan, file: Path, *, say: Callable[[str], None]
) -> tuple[list[LossOfWeights], list[SpeculationRow]]:
    """What int8 weights cost on a text, and what speculative generation gains on one that repeats itself."""
    tokenizer = tokenizer_of(plan.source)
    models = {one.name: one.model for one in contenders if isinstance(one, ModelContender)}
    name = str(plan.pair)
    plain, narrow = models[name], models[f"{name}{INT8}"]
    speculation: list[SpeculationRow] = []
    for context in plan.spoken:
        ids = next((one for one in beginnings(file, tokenizer, length=context) if one.shape[1] == context), None)
        if ids is None:
            raise ValueError(
                f"{file} has no document of {context:,} tokens to speculate after; give another --contexts"
            )
        for kind, prompt in prompts(ids, context).items():
            say(f"speculation after {context:,} tokens")
            speculation += time_speculation(
                name, plain, narrow, prompt, prompt=kind, tokens=SPECULATED, rounds=SPECULATED_ROUNDS
            )
    loss = loss_of_weights(plain, narrow, tokenizer, file, documents=plan.documents, length=plan.length, say=say)
    return [loss], speculation


def notes_of(plan: Plan) -> tuple[str, ...]:
    """What a reader of the result must know."""
    filled = [context for context in plan.contexts if context > plan.prompt]
    if not filled:
        return ()
    where = " and ".join(f"{context:,}" for context in filled)
    return (f"caches of {where} tokens hold random keys and values, but llama.cpp's, which read a prompt",)


def time_contenders(
    contenders: Sequence[Contender],
    memory: MemoryReader,
    plan: Plan,
    texts: int,
    context: int,
    *,
    read: list[float],
    say: Callable[[str], None],
) -> list[DecodeRow]:
    """The rows of one context; the seconds of each reading of the buffer are added to `read`."""
    first: dict[str, float | None] = {}
    able = [one for one in contenders if texts == 1 or isinstance(one, ModelContender)]
    room = (plan.rounds + 1) * plan.tokens + 1
    for one in able:
        say(f"{one.name}: {context:,} tokens" + (f" x {texts}" if texts > 1 else ""))
        first[one.name] = one.prepare(texts=texts, context=context, room=room, prompt=context <= plan.prompt)
    say(f"decoding after {context:,} tokens" + (f" x {texts}" if texts > 1 else ""))
    by_name = {one.name: one for one in able}
    taken: dict[str, list[Turn]] = {name: [] for name in by_name}
    loop: list[float] = []
    for name, number in turns((MEMORY, *by_name), plan.rounds):
        if name == MEMORY:
            seconds = memory.seconds()
            if number:
                loop.append(seconds)
            continue
        turn = by_name[name].take_turn(plan.tokens)
        if number:
            taken[name].append(turn)
    read += loop
    rows = [row_of(by_name[name], taken, loop, memory.bytes, plan, texts, context, first[name]) for name in by_name]
    for one in able:
        one.forget()
    return rows


def row_of(
    contender: Contender,
    taken: dict[str, list[Turn]],
    loop: list[float],
    size: int,
    plan: Plan,
    texts: int,
    context: int,
    first_token: float | None,
) -> DecodeRow:
    """What the turns of a contender say."""
    against = BASELINE if BASELINE in taken else next(iter(taken))
    times = {name: Times(tuple(turn.seconds / plan.tokens for turn in found)) for name, found in taken.items()}
    worked = Times(tuple(turn.processor_seconds / plan.tokens for turn in taken[contender.name]))
    own, read = times[contender.name], contender.bytes_read()
    # The loop's seconds over the step's, round by round: what disturbs the machine disturbs both.
    share = None if read is None else Times(tuple(loop)).speedup_of(own) * read / size
    return DecodeRow(
        name=contender.name,
        context=context,
        texts=texts,
        milliseconds=1e3 * own.median,
        spread=own.spread,
        tokens_per_second=texts / own.median,
        processor_milliseconds=1e3 * worked.median,
        against=against,
        speedup=times[against].speedup_of(own),
        bytes_read=read,
        bandwidth_share=share,
        first_token_seconds=first_token,
    )
