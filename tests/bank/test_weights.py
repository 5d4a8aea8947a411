"""Every family of Hugging Face's models in every layout: to the bit in and out, and transformers' loss before and after
20 steps. tests/multiproc/test_huggingface.py has one cell of each row and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support import huggingface as hf

STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in hf.MODELS:
        hf.write(family, folder)
    return folder


@pytest.mark.parametrize("layout", hf.LAYOUTS)
def test_every_family_in_a_layout(layout, folder, tmp_path):
    cells = [(family, layout, STEPS) for family in hf.MODELS]
    found = run_ranks(hf.round_trips, 4, cells, str(folder), timeout=400)[0]
    for family in hf.MODELS:
        wrong, first, last = found[family, layout]
        assert wrong == [], family
        assert first == pytest.approx(hf.loss_of(folder / family), rel=1e-5), family
        exported = hf.export(family, folder / f"{family}-{layout}", folder / family, tmp_path / family)
        assert last < first and hf.loss_of(exported) == pytest.approx(last, rel=1e-5), family
