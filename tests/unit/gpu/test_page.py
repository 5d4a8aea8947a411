"""The page on GPUs claims what the committed results show, and no more."""

from __future__ import annotations

import pytest

from tests.gpu import one, page


def line(name: str, *, ok: bool) -> dict:
    return {"case": name, "ok": ok, "machine": "H200", "versions": {"torch": "2.11.0"}, "commit": "d8d0f71b1c"}


def test_the_page_is_that_of_the_committed_results() -> None:
    text = page.PAGE.read_text()
    assert page.written(text, page.last_lines(page.OUT), page.last_lines(page.DRY)) == text


def test_lines_of_other_code_are_refused() -> None:
    head = one.conditions(dry=True)["commit"]
    if head == "unknown":
        pytest.skip("no git")
    fresh = {name: line(name, ok=True) | {"commit": head} for name in ("adam", "probe")}
    page.refuse_other_code(page.DRY, fresh)
    page.refuse_other_code(page.DRY, {})
    stale = {"env": line("env", ok=True)}
    with pytest.raises(SystemExit, match="1 of 1 cases ran at commit d8d0f71, env is one"):
        page.refuse_other_code(page.DRY, stale)
    with pytest.raises(SystemExit, match="of 3 cases ran at commit"):
        page.refuse_other_code(page.DRY, fresh | stale)


def test_what_failed_or_never_ran_is_named() -> None:
    lines = {name: line(name, ok=name != "lanes") for name in ("adam", "probe", "lanes")}
    rows = {row.split("|")[1].strip(): row for row in page._table(lines, {}).splitlines()}
    assert rows["`adam`"] == "| `adam` | 1 | 1 passed (H200, torch 2.11.0, commit d8d0f71) | never run |"
    assert "1 passed; failed: lanes; " in rows["`twohosts`"]
    assert rows["`te`"] == "| `te` | 3 | never run | never run |"
