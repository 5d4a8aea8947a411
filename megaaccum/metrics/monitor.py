"""TensorBoard, Weights & Biases and CSV through DeepSpeed's monitor."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError
from megaaccum.metrics.journal import Record, replace_text, set_aside

if TYPE_CHECKING:
    from deepspeed.monitor.monitor import MonitorMaster

SERVICES = {
    "tensorboard": ("tensorboard_dir", "output_path", "tensorboard"),
    "wandb": ("wandb_project", "project", "wandb"),
    "csv_monitor": ("csv_dir", "output_path", None),
}
"""Of each block of DeepSpeed's JSON: the key of ours that asks for it, the block's name for the key's value, and the
package that it needs."""

Event = tuple[str, float, int]
"""Name, value, step: what DeepSpeed's monitor writes."""


class Monitor:
    """DeepSpeed's MonitorMaster for this run. It writes on global rank 0 alone, so it has to be opened there.

    Events carry the step as their x. CSV files hold one row per step, also after a resume; TensorBoard is told to
    forget what lies behind the step of the resume; Weights & Biases starts a new run at each start, unless its own
    variables WANDB_RUN_ID and WANDB_RESUME say which to go on with.
    """

    def __init__(self, config: Config, *, start_step: int):
        """Open what the configuration asks for. Needs torch.distributed to be initialised. Raises ConfigError where a
        service refuses (not logged in, folder not writable)."""
        blocks = blocks_of(config)
        csv_files = _tidy_csv(blocks.get("csv_monitor"), start_step)
        self._master = _open(blocks)
        if self._master.csv_monitor is not None:
            # DeepSpeed writes a header in front of the first row of every start; these files have theirs.
            self._master.csv_monitor.filenames += csv_files
        if self._master.tb_monitor is not None and start_step > 0:
            _forget_from(self._master.tb_monitor.summary_writer, start_step + 1)
        self._events: list[Event] = []

    def add(self, record: Record) -> None:
        """Keep the finite numbers of a record of the journal, until `flush`; a gap shows where one was not."""
        prefix, step = record["kind"], record["step"]
        self._events += [
            (f"{prefix}/{name}", float(value), step)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        ]

    def flush(self) -> None:
        """Hand everything kept to DeepSpeed's monitor, which writes it through."""
        if self._events:
            self._master.write_events(self._events)
            self._events = []

    def close(self) -> None:
        """Flush, and end what DeepSpeed leaves open: W&B would end with the process, but a rank may leave without."""
        self.flush()
        if self._master.tb_monitor is not None:
            self._master.tb_monitor.summary_writer.close()
        if self._master.wandb_monitor is not None:
            import wandb

            wandb.finish()


def blocks_of(config: Config) -> dict[str, dict[str, Any]]:
    """What DeepSpeed's monitor is given, by block; empty when nothing is asked for.

    `config` is a resolved one: places that the user's DeepSpeed JSON names have become tensorboard_dir, wandb_project
    and csv_dir. What else a block of that JSON says (W&B's team and group, a job's name) is handed through.
    """
    blocks = {}
    for name, (key, their_key, _) in SERVICES.items():
        value = getattr(config.run, key)
        if value is not None:
            # DeepSpeed adds a folder named after the job; without a job's name the key names the folder itself.
            theirs = config.deepspeed.get(name) or ({} if name == "wandb" else {"job_name": ""})
            assert isinstance(theirs, dict), f"the DeepSpeed JSON's {name} passed the rules and is no mapping"
            blocks[name] = theirs | {"enabled": True, their_key: value}
    return blocks


def missing_packages(config: Config) -> list[str]:
    """One text for each service that is asked for and whose package is not installed, with what to do."""
    return [
        f"{key} is set, but the Python package {package} is not installed: "
        f"install it (pip install {package}) or remove {key}"
        for key, _, package in (SERVICES[name] for name in blocks_of(config))
        if package is not None and importlib.util.find_spec(package) is None
    ]


def _open(blocks: dict[str, dict[str, Any]]) -> MonitorMaster:
    import deepspeed.comm
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    if not deepspeed.comm.is_initialized():
        # Adopts the process group that torch.distributed already has; without an engine nobody has done it yet.
        deepspeed.comm.init_distributed(verbose=False, auto_mpi_discovery=False)
    assert deepspeed.comm.get_rank() == 0, "DeepSpeed's monitor writes on global rank 0 alone"
    try:
        return MonitorMaster(get_monitor_config(blocks))
    except Exception as error:  # a service's own classes, known only where its package is installed
        raise ConfigError(f"{', '.join(blocks)} could not be opened: {type(error).__name__}: {error}") from error


def _tidy_csv(block: dict[str, Any] | None, start_step: int) -> list[str]:
    """Make the folder's CSV files end at `start_step` (a fresh start moves them aside); the names that have rows."""
    if block is None:
        return []
    folder = Path(block.get("output_path", "")) / block.get("job_name", "DeepSpeedJobName")
    names = []
    for kind in ("train", "valid"):
        for path in sorted(folder.glob(f"{kind}_*.csv")):
            if path.stem.count(".") == 0 and start_step == 0:
                set_aside(path)
            elif path.stem.count(".") == 0:
                _keep_rows(path, start_step)
                names.append(path.stem)
    return names


def _keep_rows(path: Path, last_step: int) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file)) or [["step", path.stem]]
    kept = io.StringIO()
    whole = [row for row in rows if len(row) == len(header) and row[0].isdigit() and int(row[0]) <= last_step]
    csv.writer(kept).writerows([header, *whole])
    replace_text(path, kept.getvalue())


def _forget_from(writer: Any, step: int) -> None:
    """Tell TensorBoard that events at `step` and behind belong to a run that was cut off."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    writer.file_writer.add_event(Event(step=step, file_version="brain.Event:2"))
    writer.file_writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
