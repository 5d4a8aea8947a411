"""A case: a model, a layout and data, small enough to be handed to ranks. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from megaaccum.config import Config, Plan, resolve
from megaaccum.config.keys import all_keys
from megaaccum.config.load import assemble
from megaaccum.config.source import Source
from megaaccum.errors import ConfigError

Lane = Literal["fp64", "fp32", "bf16", "fp16"]
"""The precision of parameters and activations in one comparison."""

Keys = dict[str, Any]

_OF_PRECISION = frozenset(
    {
        *("bf16", "fp16", "params_dtype", "grad_accum_dtype", "grad_reduce_dtype", "optimizer_dtype"),
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "cross_entropy_loss_fusion",  # BF16's alone, as a rule says
    }
)
_OF_THE_MODEL = frozenset({"seq_length", "micro_batch_size", "loss_norm", "seed", "train_iters", "vocab_size", "rng"})
"""Keys of other sections than `model` and `optimizer` that one process has too."""
_FP64_BACKENDS = ("ddp", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model of a user's own: `megaaccum.verify` describes the fields. All functions are found by name, at the top
    level of a module, where ranks are started for them."""

    build: Callable[[int, int], Any]
    forward_step_func: Callable[..., Any]
    data: Callable[[int], list[Any]] | list[Any]
    optimizer: Callable[[list[Any]], Any] | None = None
    reports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Samples:
    """Sequences of a configuration's own data, one after the other over all steps. parts: by NAMES, [samples, tokens]
    tensors."""

    NAMES: ClassVar = ("tokens", "labels", "loss_mask", "position_ids")
    parts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a layout and samples: the subject of one comparison.

    keys: of the configuration, flat. megatron: fields of Megatron's model configuration. own: a model of a user's own,
    in place of the configured GPT. samples: of the configuration's own data; None: made up. masks: unmasked tokens per
    sequence differ (padded: and the model is given the padding mask, without a pipeline), or all count. overflow: the
    (step, micro-batch), from 0, whose gradient is not finite. mistake: a name in the bank, made on every rank."""

    keys: Keys
    world_size: int
    megatron: Keys = field(default_factory=dict)
    own: OwnModel | None = None
    samples: Samples | None = None
    masks: Literal["unequal", "padded", "full"] = "unequal"
    overflow: tuple[int, int] | None = None
    mistake: str = ""

    def plan(self) -> Plan:
        """Of the layout. Raises ConfigError."""
        return self._resolved(self.keys, self.world_size)

    def one_process(self, lane: Lane) -> Plan:
        """Of the model alone, in one process and in the precision `lane`. Raises ConfigError."""
        changes = _OF_PRECISION if lane != self.lane else ()
        kept = {name: each for name, each in self.keys.items() if _stays_in_one_process(name) and name not in changes}
        if self.own is None:  # a vocabulary is padded to a multiple for each tp rank
            model, tp = self.plan().config.model, self.keys.get("tensor_model_parallel_size", 1)
            kept["make_vocab_size_divisible_by"] = model.make_vocab_size_divisible_by * tp
        return self._resolved(kept | precision(lane) | ({"backend": "ddp"} if lane == "fp64" else {}), 1)

    def _resolved(self, keys: Keys, world_size: int) -> Plan:
        return resolve(config_of(keys, self.megatron), world_size=world_size, own_model=self.own is not None)

    @property
    def lane(self) -> Lane:
        """The precision that the keys ask for."""
        given = {name: name for name in ("bf16", "fp16") if self.keys.get(name)}
        return self.keys.get("params_dtype") or next(iter(given), "fp32")  # type: ignore[return-value]

    def in_lane(self, lane: Lane) -> Case:
        """The same in another precision. FP64 is kept by few backends: the others give way to torch DDP."""
        if lane == self.lane and (lane != "fp64" or self.keys.get("backend") in _FP64_BACKENDS):
            return self
        keys = {name: value for name, value in self.keys.items() if name not in _OF_PRECISION}
        if lane == "fp64" and keys.get("backend") not in _FP64_BACKENDS:
            of = all_keys()
            keys = {name: value for name, value in keys.items() if of[name].section != "sharding"} | {"backend": "ddp"}
        return self.changed(keys | precision(lane))

    def changed(self, keys: Keys, **fields: Any) -> Case:
        """With `keys` in place of its own, those of value None left out."""
        return replace(self, keys={name: value for name, value in keys.items() if value is not None}, **fields)

    def is_legal(self) -> bool:
        """Whether the rules of the configuration allow it."""
        try:
            self.plan()
        except ConfigError:
            return False
        return True


def precision(lane: Lane) -> Keys:
    """The keys of a precision."""
    return {} if lane == "fp32" else {"params_dtype": lane}


def config_of(keys: Keys, megatron: Keys) -> Config:
    """A configuration as if `keys` had been written in a file. Raises ConfigError."""
    source = Source("verify")
    for name, value in keys.items():
        source.put(name, value, name)
    config, problems = assemble([source])
    if problems:
        raise ConfigError(problems)
    config.megatron = dict(megatron)
    return config


def _stays_in_one_process(name: str) -> bool:
    section = all_keys()[name].section
    return name in _OF_THE_MODEL or (section in ("model", "optimizer") and not name.startswith("recompute_"))
