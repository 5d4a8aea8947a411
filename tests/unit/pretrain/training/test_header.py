"""The lines that open a run."""

from __future__ import annotations

import pytest

from megaaccum.platform import gpu
from megaaccum.pretrain.training.header import header
from tests.support.configs import plan


def test_four_lines_of_what_runs() -> None:
    keys = dict(pipeline_model_parallel_size=2, output_dir="out", save_interval=50)
    assert header(plan(4, **keys), sync="deepspeed zero-3 resident", vocab_size=1000, start_step=10).splitlines() == [
        "ranks 4 = pp 2 x dp 2, schedule 1f1b, deepspeed zero-3 resident",
        "model 469,632 parameters (fp32), 8 layers of width 64, vocabulary 1,000",
        "batch 32 sequences of 64 tokens = micro_batch_size 1 * 16 micro-batches * dp 2",
        "run   steps 11 to 100, log in out, checkpoints every 50 steps and at the end in out/checkpoints",
    ]
    assert header(plan(save_at_end=False), sync="deepspeed zero-3 resident", vocab_size=1000, start_step=0).endswith(
        "no checkpoints"
    )


def test_parameters_of_other_layers_are_not_counted() -> None:
    gated = plan()
    gated.config.megatron["attention_output_gate"] = True
    assert "\nmodel uncounted parameters (fp32), 8 layers" in header(gated, sync="ddp", vocab_size=1000, start_step=0)


@pytest.mark.parametrize("start_step", [100, 101])
def test_a_run_that_is_over_has_no_steps(start_step: int) -> None:
    lines = header(plan(output_dir="out"), sync="ddp", vocab_size=1000, start_step=start_step).splitlines()
    assert lines[3].startswith(f"run   no step left after {start_step}, log in out, ")


def test_on_gpus_a_line_of_nccl_and_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "describe", lambda: "NCCL 2.30.1, CUDA_DEVICE_MAX_CONNECTIONS=32")
    last = header(plan(), sync="deepspeed zero-3 resident", vocab_size=1000, start_step=0).splitlines()[-1]
    assert last == "gpu   NCCL 2.30.1, CUDA_DEVICE_MAX_CONNECTIONS=32"


def test_a_verification_of_the_start_and_its_cost() -> None:
    lines = header(plan(verify_at_start=True), sync="deepspeed zero-3 resident", vocab_size=1000, start_step=0)
    assert lines.splitlines()[-1] == (
        "first once in a layout: the gradient of the first step in two splits of its samples, which takes as long as"
        " two steps (verify_at_start false leaves it out)"
    )
