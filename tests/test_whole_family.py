"""Every mechanism of ours keeps every promise of the list, and stands in every table: a new one is not forgotten."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from tests.attention.mechanisms import OPTIONS
from tests.golden.mechanisms import VARIANTS as GOLDEN
from tests.model.models import VARIANTS, random_tokens, small_model
from varifocal import MECHANISMS, conformance, make_mechanism
from varifocal.attention.mechanisms.base import Mechanism, typical_equation
from varifocal.bench.field import source_of
from varifocal.bench.rows import has_kernel, rows_of_ours
from varifocal.plan.cost import remembered_bytes
from varifocal.plan.work import work

ROOT = Path(__file__).parent.parent
every_mechanism = pytest.mark.parametrize("name", MECHANISMS.ours)


@every_mechanism
def test_it_has_a_page_a_row_and_an_example(name: str) -> None:
    page = (ROOT / f"docs/mechanisms/{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    assert f'"{name}"' in page[page.index("## Example") :]
    assert f"](docs/mechanisms/{name}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"](mechanisms/{name}.md)" in (ROOT / "docs/README.md").read_text(encoding="utf-8")


@every_mechanism
def test_it_is_in_every_table_of_tests(name: str) -> None:
    assert name in OPTIONS
    assert name in {mechanism for mechanism, _ in VARIANTS.values()}
    assert name in {mechanism for mechanism, _ in GOLDEN.values()}
    assert name in {variant.mechanism for variant in conformance.every_variant().values()}


@every_mechanism
def test_it_has_a_kernel_on_a_cpu_and_a_row_in_the_benchmark(name: str) -> None:
    rows = [options for mechanism, options in rows_of_ours().values() if mechanism == name]
    assert rows
    for options in rows:
        assert has_kernel(make_mechanism(name, **options), "cpu")


@every_mechanism
def test_it_says_what_it_reads_and_from_whom_it_is(name: str) -> None:
    mechanism = make_mechanism(name)
    assert type(mechanism).words is not Mechanism.words
    assert re.search(r"[A-Z]", source_of(mechanism))


@every_mechanism
def test_its_cost_is_planned_and_its_memory_counted(name: str) -> None:
    mechanism = make_mechanism(name)
    found = work(mechanism, 256)
    assert 0 < found.keys_read <= 256
    assert all(math.isfinite(one) and one >= 0 for one in found)
    assert remembered_bytes(mechanism, 4) >= 2 * 4 * 6 * 128
    assert 0 < mechanism.memory().kept(8192) <= 8192


@every_mechanism
def test_a_dense_start_is_a_number_or_none(name: str) -> None:
    kind = MECHANISMS[name]
    mechanism = make_mechanism(name, **kind.dense_options(32))
    mechanism.start_as_dense()
    share = typical_equation(mechanism, 32, seed=0).foreign_share(torch.arange(32))
    assert share is None or 0 <= share < 1


@every_mechanism
@torch.no_grad()
def test_it_decodes_what_it_reads(name: str) -> None:
    variant = next(one for one, (mechanism, _) in VARIANTS.items() if mechanism == name)
    model, tokens = small_model(variant), random_tokens(1, 17)
    whole = model(tokens, use_cache=False).logits
    cache = model(tokens[:, :9], use_cache=True).past_key_values
    steps = [model(tokens[:, one : one + 1], past_key_values=cache).logits for one in range(9, 17)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole[:, 9:], rtol=1e-4, atol=1e-4)
