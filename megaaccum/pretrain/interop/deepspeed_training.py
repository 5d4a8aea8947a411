"""The optimizer and scheduler blocks of a DeepSpeed JSON, in the words of megaaccum's keys.

Sources: deepspeed.ops.adam.FusedAdam and deepspeed.runtime.lr_schedules of deepspeed 0.19 (names and defaults).
"""

from __future__ import annotations

from typing import Any, Protocol

_DECAY_STYLES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_SCHEDULER_KEYS = {
    "warmup_min_lr": "lr_warmup_init",
    "warmup_max_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
_OPTIMIZER_KEYS = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}
_ONLY_VALUE = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
_IMPLEMENTATION = frozenset({"torch_adam", "fused", "foreach", "fp32_optimizer_states", "set_grad_none"})


class Holder(Protocol):
    """Holds a value of the JSON against a key (`deepspeed_json.Reconciler`)."""

    def same(self, path: str, value: object, key: str) -> None: ...
    def refuse(self, path: str, value: object, instead: str) -> None: ...


def read_optimizer(holder: Holder, block: dict[str, Any]) -> None:
    """Adam and AdamW agree with megaaccum's AdamW, which is decoupled as DeepSpeed's Adam is by default."""
    kind = str(block.get("type", ""))
    if kind.lower() not in ("adam", "adamw"):
        holder.refuse("optimizer.type", kind or "(missing)", "the optimizer is AdamW; set it to AdamW")
        return
    params = block.get("params") or {}
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        if name in _OPTIMIZER_KEYS:
            holder.same(path, value, _OPTIMIZER_KEYS[name])
        elif name == "betas":
            _read_betas(holder, path, value)
        elif name in _ONLY_VALUE:
            if value != _ONLY_VALUE[name]:
                holder.refuse(path, value, f"the optimizer is AdamW; set it to {str(_ONLY_VALUE[name]).lower()}")
        elif name not in _IMPLEMENTATION:
            holder.refuse(path, value, "AdamW takes lr, betas, eps and weight_decay; leave it out")


def _read_betas(holder: Holder, path: str, value: object) -> None:
    if value == "auto":
        return
    if not isinstance(value, list | tuple) or len(value) != 2:
        holder.refuse(path, value, "write two numbers, or adam_beta1 and adam_beta2 instead")
        return
    for index, key in enumerate(("adam_beta1", "adam_beta2")):
        holder.same(f"{path}[{index}]", value[index], key)


def read_scheduler(holder: Holder, block: dict[str, Any]) -> None:
    """DeepSpeed's warm-up schedulers with a linear warm-up are Megatron's constant, linear and cosine decay."""
    kind = str(block.get("type", ""))
    style = _DECAY_STYLES.get(kind.lower())
    if style is None:
        holder.refuse("scheduler.type", kind or "(missing)", "write lr_decay_style, lr_warmup_iters and min_lr instead")
        return
    holder.same("scheduler.type", style, "lr_decay_style")
    params = block.get("params") or {}
    if params.get("warmup_type", "log") not in ("linear", "auto"):
        holder.refuse(
            "scheduler.params.warmup_type",
            params.get("warmup_type", "log (its default)"),
            "Megatron's warm-up is linear; set it to linear",
        )
    for name, value in params.items():
        _read_scheduler_param(holder, name, value)


def _read_scheduler_param(holder: Holder, name: str, value: object) -> None:
    path = f"scheduler.params.{name}"
    if name in _SCHEDULER_KEYS:
        holder.same(path, value, _SCHEDULER_KEYS[name])
    elif name in ("cos_min_ratio", "warmup_min_ratio"):
        if value not in (0, "auto"):
            key = {"cos_min_ratio": "min_lr", "warmup_min_ratio": "lr_warmup_init"}[name]
            holder.refuse(path, value, f"it is a share of lr; write {key} as a learning rate instead")
    elif name != "warmup_type":
        holder.refuse(path, value, "write lr_decay_style, lr_warmup_iters and min_lr instead")
