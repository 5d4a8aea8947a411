"""`megaaccum verify --device gpu`: what it compares, and what it refuses, without a GPU."""

from dataclasses import replace

import pytest

from megaaccum import cli
from megaaccum.config.rules.step import verifies_start
from megaaccum.config.source import read_command_line
from megaaccum.errors import ConfigError
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.verdict import lanes_of
from tests.support.configs import make

KEYS = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, micro_batch_size=1, pp_microbatches=4,
    transformer_impl="transformer_engine", params_dtype="bf16", lr=1e-3, train_iters=10,
)  # fmt: skip


def test_bf16_is_compared_on_a_gpu_whatever_is_configured():
    plain = Case(keys=KEYS | {"params_dtype": "fp32"}, world_size=2)
    assert lanes_of(plain) == ["fp64", "fp32"]
    assert lanes_of(replace(plain, device="gpu")) == ["fp64", "fp32", "bf16"]
    assert lanes_of(replace(plain.changed(plain.keys | {"num_experts": 2}), device="gpu")) == ["fp64", "fp32"]


def test_the_reference_in_float64_has_megatrons_layers():
    """Transformer Engine computes no FP64; the layout's BF16 and the one process beside it have its layers."""
    case = Case(keys=KEYS, world_size=2, device="gpu")
    assert case.one_process("fp64").config.model.transformer_impl == "auto"
    assert case.one_process("bf16").config.model.transformer_impl == "transformer_engine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "gpu"], "--device gpu: torch finds no GPU here; add --dry-run"),
    ],
)
def test_what_cannot_be(words, message, capsys):
    assert cli.main(["verify", "configs/tiny_cpu.yaml", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--steps", "none"], "argument --steps: none: give a whole number of at least 1"),
        (["--dry-run"], "--dry-run: no effect without --device"),
        (["--shrink", "--whole"], "argument --whole: not allowed with argument --shrink"),
        (["--layout", "pp"], "it takes keys such as pp=2,schedule=zbv, but 'pp' is none"),
    ],
)
def test_options_that_cannot_be_read(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", "configs/tiny_cpu.yaml", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--world_size", "4"]])
def test_more_ranks_than_gpus_are_refused(monkeypatch, words):
    """Twice the fewest that the layout allows; the ranks that the file was made for are not doubled."""
    import torch

    from megaaccum.cli import verify

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="has 4 ranks, but this machine has 1 GPUs, one for each rank"):
        verify.main(["configs/tiny_cpu.yaml", "--device", "gpu", *words])


@pytest.mark.parametrize(
    ("keys", "on_gpu", "on_cpu"),
    [({}, True, False), ({"verify_at_start": False}, False, False), ({"verify_at_start": True}, True, True)],
)
def test_the_start_is_verified_on_gpus_unless_that_is_refused(keys, on_gpu, on_cpu):
    config = make(**keys)
    assert (verifies_start(config, on_gpu=True), verifies_start(config, on_gpu=False)) == (on_gpu, on_cpu)


@pytest.mark.parametrize(("word", "value"), [("--verify_at_start", True), ("--no_verify_at_start", False)])
def test_the_key_that_is_open_by_default_is_a_switch(word, value):
    assert read_command_line([word]).values["verify_at_start"] is value


def test_by_default_no_start_is_verified_whose_splits_differ():
    assert not verifies_start(make(rng="megatron", hidden_dropout=0.1), on_gpu=True)
