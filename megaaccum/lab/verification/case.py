"""Cases: a model, a layout and data, small enough to be pickled to ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megaaccum.config import Config, Plan, precision, resolve
from megaaccum.config.keys import all_keys
from megaaccum.config.load import assemble
from megaaccum.config.source import Source
from megaaccum.errors import problems_of, raise_problems

Lane = Literal["fp64", "fp32", "bf16", "fp16"]
"""The precision of parameters and activations in one comparison."""

Keys = dict[str, Any]

_OF_PRECISION = frozenset(
    {
        *("bf16", "fp16", "params_dtype", "grad_accum_dtype", "grad_reduce_dtype", "optimizer_dtype"),
        *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "cross_entropy_loss_fusion",  # requires BF16
        "transformer_impl",  # Transformer Engine computes neither FP64 nor exact FP32
    }
)
_OF_THE_MODEL = frozenset({"seq_length", "micro_batch_size", "loss_norm", "seed", "train_iters", "vocab_size", "rng"})
"""Keys outside the sections `model` and `optimizer` that apply to one process too."""
_FP64_BACKENDS = ("ddp", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """A user's model; `megaaccum.verify` describes the fields. Ranks that are started for it import its functions by
    name, from the top level of a module."""

    build: Callable[[int, int], Any]
    forward_step_func: Callable[..., Any]
    data: Callable[[int], list[Any]] | list[Any]
    optimizer: Callable[[list[Any]], Any] | None = None
    reports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a layout and samples: the subject of one comparison.

    keys: the configuration's, flat. megatron: fields of Megatron's model configuration. user_model: replaces the
    configured GPT. samples: [samples, tokens] tensors of the configuration's data by name, in order over all steps;
    default: random tokens. masks: sequences have different numbers of unmasked tokens (padded: the others are padding),
    or all tokens count. overflow: the (step, micro-batch), from 0, whose gradient is not finite. device: of the ranks
    and of the reference; `gpu` is what they find, so that a dry run without one takes the same path."""

    keys: Keys
    world_size: int
    megatron: Keys = field(default_factory=dict)
    user_model: UserModel | None = None
    samples: dict[str, Any] | None = field(default=None, compare=False)
    masks: Literal["unequal", "padded", "full"] = "unequal"
    overflow: tuple[int, int] | None = None
    device: Literal["cpu", "gpu"] = "cpu"

    def plan(self) -> Plan:
        """The plan of this layout. Raises ConfigError if it is not legal."""
        return self._resolved(self.keys, self.world_size)

    def one_process(self, lane: Lane) -> Plan:
        """The plan of the model in one process, in the precision `lane`. Raises ConfigError if it is not legal."""
        changes = _OF_PRECISION if lane != self.lane else ()
        kept = {name: each for name, each in self.keys.items() if _stays_in_one_process(name) and name not in changes}
        if self.user_model is None:  # a vocabulary is padded to a multiple for each tp rank
            model, tp = self.plan().config.model, self.keys.get("tensor_model_parallel_size", 1)
            kept["make_vocab_size_divisible_by"] = model.make_vocab_size_divisible_by * tp
        return self._resolved(kept | {"params_dtype": lane} | ({"backend": "ddp"} if lane == "fp64" else {}), 1)

    def _resolved(self, keys: Keys, world_size: int) -> Plan:
        return resolve(config_of(keys, self.megatron), world_size=world_size, own_model=self.user_model is not None)

    @property
    def lane(self) -> Lane:
        """The precision that the keys ask for, or that a run has here without any: BF16 on a GPU."""
        asked = [name for name in ("bf16", "fp16") if self.keys.get(name)]
        asked.append("fp32" if precision.KEYS & self.keys.keys() else precision.default()[0])
        return self.keys.get("params_dtype") or asked[0]  # type: ignore[return-value]

    def in_lane(self, lane: Lane) -> Case:
        """This case in another precision. In FP64 torch DDP replaces backends that do not support it."""
        if lane == self.lane and (lane != "fp64" or self.keys.get("backend") in _FP64_BACKENDS):
            return self
        keys = {name: value for name, value in self.keys.items() if name not in _OF_PRECISION}
        if lane == "fp64" and keys.get("backend") not in _FP64_BACKENDS:
            of = all_keys()
            keys = {name: value for name, value in keys.items() if of[name].section != "sharding"} | {"backend": "ddp"}
        return self.changed(keys | {"params_dtype": lane})

    def changed(self, keys: Keys, **fields: Any) -> Case:
        """This case with other `keys`, without those whose value is None."""
        return replace(self, keys={name: value for name, value in keys.items() if value is not None}, **fields)

    def is_legal(self) -> bool:
        """Whether the configuration's rules allow this case."""
        return not problems_of(self.plan)


def config_of(keys: Keys, megatron: Keys) -> Config:
    """The configuration that a file with `keys` gives. Raises ConfigError if a key is unknown or has a wrong value."""
    source = Source("verify")
    for name, value in keys.items():
        source.put(name, value, name)
    config, problems = assemble([source])
    raise_problems(problems)
    config.megatron = dict(megatron)
    return config


def _stays_in_one_process(name: str) -> bool:
    section = all_keys()[name].section
    return name in _OF_THE_MODEL or (section in ("model", "optimizer") and not name.startswith("recompute_"))
