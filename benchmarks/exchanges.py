"""Cut and order of a model like Qwen3-235B-A22B, searched with the all-to-all of experts in the table and without, on
stages of fixed delays.

    python -m benchmarks exchanges [--pp P] [--microbatches M] [--ep EP] [--stretch X] [--iterations N] [--json F]

*without*: exchanges are a part of the passes, which nothing hides: the fastest of ZB-H1, ZB-V and DualPipeV, each on
the cut tuned for it, and the order that a search finds from there. *with*: fused pairs hide exchanges, layer by
layer (megaaccum/schedule/exchange.py), for the cut as for the order. *paired afterwards*: the first order with its
neighbouring passes fused. The simulator's seconds, and wall time of megaaccum's executor, whose stages a device runs
beside the launching thread.

Shape: Qwen3-235B-A22B (94 layers of 4,096, 64 heads of 128, 4 groups, 128 experts of 1,536, 8 per token; its published
config.json). Machine: `h100` of megaaccum/lab/planner/hardware.yaml (NVIDIA's datasheet; rates fitted to published
runs): products at their fitted rates, all-to-all at the planner's price. One sequence of 4,096 tokens a micro-batch,
tp 1, experts spread over --ep GPUs of a node.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.schedules import Setup, conditions, evaluate
from megaaccum.lab.planner import comm
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.search.cut import tune_cut
from megaaccum.lab.search.profile import Cut, LayerCost, Profile, describe_cut, even_cut
from megaaccum.lab.search.search import ITERATIONS, search_order
from megaaccum.schedule import Schedule, build, simulate, write_csv
from megaaccum.schedule.exchange import Layer
from megaaccum.schedule.pass_numbers import Problem

TOKENS, HIDDEN, HEADS, GROUPS, WIDTH, LAYERS, VOCAB = 4096, 4096, 64, 4, 128, 94, 151_936
EXPERTS, PER_TOKEN, INNER = 128, 8, 1536
NAMED = ("zb-h1", "zbv", "dualpipev")


def profile_of(ep: int) -> Profile:
    """Costs of the model's layers on the machine, with experts over `ep` GPUs."""
    machine = load_hardware("h100")
    e = machine.device.efficiency

    def product(m: float, n: float, k: float, count: float = 1.0) -> float:
        rate = machine.device.peak * e.gemm
        for size, half in ((m, e.half_m), (n, e.half_n), (k, e.half_k)):
            rate *= size / (size + half)
        return count * 2 * m * n * k / rate

    projections = product(TOKENS, (HEADS + 2 * GROUPS) * WIDTH, HIDDEN) + product(TOKENS, HIDDEN, HEADS * WIDTH)
    core = 2 * TOKENS**2 * HEADS * WIDTH / (machine.device.peak * e.attention)  # causal: half of the scores
    rows = ep * TOKENS * PER_TOKEN / EXPERTS
    experts = (product(rows, 2 * INNER, HIDDEN) + product(rows, HIDDEN, INNER)) * EXPERTS / ep
    group = comm.Group.strided(ep, 1, machine.links)
    sent = comm.copies(group, PER_TOKEN)
    exchange = float(comm.all_to_all(TOKENS * HIDDEN * 2.0, group, machine.links, sent))
    computed, back = projections + core + experts, projections + 2.5 * core + experts
    head = product(TOKENS, VOCAB, HIDDEN)
    layer = LayerCost(
        name="attention and experts", forward=computed + 2 * exchange, input_grad=back + 2 * exchange,
        weight_grad=projections + experts, exchange=exchange, experts=experts / computed,
    )  # fmt: skip
    table = 2 * TOKENS * HIDDEN * 2 / (machine.device.hbm_bandwidth * e.memory)
    return Profile(
        pattern="E" + "X" * LAYERS + "L",
        kinds={
            "E": LayerCost(name="embedding", forward=table, input_grad=0.0, weight_grad=table),
            "X": layer,
            "L": LayerCost(name="head and loss", forward=head, input_grad=head, weight_grad=head),
        },
    )


def chosen(profile: Profile, pp: int, m: int, iterations: int) -> tuple[Schedule, Cut, str]:
    """(the searched order, its cut, the named schedule from which it came): the fastest in the profile's own terms."""
    found = []
    for name in NAMED:
        schedule = build(name, pp=pp, num_microbatches=m)
        cut = tune_cut(profile, schedule)
        found.append((cut.seconds, schedule, cut))
    _, schedule, cut = min(found, key=lambda each: each[0])
    memory = profile.memory(cut.cut, chunks=schedule.chunks)
    problem = Problem(
        profile.costs(cut.cut), stages=schedule.stages, num_microbatches=m, memory=memory, limit=max(cut.peaks)
    )
    searched = search_order(problem, start=[schedule], iterations=iterations)
    return searched.schedule, cut.cut, schedule.name


