"""Megatron's arguments in `pretrain` become a plan, or one error that lists everything that is not supported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaaccum.errors import ConfigError
from megaaccum.loop.pretrain import REFUSED, plan_of
from megaaccum.pretrain.interop.megatron import parser


def args(**changed: Any) -> SimpleNamespace:
    """Arguments as Megatron's parser and its check leave them."""
    given = dict(seq_length=16, micro_batch_size=1, global_batch_size=8, hidden_size=32, lr=1e-3)
    given |= dict(ckpt_format="torch_dist", virtual_pipeline_model_parallel_size=None)
    return SimpleNamespace(**parser.defaults() | given | changed)


def test_the_default_is_zero3():
    plan = plan_of(args(clip_grad=0.5, bf16=True), {})
    sharding = plan.config.sharding
    assert (sharding.backend, sharding.zero_stage, sharding.bf16) == ("deepspeed", 3, True)
    assert (plan.config.optimizer.clip_grad, plan.batch.num_microbatches) == (0.5, 8)


def test_the_distributed_optimizer_stays_megatrons_and_keys_outrank_it():
    given = args(use_distributed_optimizer=True)
    assert plan_of(given, {}).config.sharding.backend == "megatron"
    assert plan_of(given, {"backend": "fsdp2"}).config.sharding.backend == "fsdp2"


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_this_loop_cannot_have(name):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: {REFUSED[name]}"):
        plan_of(args(**{name: True}), {})


def test_everything_at_once():
    with pytest.raises(ConfigError) as error:
        plan_of(args(optimizer="muon", ckpt_format="torch", log_params_norm=True), {})
    assert all(flag in str(error.value) for flag in ("--optimizer muon", "--ckpt-format torch", "--log-params-norm"))
