"""Tables that are not in the columns of `published.COLUMNS`: verification cards, SimuMax' runs, and arXiv 2205.05198's.

Each reader makes rows in those columns, with what the recipes, scripts or papers say of how they ran.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.published import Row, read

CARDS = {
    "deepseek-v3": "DeepSeekV3 w/ MTP",
    "gpt-oss-120b": "GPT OSS 120B",
    "gpt-oss-20b": "GPT OSS 20B",
    "moonlight-16b-a3b": "Moonlight",
    "qwen3-235b-a22b": "Qwen3_235B",
    "qwen3-30b-a3b": "Qwen3_30B",
    "kimi-k2": "Kimi-K2",
}
"""The cards' models, as published.MODELS names them. The others have layers that megaaccum cannot build."""

HYBRID = "layers with state spaces, linear or sparse attention, which megaaccum does not build"

RECIPES: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config": dict(tp=1, pp=1, ep=16, mbs=1),
    "qwen3_30b_a3b_pretrain_8gpu_gb300_fp8mx_config": dict(tp=1, pp=1, ep=8, mbs=8, graphs="full"),
    "qwen3_30b_a3b_pretrain_config": dict(routing="natural"),
    "moonlight_16b_pretrain_16gpu_h100_bf16_config": dict(overlap="yes"),
    "gpt_oss_120b_pretrain_64gpu_gb200_bf16_config": dict(recompute="selective: layernorm moe_act"),
    "deepseek_v3_pretrain_1024gpu_h100_bf16_config": dict(recompute="selective: mla_up_proj mlp"),
    "qwen3_235b_a22b_pretrain_256gpu_gb300_fp8mx_config": dict(vpp=12, graphs="full"),
    "qwen3_235b_a22b_pretrain_256gpu_gb200_fp8mx_config": dict(vpp=3, graphs="full"),
}
"""Keys that cards leave out and the recipe of that name sets (NVIDIA-NeMo/Megatron-Bridge 067f987, perf_recipes)."""


def read_cards(path: Path) -> list[Row]:
    """Rows of verification cards: one pre-training run each."""
    return [_card(number, row) for number, row in enumerate(read(path), 1)]


