"""Kills: a run that is ended at random, again and again, by signals to its ranks and its launcher, and ends bit-equal.

    python -m benchmarks kills [--seed S] [--kills N] [--steps N] [--json F]

Each round starts `megaaccum train`, lets it run for a random time, sends SIGKILL, SIGTERM, SIGHUP or SIGSTOP to the
launcher or to one of its ranks, and gives the job what a supervisor gives it: some seconds to end, and then SIGKILL to
the launcher. The next round is the same command. At the end the run has the losses, weights and moments of one that
nothing disturbed, to the bit; after each round no process of it is left, and its last checkpoint is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from megaaccum.checkpoint.folders import latest, read_progress
from megaaccum.checkpoint.untrusted_reader import CheckpointReader
from megaaccum.pretrain.metrics import journal
from tests.support.whole_runs import flags, make_data

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP)
LIMIT, PATIENCE = 300.0, 8.0
"""Seconds of a start that nothing disturbs, and those that a supervisor waits after a signal."""
MARK = "MEGAACCUM_KILLS"
"""The variable by which processes of a job are found, whatever became of their parents."""


@dataclass(frozen=True)
class Kill:
    """One round: the signal ("none" if the run had ended before), who got it, when (seconds after the start, or after
    its first step), the exit code and the step that is saved."""

    signal: str
    to: str
    moment: str
    after: float
    code: int
    step: int
    orphans: int


def main(argv: list[str] | None = None) -> int:
    """Returns an exit code: 1 if the run differs from one that nothing disturbed, or a process is left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kills", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--steps", type=int, default=400, help="of a run; it is begun again if it ends before all kills"
    )
    parser.add_argument("--json", type=Path, help="also write the rounds here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        for each in (whole, killed):
            each.mkdir()
            make_data(each)
        assert run_to_the_end(whole, args.steps) == 0, (whole / "output").read_text()
        choose, rounds, trial = random.Random(args.seed), [], Trial(args.steps, *phases(whole))
        while kills(rounds) < args.kills:
            rounds.append(trial.kill_once(killed, choose))
            print(rounds[-1], flush=True)
            if rounds[-1].step == args.steps:  # it is done before all kills are: begin again, in the same folder
                assert outcome(killed) == outcome(whole), "the run differs from one that nothing disturbed"
                killed = Path(folder, f"killed{len(rounds)}")
                killed.mkdir()
                make_data(killed)
        code = run_to_the_end(killed, args.steps)
        same, left = outcome(killed) == outcome(whole), sum(each.orphans for each in rounds)
    print(f"{kills(rounds)} kills: exit code {code}, {'bit-equal' if same else 'NOT EQUAL'}, {left} orphans")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in rounds], indent=1) + "\n")
    return int(code != 0 or not same or left > 0)


def kills(rounds: list[Kill]) -> int:
    """The rounds in which a signal was sent to a run that was running."""
    return sum(each.signal != "none" for each in rounds)


def command(folder: Path, steps: int) -> list[str]:
    """The command of every start."""
    keys = dict(train_iters=steps, save_interval=20, log_interval=50, async_save=True)
    return [sys.executable, "-m", "megaaccum", "train", *flags(folder, **keys)]


def start(folder: Path, steps: int) -> tuple[subprocess.Popen[bytes], str]:
    """A job, and the mark that all of its processes carry."""
    mark = uuid.uuid4().hex
    with open(folder / "output", "ab") as output:
        job = subprocess.Popen(
            command(folder, steps), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return job, mark


def run_to_the_end(folder: Path, steps: int) -> int:
    """The exit code of a start that nothing disturbs."""
    job, mark = start(folder, steps)
    try:
        return job.wait(LIMIT)
    finally:
        for pid in processes(mark):
            send(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Trial:
    """Kills starts of a run of `steps` steps. starting, training: seconds before and after the first step of one that
    nothing disturbs."""

    steps: int
    starting: float
    training: float

    def kill_once(self, folder: Path, choose: random.Random) -> Kill:
        """One round; in one of four the start is still starting."""
        signum, early, to_launcher = choose.choice(SIGNALS), choose.random() < 0.25, choose.random() < 0.5
        after = choose.uniform(0, self.starting if early else self.training)
        before = starts(folder)
        job, mark = start(folder, self.steps)
        deadline = time.monotonic() + LIMIT
        while not early and starts(folder) == before and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(after)
        ranks = [pid for pid in processes(mark) if pid != job.pid and is_leader(pid)]
        target = job.pid if to_launcher or not ranks else choose.choice(ranks)
        kind = "none" if job.poll() is not None else signal.Signals(signum).name
        send(target, signum)
        try:
            job.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        deadline = time.monotonic() + 5
        while (left := processes(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            send(pid, signal.SIGKILL)
        current = latest(folder / "run" / "checkpoints")
        step = read_progress(current).step if current else 0
        name, moment = "launcher" if target == job.pid else "rank", "starting" if early else "training"
        return Kill(kind, name, moment, round(after, 2), job.returncode, step, len(left))


def phases(folder: Path) -> tuple[float, float]:
    """(seconds before the first step, seconds after it) of the only start of a run."""
    first, *_, last = journal.lines(folder / "run" / "log.jsonl")
    return first["time"] - first["launched"], last["time"] - first["time"]


def starts(folder: Path) -> int:
    """How many starts of a run have come to their first step."""
    path = folder / "run" / "log.jsonl"
    return path.read_text().count('"kind": "start"') if path.exists() else 0


def send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def is_leader(pid: int) -> bool:
    """Whether a process leads a session, as a rank does and a worker of its loader does not."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def processes(mark: str) -> list[int]:
    """The living processes that were started with the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
    return found


def outcome(folder: Path) -> tuple[list[float], dict[str, str], dict[str, object]]:
    """The losses of all steps, the SHA-256 of every tensor of the last checkpoint, and its counters."""
    current = latest(folder / "run" / "checkpoints")
    assert current is not None
    progress = read_progress(current)
    reader = CheckpointReader(current, progress.metadata_sha256)
    reader.read(reader.stored)
    records = [each for each in journal.read(folder / "run" / "log.jsonl") if each["kind"] == "train"]
    assert [each["step"] for each in records] == list(range(1, len(records) + 1))
    digests = {key: each.sha256 for key, each in reader.stored.items()}
    return [each["loss"] for each in records], digests, progress.transaction | {"samples": progress.consumed_samples}