def without_exchanges(profile: Profile) -> Profile:
    """The same durations, of which nothing is known to be an exchange."""
    kinds = {
        kind: LayerCost(forward=cost.forward, input_grad=cost.input_grad, weight_grad=cost.weight_grad)
        for kind, cost in profile.kinds.items()
    }
    return Profile(pattern=profile.pattern, kinds=kinds)


def paired(schedule: Schedule, profile: Profile, cut: Cut) -> Schedule | None:
    """`schedule` with neighbouring passes fused; None if it cannot end."""
    problem = Problem(profile.costs(cut), stages=schedule.stages, num_microbatches=schedule.num_microbatches)
    order = problem.paired(problem.order_of(schedule))
    return problem.schedule_of(order, "paired") if problem.time(order) < float("inf") else None


def main(argv: list[str] | None = None) -> int:
    """Search, simulate and run; returns the exit code."""
    args = _parse(argv)
    profile = profile_of(args.ep)
    layer = profile.kinds["X"]
    print(
        f"a layer: F {layer.forward * 1e3:.2f}, I {layer.input_grad * 1e3:.2f}, W {layer.weight_grad * 1e3:.2f} ms, of"
        f" which an all-to-all {layer.exchange * 1e3:.2f} ms, four times: {4 * layer.exchange / layer.seconds:.1%}"
    )
    plain, its_cut, origin = chosen(without_exchanges(profile), args.pp, args.microbatches, args.iterations)
    aware, cut, from_ = chosen(profile, args.pp, args.microbatches, args.iterations)
    rows = {f"without (from {origin})": (plain, its_cut), f"with (from {from_})": (aware, cut)}
    if (fused := paired(plain, profile, its_cut)) is not None:
        rows["without, paired afterwards"] = fused, its_cut
    named = build("dualpipev", pp=args.pp, num_microbatches=args.microbatches)
    rows["dualpipev, even cut"] = named, even_cut(profile, named.num_stages)
    report, walls = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (schedule, layers)) in enumerate(rows.items()):
            table = Path(folder) / f"{number}.csv"
            write_csv(schedule, table)
            result = evaluate(_setup(table, profile, layers, args), None)
            seconds = simulate(schedule, profile.costs(layers)).makespan
            walls[name] = result.wall
            report.append(
                {"row": name, "simulated": seconds, "wall": result.wall, "cut": describe_cut(profile, layers)}
            )
            print(f"{name:<28} simulated {seconds:8.4f} s, wall {result.wall / args.stretch:8.4f} s", flush=True)
    first, then = list(walls.values())[:2]
    gain = report[0]["simulated"] / report[1]["simulated"] - 1
    print(f"with the all-to-all in the table: {gain:.1%} faster simulated, {first / then - 1:.1%} on delay stages")
    if args.json is not None:
        keys = {key: value for key, value in vars(args).items() if key != "json"}
        found = {"conditions": conditions(), **keys, "rows": report}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _stretched(layer: Layer, factor: float) -> Layer:
    forward, input_grad = ((first * factor, second * factor) for first, second in layer[:2])
    return Layer(forward, input_grad, layer.exchange * factor)


def _setup(table: Path, profile: Profile, cut: Cut, args: argparse.Namespace) -> Setup:
    """Stages of this cut, --stretch times as long."""
    costs = profile.costs(cut)
    by_stage = tuple(zip(*([each * args.stretch for each in kind] for kind in costs.by_stage(len(cut))), strict=True))
    assert costs.layers is not None
    longer = tuple(tuple(_stretched(each, args.stretch) for each in stage) for stage in costs.layers)
    return Setup(
        runtime="megaaccum", schedule=str(table), pp=args.pp, num_microbatches=args.microbatches, seconds=0.0,
        repeat=args.repeat, stages="device", by_stage=by_stage, layers=longer,
    )  # fmt: skip


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks exchanges", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, default=16, help="in a flush")
    parser.add_argument("--ep", type=int, default=8, help="GPUs of a node over which experts are spread")
    parser.add_argument("--stretch", type=float, default=0.25, help="stages X times as long as the profile says")
    parser.add_argument("--repeat", type=int, default=3, help="flushes that are measured; the least counts")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="orders that a search tries")
    parser.add_argument("--json", type=Path, help="write conditions and results here")
    return parser.parse_args(argv)
