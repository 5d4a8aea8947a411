"""Reconciling a user's DeepSpeed JSON with megaaccum's keys."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megaaccum.config import precision
from megaaccum.config.batch import DEEPSPEED_SIZES, SIZES
from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.deepspeed_config import BF16_OPTIMIZER
from megaaccum.config.keys import all_keys
from megaaccum.config.load import given
from megaaccum.config.schema import Config
from megaaccum.config.source import COMMAND_LINE
from megaaccum.errors import did_you_mean
from megaaccum.pretrain.interop.deepspeed import keys
from megaaccum.texts import parse_json, read_text

ORIGIN = "deepspeed block"
"""The origin of a key that the JSON sets."""


@dataclass(slots=True)
class Reconciler:
    """Compares values of the JSON with keys: adopts those whose key was not written, reports those that disagree."""

    config: Config
    notes: list[str]
    problems: list[str]

    def same(self, path: str, value: object, key: str) -> None:
        """Reconcile `path` of the JSON with `key`, which means the same. 'auto' leaves the value to the key."""
        if value is None or value == "auto":
            return
        item = all_keys()[key]
        section = getattr(self.config, item.section)
        try:
            typed = coerce(value, item.annotation)
        except NotOfType as error:
            self.problems.append(f"deepspeed.{path} is {value!r}: it sets {key}, which must be {error}.")
            return
        ours = getattr(section, key)
        if not given(self.config, key):
            if typed != ours:
                self.notes.append(f"{key} {typed} is taken from deepspeed.{path}.")
            setattr(section, key, typed)
            self.config.origin[key] = ORIGIN
        elif ours != typed and self.config.origin.get(key) == COMMAND_LINE != self.config.origin.get("deepspeed"):
            self.notes.append(f"deepspeed.{path} {value} is set aside: the command line gives {key} {ours}.")
        elif ours != typed:
            self.problems.append(
                f"deepspeed.{path} is {value} and {key} is {ours}: make them equal, or leave one of them out."
            )

    def default(self, path: str, value: object, key: str, *rivals: str) -> None:
        """Reconcile what `path`, which the JSON leaves out, is in DeepSpeed, unless `key` or a rival was written."""
        if not _by_key(self.config, key, *rivals):
            self.same(f"{path}{_BY_DEFAULT}", value, key)

    def refuse(self, path: str, value: object, instead: str) -> None:
        """Report that `path` of the JSON is not supported, and what to write instead."""
        shown = "(a block)" if isinstance(value, dict) else value
        self.problems.append(f"deepspeed.{path} {shown} is not supported: {instead}.")

    def sort(
        self, path: str, value: object, refused: dict[str, str], dropped: dict[str, str], known: Iterable[str]
    ) -> None:
        """Refuse or note a key that has no counterpart here, by its list; report one that DeepSpeed does not have."""
        name = path.rsplit(".", 1)[-1]
        if name in refused:
            if keys.is_on(value):
                self.refuse(path, value, refused[name])
        elif name in dropped:
            if keys.is_on(value):
                self.notes.append(f"deepspeed.{path} is left out: {dropped[name]}.")
        elif name not in known:
            near = did_you_mean(name, sorted(known))
            self.problems.append(
                f"deepspeed.{path} is not a key of DeepSpeed's configuration, which would ignore it{near}."
            )


def read_json(path: str | os.PathLike[str], place: str, problems: list[str]) -> dict[str, object] | None:
    """The DeepSpeed configuration at `path`, or None with a text added to `problems`."""
    repeated: list[str] = []

    def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        repeated.extend(sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
        return dict(pairs)

    try:
        block = parse_json(read_text(path), object_pairs_hook=without_repeats)
    except OSError as error:
        problems.append(f"{place}: cannot read the DeepSpeed configuration {path}: {error.strerror}.")
        return None
    except ValueError as error:
        problems.append(f"{place}: {path} is not valid JSON: {error}.")
        return None
    problems.extend(f"{place}: {path} gives {name} more than once." for name in repeated)
    if not isinstance(block, dict):
        problems.append(f"{place}: {path} must hold a JSON object.")
        return None
    return block


def reconcile(config: Config, block: dict[str, object], origin: str, *, by_flags: bool = False) -> list[str]:
    """Make `block` the DeepSpeed block of `config`, and set, in place, the keys that it gives and that were not
    written. Adds notes to the configuration's. by_flags: it is the JSON of a list of Megatron-DeepSpeed's flags, which
    builds optimizer and scheduler by its flags, whatever the JSON says.

    Returns one text per key that disagrees with one of megaaccum's, is unknown, or is not supported. Batch sizes given
    by both are compared once the batch is solved (`megaaccum.config.batch_keys.deepspeed_problems`).
    """
    config.deepspeed = block
    config.origin["deepspeed"] = origin
    reconciler = Reconciler(config, config.notes, [])
    # A scheduler's shares are of the optimizer's learning rate.
    for name, value in sorted(block.items(), key=lambda item: item[0] == "scheduler"):
        if by_flags and name in ("optimizer", "scheduler"):
            config.notes.append(f"deepspeed.{name} is set aside: the flags are Megatron's, which build their own.")
        elif handler := _HANDLERS.get(name):
            handler(reconciler, name, value)
        else:
            reconciler.sort(name, value, keys.REFUSED, keys.DROPPED, keys.TOP_LEVEL)
    if "gradient_clipping" not in block:
        reconciler.default("gradient_clipping", 0.0, "clip_grad")
        if by_flags and (clip := config.optimizer.clip_grad):
            config.notes.append(f"clip_grad {clip:g} holds; Megatron-DeepSpeed, by its JSON alone, clips nothing.")
    _reconcile_batch(reconciler)
    if not precision.is_given(config) and not {"bf16", "bfloat16", "fp16"} & block.keys():
        reconciler.default("bf16.enabled, fp16.enabled", "fp32", "params_dtype")
    return reconciler.problems


def _reconcile_batch(reconciler: Reconciler) -> None:
    """Set batch sizes that the keys leave open. DeepSpeed's micro-batch is a pipeline's micro-batch."""
    written = {name for name in SIZES if getattr(reconciler.config.batch, name) is not None}
    whole, micro, steps = map(reconciler.config.deepspeed.get, DEEPSPEED_SIZES)
    if not written & {"global_batch_size", "grad_accum_steps"}:
        reconciler.same(DEEPSPEED_SIZES[0], whole, "global_batch_size")
    if not written & {"micro_batch_size", "pp_microbatches", "device_batch_size"}:
        reconciler.same(DEEPSPEED_SIZES[1], micro, "micro_batch_size")
    if not written and (whole in (None, "auto") or micro in (None, "auto")):
        reconciler.same(DEEPSPEED_SIZES[2], steps, "grad_accum_steps")


def _mapping(reconciler: Reconciler, name: str, value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    reconciler.problems.append(f"deepspeed.{name} is {value!r}: it must be a block.")
    return {}


def _precision(reconciler: Reconciler, name: str, value: object) -> None:
    key = "fp16" if name == "fp16" else "bf16"
    block = _mapping(reconciler, name, value)
    reconciler.same(f"{name}.enabled", block.get("enabled"), key)
    if any(block.get(inner) for inner in BF16_OPTIMIZER):
        reconciler.same(f"{name}.{next(iter(BF16_OPTIMIZER))}", "bf16", "optimizer_dtype")
    if name == "fp16" and reconciler.config.sharding.fp16:
        _loss_scale(reconciler, block)


_LOSS_SCALE_KEYS = {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0}
"""Keys of the same name, with DeepSpeed's defaults."""


