"""A ranked search as a table, as JSON, and the arithmetic of one of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from megaaccum.lab.planner.fallbacks import Candidate, Fallbacks
from megaaccum.lab.planner.layout_config import checked, planned_keys
from megaaccum.lab.planner.layouts import short_name
from megaaccum.lab.planner.memory import KINDS
from megaaccum.lab.planner.search import Ranked, fit_probability
from megaaccum.pretrain.metrics.flops import step_flops
from megaaccum.units import GIB, rounded

_SHORT = {"parameters": "par", "gradients": "grad", "optimizer": "opt", "activations": "act"}


def mfu(ranked: Ranked, index: int) -> float:
    """Model FLOPs of a step over what all GPUs could do in its seconds (PaLM, arXiv 2204.02311, appendix B)."""
    work = ranked.workload
    config = dataclasses.replace(work.config, model=work.model)
    flops = step_flops(config, work.global_batch_size, vocab_size=work.vocab_size)
    return float(flops / (ranked.time.total[index] * work.hardware.device.peak * work.world_size))


def tokens_per_second(ranked: Ranked, index: int) -> float:
    """Tokens per second over all GPUs."""
    return ranked.workload.tokens_per_step / float(ranked.time.total[index])


def table(ranked: Ranked, rows: int, searched: Sequence[float | None] | None = None) -> Table:
    """The first `rows` of the layouts that no other beats, in 80 columns. searched: seconds of each in a searched order
    (cut.searched_seconds), in place of tokens per second."""
    out = _brief("GiB", "s per\nstep", "MFU", "tokens\nper s" if searched is None else "s\nsearched")
    for index in range(min(rows, ranked.num_unbeaten)):
        seconds = ranked.time.total[index]
        last = rounded(tokens_per_second(ranked, index)) if searched is None else _searched(searched, index)
        figures = f"{ranked.memory.total[index] / GIB:.1f}", f"{seconds:.3g}", f"{mfu(ranked, index):.1%}"
        out.add_row(*_words(index + 1, ranked.name_of(index)), *figures, last)
    return out


def _searched(searched: Sequence[float | None], index: int) -> str:
    found = searched[index]
    return "" if found is None else f"{found:.3g}"


def _brief(*figures: str) -> Table:
    """An empty table of layouts in one word each, with these columns of figures."""
    out = Table(header_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    _add_columns(out, ("#", "layout", "mbs\nx ga", "recompute", "schedule", *figures))
    return out


def _add_columns(table: Table, names: Iterable[str], *, no_wrap: bool = False) -> None:
    """Columns of words at the left, of figures at the right."""
    for name in names:
        words = name in ("layout", "recompute", "schedule", "sync", "verdict")
        table.add_column(name, justify="left" if words else "right", no_wrap=no_wrap)


def _words(row: int, at: Mapping[str, Any]) -> list[str]:
    return [str(row), short_name(at), f"{at['mbs']}x{at['ga']}", at["recompute"], at["schedule"]]


def wide_table(ranked: Ranked, rows: int, searched: Sequence[float | None] | None = None) -> Table:
    """The same rows with all axes, GiB by kind, headroom, seconds, bubble, exposed communication and MFU."""
    out = Table(header_style="bold")
    moe = ranked.workload.model.num_experts is not None
    axes = ["tp", "cp", "pp", "vpp", *(["ep"] if moe else []), "dp", "mbs", "dbs", "ga"]
    figures = "rest GiB free s/step bubble comm MFU tokens/s".split() + ([] if searched is None else ["searched"])
    _add_columns(out, ["#", *axes, "recompute", "schedule", "sync", *_SHORT.values(), *figures], no_wrap=True)
    for index in range(min(rows, ranked.num_unbeaten)):
        at = ranked.name_of(index)
        cells = [*(str(at[axis]) for axis in (*axes, "recompute", "schedule", "sync")), *_memory_cells(ranked, index)]
        more = [] if searched is None else [_searched(searched, index)]
        out.add_row(str(index + 1), *cells, *_time_cells(ranked, index), *more)
    return out


def _memory_cells(ranked: Ranked, index: int) -> list[str]:
    kinds = {kind: ranked.memory.by_kind[kind][index] / GIB for kind in KINDS}
    rest = sum(value for kind, value in kinds.items() if kind not in _SHORT)
    cells = [*(kinds[kind] for kind in _SHORT), rest, ranked.memory.total[index] / GIB, ranked.headroom[index] / GIB]
    return [f"{value:.1f}" for value in cells]


def _time_cells(ranked: Ranked, index: int) -> list[str]:
    time, total = ranked.time, float(ranked.time.total[index])
    shares = time.bubble[index], time.exposed[index] / total, mfu(ranked, index)
    return [f"{total:.3g}", *(f"{each:.1%}" for each in shares), f"{tokens_per_second(ranked, index):,.0f}"]


def as_json(ranked: Ranked, rows: int, searched: Sequence[float | None] | None = None) -> dict[str, Any]:
    """The first `rows` layouts with every number of the table, in bytes and seconds."""
    more = [{} if searched is None else {"seconds_searched": each} for each in searched or [None] * rows]
    work = ranked.workload
    return {
        "gpu": work.hardware.name,
        "gpus": work.world_size,
        "hbm_bytes": work.hardware.hbm_bytes,
        "tokens_per_step": work.tokens_per_step,
        "legal_layouts": ranked.num_legal,
        "fitting_layouts": len(ranked),
        "unbeaten_layouts": ranked.num_unbeaten,
        "layouts": [_one(ranked, index) | more[index] for index in range(min(rows, len(ranked)))],
    }


def _one(ranked: Ranked, index: int) -> dict[str, Any]:
    return {
        "rank": index + 1,
        **ranked.name_of(index),
        "keys": planned_keys(ranked.workload, ranked.name_of(index)),
        "memory_bytes": {kind: float(ranked.memory.by_kind[kind][index]) for kind in KINDS},
        "memory_total_bytes": float(ranked.memory.total[index]),
        "headroom_bytes": float(ranked.headroom[index]),
        "fit_probability": float(fit_probability(ranked.memory.total[index], ranked.workload.hardware.hbm_bytes)),
        "most_loaded_pipeline_rank": int(ranked.memory.rank[index]),
        "seconds_per_step": float(ranked.time.total[index]),
        "seconds_by_part": {name: float(seconds[index]) for name, seconds in ranked.time.by_part.items()},
        "exposed_communication_seconds": float(ranked.time.exposed[index]),
        "bubble": float(ranked.time.bubble[index]),
        "mfu": mfu(ranked, index),
        "tokens_per_second": tokens_per_second(ranked, index),
    }


def explain(ranked: Ranked, index: int) -> str:
    """The arithmetic of one layout, line by line, with the formulas' names and sources."""
    at = ranked.name_of(index)
    plan = checked(ranked.workload, at)
    axes = " * ".join(f"{axis} {at[axis]}" for axis in ("tp", "cp", "pp", "dp"))
    ranks = f"world_size = {axes} = {plan.layout.world_size}"
    sections = [
        (f"Layout {index + 1}", [ranks, *plan.batch.describe().splitlines()]),
        ("Memory of the most loaded rank", _memory_lines(ranked, index)),
        ("Time of a step", _time_lines(ranked, index)),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections)


