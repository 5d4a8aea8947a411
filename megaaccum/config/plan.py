"""The plan of a run: every key resolved, the layout of its ranks, the cut of its batch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any

from megaaccum.config import slurm
from megaaccum.config.batch import BatchPlan
from megaaccum.config.batch_ramp import KEYS, BatchRamp, build_ramp, recut
from megaaccum.config.facts import Facts
from megaaccum.config.keys import value, values_where
from megaaccum.config.layout import RankLayout
from megaaccum.config.load import assemble, load
from megaaccum.config.resolve import flush_problems, resolve_keys, with_schedules
from megaaccum.config.schema import BatchConfig, Config, ParallelConfig
from megaaccum.config.schema import OptimizerConfig as Optimizer
from megaaccum.config.schema import QuantizationConfig as Quantization
from megaaccum.config.schema import RunConfig as Run
from megaaccum.config.schema import ShardingConfig as Sharding
from megaaccum.config.schema import StepConfig as Step
from megaaccum.config.source import Source
from megaaccum.errors import ConfigError, raise_problems
from megaaccum.schedule.registry import stored_table

__all__ = [
    "MONITORS", "Batch", "Layout", "Optimizer", "Plan", "Quantization", "Run", "Sharding", "Step", "resolve"
]  # fmt: skip

MONITORS = frozenset({"tensorboard", "wandb", "csv_monitor"})
"""Blocks of a DeepSpeed JSON that only place the log of one host."""


# --- arguments of Plan.of: the sections of the schema under short names; defaults count as not written ---------------


@dataclass(kw_only=True, slots=True)
class Layout(ParallelConfig):
    """The requested layout of ranks and their schedule: the keys of the section `parallel`, sizes by short names too.
    world = tp * cp * pp * dp."""

    tp: int | None = None
    """Ranks that share each matrix."""
    pp: int | None = None
    """Pipeline ranks."""
    vpp: int | None = None
    """Model chunks per pipeline rank."""
    cp: int | None = None
    """Ranks that share each sequence."""
    ep: int | None = None
    """Ranks over which experts are spread."""
    etp: int | None = None
    """Ranks that share each expert's matrices."""


@dataclass(kw_only=True, slots=True)
class Batch(BatchConfig):
    """The batch of an optimizer step and how it is cut: the keys of the section `batch`, and the length of a
    sequence."""

    seq_length: Annotated[int, Facts(required=True)] = 0
    """Tokens of the longest sequence. Required."""


Section = Layout | Batch | Sharding | Quantization | Step | Optimizer | Run


