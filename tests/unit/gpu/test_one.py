"""The suite of one GPU: cases have names of their own, fail, run out of time, and are not run twice."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest

from tests.gpu import one, spec


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_cases_have_names_of_their_own_and_functions():
    every = spec.specs()
    assert len({each.name for each in every}) == len(every)
    sources = {each.module: (one.ROOT / f"{each.module.replace('.', '/')}.py").read_text() for each in every}
    assert all(f"\ndef {each.function}(" in sources[each.module] for each in every)


def test_one_case_of_each_kind_comes_first_and_few_processes_are_started():
    every = spec.specs()
    assert [each.name for each in every[: len(spec.FIRST)]] == list(spec.FIRST)
    first = {each.group for each in every[: len(spec.FIRST)]}
    assert first >= {"env", "smoke", "sync", "doors", "twohosts", "mfu", "layer", "memory"}
    sharing = [each for each in every if not each.alone]
    starts = 1 + sum(one.kind_of(a) != one.kind_of(b) for a, b in itertools.pairwise(sharing))
    assert starts <= 14, "each costs a GPU 10 seconds, and 20 more of imports where ranks cannot be forked"
    assert {each.group for each in every if each.alone} == {"mfu", "profile", "memory"}


def test_a_name_that_is_none_is_refused():
    assert [each.group for each in one.choose(["adam", "zero-3 bf16"])] == ["smoke", "adam"]
    with pytest.raises(SystemExit, match="no case or subcommand smok; subcommands: env, smoke"):
        one.choose(["smok"])


def test_a_case_that_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []
    monkeypatch.setattr(
        one.Runner, "run", lambda self, case: ran.append(case.name) or {"ok": case.name != "lanes", "n": 1}
    )
    monkeypatch.setattr(one, "way_to_start", lambda *, dry: "fork")
    command = ["--dry-run", "probe", "lanes", "--out", str(tmp_path / "out.jsonl")]
    assert (one.main(command), ran) == (1, ["probe", "lanes"])
    assert (one.main(command), ran[2:]) == (1, ["lanes"])
    assert one.main([*command, "--again"]) == 1
    assert ran[3:] == ["probe", "lanes"]
    line = lines(tmp_path / "out.jsonl")[0]
    assert line["result"] == {"n": 1}
    assert {"case", "ok", "seconds", "date", "ranks", "commit", "machine", "dry_run", "versions"} < line.keys()
    assert line["machine"].startswith("no GPU")


def hangs(*, dry: bool) -> dict:
    time.sleep(100 if os.environ["RANK"] == "1" else 0)
    return {"ok": True}


def dies(*, dry: bool) -> dict:
    os._exit(3) if os.environ["RANK"] == "1" else time.sleep(100)


def is_wrong(*, dry: bool) -> dict:
    """One rank finds it; the other waits for it in a collective."""
    print("what it says")
    time.sleep(0 if os.environ["RANK"] == "1" else 100)
    return {"ok": False, "error": 1.0}


def is_wrong_everywhere(*, dry: bool) -> dict:
    return {"ok": False, "error": 1.0}


def is_right(*, dry: bool) -> dict:
    return {"ok": True, "process": os.getpid(), "rank": os.environ["RANK"]}


def case(function: str, **more: str) -> spec.Spec:
    return spec.Spec(name=function, group="", function=function, module=__name__, ranks=2, seconds=1, environment=more)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(one, "join_ranks", lambda *, dry: None)
    monkeypatch.setattr(one, "outcome", lambda spec, *, dry: spec.load()(dry=dry))
    with one.Runner("fork", dry=True) as runner:
        yield runner


def test_processes_stay_for_the_next_case_of_their_kind(runner: one.Runner):
    first, second, other = (runner.run(each) for each in (case("is_right"), case("is_right"), case("is_right", A="1")))
    assert first == second == {"ok": True, "process": first["process"], "rank": "0"}
    assert other["process"] != first["process"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("hangs", {"problem": "not done in 4 s"}),
        ("dies", {"problem": "rank 1 ended with 3"}),
        ("is_wrong", {"error": 1.0}),
    ],
)
def test_a_hang_and_a_failure_are_lines_like_others(runner: one.Runner, function: str, told: dict):
    """None waits for the ranks that do not answer; the next case has new ones."""
    before = runner.run(case("is_right"))["process"]
    found = runner.run(case(function))
    said = found.pop("output")
    assert found == {"ok": False, **told}
    assert ("what it says" in "".join(said)) == (function == "is_wrong")
    assert runner.run(case("is_right"))["process"] != before


def test_ranks_that_all_answered_stay(runner: one.Runner):
    before = runner.run(case("is_right"))["process"]
    assert runner.run(case("is_wrong_everywhere"))["error"] == 1.0
    assert runner.run(case("is_right"))["process"] == before
