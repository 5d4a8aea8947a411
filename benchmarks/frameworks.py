"""How the frameworks of published rows run a model: what they keep, shard and overlap. Facts of software, not fits."""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.published import LeftOut, Row, model_of, precision
from megaaccum.config.schema import ModelConfig
from megaaccum.planner.activations import Kernels
from megaaccum.planner.layouts import POLICIES, RECOMPUTE, SCHEDULES, Layouts, from_rows
from megaaccum.planner.memory import MemoryModel, StateBytes, Usage
from megaaccum.planner.stages import Stage, make_stages

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


def is_fsdp(row: Row) -> bool:
    """Fully sharded: gathered layer by layer in every micro-batch."""
    kept = re.search(r"no reshard", row.text("dp_sharding"))
    return bool(re.search(r"FSDP|ZeRO-3", row.text("dp_sharding") + row.text("framework"))) and not kept


def _recompute(row: Row) -> str:
    text = row.text("recompute").lower()
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
    if name == "interleaved" and vpp == 1:
        vpp = 2  # at least
    if pp == 1:
        name, vpp = "none", 1
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
                num_chunks=count,
                recompute=RECOMPUTE.index(_recompute(row)),
                schedule=SCHEDULES.index(name),
                policy=POLICIES.index("streaming" if is_fsdp(row) else "resident"),
                zero_stage=3 if is_fsdp(row) else 1,
                sequence_parallel=int(tp > 1 and has_sequence_parallel(row)),
            )
        ]
    )


def has_sequence_parallel(row: Row) -> bool:
    """Sequence parallelism came with arXiv 2205.05198; BigScience's fork, vTrain's and the runs of 2021 lack it."""
    old = ("narayanan2021", "bigscience", "vtrain", "mtnlg")
    return not row.source.startswith(old)


def flash(row: Row) -> bool:
    """Fused attention: not in the Megatron forks of 2021 to 2023."""
    return not row.source.startswith(("narayanan2021", "bigscience", "vtrain", "mtnlg", "zero_bubble"))


def states_of(row: Row) -> StateBytes:
    """Bytes per parameter: Megatron's and torch's documentation, and DeepSpeed's ZeRO-1 (16-bit gradients, flattened
    once more while they are reduced; FP32 gradients of the shard in the step)."""
    sharding, framework = row.text("dp_sharding"), row.text("framework")
    if "BF16_Optimizer" in sharding:
        return StateBytes(param=2, grad=6, grad_shard=4, optimizer_shard=12)
    if sharding.startswith(("ZeRO-1", "ZeRO-0")):
        return StateBytes(param=2, grad=2, grad_shard=6, optimizer_shard=12)
    if is_fsdp(row):
        return StateBytes(param=0, param_shard=2, grad=0, grad_shard=4, optimizer_shard=10)
    if "no reshard" in sharding:
        return StateBytes(param=2, grad=4, grad_shard=4, optimizer_shard=12)
    if framework.startswith("Megatron-Bridge"):
        return StateBytes(param=2, grad=2, optimizer_shard=12)
    return StateBytes(param=2, grad=4, optimizer_shard=12)


def kernels_of(row: Row) -> Kernels:
    """What the framework's layers keep."""
    torch_loss = row.text("framework").startswith(("torchtitan", "llm-foundry"))
    compiled_loss = torch_loss and row.source.startswith("torchtitan_h200")  # torchtitan compiles its loss since 2025
    modules = [m for m in ("core_attn", "mlp", "layernorm") if m in row.text("recompute")]
    return Kernels(
        flash=flash(row),
        every_second_matmul=row.text("framework").startswith("torchtitan") and _recompute(row) == "selective",
        # torch's cross entropy on FP32 logits: 16-bit logits, FP32 logits, their log-softmax, its gradient.
        logit_bytes=14.0 if torch_loss and not compiled_loss else 8.0,
        recompute_modules=frozenset(modules) or frozenset({"core_attn"}),
        matmul_element=1.0 if precision(row) == "fp8" and not torch_loss else None,
    )


def stages_of(row: Row, model: ModelConfig, layout: Layouts) -> tuple[Stage, ...]:
    """The stages of a row: as even as can be, the larger ones first; zero-bubble's with one layer less at both ends."""
    stages = int(layout.pp[0] * layout.vpp[0])
    most, rest = divmod(model.num_layers, stages)
    layers = [most + (index < rest) for index in range(stages)]
    if row.source.startswith("zero_bubble"):
        most = (model.num_layers + 2) // stages
        layers = [most] * stages
        layers[0], layers[-1] = most - 1, most - 1
    return tuple(make_stages(model, layers))


def memory_model(row: Row, usage: Usage) -> tuple[MemoryModel, Layouts]:
    """What the planner needs to predict a row's memory, with the constants of its hardware."""
    model, vocab_size = model_of(row)
    layout = layout_of(row)
    if row.text("precision") == "" and row.source.startswith("zero_bubble"):
        model.attention_dropout = model.hidden_dropout = 0.1
    on_device = "nvidia-smi" in row.text("mem_kind")
    # An allocator's peak knows nothing of the context; DeepSpeed's two buckets of 5e8 elements are in both.
    buckets = 2 * 5e8 * 2 if row.text("framework") == "Megatron-DeepSpeed" else 0.0
    return (
        MemoryModel(
            model=model,
            vocab_size=vocab_size,
            kernels=kernels_of(row),
            usage=usage if on_device else replace(usage, runtime_bytes=0.0),
            states={(int(layout.zero_stage[0]), int(layout.policy[0])): states_of(row)},
            buffer_bytes=buckets,
            # DeepSpeed's pipeline engine holds both ends of its stage for every micro-batch in flight.
            boundary_tensors=2.0 if row.text("framework") == "Megatron-DeepSpeed" else 0.0,
            sharded_over_dp="ZeRO-0" not in row.text("dp_sharding"),
            fixed_stages=stages_of(row, model, layout),
        ),
        layout,
    )
