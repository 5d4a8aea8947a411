"""Importing the package is free: no torch, no DeepSpeed, no Megatron, no process group."""

import subprocess
import sys
from pathlib import Path

import pytest

import megaaccum

HEAVY = ("torch", "deepspeed", "megatron", "numpy", "rich", "matplotlib")


def loaded_after(code, names=HEAVY):
    """Which of `names` a fresh interpreter has imported after `code`."""
    show = f"import sys; print([name for name in {names!r} if name in sys.modules], file=sys.stderr)"
    answer = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, timeout=60, check=True
    )
    return answer.stderr.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import megaaccum",
        "from megaaccum import Batch, Layout, Optimizer, Plan, Quantization, Run, Sharding, Step",
        "import megaaccum.pretrain.launch.local, megaaccum.distributed.preload, megaaccum.lab.verification.testing",
        "from megaaccum.cli import main; assert main(['--help']) == 0",
        "from megaaccum.cli import main; assert main(['--version']) == 0",
        "from megaaccum.cli import main; assert main(['nonsense']) == 2; import sys; sys.stderr.write('\\r')",
    ],
)
def test_nothing_heavy_is_imported(code):
    assert loaded_after(code).splitlines()[-1] == "[]"


def test_a_program_that_verifies_imports_megatron_on_its_ranks_alone():
    """Before the CPU lane's stand-ins are there, Megatron would import a Transformer Engine that needs a GPU."""
    assert loaded_after("from megaaccum import verify", ("deepspeed", "megatron")) == "[]"


def test_check_answers_at_once():
    """Imports of no use take longer than its answer: unittest.mock alone brings asyncio, ssl and email."""
    config = str(Path(__file__).parents[2] / "configs" / "llama3_405b.yaml")
    code = f"from megaaccum.cli import main; assert main(['check', {config!r}]) == 0"
    found = loaded_after(code, ("torch", "unittest.mock", "asyncio", "ssl", "importlib.metadata", "numpy"))
    assert found == "['numpy']", "the planner's"


def test_the_check_sees_a_heavy_import():
    assert loaded_after("import numpy") == "['numpy']"


def test_public_names():
    assert sorted(megaaccum.__all__) == [
        "Batch",
        "CheckpointError",
        "ConfigError",
        "Engine",
        "Layout",
        "MegaaccumError",
        "Optimizer",
        "Plan",
        "Quantization",
        "RankDisagreement",
        "Run",
        "ScheduleError",
        "Sharding",
        "Step",
        "StepError",
        "StepResult",
        "__version__",
        "build_groups",
        "calibrate",
        "get_forward_backward_func",
        "hf_stages",
        "initialize",
        "megatron_loop",
        "verify",
    ]
    assert all(hasattr(megaaccum, name) for name in megaaccum.__all__)