def _written_keys(argument: str, section: Section | Mapping[str, object] | None) -> Mapping[str, object]:
    """The keys that one argument of `Plan.of` gives: all of a mapping, or the fields of a dataclass that differ from
    their defaults. Raises ConfigError if it is neither."""
    if section is None or isinstance(section, Mapping):
        return section or {}
    if not isinstance(section, Section):
        raise ConfigError(
            f"{argument} is of type {type(section).__name__}: it must be a {argument.capitalize()} or a dict."
        )
    defaults = type(section)()
    values = {each.name: getattr(section, each.name) for each in fields(section)}
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A configuration resolved for a number of ranks: from a file (`Plan.load`), or from the keys that an engine over
    the user's own model needs (`Plan.of`). It is the same on every rank."""

    config: Config
    """A copy of the configuration with every derivable key filled in. Not to be changed any more."""
    batch: BatchPlan
    """The cut of the optimizer step's batch; with batch warm-up, of the steps after it."""
    layout: RankLayout
    """The layout of the ranks."""
    notes: list[str] = field(default_factory=list)
    """Remarkable derived or overridden keys, one sentence each."""
    ramp: BatchRamp
    """The batch of each step."""
    written: Config | None = None
    """The configuration before anything was derived, from which the planner resolves other micro-batches or sync
    modes."""

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], overrides: Sequence[str] = (), *, world_size: int | None = None
    ) -> Plan:
        """The plan of a YAML file of megaaccum's keys.

        Args:
            path: the file.
            overrides: as on the command line, ["--grad_accum_steps", "4"].
            world_size: ranks over all hosts; default: the launcher's WORLD_SIZE, else 1.

        Raises:
            ConfigError: with every key that cannot be read, or else with every rule that is broken.
        """
        return resolve(load(path, overrides), world_size=_world_size(world_size))

    @classmethod
    def of(
        cls,
        *,
        batch: Batch | Mapping[str, object],
        layout: Layout | Mapping[str, object] | None = None,
        sharding: Sharding | Mapping[str, object] | None = None,
        quantization: Quantization | Mapping[str, object] | None = None,
        step: Step | Mapping[str, object] | None = None,
        optimizer: Optimizer | Mapping[str, object] | None = None,
        run: Run | Mapping[str, object] | None = None,
        world_size: int | None = None,
        **keys: object,
    ) -> Plan:
        """The plan of an engine over a model of the user's own: nothing is required that the engine does not use.

        Each section is a dataclass, which editors complete and type checkers check, or a dict of the same keys.

        Args:
            batch: `seq_length` (tokens, the most that a sequence has), `micro_batch_size` (sequences), and how many
                micro-batches a step has: `global_batch_size` (sequences), or per rank `grad_accum_steps`.
            layout: `tp`, `pp`, `vpp`, `cp`, `ep`, `schedule` and the other keys of a file's section `parallel`.
            sharding: `backend`, `zero_stage`, `sync`, `bf16`, `fp16`, ...
            quantization: `fp8_format`, `fp8_recipe`, ...
            step: `nonfinite`, `grad_norm_guard`, `short_batch`, loss scales, ...
            optimizer: `lr`, `weight_decay`, `clip_grad`, ...; without `lr` the engine has no LR schedule.
            run: `seed`, `rng`, `train_iters`, `override`, ...; what only `megaaccum train` does is not done.
            world_size: ranks over all hosts; default: the launcher's WORLD_SIZE, else 1.
            keys: any other key of a file.

        Raises:
            ConfigError: with every key that cannot be read, or else with every rule that is broken.
        """
        source = Source("Plan.of")
        sections = dict(batch=batch, layout=layout, sharding=sharding, quantization=quantization, step=step)
        for part, section in (sections | dict(optimizer=optimizer, run=run)).items():
            for name, each in _written_keys(part, section).items():
                source.put(name, each, f"{part}.{name}")
        for name, each in keys.items():
            source.put(name, each, name)
        config, problems = assemble([source])
        raise_problems(problems)
        return resolve(config, world_size=_world_size(world_size), own_model=True)

    def __repr__(self) -> str:
        """The plan in a few lines; `megaaccum check` prints all of it."""
        at, sharding = self.layout, self.config.sharding
        sizes = {"tp": at.tp, "cp": at.cp, "pp": at.pp, "vpp": at.vpp, "ep": at.ep, "dp": at.dp}
        axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no axis"
        stage = f" ZeRO-{sharding.zero_stage}" if sharding.backend == "deepspeed" else ""
        notes = f"\n{len(self.notes)} keys were derived or set aside: plan.notes" if self.notes else ""
        return (
            f"{axes} on {at.world_size} rank{'s' * (at.world_size != 1)}, schedule {at.schedule},"
            f" {sharding.backend}{stage} {sharding.sync}, {sharding.params_dtype} parameters\n"
            f"{self.batch.describe()}{notes}"
        )

    @property
    def in_runs(self) -> bool:
        """Whether a data-parallel rank has consecutive micro-batches of the global batch, rather than taking turns:
        their gradients are then one subtree of the sum (sharding/sum_tree.py)."""
        return self.config.sharding.reproducible == "layout" and self.config.sharding.sync == "resident"

    def ramp_state(self) -> dict[str, Any]:
        """The ramp in a checkpoint: the keys that request it, and its intervals on these ranks."""
        leaves = ["micro_batch_size"] if self.config.sharding.reproducible == "layout" else []  # of its sums
        asked = {name: value(self.config, name) for name in (*KEYS, "global_batch_size", *leaves)}
        return {"asked": asked, "intervals": [list(interval) for interval in self.ramp.intervals]}

    def ramp_differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """The keys that request other batches than a checkpoint (`ramp_state`): texts with both values, each with its
        remedy."""
        asked = self.ramp_state()["asked"]
        why = {"micro_batch_size": ", but reproducible layout needs the same one for the same bits"}
        return {
            f"{name}: {then} in the checkpoint, {asked[name]} in the configuration{why.get(name, '')}": (
                f"set {name} to {then}"
            )
            for name, then in saved.get("asked", {}).items()
            if name in asked and then != asked[name]
        }

    def continued(self, saved: Mapping[str, Any], consumed_samples: int) -> Plan:
        """This plan with the ramp of a checkpoint (`ramp_state`), perhaps cut over other ranks, from `consumed_samples`
        on; with `override: batch` its own ramp from there on. Raises ConfigError if the ramps differ without that, or
        if these ranks cannot continue the checkpoint's."""
        broken = partial(flush_problems, self.config)
        # Not self.ramp: that may be of a checkpoint that then proved damaged, or of an earlier load.
        ramp = build_ramp(self.config.batch, self.batch, self.config.run.train_iters, broken, [])
        intervals = saved.get("intervals", ramp.intervals)
        if (differing := self.ramp_differences(saved)) and "batch" not in self.config.run.override:
            texts = [f"{text}; {remedy}" for text, remedy in differing.items()]
            raise ConfigError([*texts, "or set override to batch, or no_load to true to start afresh."])
        if [*map(tuple, intervals)] != [*ramp.intervals]:
            if differing:
                past = [interval for interval in intervals if interval[0] < consumed_samples]
                ahead = [interval for interval in ramp.intervals if interval[0] > consumed_samples]
                intervals = [*past, (consumed_samples, ramp.size_at(consumed_samples)), *ahead]
            ramp = recut(intervals, self.batch, broken, consumed_samples)
        return self if ramp == self.ramp else replace(self, ramp=ramp)

    def digest(self) -> str:
        """A hash of everything that decides the numbers of this run, 16 hexadecimal digits, stable between hosts.

        Keys that may differ between hosts (`Facts.per_host`) are excluded.
        """
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, object]:
        """The digest's contents: every key that decides numbers, the DeepSpeed block, batch and layout."""
        keys = values_where(self.config, lambda facts: not facts.per_host)
        layout = {f"layout.{name}": value for name, value in asdict(self.layout).items()}
        keys |= {f"model.{key}": value for key, value in self.config.megatron.items()}
        theirs = {f"deepspeed.{key}": value for key, value in self.config.deepspeed.items() if key not in MONITORS}
        batch = {f"batch.{name}": value for name, value in asdict(self.batch).items()}
        facts = keys | layout | batch | {"batch ramp": self.ramp.intervals} | theirs
        if self.layout.schedule.endswith(".csv"):  # a table that every rank reads until rank 0 has shared its own
            table = stored_table(self.layout.schedule)
            facts["schedule table"] = hashlib.sha256(repr((table.stages, table.items)).encode()).hexdigest()[:16]
        return facts


def resolve(config: Config, *, world_size: int, own_model: bool = False) -> Plan:
    """The plan of a run on `world_size` ranks. Needs no process group and gives the same on every rank.

    Args:
        config: the configuration that a loader returns; not changed.
        world_size: ranks over all hosts.
        own_model: the user provides the model, its data and its training, so their keys are not required.

    `schedule: auto` becomes the first that the rules allow, Megatron's if they do; lab/planner/auto_schedule chooses.

    Raises:
        ConfigError: with one text per broken rule, all at once.
    """
    if config.parallel.schedule != "auto":
        return Plan(**resolve_keys(config, world_size, own_model=own_model)._asdict(), written=config)
    errors = []
    for named in with_schedules(config):
        try:
            return replace(resolve(named, world_size=world_size, own_model=own_model), written=config)
        except ConfigError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(error.problems))


def _world_size(given: int | None) -> int:
    slurm.adopt()
    return int(os.environ.get("WORLD_SIZE", "1")) if given is None else given
