"""Receipts: one JSON file per start of a run, with what ran, on what, as planned and as measured.

`output_dir/receipts/start_1.json` is written as a whole when the log opens, again during the run, and when it ends.
docs/reference/receipts.md documents every field; if the meaning of one changes, `VERSION` rises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megaaccum
from megaaccum.config import Plan
from megaaccum.config.keys import SECTIONS, all_keys, value
from megaaccum.config.schema import Config
from megaaccum.errors import MegaaccumError
from megaaccum.platform.files import installed, set_aside
from megaaccum.pretrain.metrics.goodput import Goodput
from megaaccum.pretrain.metrics.journal import Record, writable
from megaaccum.texts import packaged_yaml, parse_json, read_text, replace_text

SCHEMA, VERSION = "megaaccum receipt", 1
LAUNCHED = "MEGAACCUM_LAUNCHED"
"""Environment variable in which a launcher passes the time of the command, in seconds since 1970."""
REWRITTEN_AFTER = 60.0
"""Least seconds between two writings of a receipt during the run."""
STEPS_KEPT = 1000
"""Number of last steps over which medians are taken."""

_OF_THE_BATCH = ("num_microbatches", "device_batch_size", "global_batch_size", "tokens_per_step")
_RECORDED: dict[str, str] = packaged_yaml("megaaccum.pretrain.metrics", "receipt.yaml")
"""Packages and environment variables that a receipt records."""
_CREDENTIALS = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # user:password of an address
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ASIA|eyJ)[\w.-]{10,}"
    r"|(?i:(?<=token=)|(?<=api.key=)|(?<=secret=)|(?<=password=))[^&\s]+"
)
"""Credentials in an address, and tokens of services that begin in a known way."""
_SHELLS = ("sh", "bash", "dash", "zsh", "fish")


class Receipt:
    """The receipt of one start, on the rank that writes the log."""

    def __init__(
        self, folder: Path, content: Record, *, fresh: bool = False, clock: Callable[[], float] = time.monotonic
    ):
        """Write `content` as the next receipt in `folder`/receipts. fresh: as the first one; receipts of an earlier run
        are moved aside (`receipts.1`, ...). clock: gives seconds. Raises MegaaccumError if it cannot be written."""
        home = folder / "receipts"
        if fresh and home.exists():
            with writable(home):
                set_aside(home)
        number = 1 + max((int(path.stem.removeprefix("start_")) for path in _files(home)), default=0)
        self.path = home / f"start_{number}.json"
        opening = {"schema": SCHEMA, "version": VERSION, "number": number, **content}
        self._opening = json.dumps(_strict(opening), indent=1, allow_nan=False).removesuffix("\n}")
        """Text of what does not change, with a line for every fact of every rank: written out once."""
        self._changing: Record = {"events": [], "measured": {"bytes": {}, "memory": {}}, "outcome": None}
        self._whole_batch = content.get("plan", {}).get("batch", {}).get("global_batch_size")
        self._clock, self._written = clock, -math.inf
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)
        self._phases: dict[str, float] = {}
        self._num_steps = 0
        self.write()

    def step(self, record: Record, goodput: Goodput) -> None:
        """Count a step's record in the journal."""
        self._num_steps += 1
        # The first one compiles, allocates and warms up; smaller batches of a ramp are not what is predicted.
        if self._num_steps > 1 and record.get("global_batch_size") in (None, self._whole_batch):
            self._seconds.append(record["seconds_per_step"])
        measured = self._changing["measured"]
        measured.setdefault("seconds_of_first_step", record["seconds_per_step"])
        for name, number in record.items():
            kind, _, rest = name.partition("_")
            if kind == "seconds" and rest != "per_step":
                self._phases[rest] = self._phases.get(rest, 0.0) + number
            elif kind == "memory":
                rest = rest.removesuffix("_bytes")
                measured["memory"][rest] = max(number, measured["memory"].get(rest, 0))
            elif kind == "bytes":
                measured["bytes"][rest] = number
            elif kind == "expert":
                measured.setdefault("experts", {})[rest] = number
        measured["goodput"] = {"share": goodput.share, "seconds": dict(goodput.seconds)}
        if record.get("skipped"):
            self.event("skip", record["step"], record.get("note", ""))
        elif record.get("sanitized"):
            self.event("drop", record["step"], record.get("note", ""))
        if self._num_steps == 4 or self._clock() - self._written >= REWRITTEN_AFTER:
            self.write()

    def event(self, kind: str, step: int, text: str) -> None:
        """Record an event of `step`: `skip`, `drop` (of micro-batches, or of elements set to 0), `restart`, `resume`,
        `verify`, `alarm`, `straggler`, `output` (which could not be written)."""
        self._changing["events"].append({"kind": kind, "step": step, "text": text})

    def close(self, outcome: str, step: int, now: float) -> None:
        """Write the final receipt. now: seconds since 1970."""
        self._changing["outcome"] = {"text": outcome, "step": step, "time": now}
        self.write()

    def write(self) -> None:
        """Write the receipt in its present state. Raises MegaaccumError if that fails."""
        measured = self._changing["measured"]
        if self._seconds:
            measured["seconds_per_step"] = statistics.median(self._seconds)
        measured["num_steps"] = self._num_steps
        measured["seconds"] = {name: total / self._num_steps for name, total in self._phases.items()}
        with writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            changing = json.dumps(_strict(self._changing), indent=1, allow_nan=False)
            replace_text(self.path, f"{self._opening},{changing.removeprefix('{')}\n")
        self._written = self._clock()


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Record:
    """Read one receipt. Raises MegaaccumError if the file is none, or is of a later version."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise MegaaccumError(f"{path} cannot be read as a receipt: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("version"), int):
        raise MegaaccumError(f"{path} is no receipt: it lacks schema {SCHEMA!r} and a version")
    if content["version"] > VERSION:
        raise MegaaccumError(
            f"{path} is a receipt of version {content['version']}, but megaaccum {megaaccum.__version__} reads up to"
            f" version {VERSION}: read it with the megaaccum that wrote it ({_writer(content)}), or a later one"
        )
    return content


def read_all(folder: Path) -> list[Record]:
    """Read the receipts of a run, by start. Raises MegaaccumError if there are none."""
    found = [read(path) for path in _files(folder / "receipts")]
    if not found:
        what = "is no folder" if not folder.is_dir() else "holds no receipts (receipts/start_1.json, ...)"
        raise MegaaccumError(
            f"{folder} {what}: give the output_dir of a run of `megaaccum train`, each start of which writes one, or to"
            " `generate` a Hugging Face folder, which has a config.json"
        )
    return found


def config_of(receipt: Record, folder: Path | None = None) -> Config:
    """The configuration that a receipt records, resolved. folder: the run's, which may have moved since; folders in it
    that were not given are in it still. A relative path that is not here is looked for where the run was started."""
    config, started = Config(), Path(receipt["folder"])
    for section, keys in receipt["configuration"].items():
        for name, facts in keys.items():
            found = facts["value"]
            if folder is not None and facts["from"] == "derived" and name in ("save", "data_cache_path"):
                found = str(folder / Path(found).name)
            elif name in all_keys() and all_keys()[name].facts.per_host:
                found = [_path(each, started) for each in found] if isinstance(found, list) else _path(found, started)
            setattr(getattr(config, section), name, found)
    config.megatron = receipt["megatron"]
    config.run.output_dir = config.run.output_dir if folder is None else str(folder)
    return config


def _path(given: Any, home: Path) -> Any:
    """A path, or the prefix of a dataset, here or else below `home`; unchanged if it is in neither place."""

    def is_there(path: str | Path) -> bool:
        return Path(path).exists() or Path(f"{path}.idx").exists()

    return str(home / given) if isinstance(given, str) and not is_there(given) and is_there(home / given) else given


def _writer(content: Record) -> str:
    code = content.get("code")
    return str(code.get("version", "unknown")) if isinstance(code, dict) else "unknown"


def _files(home: Path) -> list[Path]:
    numbered = [path for path in home.glob("start_*.json") if path.stem.removeprefix("start_").isdecimal()]
    return sorted(numbered, key=lambda path: int(path.stem.removeprefix("start_")))


# --- what a receipt says at the start --------------------------------------------------------------------------------


def opening(
    plan: Plan, *, data_digest: str, vocab_size: int, ranks: list[Record], predicted: Record, start_step: int
) -> Record:
    """Everything known of a start before its first step. ranks: `this_rank` of each. predicted: by the planner."""
    packages = {name: version for name in _RECORDED["packages"].split() if (version := installed(name)) is not None}
    return {
        "first_step": start_step + 1,
        "launched": launched(),
        "opened": time.time(),
        "command": sys.argv,
        "launcher": _launcher(),
        "folder": os.getcwd(),
        "environment": {name: os.environ[name] for name in sorted(os.environ.keys() & _RECORDED["variables"].split())},
        "configuration": _configuration(plan.config),
        "megatron": plan.config.megatron,
        "deepspeed": plan.config.deepspeed,
        "plan": {
            "digest": plan.digest(),
            "layout": dataclasses.asdict(plan.layout),
            "batch": dataclasses.asdict(plan.batch) | {name: getattr(plan.batch, name) for name in _OF_THE_BATCH},
            "batch_ramp": plan.ramp.intervals,
            "arithmetic": plan.batch.describe().splitlines(),
            "notes": plan.notes,
        },
        "data": {"digest": data_digest, "vocab_size": vocab_size},
        "code": code(),
        "versions": {"python": platform.python_version(), "system": platform.platform()} | packages,
        "ranks": ranks,
        "predicted": predicted,
    }


def launched() -> float:
    """When this start was launched, in seconds since 1970: the time of the command, if the launcher recorded it."""
    return float(os.environ.get(LAUNCHED) or time.time())


def _launcher() -> list[str]:
    """The program that started this rank, and the script or module that it runs; empty if that is a shell or unknown.
    Other words may hold a secret."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    except OSError:
        return []
    if not words or Path(words[0]).name.lstrip("-") in _SHELLS:
        return []
    is_python = Path(words[0]).name.startswith("python")
    at = next((i for i, word in enumerate(words[1:], 1) if word == "-m" or not word.startswith("-")), 0)
    script = words[at + (words[at] == "-m") :][:1] if is_python and at and "-c" not in words[:at] else []
    return [words[0], *script]


