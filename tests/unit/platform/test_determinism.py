"""Settings of the libraries under `deterministic: true`."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch

from megaaccum.errors import ConfigError
from megaaccum.platform import cpu, determinism
from tests.support.configs import plan


@pytest.fixture(autouse=True)
def _as_before():
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def on_a_gpu(environment: dict[str, str]) -> dict[str, str]:
    with patch.object(cpu, "has_accelerator", lambda: True), patch.dict(os.environ, environment, clear=True):
        determinism.apply(plan(deterministic=True))
        return {name: os.environ[name] for name in determinism.REPEATABLE}


def test_libraries_are_told_to_repeat():
    assert on_a_gpu({}) == {name: values[0] for name, values in determinism.REPEATABLE.items()}
    assert torch.are_deterministic_algorithms_enabled()
    assert on_a_gpu({"CUBLAS_WORKSPACE_CONFIG": ":16:8"})["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_an_environment_that_does_not_repeat_is_refused():
    with pytest.raises(ConfigError, match=r"NCCL_ALGO=Tree.*set it to Ring"):
        on_a_gpu({"NCCL_ALGO": "Tree"})


def test_nothing_is_touched_without_it():
    threads = torch.get_num_threads()
    determinism.apply(plan())
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == threads


def test_a_cpu_computes_with_one_thread():
    torch.set_num_threads(2)
    determinism.apply(plan(deterministic=True))
    assert torch.get_num_threads() == 1
