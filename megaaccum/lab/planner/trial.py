"""Running one candidate of `megaaccum tune`: a short training run in processes of its own, and its result."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaaccum.config import Config, batch_ramp
from megaaccum.config.plan import MONITORS
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import layout_config
from megaaccum.lab.planner.expected import OF_THE_DEVICE
from megaaccum.lab.planner.fallbacks import (
    FAILED,
    HANGS,
    MEASURED,
    NOT_FINITE,
    OUT_OF_MEMORY,
    UNSTEADY,
    Candidate,
    Outcome,
)
from megaaccum.lab.planner.search import Ranked
from megaaccum.lab.planner.workload import Workload
from megaaccum.pretrain.launch import processes
from megaaccum.pretrain.metrics import journal, receipts
from megaaccum.pretrain.metrics.journal import Record
from megaaccum.texts import parse_json, read_text, write_text

STEPS = 4
"""Steps of a candidate. The first one allocates, compiles and warms up, and counts for nothing."""
TIMED = slice(1, 4)
DECAY = 0.9
"""Decay of the moving average of the gradient's norm."""
GRACE_SECONDS = 10.0
_NO_MEMORY = (
    "out of memory", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory", "MemoryError",
    "killed by the system for want of memory",
)  # fmt: skip
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL)
"""Exit codes of a process that the system ended, of a shell or our launcher about it, and of DeepSpeed's launcher."""
_WRITES = ("save", "load", "finetune", "reset_iteration", "tensorboard_dir", "wandb_project", "csv_dir")
_ENDS_EARLY = ("exit_interval", "exit_duration_in_mins", *batch_ramp.KEYS)
"""Keys by which a run ends before its steps are done, or has smaller batches in them than the planner priced."""
_HELD = ("parameters", "gradients", "optimizer", "buffers", "activations", "p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runs candidates of one workload.

    folder: of their configurations and runs. command: starts a run, followed by the path of a configuration.
    time_limit: seconds after which a candidate is ended. steps: at least 4. band: the gradient's norm may be this many
    times its moving average, or that part of it.
    """

    workload: Workload
    folder: Path
    command: Sequence[str]
    time_limit: float
    steps: int = STEPS
    band: float = 4.0

    def run(self, candidate: Candidate) -> Outcome:
        """Train `steps` steps of `candidate` in fresh processes."""
        # With its axes: another --fix ranks other layouts, in rows of the same numbers.
        folder = self.folder / f"row_{candidate.row}_{candidate.name.replace(',', '_').replace('=', '')}"
        path = folder / "config.yaml"
        layout_config.write_config(self.config(candidate, folder), path, candidate.name)
        code, output = _run([*self.command, str(path)], self.time_limit)
        if code is None:
            text = f"it had not ended after {self.time_limit:g} s\n{_tail(output)}"
            return Outcome(verdict=HANGS, text=text)
        if code in _KILLED or (code != 0 and any(mark in output for mark in _NO_MEMORY)):
            return Outcome(verdict=OUT_OF_MEMORY, text=_tail(output))
        return self._judged(folder, code, output)

    def config(self, candidate: Candidate, folder: Path) -> Config:
        """The candidate's configuration: no checkpoints, evaluations or metrics, and a run in `folder`."""
        config = layout_config.planned_config(self.workload, dict(candidate.axes))
        keys: dict[str, Any] = dict(
            max_steps=self.steps, output_dir=str(folder / "run"), save_interval=0, save_at_end=False, eval_interval=0,
            sample_every=0, text_comparisons_every=0, verify_at_start=False, no_load=True, log_interval=1,
            transformer_impl=self.workload.config.model.transformer_impl,
            data_cache_path=self.workload.config.data.data_cache_path or str(self.folder / "cache"),
            nproc_per_node=self.workload.world_size, train_iters=max(self.workload.config.run.train_iters, self.steps),
        )  # fmt: skip
        layout_config.set_aside(config, (*_WRITES, *_ENDS_EARLY))
        layout_config.put(config, keys)
        config.deepspeed = {name: block for name, block in config.deepspeed.items() if name not in MONITORS}
        return config

    def _judged(self, folder: Path, code: int, output: str) -> Outcome:
        """The verdict on an ended run, from its log and receipt."""
        log = folder / "run" / "log.jsonl"
        steps = [each for each in journal.read(log) if each["kind"] == "train"] if log.exists() else []
        seconds = [float(each["seconds_per_step"]) for each in steps]
        norms = [_norm_of(each) for each in steps if not _finds_the_loss_scale(each)]
        if None in norms or (steps and not norms):
            text = f"gradient norms by step (None if the gradient was not finite): {norms}"
            return Outcome(verdict=NOT_FINITE, text=text, steps=seconds)
        if code != 0 or len(steps) < self.steps:
            return Outcome(verdict=FAILED, text=f"exit code {code}\n{_tail(output)}", steps=seconds)
        if problem := self._leaves_band([norm for norm in norms if norm is not None]):
            return Outcome(verdict=UNSTEADY, text=problem, steps=seconds)
        (*_, receipt) = receipts.read_all(folder / "run")
        held = receipt["measured"]["memory"]
        return Outcome(
            verdict=MEASURED,
            seconds=statistics.median(seconds[TIMED]),
            bytes=float(sum(held.get(kind, 0) for kind in _HELD)),
            receipt=str(folder / "run" / "receipts" / f"start_{receipt['number']}.json"),
            steps=seconds,
        )

    def _leaves_band(self, norms: Sequence[float]) -> str:
        """Why a gradient's norm is outside the band around its moving average; empty if none is."""
        average = norms[0]
        for step, norm in enumerate(norms):
            if not average / self.band <= norm <= average * self.band:
                return (
                    f"the gradient's norm is {norm:.4g} in step {step}, and its moving average {average:.4g}: more than"
                    f" {self.band:g} times apart"
                )
            average = DECAY * average + (1 - DECAY) * norm
        return ""


def candidates_of(ranked: Ranked) -> list[Candidate]:
    """The layouts of a ranking as candidates, in its order."""
    seconds, memory = ranked.time.total, ranked.memory
    held = memory.total - sum(memory.by_kind[kind] for kind in OF_THE_DEVICE)  # no run measures these
    return [
        Candidate(row=at + 1, axes=ranked.name_of(at), seconds=float(seconds[at]), bytes=float(held[at]))
        for at in range(len(ranked))
    ]


class Results:
    """The outcomes of a tuning run, in a file that is whole at any time."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        """Read `path`, if it is there. Raises ConfigError if it holds results of another run."""
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.outcomes: dict[str, Outcome] = {}
        if not path.exists():
            return
        try:
            content = parse_json(read_text(path))
            theirs = content["identity"]
            self.outcomes = {name: Outcome(**each) for name, each in content["outcomes"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no file of results of `megaaccum tune`: {error!r}. Move it away.") from None
        if theirs != self.identity:
            differing = [name for name in self.identity if theirs.get(name) != self.identity[name]]
            raise ConfigError(
                f"{path} holds results of another run ({', '.join(differing)} differ): give another --output, or remove"
                " the folder."
            )

    def add(self, candidate: Candidate, outcome: Outcome) -> None:
        """Write the outcome of `candidate`."""
        self.outcomes[candidate.name] = outcome
        outcomes = {name: dataclasses.asdict(each) for name, each in self.outcomes.items()}
        text = json.dumps({"identity": self.identity, "outcomes": outcomes}, indent=1)
        write_text(self.path, text + "\n")


def _norm_of(step: Record) -> float | None:
    """The norm of a step's gradient; None if it was not finite, also where `nonfinite` made it so."""
    norm = step.get("grad_norm")
    return None if norm is None or not math.isfinite(norm) or step.get("sanitized") else float(norm)


def _finds_the_loss_scale(step: Record) -> bool:
    """Whether an FP16 step overflowed and the loss scale could go down for it: no lane is worse for that."""
    return bool("loss_scale" in step and step.get("skipped") and not step.get("note"))


def _run(command: Sequence[str], limit: float) -> tuple[int | None, str]:
    """(exit code, output); None for a command that was ended after `limit` seconds, with all of its ranks."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, errors="replace", preexec_fn=partial(processes.end_with, os.getpid()),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, _end(process)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> str:
    """End the process and its ranks: a launcher passes the first signal on, and ends its ranks at the second. Returns
    what it printed."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            output, _ = process.communicate(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            output, _ = process.communicate()
        return output
    return ""


def _tail(output: str, lines: int = 8) -> str:
    return "\n".join(output.strip().splitlines()[-lines:])
