"""Megatron's arguments in `pretrain` become a plan with notes, or one error that lists everything that is not
supported."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from megaaccum.config.keys import all_keys
from megaaccum.config.megatron_arguments import LION, LION_THERE, LOSS_SCALE, MUON, lists_in_loop, optimizer_of
from megaaccum.errors import ConfigError
from megaaccum.loop.pretrain import HONOURED, plan_of
from megaaccum.pretrain.interop.megatron import parser
from megaaccum.upstream import megatron_training
from tests.unit.pretrain.interop.test_megatron import something_else

ARGUMENTS = sorted({action.dest for action in megatron_training._actions()})
TRANSLATED = {
    *LOSS_SCALE, *LION, *MUON, "optimizer", "muon_tp_mode", "muon_scalar_optimizer", "use_distributed_optimizer",
    "optimizer_cpu_offload", "grad_reduce_in_bf16", "deterministic_mode",
}  # fmt: skip
"""Arguments that set keys of other names, or that have an effect with another one alone."""


def args(**changed: Any) -> SimpleNamespace:
    """Arguments as Megatron's parser and its check leave them."""
    given = dict(seq_length=16, micro_batch_size=1, global_batch_size=8, hidden_size=32, lr=1e-3)
    given |= dict(ckpt_format="torch_dist", virtual_pipeline_model_parallel_size=None)
    return SimpleNamespace(**parser.defaults() | given | changed)


def given(text: str) -> SimpleNamespace:
    """`args` with flags as Megatron's parser reads them."""
    parsed = parser.parse(text.split(), whole=False)
    assert parsed.problems == []
    return args(**{name: getattr(parsed.args, name) for name in parsed.written})


def outcome(text: str, **keys: Any) -> tuple[dict[str, object], list[str], str]:
    """(facts of the plan, notes, error) of flags."""
    try:
        plan = plan_of(given(text), keys)
    except ConfigError as error:
        return {}, [], str(error)
    return plan.facts(), plan.notes, ""


def verdict_of(name: str) -> str:
    """How an argument of Megatron's is treated in this loop: key, rule, the verdict of its list, or megatron: it acts
    through what is Megatron's own."""
    if name in HONOURED:
        return "key"
    if name in TRANSLATED:
        return "rule"
    return next((str(row.loop) for row in lists_in_loop() if name in row.names), "megatron")


PLAIN = outcome("")
VALUES = {
    "attention_backend": "--attention-backend flash",
    "cuda_graph_modules": "--cuda-graph-modules attn",
    "cuda_graph_scope_deprecated": "--cuda-graph-scope attn",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size 1 --num-experts 8",  # dense models leave it alone
    "linear_attention_freq": "--linear-attention-freq 2",
    "moe_layer_freq": "--moe-layer-freq 2",
    "no_rope_freq": "--no-rope-freq 2",
    "rampup_batch_size": "--rampup-batch-size 4 4 16",
    "window_attn_skip_freq": "--window-attn-skip-freq 2",
    "window_size": "--window-size 8,0",
}
"""Values of arguments with a form of their own."""


def test_the_default_is_zero3():
    plan = plan_of(args(clip_grad=0.5, bf16=True), {})
    sharding = plan.config.sharding
    assert (sharding.backend, sharding.zero_stage, sharding.bf16) == ("deepspeed", 3, True)
    assert (plan.config.optimizer.clip_grad, plan.batch.num_microbatches) == (0.5, 8)


def test_the_distributed_optimizer_stays_megatrons_and_keys_outrank_it():
    given = args(use_distributed_optimizer=True)
    assert plan_of(given, {}).config.sharding.backend == "megatron"
    assert plan_of(given, {"backend": "fsdp2"}).config.sharding.backend == "fsdp2"


