"""README, docs, docstrings, comments and error texts keep to plain words: the worst of the others are found here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    r"in front of": "time is before and after",
    r"behind": "time is before and after",
    r"so (many|few)": "this many, or the name of the number",
    r"whoever|nobody": "name the reader, the caller, the process",
    r"(comes?|coming) along": "is in the package, is shipped",
    r"(goes|go|going) with": "is for, cannot be used with",
    r"anew": "again",
    r"by (itself|themselves)": "alone, or leave it out",
    r"(is|are|was|were) told": "programs report, log, raise, print; functions are called with",
    r"needs [^.:;,]{3,60}, and [\w ]+ is": "but, where the sentence turns",
}
"""Expression, and what to write instead."""
GENERATED = {"docs/megatron-flags.md"}
OLD = set(
    """
    CHANGELOG.md
    README.md
    docs/data.md
    docs/design.md
    docs/faults.md
    docs/planner.md
    docs/precision.md
    docs/quickstart.md
    docs/schedules.md
    docs/sharding.md
    megaaccum/checkpoint/folders.py
    megaaccum/checkpoint/save_load.py
    megaaccum/checkpoint/saver.py
    megaaccum/cli/__init__.py
    megaaccum/cli/check.py
    megaaccum/cli/doctor.py
    megaaccum/cli/plan.py
    megaaccum/cli/schedule.py
    megaaccum/cli/train.py
    megaaccum/distributed/agreement.py
    megaaccum/distributed/breadcrumbs.py
    megaaccum/distributed/gpu.py
    megaaccum/distributed/groups.py
    megaaccum/distributed/launch.py
    megaaccum/distributed/preload.py
    megaaccum/distributed/processes.py
    megaaccum/distributed/watchdog.py
    megaaccum/engine.py
    megaaccum/interop/deepspeed_json.py
    megaaccum/interop/deepspeed_keys.py
    megaaccum/interop/deepspeed_training.py
    megaaccum/interop/megatron_reading.py
    megaaccum/interop/shell/lexer.py
    megaaccum/interop/shell/script.py
    megaaccum/model/flops.py
    megaaccum/model/gpt.py
    megaaccum/model/gpt_forward.py
    megaaccum/model/param_count.py
    megaaccum/model/recompute.py
    megaaccum/model/router_state.py
    megaaccum/precision/__init__.py
    megaaccum/precision/fp8.py
    megaaccum/precision/nonfinite.py
    megaaccum/schedule/actions.py
    megaaccum/schedule/bound.py
    megaaccum/schedule/build.py
    megaaccum/schedule/cut.py
    megaaccum/schedule/executor.py
    megaaccum/schedule/memory.py
    megaaccum/schedule/p2p.py
    megaaccum/schedule/passes.py
    megaaccum/schedule/profile.py
    megaaccum/schedule/simulate.py
    megaaccum/schedule/table.py
    megaaccum/schedule/validate.py
    megaaccum/schedule/wgrad.py
    megaaccum/sharding/base.py
    megaaccum/sharding/cold_experts.py
    megaaccum/sharding/ddp.py
    megaaccum/sharding/deepspeed.py
    megaaccum/sharding/fsdp2.py
    megaaccum/sharding/megatron.py
    megaaccum/sharding/streaming.py
    megaaccum/step/chunk_config.py
    megaaccum/step/grad_norm.py
    megaaccum/step/loss.py
    megaaccum/step/recovery.py
    megaaccum/step/short_batch.py
    megaaccum/step/train_step.py
    megaaccum/step/transaction.py
    megaaccum/training/__init__.py
    megaaccum/training/lr_schedule.py
    megaaccum/upstream/adam.py
    megaaccum/upstream/fsdp2.py
    megaaccum/upstream/megatron.py
    megaaccum/upstream/pytorch.py
    megaaccum/upstream/te.py
    megaaccum/upstream/zero.py
    """.split()
)
"""Files that are still to be rewritten. It only gets shorter: a file that is clean is struck off."""


def files() -> Iterator[Path]:
    for pattern in ("*.md", "docs/*.md", "megaaccum/**/*.py", "tests/**/*.py", "benchmarks/*.py", "docs/*.py"):
        for path in ROOT.glob(pattern):
            if path != Path(__file__) and name_of(path) not in GENERATED:
                yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def problems(path: Path, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for expression, instead in WORDS.items():
            if match := re.search(rf"\b({expression})\b", line, re.IGNORECASE):
                found.append(f"{name_of(path)}:{number}: {match[0]!r}: {instead}")
    if path.suffix == ".py" and "megaaccum" in path.relative_to(ROOT).parts:
        found += [f"{name_of(path)}:{number}: a docstring starts with a verb or a noun" for number in starts(text)]
    return found


def starts(text: str) -> Iterator[int]:
    """Lines of docstrings that start with What."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and doc.startswith("What "):
                yield node.body[0].lineno


@pytest.mark.parametrize("path", sorted(files()), ids=name_of)
def test_words(path):
    found = problems(path, path.read_text(encoding="utf-8"))
    if name_of(path) in OLD:
        assert found, f"{name_of(path)} is clean: strike it off OLD"
    else:
        assert not found, "\n".join(found)


def test_files_still_to_be_rewritten_exist():
    assert {name for name in OLD if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# the step behind this one", "behind"),
        ('raise ConfigError("needs backend ddp, and backend is fsdp2")', "needs backend ddp, and backend is"),
        ('def f():\n    """What it does."""', "a verb or a noun"),
    ],
)
def test_the_words_are_seen(text, word):
    (problem,) = problems(ROOT / "megaaccum" / "example.py", text)
    assert word in problem
