"""The papers' claims about the loss, one by one, beside the largest comparison here that asked the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from varifocal.report.comparison_tables import budget, millions
from varifocal.report.table import Table, markdown
from varifocal.results.comparison import Setting
from varifocal.results.estimates import Difference
from varifocal.results.papers import PaperRow, PaperTable, paper_tables
from varifocal.statistics.comparison import Comparison, loss

Comparisons = Mapping[str, Comparison]
"""Comparisons by the name of their folder."""


@dataclass(frozen=True)
class Claim:
    """A row of a paper's table against another one."""

    table: PaperTable
    row: PaperRow
    against: PaperRow
    """The baseline; for an ablation the mechanism in full."""

    @property
    def name(self) -> str:
        """Our name of the arm."""
        return self.row.mechanism

    @property
    def size(self) -> float:
        """What the paper says the difference in loss is."""
        ours, theirs = (row.number(self.table.loss) for row in (self.row, self.against))
        assert ours is not None
        assert theirs is not None
        return ours - theirs


@dataclass(frozen=True)
class Answer:
    """What one comparison says about a claim."""

    source: str
    comparison: Comparison
    difference: Difference

    @property
    def scale(self) -> int:
        """Parameters times tokens: what makes one comparison larger than another."""
        return self.comparison.setting.parameters[1] * self.comparison.setting.tokens


def claims() -> list[Claim]:
    """Every difference in loss that the papers' tables state, each once."""
    found: dict[tuple[str, str, float], Claim] = {}
    for table in paper_tables():
        rows = {row.mechanism: row for row in table.rows}
        for row in table.rows[1:]:
            claim = Claim(table, row, rows[row.mechanism.partition(".")[0]] if "." in row.mechanism else table.rows[0])
            found.setdefault((claim.name, claim.against.mechanism, claim.size), claim)
    return list(found.values())


def answers(claim: Claim, comparisons: Comparisons) -> list[Answer]:
    """The comparisons of both arms at equal tokens on text, the largest first, those with an interval before others."""
    found = [
        Answer(source, comparison, difference)
        for source, comparison in comparisons.items()
        if comparison.setting.seconds is None and not any(result.recall for result in comparison.results)
        if (difference := comparison.difference(claim.name, claim.against.mechanism, loss)) is not None
    ]
    return sorted(found, key=lambda one: (one.difference.interval is not None, one.scale), reverse=True)


def verdict(claim: Claim, answer: Answer | None) -> str:
    """Where the claim lies, in words that say no more than the interval does."""
    if answer is None:
        return "not run here"
    if answer.difference.interval is None:
        return "one seed: not known"
    low, high = answer.difference.interval
    inside = low <= claim.size <= high
    if inside and not answer.difference.excludes_zero:
        return "inside, and so is no difference: not told apart here"
    if inside:
        return "inside"
    if not answer.difference.excludes_zero:
        return "outside; no such difference here"
    same = (claim.size > 0) == (answer.difference.mean > 0)
    return f"outside; {'the same sign, another size' if same else 'the opposite sign'}"


def claims_table(comparisons: Comparisons) -> Table:
    """Header and rows: every claim with what the largest comparison here says."""
    header = ["claim", "paper", "ours", "95 % interval", "seeds", "scale of ours", "the claim is"]
    body = []
    for claim in claims():
        found = next(iter(answers(claim, comparisons)), None)
        cells = ["", "", "", ""]
        if found is not None:
            interval = found.difference.interval
            cells = [
                f"{found.difference.mean:+.4f}",
                "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
                str(found.difference.count),
                f"{scale(found.comparison.setting)}, {found.source}",
            ]
        body.append([f"`{claim.name}` against `{claim.against.mechanism}`", f"{claim.size:+.3f}", *cells])
        body[-1].append(verdict(claim, found))
    return [header, *body]


def scale(setting: Setting) -> str:
    """Parameters, tokens and context of a comparison."""
    return f"{millions(setting.parameters[1])} parameters, {budget(setting)}, context {setting.length}"


def all_answers_table(comparisons: Comparisons) -> Table:
    """Header and rows: every comparison that says anything about a claim."""
    header = ["", "paper", "comparison", "ours", "95 % interval", "seeds"]
    body = []
    for claim in claims():
        for found in answers(claim, comparisons):
            interval = found.difference.interval
            told = "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"
            named = f"`{claim.name}` against `{claim.against.mechanism}`"
            mean, count = f"{found.difference.mean:+.4f}", str(found.difference.count)
            body.append([named, f"{claim.size:+.3f}", f"{found.source} ({found.comparison.title})", mean, told, count])
    return [header, *body]


def paper_lines() -> list[str]:
    """What each paper trained, a line for each."""
    told: dict[str, str] = {}
    for table in paper_tables():
        told.setdefault(
            table.citation.split(",")[1].strip(),
            f"- {table.citation}: {', '.join(map(' '.join, table.setting.items()))}.",
        )
    return list(told.values())


def papers_page(comparisons: Comparisons, *, command: str) -> str:
    """The page docs/papers.md: claims, what stands against them, and where it is from."""
    sources = [
        f"- {source}: `{one.command}`, commit {one.record.environment.commit}, {one.record.environment.time[:10]}."
        for source, one in comparisons.items()
        if any(found.source == source for claim in claims() for found in answers(claim, comparisons))
    ]
    shown = claims_table(comparisons)
    open_claims = [row[0] for row in shown[1:] if row[-1] in ("not run here", "one seed: not known")]
    parts = [
        "# The papers' claims, one by one",
        f"Made by `{command}`; nothing on this page is typed. Differences are in validation loss, nats a token; below "
        "0 is better. Ours are paired by seed, with the 95 % interval by Student's t. Of several comparisons the "
        "largest with an interval stands here: parameters times tokens, at equal tokens, on text. "
        "Each interval stands for itself: of nine, one in about three such pages misses by chance.",
        markdown(shown),
        "An interval holds for its own scale. Models a hundred times smaller, on a few thousandths of the tokens or "
        "less, neither confirm nor refute a paper: inside says that the claim would not surprise here, outside that an "
        "effect of that size is not seen here. The papers give one run each, some with a spread, none "
        "with paired seeds.",
    ]
    if open_claims:
        parts.append(f"Open here: {', '.join(open_claims)}.")
    parts += ["## What the papers trained", "\n".join(paper_lines())]
    parts += ["## Every comparison that asked", markdown(all_answers_table(comparisons)), "\n".join(sources)]
    return "\n\n".join(parts) + "\n"
