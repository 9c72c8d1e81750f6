"""Maps of all shares measured side by side on the same tokens: fitted ones beside chance and whole layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varifocal.environment import environment
from varifocal.model import load_model
from varifocal.results.focus import FocusMap, FocusMeasure, MapFacts, MapLosses, MapRuler
from varifocal.retrofit.focus.decide import (
    Map,
    heads_of_share,
    keep_at_random,
    keep_highest,
    keep_layers_in_turn,
    share_of,
)
from varifocal.retrofit.focus.fit import FitPlan
from varifocal.retrofit.focus.focusing import Opened, open_dense
from varifocal.retrofit.focus.gates import GatedModel
from varifocal.retrofit.focus.measure import facts_found, loss_by_position, questions
from varifocal.retrofit.focus.ruler import TASKS, RulerRow, require_lm_eval, ruler_answer, ruler_rows, ruler_score
from varifocal.retrofit.focus.texts import FactRow, Library

SHARES = (1 / 2, 1 / 3, 1 / 4)
DEPTHS = 10
STRETCHES = 16
"""Into so many a document's loss is divided."""
FACT_DOCUMENTS = 40
"""Documents that facts are planted into."""
DENSE = "dense"
Kinds = Callable[[Tensor, Any], Mapping[str, Tensor]]
"""From tokens [N, T] and their tokenizer to which of them [N, T] are of each kind."""


def no_kinds(rows: Tensor, tokenizer: Any) -> Mapping[str, Tensor]:
    """For those who do not ask."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Which maps are measured, and on what."""

    length: int = 2048
    documents: int = 16
    """Of each source of texts; 0 for none."""
    questions: int = 30
    """Facts asked for at each of `fact_lengths`; 0 for none."""
    fact_lengths: tuple[int, ...] = (1024, 2048)
    shares: tuple[float, ...] = SHARES
    rival_shares: tuple[float, ...] = SHARES
    """Where chance and whole layers are measured too."""
    random_maps: int = 1
    ruler: int = 0
    """Questions of each of RULER's tasks at each of `ruler_lengths`; 0 for none."""
    ruler_lengths: tuple[int, ...] = (2048,)
    curve_length: int = 0
    """Tokens of the texts on which the dense model's own loss by position is measured; 0 for none."""
    curve_documents: int = 8
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Contestant:
    """A model and what its heads read."""

    name: str
    gated: GatedModel
    full: Map
    adapted: bool = False
    """Whether its weights were trained further."""

    @property
    def keep(self) -> float:
        return round(share_of(self.full), 4)

    @property
    def heads(self) -> str:
        """1 for each key head that reads everything, layer by layer."""
        return "".join("1" if head else "0" for layer in self.full for head in layer)

    @contextmanager
    def reading(self) -> Iterator[GatedModel]:
        """Inside the block the model reads so."""
        with self.gated.reading("everything") if self.name == DENSE else self.gated.by_map(self.full):
            yield self.gated


