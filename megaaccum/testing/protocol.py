"""What a test process and the process that forks its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megaaccum.distributed.processes import RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Run `module:qualname` on `world_size` ranks.

    `call` is the pickled (args, kwargs), not opened by the server. `folder` is empty and takes what the ranks write.
    `timeout` is in seconds, from the fork of the first rank.
    """

    module: str
    qualname: str
    call: bytes
    world_size: int
    timeout: float
    init: bool
    env: dict[str, str]
    path: list[str]
    cwd: str
    folder: Path

    def result_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.result"

    def output_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.output"

    def error_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.error"

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.stack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended.

    `status`: exit code, or minus the signal. `ended_by_harness`: it still ran when the time was up or another rank had
    failed. `error`: the exception that ended it, if one did. `stack`: every thread's stack when the time was up.
    `result`: the pickled return value, None when there is none. `order`: 0 for the first that ended.
    """

    rank: int
    status: int
    order: int
    ended_by_harness: bool
    error: RankError | None
    output: str
    stack: str
    result: bytes | None

    @property
    def failed(self) -> bool:
        """It did not return from its function."""
        return self.status != 0 or self.result is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The ranks' outcomes in rank order, and whether the time ran out."""

    outcomes: list[Outcome]
    timed_out: bool
