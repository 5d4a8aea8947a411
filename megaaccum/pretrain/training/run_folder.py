"""The folders that a run writes to. Torch-free, so that a launcher can check them before it starts a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum.errors import ConfigError
from megaaccum.platform.files import folder_problems
from megaaccum.pretrain.metrics import log

if TYPE_CHECKING:
    from megaaccum.config import Config


def checkpoint_folder(config: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(config.run.save or Path(config.run.output_dir) / "checkpoints")


def check_folders(config: Config) -> None:
    """Check that logs and checkpoints can be written, before anything takes long. Raises ConfigError."""
    log.check(config)
    saves = config.run.save_interval > 0 or config.run.save_at_end
    if saves and (problems := folder_problems("save", str(checkpoint_folder(config)))):
        raise ConfigError(problems)
