"""Every case of the GPU's suite, dry: what a GPU would run works on a CPU at this commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import one, spec
from tests.support.fp8.te_on_cpu import FOLDER


@pytest.mark.skipif(not FOLDER.exists(), reason="no Transformer Engine (make te)")
def test_every_case_runs_on_a_cpu(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tests.gpu.one", "--dry-run", "--out", str(out)]
    ran = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True, timeout=1500)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    failed = {line["case"]: line["result"] for line in lines if not line["ok"]}
    assert (ran.returncode, failed) == (0, {}), ran.stdout[-2000:]
    assert [line["case"] for line in lines] == [each.name for each in spec.specs()]
    assert len({line["commit"] for line in lines}) == 1
    assert one.passed(out, one.conditions(dry=True)) == {each.name for each in spec.specs()}
