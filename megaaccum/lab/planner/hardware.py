"""The GPUs and networks that the planner knows: megaaccum/lab/planner/hardware.yaml, and files of the same form."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from math import inf
from typing import Any, cast

from megaaccum.config.source import parse_yaml
from megaaccum.errors import ConfigError
from megaaccum.lab.planner.comm import Links
from megaaccum.lab.planner.compute import Device, Efficiency
from megaaccum.lab.planner.memory import Usage
from megaaccum.texts import packaged_yaml, read_text
from megaaccum.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A kind of GPU in its kind of node."""

    name: str
    """The name as the user writes it."""
    hbm_bytes: float
    """Memory that a process can have."""
    device: Device
    links: Links
    usage: Usage
    source: str
    """The sources of the figures."""

    @property
    def name_of_peak(self) -> str:
        """The GPU and its peak, for a table's title."""
        return f"{self.name} ({self.device.peak / 1e12:.4g} TFLOP/s, {self.hbm_bytes / GIB:.0f} GiB)"


_KEYS = frozenset(
    "like hbm_gib peak_tflops peak_fp32_tflops peak_fp8_tflops peak_fp4_tflops hbm_tb_per_s gpus_per_node "
    "node_gb_per_s node_latency_us net_gb_per_s net_latency_us runtime_gib fragmentation efficiency source".split()
)


