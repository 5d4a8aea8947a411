"""Whether the planner would have chosen what experts chose: published layouts beside its own best.

    python -m benchmarks decisions --tables DIR [--json F]

DIR holds expert_layouts.csv: model, GPU, ranks, batch and layout of pre-training recipes. Each is planned, and its own
layout is predicted: does it fit, how much longer does its step take than the fastest layout's that fits, and how many
of them are faster? Rows are left out whose model or means the planner does not have, with the reason.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import MODELS, LeftOut
from megaaccum.errors import ConfigError
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts, from_rows
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.workload import Workload, make_workload
from megaaccum.pretrain.interop.load import load

_LLAMA = MODELS["LLAMA2-70B"]
_NEMOTRON = MODELS["Nemotron-8B"]


def _of(
    base: dict[str, Any], layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any
) -> dict[str, Any]:
    sizes = dict(num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads)
    return base | sizes | dict(num_query_groups=groups) | more


def _mixtral(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    experts = dict(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=ffn, vocab_size=32000)
    return _of(_LLAMA, layers, hidden, ffn, heads, 8, **experts)


SHAPES: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt3", "175b"): MODELS["GPT3-175B"],
    ("llama3", "8b"): _of(_LLAMA, 32, 4096, 14336, 32, 8, vocab_size=128256),
    ("llama3", "70b"): _of(_LLAMA, 80, 8192, 28672, 64, 8, vocab_size=128256),
    ("llama31", "405b"): _of(_LLAMA, 126, 16384, 53248, 128, 8, vocab_size=128256),
    ("mixtral", "8x7b"): _mixtral(32, 4096, 14336, 32),
    ("mixtral", "8x22b"): _mixtral(56, 6144, 16384, 48),
    ("nemotron3", "8b"): _NEMOTRON,
    ("nemotron3", "22b"): MODELS["Nemotron-22B"],
    ("nemotron4", "15b"): _of(_NEMOTRON, 32, 6144, 24576, 48, 8),  # arXiv 2402.16819
    ("nemotron4", "340b"): MODELS["Nemotron-340B"],
    ("deepseek", "v3"): MODELS["DeepSeekV3"],
    ("qwen3", "30b_a3b"): MODELS["Qwen3_30B"],
}
"""Shapes by model and size, as published with the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A published layout. ratio: its predicted step over that of the fastest layout that fits. faster: share of these
    that are faster. missing: bytes that it needs more than there are, 0 if it fits."""

    name: str
    ratio: float
    faster: float
    missing: float
    best: str


def main(argv: list[str] | None = None) -> int:
    """Print a line per recipe, and the three figures over all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks decisions", description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, metavar="DIR", help="folder of expert_layouts.csv")
    parser.add_argument("--json", type=Path, metavar="F", help="write the decisions")
    args = parser.parse_args(argv)
    with (args.tables / "expert_layouts.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "pre_train"]
    found, left_out = [], Counter[str]()
    for row in rows:
        try:
            found.append(decide(row))
        except LeftOut as reason:
            left_out[str(reason)] += 1
            continue
        each = found[-1]
        over = f"{each.missing / 2**30:.1f} GiB over" if each.missing else "fits"
        print(
            f"{each.name:<34}{each.ratio:6.2f} x best {each.faster:6.1%} faster  {over:<14} best {each.best}",
            flush=True,
        )
    print(f"left out: {dict(left_out)}")
    for name, value in summary(found).items():
        print(f"{name}: {value:.3g}")
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found] + [summary(found)], indent=1) + "\n")
    return 0


def summary(found: list[Decision]) -> dict[str, float]:
    """The figures over all decisions."""
    return {
        "recipes": len(found),
        "median time over best": statistics.median(each.ratio for each in found),
        "share that fits": sum(not each.missing for each in found) / len(found),
        "share in the fastest tenth": sum(each.faster < 0.1 for each in found) / len(found),
    }


