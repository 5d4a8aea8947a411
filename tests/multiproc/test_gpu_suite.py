"""The suite of one GPU, dry: its cases as processes of their own, with what the kit brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpu import one, spec


def ended(*command: str, **more: str) -> subprocess.CompletedProcess:
    """A process of its own, since the libraries of a dry run are changed for a CPU."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | more
    return subprocess.run(command, cwd=one.ROOT, env=env, capture_output=True, text=True)


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
import tests.gpu.cases, tests.gpu.runs, benchmarks.bare, benchmarks.layer
"""


def test_cases_need_nothing_that_the_kit_does_not_bring():
    """Beside torch and what it brings; no pytest."""
    kit = (Path(spec.__file__).parent / "kit.sh").read_text().replace("\\\n", " ")
    brought = kit.partition("(pinned ")[2].partition(")")[0].split()

    ran = ended(sys.executable, "-c", ALONE, *brought, "deepspeed", "megaaccum", *WITH_TORCH.split())
    assert ran.returncode == 0, ran.stderr


def test_cases_run_on_a_cpu(tmp_path: Path):
    """One of ours, and the bare loop that the benchmarks compare with. tests/long has them all."""
    names, out = ["zero-3 bf16", "mfu bare"], tmp_path / "out.jsonl"
    ran = ended(sys.executable, "-m", "tests.gpu.one", "--dry-run", *names, "--out", str(out))
    found = {line["case"]: line["ok"] for line in map(json.loads, out.read_text().splitlines())}
    assert (ran.returncode, found) == (0, dict.fromkeys(names, True)), ran


def test_a_rank_of_a_gpu_is_an_interpreter(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (case,) = one.choose(["zero-3 bf16"])
    ranks = one.Ranks(case, "spawn", dry=True)
    try:
        found, usable = ranks.run(case, 100)
        assert found["ok"] and usable, (found, ranks.output())
    finally:
        ranks.end()


def test_results_outlast_a_run_in_the_folder_that_is_named(tmp_path: Path, monkeypatch):
    """A case that has passed at this commit and machine, by the lines in that folder, is not run again."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("COMMIT", "1234")
    where = one.conditions(dry=False)
    monkeypatch.setattr(one, "conditions", lambda *, dry: where)
    ran: list[str] = []

    def run(self: one.Runner, case: spec.Spec) -> dict:
        ran.append(case.name)
        return {"ok": case.name == "sync streaming"}

    monkeypatch.setattr(one.Runner, "run", run)
    monkeypatch.setattr(one, "way_to_start", lambda *, dry: "fork")
    assert one.main(["sync streaming", "adam"]) == 1
    assert one.main(["sync streaming", "adam"]) == 1
    assert ran == ["sync streaming", "adam", "adam"]
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(line["case"], line["commit"]) for line in lines] == [(name, "1234") for name in ran]
