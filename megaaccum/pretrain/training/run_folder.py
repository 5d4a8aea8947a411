"""The folders that a run writes to. Torch-free, so that a launcher can check them before it starts a rank."""

from __future__ import annotations

import os
from pathlib import Path

from megaaccum.config import Config
from megaaccum.errors import LaunchError, raise_problems
from megaaccum.pretrain.launch.lock import claim
from megaaccum.pretrain.metrics import run_log


def checkpoint_folder(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.save or Path(config.run.output_dir) / "checkpoints")


def check_folders(config: Config) -> None:
    """Check that logs and checkpoints can be written, before anything takes long. Raises ConfigError."""
    run_log.check(config)
    folders = {"save": checkpoint_folder(config)} if _saves(config) else {}
    folders |= {"schedule_trace": Path(config.run.schedule_trace).parent} if config.run.schedule_trace else {}
    raise_problems([each for key, folder in folders.items() for each in run_log.folder_problems(key, str(folder))])


def claim_folders(config: Config) -> None:
    """Lock the folders of the run for rank 0, which writes to them, until it ends. Raises LaunchError if another run
    has one."""
    if int(os.environ["RANK"]) > 0:
        return
    for folder in [Path(config.run.output_dir), *([checkpoint_folder(config)] if _saves(config) else [])]:
        try:
            problem = claim(folder)
        except OSError as error:
            problem = f"{folder} cannot be locked for this run: {error.strerror or error}: {error.filename}"
        if problem:
            raise LaunchError(f"{problem}, or give this one another output_dir and save")


def _saves(config: Config) -> bool:
    return config.run.save_interval > 0 or config.run.save_at_end
