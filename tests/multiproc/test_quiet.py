"""The libraries print nothing that a user would see."""

import subprocess
import sys
from unittest.mock import patch

from megaaccum.lab.verification.testing import run_ranks, try_ranks


def test_importing_the_libraries_says_nothing():
    answer = subprocess.run(
        [sys.executable, "-c", "from megaaccum.distributed import preload; preload.libraries()"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert answer.stdout + answer.stderr == ""


def build_an_engine():
    import deepspeed
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    get_gpt_layer_local_spec()
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
    }
    with patch.object(torch.nn.Parameter, "__repr__", side_effect=AssertionError("a text that is not printed")):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.destroy()


def test_an_engine_is_made_in_silence():
    """Nor does DeepSpeed make texts of all parameters that it then keeps to itself."""
    for outcome in try_ranks(build_an_engine, 2, timeout=120):
        assert not outcome.failed, outcome.error
        assert outcome.output == ""


def warn_of_something():
    import warnings

    warnings.warn("the disk is nearly full", stacklevel=1)
    return True


def test_an_unknown_warning_is_shown():
    assert run_ranks(warn_of_something, 1, init=False) == [True]
    (outcome,) = try_ranks(warn_of_something, 1, init=False)
    assert "the disk is nearly full" in outcome.output
