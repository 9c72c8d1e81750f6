"""The page itself: sections of tables and figures, rendered with the template."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from varifocal.report.analysis import (
    KIND_LEGEND,
    capital,
    findings,
    gain_sentence,
    kind_table,
    quantity_name,
    selection_table,
)
from varifocal.report.attention_bench import memory_table, speedup_table
from varifocal.report.comparison_tables import (
    RECALL_LEGEND,
    cost_legend,
    cost_table,
    legend,
    loss_table,
    our_setting,
    paper_comparisons,
    recall_table,
    scaled_down,
    verdicts,
)
from varifocal.report.focus import cache_table, fact_table, speed_table
from varifocal.report.focus import loss_table as focus_loss_table
from varifocal.report.page.analysis_figures import analysis_figures
from varifocal.report.page.answer import Answer, answer_of, losses_of_map
from varifocal.report.page.bench_figures import PASSES, bench_figures
from varifocal.report.page.drawing import OWN_ID
from varifocal.report.page.figure import Figure
from varifocal.report.page.focus_figures import (
    cost_figure,
    curve_figure,
    facts_figure,
    gates_figure,
    kind_figure,
    map_figure,
    position_figure,
)
from varifocal.report.page.gate_figures import gate_figures
from varifocal.report.page.loss_figures import comparison_figures, run_figure
from varifocal.report.page.sources import FocusFiles, RunFiles, Source
from varifocal.report.table import Table
from varifocal.results.analysis import Analysis
from varifocal.results.attention_bench import AttentionBench
from varifocal.statistics.comparison import Comparison

TEMPLATES = Path(__file__).with_name("templates")
UNFIT = (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
"""What code raises on a file with the right name and the wrong content."""
Made = TypeVar("Made")


@dataclass(frozen=True)
class ShownTable:
    """A table with its title and the line below it."""

    title: str
    rows: Table
    below: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a section; it is folded if it is one of many."""

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[ShownTable, ...] = ()
    figures: tuple[Figure, ...] = ()
    folded: bool = False


@dataclass
class Section:
    """What the page says about one source."""

    title: str
    answer: Answer | None
    setting: str = ""
    notes: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def make_page(sources: Sequence[Source], bench: AttentionBench | None, *, title: str, command: str, made: str) -> str:
    """The whole page as HTML.

    Args:
        sources: what to show, in this order.
        bench: a benchmark of speed and memory against length, if there is one.
        title: the title of the page.
        command: the command that makes the page.
        made: when and with which version it is made.
    """
    require_packages()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    sections = [section_of(source) for source in sources]
    if bench is not None:
        sections.append(bench_section(bench))
    numbers = iter(range(1, 1_000_000))

    def picture(figure: Figure) -> Markup:
        # matplotlib escapes the texts of its SVG; the template escapes everything else on the page.
        return Markup(figure.svg.replace(OWN_ID, f"f{next(numbers)}-"))

    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals["picture"] = picture
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    return templates.get_template("report.html").render(
        title=title,
        style=style,
        sections=sections,
        limits=limits(sources, bench),
        command=command,
        made=made,
    )


def require_packages() -> None:
    """ValueError unless the packages of the extra `report` are installed."""
    missing = [name for name in ("jinja2", "matplotlib") if not importlib.util.find_spec(name)]
    if missing:
        raise ValueError(f"a report needs {' and '.join(missing)}; install with: pip install 'varifocal[report]'")


def section_of(source: Source) -> Section:
    """The section of a comparison, of a run or of a focused model."""
    section = Section(source.title, answer_of(source), notes=list(source.notes))
    if source.focus is not None:
        add_focus(section, source.focus)
        return section
    if source.comparison is not None:
        add_comparison(section, source.comparison)
    else:
        (run,) = source.every_run()
        figure = run_figure(run)
        if figure is not None:
            section.parts.append(Part("Loss", figures=(figure,)))
    add_gates(section, source)
    add_analyses(section, source)
    return section


