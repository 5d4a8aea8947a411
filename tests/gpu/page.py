"""The table of docs/concepts/gpu.md, from the results that are committed: what has run on a GPU, what dry, what never.

python -m tests.gpu.page        writes it

The lines of dry runs are of one commit with the code of the page's own, or the page is not written. Those of GPUs,
which are rare, are of the commits that the table names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.one import OUT, ROOT
from tests.gpu.spec import specs

PAGE = ROOT / "docs" / "concepts" / "gpu.md"
DRY = OUT.with_name("gpu_dry.jsonl")
CODE = ("megaaccum", "benchmarks", "tests/gpu", "tests/support")
BEGIN, END = "<!-- results: python -m tests.gpu.page -->\n", "<!-- end of results -->\n"


def main() -> int:
    refuse_other_code(DRY, last_lines(DRY))
    PAGE.write_text(written(PAGE.read_text(), last_lines(OUT), last_lines(DRY)))
    return 0


def last_lines(out: Path) -> dict[str, dict[str, Any]]:
    """By case, its last line in a file of results; empty where there is none."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {line["case"]: line for line in lines}


def refuse_other_code(out: Path, lines: dict[str, dict[str, Any]]) -> None:
    """Raise SystemExit unless the lines of a file of results are of one commit with the code of HEAD."""
    for commit in sorted({line["commit"] for line in lines.values()}):
        same = subprocess.run(["git", "diff", "--quiet", commit, "HEAD", "--", *CODE], cwd=ROOT, capture_output=True)
        names = [name for name, line in lines.items() if line["commit"] == commit]
        if same.returncode or len(names) < len(lines):
            raise SystemExit(f"{out.name}: {len(names)} of {len(lines)} cases ran at commit {commit[:7]}, {names[0]} is"
                             " one; run the suite at this commit and keep its lines alone")  # fmt: skip


def written(page: str, on_gpu: dict[str, dict[str, Any]], dry: dict[str, dict[str, Any]]) -> str:
    """`page` with the table of these results between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + _table(on_gpu, dry) + "\n" + END + tail


def _table(on_gpu: dict[str, dict[str, Any]], dry: dict[str, dict[str, Any]]) -> str:
    rows = ["| subcommand | cases | on a GPU | dry, on a CPU |", "| --- | --- | --- | --- |"]
    for group in dict.fromkeys(spec.group for spec in specs()):
        names = [spec.name for spec in specs() if spec.group == group]
        rows.append(f"| `{group}` | {len(names)} | {_state(names, on_gpu)} | {_state(names, dry)} |")
    return "\n".join(rows) + "\n"


def _state(names: list[str], lines: dict[str, dict[str, Any]]) -> str:
    """How many have passed, which have failed, how many never ran, and on what."""
    found = {name: lines[name] for name in names if name in lines}
    if not found:
        return "never run"
    failed = [name for name, line in found.items() if not line["ok"]]
    parts = [f"{len(found) - len(failed)} passed"]
    parts += [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"{len(names) - len(found)} never run"] if len(found) < len(names) else []
    machines = sorted(
        {
            f"{line['machine']}, torch {line['versions']['torch']}, commit {line['commit'][:7]}"
            for line in found.values()
        }
    )
    return f"{'; '.join(parts)} ({'; '.join(machines)})"


if __name__ == "__main__":
    sys.exit(main())