def this_rank(device: str | None, device_bytes: float | None) -> Record:
    """The host and device of this rank. device: its name, None for a CPU. device_bytes: its memory, if known."""
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "host": socket.gethostname(),
        "device": device or platform.processor() or platform.machine(),
        "device_bytes": device_bytes,
        "pid": os.getpid(),
    }


def _configuration(config: Config) -> dict[str, Record]:
    """Every key by section: its value and its origin."""
    sections: dict[str, Record] = {section: {} for section in SECTIONS}
    for name, key in all_keys().items():
        now, plain = value(config, name), getattr(SECTIONS[key.section](), name)
        origin = config.origin.get(name) or ("default" if now == plain else "derived")
        sections[key.section][name] = {"value": now, "from": origin}
    return sections


def settings(config: Config) -> Record:
    """The value of every key and of Megatron's own fields, without credentials."""
    return dict(_strict({**config.megatron, **{name: value(config, name) for name in all_keys()}}))


def code() -> Record:
    """Version, a hash of the package's code and tables and, in a git checkout, its commit and whether files differ
    from it (None elsewhere)."""
    package = Path(megaaccum.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    is_ours = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".") if is_ours else None
    return {
        "version": megaaccum.__version__,
        "digest": digest.hexdigest()[:16],
        "commit": _git(package, "rev-parse", "HEAD") if is_ours else None,
        "dirty": None if changed is None else bool(changed),
    }


def _git(folder: Path, *words: str) -> str | None:
    """The output of git; None if it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _strict(content: Any) -> Any:
    """The content in strict JSON, without credentials: a number that is not finite becomes its name."""
    if isinstance(content, str):
        return _CREDENTIALS.sub("***", content)
    if isinstance(content, Mapping):
        return {str(key): _strict(each) for key, each in content.items()}
    if isinstance(content, list | tuple | set | frozenset):
        return [_strict(each) for each in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content if isinstance(content, str | int | float | bool | None) else str(content)
