"""A configuration as a case that fits on this machine: fewer, narrower layers, with every axis of the layout."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial

from megaaccum.config import Config, Plan
from megaaccum.config.keys import all_keys, value
from megaaccum.config.load import given
from megaaccum.config.schema import ModelConfig
from megaaccum.lab.verification.case import Case, Keys

MOST_RANKS = 8
"""Processes that are started on one machine."""
MOST_PARAMETERS = 500_000
"""A larger model is made smaller unless the caller asks for it whole."""

_SETTLED: Keys = {
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "adam_eps": 1e-2, "lr": 1e-2, "min_lr": 1e-3,
    "lr_decay_style": "linear", "lr_decay_iters": 10, "train_iters": 20, "data_path": ["none"],
}  # fmt: skip
"""Keys of every case. Dropout masks are drawn per micro-batch, so the full global batch has different ones. An epsilon
far above the gradients makes Adam's update nearly linear in them, so that rounding of small ones stays small."""
_KEPT_SECTIONS = ("model", "parallel", "batch", "sharding", "step", "optimizer")
_OF_ITS_SIZE = frozenset(
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout kv_channels"
    " num_layers_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage".split()
)
"""Keys that a whole case keeps: they are of its layers, heads and micro-batches."""
_REPLACED = frozenset(
    "max_position_embeddings global_batch_size device_batch_size memory_gib distributed_timeout_minutes"
    " transformer_impl attention_backend override_opt_param_scheduler lr_warmup_iters lr_warmup_fraction lr_warmup_init"
    " lr_warmup_samples lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_style lr_wsd_decay_samples".split()
)
"""Keys for which a case has others, or none is needed."""
_NOT_VERIFIED = frozenset(
    "batch_warmup_steps rampup_batch_size step_batch_size_schedule variable_seq_lengths grad_norm_guard"
    " apply_wd_to_qk_layernorm start_weight_decay end_weight_decay weight_decay_incr_style".split()
)
"""Keys that one process has no counterpart of, which a note names."""
_NEED_A_GPU = {
    "moe_grouped_gemm": "grouped GEMM", "moe_permute_fusion": "fused permutation", "moe_router_fusion": "fused routing",
    "apply_rope_fusion": "fused rotary embeddings", "gradient_accumulation_fusion": "fused weight gradients",
    "cross_entropy_loss_fusion": "fused cross entropy",
    "overlap_moe_expert_parallel_comm": "the overlap of the experts' all-to-all",
}  # fmt: skip
_NUMBER = re.compile(r"(layers|experts)\.(\d+|\[[\d-]+\])(?=[.*=]|$)")
"""The number of a layer or an expert, or a range of some, in a pattern of parameters' names."""
_PLACED = re.compile(rf"{_NUMBER.pattern}|fc(\d|\[[^]]*\])|=[^=]*$")
"""Digits that the smaller model has a meaning for: these numbers, those of names, and a factor."""


@dataclass(slots=True)
class Shrunk:
    """A case, and notes on how it differs from the configuration."""

    case: Case
    notes: list[str] = field(default_factory=list)


def as_case(config: Config, plan: Plan, *, shrink: bool, on_gpu: bool = False) -> Shrunk:
    """Make the case of a configuration whose real layout is `plan`. shrink: reduce depth, width and, above MOST_RANKS,
    ranks; else change only what makes a step comparable."""
    left_out = _NOT_VERIFIED | _OF_ITS_SIZE if shrink else _NOT_VERIFIED
    keys = {
        name: value(config, name)
        for name, key in all_keys().items()
        if key.section in _KEPT_SECTIONS and name not in _REPLACED | left_out and given(config, name)
    }
    notes: list[str] = []
    if not on_gpu:
        _without_kernels(keys, notes)
    if value(config, "fp8_format") is not None:
        notes.append("FP8 is left out: its scales come from earlier micro-batches, which one full batch does not have")
    if keys.get("cold_expert_offload"):  # else no expert would be cold before the tenth step
        keys |= {"cold_expert_steps": 1, "cold_expert_tokens": 1 << 30}
    if (sharding := plan.config.sharding).sync == "streaming":  # which `sync: auto` may have chosen
        keys |= {"sync": "streaming", "max_live_parameters": sharding.max_live_parameters}
    world_size = plan.layout.world_size
    if shrink:
        keys, world_size = _shrunk(keys, plan, notes)
    else:
        keys |= {
            name: getattr(plan.batch, name) for name in ("micro_batch_size", "pp_microbatches", "grad_accum_steps")
        }
    if lost := sorted(name for name in left_out - keys.keys() if given(config, name)):
        notes.append(f"{', '.join(lost)}: left out, and not verified")
    if any(keys.get(name) for name in ("attention_dropout", "hidden_dropout")) or not given(config, "hidden_dropout"):
        notes.append("dropout is 0: its masks are drawn per micro-batch, so the full batch has different ones")
    return Shrunk(Case(keys=keys | _SETTLED, megatron=_own_fields(config, notes), world_size=world_size), notes)


