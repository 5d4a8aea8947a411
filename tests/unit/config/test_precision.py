"""The precision of a run that gives none follows the device; one that gives it means the same everywhere."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from megaaccum.config import Plan, precision
from megaaccum.pretrain.interop.load import load
from tests.support.check import run
from tests.support.configs import SMALL, plan

H100, T4 = (9, 0), (7, 5)
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    return lambda capability: monkeypatch.setattr(precision, "compute_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "dtype", "why"),
    [(H100, "bf16", "has BF16 (compute capability 9.0)"), (T4, "fp32", "7.5 has no BF16"), (None, "fp32", "no NVIDIA")],
)
def test_it_follows_the_device_and_says_so(capability, dtype, why, device) -> None:
    device(capability)
    made = plan()
    assert made.config.sharding.params_dtype == dtype
    assert made.config.sharding.bf16 == (dtype == "bf16")
    assert any(note.startswith(f"params_dtype {dtype}") and why in note for note in made.notes)


def test_check_prints_it(device) -> None:
    device(H100)
    text = run(None, [word for key, value in SMALL.items() for word in (f"--{key}", str(value))])
    assert "parameters bf16, gradients added in fp32 and reduced in fp32, optimizer in fp32" in text
    assert "params_dtype bf16: no precision is given, and this machine's GPU has BF16" in text


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [({"bf16": False}, "fp32"), ({"params_dtype": "fp32"}, "fp32"), ({"fp16": True}, "fp16"), ({"bf16": True}, "bf16")],
)
def test_a_precision_that_is_given_stays(keys, dtype, device) -> None:
    for capability in (H100, None):
        device(capability)
        made = plan(**keys)
        assert made.config.sharding.params_dtype == dtype
        assert not any("no precision" in note for note in made.notes)


def test_a_model_of_the_users_own_stays_as_it_is(device) -> None:
    device(H100)
    made = Plan.of(batch=dict(micro_batch_size=1, seq_length=16, grad_accum_steps=2), world_size=1)
    assert made.config.sharding.params_dtype == "fp32"


def test_lists_of_other_programs_keep_their_meaning(device, tmp_path: Path) -> None:
    device(H100)
    flags = tmp_path / "flags.txt"
    flags.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
        " --micro-batch-size 1 --train-iters 10 --lr 1e-3 --vocab-size 64 --tokenizer-type NullTokenizer"
    )
    assert load(flags).sharding.params_dtype == "fp32"
    assert load(flags, ["--bf16"]).sharding.bf16
    assert plan(deepspeed={"zero_optimization": {"stage": 3}}).config.sharding.params_dtype == "fp32"
    assert plan(deepspeed={"bf16": {"enabled": "auto"}}).config.sharding.params_dtype == "bf16"
    assert plan(deepspeed={"bf16": {"enabled": False}}).config.sharding.params_dtype == "fp32"


def test_every_shipped_configuration_gives_its_own() -> None:
    given = {path.stem: load(path).sharding.bf16 for path in CONFIGS.glob("*.yaml") if precision.is_given(load(path))}
    assert given == {path.stem: path.stem != "tiny_cpu" for path in CONFIGS.glob("*.yaml")}


class Driver:
    """NVML on a machine with an H100."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        return 0 if index == 0 else 2

    def nvmlDeviceGetCudaComputeCapability(self, handle: object, major, minor) -> int:
        major._obj.value, minor._obj.value = H100
        return 0


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert precision.compute_capability() == H100
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert precision.compute_capability() is None