class Journal:
    """A result that grows, written to its file after every addition: what is in it is not measured again."""

    def __init__(self, result: FocusMeasure, file: Path | None) -> None:
        self.result, self.file = result, file

    @classmethod
    def open(cls, file: Path | None, fresh: FocusMeasure) -> Journal:
        """Goes on with a file that is there; ValueError if it is of another model or seed."""
        if file is None or not file.is_file():
            return cls(fresh, file)
        found = FocusMeasure.read(file)
        for what in ("source", "window", "sinks", "seed"):
            if getattr(found, what) != getattr(fresh, what):
                raise ValueError(
                    f"{file} holds measurements with the {what} {getattr(found, what)}, and {getattr(fresh, what)} is "
                    "asked for; give another --json"
                )
        return cls(replace(found, environment=fresh.environment), file)

    def change(self, **fields: Any) -> None:
        """Put these fields in place of what they were."""
        self.result = replace(self.result, **fields)
        if self.file is not None:
            self.result.write(self.file)

    def losses_of(self, one: Contestant, texts: str, length: int) -> MapLosses:
        """What is known of a contestant on some texts; a row without documents if nothing is."""
        fresh = MapLosses(name=one.name, keep=one.keep, texts=texts, length=length, heads=one.heads, documents=())
        same = [row for row in self.result.losses if key_of_losses(row) == key_of_losses(fresh)]
        self.check_heads(same, fresh)
        return same[0] if same else fresh

    def facts_of(self, one: Contestant, length: int) -> MapFacts:
        """What is known of a contestant's facts; a row without any if nothing is."""
        fresh = MapFacts(name=one.name, keep=one.keep, length=length, heads=one.heads, depths=(), found="")
        same = [row for row in self.result.facts if key_of_facts(row) == key_of_facts(fresh)]
        self.check_heads(same, fresh)
        return same[0] if same else fresh

    def ruler_of(self, one: Contestant, task: str, length: int) -> MapRuler:
        """What is known of a contestant at one of RULER's tasks; a row without scores if nothing is."""
        fresh = MapRuler(name=one.name, keep=one.keep, task=task, length=length, heads=one.heads, scores=())
        same = [row for row in self.result.ruler if key_of_ruler(row) == key_of_ruler(fresh)]
        self.check_heads(same, fresh)
        return same[0] if same else fresh

    def check_heads(
        self, known: Sequence[MapLosses | MapFacts | MapRuler], fresh: MapLosses | MapFacts | MapRuler
    ) -> None:
        """ValueError if what is known is of other heads."""
        if known and known[0].heads != fresh.heads:
            raise ValueError(
                f"{self.file} holds measurements of another map named {fresh.name!r} at a share of {fresh.keep:.2f}; "
                "give another --json"
            )

    def put_losses(self, row: MapLosses) -> None:
        """Add a row, or put it in the place of the one that it continues."""
        self.change(losses=put(self.result.losses, row, key_of_losses))

    def put_facts(self, row: MapFacts) -> None:
        """Add a row, or put it in the place of the one that it continues."""
        self.change(facts=put(self.result.facts, row, key_of_facts))

    def put_ruler(self, row: MapRuler) -> None:
        """Add a row, or put it in the place of the one that it continues."""
        self.change(ruler=put(self.result.ruler, row, key_of_ruler))


def key_of_losses(row: MapLosses) -> tuple[object, ...]:
    """What tells rows of losses apart."""
    return row.name, row.keep, row.texts, row.length


def key_of_facts(row: MapFacts) -> tuple[object, ...]:
    """What tells rows of facts apart."""
    return row.name, row.keep, row.length


def key_of_ruler(row: MapRuler) -> tuple[object, ...]:
    """What tells rows of RULER apart."""
    return row.name, row.keep, row.task, row.length


def put(rows: tuple[Any, ...], new: Any, key: Callable[[Any], object]) -> tuple[Any, ...]:
    """The rows with a new one, in the place of the one with its key or at the end."""
    if any(key(row) == key(new) for row in rows):
        return tuple(new if key(row) == key(new) else row for row in rows)
    return (*rows, new)


class Texts:
    """A source of documents, by its name."""

    def __init__(self, name: str, documents: Callable[[], Iterable[str]]) -> None:
        self.name, self.documents = name, documents


OnCount = Callable[[str, int, int], None]


