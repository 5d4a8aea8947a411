"""Services that show a run's numbers: TensorBoard, Weights & Biases, and CSV files."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError
from megaaccum.platform.files import set_aside
from megaaccum.pretrain.metrics.journal import KINDS, Record
from megaaccum.pretrain.metrics.receipts import settings
from megaaccum.texts import replace_text


class Services:
    """Every service that the configuration names. Only the process that writes the log opens them.

    Events have the step as their x. After a resume CSV files and TensorBoard show each step once: CSV files lose the
    rows after the checkpoint, and TensorBoard hides them. Weights & Biases continues the run of `output_dir` (or that
    of WANDB_RUN_ID), which cannot be cut: it has a repeated step twice, the last attempt later. Of a run that begins at
    step 0 again CSV files are moved aside, TensorBoard hides all, and Weights & Biases begins another.
    """

    def __init__(self, config: Config, *, start_step: int, lost: Callable[[str], None]):
        """Open the services at `start_step` (0: a fresh run). lost: takes the text about a service that fails later and
        is left out from then on. Raises ConfigError if one refuses (not logged in, folder not writable)."""
        self._open: dict[str, _Service] = {}
        self._lost = lost
        for name in configured_services(config):
            try:
                self._open[name] = _SERVICES[name][2](config, start_step)
            except Exception as error:  # a service's own classes, known only where its package is installed
                raise ConfigError(f"{name} could not be opened: {type(error).__name__}: {error}") from error

    def add(self, record: Record) -> None:
        """Write the finite numbers of a record of the journal; numbers that are not finite leave a gap."""
        values = {
            f"{record['kind']}/{name}": float(value)
            for name, value in record.items()
            if name not in ("step", "time") and isinstance(value, int | float) and math.isfinite(value)
        }
        self._each("write", record["step"], values)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: object) -> None:
        """Call a method of every service. The journal has every number, so an error of a service, which is on this rank
        alone, does not end the run."""
        for name, service in [*self._open.items()]:
            try:
                getattr(service, method)(*args)
            except Exception as error:
                del self._open[name]
                self._lost(f"{name} is written no more: {type(error).__name__}: {error}")


def configured_services(config: Config) -> list[str]:
    """The blocks of DeepSpeed's JSON (tensorboard, wandb, csv_monitor) whose key is set in a resolved configuration."""
    return [name for name, (key, _, _) in _SERVICES.items() if getattr(config.run, key) is not None]


def missing_packages(config: Config) -> list[str]:
    """One text, with a remedy, for each configured service whose package is not installed."""
    return [
        f"{key} is set, and its package {package} is not installed: pip install {package}, or remove {key}"
        for key, package, _ in (_SERVICES[name] for name in configured_services(config))
        if package and importlib.util.find_spec(package) is None
    ]


def _block(config: Config, name: str) -> dict[str, Any]:
    """Other keys that the user's DeepSpeed JSON has for a service (W&B's team and group, a job's name)."""
    block = config.deepspeed.get(name) or {}
    assert isinstance(block, dict), f"the DeepSpeed JSON's {name} passed the rules and is no mapping"
    return block


def _folder(config: Config, name: str) -> Path:
    """The folder that the key names; with a block in DeepSpeed's JSON the folder of the job inside it, as DeepSpeed has
    it."""
    block = _block(config, name)
    return Path(getattr(config.run, _SERVICES[name][0])) / (block.get("job_name", "DeepSpeedJobName") if block else "")


class _Service:
    """Takes the numbers of each step, by name: `train/loss`."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Make all written values visible to readers."""

    def close(self) -> None:
        """Close the service; nothing is written after this."""


class _TensorBoard(_Service):
    def __init__(self, config: Config, start_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Events after the checkpoint are of steps that are repeated; without one all are, with the evaluation before.
        self._writer = SummaryWriter(_folder(config, "tensorboard"), purge_step=start_step + 1 if start_step else 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb(_Service):
    def __init__(self, config: Config, start_step: int):
        import wandb

        block, kept = _block(config, "wandb"), Path(config.run.output_dir) / "wandb_run_id"
        if start_step == 0 or not kept.exists():
            replace_text(kept, uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.run.wandb_project, entity=block.get("team"), group=block.get("group"),
            id=os.environ.get("WANDB_RUN_ID") or kept.read_text(encoding="utf-8"), resume="allow",
            config=settings(config),
        )  # fmt: skip
        # W&B drops rows whose own step is below the last one, so those of every step that a resume repeats.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class _Csv(_Service):
    """One file per number, one row per step."""

    def __init__(self, config: Config, start_step: int):
        self._folder = _folder(config, "csv_monitor")
        self._folder.mkdir(parents=True, exist_ok=True)
        found = [path for kind in KINDS for path in sorted(self._folder.glob(f"{kind}_*.csv"))]
        for path in (path for path in found if "." not in path.stem):  # others are of an earlier run, moved aside
            if start_step == 0:
                set_aside(path)
            else:
                _keep_rows(path, start_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            with (self._folder / f"{name.replace('/', '_')}.csv").open("a", newline="", encoding="utf-8") as file:
                header = [["step", name.rpartition("/")[2]]] if file.tell() == 0 else []
                csv.writer(file).writerows([*header, [step, value]])


def _keep_rows(path: Path, last_step: int) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file)) or [["step", path.stem]]
    kept = io.StringIO()
    whole = [row for row in rows if len(row) == len(header) and row[0].isdigit() and int(row[0]) <= last_step]
    csv.writer(kept).writerows([header, *whole])
    replace_text(path, kept.getvalue())


_SERVICES: dict[str, tuple[str, str, Callable[[Config, int], _Service]]] = {
    "tensorboard": ("tensorboard_dir", "tensorboard", _TensorBoard),
    "wandb": ("wandb_project", "wandb", _Wandb),
    "csv_monitor": ("csv_dir", "", _Csv),
}
"""(key, required package, class) of each block of DeepSpeed's JSON."""
