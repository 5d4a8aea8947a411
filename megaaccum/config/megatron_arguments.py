"""Megatron's arguments: the verdicts on those that are neither a key of megaaccum's nor a field of Megatron's model
configuration, and what those that concern the step mean, for `check` and for Megatron's own loop alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

Verdict = Literal["run", "note", "refuse"]
VERDICTS: tuple[Verdict, ...] = ("run", "note", "refuse")


@dataclass(frozen=True, slots=True)
class Listed:
    """Arguments that share a verdict and its reason."""

    title: str
    verdict: Verdict
    why: str
    """The reason, for the reader of a note, a problem or the documentation."""
    instead: str
    """The replacement for a refused argument."""
    names: tuple[str, ...]
    """argparse destinations."""
    loop: Verdict | None
    """The verdict in Megatron's own loop (`megaaccum.loop.pretrain`), where they act through an object that is
    replaced; None where they are Megatron's own."""

    def text(self, shown: str) -> str:
        """The note or problem on the arguments `shown`."""
        return f"{shown}: {self.why}; {self.instead}." if self.instead else f"{shown}: {self.why}."


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("megaaccum.config").joinpath("megatron_arguments.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


def _rows(tables: dict[str, Any], *, loop: bool = False) -> tuple[Listed, ...]:
    return tuple(
        Listed(
            row["title"], verdict, row["why"], row.get("instead", ""), tuple(row["names"].split()),
            verdict if loop else row.get("loop"),
        )
        for verdict in VERDICTS
        for row in tables[verdict]
    )  # fmt: skip


@cache
def lists() -> tuple[Listed, ...]:
    """Every list, in the order of megatron_arguments.yaml."""
    return _rows(_tables())


@cache
def listed() -> dict[str, Listed]:
    """The list of each listed argument, by destination."""
    return {name: row for row in lists() for name in row.names}


@cache
def lists_in_loop() -> tuple[Listed, ...]:
    """The lists that hold in Megatron's own loop."""
    return (*(row for row in lists() if row.loop), *_rows(_tables()["loop"], loop=True))


def fork_flags() -> dict[str, tuple[str, ...]]:
    """Destinations of Megatron-DeepSpeed's own flags, by kind of value (switch, int, float, str, words)."""
    return {kind: tuple(names.split()) for kind, names in _tables()["fork"].items()}


# --- what arguments of the step mean --------------------------------------------------------------------------------

LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Arguments of the loss scale, which have the names of their keys."""

NO_EFFECT_ON_SCALE = {
    True: "no effect beside --loss-scale, which fixes the scale",
    False: "only FP16 needs its loss scaled",
}
"""Why an argument of the loss scale has no effect, with FP16 and without."""


def loss_scale_keys(args: Any) -> tuple[str, ...]:
    """The arguments of the loss scale that have an effect: none without FP16, and one if the scale is fixed."""
    if not args.fp16:
        return ()
    return ("loss_scale",) if args.loss_scale else LOSS_SCALE[1:]


def distributed_optimizer(args: Any, *, only_deepspeed: bool) -> tuple[dict[str, object], str]:
    """(keys that --use-distributed-optimizer sets, the note on it if another backend takes its place).

    only_deepspeed: the experts' layout or offload needs DeepSpeed.
    """
    if only_deepspeed:
        return {}, "DeepSpeed ZeRO-3, which spread experts and offload need."
    if args.fp16:
        return {"zero_stage": 1}, "DeepSpeed ZeRO-1 shards the same optimizer state, for FP16."
    return {"backend": "megatron"}, ""


def has_spread_experts(args: Any) -> bool:
    """Whether experts have data-parallel ranks of their own."""
    tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size
    return bool(args.num_experts) and (args.expert_model_parallel_size > 1 or (etp or tp) != tp)


ORDER_OF_COLLECTIVES = (
    "--deterministic-mode: with spread experts, sums over ranks are in the order of the collectives, so a run repeats"
    " up to rounding."
)