def measure_texts(
    opened: Opened,
    maps: Sequence[Contestant],
    sources: Sequence[Texts],
    wanted: Measuring,
    journal: Journal,
    *,
    kinds: Kinds = no_kinds,
    on_count: OnCount = lambda what, done, total: None,
) -> None:
    """Losses, the dense model's curve, and facts of all contestants; the first of them is dense.

    Documents are the outer loop, so that whatever was measured before an interruption can be compared.

    Args:
        opened: the model with the gates of the fit.
        maps: what is measured.
        sources: long documents, others than those of the fit; facts are planted into the last one's.
        wanted: how much of what.
        journal: where results go.
        kinds: which tokens are of which kind, to tell what is lost where.
        on_count: called with what is measured, how much of it is done, and how much there is.
    """
    longest = max(
        wanted.length if wanted.documents else 0,
        max(wanted.fact_lengths) if wanted.questions else 0,
        wanted.curve_length,
    )
    check_length(opened, longest)
    dense = maps[:1]
    for source in sources:
        if wanted.curve_length:
            measure_losses(
                opened, dense, source, wanted.curve_length, wanted.curve_documents, journal, on_count=on_count
            )
        if wanted.documents:
            measure_losses(
                opened, maps, source, wanted.length, wanted.documents, journal, kinds=kinds, on_count=on_count
            )
    if wanted.questions:
        library = Library(
            sources[-1].documents(), opened.tokenizer, least=max(wanted.fact_lengths), most=FACT_DOCUMENTS
        )
        repeats = -(-wanted.questions // DEPTHS)
        for length in wanted.fact_lengths:
            asked = questions(library, (length,), depths=DEPTHS, repeats=repeats, seed=wanted.seed)
            measure_facts(maps, asked, length, journal, on_count=on_count)


def measure_losses(
    opened: Opened,
    maps: Sequence[Contestant],
    source: Texts,
    length: int,
    documents: int,
    journal: Journal,
    *,
    kinds: Kinds = no_kinds,
    on_count: OnCount,
) -> None:
    """The loss of all contestants on so many documents."""
    known = [journal.losses_of(one, source.name, length) for one in maps]
    if all(len(row.documents) >= documents for row in known):
        return
    library = Library(source.documents(), opened.tokenizer, least=length, most=documents)
    rows = library.passages(length, documents)
    done = sum(min(len(row.documents), documents) for row in known)
    for number, tokens in enumerate(rows):
        flags = kinds(tokens[None], opened.tokenizer)
        for one in maps:
            row = journal.losses_of(one, source.name, length)
            if len(row.documents) > number:
                continue
            with one.reading() as gated:
                losses = loss_by_position(gated, tokens[None])[0]
            stretches = tuple(round(float(part.double().mean()), 6) for part in losses.tensor_split(STRETCHES))
            row = replace(row, documents=(*row.documents, stretches))
            journal.put_losses(with_kinds(row, losses, flags))
            done += 1
            on_count(f"loss on {source.name} at {length}", done, documents * len(maps))


def with_kinds(row: MapLosses, losses: Tensor, kinds: Mapping[str, Tensor]) -> MapLosses:
    """A row with the losses [T - 1] of its last document by kind of token; kinds begin with the first document."""
    if not kinds or (len(row.documents) > 1 and row.kinds is None):
        return row
    known, counts = dict(row.kinds or {}), dict(row.kind_tokens or {})
    for kind, flags in kinds.items():
        # The loss at a place is that of the token after it.
        those = losses[flags[0, 1:]]
        mean = round(float(those.double().mean()), 6) if len(those) else None
        known[kind] = (*known.get(kind, ()), mean)
        counts[kind] = counts.get(kind, 0) + len(those)
    return replace(row, kinds=known, kind_tokens=counts)


def measure_facts(
    maps: Sequence[Contestant], asked: Sequence[FactRow], length: int, journal: Journal, *, on_count: OnCount
) -> None:
    """Which facts all contestants find."""
    done = sum(min(len(journal.facts_of(one, length).found), len(asked)) for one in maps)
    for number, question in enumerate(asked):
        for one in maps:
            row = journal.facts_of(one, length)
            if len(row.found) > number:
                continue
            with one.reading() as gated:
                answer = facts_found(gated, [question])[0]
            journal.put_facts(
                replace(row, depths=(*row.depths, round(answer.depth, 4)), found=row.found + "01"[answer.found])
            )
            done += 1
            on_count(f"facts at {length}", done, len(asked) * len(maps))


def measure_ruler(
    opened: Opened,
    maps: Sequence[Contestant],
    wanted: Measuring,
    journal: Journal,
    *,
    on_count: OnCount = lambda what, done, total: None,
) -> None:
    """What all contestants answer to RULER's questions."""
    require_lm_eval()
    check_length(opened, max(wanted.ruler_lengths))
    for length in wanted.ruler_lengths:
        for task in TASKS:
            rows = ruler_rows(task, opened.tokenizer, length=length, count=wanted.ruler, seed=wanted.seed)
            answer_ruler(opened, maps, task, length, rows, journal, on_count=on_count)


def answer_ruler(
    opened: Opened,
    maps: Sequence[Contestant],
    task: str,
    length: int,
    rows: Sequence[RulerRow],
    journal: Journal,
    *,
    on_count: OnCount,
) -> None:
    """What all contestants answer to one task."""
    done = 0
    for number, row in enumerate(rows):
        for one in maps:
            known = journal.ruler_of(one, task, length)
            if len(known.scores) <= number:
                with one.reading() as gated:
                    score = ruler_score(ruler_answer(gated.model, opened.tokenizer, row), row.wanted)
                journal.put_ruler(replace(known, scores=(*known.scores, round(score, 4))))
            done += 1
            on_count(f"RULER, {task} at {length}", done, len(rows) * len(maps))


def open_measured(folder: Path, source: str | Path) -> tuple[Opened, FocusMap]:
    """The dense model and the map of a focused one; ValueError if the map is not of this model."""
    record = FocusMap.read(folder / FocusMap.filename)
    opened = open_dense(source, fit_plan(record))
    check_map(record, folder, opened, source)
    return opened, record


def check_map(record: FocusMap, folder: Path, opened: Opened, source: str | Path) -> None:
    """ValueError unless the map is of this model."""
    heads = opened.gated.layers * opened.gated.kv_heads
    if len(record.heads) != heads:
        raise ValueError(
            f"{source} has {heads} key heads, and {folder / FocusMap.filename} is a map of {len(record.heads)}; give "
            "the model that was focused"
        )


def contestants(
    opened: Opened, records: Sequence[tuple[Path, FocusMap]], wanted: Measuring, *, source: str | Path
) -> list[Contestant]:
    """Dense, every record's scores at all shares (an adapted model as it is), chance, layers in turn, all windowed."""
    gated = opened.gated
    layers, heads = gated.layers, gated.kv_heads
    every = layers * heads
    found = [Contestant(DENSE, gated, ((True,) * heads,) * layers)]
    taken: set[str] = set()
    for folder, record in records:
        check_map(record, folder, opened, source)
        name = name_of(record)
        if name in taken:
            raise ValueError(f"two maps are named {name!r}, the second in {folder}; leave one out")
        taken.add(name)
        if record.adaptation is not None:
            windows = [one.window for one in record.heads]
            full = tuple(
                tuple(window is None for window in windows[layer * heads : (layer + 1) * heads])
                for layer in range(layers)
            )
            first = gated.gates[0].config
            trained = GatedModel(load_model(folder), window=first.window, sinks=first.sinks)
            found.append(Contestant(name, trained, full, adapted=True))
            continue
        scores = torch.tensor([one.score for one in record.heads]).view(layers, heads)
        found += [
            Contestant(name, gated, keep_highest(scores, heads_of_share(share, every))) for share in wanted.shares
        ]
    for share in wanted.rival_shares:
        count = heads_of_share(share, every)
        for number in range(wanted.random_maps):
            name = "random" if number == 0 else f"random {number + 1}"
            found.append(Contestant(name, gated, keep_at_random(layers, heads, count, wanted.seed + number)))
        found.append(Contestant("layers in turn", gated, keep_layers_in_turn(layers, heads, count)))
    if wanted.rival_shares:
        found.append(Contestant("all windowed", gated, ((False,) * heads,) * layers))
    return found


def name_of(record: FocusMap) -> str:
    """What a map is called in a result: its way, and what is not usual about its fit."""
    said = str(record.fit["way"])
    if record.fit.get("gates", "static") != "static":
        said += f", {record.fit['gates']} gates"
    if record.fit["seed"]:
        said += f", seed {record.fit['seed']}"
    if record.adaptation is not None:
        rank = record.adaptation.get("lora")
        said += ", adapted" if rank is None else f", adapted by LoRA {rank}"
    return said


def fresh_result(opened: Opened, source: str, seed: int) -> FocusMeasure:
    """A result that nothing is measured for yet."""
    first = opened.gated.gates[0].config
    return FocusMeasure(
        source=source, window=first.window, sinks=first.sinks, seed=seed, environment=environment()
    )  # fmt: skip


def fit_plan(record: FocusMap) -> FitPlan:
    """The plan that a map was made by."""
    try:
        return FitPlan(**{**record.fit, "lengths": tuple(record.fit["lengths"])})
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the fit of a head map cannot be read: {error}; make the map again") from error


def check_length(opened: Opened, length: int) -> None:
    """ValueError if texts are longer than what the model was made for."""
    most = opened.gated.model.config.max_position_embeddings
    if length > most:
        raise ValueError(f"the model reads {most} tokens, and texts of {length} are to be measured; give shorter ones")
