"""Megatron's pretraining loop with the import changed: what it prints is what Megatron's own objects print."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.megatron_pretrain import EXPERTS, INTERLEAVED, TP2, Run, losses, numbers, pretrained, scales

ROUNDING = 1e-5


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, list[str]]:
    """The lines of each run, of 6 steps with evaluation, or of the last 3 steps after a load."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("ours", "theirs", "interleaved")}
    save = {name: f"--save {folder} --save-interval 3 " for name, folder in folders.items()}
    load = {name: f"--load {folder} --ckpt-step 3 " for name, folder in folders.items()}
    zbv, fsdp2 = dict(schedule="zbv"), dict(backend="fsdp2")
    runs = {
        "theirs": Run(save["theirs"], ours=False),
        "ours": Run(save["ours"]),
        "interleaved": Run(save["interleaved"] + INTERLEAVED),
        "by a provider": Run(provider=True),
        "zbv": Run(INTERLEAVED, keys=zbv),
        "zbv by a provider": Run(INTERLEAVED, keys=zbv, provider=True),
        "dualpipev": Run(INTERLEAVED, keys=dict(schedule="dualpipev")),
        "theirs, resumed": Run(load["theirs"], ours=False),
        "ours, resumed": Run(load["ours"]),
        "interleaved, resumed": Run(load["interleaved"] + INTERLEAVED),
        "resumed under zbv": Run(load["ours"] + INTERLEAVED, keys=zbv),
        "resumed with fsdp2": Run(f"{load['ours']} --save {folders['ours']} --save-interval 5 ", keys=fsdp2),
        "theirs, with our weights": Run(load["ours"] + "--no-load-optim --no-load-rng ", ours=False),
    }
    found = dict(zip(runs, run_ranks(pretrained, 4, list(runs.values()), timeout=200)[-1], strict=True))
    two = {
        "theirs, resumed at dp 1": Run(load["theirs"], ours=False),
        "resumed at dp 1": Run(load["ours"]),
        "interleaved, resumed at dp 1": Run(load["interleaved"] + INTERLEAVED),
        "resumed at dp 1 from fsdp2": Run(f"--load {folders['ours']} --ckpt-step 5 "),
    }
    return found | dict(zip(two, run_ranks(pretrained, 2, list(two.values()), timeout=60)[-1], strict=True))


@pytest.mark.parametrize("name", ["ours", "interleaved", "by a provider"])
def test_all_digits_are_those_of_megatrons_own_ddp(printed, name):
    assert len(printed["theirs"]) == 10
    assert printed[name] == printed["theirs"]


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "zbv by a provider"])
def test_a_v_within_rounding(printed, name):
    assert numbers(printed[name]) == pytest.approx(numbers(printed["theirs"]), rel=ROUNDING)


def test_a_dense_model_under_tensor_parallelism_and_experts_in_a_v():
    """One cell of tests/long/test_pretrain_table.py for each: Megatron's check sets arguments of experts in a dense
    model too, and its log sums the routers' losses over the first chunk's pipeline."""
    in_v = Run(EXPERTS + INTERLEAVED, keys=dict(schedule="dualpipev"))
    runs = [Run(TP2), Run(TP2, ours=False), in_v, Run(EXPERTS, ours=False)]
    tp, their_tp, experts, their_experts = map(numbers, run_ranks(pretrained, 4, runs, timeout=120)[-1])
    assert tp == pytest.approx(their_tp, rel=ROUNDING)
    assert experts == pytest.approx(their_experts, rel=ROUNDING)


@pytest.mark.parametrize("name", ["ours, resumed", "interleaved, resumed"])
def test_resumed_as_megatrons_own(printed, name):
    assert printed[name] == printed["theirs, resumed"]


@pytest.mark.parametrize("name", ["resumed at dp 1", "interleaved, resumed at dp 1"])
def test_resumed_at_another_dp_as_megatrons_own(printed, name):
    assert len(printed["theirs, resumed at dp 1"]) > 3
    assert printed[name] == printed["theirs, resumed at dp 1"]


@pytest.mark.parametrize("name", ["resumed at dp 1", "resumed under zbv", "resumed with fsdp2"])
def test_resumed_at_another_layout(printed, name):
    assert numbers(printed[name]) == pytest.approx(numbers(printed["theirs, resumed"]), rel=ROUNDING)


def test_fully_sharded_weights_are_written_whole(printed):
    """The last step again, from what FSDP2 has written, and the evaluations after it."""
    again = numbers(printed["resumed at dp 1 from fsdp2"])
    assert again == pytest.approx(numbers(printed["theirs, resumed"])[-len(again) :], rel=ROUNDING)


def test_megatron_reads_our_weights(printed):
    """They are in Megatron's own form: its loss of the next batch is the same."""
    (loss, *_), (ours, *_) = numbers(printed["theirs, with our weights"]), numbers(printed["ours, resumed"])
    assert loss == ours


# --- arguments of the optimizer, which is replaced ------------------------------------------------------------------

MATRICES = "--untie-embeddings-and-output-weights --qk-layernorm --weight-decay 0.5 --apply-wd-to-qk-layernorm "
OPTIMIZERS = {
    "decoupled lr": MATRICES + "--decoupled-lr 3e-2 --decoupled-min-lr 1e-3 ",
    "dynamic loss scale": "--fp16 --initial-loss-scale 1024 --min-loss-scale 2 --loss-scale-window 2 --hysteresis 1 ",
    "fixed loss scale": "--fp16 --loss-scale 512 ",
    "muon": MATRICES + "--position-embedding-type rope --no-rope-fusion --optimizer muon --muon-fp32-matmul-prec high ",
}


@pytest.fixture(scope="module")
def optimized() -> dict[tuple[str, bool], list[str]]:
    """The lines of each run, over our objects (True) and over Megatron's."""
    runs = {(name, ours): Run(flags, ours=ours) for name, flags in OPTIMIZERS.items() for ours in (True, False)}
    return dict(zip(runs, run_ranks(pretrained, 4, list(runs.values()), timeout=120)[-1], strict=True))


def test_decoupled_learning_rates_and_decayed_norms_are_megatrons(optimized):
    """Perplexities are exp(loss): their seven digits show the last bit of an FP32 loss, which differs by the CPU."""
    ours, theirs = (optimized["decoupled lr", ours] for ours in (True, False))
    assert len(ours) == 10
    assert [line.partition(" | lm loss PPL")[0] for line in ours] == [
        line.partition(" | lm loss PPL")[0] for line in theirs
    ]
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-6)


@pytest.mark.parametrize("name", ["dynamic loss scale", "fixed loss scale"])
def test_the_loss_scale_is_megatrons(optimized, name):
    ours, theirs = (scales(optimized[name, ours]) for ours in (True, False))
    assert ours == theirs
    assert len(set(ours)) == (4 if name.startswith("dynamic") else 1)
    assert losses(optimized[name, True]) == pytest.approx(losses(optimized[name, False]), rel=1e-3)


def test_muon_is_megatrons(optimized):
    """Printed losses and norms agree with Megatron's Muon, whose matrices are whole at one tensor-parallel rank."""
    ours, theirs = (numbers(optimized["muon", each]) for each in (True, False))
    assert len(ours) == 20
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert losses(optimized["muon", True]) != pytest.approx(losses(optimized["decoupled lr", True]), rel=1e-3)