def add_comparison(section: Section, comparison: Comparison) -> None:
    """Add losses, recall, cost, and the papers' tables beside ours."""
    section.setting = our_setting(comparison)
    line = scaled_down(comparison)
    section.parts.append(
        Part(
            "Loss",
            tuple(verdicts(comparison)),
            (ShownTable("Losses", loss_table(comparison), legend(comparison)),),
            tuple(comparison_figures(comparison)),
        )
    )
    papers = paper_comparisons(comparison)
    if papers:
        tables = [
            ShownTable(paper.name, rows, f"{paper.citation}. {scaled_down(comparison, paper)}")
            for paper, rows in papers
        ]
        section.parts.append(Part("Beside the papers", tables=tuple(tables), folded=True))
    if (recall := recall_table(comparison)) is not None:
        below = f"{line} {RECALL_LEGEND}"
        section.parts.append(Part("Recall by distance", tables=(ShownTable("Right answers", recall, below),)))
    cost = ShownTable("Cost of training", cost_table(comparison), f"{line} {cost_legend(comparison)}")
    section.parts.append(Part("Cost", tables=(cost,), folded=True))


def add_focus(section: Section, files: FocusFiles) -> None:
    """Add the map of a focused model, what it costs, and where."""
    record, measured = files.map, files.measured
    plan = record.fit
    section.setting = (
        f"{plan.get('way')} on {record.texts}, {plan.get('steps')} steps, seed {plan.get('seed')}, window "
        f"{plan.get('window')}, {record.sinks} sinks"
    )
    section.parts.append(Part("The map", figures=(map_figure(record),)))
    found = None if measured is None else losses_of_map(record, measured)
    if measured is not None and found is not None:
        row, dense = found
        costs = (curve_figure(measured), cost_figure(measured), facts_figure(measured, row.name, row.keep))
        tables = [
            ShownTable(title, rows)
            for title, rows in (
                ("Loss of every map against dense", focus_loss_table(measured)),
                ("Facts found, of those that dense finds, by fifth of the text", fact_table(measured)),
                ("Cache", cache_table(measured)),
                ("Speed", speed_table(measured)),
            )
            if len(rows) > 1
        ]
        section.parts.append(Part("What it costs", figures=tuple(one for one in costs if one is not None)))
        places = [one for one in (position_figure(measured, row, dense), kind_figure(measured, row, dense)) if one]
        if places:
            section.parts.append(Part("Where it is lost", figures=tuple(places)))
        section.parts.append(Part("All numbers", tables=tuple(tables), folded=True))
    if (gates := gates_figure(record)) is not None:
        section.parts.append(Part("The fit", figures=(gates,), folded=True))


def add_gates(section: Section, source: Source) -> None:
    """Add what gates did during training, for every arm that has gates."""
    parts: list[Part] = []
    command = None if source.comparison is None else source.comparison.command
    for arm, runs in source.runs.items():
        made = guarded(section, f"the gates of {arm}", partial(gate_figures, arm, runs, command))
        if made is not None and any(made):
            figures, sentences = made
            parts.append(
                Part(f"Gates of {arm} over training", tuple(sentences), figures=tuple(figures), folded=len(parts) > 1)
            )
    if not parts and source.runs:
        section.notes.append("There are no gates to show: no run here left traces of gates, widths or selections.")
    section.parts += parts


def add_analyses(section: Section, source: Source) -> None:
    """Add what `varifocal analyze` found in the models of the runs."""
    parts: list[Part] = []
    for run in source.every_run():
        for file, analysis in run.analyses.items():
            make = partial(analysis_part, run, analysis, folded=len(parts) > 1)
            if (part := guarded(section, str(file), make)) is not None:
                parts.append(part)
    if not parts and source.runs:
        section.notes.append(
            "There is no analysis of what heads read at which tokens: 'varifocal analyze MODEL --data DATA' makes one."
        )
    section.parts += parts


