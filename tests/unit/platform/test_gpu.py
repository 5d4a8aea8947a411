"""Settings before CUDA starts, and the process groups that may use NCCL; the GPU itself is a stand-in."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megaaccum.distributed import groups
from megaaccum.distributed.breadcrumbs import Trace
from megaaccum.errors import ConfigError
from megaaccum.executor import p2p
from megaaccum.platform import cpu, gpu
from tests.support import configs


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine with 4 GPUs and an empty environment; the devices that are set."""
    chosen: list[int] = []
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with mock.patch.dict(os.environ, clear=True):
        yield chosen


@pytest.mark.parametrize(("schedule", "queues"), [("zb-h1", "32"), ("1f1b", None)])
def test_the_executor_gets_the_queues_that_it_needs(four_gpus, schedule, queues):
    gpu.prepare(configs.plan(2, pipeline_model_parallel_size=2, schedule=schedule))
    assert os.environ.get(gpu.QUEUES) == queues
    assert os.environ[gpu.ALLOCATOR] == "expandable_segments:True"


def test_what_the_user_has_set_stays(four_gpus):
    os.environ |= {gpu.QUEUES: "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "LOCAL_RANK": "3"}
    gpu.prepare(configs.plan(2, pipeline_model_parallel_size=2, schedule="zb-h1"))
    assert os.environ[gpu.QUEUES] == "1"
    assert gpu.ALLOCATOR not in os.environ
    assert four_gpus == [3]


def test_a_rank_that_sees_its_own_gpu_alone_takes_that(four_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    os.environ["LOCAL_RANK"] = "3"
    gpu.prepare(configs.plan())
    assert four_gpus == [0]
    assert os.environ["LOCAL_RANK"] == "0", "DeepSpeed reads it and sets the device again"


def test_the_log_names_nccl_and_its_variables(four_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    os.environ |= {gpu.QUEUES: "32", "NCCL_IB_HCA": "mlx5"}
    assert gpu.describe() == "NCCL 2.30.1, CUDA_DEVICE_MAX_CONNECTIONS=32, NCCL_IB_HCA=mlx5"


def on_cuda(bound=None):
    """A group made with `cpu:gloo,cuda:nccl`."""
    names = {"cpu": "gloo", "cuda": "nccl"}
    return SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(name=lambda: names[device.type]), bound_device_id=bound
    )


def test_a_group_with_a_backend_for_each_device_is_nccls_on_a_gpu(monkeypatch):
    assert not groups.carries_by_nccl(on_cuda())
    monkeypatch.setattr(cpu, "device", lambda: torch.device("cuda", 0))
    assert groups.carries_by_nccl(on_cuda())


def test_a_bound_device_is_refused():
    p2p.check_no_bound_device(on_cuda())
    with pytest.raises(ConfigError, match="leave device_id out"):
        p2p.check_no_bound_device(on_cuda(torch.device("cuda", 0)))


@pytest.mark.parametrize(("on_gpu", "tp", "expected"), [(True, 2, ["tp"]), (True, 1, None), (False, 2, None)])
def test_all_reduces_of_tp_come_before_the_blocks_of_a_product(on_gpu, tp, expected, monkeypatch):
    """In a queue of its own an all-reduce that is launched after a product would wait for its last block; one queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), by which Megatron orders them, is too few for receives that wait."""
    from megatron.core import parallel_state

    groups.destroy()
    asked: dict[str, object] = {}
    monkeypatch.setattr(cpu, "has_accelerator", lambda: on_gpu)
    monkeypatch.setattr(groups.megatron, "hold_groups", lambda held: None)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **keys: asked.update(keys))
    monkeypatch.setattr(groups, "default_collection", lambda: SimpleNamespace(mp=object()))
    groups.build(configs.plan(2, tensor_model_parallel_size=tp).layout, timeout_minutes=1)
    assert asked["high_priority_stream_groups"] == expected


def test_a_trace_names_the_action_that_the_gpu_hangs_in(monkeypatch):
    """The host has launched three forwards, and the second waits for a message that does not come."""
    reached = {"F 0", "F 1"}

    class Event:
        def record(self) -> None:
            self.of = trace.action

        def query(self) -> bool:
            return self.of in reached

    trace = Trace()
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for action in ("F 0", "F 1", "F 2"):
        trace.note(action)
    assert "last action F 2, of which the GPU has begun F 1" in str(trace)
    reached.add("F 2")
    assert "begun F 2" in str(trace)
    assert "GPU" not in str(trace)  # it has done all that was launched
