"""Tests and benchmarks replace few private attributes; what a mistake or a test replaces has a public name."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 34
"""Lower it when it can be; most of what is left are private names of libraries."""
REPLACERS = {"object", "setattr", "delattr", "replaced", "wrapped"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def private_patches(source: str) -> list[int]:
    """The lines of `source` that replace or assign a private attribute of another object than `self` or `cls`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            lines += [node.lineno] * (called in REPLACERS and is_private(node.args[1].value))
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node.value if isinstance(node, ast.Subscript) else node
            private = isinstance(target, ast.Attribute) and is_private(target.attr)
            lines += [node.lineno] * (private and getattr(target.value, "id", "") not in ("self", "cls"))
    return lines


def test_few_private_attributes_are_replaced():
    command = ["git", "ls-files", "tests/*.py", "benchmarks/*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = [f"{name}:{line}" for name in files for line in private_patches((ROOT / name).read_text())]
    assert len(found) <= LIMIT, "make what is replaced public or an argument:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("patch.object(owner, '_step', other)", 1),
        ("with replaced(owner, '_a', 1), wrapped(owner, '_b', around): pass", 2),
        ("monkeypatch.setattr(module, '_limit', 3)", 1),
        ("owner._a, owner._b = 1, 2", 2),
        ("owner._count += 1", 1),
        ("owner._cache[key] = 1", 1),
        ("patch.object(owner, 'step', other)", 0),
        ("setattr(owner, '__call__', other)", 0),
        ("self._a = cls._b = owner._c.read()", 0),
    ],
)
def test_a_replaced_private_attribute_is_seen(source, count):
    assert len(private_patches(source)) == count
