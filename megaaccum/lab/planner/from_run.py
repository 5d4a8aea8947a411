"""Hardware on which everything is slower than the table says by the factor that one measured run shows."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

from megaaccum.config.keys import names_where
from megaaccum.errors import ConfigError, MegaaccumError
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, from_rows
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
    run = replace(
        workload, config=ran, model=ran.model, sharding=ran.sharding, world_size=receipt["plan"]["layout"]["world_size"]
    )  # fmt: skip
    predicted = float(run.time_model(run.memory_model()).step(from_rows([_row(receipt, path)])).total[0])
    source = f"everything {measured / predicted:.3g} times as long, as {path} measured"
    name = workload.hardware.name
    per_node = workload.hardware.links.gpus_per_node
    return replace(
        workload, hardware=load_hardware(name, file=file, gpus_per_node=per_node, slower=(measured / predicted, source))
    )


def _check_model(workload: Workload, receipt: Record, path: str) -> None:
    """Raise ConfigError if the receipt's model is another than the workload's; how its layers are recomputed may
    differ."""
    keys, planned = receipt["configuration"]["model"], set(names_where(lambda facts: facts.planned))
    names = [each.name for each in fields(workload.model) if each.name in keys and each.name not in planned]
    named = {name: (getattr(workload.model, name), keys[name]["value"]) for name in names if name != "vocab_size"}
    other = [f"{name} {told} and not {ours}" for name, (ours, told) in named.items() if ours != told]
    if other:
        raise ConfigError(f"--from-run {path}: the run was of another model, with {', '.join(other[:4])}.")


def _row(receipt: Record, path: str) -> dict[str, int]:
    at, batch = receipt["plan"]["layout"], receipt["plan"]["batch"]
    keys = {name: facts["value"] for section in receipt["configuration"].values() for name, facts in section.items()}
    if at["schedule"] not in SCHEDULES:
        raise ConfigError(
            f"--from-run {path}: its schedule {at['schedule']} is a table, for which no time is predicted."
        )
    return dict(
        **{axis: at[axis] for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")},
        micro_batch_size=batch["micro_batch_size"],
        pp_microbatches=batch["pp_microbatches"],
        grad_accum_steps=batch["num_microbatches"] // batch["pp_microbatches"],
        recompute=RECOMPUTE.index(keys["recompute_granularity"] or "none"),
        schedule=SCHEDULES.index(at["schedule"]),
        sync=SYNC_MODES.index(keys["sync"]),
        zero_stage=keys["zero_stage"],
        sequence_parallel=int(keys["sequence_parallel"]),
    )
