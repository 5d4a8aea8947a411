"""How the frameworks of published rows run a model: what they keep, shard and overlap. Facts of software, not fits."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.published import LeftOut, Row, model_of, precision
from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner import pipeline
from megaaccum.lab.planner.activations import Kernels, tokens, whole_share
from megaaccum.lab.planner.footprint import StateBytes
from megaaccum.lab.planner.hardware import Hardware
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts, from_rows
from megaaccum.lab.planner.memory import MemoryModel, StageSource, Usage
from megaaccum.lab.planner.stages import Stage, make_stages
from megaaccum.lab.planner.time import BIASED_ROW_PASSES, Software
from megaaccum.units import GIB

PIPELINES = {
    "none": "none",
    "1F1B": "1f1b",
    "1F1B (DeepSpeed)": "1f1b",
    "1F1B-I": "interleaved",
    "Interleaved1F1B": "interleaved",
    "interleaved-1F1B": "interleaved",
    "1F1B/interleaved(unspecified in table)": "1f1b",
    "ZB-1p": "zb-h1",
    "ZB-2p": "zb-h2",
    "ZB-H1": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-V": "zbv",
    "DualPipeV": "dualpipev",
}
"""The `schedule` column in the planner's names."""

# Priced for published runs alone: nothing here builds it (arXiv 2401.10241, table 2).
pipeline.add_formulas(
    "zb-h2",
    pipeline.Formulas(
        lambda p, v, rank, m, group: [np.minimum(m, 2 * p - 1)],
        lambda work, v: np.maximum(0, work.forward + work.input_grad - 2 * work.weight_grad),
    ),
)


def is_fsdp(row: Row) -> bool:
    """Fully sharded: gathered layer by layer in every micro-batch."""
    kept = re.search(r"no reshard", row.text("dp_sharding"))
    return bool(re.search(r"FSDP|ZeRO-3", row.text("dp_sharding") + row.text("framework"))) and not kept


def _recompute(row: Row) -> str:
    text = row.text("recompute").lower()
    # vTrain's src/predictor.py recomputes nothing on the last stage, and on one node no stage does: a further sequence
    # takes a layer of hidden size 2048 1.95 ms, of which bytes at the datasheet's bandwidth leave its matrix products
    # 1.3 ms, and with a second forward pass they would run at the A100's peak.
    if row.source == "vtrain-single":
        return "none"
    if text.startswith("full"):
        return "full"
    if re.search(r"selective|sac|core_attn|mlp recompute", text):
        return "selective"
    return "none"


