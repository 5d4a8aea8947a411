"""The suite of one GPU: cases have names of their own, fail, run out of time, and are not run twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import one, spec


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_cases_have_names_of_their_own_and_functions():
    every = spec.specs()
    assert len({each.name for each in every}) == len(every)
    source = (Path(spec.__file__).parent / "cases.py").read_text()
    assert all(f"\ndef {each.function}(" in source for each in every)


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
