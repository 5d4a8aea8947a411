"""From a planned layout to a configuration that `megaaccum check` accepts and `megaaccum train` runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megaaccum.config import Plan, precision, resolve
from megaaccum.config.batch import DEEPSPEED_SIZES, SIZES
from megaaccum.config.batch_keys import kept_sizes
from megaaccum.config.deepspeed_config import PASSED, ZERO_PASSED
from megaaccum.config.keys import SECTIONS, all_keys, names_where, value
from megaaccum.config.load import reset
from megaaccum.config.plan import MONITORS
from megaaccum.config.schema import Config
from megaaccum.config.source import COMMAND_LINE
from megaaccum.errors import problems_of
from megaaccum.lab.planner.stages import layout_text, split_layers
from megaaccum.lab.planner.workload import Workload
from megaaccum.schedule.registry import is_v_shaped
from megaaccum.texts import write_text

KEYS = dict(
    tp="tensor_model_parallel_size", cp="context_parallel_size", pp="pipeline_model_parallel_size",
    vpp="virtual_pipeline_model_parallel_size", ep="expert_model_parallel_size", etp="expert_tensor_parallel_size",
    schedule="schedule", sync="sync", zero="zero_stage", mbs="micro_batch_size", dbs="device_batch_size",
    ga="grad_accum_steps",
)  # fmt: skip
"""Names in a configuration of the axes that are keys of it."""


def planned_keys(workload: Workload, at: dict[str, Any]) -> dict[str, Any]:
    """The keys of one layout (`Layouts.axes`), by their names in a configuration."""
    axes = ["tp", "cp", "pp", "schedule", "mbs", "ga", "sync"]
    axes += ["zero"] if workload.sharding.backend == "deepspeed" else []
    axes += ["ep", "etp"] if workload.model.num_experts is not None else []
    keys: dict[str, Any] = {KEYS[axis]: at[axis] for axis in axes} | dict(
        sequence_parallel=at["tp"] > 1,
        transformer_impl=workload.layers(at["schedule"]).impl,
        pp_microbatches=at["dbs"] // at["mbs"],
        global_batch_size=workload.global_batch_size,
        world_size=workload.world_size,
    )
    if at["recompute"] == "full":
        keys |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif at["recompute"] == "selective":
        keys |= dict(recompute_granularity="selective")
    return keys | _stage_keys(workload, at)


def _stage_keys(workload: Workload, at: dict[str, Any]) -> dict[str, Any]:
    """How the layers are cut: a number of chunks where they divide, a layout where the ends are shorter."""
    model, stages = workload.model, at["pp"] * at["vpp"]
    if at["pp"] == 1:
        return {}
    if at.get("stages"):
        return dict(pipeline_model_parallel_layout=at["stages"])
    layers = split_layers(model.num_layers, stages)
    assert layers is not None, "candidates.py plans only layers that have a split"
    if len(set(layers)) > 1:
        return dict(pipeline_model_parallel_layout=layout_text(layers, model.mtp_num_layers or 0))
    has_chunks = at["vpp"] > 1 and not is_v_shaped(at["schedule"])
    return dict(virtual_pipeline_model_parallel_size=at["vpp"]) if has_chunks else {}


def set_aside(config: Config, names: Iterable[str]) -> None:
    """Put keys back to their defaults, as if they had not been written."""
    for name in names:
        reset(config, name)


def planned_config(workload: Workload, at: dict[str, Any]) -> Config:
    """The workload's configuration with one layout's keys, as if a user had written them."""
    config = copy.deepcopy(workload.config)
    set_aside(config, names_where(lambda facts: facts.planned))
    keys = planned_keys(workload, at)
    if keys.get("recompute_granularity") != "selective":
        reset(config, "recompute_modules")
    put(config, keys)
    config.deepspeed = {name: item for name, item in config.deepspeed.items() if name not in DEEPSPEED_SIZES}
    return config


def put(config: Config, keys: Mapping[str, Any]) -> None:
    """Set these keys, as written by the plan."""
    for name, new in keys.items():
        setattr(getattr(config, all_keys()[name].section), name, new)
        config.origin[name] = "the plan"


def checked(workload: Workload, at: dict[str, Any]) -> Plan:
    """One layout's configuration, resolved as `megaaccum check` does. ConfigError if it breaks a rule."""
    return resolve(planned_config(workload, at), world_size=workload.world_size)


def problems(workload: Workload, at: dict[str, Any]) -> list[str]:
    """Texts that `megaaccum check` has against a layout. Learning rate and length, without which there is a plan
    but no run, may be missing."""
    config = planned_config(workload, at)
    config.optimizer.lr = config.optimizer.lr or 1.0
    config.run.train_iters = config.run.train_iters or 1
    return problems_of(resolve, config, world_size=workload.world_size)


def write(workload: Workload, at: dict[str, Any], path: Path, *, comment: str, **keys: Any) -> None:
    """Write one layout's configuration, with `comment` in the first line and `keys` over what is planned. at: as
    `planned_keys` takes it; `stages`, in Megatron's notation, replaces the even split of the layers.

    Raises:
        ConfigError: it breaks a rule of `check` (nothing is written).
        OSError: the file cannot be written.
    """
    config = planned_config(workload, at)
    put(config, keys)
    resolve(config, world_size=workload.world_size)
    write_config(config, path, comment)


def write_config(config: Config, path: Path, comment: str) -> None:
    """Write the keys that were written as YAML, with `comment` in the first line."""
    text = yaml.safe_dump(as_sections(config), sort_keys=False, allow_unicode=True, width=100)
    write_text(path, f"# {comment}\n{text}")


def as_sections(config: Config) -> dict[str, Any]:
    """The keys that were written, by section, as a YAML file holds them. The ranks that the file is made for decide
    which sizes of the batch fit those of the command line."""
    at, ranks = config.parallel, config.run.world_size or config.run.nproc_per_node or 0
    dp = ranks // (at.tensor_model_parallel_size * at.context_parallel_size * at.pipeline_model_parallel_size)
    sections: dict[str, Any] = {name: {} for name in SECTIONS}
    written = config.origin.keys() - (set(SIZES) - kept_sizes(config, dp or None).keys())
    for key in all_keys().values():
        if key.name in written:
            sections[key.section][key.name] = value(config, key.name)
    sections["model"] |= config.megatron
    sections["deepspeed"] = _without_keys(config)
    return {name: keys for name, keys in sections.items() if keys}


def _without_keys(config: Config) -> dict[str, Any]:
    """The DeepSpeed JSON without what keys were set by or set aside: a file that states both contradicts itself as soon
    as one is changed. Its sizes stay to be compared with the batch, unless the command line's outrank them; "auto"
    stays where DeepSpeed's default would replace the key's."""
    names = {*PASSED, *MONITORS}
    if "clip_grad" not in config.origin:
        names.add("gradient_clipping")
    if not precision.is_given(config):
        names |= {"bf16", "bfloat16", "fp16"}
    if all(config.origin.get(name) != COMMAND_LINE for name in SIZES):
        names |= {*DEEPSPEED_SIZES}
    kept: dict[str, Any] = {name: item for name, item in config.deepspeed.items() if name in names}
    for name in MONITORS & kept.keys():
        kept[name] = {inner: item for inner, item in kept[name].items() if inner not in ("output_path", "project")}
    theirs: Any = config.deepspeed.get("zero_optimization", {})
    zero = {name: item for name, item in theirs.items() if name in ZERO_PASSED}
    if offload := theirs.get("offload_optimizer"):
        zero["offload_optimizer"] = offload | {"device": "auto"}
    return kept | ({"zero_optimization": zero} if zero else {})
