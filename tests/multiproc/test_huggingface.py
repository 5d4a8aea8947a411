"""Models of transformers' own classes come into every layout and out of it to the bit, with transformers' loss.

Each family meets one layout here, and each layout one family; tests/bank/test_weights.py has every pair.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support import huggingface as hf

CELLS = list(
    zip(("gpt2", "llama", "mistral", "qwen3", "qwen2", "mixtral", "qwen3_moe", "deepseek_v3"), hf.LAYOUTS, strict=True)
)
TRAINED = ("llama", "deepseek_v3")
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family, _ in CELLS:
        hf.write(family, folder, max_shard_size="40KB" if family == "llama" else "5GB")
    return folder


@pytest.fixture(scope="module")
def found(folder) -> dict:
    cells = [(family, layout, STEPS if family in TRAINED else 0) for family, layout in CELLS]
    ranks = run_ranks(hf.round_trips, 4, cells, str(folder), timeout=240)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_a_round_trip_is_bit_equal_and_begins_with_the_models_loss(family, layout, folder, found):
    wrong, loss, _ = found[family, layout]
    assert wrong == []
    assert loss == pytest.approx(hf.loss_of(folder / family), rel=1e-5)


@pytest.mark.parametrize("family", TRAINED)
def test_transformers_has_the_loss_of_what_was_trained_and_exported(family, folder, found, tmp_path):
    layout = dict(CELLS)[family]
    _, first, last = found[family, layout]
    assert last < first - 0.05
    exported = hf.export(family, folder / f"{family}-{layout}", folder / family, tmp_path / "exported")
    assert hf.loss_of(exported) == pytest.approx(last, rel=1e-5)
