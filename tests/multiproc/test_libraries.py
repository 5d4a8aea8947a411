"""Steps of the installed Megatron-core and DeepSpeed beside the truth of one process. A version that steps otherwise
shows itself here, and docs/concepts/found.md has to follow."""

from __future__ import annotations

import json

import pytest

from benchmarks import libraries
from tests.support.snippets import ROOT

FIGURES = json.loads((ROOT / "docs/benchmarks/libraries.json").read_text(encoding="utf-8"))["cells"]
PAGE = (ROOT / "docs/concepts/found.md").read_text(encoding="utf-8")
FAST = (
    "Megatron: dp 4, overlapped",
    "Megatron: pp 2, tied, clipped",
    "Megatron: tp 2, sp, gated, grouped queries",
    "Megatron: cp 2, means",
    "Megatron: experts, ep 2",
    "Megatron: prediction, pp 2, tied",
    "Megatron: frozen matrices, biases trained",
    "DeepSpeed: ZeRO-0, clipped",
    "DeepSpeed: ZeRO-1, unequal tokens",
    "DeepSpeed: ZeRO-2, unequal tokens, weighed",
    "DeepSpeed: ZeRO-2, two forwards a step",
    "DeepSpeed: ZeRO-1, round robin",
    "DeepSpeed: ZeRO-3, coalesced",
    "DeepSpeed: ZeRO-3, forwards first",
    "DeepSpeed: ZeRO-3, tied, clipped",
)


@pytest.fixture(scope="module")
def references() -> dict:
    return {}


@pytest.mark.parametrize("name", FAST)
def test_a_library_steps_as_the_page_says(name, references):
    outcome = libraries.outcome_of(name, references)
    assert outcome.word == ("differs" if libraries.CELLS[name].expected else "agrees"), outcome.words()


def test_every_cell_was_run():
    assert list(FIGURES) == list(libraries.CELLS)
    for name, cell in libraries.CELLS.items():
        assert (FIGURES[name]["outcome"] == "agrees") == (not cell.expected), name


def test_the_page_has_the_table():
    assert libraries.table(FIGURES) in PAGE