_MEMORY_SOURCES = {
    "parameters": "whole stage (resident) or two units (streaming), and the ZeRO-3 shard (docs/concepts/design.md)",
    "gradients": "whole stage in grad_accum_dtype until they are reduced, and the shard's",
    "optimizer": "FP32 master and two moments of the shard: 12 bytes / (dp * cp) (arXiv 1910.02054, 3.1); Lion has one",
    "activations": "per layer and micro-batch (arXiv 2205.05198, section 4) * those in flight (planner/pipeline.py)",
    "loss": "logits of one micro-batch: the 16-bit logits, FP32 exponentials, their gradient",
    "workspace": "what is recomputed at once, as far as it is more than the loss that is gone by then; the largest"
    " gradient of a weight until it is added",
    "buffers": "DeepSpeed's reduction buckets, units gathered under streaming, inputs under sequence parallelism",
    "runtime": "CUDA context, NCCL and libraries (hardware.yaml)",
    "margin": "fragmentation: a share of what comes and goes (hardware.yaml)",
}


def _memory_lines(ranked: Ranked, index: int) -> list[str]:
    memory = ranked.memory
    lines = [f"{kind:<12}{memory.by_kind[kind][index] / GIB:8.2f} GiB  {_MEMORY_SOURCES[kind]}" for kind in KINDS]
    return [
        f"pipeline rank {memory.rank[index]}, which holds {memory.in_flight[index]:.3g} micro-batches in flight",
        *lines,
        f"{'total':<12}{memory.total[index] / GIB:8.2f} GiB  of {ranked.workload.hardware.hbm_bytes / GIB:.1f} GiB:"
        f" {ranked.headroom[index] / GIB:.2f} GiB free",
        f"fits with probability {fit_probability(memory.total[index], ranked.workload.hardware.hbm_bytes):.0%}: the"
        " share of published runs that took no more over their prediction",
    ]


