"""The example of the page on verification, and the bank's entries as they are written."""

from __future__ import annotations

import ast
from pathlib import Path

import megaaccum
from tests.support.snippets import ROOT, blocks_of

BANK = Path(megaaccum.__file__).parent / "verification" / "bank"


def test_the_linear_model_accumulates_to_rounding():
    names: dict = {}
    (example,) = [block for block in blocks_of(ROOT / "docs/guides/verify.md") if block.runs]
    exec(example.source, names)
    assert (names["N"], names["d"], names["workers"], names["microbatches"]) == (4096, 12, 8, 4)
    assert names["error"] < 5e-15


def test_tokens_and_means_agree_on_equal_shards_alone():
    names: dict = {}
    (example,) = [block for block in blocks_of(ROOT / "docs/guides/verify.md") if block.runs]
    exec(example.source, names)
    assert max(names["equal"]) < 5e-15
    by_tokens, by_means = names["unequal"]
    assert by_tokens < 5e-15
    assert by_means > 0.01


def entries() -> list[tuple[str, str]]:
    """(name, source) of every mistake."""
    found = []
    for path in sorted(BANK.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "mistake":
                        found.append((node.name, ast.literal_eval(call.args[1])))
    return found


def test_the_bank_has_at_least_sixty_mistakes_with_a_source():
    assert len(entries()) >= 60
    assert [name for name, source in entries() if not source.startswith("https://")] == []
    assert len({name for name, _ in entries()}) == len(entries())