def analysis_part(run: RunFiles, analysis: Analysis, *, folded: bool) -> Part:
    """The sentences, tables and figures of one analysis."""
    tables = [
        ShownTable(f"{capital(quantity_name(name))}, by kind of token", kind_table(quantity.by_kind), KIND_LEGEND)
        for name, quantity in analysis.quantities.items()
    ]
    return Part(
        f"What {run.name} reads, and where its gates differ",
        (f"{analysis.setting()}.", *findings(analysis), gain_sentence(analysis)),
        (*tables, ShownTable("Dense attention recovered, head by head", selection_table(analysis))),
        tuple(analysis_figures(run.name, analysis)),
        folded=folded,
    )


def bench_section(bench: AttentionBench) -> Section:
    """The section of speed and memory against the length of the text."""
    section = Section("Speed and memory against the length of the text", None)
    shared = bench.environment
    section.setting = f"{bench.workload.words}, {shared.threads} threads of {shared.processor}"
    for kind in (one for one in PASSES if one in bench.passes()):
        tables = [ShownTable(f"Speed relative to {bench.baseline}, {PASSES[kind]}", speedup_table(bench, kind))]
        if any(row.peak_bytes for row in bench.of(kind)):
            tables.append(ShownTable(f"Peak additional memory in MB, {PASSES[kind]}", memory_table(bench, kind)))
        figures = tuple(bench_figures(bench, kind)) if kind == "training" else ()
        name = PASSES[kind].capitalize()
        if figures:
            section.parts.append(Part(name, figures=figures))
        section.parts.append(Part(f"{name}: all numbers" if figures else name, tables=tuple(tables), folded=True))
    return section


def guarded(section: Section, what: str, make: Callable[[], Made]) -> Made | None:
    """What `make` returns, or None and a note if the file's content does not fit."""
    try:
        return make()
    except UNFIT as error:
        section.notes.append(f"Not shown: parts of {what} are missing or have another type ({type(error).__name__}).")
        return None


def limits(sources: Sequence[Source], bench: AttentionBench | None) -> Iterator[str]:
    """What the numbers of this page do not show."""
    comparisons = [source.comparison for source in sources if source.comparison is not None]
    if any(len(comparison.record.seeds) == 1 for comparison in comparisons):
        yield "With one seed there is no interval, and no difference in loss can be told from chance."
    if comparisons:
        yield (
            "Models and data here are far smaller than the papers': their numbers are neither confirmed nor refuted. "
            "Whether a difference lasts with more parameters or a longer training is open."
        )
        yield "Every arm ran with the same learning rate and budget; an arm tuned for itself might do better."
        yield (
            "Speed and time of training are those of the cells as they ran, together with whatever else the machine "
            "was doing."
        )
    if any(source.runs or source.comparison for source in sources):
        yield "Intervals over seeds cover weights and data order, not the choice of data, tokenizer or split."
    if any(source.focus is not None for source in sources):
        yield ("The map is one fit with one seed; intervals cover the texts that were measured, not other fits.")
    if any(run.traces for source in sources for run in source.every_run()):
        yield "Gates over training come from the same few validation rows each time; they have no interval over texts."
    if any(run.analyses for source in sources for run in source.every_run()):
        yield (
            "An analysis describes one trained model: its intervals cover documents, not seeds. A gate that differs at "
            "a kind of token need not differ because of that kind."
        )
        yield (
            "Kinds of token come from rules for English text, not from a parser; the worth of far text is measured by "
            "cutting the text short, which is not how the model was trained."
        )
        yield "Attention mass says where a head looks, not what the model would lose without it."
    if bench is not None:
        yield (
            "The benchmark measures attention alone, on the machine that it names; other machines, lengths and sizes "
            "give other results."
        )
    if any(run.summary is None for source in sources for run in source.every_run()):
        yield "Some runs have not finished; what is shown of them is a snapshot, not a result."
