"""Share of the experts' gradient bytes that is on its way before a rank's last weight gradients are computed.

    python -m benchmarks expert_reduction [--pp P] [--microbatches M ...] [--only TEXT] [--delay MS] [--json F]

A row for each backend and sync mode, schedule and number of micro-batches, over P pipeline ranks of two tensor-parallel
ranks, which share whole experts. Each layer waits in every pass (delay stages), so that passes take their time on any
machine. *lead*: milliseconds by which the reductions are ahead of the end, the last one and the median, of the rank on
which they are least.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from benchmarks.schedules import conditions
from megaaccum.lab.verification.testing import run_ranks
from tests.support.expert_table import MODES, WHOLE
from tests.support.on_their_way import sent_of_each
from tests.support.parity import Case

SCHEDULES = {
    "1f1b": "",
    "interleaved": "--virtual_pipeline_model_parallel_size 2 ",
    "zb-h1": "--schedule zb-h1 ",
    "zbv": "--schedule zbv ",
    "dualpipev": "--schedule dualpipev ",
}
LAYERS = 16
PER_START = 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks expert_reduction", description=__doc__)
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16], help="in a step")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--delay", type=float, default=4.0, help="milliseconds that a layer waits in a pass")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    cases = {
        f"{mode}, {schedule}, {count} micro-batches": case(args.pp, flags + way, count)
        for mode, flags in MODES.items()
        for schedule, way in SCHEDULES.items()
        for count in args.microbatches
    }
    chosen = [(name, each) for name, each in cases.items() if args.only in name]
    rows = []
    for at in range(0, len(chosen), PER_START):
        names, together = zip(*chosen[at : at + PER_START], strict=True)
        by_rank = run_ranks(sent_of_each, 2 * args.pp, list(together), args.delay / 1e3, timeout=400)
        for name, ranks in zip(names, zip(*by_rank, strict=True), strict=True):
            lead = min((sorted(each.seconds) for each in ranks), key=lambda seconds: seconds[0])
            rows.append(
                {
                    "row": name,
                    "share": min(each.share for each in ranks),
                    "calls": len(ranks[0].calls),
                    "last_lead_ms": 1e3 * lead[0],
                    "median_lead_ms": 1e3 * median(lead),
                }
            )
            print(
                f"{name}: {rows[-1]['share']:.1%} of the bytes in {rows[-1]['calls']} calls on their way; lead"
                f" {rows[-1]['last_lead_ms']:.1f} ms, median {rows[-1]['median_lead_ms']:.1f} ms",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"conditions": conditions(), "rows": rows}, indent=1) + "\n")
    return 0


def case(pp: int, flags: str, num_microbatches: int) -> Case:
    """A model of 16 layers with experts under a layout."""
    model = (
        f"--num_layers {LAYERS} --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
        "--moe_router_dtype fp64 "
    )
    layout = f"--pipeline_model_parallel_size {pp} --pp_microbatches {num_microbatches} {WHOLE}{flags}"
    return Case(2 * pp, layout, model)
