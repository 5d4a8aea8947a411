"""The configuration reference in docs/ is current and says something about every key."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megaaccum.config.keys import SECTIONS, all_keys

GENERATOR = Path(__file__).parents[3] / "docs" / "gen_config_reference.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("gen_config_reference", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_generator_writes(generator) -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), (
        "docs/reference/configuration.md is out of date: run python docs/gen_config_reference.py"
    )


def test_a_page_that_is_out_of_date_fails_the_check(generator, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(generator, "PAGE", tmp_path / "configuration.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    (tmp_path / "configuration.md").write_text("old")
    assert generator.main(["--check"]) == 1


def test_every_key_has_a_row_and_a_meaning(generator) -> None:
    documented = {name for docs in generator.field_docs().values() for name in docs}
    assert all_keys().keys() <= documented
    cell = r"(?:\\\||[^|\n])+"
    rows = re.findall(rf"^\| `(\w+)` \| {cell} \| {cell} \| {cell} \|$", generator.page(), flags=re.MULTILINE)
    assert rows == list(all_keys())


def test_every_section_has_a_heading(generator) -> None:
    for section in SECTIONS:
        assert f"\n## `{section}`\n" in generator.page()
