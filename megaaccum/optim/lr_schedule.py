"""Learning rate and weight decay over the run, by Megatron's own scheduler, and the parameter groups they apply to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from megaaccum.config import lr_scaling, lr_spans
from megaaccum.config.batch_ramp import BatchRamp
from megaaccum.config.keys import all_keys
from megaaccum.config.schema import Config
from megaaccum.errors import CheckpointError, listed

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

ParamGroup = dict[str, Any]

KEY_OF_STATE = {key.facts.lr_state: key for key in all_keys().values() if key.facts.lr_state}
"""Which key of the configuration decides each number of the schedule's state."""

_RATES, _DECAYS = ("decoupled_lr", "lr_mult", "muon_scalar_lr", "use_mup"), ("muon_scalar_weight_decay",)
_MADE_BY = {"max_lr": _RATES, "min_lr": _RATES, "start_wd": _DECAYS, "end_wd": _DECAYS}
"""Keys that make groups with rates of their own from a number, before a checkpoint's is known."""


class HasParamGroups(Protocol):
    """An optimizer, or a DeepSpeed engine's: all that the schedule touches is its groups."""

    @property
    def param_groups(self) -> list[ParamGroup]: ...


class LrSchedule:
    """Megatron's OptimizerParamScheduler, advanced by one committed optimizer step at a time.

    It counts samples, not steps, because Megatron-LM does: the same flags then give the same learning rates to the
    last bit (the inverse square root is one of samples), and a batch size that ramps up does not bend the schedule.
    The rate of the first step is `lr_warmup_init` where there is a warm-up. Same on every rank.
    """

    def __init__(self, scheduler: OptimizerParamScheduler, config: Config, ramp: BatchRamp):
        """ramp: the batch of each step, by which the steps of `config` were laid out as samples."""
        self._scheduler, self._config, self._laid_out_by = scheduler, config, ramp
        self._of_checkpoint = config.run.use_checkpoint_opt_param_scheduler
        self._of_config = config.run.override_opt_param_scheduler or "lr_schedule" in config.run.override
        """Which schedule holds where that of a checkpoint differs from the configuration's: an error if neither."""
        self._whole, self._factor = ramp.intervals[-1][1], 1.0
        self.scale_to_batch(ramp.size_at(0))

    @property
    def lr(self) -> float:
        """Learning rate of the next step, for groups without a rate of their own."""
        return float(self._scheduler.get_lr({})) * self._factor

    def step(self, num_samples: int) -> None:
        """Move on after a step that was committed (never after a skipped one) and set `lr` and `weight_decay` of every
        group. `num_samples` is that step's global batch."""
        self._scheduler.step(increment=num_samples)

    def scale_to_batch(self, batch_size: int) -> None:
        """The next step takes `batch_size` sequences: where the learning rate follows the batch of the step
        (lr_scaling_follows_rampup), set every group's."""
        factor = lr_scaling.step_factor(self._config.optimizer, batch_size, self._whole)
        if factor != 1.0 or self._factor != 1.0:
            self._factor = factor
            for group in self._scheduler.optimizer.param_groups:
                rate = self._scheduler.get_lr(group) * factor
                group["lr"] = group["lr"].fill_(rate) if hasattr(group["lr"], "fill_") else rate

    def state_dict(self) -> dict[str, Any]:
        """Position and shape of the schedule; plain numbers and texts, steps counted in samples."""
        of = self._scheduler
        state = dict(of.state_dict(), laid_out_by=[list(interval) for interval in self._laid_out_by.intervals])
        # Megatron leaves these three out, so a checkpoint of its own would not notice that they changed.
        return state | {name: getattr(of, name) for name in ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of `state` and set every group. Spans of samples stay as they were, also where a step has
        another number of them now, unless the configuration's hold (`override: lr_schedule`).

        Raises CheckpointError, and changes nothing, where there are `differences`.
        """
        if self._of_checkpoint or not self._of_config:
            if problems := self.differences(state):
                raise CheckpointError("\n".join(f"{text}; {remedy}" for text, remedy in problems.items()))
            self._laid_out_by = _ramp_of(state)
            for name in KEY_OF_STATE:
                setattr(self._scheduler, name, state[name])
        # Megatron's own load adds the position to the present one, which is right only on a schedule that never moved.
        self._scheduler.step(increment=int(state["num_steps"]) - self._scheduler.num_steps)

    def differences(self, state: dict[str, Any]) -> dict[str, str]:
        """The numbers in which the configuration lays out another schedule than the one that `state` comes from, over
        the same batches, each with the key to set back. If the checkpoint's holds in any case, only those by which
        groups with rates of their own were made."""
        if missing := sorted(self.state_dict().keys() - state.keys()):
            return {f"the checkpoint's learning-rate schedule lacks {listed(missing)}": "it is not one of megaaccum"}
        ramp = _ramp_of(state)
        mine = scheduler_arguments(self._config, ramp)
        return dict(
            self._difference(name, state[name], mine[name], ramp)
            for name in KEY_OF_STATE
            if state[name] != mine[name] and self._matters(name)
        )

    def _matters(self, name: str) -> bool:
        if self._of_checkpoint:
            keys = _MADE_BY.get(name, ())
            return any(getattr(self._config.optimizer, key, self._config.megatron.get(key)) for key in keys)
        if name == "wd_incr_steps":
            return bool(self._scheduler.wd_incr_style != "constant")
        return name not in ("wsd_decay_steps", "lr_wsd_decay_style") or bool(self._scheduler.lr_decay_style == "WSD")

    def _difference(self, name: str, saved: Any, now: Any, ramp: BatchRamp) -> tuple[str, str]:
        key = lr_spans.key_of(self._config, KEY_OF_STATE[name].name)
        if not KEY_OF_STATE[name].facts.in_samples or None in (saved, now):
            return f"{key}: the checkpoint was made with {saved}, the configuration says {now}", f"set {key} to {saved}"
        what = f"{key}: {saved} samples over the same batches in the checkpoint, {now} in the configuration"
        steps = ramp.steps_within(int(saved))
        exact = (ramp.is_constant or name != "wsd_decay_steps") and ramp.samples_after(steps) == saved
        if key.endswith("_samples"):
            steps, exact = int(saved), saved == int(saved)
        return what, f"set {key} to {steps}" if exact else f"set {key} as it was"


def _ramp_of(state: dict[str, Any]) -> BatchRamp:
    """The batches by which a schedule's spans of samples were laid out."""
    return BatchRamp(tuple((start, size) for start, size in state["laid_out_by"]), {})


def build(optimizer: HasParamGroups, config: Config, ramp: BatchRamp) -> LrSchedule:
    """The schedule that Megatron-LM builds from the same flags, before the first step: every group of the
    optimizer has its `lr` and `weight_decay` set.

    `config` is a resolved one: train_iters, lr and global_batch_size are there, and the rules of
    `megaaccum.config.rules` hold. ramp: the batch of each step (Plan.ramp). Imports megatron.core and so torch.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return LrSchedule(OptimizerParamScheduler(optimizer, **scheduler_arguments(config, ramp)), config, ramp)


def scheduler_arguments(config: Config, ramp: BatchRamp) -> dict[str, Any]:
    """Megatron-LM 0.19's arguments of its scheduler (get_optimizer_param_scheduler of megatron.training), which counts
    samples: spans of steps become spans of the samples that these steps consume."""
    optimizer = config.optimizer
    assert config.run.train_iters > 0, "the config is not resolved"
    decay, warmup, anneal = lr_spans.in_samples(config, ramp)
    start_wd, end_wd = optimizer.start_weight_decay, optimizer.end_weight_decay
    return {
        "init_lr": optimizer.lr_warmup_init,
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": optimizer.lr_decay_style,
        "start_wd": optimizer.weight_decay if start_wd is None else start_wd,
        "end_wd": optimizer.weight_decay if end_wd is None else end_wd,
        "wd_incr_steps": ramp.samples_after(config.run.train_iters),
        "wd_incr_style": optimizer.weight_decay_incr_style,
        "wsd_decay_steps": anneal,
        "lr_wsd_decay_style": optimizer.lr_wsd_decay_style,
    }


def param_groups(
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    weight_decay: float,
    *,
    decoupled: dict[str, float] | None = None,
    hidden: dict[str, float] | None = None,
    decay_qk_norms: bool = False,
    matrices: Collection[str] = (),
    others: dict[str, float] | None = None,
) -> list[ParamGroup]:
    """The optimizer's groups: what decays, then what does not; within each, dense parameters, then experts.

    Megatron's default rule: biases (names ending in `.bias`) and one-dimensional parameters (norms) do not decay,
    all others do, embeddings included. Frozen parameters are left out, and so is a group without members, so ranks may
    differ in the number of groups. Inside a group parameters keep the order of `named_params`, and `param_names` lists
    their names in that order (the key under which torch's optimizers keep names). `wd_mult` is what the schedule
    multiplies the weight decay by; `is_expert_parallel` tells which groups hold experts. A parameter that ZeRO-3 has
    partitioned is judged by its whole shape.

    decoupled: max_lr and min_lr of the input embedding and the output head, which are groups of their own then. hidden:
    the same, and eps, of the matrices between them (the maximal update parametrization).
    decay_qk_norms: norms of queries and keys decay (apply_wd_to_qk_layernorm). matrices: names of those that Muon
    steps, which are groups with `matrices`; others: what all other groups have then, a share of weight_decay too.
    """
    rest = others or {}
    kinds: dict[str, dict[str, float]] = {
        "": rest, "ends": rest | (decoupled or {}), "hidden": rest | (hidden or {}), "matrices": {"matrices": True}
    }  # fmt: skip
    members: dict[tuple[float, bool, str], list[tuple[str, torch.nn.Parameter]]] = {
        (wd_mult, is_expert, kind): [] for wd_mult in (1.0, 0.0) for is_expert in (False, True) for kind in kinds
    }
    for name, param in named_params:
        if param.requires_grad:
            is_expert = not getattr(param, "allreduce", True)
            is_qk_norm = "q_layernorm" in name or "k_layernorm" in name
            decays = not never_decays(name, param) or (decay_qk_norms and is_qk_norm)
            kind = "matrices" if name in matrices else _kind(name, param, decoupled is not None, hidden is not None)
            members[1.0 if decays else 0.0, is_expert, kind].append((name, param))
    return [
        {
            "params": [param for _, param in named],
            "param_names": [name for name, _ in named],
            "is_expert_parallel": is_expert,
            **kinds[kind],
            **({"lr": kinds[kind]["max_lr"]} if "max_lr" in kinds[kind] else {}),  # of a run without a schedule
            "weight_decay": weight_decay * wd_mult * kinds[kind].get("wd_mult", 1.0),
            "wd_mult": wd_mult * kinds[kind].get("wd_mult", 1.0),
        }
        for (wd_mult, is_expert, kind), named in members.items()
        if named
    ]


def _kind(name: str, param: torch.nn.Parameter, decoupled: bool, hidden: bool) -> str:
    """Which learning rate a parameter has."""
    is_head = name.startswith("output_layer.")
    if decoupled and (is_head or name.startswith("embedding.word_embeddings.")):
        return "ends"
    matrix = len(getattr(param, "ds_shape", param.shape)) > 1 and not is_head and "embedding" not in name
    return "hidden" if hidden and matrix else ""


def never_decays(name: str, param: torch.nn.Parameter) -> bool:
    # ZeRO-3 leaves an empty one-dimensional tensor in place of a partitioned parameter; ds_shape is the whole shape.
    return name.endswith(".bias") or len(getattr(param, "ds_shape", param.shape)) == 1
