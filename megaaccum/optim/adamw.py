"""The optimizer over a rank's parameters: AdamW, fused where Transformer Engine, apex or torch has a fused one, Lion,
Muon or SOAP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from megaaccum.config import Config, Plan
from megaaccum.distributed.agreement import raise_on_all_ranks
from megaaccum.errors import ConfigError
from megaaccum.model import names
from megaaccum.optim import by_pattern, lr_schedule, muon
from megaaccum.optim.owners import COSTS
from megaaccum.platform import cpu
from megaaccum.upstream import emerging


def build(plan: Plan, chunks: list[torch.nn.Module]) -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters, in groups with weight decay (matrices) and without (biases, norms).

    Collective over the world. Raises ConfigError on every rank where one of them has nothing to train, or Muon or SOAP
    no matrix, or where their library, which is Lion's too, is not installed.
    """
    optimizer = plan.config.optimizer
    matrices = muon.mark_matrices(plan, chunks) if optimizer.optimizer in COSTS else set()
    groups = by_pattern.split_groups(plan, raise_on_all_ranks(_trained, plan, chunks, matrices))
    if optimizer.optimizer == "lion":
        return emerging.lion(groups, lr=optimizer.lr, betas=(optimizer.lion_beta1, optimizer.lion_beta2))
    options: dict[str, Any] = dict(
        lr=optimizer.lr, betas=(optimizer.adam_beta1, optimizer.adam_beta2), eps=optimizer.adam_eps
    )
    if optimizer.optimizer in COSTS:
        options["fused"] = plan.config.sharding.reproducible != "layout"
        decoupled = optimizer.optimizer == "soap" or optimizer.muon_weight_decay_method == "decoupled"
        return muon.Muon(groups, decoupled=decoupled, **options)
    if plan.config.sharding.reproducible == "layout":
        # A fused kernel rounds the last elements of a tensor, which no vector holds, otherwise than those before them
        # (torch 2.13, on a CPU), and a shard's end is not the parameter's.
        return torch.optim.AdamW(groups, fused=False, **options)
    # The moments of Transformer Engine's and apex's Adam are FP32 whatever the weights are: `optimizer_dtype: bf16` is
    # chosen to avoid that.
    sharding = plan.config.sharding
    masters = sharding.params_dtype if sharding.backend == "ddp" else sharding.optimizer_dtype
    serves = cpu.has_accelerator() and sharding.offload_optimizer == "none" and masters in (None, "fp32")
    fused = _fused_adam(on_dtensors=sharding.backend == "fsdp2") if serves else None
    if fused is not None:
        return fused(groups, adam_w_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _trained(plan: Plan, chunks: list[torch.nn.Module], matrices: set[str]) -> list[lr_schedule.ParamGroup]:
    """The groups. Raises ConfigError without any."""
    named = list(names.named_parameters(chunks))
    groups = lr_schedule.param_groups(
        named,
        plan.config.optimizer.weight_decay,
        decoupled=decoupled_rates(plan.config),
        hidden=hidden_rates(plan.config),
        decay_qk_norms=plan.config.optimizer.apply_wd_to_qk_layernorm,
        matrices=matrices,
        others=_others(plan),
    )
    if not groups:
        raise untrained(
            len(named),
            "give it a trained layer as well (decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers), or"
            f" set pipeline_model_parallel_size {plan.layout.pp} lower.",
        )
    return groups


def untrained(num_params: int, remedy: str) -> ConfigError:
    """The error of a pipeline rank that trains none of its parameters: none of the backends starts there."""
    found = f"all {num_params} parameters of this pipeline rank are frozen"
    found = found if num_params else "this pipeline rank has no parameter"
    return ConfigError(f"{found}, and each rank has to train some: {remedy}")


def decoupled_rates(config: Config) -> dict[str, float] | None:
    """The schedule's ends for embedding and head, where they have a learning rate of their own."""
    keys = config.optimizer
    if keys.decoupled_lr is None:
        return None
    return {
        "max_lr": keys.decoupled_lr,
        "min_lr": keys.min_lr if keys.decoupled_min_lr is None else keys.decoupled_min_lr,
    }


def _others(plan: Plan) -> dict[str, float]:
    """The schedule's ends, and the share of weight_decay, of what AdamW steps beside matrices, if they are its own."""
    keys, found = plan.config.optimizer, {}
    if keys.muon_scalar_lr is not None:
        found = {"max_lr": keys.muon_scalar_lr, "min_lr": keys.min_lr * keys.muon_scalar_lr / keys.lr}
    if keys.muon_scalar_weight_decay is not None and keys.weight_decay:
        found["wd_mult"] = keys.muon_scalar_weight_decay / keys.weight_decay
    return found


def hidden_rates(config: Config) -> dict[str, float] | None:
    """Adam's arguments for hidden matrices under the maximal update parametrization, as Megatron-core's overrides
    do; None without it."""
    keys, fields = config.optimizer, config.megatron
    base = fields.get("mup_base_hidden_size")
    width = config.model.hidden_size / base if isinstance(base, int) else 1.0
    if not fields.get("use_mup") or width == 1.0:
        return None
    return {"max_lr": keys.lr / width, "min_lr": keys.min_lr / width, "eps": keys.adam_eps / width}


def _fused_adam(*, on_dtensors: bool) -> Callable[..., torch.optim.Optimizer] | None:
    """Transformer Engine's FusedAdam, else apex's, which reads plain memory, else None (torch's fused kernel serves
    then)."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        if on_dtensors:
            return None
        try:
            from apex.optimizers import FusedAdam
        except ImportError:
            return None
    return cast("Callable[..., torch.optim.Optimizer]", FusedAdam)