def _loss_scale(reconciler: Reconciler, block: dict[str, Any]) -> None:
    """Set the keys of the loss scale. DeepSpeed's loss_scale 0 is a dynamic scale that starts at a power of two; keys
    that would move a fixed scale have no effect, as in DeepSpeed."""
    if block.get("loss_scale") not in (None, "auto", 0):
        reconciler.same("fp16.loss_scale", block["loss_scale"], "loss_scale")
    power, fixed = block.get("initial_scale_power"), reconciler.config.step.loss_scale
    moving = [name for name in ("loss_scale", "initial_scale_power", *_LOSS_SCALE_KEYS) if name in block]
    moving = [name for name in moving if name != "loss_scale" or not block[name]]
    if fixed and moving:
        reconciler.notes.append(f"deepspeed.fp16.{', '.join(moving)}: no effect beside loss_scale {fixed:g}.")
    elif isinstance(power, int):
        reconciler.same("fp16.initial_scale_power", 2.0**power, "initial_loss_scale")
    for key, theirs in _LOSS_SCALE_KEYS.items() if not fixed else ():
        if key in block:
            reconciler.same(f"fp16.{key}", block[key], key)
        else:
            reconciler.default(f"fp16.{key}", theirs, key)
    for inner, item in block.items():
        reconciler.sort(f"fp16.{inner}", item, keys.FP16_REFUSED, {}, block)


