"""Hardware on which everything is slower than the table says by the factor that one measured run shows."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

from megaaccum.config.batch import BatchPlan
from megaaccum.config.keys import names_where
from megaaccum.config.layout import RankLayout
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError, MegaaccumError
from megaaccum.lab.planner.hardware import make_hardware, slowed
from megaaccum.lab.planner.layouts import SCHEDULES, from_rows, row_of
from megaaccum.lab.planner.workload import Workload
from megaaccum.pretrain.metrics import receipts
from megaaccum.pretrain.metrics.journal import Record


def fitted_to(workload: Workload, path: str, *, file: str | os.PathLike[str] | None = None) -> Workload:
    """`workload` on its hardware, slowed by the factor between the receipt's median step and the one that is predicted
    for the receipt's layout. file: of hardware entries.

    Raises:
        ConfigError: the file is no receipt, is one of another model or of an unknown schedule, or measured no step.
    """
    try:
        receipt = receipts.read(Path(path))
    except MegaaccumError as error:
        raise ConfigError(f"--from-run: {error}.") from None
    _check_model(workload, receipt, path)
    measured = receipt["measured"].get("seconds_per_step")
    if not measured:
        raise ConfigError(f"--from-run {path}: no step after the first was measured; give the receipt of a longer run.")
    ran = receipts.config_of(receipt)
    size = receipt["plan"]["layout"]["world_size"]
    run = replace(workload, config=ran, model=ran.model, sharding=ran.sharding, world_size=size)
    predicted = float(run.time_model(run.memory_model()).step(from_rows([_row(receipt, ran, path)])).total[0])
    source = f"everything {measured / predicted:.3g} times as long, as {path} measured"
    ours = workload.hardware
    entry = slowed(ours.name, measured / predicted, source=source, file=file)
    slower = make_hardware(ours.name, entry, ours.links.gpus_per_node)
    return replace(workload, hardware=replace(slower, hbm_bytes=ours.hbm_bytes))  # which `memory_gib` may say


def _check_model(workload: Workload, receipt: Record, path: str) -> None:
    """Raise ConfigError if the receipt's model is another than the workload's; how its layers are recomputed may
    differ."""
    keys, planned = receipt["configuration"]["model"], set(names_where(lambda facts: facts.planned))
    names = [each.name for each in fields(workload.model) if each.name in keys and each.name not in planned]
    named = {name: (getattr(workload.model, name), keys[name]["value"]) for name in names if name != "vocab_size"}
    other = [f"{name} {told} and not {ours}" for name, (ours, told) in named.items() if ours != told]
    if other:
        raise ConfigError(f"--from-run {path}: the run was of another model, with {', '.join(other[:4])}.")


def _row(receipt: Record, ran: Config, path: str) -> dict[str, int]:
    cut = receipt["plan"]["batch"]  # with what follows from it
    at, batch = RankLayout(**receipt["plan"]["layout"]), BatchPlan(**{f.name: cut[f.name] for f in fields(BatchPlan)})
    if at.schedule not in SCHEDULES:
        raise ConfigError(f"--from-run {path}: its schedule {at.schedule} is a table, for which no time is predicted.")
    return row_of(at, batch, ran) | dict(grad_accum_steps=batch.num_microbatches // batch.pp_microbatches)
