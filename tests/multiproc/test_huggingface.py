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
CELLS.append(("gpt_oss", "tp2"))
TRAINED = ("llama", "deepseek_v3", "gpt_oss")
STEPS = 8


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


# --- layers that predict further tokens ------------------------------------------------------------------------------


def predicted(folder: str, run: str, layout: str) -> tuple[float, list[str]]:
    """(the loss of the prediction in a step; tensors of an export that are not the folder's)."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megaaccum.pretrain.weights import foreign
    from megaaccum.pretrain.weights.safetensors_folder import Weights
    from megaaccum.pretrain.weights.weights_out import Export

    plan = hf.plan_of(Path(folder), torch.distributed.get_world_size(), *layout.split())
    engine = hf.engine_of(plan)
    foreign.load(engine, Path(folder), vocab_size=hf.VOCAB)
    checkpoint, wrong = engine.save(run), []
    if torch.distributed.get_rank() == 0:
        export = Export(
            checkpoint=checkpoint, config=plan.config, vocab_size=hf.VOCAB, family="deepseek_v3", dtype=torch.float32
        )
        export.write(Path(run) / "exported")
        theirs, ours = Weights(Path(folder)), Weights(Path(run) / "exported")
        names = theirs.files.keys() | ours.files.keys()
        both = theirs.files.keys() & ours.files.keys()
        wrong = [name for name in names if name not in both or not torch.equal(theirs.read(name), ours.read(name))]
    tracker = MTPLossLoggingHelper.tracker
    tracker.clear()
    engine.train_step(hf.own_microbatches(engine))
    return float(tracker["loss_values"].sum()) / len(hf.own_microbatches(engine)) if tracker else 0.0, wrong


def test_prediction_layers_come_in_and_go_out(tmp_path):
    folder = hf.add_prediction(hf.write("deepseek_v3", tmp_path))
    expected = hf.prediction_loss(folder)
    ((loss, wrong),) = run_ranks(predicted, 1, str(folder), str(tmp_path / "one"), "", timeout=100)
    assert wrong == [] and loss == pytest.approx(expected, rel=1e-5)
    layout = "--pipeline_model_parallel_size 2 --expert_model_parallel_size 2"
    found = run_ranks(predicted, 4, str(folder), str(tmp_path / "four"), layout, timeout=100)
    assert all(wrong == [] for _, wrong in found)
    assert max(loss for loss, _ in found) != 0.0