def _micro_batch(row: Row, dp: int) -> int:
    """The row's, or where it is not told: torchtitan cuts a local batch into 8 (its default: the pipeline's ranks),
    the others' published recipes run 1."""
    if row.text("mbs"):
        return row.whole("mbs")
    if row.text("framework").startswith("torchtitan"):
        return max(1, row.whole("gbs") // dp // row.whole("pp", 1))
    return 1


def layout_of(row: Row) -> Layouts:
    """The one layout of a row. LeftOut where it is not published, or is not pre-training of the whole model."""
    if row.text("task") and row.text("task") != "pretrain" and "LoRA" in row.text("task"):
        raise LeftOut("LoRA trains a part of the model")
    tp, cp, pp = row.whole("tp"), row.whole("cp", 1), row.whole("pp")
    dp = row.whole("dp")
    name = PIPELINES.get(row.text("schedule") or "none")
    if name is None:
        raise LeftOut(f"schedule {row.text('schedule')} unknown")
    vpp = row.whole("vpp", 1)
    if name in ("interleaved", "zbv", "dualpipev") and vpp == 1:
        vpp = 2  # interleaved: at least; a V always has two, which tables leave out
    if pp == 1:
        name, vpp = "none", 1
    elif row.source.startswith("mcore_h100") and row.whole("layers") % (2 * pp) == 0:
        # Its README says that messages of the pipeline overlap, which interleaving needs; chunks of two layers.
        name, vpp = "interleaved", row.whole("layers") // (2 * pp)
        vpp, name = (vpp, name) if vpp > 1 else (1, "1f1b")
    elif name in ("none", "1f1b"):
        name = "interleaved" if vpp > 1 else "1f1b"
    micro = _micro_batch(row, dp)
    count = row.whole("num_microbatches", 0) or max(1, row.whole("gbs") // (dp * micro))
    return from_rows(
        [
            dict(
                tp=tp,
                cp=cp,
                pp=pp,
                vpp=vpp,
                ep=row.whole("ep", 1),
                dp=dp,
                micro_batch_size=micro,
                pp_microbatches=count,
                recompute=RECOMPUTE.index(_recompute(row)),
                schedule=SCHEDULES.index(name),
                sync=SYNC_MODES.index("streaming" if is_fsdp(row) else "resident"),
                zero_stage=3 if is_fsdp(row) else 0 if is_replicated(row) else 1,
                sequence_parallel=int(tp > 1 and has_sequence_parallel(row)),
            )
        ]
    )


def is_replicated(row: Row) -> bool:
    """Every data-parallel rank steps all its parameters: so vTrain's, all of which leave room for it in 80 GB."""
    return row.source.startswith("vtrain") or "none" in row.text("dp_sharding")


def has_sequence_parallel(row: Row) -> bool:
    """Sequence parallelism came with arXiv 2205.05198; BigScience's fork, vTrain's and the runs of 2021 lack it."""
    old = ("narayanan2021", "bigscience", "vtrain", "mtnlg")
    if row.source == "korthikanti":
        return row.text("recompute") == "selective"  # the paper compares its scheme with what was before
    return not row.source.startswith(old)


def flash(row: Row) -> bool:
    """Fused attention: not in the Megatron forks of 2021 to 2023."""
    return not row.source.startswith(("narayanan2021", "bigscience", "vtrain", "mtnlg", "korthikanti", "zero_bubble"))


def states_of(row: Row) -> StateBytes:
    """Bytes per parameter: Megatron's and torch's documentation, and DeepSpeed's ZeRO-1 (16-bit gradients, flattened
    once more while they are reduced; FP32 gradients of the shard in the step)."""
    sharding, framework = row.text("dp_sharding"), row.text("framework")
    if "BF16_Optimizer" in sharding:
        return StateBytes(param=2, grad=6, grad_shard=4, optimizer_shard=12)
    if sharding.startswith(("ZeRO-1", "ZeRO-0")):
        return StateBytes(param=2, grad=2, grad_shard=6, optimizer_shard=12)
    if is_fsdp(row):
        shards: dict[str, Any] = dict(param_shard=2, grad_shard=4, optimizer_shard=10)
        return StateBytes(param=0, grad=0, unit_param=2, unit_grad=4, **shards)
    if "no reshard" in sharding:
        return StateBytes(param=2, grad=4, grad_shard=4, optimizer_shard=12)
    if framework.startswith("Megatron-Bridge") or row.source.startswith("zero_bubble"):  # BF16; --fp16
        return StateBytes(param=2, grad=2, optimizer_shard=12)
    return StateBytes(param=2, grad=4, optimizer_shard=12)


def kernels_of(row: Row) -> Kernels:
    """The kernels of the framework's layers, which decide what a layer keeps for its backward."""
    torch_loss = row.text("framework").startswith(("torchtitan", "llm-foundry"))
    compiled_loss = torch_loss and row.source.startswith("torchtitan_h200")  # torchtitan compiles its loss since 2025
    torch_bytes = 4.0 if compiled_loss else 18.0 if row.whole("tp", 1) > 1 else 14.0
    # Transformer Engine's fused cross entropy writes the logits' gradient over the logits.
    fused_loss = has_fused_loss(row)
    titan = row.text("framework").startswith("torchtitan") and _recompute(row) == "selective"
    modules = [m for m in ("core_attn", "mlp", "layernorm") if m in row.text("recompute")]
    return Kernels(
        flash=flash(row),
        by_operation=partial(_every_second_product, compiled="compile" in row.text("framework")) if titan else None,
        # torch's cross entropy on FP32 logits: 16-bit logits, FP32 logits, their log-softmax, its gradient. Cut over tp
        # (torch's loss_parallel): the log-softmax, the targets, exponentials and their sum, which its backward holds.
        # Compiled, it casts as it reads, and writes the 16-bit gradient alone.
        logit_bytes=2.0 if fused_loss else 8.0 if not torch_loss else torch_bytes,
        kept_weight_grads=row.source == "simumax" or "Bridge" in row.text("framework"),
        recompute_modules=frozenset(modules) or frozenset({"core_attn"}),
        matmul_element=1.0 if precision(row) == "fp8" and not torch_loss else None,
    )


def _every_second_product(model: ModelConfig, at: Layouts, *, compiled: bool) -> Any:
    """Bytes that torchtitan's selective recompute keeps: the layer's input, queries, values, attention's output and its
    statistics, the first of the MLP's matrices and its output. A compiled layer does not keep its last product, which
    no backward needs."""
    t, hidden, head = tokens(model, at), model.hidden_size, model.kv_channels or 0
    inside = 2 * model.num_attention_heads * head + (model.num_query_groups or 0) * head + (model.ffn_hidden_size or 0)
    ends = (1 if compiled else 2) * t * hidden * whole_share(at)
    return 2 * (ends + t * inside / at.tp) + t * model.num_attention_heads * 4 / at.tp


def has_fused_loss(row: Row) -> bool:
    """Transformer Engine's cross entropy, which Megatron-Bridge's recipes use."""
    return (row.source == "simumax" and "cef" in row.name) or "Bridge" in row.text("framework")


def published_stages(model: ModelConfig, *, short_ends: bool) -> StageSource:
    """The stages of published runs: as even as can be, the larger ones first; or with one layer less at both ends."""

    def stages(pp: int, vpp: int) -> list[Stage]:
        most, rest = divmod(model.num_layers + 2 * short_ends, pp * vpp)
        layers = [most + (index < rest) for index in range(pp * vpp)]
        if short_ends:
            layers[0], layers[-1] = layers[0] - 1, layers[-1] - 1
        return make_stages(model, layers)

    return stages


def has_short_ends(row: Row) -> bool:
    """Whether first and last stage hold one layer less (the zero-bubble paper's runs)."""
    return row.source.startswith("zero_bubble")


def _counts_allocated(row: Row) -> bool:
    """Runs whose code prints what tensors hold at most, in 10^9 bytes: Megatron-Bridge (train_utils.py,
    report_memory), and the zero-bubble schedules (runtime.py)."""
    return row.text("mem_unit") == "GB" and row.text("framework").startswith(("Megatron-Bridge", "Megatron-LM fork"))


def measured_bytes(row: Row) -> float:
    """The published peak. Other tools that say GB count in binary."""
    return row.number("mem_value") * (1e9 if _counts_allocated(row) else GIB)


def memory_model(row: Row, usage: Usage) -> tuple[MemoryModel, Layouts]:
    """The planner's memory model and layouts of a row, with the constants of its hardware."""
    model, vocab_size = model_of(row)
    layout = layout_of(row)
    if row.text("precision") == "" and row.source.startswith("zero_bubble"):
        model.attention_dropout = model.hidden_dropout = 0.1
    on_device = "nvidia-smi" in row.text("mem_kind")
    if row.text("mem_kind") == "allocated" or _counts_allocated(row):
        usage = replace(usage, fragmentation=0.0)
    # An allocator's peak knows nothing of the context; DeepSpeed's two buckets of 5e8 elements are in both.
    buckets = 2 * 5e8 * 2 if row.text("framework") == "Megatron-DeepSpeed" else 0.0
    return (
        MemoryModel(
            model=model,
            vocab_size=vocab_size,
            kernels=kernels_of(row),
            usage=usage if on_device else replace(usage, runtime_bytes=0.0),
            states={(int(layout.zero_stage[0]), int(layout.sync[0])): states_of(row)},
            buffer_bytes=buckets,
            # DeepSpeed's pipeline engine holds both ends of its stage for every micro-batch in flight.
            boundary_tensors=1.0 if row.text("framework") == "Megatron-DeepSpeed" else 0.0,
            sharded_over_dp="ZeRO-0" not in row.text("dp_sharding"),
            fixed_stages=tuple(
                published_stages(model, short_ends=has_short_ends(row))(int(layout.pp[0]), int(layout.vpp[0]))
            ),
        ),
        layout,
    )


def software_of(row: Row) -> Software:
    """The software that, besides its layout, decides a row's step time."""
    framework, source = row.text("framework"), row.source
    compiled = "compile" in framework
    modern = framework.startswith(("Megatron-Core", "Megatron-Bridge", "NeMo", "MegaScale"))
    fsdp = is_fsdp(row)
    old = source.startswith(("narayanan2021", "bigscience", "vtrain", "mtnlg", "korthikanti"))
    return Software(
        precision=precision(row),
        flash=flash(row),
        attention=attention_share(row),
        # All but torchtitan without compilation bring fused norms, softmaxes and activations.
        fused=not framework.startswith("torchtitan") or compiled,
        # In vTrain's runs a layer takes longer than its kernels as soon as tensor-parallel ranks wait for each other.
        host_order=1.8 if framework == "Megatron-DeepSpeed" and row.whole("tp") > 1 else 6.0,
        grad_bytes=4.0 if (fsdp and framework.startswith("torchtitan")) or "FP32" in row.text("dp_sharding") else 2.0,
        param_bytes=2.0,
        grads_overlap=modern or fsdp or "no reshard" in row.text("dp_sharding"),
        params_overlap=modern or fsdp,
        # It reads the logits twice and writes their gradient over them, and scales that in the backward.
        loss_bytes=5.0 if has_fused_loss(row) else 14.0,
        sharded=not old,
        # Megatron-LM of these years, and DeepSpeed's pipeline engine.
        scattered_messages=old or source.startswith("megascale"),
        # User buffers (NeMo, Bridge) and asynchronous tensor parallelism cut products into pieces that overlap.
        tp_exposed=0.4 if re.search("Async|async|Bridge|NeMo|Core|MegaScale", framework) else 1.0,
        ep_overlap=overlaps_experts(row),
        fused_dispatch=has_fused_dispatch(row),
        row_passes=row_passes(row),
        imbalance=NATURAL if row.text("routing") == "natural" else 1.0,
        # vTrain's simulator (src/predictor.py) prices no recompute on the last stage.
        last_recomputes=source != "vtrain-multi",
        pace=PIPELINE_ENGINE if source.startswith(("bigscience", "mtnlg")) else 1.0,
        host=host_share(row),
    )


PIPELINE_ENGINE = 1.2
"""DeepSpeed's PipelineEngine, whose sends and receives block, over Megatron's schedules: from BigScience's rows."""


def attention_share(row: Row) -> float:
    """The attention's rate as a share of the best kernel's (cuDNN's, FlashAttention 3): FlashAttention 2 on Hopper has
    half of it (arXiv 2407.08608, 35 % of the peak for 75 %), and llm-foundry's first one, in Triton for ALiBi, half of
    that again (arXiv 2307.08691)."""
    older = row.text("framework").startswith(("torchtitan", "llm-foundry")) and "A100" not in row.text("gpu").upper()
    return (0.5 if older else 1.0) * (0.5 if "foundry" in row.text("framework") else 1.0)


def has_fused_dispatch(row: Row) -> bool:
    """DeepEP or HybridEP. Megatron-Bridge's recipes use one of them for all but GPT-OSS and dropped tokens."""
    alltoall = row.text("model").startswith("GPT OSS") or "tokendrop" in row.text("model")
    return "Bridge" in row.text("framework") and not alltoall


def row_passes(row: Row) -> float:
    """HybridEP sorts on the way; before it, FP8 pads each expert's rows in a pass of its own. GPT-OSS's experts have
    biases, and clamp both halves of their first product, twice as wide as a row: each reads, writes and is joined."""
    if row.source == "cards" and has_fused_dispatch(row):
        return 2.0
    clamped = BIASED_ROW_PASSES + 8.0 if row.text("model").startswith("GPT OSS") else 0.0
    return clamped + (6.0 if precision(row) == "16 bit" else 10.0)


def overlaps_experts(row: Row) -> bool:
    """Exchanges under the compute of other micro-batches, as the recipes for large models on H100 ask for it, and
    those that capture whole steps."""
    large = row.text("model").startswith(("DeepSeek", "Qwen3_235B", "Kimi")) and "H100" in row.text("gpu")
    asked = row.source == "cards" and ("pretrain_performance" in row.name or row.text("overlap") == "yes")
    bridge = "Bridge" in row.text("framework") and "tokendrop" not in row.text("model")
    return bridge and (large or asked or row.text("graphs") == "full")


NATURAL = 1.25
"""Rows of the busiest rank over the mean if routing is not forced to be even: an assumption."""
GRAPHS = {"full": 0.0, "te": 0.5}
"""The host's share of its work with CUDA graphs: of a whole step, of attention and router."""


def host_share(row: Row) -> float:
    """Recipes for GB200 and GB300 capture attention and router; cards say what they capture."""
    graphs = row.text("graphs")
    if "tokendrop" in row.text("model"):
        return 0.5  # shapes are known beforehand: the host does not wait for the router
    if not graphs and "Bridge" in row.text("framework") and "GB" in row.text("gpu"):
        graphs = "te"
    return GRAPHS.get(graphs, 1.0) * (0.75 if row_passes(row) == 2.0 else 1.0)


_GPUS = (
    ("A800", "a800_80"), ("H800", "h800"), ("H20-", "h20"), ("L40S", "l40s"),
    ("A100-80", "a100_80"), ("a100_80", "a100_80"), ("a100_40", "a100_40"), ("A100-40", "a100_40"), ("A100", "a100_80"),
    ("GH200", "h200"), ("H100-96", "h100_96"), ("H100", "h100"), ("h100", "h100"), ("H200", "h200"),
    ("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300"), ("B200", "b200"), ("MI300X", "mi300x"),
)  # fmt: skip

NETWORKS = {
    "vtrain": 100e9,
    "bigscience": 50e9,
    "narayanan2021": 200e9,
    "mtnlg": 200e9,
    "korthikanti": 200e9,
    "llm_foundry": 200e9,
}
"""Bytes per second that leave a node: 800 Gb/s (vTrain), four OmniPath ports of 100 Gb/s (Jean Zay), eight HDR ports
(Selene), 1,600 Gb/s (llm-foundry's A100 nodes, as its README says). Others: the hardware table's."""


def hardware_name(row: Row) -> str:
    """The entry of hardware.yaml that a row ran on. LeftOut where there is none."""
    for part, name in _GPUS:
        if part in row.text("gpu"):
            return name
    raise LeftOut(f"no hardware entry for {row.text('gpu')}")


def network_of(row: Row, hardware: Hardware) -> Hardware:
    """The hardware with the row's cluster's network."""
    if hardware.device.peak > 400e12:
        return hardware  # every published H100 and later cluster here has a port of 400 Gb/s per GPU
    for prefix, per_node in NETWORKS.items():
        if row.source.startswith(prefix):
            efficiency = hardware.device.efficiency.network
            return replace(hardware, links=replace(hardware.links, net_bandwidth=per_node / 8 * efficiency))
    return hardware


def measured_seconds(row: Row) -> float:
    """Seconds of a step, as reported or from the reported FLOP/s. LeftOut where a row contradicts itself."""
    if "swapped" in row.text("notes"):
        raise LeftOut("the table says that seconds and TFLOP/s look swapped")
    if row.text("status") and not row.text("status").startswith("ok"):
        raise LeftOut(f"status {row.text('status')}")
    if not row.text("iter_time_s"):
        raise LeftOut("no step time published")
    return row.number("iter_time_s")