def decide(row: dict[str, str]) -> Decision:
    """A recipe beside the planner's best. Raises LeftOut."""
    work = workload_of(row)
    layout = published(row, work)
    memory = work.memory_model()
    held = memory
    if row["dtype"] == "fp8":  # NeMo's FP8 recipes reduce in BF16, and hold weights in FP8 in place of BF16
        states = {key: replace(each, grad=min(each.grad, 2.0)) for key, each in memory.states.items()}
        held = replace(memory, states=states, weight_cache=0.0)
    needs, seconds = float(held.peak(layout).total[0]), float(work.time_model(memory).step(layout).total[0])
    try:
        ranked = search(work, rank="time")
    except ConfigError as error:
        raise LeftOut(f"no layout fits: {str(error)[:60]}") from error
    best = ranked.name_of(int(np.argmin(ranked.time.total)))
    shown = " ".join(f"{axis}{best[axis]}" for axis in ("tp", "cp", "pp", "vpp", "ep", "mbs") if best[axis] > 1)
    return Decision(
        name=" ".join(row[key] for key in ("model", "size", "file", "dtype")) + f" {work.world_size}",
        ratio=seconds / float(ranked.time.total.min()),
        faster=float((ranked.time.total < seconds).mean()),
        missing=max(0.0, needs - work.hardware.hbm_bytes),
        best=f"{shown} {best['recompute']} {best['schedule']} {best['sync']}",
    )


def workload_of(row: dict[str, str]) -> Workload:
    """The model of a recipe on its GPUs, sharded as the recipe does."""
    shape = SHAPES.get((row["model"], row["size"]))
    if shape is None:
        raise LeftOut(f"{row['model']}: no such layers")
    if _number(row, "recompute_layers") or _number(row, "act_offload_layers"):
        raise LeftOut("some layers recomputed or offloaded")
    keys = {name: value for name, value in shape.items() if value is not None}
    keys |= dict(seq_length=_number(row, "seq_len"), global_batch_size=_number(row, "gbs"), bf16=True, sync="auto")
    keys |= dict(zero_stage=3 if _number(row, "mcore_fsdp") else 1)
    if row["dtype"] == "fp8":
        keys |= dict(fp8_format="hybrid")  # with FP32 sums: megaaccum refuses others
    else:
        keys |= dict(grad_accum_dtype="bf16", grad_reduce_dtype="bf16")  # as NeMo's bf16_mixed, which the recipes use
    if row["recompute_modules"]:
        keys |= dict(recompute_granularity="selective", recompute_modules=row["recompute_modules"].split("/"))
    words = [f"--{name}={_word(value)}" for name, value in keys.items() if not isinstance(value, list)]
    config = load(None, words)
    for name in ("moe_layer_freq", "recompute_modules"):
        if name in keys:
            setattr(config.model, name, keys[name])
            config.origin[name] = "the recipe"
    return make_workload(config, world_size=_number(row, "num_gpus"), hardware=load_hardware(row["file"]))


def published(row: dict[str, str], work: Workload) -> Layouts:
    """The layout of a recipe. Raises LeftOut if it is none on these GPUs."""
    tp, pp, cp, ep = (_number(row, axis) for axis in ("tp", "pp", "cp", "ep"))
    mbs, vpp = _number(row, "mbs"), _number(row, "vp") or 1
    dp, rest = divmod(work.world_size, tp * pp * cp)
    count, more = divmod(work.global_batch_size, dp * mbs) if dp else (0, 1)
    if rest or more or not count:
        raise LeftOut("its sizes do not divide")
    try:
        work.memory_model().stages(pp, vpp)
    except (AssertionError, TypeError) as error:
        raise LeftOut("its layers are cut by hand") from error
    return from_rows(
        [
            dict(
                tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=_number(row, "etp") or tp, dp=dp, micro_batch_size=mbs,
                pp_microbatches=count, grad_accum_steps=1, zero_stage=work.sharding.zero_stage,
                recompute=RECOMPUTE.index("selective" if row["recompute_modules"] else "none"),
                schedule=SCHEDULES.index("none" if pp == 1 else "1f1b" if vpp == 1 else "interleaved"),
                sync=SYNC_MODES.index("streaming" if _number(row, "mcore_fsdp") else "resident"),
                sequence_parallel=int(tp > 1),
            )
        ]
    )  # fmt: skip


def _number(row: dict[str, str], name: str) -> int:
    return int(float(row[name] or 0))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
