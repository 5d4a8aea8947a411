"""DeepSpeed's hostfile: one `host slots=N` a line, blank lines and comments aside."""

from __future__ import annotations

import os
import re

from megaaccum.errors import ConfigError, raise_problems
from megaaccum.texts import read_text

_LINE = re.compile(r"([A-Za-z0-9_][\w.:-]*)\s+slots=(\d{1,9})", re.ASCII)


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Slots (ranks) of each host, in the file's order.

    Raises:
        ConfigError: the file cannot be read, names no host, or has lines that are wrong; every such line is named.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the hostfile {path}: {getattr(error, 'strerror', None) or error}.") from None
    slots: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        place = f"{os.path.basename(path)}:{number}"
        if not text:
            continue
        if match is None:
            problems.append(f"{place}: {text!r} must read 'host slots=N', such as 'worker-1 slots=8'.")
        elif int(match[2]) < 1:
            problems.append(f"{place}: {match[1]} has slots={match[2]}: give it at least 1, or remove the line.")
        elif match[1] in slots:
            problems.append(f"{place}: host {match[1]} was already given; give it once, with all its slots.")
        else:
            slots[match[1]] = int(match[2])
    if not slots and not problems:
        problems.append(f"the hostfile {path} names no host: write lines such as 'worker-1 slots=8'.")
    raise_problems(problems)
    return slots