def load_hardware(
    name: str,
    *,
    file: str | os.PathLike[str] | None = None,
    gpus_per_node: int | None = None,
) -> Hardware:
    """The entry `name` of the file, or of those in the package.

    Raises:
        ConfigError: no such entry (with the nearest names), or an entry with a key missing or unknown.
    """
    entries = _packaged() | ({} if file is None else _read(str(file)))
    wanted = _key(name)
    if wanted not in entries:
        near = get_close_matches(wanted, entries, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? Known are" if near else "known are"
        raise ConfigError(
            f"{name} is not in the hardware table; {hint} {', '.join(entries)}."
            " `megaaccum calibrate` measures a machine and writes an entry for --hardware."
        )
    return make_hardware(wanted, _merged(wanted, entries), gpus_per_node)


_RATES = ("gemm", "gemm_fp8", "gemm_fp4", "attention", "scores", "memory")
_DELAYS = ("launch", "step", "microbatch")
_MAY_BE_ZERO = (*_DELAYS, "straggler", "runtime_gib", "fragmentation", "node_latency_us", "net_latency_us")


def slowed(name: str, factor: float, *, source: str, file: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The entry `name`, whole, of a machine on which everything takes `factor` times as long: rates and bandwidths
    divided by it, latencies multiplied. source: why, for its `source`. Raises ConfigError as `load_hardware`."""
    entries = _packaged() | ({} if file is None else _read(str(file)))
    entry = _merged(_key(name), entries)
    efficiency = {key: float(value) for key, value in entry["efficiency"].items()}
    now = Efficiency(**efficiency)
    efficiency |= {key: getattr(now, key) / factor for key in _RATES}
    efficiency |= {key: getattr(now, key) * factor for key in _DELAYS}
    scaled = {key: entry[key] / factor for key in ("node_gb_per_s", "net_gb_per_s")}
    scaled |= {key: entry[key] * factor for key in ("node_latency_us", "net_latency_us")}
    return entry | scaled | {"efficiency": efficiency, "source": f"{entry['source']}; {source}"}


def usual_usage() -> Usage:
    """Memory that a device keeps beside tensors where nothing was measured: the table's entry that others take over."""
    return load_hardware(names()[0]).usage


def entry_of(device: str, num_bytes: float | None) -> str | None:
    """The entry of a GPU by the name that its driver gives it ("NVIDIA H100 80GB HBM3"), of several the one whose
    memory is nearest to `num_bytes`; None if the table has none."""
    words = device.lower().replace("-", " ").split()
    found = [name for name in names() if name.split("_")[0] in words]
    if num_bytes is None:
        return found[0] if found else None
    return min(found, key=lambda name: abs(load_hardware(name).hbm_bytes - num_bytes), default=None)


def names() -> list[str]:
    """The GPUs in the package."""
    return list(_packaged())


@cache
def _packaged() -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", packaged_yaml("megaaccum.lab.planner", "hardware.yaml"))


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        entries = parse_yaml(read_text(path), path)
    except OSError as error:
        raise ConfigError(f"cannot read the hardware file {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the hardware file {path} is not UTF-8: {error}.") from None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigError(f"the hardware file {path} must map names to entries, as `megaaccum calibrate` writes it.")
    return {_key(name): entry for name, entry in entries.items()}


def _key(name: object) -> str:
    """The name of an entry, however the user writes it."""
    return str(name).lower().replace("-", "_")


def _merged(name: str, entries: dict[str, dict[str, Any]], above: tuple[str, ...] = ()) -> dict[str, Any]:
    """An entry over the one that it is `like`. above: the entries that are like it."""
    entry = entries[name]
    if not isinstance(entry.get("efficiency", {}), dict):
        raise ConfigError(f"hardware entry {name}: efficiency is {entry['efficiency']!r}, and has to name constants.")
    if unknown := sorted(map(str, entry.keys() - _KEYS)):
        raise ConfigError(
            f"hardware entry {name} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}."
        )
    if "like" not in entry:
        return dict(entry)
    base = _key(entry["like"])
    if base == name:  # the package's entry, whose place the file's takes
        entries = _packaged()
    if entries.get(base) in (None, entry) or base in above:
        raise ConfigError(f"hardware entry {name} is like {base!r}, which is no other entry.")
    below = _merged(base, entries, (name, *above))
    return below | entry | {"efficiency": below.get("efficiency", {}) | entry.get("efficiency", {})}


def make_hardware(name: str, entry: dict[str, Any], gpus_per_node: int | None) -> Hardware:
    """The machine of an entry. Raises ConfigError if a key is missing, unknown or no number that can be."""
    if missing := sorted(_KEYS - entry.keys() - {"like", "peak_fp32_tflops"}):
        raise ConfigError(f"hardware entry {name} lacks {', '.join(missing)}.")
    if unknown := sorted(map(str, entry["efficiency"].keys() - {field.name for field in fields(Efficiency)})):
        raise ConfigError(f"efficiency of hardware entry {name} has unknown keys {', '.join(unknown)}.")
    for key, value in {**entry, **entry["efficiency"]}.items():
        least = "at least 0" if key in _MAY_BE_ZERO else "above 0"
        number = isinstance(value, int | float) and (0 < value < inf or (value == 0 and key in _MAY_BE_ZERO))
        if key not in ("like", "source", "efficiency") and not number:
            raise ConfigError(f"hardware entry {name}: {key} is {value!r}, and has to be {least}.")
    efficiency = Efficiency(**{key: float(value) for key, value in entry["efficiency"].items()})
    peaks = {key: entry.get(f"{key}_tflops", inf) * 1e12 for key in ("peak", "peak_fp8", "peak_fp4", "peak_fp32")}
    return Hardware(
        name=name,
        hbm_bytes=entry["hbm_gib"] * GIB,
        device=Device(**peaks, hbm_bandwidth=entry["hbm_tb_per_s"] * 1e12, efficiency=efficiency),
        links=Links(
            gpus_per_node=gpus_per_node or int(entry["gpus_per_node"]),
            node_bandwidth=entry["node_gb_per_s"] * 1e9,
            node_latency=entry["node_latency_us"] * 1e-6,
            net_bandwidth=entry["net_gb_per_s"] * 1e9 * efficiency.network,
            net_latency=entry["net_latency_us"] * 1e-6,
        ),
        usage=Usage(runtime_bytes=entry["runtime_gib"] * GIB, fragmentation=float(entry["fragmentation"])),
        source=str(entry["source"]),
    )
