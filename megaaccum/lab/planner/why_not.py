"""Why a layout is not in the table: the rule it breaks, the memory it lacks, or the rank it has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megaaccum.config import resolve
from megaaccum.config.keys import names_where
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError, problems_of
from megaaccum.lab.planner.candidates import AXES, Limits, schedules
from megaaccum.lab.planner.layout_config import KEYS, put, set_aside
from megaaccum.lab.planner.layouts import RECOMPUTE, SYNC_MODES, short_name
from megaaccum.lab.planner.search import NEAR_FASTEST, Ranked, search
from megaaccum.lab.planner.stages import layout_text, split_layers
from megaaccum.lab.planner.workload import Workload
from megaaccum.units import GIB


def parse_axes(text: str) -> dict[str, Any]:
    """'tp=4,pp=8,schedule=1f1b' as a dictionary.

    Raises:
        ConfigError: something else is written, or an axis or a name that does not exist.
    """
    legal = dict(recompute=RECOMPUTE, schedule=schedules(), sync=SYNC_MODES, zero=("1", "2", "3"))
    wanted: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or name not in AXES or name in wanted or not value:
            raise ConfigError(f"{part!r} must read axis=value, with an axis of {', '.join(AXES)}, each once.")
        if name in legal:
            if value not in legal[name]:
                raise ConfigError(f"{part!r}: {name} must be one of {', '.join(legal[name])}.")
            wanted[name] = int(value) if name == "zero" else value
        elif value.isdecimal() and int(value) >= 1:
            wanted[name] = int(value)
        else:
            raise ConfigError(f"{part!r}: {name} must be a number of at least 1.")
    return wanted


def why_not(workload: Workload, wanted: Mapping[str, Any], limits: Limits, ranked: Ranked, *, rank: str) -> str:
    """Why no layout with these values is the first: a text of one paragraph."""
    named = ", ".join(f"{axis}={value}" for axis, value in wanted.items())
    places = ranked.find(dict(wanted))
    if len(places):
        return _place(ranked, int(places[np.argmin(ranked.time.total[places])]), named, rank)
    narrowed = replace(limits, fixed={**limits.fixed, **wanted})
    try:
        workload.candidates(narrowed).layouts()
    except ConfigError as error:
        return f"{named} is out: {_broken_rules(workload, wanted) or error}"
    try:
        found = search(workload, narrowed, rank="time")
    except ConfigError as error:
        return f"{named} is legal: {error}"
    its, first = (
        f"{_told(each.name_of(0))}, takes {each.memory.total[0] / GIB:.1f} GiB and {each.time.total[0]:.3g} s"
        for each in (found, ranked)
    )
    return (
        f"{named} fits, but the search looks at it only with --fix {named.replace(' ', '')}: its fastest layout, {its}"
        f" per step, where the first, {first}."
    )


def _place(ranked: Ranked, index: int, named: str, rank: str) -> str:
    """A layout that fits: its place, and the terms of time and memory that set it apart from the first."""
    if index == 0:
        return f"{named} is the first of {len(ranked)} layouts by {rank}."
    here, first = ranked.name_of(index), ranked.name_of(0)
    time, seconds = _widest(ranked.time.by_part, index)
    kind, size = _widest(ranked.memory.by_kind, index)
    total, best = ranked.time.total[index], ranked.time.total[0]
    gib, best_gib = ranked.memory.total[index] / GIB, ranked.memory.total[0] / GIB
    text = (
        f"{named} fits, and its fastest layout, {_told(here)}, is number {index + 1} of {len(ranked)} by {rank}:"
        f" {gib:.1f} GiB and {total:.3g} s per step, where the first, {_told(first)}, takes {best_gib:.1f} GiB and"
        f" {best:.3g} s. Time: {time} {seconds:+.3g} s; memory: {kind} {size / GIB:+.3g} GiB."
    )
    better = (ranked.time.total <= total) & (ranked.memory.total <= ranked.memory.total[index])
    if (above := int(np.argmax(better))) < min(index, ranked.num_unbeaten):
        return f"{text} {_told(ranked.name_of(above))} beats it in both."
    if rank == "default" and total <= NEAR_FASTEST * ranked.time.total.min():
        more = [f"{axis} {here[axis]}, not {first[axis]}" for axis in _WISHES if here[axis] != first[axis]]
        text += f" In time both count as equal, and less wins: {', '.join(more)}." if more else ""
    return text


_WISHES = ("cp", "tp", "pp", "ep", "recompute", "dbs")


def _widest(terms: Mapping[str, np.ndarray], index: int) -> tuple[str, float]:
    """The term in which a layout differs most from the first, and by how much."""
    differences = {name: float(values[index] - values[0]) for name, values in terms.items()}
    name = max(differences, key=lambda name: abs(differences[name]))
    return name, differences[name]


def _told(at: Mapping[str, Any]) -> str:
    return f"{short_name(at)} mbs {at['mbs']} x ga {at['ga']} {at['schedule']}, recompute {at['recompute']}"


def _broken_rules(workload: Workload, wanted: Mapping[str, Any]) -> str | None:
    """The rules of the configuration that these values break, with their nearest legal values; None if none."""
    per_node = workload.hardware.links.gpus_per_node
    if wanted.get("tp", 1) > per_node:
        return (
            f"tensor_model_parallel_size {wanted['tp']} is more than the {per_node} GPUs of a node: its all-reduces in"
            f" every layer would cross the network; set it to at most {per_node}."
        )
    config = _with_keys(workload.config, wanted)
    return " ".join(problems_of(resolve, config, world_size=workload.world_size)) or None


def _with_keys(config: Config, wanted: Mapping[str, Any]) -> Config:
    """The configuration with only these of the planned keys, and without modules to recompute, since whether layers are
    recomputed is planned."""
    config = copy.deepcopy(config)
    set_aside(config, {*names_where(lambda facts: facts.planned), "recompute_modules"} - {"global_batch_size"})
    named = {KEYS[axis]: value for axis, value in wanted.items() if axis in KEYS and (axis, value) != ("vpp", 1)}
    put(config, named | ({"sequence_parallel": True} if wanted.get("tp", 1) > 1 else {}))
    pp, vpp = wanted.get("pp", 1), wanted.get("vpp", 1)
    layers = split_layers(config.model.num_layers, pp * vpp)
    if layers is not None and len(set(layers)) > 1:  # the planner's split, where layers do not divide
        set_aside(config, ["virtual_pipeline_model_parallel_size"])
        put(config, {"pipeline_model_parallel_layout": layout_text(layers, config.model.mtp_num_layers or 0)})
    return config
