"""Axes of a case, and the case without one of them: the same model and samples in another split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megaaccum.config.keys import keys_that_need
from megaaccum.lab.verification.case import Case, Keys

_SCHEDULE: Keys = dict.fromkeys(
    ("schedule", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
     "microbatch_group_size_per_vp_stage", "num_layers_per_virtual_pipeline_stage")
)  # fmt: skip
_ONE_ORDER: Keys = dict.fromkeys(("reproducible", "reproducible_tensor_blocks", "reproducible_context_blocks"))
_OF_EXPERTS: Keys = dict.fromkeys(keys_that_need("num_experts")) | {
    "num_experts": None, "moe_router_load_balancing_type": None, "moe_token_dispatcher_type": None,
    "cold_expert_offload": None, "cold_expert_tokens": None, "cold_expert_steps": None,
}  # fmt: skip


def _with(case: Case, keys: Keys, **fields: object) -> Case | None:
    """The case with other keys; None if nothing changes."""
    changed = case.changed(case.keys | keys, **fields)
    return None if changed == case else changed


def _one_rank(size: str, *more: str) -> Callable[[Case], Case | None]:
    """Leaves out the key of a parallel size, and `more`: one rank in place of as many."""

    def remove(case: Case) -> Case | None:
        ranks = case.keys.get(size, 1)
        return None if ranks == 1 else _with(case, dict.fromkeys((size, *more)), world_size=case.world_size // ranks)

    return remove


def _dp(case: Case) -> Case | None:
    """One data-parallel rank takes the micro-batches of all."""
    plan = case.plan()
    dp = plan.layout.dp
    keys: Keys = {"pp_microbatches": plan.batch.pp_microbatches * dp, "data_parallel_replicas": None}
    keys |= {"expert_model_parallel_size": None} if plan.layout.ep > 1 else {}
    return None if dp == 1 else _with(case, keys, world_size=case.world_size // dp)


def _ga(case: Case) -> Case | None:
    """One accumulation step of as many pipeline micro-batches."""
    rounds, chunks = case.keys.get("grad_accum_steps", 1), case.keys.get("pp_microbatches", 1)
    keys: Keys = {"grad_accum_steps": None, "pp_microbatches": rounds * chunks, "flush": None}
    return None if rounds == 1 else _with(case, keys)


def _microbatches(case: Case) -> Case | None:
    """One micro-batch per rank, of all its samples; only without a pipeline, and for a configured GPT."""
    plan = case.plan()
    count = plan.batch.num_microbatches
    keys: Keys = {
        "grad_accum_steps": None,
        "pp_microbatches": 1,
        "micro_batch_size": plan.batch.micro_batch_size * count,
    }
    overflow = None if case.overflow is None else (case.overflow[0], 0)
    return None if count == 1 or plan.layout.pp > 1 or case.user_model else _with(case, keys, overflow=overflow)


def _only(condition: str, **keys: object) -> Callable[[Case], Case | None]:
    """Changes keys if the key `condition` is set."""
    return lambda case: _with(case, keys) if case.keys.get(condition) else None


def _backend(case: Case) -> Case | None:
    """torch DDP in place of another backend, whose options are dropped."""
    keys: Keys = dict.fromkeys(
        (*_ONE_ORDER, "zero_stage", "sync", "max_live_parameters", "offload_optimizer", "data_parallel_replicas",
         "deterministic", "reduce_bucket_size", "cold_expert_offload", "cold_expert_tokens", "cold_expert_steps")
    )  # fmt: skip
    return None if case.keys.get("backend") == "ddp" else _with(case, keys | {"backend": "ddp"})


def _schedule(case: Case) -> Case | None:
    pp = case.keys.get("pipeline_model_parallel_size", 1)
    named = case.keys.get("schedule") not in (None, "1f1b", "none")
    return _with(case, _SCHEDULE) if pp > 1 and (named or "virtual_pipeline_model_parallel_size" in case.keys) else None


AXES: dict[str, Callable[[Case], Case | None]] = {
    "recompute": lambda case: _with(case, {name: None for name in case.keys if name.startswith("recompute_")}),
    "sync": _only("sync", sync=None, max_live_parameters=None),
    "offload": _only("offload_optimizer", offload_optimizer=None),
    "deterministic": _only("deterministic", deterministic=None, **_ONE_ORDER),
    "flush": _only("flush", flush=None),
    "schedule": _schedule,
    "sp": _only("sequence_parallel", sequence_parallel=None),
    "tp": _one_rank("tensor_model_parallel_size", "sequence_parallel"),
    "cp": _one_rank("context_parallel_size"),
    "ep": _only("expert_model_parallel_size", expert_model_parallel_size=None, expert_tensor_parallel_size=None),
    "pp": _one_rank("pipeline_model_parallel_size", *_SCHEDULE),
    "dp": _dp,
    "ga": _ga,
    "micro-batches": _microbatches,
    "backend": _backend,
    "loss scale": _only("fp16", loss_scale=1.0, initial_loss_scale=None, hysteresis=None),
    "overflow": lambda case: None if case.overflow is None else replace(case, overflow=None),
    "unequal weights": lambda c: replace(c, masks="full") if c.masks != "full" and c.user_model is None else None,
    "mtp": _only("mtp_num_layers", mtp_num_layers=None, mtp_loss_scaling_factor=None),
    "aux loss": _only("moe_aux_loss_coeff", moe_aux_loss_coeff=None, moe_router_load_balancing_type="none"),
    "z loss": _only("moe_z_loss_coeff", moe_z_loss_coeff=None),
    "router bias": _only("moe_router_enable_expert_bias", moe_router_enable_expert_bias=None),
    "experts": _only("num_experts", **_OF_EXPERTS),
    "tied embedding": lambda c: _with(c, {"untie_embeddings_and_output_weights": True}) if not c.user_model else None,
    "clipping": _only("clip_grad", clip_grad=0.0),
    "weight decay": _only("weight_decay", weight_decay=0.0),
    "micro-batch means": _only("loss_norm", loss_norm=None),
}  # fmt: skip
"""By the axis' name, the case without it, which may not be legal; None if it has no such axis. In the order in which
they are taken away: what is left in the end is what the failure needs."""
