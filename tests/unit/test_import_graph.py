"""The graph of this package's own imports, read with `ast`: no cycle of modules, folders and storeys in one order, and
imports at the top of a module. For folders, imports for types and inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megaaccum

ROOT = Path(megaaccum.__file__).parent

FOLDERS = (
    "units errors texts schedule config platform upstream distributed model observe optim executor sharding checkpoint"
    " step engine loop pretrain.model pretrain.launch pretrain.interop pretrain.data pretrain.metrics pretrain.weights"
    " pretrain.training lab.search lab.planner lab.verification lab cli train"
).split()
"""From the lowest: a folder imports those before it. docs/concepts/design.md has the reasons."""

FACE = {"megaaccum", "megaaccum.__main__"}
"""They import whatever a name or a command asks for, inside functions."""

LATE = {
    "megaaccum.distributed.preload": "imports the libraries themselves, at the moment that a rank asks for",
    "megaaccum.lab.verification.on_ranks": "ranks import what they run; the process that starts them needs no Megatron",
    "megaaccum.lab.verification.launched": "the CPU lane's stand-ins have to be there before Megatron is imported",
    "megaaccum.lab.verification.subject": "emerging-optimizers is optional, and only Muon's reference needs it",
    "megaaccum.observe.traffic": "torch is loaded by then, and not by `megaaccum --help`",
    "megaaccum.pretrain.data.corpus": "a build imports pools of processes, and `check` asks for a vocabulary",
    "megaaccum.pretrain.weights.config_json": "headers of weights need torch, other families do not",
}
"""Modules outside cli/ and __init__.py that import ours inside functions, because those import a heavy library."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def folder_of(module: str) -> str:
    """`step` of megaaccum.step.loss, `lab.search` of megaaccum.lab.search.cut, `errors` of megaaccum.errors."""
    first, *rest = module.split(".")[1:]
    return f"{first}.{rest[0]}" if f"{first}.{rest[:1] and rest[0]}" in FOLDERS else first


def names(node: ast.AST) -> set[str]:
    """Our modules that one import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & MODULES.keys()
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
        found = {f"{node.module}.{alias.name}" for alias in node.names}
        return {name if name in MODULES else node.module for name in found}
    return set()


def imports(tree: ast.AST, inside: bool = False, *, types: bool = False) -> Iterator[tuple[str, bool]]:
    """(module of ours, whether the import is inside a function) of a file. types: those for type checkers too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # has no statements in it
            continue
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from ((name, inside) for name in names(node))
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from imports(node, within, types=types)


@cache  # not while tests are collected, which each process of `make test` does
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


@cache
def graph() -> dict[str, list[tuple[str, bool]]]:
    return {name: list(imports(tree)) for name, tree in trees().items()}


def uphill(arrows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Imports of a module in a folder that comes later."""
    at = {folder: number for number, folder in enumerate(FOLDERS)}
    return [(a, b) for a, b in arrows if not {a, b} & FACE and at[folder_of(a)] < at[folder_of(b)]]


def assert_acyclic(edges: dict[str, list[tuple[str, bool]]]) -> None:
    TopologicalSorter({name: {to for to, _ in found} - {name} for name, found in edges.items()}).prepare()


def test_no_cycle_at_load_or_inside_functions() -> None:
    assert_acyclic(graph())


def test_a_cycle_inside_a_function_is_seen() -> None:
    (edge,) = imports(ast.parse("def late():\n    from megaaccum.pretrain.interop import load"))
    assert edge == ("megaaccum.pretrain.interop.load", True)
    assert ("megaaccum.errors", False) in graph()["megaaccum.config.source"]
    with pytest.raises(CycleError):
        assert_acyclic(graph() | {"megaaccum.config.source": [*graph()["megaaccum.config.source"], edge]})


def test_every_module_is_in_a_folder_that_has_its_place() -> None:
    assert {folder_of(name) for name in MODULES.keys() - FACE} - set(FOLDERS) == {"pretrain"}  # its __init__ is empty
    assert not graph()["megaaccum.pretrain"]


def test_folders_import_those_below_them() -> None:
    arrows = [(name, to) for name, tree in trees().items() for to, _ in imports(tree, types=True)]
    assert uphill(arrows) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from megaaccum.lab import planner",
        "def late():\n    from megaaccum.pretrain.data import dataset",
        "if TYPE_CHECKING:\n    from megaaccum.engine import Engine",
    ],
)
def test_an_import_uphill_is_seen(statement: str) -> None:
    edges = [("megaaccum.step.loss", to) for to, _ in imports(ast.parse(statement), types=True)]
    assert len(uphill(edges)) == 1


def test_tables_of_schedules_need_no_torch() -> None:
    heavy = {"torch", "deepspeed", "megatron"}
    for name, tree in trees().items():
        if name.startswith("megaaccum.schedule"):
            found = {
                alias.name.split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
            }
            assert not heavy & found, name


def test_imports_inside_functions_are_in_the_command_line_or_have_a_reason() -> None:
    late = {
        name
        for name, edges in graph().items()
        if any(inside for _, inside in edges)
        and not name.startswith("megaaccum.cli")
        and MODULES[name].name != "__init__.py"
    }
    assert late == LATE.keys()
