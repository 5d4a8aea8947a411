"""The nearest legal values of a number: what an error tells the reader to write instead."""

from __future__ import annotations

from collections.abc import Callable


def nearest(value: int, legal: Callable[[int], bool], *, lowest: int = 1, highest: int) -> list[int]:
    """The closest legal number below `value` and the closest above, whichever of them exist in [lowest, highest]."""
    below = next((n for n in range(min(value - 1, highest), lowest - 1, -1) if legal(n)), None)
    above = next((n for n in range(max(value + 1, lowest), highest + 1) if legal(n)), None)
    return [n for n in (below, above) if n is not None]


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`: the one below (unless it is 0) and the one above."""
    below = (value - 1) // unit * unit
    above = value // unit * unit + unit
    return [n for n in (below, above) if n > 0]


def nearest_divisors(value: int, number: int) -> list[int]:
    """The divisors of `number` next to `value`, below and above."""
    return nearest(value, lambda n: number % n == 0, highest=number)


def either(values: list[int]) -> str:
    """'8', '8 or 12' ..., for the end of a sentence."""
    return " or ".join(str(v) for v in values)
