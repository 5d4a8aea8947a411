"""The values that reach Megatron's configuration of the model, and the optimizer's groups that follow from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megaaccum.config import Plan, resolve
from megaaccum.errors import ConfigError
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.model import names
from megaaccum.optim import adamw, lr_schedule
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.model import gpt, layers, machine
from megaaccum.pretrain.model.local_norm import Norm
from tests.support.configs import make


def plan_with(megatron: dict[str, object], **keys: object) -> Plan:
    config = make(transformer_impl="local", **keys)
    config.megatron = megatron
    return resolve(config, world_size=1)


def test_fields_of_the_configuration_reach_megatrons():
    fields = {"layernorm_zero_centered_gamma": True, "attention_output_gate": True, "yarn_beta_fast": 16.0}
    built = gpt.transformer_config(plan_with(fields))
    assert {name: getattr(built, name) for name in fields} == fields


def test_queries_of_latent_attention_are_compressed_if_asked():
    """Megatron-LM's flags mean the same, and the planner counts so; Megatron-core's default is a rank of 512."""
    keys = dict(multi_latent_attention=True, position_embedding_type="rope", kv_lora_rank=16)
    assert gpt.transformer_config(plan_with({}, **keys)).q_lora_rank is None
    assert gpt.transformer_config(plan_with({}, q_lora_rank=8, **keys)).q_lora_rank == 8


def test_a_field_that_megatron_refuses_is_one_error():
    with pytest.raises(ConfigError, match="megatron-core refuses this model"):
        gpt.transformer_config(plan_with({"use_mup": True, "mup_base_hidden_size": -1}))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_zero_centred_norm_adds_one_to_its_weight(kind):
    plain = gpt.transformer_config(plan_with({}, normalization=kind))
    centred = gpt.transformer_config(plan_with({"layernorm_zero_centered_gamma": True}, normalization=kind))
    one, zero = Norm(plain, 8), Norm(centred, 8)
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    with torch.no_grad():
        one.weight.copy_(weight)
        zero.weight.copy_(weight - 1)
    torch.testing.assert_close(zero(hidden), one(hidden))


NAMES = {
    "embedding.word_embeddings.weight": 2,
    "decoder.layers.0.mlp.linear_fc1.weight": 2,
    "decoder.layers.0.mlp.linear_fc1.bias": 1,
    "decoder.layers.0.self_attention.q_layernorm.weight": 1,
    "output_layer.weight": 2,
}


def groups_of(plan: Plan) -> dict[str, dict]:
    params = [(name, torch.nn.Parameter(torch.ones([4] * dim))) for name, dim in NAMES.items()]
    groups = lr_schedule.param_groups(
        params,
        0.1,
        decoupled=adamw.decoupled_rates(plan.config),
        hidden=adamw.hidden_rates(plan.config),
        decay_qk_norms=plan.config.optimizer.apply_wd_to_qk_layernorm,
    )
    schedule = lr_schedule.build(SimpleNamespace(param_groups=groups), plan.config, plan.ramp)
    schedule.step(0)
    return {name: group for group in groups for name in group["param_names"]}


def test_embedding_and_head_have_a_learning_rate_of_their_own():
    by_name = groups_of(plan_with({}, decoupled_lr=5e-4, lr=1e-3))
    assert [by_name[name]["lr"] for name in NAMES] == [5e-4, 1e-3, 1e-3, 1e-3, 5e-4]


def test_norms_of_queries_and_keys_decay_where_they_are_asked_to():
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert groups_of(plan_with({}))[name]["wd_mult"] == 0.0
    assert groups_of(plan_with({}, apply_wd_to_qk_layernorm=True))[name]["wd_mult"] == 1.0


def rates_by_width() -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """(ours, those of Megatron's overrides) of each parameter of a chunk that has the marks of Megatron's model."""
    from megatron.core.optimizer import get_mup_config_overrides
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    plan = plan_with(
        {"use_mup": True, "mup_base_hidden_size": 32},
        lr=1e-3, hidden_size=64, untie_embeddings_and_output_weights=True, qk_layernorm=True, mtp_num_layers=1,
        position_embedding_type="rope",
    )  # fmt: skip
    overrides = get_mup_config_overrides(OptimizerConfig(lr=1e-3, min_lr=0.0, adam_eps=1e-8), 2.0)
    named = list(names.named_parameters([chunk_of(plan)]))
    groups = lr_schedule.param_groups(named, 0.1, hidden=adamw.hidden_rates(plan.config))
    lr_schedule.build(SimpleNamespace(param_groups=groups), plan.config, plan.ramp).step(0)
    found = {}
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            theirs: dict = {"max_lr": 1e-3, "eps": 1e-8}
            for key, override in overrides.items():
                theirs |= override if key.matches(param, name) else {}
            ours = {"max_lr": group["lr"], "eps": group.get("eps", 1e-8)}
            found[name] = (ours, {key: theirs[key] for key in ours})
    return found


def chunk_of(plan: Plan) -> torch.nn.Module:
    """The model of a plan for one rank, inside it."""
    from megaaccum.distributed import groups

    built = groups.build(plan.layout, timeout_minutes=1)
    gpt.seed_dropout(built, seed=1)
    return gpt.build_chunk(plan, built, gpt.transformer_config(plan), 64, 0)


def test_learning_rates_by_width_are_those_of_megatrons_overrides():
    """Matrices between embedding and head get lr and eps divided by the width's multiple."""
    (found,) = run_ranks(rates_by_width, 1)
    assert all(ours == theirs for ours, theirs in found.values()), found
    assert {name.split(".")[0] for name, (ours, _) in found.items() if ours["max_lr"] == 5e-4} == {"decoder", "mtp"}
    assert found["output_layer.weight"][0]["max_lr"] == 1e-3


def norms_of_queries() -> set[str]:
    """The classes of the norms of queries, of the decoder and of a layer that predicts further tokens."""
    chunk = chunk_of(plan_with({"qk_l2_norm": True}, mtp_num_layers=1, position_embedding_type="rope"))
    return {type(each).__name__ for name, each in chunk.named_modules() if name.endswith("q_layernorm")}


def test_queries_have_their_norm_in_every_layer():
    assert run_ranks(norms_of_queries, 1) == [{"L2Norm"}]


def test_models_that_need_kernels_are_refused_where_there_are_none():
    for fields in ({"hybrid_layer_pattern": "M*M*M*M*"}, {"experimental_attention_variant": "gated_delta_net"}):
        with pytest.raises(ConfigError, match="needs a GPU with Transformer Engine"):
            machine.check_machine(plan_with(fields))


def test_windows_of_sequences_that_are_cut_need_transformer_engine():
    keys = make(transformer_impl="local", context_parallel_size=2)
    keys.megatron = {"window_size": (4, 0)}
    with pytest.raises(ConfigError, match="context_parallel_size 2 with window_size needs Transformer Engine, but"):
        machine.check_machine(resolve(keys, world_size=2))
    keys.megatron = {"softmax_type": "vanilla"}  # written out, it asks for nothing
    asked = resolve(keys, world_size=2)
    machine.check_machine(asked)
    assert layers.choose(asked.config, has_te=False, on_gpu=False).fused_attention


def test_windows_and_offsets_of_the_softmax_have_no_fused_attention_of_torchs():
    """A model that is built says so in the words of the module that builds it."""
    for fields in ({"window_size": (4, 0)}, {"softmax_type": "learnable"}):
        with pytest.raises(ConfigError, match=f"attention_backend fused with {next(iter(fields))} needs Transformer"):
            machine.check_machine(plan_with(fields, attention_backend="fused"))
    for fields in ({"window_size": None}, {"softmax_type": "vanilla"}):
        machine.check_machine(plan_with(fields, attention_backend="fused"))


def test_windows_and_offsets_of_the_softmax_keep_megatrons_own_attention():
    assert layers.choose(plan_with({}).config, has_te=False, on_gpu=True).fused_attention
    for fields in ({"window_size": (4, 0)}, {"softmax_type": "learnable"}):
        assert not layers.choose(plan_with(fields).config, has_te=False, on_gpu=True).fused_attention


def layers_of_a_hybrid() -> tuple[str, list[str]]:
    """The model that --hybrid-layer-pattern is built as, and its layers, with torch in place of the kernels."""
    from unittest.mock import patch

    from megatron.training.models import hybrid as theirs

    from tests.support import hybrid

    flags = f"--hybrid-layer-pattern {hybrid.PATTERN} --mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-groups 2"
    config = load(None, f"{HYBRID} {flags}".split())
    with patch.object(theirs, "default_hybrid_stack_spec", hybrid.stack_spec()):
        chunk = chunk_of(resolve(config, world_size=1))
    return type(chunk).__name__, [type(layer).__name__ for layer in chunk.decoder.layers]


HYBRID = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-3"
    " --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --vocab-size 64 --tokenizer-type NullTokenizer"
    " --mock-data --disable-bias-linear --transformer_impl local"
)


def test_a_pattern_of_layers_is_built_by_megatrons_hybrid_builder():
    ((model, kinds),) = run_ranks(layers_of_a_hybrid, 1)
    assert model == "HybridModel"
    assert kinds == ["MambaLayer", "TransformerLayer", "MLPLayer", "MambaLayer"]
