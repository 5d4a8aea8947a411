"""Schedules in CSV files: a row per rank, an action per cell.

In a file the first number of an action is the *stage* of the whole pipeline, as in the tables of
torch.distributed.pipelining, so that files can be exchanged with it: `7B2` is the backward of micro-batch 2 on stage 7.
Which rank holds a stage is then read off the file. Files whose rows all use the same numbers count a rank's chunks
instead; with two or more chunks they say in a first line `# placement: loop` or `# placement: v` how stages are placed.
"""

from __future__ import annotations

import re
from pathlib import Path

from megaaccum.errors import ScheduleError
from megaaccum.schedule.actions import Item, Pair, Placement, Schedule, changed, make_schedule, parse, passes_of
from megaaccum.texts import read_text, write_text

_NOT_COMPUTE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
"""Entries of torch's lowered tables beside passes; our ranks derive those."""


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """Write `schedule` with stage numbers; torch's `_load_csv(..., format="compute_only")` reads it too."""
    lines = (
        ",".join(str(_by_stage(item, schedule.stages[rank])) for item in schedule.items[rank])
        for rank in range(schedule.pp)
    )
    write_text(path, "\n".join(lines) + "\n")


def _by_stage(item: Item, stages: tuple[int, ...]) -> str:
    written = changed(item, lambda action: action._replace(chunk=stages[action.chunk]))
    return f"{written}OVERLAP_F_B" if isinstance(written, Pair) else str(written)


def read_csv(path: str | Path) -> Schedule:
    """The schedule in a file; its name is the path. Not validated.

    Raises ScheduleError if the file cannot be read as a table of actions, naming row and cell.
    """
    try:
        return parse_csv(path, read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScheduleError(f"schedule {path}: the file cannot be read: {reason}") from error


def parse_csv(path: str | Path, text: str) -> Schedule:
    """The schedule that `read_csv` finds where the file at `path` holds `text`. Raises ScheduleError."""
    lines = text.splitlines()
    header = [line for line in lines if line.startswith("#")]
    written = [line for line in lines if line.strip() and line not in header]
    rows = [_read_row(path, number, line) for number, line in enumerate(written)]
    if not rows or not all(rows):
        raise ScheduleError(f"schedule {path}: a row per rank is needed, with at least one action each")
    numbers = [sorted({action.chunk for action in passes_of(row)}) for row in rows]
    num_microbatches = 1 + max(action.microbatch for row in rows for action in passes_of(row))
    if len(rows) > 1 and all(held == numbers[0] for held in numbers):
        return _by_chunk(path, rows, len(numbers[0]), num_microbatches, header)
    _check_stages(path, numbers)
    chunk_of = {stage: chunk for held in numbers for chunk, stage in enumerate(held)}
    items = [tuple(changed(item, lambda a: a._replace(chunk=chunk_of[a.chunk])) for item in row) for row in rows]
    return Schedule(
        name=str(path),
        pp=len(rows),
        num_microbatches=num_microbatches,
        stages=tuple(tuple(held) for held in numbers),
        items=tuple(items),
    )


def _read_row(path: str | Path, rank: int, line: str) -> list[Item]:
    """The actions of one row. Empty cells, where torch's tables wait, are left out."""
    items = []
    for column, cell in enumerate(line.split(",")):
        if not cell.strip() or _NOT_COMPUTE.fullmatch(cell.strip()):
            continue
        try:
            items.append(parse(cell))
        except ScheduleError as error:
            raise ScheduleError(f"schedule {path}, rank {rank}, cell {column}: {error}") from error
    return items


def _by_chunk(
    path: str | Path, rows: list[list[Item]], chunks: int, num_microbatches: int, header: list[str]
) -> Schedule:
    said = re.search(r"placement:\s*(\w+)", " ".join(header))
    placement: Placement
    if chunks == 1 or (said and said[1] == "loop"):
        placement = "loop"
    elif chunks == 2 and said and said[1] == "v":
        placement = "v"
    else:
        raise ScheduleError(
            f"schedule {path} counts {chunks} chunks on each rank: say in its first line how stages are placed,"
            " `# placement: loop` or, with two chunks, `# placement: v`, or write stage numbers"
        )
    return make_schedule(str(path), num_microbatches=num_microbatches, placement=placement, chunks=chunks, items=rows)


def _check_stages(path: str | Path, numbers: list[list[int]]) -> None:
    held = sorted(stage for stages in numbers for stage in stages)
    if held != list(range(len(held))):
        raise ScheduleError(
            f"schedule {path}: each of the stages 0 to {max(held)} has to be in exactly one row: they hold {numbers}"
        )
    if len({len(stages) for stages in numbers}) > 1:
        raise ScheduleError(f"schedule {path}: every rank has to hold as many stages, but the rows hold {numbers}")
