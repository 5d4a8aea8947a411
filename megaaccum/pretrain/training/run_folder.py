"""The folders that a run writes into. Torch-free: a launcher asks before it starts a rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum.errors import ConfigError
from megaaccum.platform.files import folder_problems
from megaaccum.pretrain.metrics import log

if TYPE_CHECKING:
    from megaaccum.config import Config


def checkpoint_folder(config: Config) -> Path:
    """Where checkpoints of a run with `config` are written."""
    return Path(config.run.save or Path(config.run.output_dir) / "checkpoints")


def check_folders(config: Config) -> None:
    """Logs and checkpoints can be written, known before anything takes long. Raises ConfigError."""
    log.check(config)
    saves = config.run.save_interval > 0 or config.run.save_at_end
    if saves and (problems := folder_problems("save", str(checkpoint_folder(config)))):
        raise ConfigError(problems)
