"""Errors for users: each names what is wrong, with the numbers, and the nearest legal values."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Self


class MegaaccumError(Exception):
    """Base of every error that megaaccum raises for a user. The command line prints its text without a traceback.

    printed_by: the ranks that print it under a launcher that shows the output of all ranks. Every rank that raises it;
    the first rank of each host, if all ranks of a host raise the same error; or rank 0, if all ranks of the job do.
    """

    printed_by: Literal["every rank", "one rank per host", "rank 0"] = "every rank"

    def __str__(self) -> str:
        return printable(super().__str__())

    def printed_once(self) -> Self:
        """This error, which every rank is about to raise, marked so that rank 0 alone prints it."""
        self.printed_by = "rank 0"
        return self


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text for a terminal: what would move its cursor, hide or reorder letters, or is no character, is escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = 2000) -> str:
    """A text from outside for a message: its beginning, and how much was cut."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} characters more)"


class ConfigError(MegaaccumError, ValueError):
    """One or more keys of the configuration cannot be honoured.

    `problems` holds one text per mistake, so that a user sees all of them at once. `shown` has those for a terminal;
    beyond `MOST_SHOWN` it says how many more there are.
    """

    MOST_SHOWN = 50

    def __init__(self, problems: str | Sequence[str]):
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        more = len(self.problems) - self.MOST_SHOWN
        self.shown = [printable(shortened(problem)) for problem in self.problems[: self.MOST_SHOWN]]
        self.shown += [f"... and {more} more."] if more > 0 else []
        super().__init__("\n".join(self.shown))


def raise_problems(problems: Sequence[str]) -> None:
    """Raise ConfigError with `problems`, if there are any."""
    if problems:
        raise ConfigError(problems)


def problems_of(action: Callable[..., object], *args: object, **keys: object) -> list[str]:
    """The problems of the ConfigError that `action` raises with these arguments; none if it raises none."""
    try:
        action(*args, **keys)
    except ConfigError as error:
        return error.problems
    return []


def as_users_error(error: BaseException) -> BaseException:
    """The error to show for a file or folder that the system refuses, or a full disk, of which a write does not say
    where; any other is `error` itself."""
    if not isinstance(error, OSError) or error.strerror is None:
        return error
    if error.filename is not None:
        return ConfigError(f"{shortened(str(error.filename), 300)}: {error.strerror}")
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return ConfigError(f"{error.strerror}: free some, or write elsewhere") if is_full else error


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that this exception ends: 2 for ConfigError, 130 for Ctrl-C, else 1."""
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT
    return 2 if isinstance(error, ConfigError) else 1


def is_for_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's allocator raises a RuntimeError on a CPU."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in ("out of memory", "allocate memory"))


class DataError(MegaaccumError):
    """A dataset, tokenizer or corpus is missing, truncated or contradicts itself."""


class CheckpointError(MegaaccumError):
    """A checkpoint cannot be written, read, or does not fit this model."""


class LaunchError(MegaaccumError):
    """Ranks could not be started, or one of them ended early."""


class StepError(MegaaccumError):
    """A step failed in a way that ends the run by its configuration; no rank has changed its weights in it."""


class RankDisagreement(MegaaccumError):
    """Ranks that must do the same were about to do different things."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot run: an action is missing, out of order, or waits for ever."""


class FlushError(MegaaccumError):
    """A rank failed in the middle of a pipeline flush; the text names rank, action and micro-batch."""


def nearest(value: int, legal: Callable[[int], bool], *, lowest: int = 1, highest: int) -> list[int]:
    """The closest legal number below `value` and the closest above, whichever of them exist in [lowest, highest] and
    within a hundred thousand of it."""
    far = 100_000
    below = next((n for n in range(min(value - 1, highest), max(lowest, value - far) - 1, -1) if legal(n)), None)
    above = next((n for n in range(max(value + 1, lowest), min(highest, value + far) + 1) if legal(n)), None)
    return [n for n in (below, above) if n is not None]


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`: the one below (unless it is 0) and the one above."""
    below, above = (value - 1) // unit * unit, (value // unit + 1) * unit
    return [n for n in (below, above) if n > 0]


def nearest_divisors(value: int, number: int) -> list[int]:
    """The divisors of `number` next to `value`, below and above."""
    return nearest(value, lambda n: number % n == 0, highest=number)


def indivisible(
    name: str,
    value: int,
    factors: Mapping[str, int],
    *,
    change: Literal["both", "value", "factor"] = "both",
    more: str = "",
) -> Iterator[str]:
    """The text that `value` of the key `name` is not divisible by the product of `factors`, keys with their values;
    none if it is, or if a number is missing (0). change: what the nearest legal numbers are given of. more: what else
    would do."""
    if min(value, *factors.values()) < 1 or value % (unit := math.prod(factors.values())) == 0:
        return
    legal = [f"{name} to {either(nearest_multiples(value, unit))}"] if change != "factor" else []
    for factor, size in factors.items() if change != "value" else ():
        if value % (unit // size) == 0:  # by the others
            legal.append(f"{factor} to {either(nearest_divisors(size, value // (unit // size)))}")
    yield f"{name} {value} is not divisible by {equation(factors)}: set {', or '.join(legal)}{more}."


def equation(factors: Mapping[str, int]) -> str:
    """'tp 2 * cp 4 = 8', or 'tp 2'; a factor without a name is a number alone."""
    product = " * ".join(f"{name} {value}".strip() for name, value in factors.items())
    return f"{product} = {math.prod(factors.values())}" if len(factors) > 1 else product


def either(values: list[int]) -> str:
    """'8', '8 or 12' ..., for the end of a sentence."""
    return " or ".join(str(v) for v in values)


def listed(texts: Iterable[object], separator: str = ", ", *, most: int = 4) -> str:
    """'a, b, c, d, and 3 more'."""
    found = [str(text) for text in texts]
    more = [f"and {len(found) - most} more"] if found[most:] else []
    return separator.join(found[:most] + more)


def as_product(shape: Iterable[int]) -> str:
    """'3 x 4'; a scalar is 'one element'."""
    return " x ".join(map(str, shape)) or "one element"


def did_you_mean(name: str, known: Iterable[str], *, most: int = 2, cutoff: float = 0.6) -> str:
    """' (did you mean lr or lr_decay_iters?)', to follow an unknown name; '' if nothing is near."""
    from difflib import get_close_matches  # a module of some size, for errors alone

    near = get_close_matches(name, list(dict.fromkeys(known)), n=most, cutoff=cutoff)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
