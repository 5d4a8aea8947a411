"""The cases of one GPU by subcommand: what each runs, on how many ranks, how long it may take, and which come first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spec:
    """function: of `module`; it is called with `arguments` and `dry`, on every rank, and returns a dict with `ok`.
    seconds: until its processes are ended, with the start and the compilation that a first case waits for. environment:
    of its processes. alone: in processes of its own, since DeepSpeed's and DDP's hooks keep a model that is no longer
    used, and its memory with it."""

    name: str
    group: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    seconds: int = 150
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    module: str = "tests.gpu.cases"

    def load(self) -> Callable[..., dict[str, Any]]:
        """The function, which imports torch."""
        return partial(getattr(importlib.import_module(self.module), self.function), **self.arguments)


PP, TP, CP = "--pp 2 ", "--tp 2 --sequence_parallel ", "--cp 2 "
LOCAL, LLAMA = "--transformer_impl local ", "--swiglu --normalization RMSNorm --position_embedding_type rope "
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
COMMUNICATORS = {"": {}, " without NVLS": {"NCCL_NVLS_ENABLE": "0"}, " without cuMem": {"NCCL_CUMEM_ENABLE": "0"}}
EXPERTS = "--num_experts 4 --no_add_bias_linear "
FIRST = (
    "env", "zero-3 bf16", "zero-3 streaming bf16", "megatron bf16", "train", "engine", "wrap", "async save and resume",
    "sync", "beside megatron zero-3", "layer", "memory 1.2B resident",
    "probe", "lanes", "1f1b", "zbv", "layout bits", "pretrain", "train zbv", "pp 2 x dp 2",
)  # fmt: skip
"""One case of each kind, which run before all others: what is worth most if there is one run. Those that share
processes follow each other."""

_SMOKE = {
    "zero-3": "",
    "zero-3 streaming": "--sync streaming",
    "zero-2": "--zero_stage 2",
    "zero-1": "--zero_stage 1",
    "fsdp2": "--backend fsdp2",
    "fsdp2 streaming": "--backend fsdp2 --sync streaming",
    "megatron": "--backend megatron",
    "ddp": "--backend ddp",
}
_EXTRA = {
    "offload": ("--offload_optimizer cpu", "", "fp32"),
    "offload zero-1": ("--offload_optimizer cpu --zero_stage 1", "", "fp32"),
    "gelu without bias": ("", "--no_add_bias_linear", "bf16"),
    "optimizer in bf16": ("--optimizer_dtype bf16", "", "bf16"),
    "cold experts": ("--cold_expert_offload --cold_expert_steps 1 --cold_expert_tokens 20", EXPERTS, "fp32"),
    "experts": ("", EXPERTS, "fp32"),  # in BF16 a rounding sends a token to another expert
    "rank order": ("--deterministic", "", "fp32"),
    "muon": ("--optimizer muon", "", "bf16"),
}
_TWO = {
    "1f1b": (2, PP),
    "interleaved": (2, PP + "--vpp 2"),
    "gpipe": (2, PP + "--schedule gpipe"),
    "zb-h1": (2, PP + "--schedule zb-h1"),
    "zbv": (2, PP + "--schedule zbv"),
    "dualpipev": (2, PP + "--schedule dualpipev"),
    "pp 2 x dp 2": (4, PP),
    "pp 2 x dp 2 streaming": (4, PP + "--sync streaming"),
    "pp 2 x dp 2 fsdp2": (4, PP + "--backend fsdp2"),
    "tp 2": (2, TP),
    "tp 2 x pp 2 zb-h1": (4, TP + PP + "--schedule zb-h1"),
    "cp 2": (2, CP),
}


def specs() -> list[Spec]:
    """Every case, in the order in which they run."""
    return sorted(_every(), key=lambda each: FIRST.index(each.name) if each.name in FIRST else len(FIRST))


def _every() -> list[Spec]:
    return [
        Spec(name="env", group="env", function="environment"),
        Spec(name="env eager", group="env", function="environment", environment={"CUDA_MODULE_LOADING": "EAGER"}),
        *_smoke(),
        Spec(name="sync", group="sync", function="host_syncs"),
        Spec(name="sync streaming", group="sync", function="host_syncs", arguments={"layout": "--sync streaming"}),
        Spec(name="adam", group="adam", function="adam"),
        *_doors(),
        *_two_hosts(),
        *_speed(),
        *_memory(),
        # In FP32 Transformer Engine multiplies in TF32 unless this is set; both cases compare with exact FP32.
        Spec(name="te", group="te", function="transformer_engine", seconds=480, environment=NO_TF32),
        *(Spec(name=f"te {only}", group="te", function="transformer_engine", arguments={"only": only},
               environment=NO_TF32)
          for only in ("documents", "fused_weight_gradients")),
    ]  # fmt: skip


def _smoke() -> list[Spec]:
    found = [
        Spec(name=f"{name} {lane}", group="smoke", function="gradient", arguments={"layout": layout, "lane": lane})
        for name, layout in _SMOKE.items()
        for lane in ("fp32", "bf16", *(() if name == "megatron" else ("fp16",)))
    ]
    found += [
        Spec(name=name, group="smoke", function="gradient", arguments=dict(layout=layout, model=model, lane=lane))
        for name, (layout, model, lane) in _EXTRA.items()
    ]
    long = LOCAL + "--attention_backend unfused --seq_length 2048 --max_position_embeddings 2048"
    found.append(Spec(name="local bf16 at 2048", group="smoke", function="three_steps", arguments={"model": long}))
    return [*found, Spec(name="async save and resume", group="smoke", function="saved_in_background")]


def _doors() -> list[Spec]:
    """Cases that go in as a user does."""
    module, two = "tests.gpu.runs", {"environment": QUEUES, "ranks": 2}
    layout = {"keys": f"{PP}--schedule zbv --reproducible layout --verify_at_start", "lane": ""}
    return [
        Spec(name="train", group="doors", module=module, function="trained", seconds=240),
        Spec(name="train zbv", group="doors", module=module, function="trained", seconds=240, arguments=layout, **two),
        Spec(name="verify", group="doors", module=module, function="verified", seconds=240),
        Spec(name="engine", group="doors", module=module, function="engine"),
        Spec(name="engine zbv", group="doors", module=module, function="engine", **two,
             arguments={"layout": PP + "--schedule zbv"}),
        Spec(name="wrap", group="doors", module=module, function="wrapped"),
        Spec(name="wrap 1f1b", group="doors", module=module, function="wrapped", arguments={"layout": PP}, **two),
        Spec(name="pretrain", group="doors", module=module, function="pretrain_script", **two),
        Spec(name="layout bits", group="doors", module=module, function="bits_in_layouts", **two),
    ]  # fmt: skip


def _two_hosts() -> list[Spec]:
    probe = Spec(name="probe", group="twohosts", function="probe", ranks=2, environment=QUEUES)
    lanes = Spec(name="lanes", group="twohosts", function="lanes", ranks=2, environment=QUEUES)
    cells = [
        Spec(name=name, group="twohosts", function="gradient", ranks=ranks, arguments={"layout": layout},
             environment=QUEUES)
        for name, (ranks, layout) in _TWO.items()
    ]  # fmt: skip
    queues = [
        Spec(name=f"pp 3 with {count} queues", group="twohosts", function="queues", ranks=3,
             arguments={"count": count}, environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(count)})
        for count in (1, 8, 32)
    ]  # fmt: skip
    sent = Spec(name="sent", group="twohosts", function="sent_tensors", ranks=2, environment=QUEUES)
    waiting = Spec(name="waiting receives", group="twohosts", function="waiting_receives", ranks=2, environment=QUEUES)
    cells.sort(key=lambda each: each.ranks)  # neighbours share processes
    return [probe, lanes, sent, waiting, *cells, *queues]


def _speed() -> list[Spec]:
    arms = {"zero-3": "", "streaming": "--sync streaming", "zero-1": "--zero_stage 1", "fsdp2": "--backend fsdp2",
            "buckets of 5e8": "--reduce_bucket_size 500000000"}  # fmt: skip
    return [
        Spec(name="mfu bare", group="mfu", function="speed", arguments={"bare": True}, seconds=180, alone=True),
        *(Spec(name=f"mfu {name}", group="mfu", function="speed", arguments={"layout": layout}, seconds=180,
               alone=True)
          for name, layout in arms.items()),
        *(Spec(name=f"beside megatron{name}", group="mfu", module="tests.gpu.runs", function="beside_megatron",
               arguments={"layout": layout}, seconds=300, alone=True)
          for name, layout in {" zero-3": "", "": "--backend megatron"}.items()),
        Spec(name="profile", group="profile", function="idle_gaps", seconds=180, alone=True),
        Spec(name="layer", group="layer", function="layer"),
    ]  # fmt: skip


def _memory() -> list[Spec]:
    cells = [
        Spec(name=f"memory {size} {sync}{' growing' * grows}", group="memory", function="memory",
             arguments={"size": size, "sync": sync}, alone=True,
             environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if grows else {})
        for grows in (False, True)
        for size in ("0.3B", "1.2B", "3B")
        for sync in ("resident", "streaming")
    ]  # fmt: skip
    return [
        *cells,
        *(Spec(name=f"communicator{name}", group="memory", function="communicator", environment=variables,
               alone=True)
          for name, variables in COMMUNICATORS.items()),
        Spec(name="auto at the edge", group="memory", function="auto_at_the_edge", alone=True),
        *(Spec(name=f"loop {name}", group="loop", function="executor_alone", arguments={"schedule": name})
          for name in ("gpipe", "zb-h1")),
    ]  # fmt: skip
