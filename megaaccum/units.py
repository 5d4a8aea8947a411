"""Texts of sizes, counts and times for readers."""

from __future__ import annotations

GIB = 2**30


def amount(num_bytes: float) -> str:
    """`1.50 GiB`."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 2**10:.2f} KiB"


def rounded(number: float) -> str:
    """`7.24B`."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= 0.9995 * unit:  # of which three digits are 1, not 1e+03 of the unit below
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`, `3 d 1:02:03`."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{secs:02}" if hours or days else f"{minutes}:{secs:02}"
    return f"{days} d {clock}" if days else clock
