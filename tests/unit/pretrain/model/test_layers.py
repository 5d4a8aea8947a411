"""One function decides the layers; what Megatron is then configured with runs where it is configured."""

import inspect
import itertools
from unittest import mock

import pytest
import torch
from megatron.core.extensions import transformer_engine

from megaaccum.config import resolve
from megaaccum.errors import ConfigError
from megaaccum.model.names import as_in_local_layers
from megaaccum.platform import cpu
from megaaccum.pretrain.model import gpt, layers, machine
from tests.support.configs import make, plan

TE, LOCAL = "transformer_engine", "local"
OWN = ("gpipe", "zb-h1", "zbv", "dualpipev")


@pytest.fixture
def gpu(monkeypatch):
    """The answers of a machine with a GPU and without Transformer Engine."""
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)


def layout(**keys):
    return plan(2, pipeline_model_parallel_size=2, num_layers=8, **keys)


@pytest.mark.parametrize("schedule", ["1f1b", *OWN])
def test_a_gpu_with_transformer_engine_runs_its_layers_under_every_schedule(schedule):
    made = layers.choose(layout(schedule=schedule, bf16=True).config, has_te=True, on_gpu=True)
    assert (made.impl, made.fused_attention, made.delays_wgrad) == (TE, True, schedule in OWN)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_transformer_engine_gets_no_layers_that_are_to_be_exact(dtype):
    """It multiplies FP32 in TF32, and takes no FP64."""
    config = layout(params_dtype=dtype, backend="ddp").config
    assert layers.choose(config, has_te=True, on_gpu=True).impl == LOCAL
    asked = {"transformer_impl": TE, "params_dtype": dtype, "backend": "ddp"}
    if dtype == "fp64":
        with pytest.raises(ConfigError, match="take no fp64 parameters: set transformer_impl to auto"):
            layout(**asked)
    else:
        assert layers.choose(layout(**asked).config, has_te=True, on_gpu=True).impl == TE


@pytest.mark.parametrize(
    ("keys", "on_gpu", "fused"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"schedule": "zbv"}, True, True),
        ({"attention_backend": "unfused"}, True, False),
        ({"attention_backend": "fused"}, False, True),
        ({"transformer_impl": LOCAL}, True, True),
    ],
)
def test_without_it_attention_keeps_no_scores_on_a_gpu(keys, on_gpu, fused):
    made = layers.choose(layout(**keys).config, has_te=False, on_gpu=on_gpu)
    assert (made.impl, made.fused_attention, made.delays_wgrad) == (LOCAL, fused, False)


def test_backends_that_cannot_follow_a_delayed_gradient_get_local_layers():
    made = layers.choose(layout(schedule="zb-h1", backend="fsdp2").config, has_te=True, on_gpu=True)
    assert (made.impl, made.fused_attention) == (LOCAL, True)


# --- what Megatron is given on a GPU ---------------------------------------------------------------------------------

KINDS = [dict(swiglu=True), dict(squared_relu=True), dict()]


@pytest.mark.parametrize(
    ("activation", "bias", "dtype"), itertools.product(KINDS, (True, False), ("fp32", "bf16", "fp16"))
)
def test_megatron_accepts_every_activation_on_a_gpu(gpu, activation, bias, dtype):
    config = gpt.transformer_config(plan(params_dtype=dtype, add_bias_linear=bias, **activation))
    assert config.bias_activation_fusion == (not activation.get("squared_relu") and (bias or "swiglu" in activation))
    assert not config.batch_p2p_sync
    assert not config.masked_softmax_fusion  # apex has it, and is not here


def test_the_fused_softmax_is_taken_where_it_can_be_imported(gpu):
    with mock.patch("importlib.util.find_spec", lambda name: name if "softmax_cuda" in name else None):
        assert gpt.transformer_config(plan()).masked_softmax_fusion
        assert not gpt.transformer_config(plan(reset_attention_mask=True)).masked_softmax_fusion
        assert not gpt.transformer_config(plan(masked_softmax_fusion=False)).masked_softmax_fusion


def test_kernels_that_are_switched_off_are_off(gpu):
    config = gpt.transformer_config(plan(swiglu=True, bias_swiglu_fusion=False, bias_dropout_fusion=False))
    assert not config.bias_activation_fusion
    assert not config.bias_dropout_fusion


def test_a_kernel_of_transformer_engines_is_refused_without_it(gpu):
    asked = plan(apply_rope_fusion=True, position_embedding_type="rope")
    with pytest.raises(ConfigError, match="apply_rope_fusion is a kernel of Transformer Engine's layers"):
        machine.check_machine(asked)


def test_the_flex_dispatcher_is_refused_without_its_library(gpu, monkeypatch):
    asked = plan(num_experts=4, add_bias_linear=False, moe_token_dispatcher_type="flex")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None if name == "deep_ep" else name)
    with pytest.raises(ConfigError, match=r"needs GPUs and the module deep_ep.*to alltoall"):
        machine.check_machine(asked)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    machine.check_machine(asked)


def test_a_stage_that_streams_is_built_in_host_memory(gpu):
    assert gpt.transformer_config(plan(sync="streaming")).use_cpu_initialization
    assert not gpt.transformer_config(plan(sync="resident")).use_cpu_initialization


def test_documents_are_packed_or_refused(gpu, monkeypatch):
    predicts = dict(reset_attention_mask=True, mtp_num_layers=1, position_embedding_type="rope")
    machine.check_machine(plan(**predicts))
    with pytest.raises(ConfigError, match="transformer_impl to auto"):
        machine.check_machine(plan(transformer_impl=TE))
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    machine.check_machine(plan(reset_attention_mask=True, bf16=True))
    with pytest.raises(ConfigError, match=r"packs the rows.*but mtp_num_layers stops predicting.*to local"):
        machine.check_machine(plan(**predicts, bf16=True))
    machine.check_machine(resolve(make(**predicts, transformer_impl=LOCAL), world_size=1))


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0.input_layernorm.weight"),
        ("mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_bias",
         "mtp.layers.0.transformer_layer.pre_mlp_layernorm.bias"),
        ("decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight",
         "decoder.layers.1.self_attention.q_layernorm.weight"),
        ("decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight",
         "decoder.layers.1.self_attention.kv_layernorm.weight"),
        ("decoder.layers.2.mlp.experts.linear_fc2.weight3",
         "decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"),
        ("decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
         "decoder.layers.2.mlp.shared_experts.linear_fc1.weight"),
        ("decoder.layers.2.self_attention.linear_qkv.bias", "decoder.layers.2.self_attention.linear_qkv.bias"),
    ],
)  # fmt: skip
def test_names_are_those_of_local_layers(fused, parts):
    assert as_in_local_layers(fused) == parts


# --- signatures ------------------------------------------------------------------------------------------------------


def test_functions_of_megatron_take_what_they_are_given():
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = {"tokens": torch.zeros(1, 4)}
    inspect.signature(get_batch_on_this_cp_rank).bind(batch, is_hybrid_cp=False, cp_group=None)
    keys = (
        "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size forward_only"
        " p2p_communicator pg_collection"
    ).split()
    for function in (
        schedules.forward_backward_no_pipelining,
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
    ):
        inspect.signature(function).bind(**dict.fromkeys(keys))
    inspect.signature(schedules.forward_step).bind(
        *range(9), None, current_microbatch=0, vp_stage=None, is_last_stage=True
    )
    inspect.signature(schedules.forward_step_calc_loss).bind(*range(10))