def test_muon_in_blocks_and_other_optimizers_are_refused():
    muon = args(optimizer="muon", tensor_model_parallel_size=2)
    assert muon.muon_tp_mode == "blockwise"
    assert optimizer_of(muon, {})[0] == "muon" and "whole matrices" in optimizer_of(muon, {})[1][0]
    written = {"muon_tp_mode": "--muon-tp-mode blockwise", "muon_scalar_optimizer": "--muon-scalar-optimizer lion"}
    muon.muon_scalar_optimizer = "lion"
    in_blocks, scalars = optimizer_of(muon, written)[2]
    assert "write --muon-tp-mode duplicated" in in_blocks and "--muon-scalar-optimizer lion: write adam" in scalars
    with pytest.raises(ConfigError, match=r"sgd: write adam \(AdamW\), lion, muon or soap"):
        plan_of(args(optimizer="sgd"), {})


def test_soap_takes_fused_weights_whole_as_megatron_does():
    keys = plan_of(args(optimizer="soap"), {}).config.optimizer
    assert (keys.optimizer, keys.soap_use_kl_shampoo, keys.soap_shampoo_beta) == ("soap", True, 0.95)
    assert not keys.muon_split_qkv and not keys.muon_split_gated
    chosen, (note,), _ = optimizer_of(args(optimizer="soap", tensor_model_parallel_size=2), {})
    assert chosen == "soap" and "each of their 2 blocks alone" in note


def test_lion_takes_its_betas_and_they_do_nothing_without_it():
    keys = plan_of(args(optimizer="lion", lion_beta1=0.9), {}).config.optimizer
    assert (keys.optimizer, keys.lion_beta1, keys.lion_beta2) == ("lion", 0.9, 0.98)
    assert optimizer_of(args(optimizer="lion"), {}) == ("lion", [LION_THERE], [])  # test_lion has Megatron's own
    assert any(
        "--lion-beta1 0.9: no effect without --optimizer lion" in note for note in outcome("--lion-beta1 0.9")[1]
    )


# --- every argument of Megatron's -----------------------------------------------------------------------------------


def test_every_argument_goes_exactly_one_way():
    assert len(ARGUMENTS) > 790
    ways = {name: verdict_of(name) for name in ARGUMENTS}
    assert set(ways.values()) == {"key", "rule", "run", "note", "refuse", "megatron"}
    in_lists = [name for row in lists_in_loop() for name in row.names]
    assert len(in_lists) == len(set(in_lists))
    assert not {*in_lists} & {*HONOURED, *TRANSLATED}
    assert set(HONOURED) <= all_keys().keys()
    assert all(row.why and (row.instead or row.loop != "refuse") for row in lists_in_loop())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_honoured_noted_or_refused(name):
    """An argument that acts through a replaced object changes the plan or is named; others leave the plan alone."""
    flag = VALUES.get(name) or something_else(name)
    facts, notes, error = outcome(flag) if name != "yaml_cfg" else PLAIN  # its keys are arguments by now
    shown = flag.split()[0]
    match verdict_of(name):
        case "key" | "rule":
            assert facts != PLAIN[0] or shown in error or any(shown in note for note in notes)
        case "refuse":
            assert f"{shown}" in error, error
        case "note":
            assert facts == PLAIN[0]
            assert [note for note in notes if shown in note], notes
        case _:
            assert (facts, notes, error) == PLAIN


