"""Sizes that a reader feels: lines of the core and the package, parameters, classes of the step, one backend, one
schedule."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

import megaaccum
from megaaccum.schedule.registry import BUILT_IN, entry

ROOT = Path(megaaccum.__file__).parent
ABOVE_THE_CORE = ("pretrain", "lab", "cli", "train.py", "__main__.py")
BACKENDS = ("ddp", "deepspeed", "fsdp2", "megatron", "streaming")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@cache  # not while tests are collected, which each process of `make test` does
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def code_lines(source: str) -> int:
    """Lines without blank ones, comments and texts that stand alone (docstrings)."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters, without the first of a method."""
    args = function.args
    return len([each for each in (*args.posonlyargs, *args.args, *args.kwonlyargs) if each.arg not in ("self", "cls")])


def test_lines_are_counted() -> None:
    assert code_lines('"""Text."""\n\n# comment\nx = (\n    1,\n)\n') == 3


def test_the_core_and_the_package_stay_small() -> None:
    lines = {path: code_lines(path.read_text(encoding="utf-8")) for path in trees()}
    core = [path for path in lines if path.relative_to(ROOT).parts[0] not in ABOVE_THE_CORE]
    assert sum(lines[path] for path in core) <= 16_731
    assert sum(lines.values()) <= 34_365


def imported(tree: ast.Module) -> set[str]:
    """Modules that a file imports, for types too; of `from a import b` both `a` and `a.b`."""
    found = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def test_the_core_holds_what_a_step_reaches() -> None:
    """Modules that only `megaaccum train`, a report or a planner uses are in the storeys above."""
    paths = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in trees()}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    core = {name for name, path in modules.items() if path.relative_to(ROOT).parts[0] not in ABOVE_THE_CORE}
    reached = {"megaaccum", "megaaccum.loop", *megaaccum._OF_AN_ENGINE.values(), *megaaccum._PLAIN.values()}
    reached |= {f"megaaccum.sharding.{backend}" for backend in BACKENDS}
    waiting = reached & core
    while waiting:
        name = waiting.pop()
        found = {*imported(trees()[modules[name]]), name.rpartition(".")[0]} & core - reached
        reached |= found
        waiting |= found
    assert core - reached == set()


def test_functions_have_at_most_eight_parameters() -> None:
    functions = [
        (path.name, node)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 1000
    assert [f"{name}: {node.name}" for name, node in functions if parameters(node) > 8] == []


def test_the_step_has_at_most_fourteen_classes() -> None:
    classes = [
        n for p, tree in trees().items() if p.parent.name == "step" for n in tree.body if isinstance(n, ast.ClassDef)
    ]
    assert 10 <= len(classes) <= 14


def test_the_step_is_one_method_of_at_most_sixty_lines() -> None:
    from megaaccum.step.train_step import TrainStep

    source = inspect.getsource(TrainStep.train)
    assert len(source.splitlines()) <= 60
    order = ["agree", "open", "flush", "reduce_and_measure", "judge", "roll_back", "update", "commit"]
    places = [source.index(f"self.{name}(") for name in order]
    assert places == sorted(places)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_is_one_file_of_at_most_400_lines(backend: str) -> None:
    assert len((ROOT / "sharding" / f"{backend}.py").read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_schedule_takes_at_most_60_lines_of_one_file(name: str) -> None:
    builder = entry(name).build
    assert builder is None or len(inspect.getsource(builder).splitlines()) <= 60
