"""docs/concepts/map.md: each question has a short answer, and the files and names that it sends a reader to exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "map.md"


class Answer(NamedTuple):
    """question: a heading. text: the sentences below it. places: (file, names in it)."""

    question: str
    text: str
    places: list[tuple[str, list[str]]]


def answers(page: str) -> list[Answer]:
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        question, _, rest = section.partition("\n")
        lines = re.findall(r"^- `([^`]+)`: (.+)$", rest, re.MULTILINE)
        places = [(file, re.findall(r"`([^`]+)`", names)) for file, names in lines]
        found.append(Answer(question, rest.partition("\n- ")[0].strip(), places))
    return found


def has_name(source: str, name: str) -> bool:
    """Whether a module defines `name`, a dotted path of classes, functions, methods and constants."""
    body = ast.parse(source).body
    for part in name.split("."):
        found = [node for node in body if part in defined(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


ANSWERS = answers(PAGE.read_text(encoding="utf-8"))


def test_there_are_twelve_questions_or_more():
    assert len(ANSWERS) >= 12 and all(answer.question.endswith("?") for answer in ANSWERS)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.question)
def test_an_answer_is_short(answer):
    sentences = re.split(r"[.?](?=\s|$)", answer.text)
    assert 1 <= len([each for each in sentences if each.strip()]) <= 3
    assert 1 <= len(answer.places) <= 3 and all(names for _, names in answer.places)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.question)
def test_its_files_and_names_exist(answer):
    missing = []
    for file, names in answer.places:
        path = ROOT / file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        missing += [f"{file}: {name}" for name in names if not has_name(source, name)]
    assert not missing


TABLES = [path for path in (ROOT / "megaaccum").rglob("__init__.py") if "| module | holds |" in path.read_text("utf-8")]


def test_packages_of_three_storeys_have_a_table():
    assert len(TABLES) >= 18


@pytest.mark.parametrize("path", TABLES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_a_package_says_what_each_of_its_modules_holds(path):
    named = set(re.findall(r"`(\w+)`", ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""))
    assert {each.stem for each in path.parent.glob("*.py")} - {"__init__"} <= named


def test_a_name_that_is_gone_is_found():
    (answer,) = answers("# Map\n\n## Who?\n\nA class.\n\n- `megaaccum/units.py`: `Nothing`, `gone.twice`\n")
    with pytest.raises(AssertionError, match=r"units\.py: Nothing"):
        test_its_files_and_names_exist(answer)