def _zero(reconciler: Reconciler, name: str, value: object) -> None:
    block = _mapping(reconciler, name, value)
    for inner, item in block.items():
        reconciler.sort(f"{name}.{inner}", item, keys.ZERO_REFUSED, keys.ZERO_DROPPED, keys.ZERO)
    stage, why = block.get("stage"), " (0 there, and 1 is the least here: the step is the same)"
    reconciler.same(f"{name}.stage{why if stage == 0 else ''}", 1 if stage == 0 else stage, "zero_stage")
    reconciler.same(f"{name}.reduce_bucket_size", block.get("reduce_bucket_size"), "reduce_bucket_size")
    _offload(reconciler, f"{name}.offload_optimizer", block.get("offload_optimizer") or {})


def _offload(reconciler: Reconciler, path: str, value: object) -> None:
    block = _mapping(reconciler, path, value)
    if block.get("device") == "nvme":
        reconciler.refuse(f"{path}.device", "nvme", "write offload_optimizer: cpu instead")
    else:
        reconciler.same(f"{path}.device", block.get("device"), "offload_optimizer")
    for inner, item in block.items():
        reconciler.sort(f"{path}.{inner}", item, keys.OFFLOAD_REFUSED, {}, block)


def _data_types(reconciler: Reconciler, name: str, value: object) -> None:
    for inner, item in _mapping(reconciler, name, value).items():
        if inner == "grad_accum_dtype":
            reconciler.same(f"{name}.{inner}", item, "grad_accum_dtype")
        elif item is not None:
            reconciler.refuse(f"{name}.{inner}", item, "write params_dtype instead")


_DIVISOR_DEFAULTS = {
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
}


def _divisor(reconciler: Reconciler, name: str, value: object) -> None:
    if value not in (None, "auto", _DIVISOR_DEFAULTS[name]):
        reconciler.refuse(name, value, "the loss is divided once, by loss_norm; leave it out")


def _activation_checkpointing(reconciler: Reconciler, name: str, value: object) -> None:
    if active := sorted(inner for inner, item in _mapping(reconciler, name, value).items() if keys.is_on(item)):
        reconciler.refuse(name, ", ".join(active), "write recompute_granularity: full or selective instead")


def _monitor(reconciler: Reconciler, name: str, value: object) -> None:
    block = _mapping(reconciler, name, value)
    inner, key = _MONITORS[name]
    if not block.get("enabled"):
        return
    if not block.get(inner) and not given(reconciler.config, key):
        reconciler.problems.append(f"deepspeed.{name} is enabled without {inner}: write {key} instead.")
    reconciler.same(f"{name}.{inner}", block.get(inner) or None, key)


_MONITORS = {
    "tensorboard": ("output_path", "tensorboard_dir"),
    "csv_monitor": ("output_path", "csv_dir"),
    "wandb": ("project", "wandb_project"),
}

# --- optimizer and scheduler (deepspeed.ops.adam.FusedAdam, deepspeed.runtime.lr_schedules) --------------------------

_DECAY_STYLES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
_NO_SCHEDULER = "write lr_decay_style, lr_warmup_iters and min_lr instead"
_SCHEDULER_KEYS = {
    "warmup_min_lr": "lr_warmup_init",
    "warmup_max_lr": "lr",
    "warmup_num_steps": "lr_warmup_iters",
    "total_num_steps": "lr_decay_iters",
}
_SHARES = {"cos_min_ratio": "min_lr", "warmup_min_ratio": "lr_warmup_init"}
"""Parameters that are shares of lr."""
_DEFAULTS_OF_STYLE = {"cosine": {"cos_min_ratio": 0.0001}, "linear": {"warmup_max_lr": 0.001}}
"""DeepSpeed's defaults where megaaccum's differ."""
_BY_DEFAULT = " (DeepSpeed's default)"
_OPTIMIZER_KEYS = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}
_ONLY_VALUE = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
_IMPLEMENTATION = frozenset({"torch_adam", "fused", "foreach", "fp32_optimizer_states", "set_grad_none"})


def _optimizer(reconciler: Reconciler, block: dict[str, Any]) -> None:
    """Reconcile the optimizer: Adam and AdamW both are the decoupled AdamW here, which DeepSpeed's Adam is by
    default."""
    kind = str(block.get("type", ""))
    if kind.lower() not in ("adam", "adamw"):
        reconciler.refuse("optimizer.type", kind or "(missing)", "the optimizer is AdamW; set it to AdamW")
        return
    params = block.get("params") or {}
    if "weight_decay" not in params:
        theirs = 0.01 if params.get("torch_adam") else 0.0
        reconciler.default("optimizer.params.weight_decay", theirs, "weight_decay", "start_weight_decay")
    # "auto" is the rate of a program around DeepSpeed, which has a schedule of its own.
    if "scheduler" not in reconciler.config.deepspeed and params.get("lr", "auto") != "auto":
        reconciler.default("scheduler", "constant", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "min_lr")
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        if name in _OPTIMIZER_KEYS:
            reconciler.same(path, value, _OPTIMIZER_KEYS[name])
        elif name == "betas":
            _betas(reconciler, path, value)
        elif name in _ONLY_VALUE and value != _ONLY_VALUE[name]:
            reconciler.refuse(path, value, f"the optimizer is AdamW; set it to {str(_ONLY_VALUE[name]).lower()}")
        elif name not in _IMPLEMENTATION | _ONLY_VALUE.keys():
            reconciler.refuse(path, value, "AdamW takes lr, betas, eps and weight_decay; leave it out")