def test_what_configures_the_objects_that_are_replaced_is_not_left_to_megatron():
    """The fields of Megatron's optimizer and wrapper (get_megatron_optimizer_config, get_megatron_ddp_config)."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    configured = (OptimizerConfig, DistributedDataParallelConfig)
    fields = {item.name for kind in configured for item in dataclasses.fields(kind)}
    fields |= {name for name in ARGUMENTS if name.startswith(("ddp_", "fsdp_", "megatron_fsdp_"))}
    left = {name for name in fields & set(ARGUMENTS) if verdict_of(name) == "megatron"}
    assert left == {"fp8_recipe"}  # without --fp8-format, which is refused, it does nothing


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("--decoupled-lr 5e-4 --decoupled-min-lr 1e-5", {"decoupled_lr": 5e-4, "decoupled_min_lr": 1e-5}),
        ("--apply-wd-to-qk-layernorm", {"apply_wd_to_qk_layernorm": True}),
        ("--fp16 --loss-scale 512", {"loss_scale": 512.0}),
        ("--fp16", {"initial_loss_scale": 2.0**32, "hysteresis": 2, "loss_scale_window": 1000}),
        ("--fp16 --initial-loss-scale 1024 --min-loss-scale 2 --hysteresis 3 --loss-scale-window 20",
         {"initial_loss_scale": 1024.0, "min_loss_scale": 2.0, "hysteresis": 3, "loss_scale_window": 20}),
        ("--bf16 --grad-reduce-in-bf16", {"grad_reduce_dtype": "bf16"}),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer",
         {"offload_optimizer": "cpu", "backend": "deepspeed", "zero_stage": 3}),
        ("--fp16 --use-distributed-optimizer", {"backend": "deepspeed", "zero_stage": 1}),
        ("--num-experts 8 --expert-tensor-parallel-size 1", {"num_experts": 8, "expert_tensor_parallel_size": 1}),
        ("--deterministic-mode", {"deterministic": True}),
        ("--optimizer muon --muon-momentum 0.8 --muon-no-split-qkv --muon-nesterov --muon-scale-mode unit_rms_norm",
         {"optimizer": "muon", "muon_momentum": 0.8, "muon_split_qkv": False, "muon_nesterov": True,
          "muon_scale_mode": "unit_rms_norm", "muon_split_gated": False}),
        ("--optimizer muon --muon-coefficient-type polar_express --muon-num-ns-steps 7 --muon-extra-scale-factor 0.2",
         {"muon_coefficient_type": "polar_express", "muon_num_ns_steps": 7, "muon_extra_scale_factor": 0.2,
          "muon_momentum": 0.9}),
    ],
)  # fmt: skip
def test_the_optimizer_is_configured_as_megatrons(text, facts):
    found, _, error = outcome(text)
    assert error == ""
    assert {name: found[name] for name in facts} == facts


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("--loss-scale 512", "--loss-scale 512.0: only FP16"),
        ("--fp16 --loss-scale 512 --hysteresis 4", "--hysteresis 4: no effect beside --loss-scale"),
        ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer: masters, moments"),
        ("--overlap-grad-reduce", "--overlap-grad-reduce: backend and sync decide"),
        ("--rampup-batch-size 4 4 16", "--rampup-batch-size 4 4 16: megatron-core 0.19 reads it and trains at"),
    ],
)
def test_what_acts_otherwise_is_noted(text, note):
    assert any(each.startswith(note) for each in outcome(text)[1]), outcome(text)


def test_keys_outrank_arguments_and_their_notes():
    text = "--fp16 --use-distributed-optimizer --deterministic-mode --optimizer-cpu-offload"
    facts, notes, error = outcome(text, zero_stage=2)
    assert (facts["zero_stage"], facts["deterministic"], error) == (2, False, "")
    assert [note.split(":")[0] for note in notes if note.startswith("--")] == ["--deterministic-mode"]


def test_a_pipeline_that_is_not_filled_is_refused_unless_it_is_allowed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = "--pipeline-model-parallel-size 2 --global-batch-size 2"
    assert "needs at least 2 * 2 = 4 micro-batches" in outcome(text)[2]
    _, notes, error = outcome(text, allow_underfilled_pipeline=True)
    assert error == ""
    assert any("idle" in note for note in notes)


def test_everything_at_once():
    flags = ("--optimizer sgd", "--ckpt-format torch", "--log-params-norm", "--use-torch-fsdp2", "--cuda-graph-impl")
    error = outcome(" ".join(flags) + " local")[2]
    assert [flag for flag in flags if flag not in error] == []
