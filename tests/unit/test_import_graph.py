"""The graph of this package's own imports, read with `ast`: no cycle, and imports at the top of a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megaaccum

ROOT = Path(megaaccum.__file__).parent

LATE = {
    "megaaccum.distributed.preload": "imports the libraries themselves, at the moment that a rank asks for",
    "megaaccum.verification.on_ranks": "ranks import what they run; the process that starts them needs no Megatron",
    "megaaccum.verification.launched": "the CPU lane's stand-ins have to be there before Megatron is imported",
    "megaaccum.metrics.traffic": "torch is loaded by then, and not by `megaaccum --help`",
}
"""Modules outside cli/ and __init__.py that import ours inside functions, where a heavy library comes with it."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in ROOT.rglob("*.py")}


def names(node: ast.AST) -> set[str]:
    """Our modules that one import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & MODULES.keys()
    if isinstance(node, ast.ImportFrom) and node.module in MODULES:
        found = {f"{node.module}.{alias.name}" for alias in node.names}
        return {name if name in MODULES else node.module for name in found}
    return set()


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(module of ours, whether the import is inside a function) of a file, without those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from ((name, inside) for name in names(node))
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


GRAPH = {name: list(imports(ast.parse(path.read_text(encoding="utf-8")))) for name, path in MODULES.items()}


def assert_acyclic(graph: dict[str, list[tuple[str, bool]]]) -> None:
    TopologicalSorter({name: {to for to, _ in edges} - {name} for name, edges in graph.items()}).prepare()


def test_no_cycle_at_load_or_inside_functions() -> None:
    assert_acyclic(GRAPH)


def test_a_cycle_inside_a_function_is_seen() -> None:
    (edge,) = imports(ast.parse("def late():\n    from megaaccum.interop import load"))
    assert edge == ("megaaccum.interop.load", True)
    assert ("megaaccum.errors", False) in GRAPH["megaaccum.config.source"]
    with pytest.raises(CycleError):
        assert_acyclic(GRAPH | {"megaaccum.config.source": [*GRAPH["megaaccum.config.source"], edge]})


def test_config_imports_no_reader_of_other_programs_formats() -> None:
    readers = [
        (name, to)
        for name, edges in GRAPH.items()
        for to, _ in edges
        if name.startswith("megaaccum.config") and to.startswith("megaaccum.interop")
    ]
    assert readers == []


def test_imports_inside_functions_are_in_the_command_line_or_have_a_reason() -> None:
    late = {
        name
        for name, edges in GRAPH.items()
        if any(inside for _, inside in edges)
        and not name.startswith("megaaccum.cli")
        and MODULES[name].name != "__init__.py"
    }
    assert late == LATE.keys()