_TIME_SOURCES = {
    "compute": "num_microbatches * the slowest rank's forward and backward: products at the GPU's rate for their shape,"
    " attention, memory-bound kernels, recomputation, tensor-parallel communication",
    "bubble": "filling and draining (planner/pipeline.py: arXiv 2104.04473, 2401.10241)",
    "p2p": "messages between stages that nothing hides",
    "gather": "parameters over dp * cp, once per step (streaming: in compute): (K - 1) alpha + (K - 1) / K * S / beta",
    "reduce": "gradients over dp * cp, what the last backward does not hide (streaming: in compute)",
    "optimizer": "30 bytes per parameter of the shard at the HBM's bandwidth; with Muon, its busiest owner",
    "overhead": "per step and per micro-batch (hardware.yaml)",
}


def _time_lines(ranked: Ranked, index: int) -> list[str]:
    time = ranked.time
    lines = [f"{name:<12}{seconds[index]:10.4f} s  {_TIME_SOURCES[name]}" for name, seconds in time.by_part.items()]
    work = ranked.workload
    return [
        *lines,
        f"{'total':<12}{time.total[index]:10.4f} s  bubble {time.bubble[index]:.1%} of the flush, exposed communication"
        f" {time.exposed[index]:.3g} s",
        f"MFU {mfu(ranked, index):.1%} of {work.world_size} * {work.hardware.device.peak / 1e12:.1f} TFLOP/s,"
        f" {tokens_per_second(ranked, index):,.0f} tokens/s",
    ]


# --- tuning ---------------------------------------------------------------------------------------------------------


def tuning_table(fallbacks: Fallbacks, best: Candidate | None) -> Table:
    """The layouts that `megaaccum tune` has tried: predicted and measured seconds, the verdict, in 80 columns."""
    out = _brief("s\nplan", "s\nrun", "verdict")
    for each in fallbacks.tried:
        outcome = fallbacks.outcomes[each.name]
        verdict = "best" if each is best else outcome.verdict
        out.add_row(*_words(each.row, each.axes), *_pair(each.seconds, outcome.seconds or 0.0, "{:.3g}")[:2], verdict)
    return out


def wide_tuning_table(fallbacks: Fallbacks, best: Candidate | None) -> Table:
    """The same rows with every axis, seconds and GiB, predicted and measured, and their ratio."""
    out = Table(header_style="bold")
    figures = ("predicted s", "measured s", "ratio", "predicted GiB", "held GiB", "ratio")
    _add_columns(out, ("row", "layout", *figures, "verdict"))
    for each in fallbacks.tried:
        outcome = fallbacks.outcomes[each.name]
        verdict = "best" if each is best else outcome.verdict
        times = _pair(each.seconds, outcome.seconds or 0.0, "{:.4g}")
        sizes = _pair(each.bytes / GIB, outcome.bytes / GIB, "{:.3g}")
        out.add_row(str(each.row), each.name.replace(",", " "), *times, *sizes, verdict)
    return out


def _pair(predicted: float, measured: float, form: str) -> tuple[str, str, str]:
    if not measured:
        return form.format(predicted), "", ""
    return form.format(predicted), form.format(measured), f"{measured / predicted:.3g}"
