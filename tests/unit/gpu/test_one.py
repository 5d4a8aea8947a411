"""The suite of one GPU, dry: cases run, fail, run out of time, and are not run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import one, spec


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def ended(*command: str, **more: str) -> subprocess.CompletedProcess:
    """A process of its own, since the libraries of a dry run are changed for a CPU."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | more
    return subprocess.run(command, cwd=one.ROOT, env=env, capture_output=True, text=True)


def test_cases_have_names_of_their_own_and_functions():
    every = spec.specs()
    assert len({each.name for each in every}) == len(every)
    source = (Path(spec.__file__).parent / "cases.py").read_text()
    assert all(f"\ndef {each.function}(" in source for each in every)


WITH_TORCH = "torch triton filelock fsspec jinja2 markupsafe mpmath networkx numpy setuptools sympy"
ALONE = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

def normal(names):
    return {name.lower().replace("_", "-") for name in names}

installed = packages_distributions()

class Brought(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        names = normal(installed.get(name.partition(".")[0], ()))
        absent = names and not names & set(sys.argv[1:]) and not any(each.startswith("nvidia") for each in names)
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Brought
import tests.gpu.cases, benchmarks.bare, benchmarks.layer
"""


def test_cases_need_nothing_that_the_kit_does_not_bring():
    """Beside torch and what it brings; no pytest."""
    kit = (Path(spec.__file__).parent / "kit.sh").read_text().replace("\\\n", " ")
    brought = kit.partition("(pinned ")[2].partition(")")[0].split()

    ran = ended(sys.executable, "-c", ALONE, *brought, "deepspeed", "megaaccum", *WITH_TORCH.split())
    assert ran.returncode == 0, ran.stderr


def test_a_name_that_is_none_is_refused():
    assert [each.group for each in one.choose(["adam", "zero-3 bf16"])] == ["smoke", "adam"]
    with pytest.raises(SystemExit, match="no case or subcommand smok; subcommands: env, smoke"):
        one.choose(["smok"])


def test_a_case_that_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []
    monkeypatch.setattr(one, "run", lambda case, *, dry: ran.append(case.name) or {"ok": case.name != "lanes", "n": 1})
    monkeypatch.setattr(one, "_prepare_forks", lambda: None)
    command = ["--dry-run", "probe", "lanes", "--out", str(tmp_path / "out.jsonl")]
    assert (one.main(command), ran) == (1, ["probe", "lanes"])
    assert (one.main(command), ran[2:]) == (1, ["lanes"])
    assert one.main([*command, "--again"]) == 1
    assert ran[3:] == ["probe", "lanes"]
    line = lines(tmp_path / "out.jsonl")[0]
    assert line["result"] == {"n": 1}
    assert {"case", "ok", "seconds", "date", "ranks", "commit", "machine", "dry_run", "versions"} < line.keys()
    assert line["machine"].startswith("no GPU")


def test_a_hang_and_a_failure_are_lines_like_others(monkeypatch: pytest.MonkeyPatch):
    class Process:
        def __init__(self, code: int | None):
            self.returncode = code

        def poll(self) -> int | None:
            return self.returncode

        def kill(self) -> None:
            self.returncode = -9

        def wait(self) -> int | None:
            return self.returncode

    hang = [Process(0), Process(None)]
    assert one._wait(hang, 0.0) == "not done in 0.0 s"  # type: ignore[arg-type]
    assert hang[1].returncode == -9
    assert one._wait([Process(None), Process(3)], 9.0) == "rank 1 ended with 3"  # type: ignore[list-item]


def test_cases_run_on_a_cpu(tmp_path: Path):
    names, out = ["zero-3 bf16", "lanes"], tmp_path / "out.jsonl"
    ran = ended(sys.executable, "-m", "tests.gpu.one", "--dry-run", *names, "--out", str(out))
    assert (ran.returncode, [(each["case"], each["ok"]) for each in lines(out)]) == (0, [(n, True) for n in names]), ran


def test_a_rank_of_a_gpu_is_a_command(tmp_path: Path):
    (case,) = one.choose(["env"])
    ran = ended(*one._command(case, 0, tmp_path), "--dry-run", **one._environment(case, 0, tmp_path))
    assert (ran.returncode, json.loads((tmp_path / "0.json").read_text())["ok"]) == (0, True), ran