def _betas(reconciler: Reconciler, path: str, value: object) -> None:
    if value == "auto":
        return
    if not isinstance(value, list | tuple) or len(value) != 2:
        reconciler.refuse(path, value, "write two numbers, or adam_beta1 and adam_beta2 instead")
        return
    for index, key in enumerate(("adam_beta1", "adam_beta2")):
        reconciler.same(f"{path}[{index}]", value[index], key)


def _scheduler(reconciler: Reconciler, block: dict[str, Any]) -> None:
    """Reconcile the scheduler: DeepSpeed's schedulers with a linear warm-up are Megatron's constant, linear and cosine
    decay."""
    kind = str(block.get("type", ""))
    if (style := _DECAY_STYLES.get(kind.lower())) is None:
        reconciler.refuse("scheduler.type", kind or "(missing)", _NO_SCHEDULER)
        return
    reconciler.same("scheduler.type", style, "lr_decay_style")
    params = dict(block.get("params") or {})
    shape = params.pop("warmup_type", None)
    if shape is None:
        reconciler.notes.append(_LINEAR)
    elif shape not in ("linear", "auto"):
        reconciler.refuse("scheduler.params.warmup_type", shape, "Megatron's warm-up is linear; set it to linear")
    known = _SCHEDULER_KEYS | _SHARES
    rivals = {"warmup_num_steps": ("lr_warmup_fraction", "lr_warmup_samples")}
    for name, value in ({"warmup_num_steps": 1000} | _DEFAULTS_OF_STYLE.get(style, {})).items():
        if name not in params and not _by_key(reconciler.config, known[name], *rivals.get(name, ())):
            _scheduler_param(reconciler, name, value, _BY_DEFAULT)
    for name, value in params.items():
        if name == "warmup_num_steps" and value in (0, 1):
            _scheduler_param(reconciler, name, 2, " (2 is the least there)")
        else:
            _scheduler_param(reconciler, name, value)
    if style == "linear":  # which decays to the rate at which the warm-up began
        reconciler.same("scheduler.params.warmup_min_lr", params.get("warmup_min_lr"), "min_lr")


_LINEAR = (
    "deepspeed.scheduler: the warm-up is linear, while DeepSpeed's own default is logarithmic, so learning rates differ"
    " during the warm-up; write warmup_type: linear to confirm."
)


def _by_key(config: Config, *names: str) -> bool:
    """Whether one of these keys was written; what the JSON's optimizer says of a key does not count."""
    return any(given(config, name) and config.origin.get(name) != ORIGIN for name in names)


def _scheduler_param(reconciler: Reconciler, name: str, value: object, source: str = "") -> None:
    path, lr = f"scheduler.params.{name}{source}", reconciler.config.optimizer.lr
    if name in _SCHEDULER_KEYS:
        reconciler.same(path, value, _SCHEDULER_KEYS[name])
    elif name in _SHARES:
        if isinstance(value, int | float) and lr:
            reconciler.same(f"{path} {value:g} * lr {lr:g}", value * lr, _SHARES[name])
    else:
        reconciler.refuse(path, value, _NO_SCHEDULER)


_HANDLERS: dict[str, Callable[[Reconciler, str, object], None]] = {
    "gradient_clipping": lambda r, name, value: r.same(name, value, "clip_grad"),
    "communication_data_type": lambda r, name, value: r.same(name, value, "grad_reduce_dtype"),
    "bf16": _precision,
    "bfloat16": _precision,
    "fp16": _precision,
    "zero_optimization": _zero,
    "data_types": _data_types,
    **dict.fromkeys(_DIVISOR_DEFAULTS, _divisor),
    "activation_checkpointing": _activation_checkpointing,
    "optimizer": lambda r, name, value: _optimizer(r, _mapping(r, name, value)),
    "scheduler": lambda r, name, value: _scheduler(r, _mapping(r, name, value)),
    **dict.fromkeys(_MONITORS, _monitor),
}