def _without_kernels(keys: Keys, notes: list[str]) -> None:
    """Leave out features that a CPU's layers do not have."""
    for name, words in _NEED_A_GPU.items():
        if keys.pop(name, None):
            notes.append(f"{words} is left out: {name} needs a GPU with Transformer Engine")
    if keys.get("recompute_granularity") == "selective" and keys.get("recompute_modules"):
        modules = [each for each in keys["recompute_modules"] if each in ("core_attn", "mlp", "moe")]
        if modules != keys["recompute_modules"]:
            notes.append(
                f"recompute_modules is {modules or ['core_attn']}: the others need Transformer Engine's layers"
            )
        keys["recompute_modules"] = modules or ["core_attn"]


def _own_fields(config: Config, notes: list[str]) -> Keys:
    """Megatron's fields of the model, but those of optimizers that have no counterpart in one plain process."""
    left = {name: each for name, each in config.megatron.items() if not name.startswith(("use_mup", "mup_"))}
    if len(left) != len(config.megatron):
        notes.append("the maximal update parametrization is left out: its learning rates are those of the real width")
    return left


def _shrunk(keys: Keys, plan: Plan, notes: list[str]) -> tuple[Keys, int]:
    layout, batch = plan.layout, plan.batch
    is_table = layout.schedule.endswith(".csv")  # of one pp, and one number of chunks and micro-batches
    tp, cp, pp, dp = _sizes(layout.tp, layout.cp, layout.pp, layout.dp, keep_pp=is_table)
    ep = 2 if layout.ep > 1 else 1
    etp = min(layout.etp, tp)
    if (tp * cp * dp) % (ep * etp):
        etp = 1
    if ep > 1 and (tp * cp * dp) % (ep * etp):
        ep = 1
        notes.append("expert parallelism is left out: 8 ranks have no room for it beside tp, cp and pp")
    if layout.dp > 1 and dp == 1:
        notes.append("data parallelism is left out: 8 ranks have no room for it beside tp, cp and pp")
    vpp = layout.vpp if is_table else min(layout.vpp, 2)
    real = plan.config.model
    keys = keys | _model_keys(keys, plan, tp=tp, pp=pp * vpp, ep=ep, cp=cp)
    _fit_patterns(keys, real, notes)
    sizes = {
        "tensor_model_parallel_size": tp, "context_parallel_size": cp, "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if layout.schedule == "interleaved" else None,
    }  # fmt: skip
    if real.num_experts:
        sizes |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    if tp == 1:
        sizes["sequence_parallel"] = None  # type: ignore[assignment]
    rounds = min(batch.grad_accum_steps, 2)
    most = batch.num_microbatches // rounds
    chunks = min(most, max(2 * pp if batch.flush == "per_round" else -(-2 * pp // rounds), 2))
    if layout.schedule == "interleaved":
        group = 2 * pp if (plan.config.parallel.microbatch_group_size_per_vp_stage or 0) > layout.pp else pp
        keys["microbatch_group_size_per_vp_stage"] = group
        chunks = -(-chunks // group) * group
    if is_table:
        rounds, chunks = batch.grad_accum_steps, batch.pp_microbatches
    keys |= sizes | {"micro_batch_size": min(batch.micro_batch_size, 2), "grad_accum_steps": rounds}
    keys |= {"pp_microbatches": chunks}
    if plan.config.sharding.backend == "deepspeed":
        keys["reduce_bucket_size"] = 5000  # several buckets per stage
    if keys.get("max_live_parameters"):
        keys["max_live_parameters"] = 20000
    world_size = tp * cp * pp * dp
    notes.insert(
        0,
        f"shrunk: {keys['num_layers']} of {real.num_layers} layers, width {keys['hidden_size']} of {real.hidden_size},"
        f" {world_size} of {layout.world_size} ranks, {keys['seq_length']} of {real.seq_length} tokens,"
        f" {rounds * chunks} of {batch.num_microbatches} micro-batches",
    )
    return {name: each for name, each in keys.items() if each is not None}, world_size


def _fit_patterns(keys: Keys, real: ModelConfig, notes: list[str]) -> None:
    """Have patterns of parameters' names fit the smaller model; leave out those that may fit nothing there."""
    counts = {"layers": (keys["num_layers"], real.num_layers)}
    counts["experts"] = keys.get("num_experts") or 1, real.num_experts or 1
    for name in sorted(keys.keys() & {"freeze", "lr_mult", "wd_mult"}):
        patterns: list[str] = keys[name]
        unfit = [each for each in patterns if re.search(r"\d", _PLACED.sub("", each))]
        keys[name] = [_NUMBER.sub(partial(_mapped, counts), each) for each in patterns if each not in unfit]
        if unfit:
            notes.append(f"{name} {', '.join(unfit)} is left out: it may fit no parameter of the smaller model")
        if not set(keys[name]) <= set(patterns):
            notes.append(f"{name}, in the layers and experts that there are: {', '.join(keys[name])}")


def _mapped(counts: dict[str, tuple[int, int]], found: re.Match[str]) -> str:
    """The layers or experts of the smaller model for those that `found` names. counts: here and in the real model."""
    here, real = counts[found[1]]
    digits = re.sub(r"(\d)-(\d)", lambda ends: "".join(map(str, range(int(ends[1]), int(ends[2]) + 1))), found[2])
    numbers = digits.strip("[]") if digits[0] == "[" else [digits]
    mapped = sorted({int(each) * here // real for each in numbers})
    return f"{found[1]}.{mapped[0]}" if len(mapped) == 1 else f"{found[1]}.[{''.join(map(str, mapped))}]"


def _sizes(tp: int, cp: int, pp: int, dp: int, *, keep_pp: bool) -> tuple[int, int, int, int]:
    """Each axis that is there stays there, with data parallelism of 2 while there is room: the largest is halved."""
    sizes = {"pp": pp, "tp": tp, "cp": cp}
    halved = ("tp", "cp") if keep_pp else ("pp", "tp", "cp")

    def ranks() -> int:
        return sizes["pp"] * sizes["tp"] * sizes["cp"]

    while ranks() * min(dp, 2) > MOST_RANKS and max(sizes[name] for name in halved) > 2:
        largest = max(halved, key=lambda name: sizes[name])
        sizes[largest] = max(sizes[largest] // 2, 2)
    return sizes["tp"], sizes["cp"], sizes["pp"], max(min(dp, 2) if ranks() * 2 <= MOST_RANKS else 1, 1)


def _model_keys(keys: Keys, plan: Plan, *, tp: int, pp: int, ep: int, cp: int) -> Keys:
    """The model's sizes. pp: stages."""
    model = plan.config.model
    heads = max(4, 2 * tp)
    layers = max(pp, 2)
    small: Keys = {
        "num_layers": layers, "hidden_size": 8 * heads, "num_attention_heads": heads, "seq_length": 16 * max(cp, 1),
        "vocab_size": 61, "make_vocab_size_divisible_by": 16, "init_method_std": 0.1,
    }  # fmt: skip
    if "ffn_hidden_size" in keys:
        small["ffn_hidden_size"] = 16 * heads
    if "num_query_groups" in keys:
        are_fewer = (model.num_query_groups or 0) < model.num_attention_heads
        small["num_query_groups"] = max(heads // 2, tp) if are_fewer else heads
        if (model.num_query_groups or heads) < plan.layout.tp:  # which Megatron gathers over tp
            small["num_query_groups"] = max(tp // 2, 1)
    if not model.multi_latent_attention and (model.kv_channels or 0) * model.num_attention_heads != model.hidden_size:
        small["kv_channels"] = 16
    if "recompute_num_layers" in keys:
        small["recompute_num_layers"] = 1
    if model.multi_latent_attention and "multi_latent_attention" in keys:
        small |= {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
        small |= {"q_lora_rank": 16} if model.q_lora_rank else {}
    if model.num_experts:
        small |= _expert_keys(keys, plan, layers=layers, ep=ep)
    return small


def _expert_keys(keys: Keys, plan: Plan, *, layers: int, ep: int) -> Keys:
    model = plan.config.model
    assert model.num_experts is not None
    experts = min(max(4, 2 * ep), max(model.num_experts, ep))
    small: Keys = {"num_experts": experts, "moe_router_topk": min(model.moe_router_topk, 2, experts)}
    if isinstance(model.moe_layer_freq, list):
        pattern = model.moe_layer_freq
        small["moe_layer_freq"] = [pattern[0]] + [pattern[-1]] * (layers - 1)
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if keys.get(name):
            small[name] = 32
    if model.moe_router_num_groups:
        small |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    return small