def _card(number: int, row: Row) -> Row:
    recipe = row.text("recipe")
    axes = {name.lower(): size for name, size in re.findall(r"([A-Z]+)=?(\d+)", row.text("layout"))}
    keys = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "vp": "vpp", "etp": "etp"}
    found = {keys[name]: size for name, size in axes.items() if name in keys}
    found |= {name: str(value) for name, value in RECIPES.get(recipe, {}).items() if name not in found}
    seq, seconds, gpus = row.whole("seq", 4096), row.number("step_ms") / 1e3, row.whole("gpus")
    batch = row.text("gbs") or str(round(row.number("tokens_per_s_per_gpu") * gpus * seconds / seq))
    tp, pp, cp = (int(found.setdefault(name, "1")) for name in ("tp", "pp", "cp"))
    precision = row.text("precision") or next((p for p in ("fp8mx", "nvfp4", "bf16") if p in recipe), "bf16")
    values = dict(
        row_id=f"cards-{row.text('model')}-{row.text('item').replace('/', '-')}-{row.text('gpu')}".lower(),
        source_set="cards",
        model=CARDS.get(row.text("model"), ""),
        gpu=row.text("gpu"),
        num_gpus=str(gpus),
        precision=precision.replace("fp8_mx", "MXFP8").replace("fp8mx", "MXFP8"),
        seq_len=str(seq),
        gbs=batch,
        mbs=row.text("mbs") or found.get("mbs", "1"),
        dp=str(gpus // (tp * pp * cp)),
        schedule="interleaved-1F1B" if int(found.get("vpp", "1")) > 1 else "1F1B" if pp > 1 else "none",
        framework="Megatron-Bridge 26.06",
        iter_time_s=str(seconds),
        status="ok",
        left_out="" if row.text("model") in CARDS else HYBRID,
        dispatcher=row.text("dispatcher"),
        routing=found.pop("routing", "") or row.text("routing"),
        overlap=found.pop("overlap", ""),
        graphs=found.pop("graphs", "") or row.text("graphs"),
        number=str(number),
    )
    return Row(values | {k: v for k, v in found.items() if k != "mbs"})


SIMUMAX = {
    "llama3_8b": dict(model="Llama3-8B", hidden="4096", ffn="14336", heads="32", kv_heads="8", vocab="128257"),
    "llama3_70b": dict(model="Llama3-70B", hidden="8192", ffn="28672", heads="64", kv_heads="8", vocab="128256"),
    "llama3_405b": dict(model="Llama3-405B", hidden="16384", ffn="53248", heads="128", kv_heads="16", vocab="128256"),
    "deepseekv2": dict(model="DeepSeekV2"),
    "deepseekv3": dict(model="DeepSeekV3 cut"),
}
"""Models of MooreThreads/SimuMax, simu_tools/megatron_scripts (4dcaae5); layers are the row's."""


def read_simumax(path: Path) -> list[Row]:
    """Rows of SimuMax' runs on one node of B200, of their step time and of their memory alike."""
    return [_simumax(row) for row in read(path)]


def _simumax(row: Row) -> Row:
    case = row.text("case")
    name = next((name for name in SIMUMAX if case.startswith(name)), "")
    axes = dict(re.findall(r"_(tp|ep|cp|pp|dp|vp|l|seq|mbc|mbs)(\d+)", case))
    tp, cp, pp = (int(axes.get(name, "1")) for name in ("tp", "cp", "pp"))
    dp = int(axes.get("dp", 8 // (tp * cp * pp)))
    count, micro = int(axes.get("mbc", "8")), int(axes.get("mbs", "1"))
    recompute = "full" if "full" in case else "selective: core_attn mlp" if "selective" in case else "none"
    return Row(
        dict(
            row_id=f"simumax-{case}", source_set="simumax", gpu="B200", num_gpus="8", precision="bf16",
            tp=str(tp), cp=str(cp), pp=str(pp), dp=str(dp), ep=axes.get("ep", "1"), vpp=axes.get("vp", "1"),
            layers=axes.get("l", ""), seq_len=axes.get("seq", "4096"), mbs=str(micro), num_microbatches=str(count),
            gbs=str(micro * count * dp), recompute=recompute, framework="Megatron-LM 2026 without overlap",
            schedule="none" if pp == 1 else "1F1B", dp_sharding="distributed optimizer, FP32 gradients",
            iter_time_s=str(row.number("real_ms") / 1e3), mem_value=row.text("real_alloc_gib"), mem_kind="allocated",
            status="ok", **SIMUMAX.get(name, {}),
        )
    )  # fmt: skip


_KORTHIKANTI = {
    # layers, hidden, heads, pp, vpp, batch, micro-batch; seconds with full recompute, with the paper's scheme.
    "22B": (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    "530B": (105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    "1T": (128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
}


def korthikanti() -> list[Row]:
    """Table 5 of arXiv 2205.05198, with the layouts of its table 3: tensor parallelism 8, one replica, A100 80GB."""
    rows = []
    for size, (layers, hidden, heads, pp, vpp, batch, micro, *seconds) in _KORTHIKANTI.items():
        for scheme, took in zip(("full", "selective"), seconds, strict=True):
            values: dict[str, object] = dict(
                row_id=f"korthikanti-{size}-{scheme}", source_set="korthikanti", model=f"GPT-{size}", layers=layers,
                hidden=hidden, ffn=4 * hidden, heads=heads, vocab=51200, seq_len=2048, gpu="A100-80GB-SXM",
                num_gpus=8 * pp, precision="mixed fp16", tp=8, pp=pp, vpp=vpp, dp=1, gbs=batch, mbs=micro,
                num_microbatches=batch // micro, recompute=scheme, schedule="1F1B-I" if vpp > 1 else "1F1B",
                framework="Megatron-LM", iter_time_s=took, status="ok",
            )  # fmt: skip
            rows.append(Row({name: str(value) for name, value in values.items()}))
    return rows
