"""`megaaccum check`: resolve a configuration and print its plan: how ranks and batch are cut, what is sharded, the
schedule, and what was derived. Or print every error in it at once, with exit code 2. Any key may be overridden, as in
--dbs 4 --bf16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence

from megaaccum import units
from megaaccum.cli.arguments import LoadedConfig, command_parser, fewest_ranks, ranks_told, read_source
from megaaccum.config import lr_scaling, resolve
from megaaccum.config.batch import BatchPlan, bubble_fraction
from megaaccum.config.deepspeed_config import deepspeed_config
from megaaccum.config.plan import Plan
from megaaccum.config.rules.model import cannot_pack
from megaaccum.config.schema import Config, ShardingConfig
from megaaccum.errors import ConfigError, DataError, printable, raise_problems
from megaaccum.lab.planner import auto_schedule, footprint, matrices, sync_mode
from megaaccum.lab.planner.layouts import SCHEDULES
from megaaccum.lab.planner.pipeline import seconds_without_barrier
from megaaccum.lab.planner.stages import layers_of_stages
from megaaccum.optim.owners import COSTS
from megaaccum.pretrain.data.sources import vocab_size
from megaaccum.pretrain.launch.hostfile import read_hostfile
from megaaccum.pretrain.metrics.flops import uncounted
from megaaccum.pretrain.metrics.param_count import count_parameters
from megaaccum.schedule import Costs, Schedule, build, simulate, validate
from megaaccum.schedule.registry import by_executor, entry

MOST_COMMON = 80e9
"""Bytes beyond which `check` says which GPUs have that many: nothing says where the run will be."""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum check` with these arguments; returns the exit code, 2 if the configuration has errors."""
    args, source = read_source(argv).parse(_parser())
    name = " ".join(source.command) or source.path or "the command line"
    try:
        with source.load() as loaded:
            text = describe(loaded, world_size=args.world_size, hostfile=args.hostfile, with_json=args.json)
            print(printable(text))
    except ConfigError as error:
        many = f"{len(error.problems)} errors" if len(error.problems) > 1 else "1 error"
        print(f"{many} in {printable(name)}:", file=sys.stderr)
        for problem in error.shown:
            print(f"  - {problem}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "check",
        __doc__,
        "megaaccum check CONFIG [--hostfile F | --world-size N] [--json] [--key value ...]\n"
        "       megaaccum check --record [...] -- bash train.sh ARGUMENTS",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--hostfile", metavar="F", help="count the ranks of this DeepSpeed hostfile (host slots=N)")
    group.add_argument("--world-size", "--world_size", metavar="N", type=int, help="number of ranks")
    parser.add_argument("--json", action="store_true", help="also print what DeepSpeed is given")
    return parser


def describe(
    loaded: LoadedConfig,
    *,
    world_size: int | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    with_json: bool = False,
) -> str:
    """The plan as text. Starts no process group; imports torch only where Megatron's flags are to be read.

    The world size is `world_size`, else the slots of `hostfile`, else a recorded launcher's, else the environment's
    WORLD_SIZE, else the key world_size, else nproc_per_node, else what the batch of the DeepSpeed JSON tells, else the
    smallest that the layout allows.

    Raises:
        ConfigError: every error of reading and of resolving, together.
    """
    config, problems = loaded.config, loaded.problems
    try:
        ranks, source = _world_size(loaded, world_size, hostfile)
        plan = _settled(resolve(config, world_size=ranks))
    except ConfigError as error:
        problems += error.problems
    raise_problems(problems)
    parts = (_batch, _ramp, _rates, _schedule, _model, _sharding)
    sections = [_layout(plan, source), *(part(plan) for part in parts), ("Derived and set aside", plan.notes)]
    if with_json:
        backend, block = plan.config.sharding.backend, json.dumps(deepspeed_config(plan), indent=2).splitlines()
        sections.append(("DeepSpeed is given", block if backend == "deepspeed" else [f"nothing: backend is {backend}"]))
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines)


def _settled(plan: Plan) -> Plan:
    """The plan with a schedule (`auto`), a micro-batch and a sync mode that fit; which ones do depends on the
    vocabulary."""
    if _vocabulary(plan.config)[0] is not None:
        return auto_schedule.choose_schedule(plan)
    if auto_schedule.is_open(plan):
        plan.notes.append(f"schedule auto: {plan.layout.schedule} is shown, as the vocabulary is not known yet.")
    return plan


def _world_size(loaded: LoadedConfig, asked: int | None, hostfile: str | os.PathLike[str] | None) -> tuple[int, str]:
    """The number of ranks, and where it comes from."""
    if asked is not None:
        return asked, "--world-size"
    if hostfile is not None:
        slots = read_hostfile(hostfile)
        return sum(slots.values()), f"{len(slots)} host{'s' * (len(slots) > 1)} of {hostfile}"
    if loaded.world_size is not None:
        return loaded.world_size, f"the launcher in {loaded.name}"
    config = loaded.config
    if (given := os.environ.get("WORLD_SIZE")) is not None:
        if not given.isdecimal():
            raise ConfigError(f"WORLD_SIZE in the environment is {given!r}: it must be a number.")
        return int(given), "WORLD_SIZE in the environment"
    for name in ("world_size", "nproc_per_node"):
        if (ranks := getattr(config.run, name)) is not None:
            return ranks, name
    told = ranks_told(config)
    why = f"dp {told} by the batch of the DeepSpeed JSON" if told > 1 else "the smallest for this layout"
    return fewest_ranks(config) * told, f"{why}; --world-size or --hostfile say otherwise"


_Section = tuple[str, list[str]]


def _layout(plan: Plan, source: str) -> _Section:
    at = plan.layout
    lines = [
        f"world_size {at.world_size} ({source})",
        f"world_size = tp {at.tp} * cp {at.cp} * pp {at.pp} * dp {at.dp} = {at.world_size}",
    ]
    if plan.config.parallel.sequence_parallel:
        lines.append(f"sequence_parallel: norms and dropout are split over the tp {at.tp} ranks")
    if plan.config.model.num_experts is not None:
        lines.append(f"experts: ep {at.ep} * etp {at.etp} * pp {at.pp} * expert dp {at.edp} = {at.world_size}")
    return "Layout", lines


_VERIFIED = [
    "verify_at_start: two more forwards and backwards before the first step, and after a restart on another layout,",
    "  compare its gradient in two splits of its samples. What both get wrong alike is not seen: sums over tp, the",
    "  loss, the norm, clipping, the optimizer (megaaccum verify sees those, in small)",
]


def _batch(plan: Plan) -> _Section:
    over = {"token": "the step's unmasked tokens", "microbatch": "num_microbatches, a mean of means"}
    lines = plan.batch.describe().splitlines()
    if plan.config.batch.static_graph:
        lines.append("static_graph: every step has this count and this shape; batch warm-up is off")
    return "Batch", [
        *lines,
        *_documents(plan),
        f"loss_norm: {plan.batch.loss_norm}, so the loss is divided by {over[plan.batch.loss_norm]}",
        *(_VERIFIED if plan.config.run.verify_at_start else []),
    ]


def _documents(plan: Plan) -> list[str]:
    """How attention is kept inside documents; nothing if it is not."""
    if not plan.config.data.reset_attention_mask:
        return []
    length = plan.batch.seq_length
    tokens = plan.batch.micro_batch_size * length
    line = f"a micro-batch has {tokens:,} bytes of where documents begin, and no mask, of {tokens * length:,} bytes"
    refused = [] if plan.config.model.transformer_impl == "local" else list(cannot_pack(plan.config))
    return [f"reset_attention_mask: {line}", *(f"on a GPU with Transformer Engine: {each}" for each in refused)]


def _ramp(plan: Plan) -> _Section:
    """Every batch of the warm-up; nothing without one."""
    if plan.ramp.is_constant:
        return "Batch warm-up", []
    lines = [f"{'steps':<16}{'from sample':>12}{'sequences':>11}{'tokens':>12}{'micro-batches':>15}{'bubble':>9}"]
    for rung in plan.ramp.rungs():
        batch = plan.ramp.batches[rung.size]
        steps = f"{rung.first_step} on" if rung.num_steps is None else _span(rung.first_step, rung.num_steps)
        cut = f"{batch.grad_accum_steps} * {batch.pp_microbatches} = {batch.num_microbatches}"
        lines.append(
            f"{steps:<16}{rung.consumed_samples:>12,}{rung.size:>11,}{batch.tokens_per_step:>12,}{cut:>15}"
            f"{_bubble(plan, batch):>9.1%}"
        )
    return "Batch warm-up", [*lines, "micro-batches = grad_accum_steps * pp_microbatches; bubble with equal stages"]


def _rates(plan: Plan) -> _Section:
    """Learning rates that follow the batch; nothing if they do not."""
    assert plan.written is not None
    return "Learning rate", lr_scaling.describe(plan.config, plan.written)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _bubble(plan: Plan, batch: BatchPlan) -> float:
    """Share of a flush of `batch` that a rank idles, with stages of equal time."""
    at, m = plan.layout, batch.microbatches_per_flush
    if not by_executor(at.schedule):
        return bubble_fraction(pp=at.pp, vpp=at.vpp, microbatches=m)
    schedule = build(at.schedule, pp=at.pp, num_microbatches=m)
    return 1 - simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1)).utilisation


def _schedule(plan: Plan) -> _Section:
    at, m = plan.layout, plan.batch.microbatches_per_flush
    name = "no pipeline" if at.schedule == "none" else entry(at.schedule).title or at.schedule
    lines = [f"{name}: pp {at.pp}, {at.vpp} model chunk{'s' * (at.vpp > 1)} per rank"]
    stages = layers_of_stages(plan.config.model, plan.config.parallel)
    if at.pp > 1:
        lines.append(f"layers by stage: {_runs(stages)}")
    if by_executor(at.schedule):
        lines += _own_schedule(plan)
    elif at.pp > 1:
        lines.append(
            f"bubble = (pp - 1) / (vpp * m + pp - 1) = {at.pp - 1} / {at.vpp * m + at.pp - 1}"
            f" = {_bubble(plan, plan.batch):.1%} of a flush, with equal stages"
        )
    return "Schedule", lines


def _own_schedule(plan: Plan) -> list[str]:
    """The simulator's and the validator's findings on a schedule that megaaccum's executor runs."""
    at = plan.layout
    schedule = build(at.schedule, pp=at.pp, num_microbatches=plan.batch.microbatches_per_flush)
    lines = [
        f"bubble = {_bubble(plan, plan.batch):.1%} of a flush, simulated with equal stages and F = I = W",
        f"activations of {max(validate(schedule).in_flight)} chunk passes live on the fullest rank",
    ]
    if at.placement == "v":
        lines.append(f"stages in a V: rank r holds r and {2 * at.pp - 1} - r; embedding and head are on rank 0")
    if plan.config.step.speculative_step:
        lines.append(_without_barrier(schedule))
    return lines


def _without_barrier(schedule: Schedule) -> str:
    """The gain of `speculative_step`."""
    costs = Costs.per_rank(1, 1, 1, chunks=schedule.chunks)
    whole, work = simulate(schedule, costs).makespan, 3 * schedule.num_microbatches
    apart = seconds_without_barrier(schedule, costs)
    if apart > 0.999 * whole:
        return "speculative_step gains nothing: in this schedule every step waits for the one before; leave it out"
    return f"speculative_step: a step takes {apart / work:.4f} of its work, with a barrier {whole / work:.4f}"


def _runs(counts: Sequence[int]) -> str:
    """[3, 4, 4, 4] as '3, 3 x 4'."""
    runs = [(count, len([*same])) for count, same in itertools.groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)


def _model(plan: Plan) -> _Section:
    model = plan.config.model
    kind = f"{model.num_experts} experts, {model.moe_router_topk} per token" if model.num_experts else "dense"
    lines = [
        f"{model.num_layers} layers, hidden_size {model.hidden_size}, {model.num_attention_heads} heads,"
        f" seq_length {model.seq_length}, {kind}"
    ]
    rows, source = _vocabulary(plan.config)
    if rows is None:
        return "Model", [*lines, f"parameters: unknown before the vocabulary is ({source})"]
    lines.append(f"vocabulary {rows:,} ({source})")
    if fields := uncounted(plan.config):
        return "Model", [*lines, f"parameters: not counted with {', '.join(fields)}; bytes below are of plain layers"]
    count = count_parameters(plan.config, rows)
    lines.append(f"parameters {units.rounded(count.total)} ({count.total:,})")
    if count.active != count.total:
        lines.append(f"parameters that one token meets {units.rounded(count.active)} ({count.active:,})")
    return "Model", lines


def _vocabulary(config: Config) -> tuple[int | None, str]:
    """Entries of the vocabulary and where they come from; None, and why, on a machine without the dataset."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size, "vocab_size"
    try:
        return vocab_size(config), "the tokenizer's"
    except DataError as error:
        return None, str(error)


def _sharding(plan: Plan) -> _Section:
    sharding, at = plan.config.sharding, plan.layout
    held = {1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters, gradients and optimizer state"}
    where = {"none": "on the device", "cpu": "in host memory"}
    ranks = f"dp {at.dp}" + f" * cp {at.cp}" * (at.cp > 1)
    replicas = f" in {sharding.data_parallel_replicas} replicas" * (sharding.data_parallel_replicas > 1)
    who = {
        "deepspeed": f"DeepSpeed ZeRO-{sharding.zero_stage} over {ranks}: {held[sharding.zero_stage]};"
        f" optimizer {where[sharding.offload_optimizer]}",
        "fsdp2": f"torch fully_shard over {ranks}{replicas}: parameters, gradients and optimizer state",
        "megatron": f"Megatron's DistributedDataParallel over {ranks}: optimizer state",
        "ddp": f"torch DistributedDataParallel over {ranks}: nothing is sharded",
    }
    when = {
        "resident": "parameters are gathered once per step, gradients are reduced once per step",
        "streaming": "parameters are gathered for each forward and backward of a layer, gradients reduced after each",
    }
    return "Sharding", [
        who[sharding.backend],
        f"sync {sharding.sync}: {when[sharding.sync]}",
        _precisions(sharding),
        *_matrices(plan),
        *_fp8(plan),
        *_policies(plan),
    ]


def _precisions(sharding: ShardingConfig) -> str:
    """The dtypes in which the backend accumulates gradients, reduces them over ranks, and updates weights."""
    params = sharding.params_dtype
    added, reduced, stepped = sharding.grad_accum_dtype, sharding.grad_reduce_dtype, sharding.optimizer_dtype
    if params == "fp64":
        added = reduced = stepped = "fp64"  # type: ignore[assignment]
    elif sharding.backend == "fsdp2":
        added = reduced
    elif sharding.backend == "megatron":
        added = reduced = "fp32" if reduced == "fp32" else params  # type: ignore[assignment]
    return f"parameters {params}, gradients added in {added} and reduced in {reduced}, optimizer in {stepped}"


def _matrices(plan: Plan) -> list[str]:
    """Muon's or SOAP's work and traffic on the stage with the most of it; nothing with AdamW."""
    optimizer = plan.config.optimizer.optimizer
    if optimizer not in COSTS or plan.layout.schedule not in SCHEDULES:
        return []
    at, found = plan.layout, matrices.forecast(plan)
    momenta = "momenta live with the shards"
    if found.at_owners:
        momenta = "momenta live at the owners, to which gradients are reduced"
    elif optimizer == "soap":
        momenta = "its state lives at the owners, to which gradients are sent"
    name = "SOAP" if optimizer == "soap" else "Muon"
    return [
        f"{name}: {found.count:,} matrices of a stage over {at.tp * at.cp * at.dp} owners"
        f" (tp {at.tp} * cp {at.cp} * dp {at.dp}), the busiest with {found.balance:.2f} times the mean cost,"
        f" {found.flops / 1e12:,.2f} TFLOP per step",
        f"{momenta}: {units.amount(found.to_owners)} to owners and {units.amount(found.back)} back"
        f" per rank and step, {units.amount(abs(found.saved))} of states {'less' if found.saved >= 0 else 'more'} than"
        " AdamW's per stage",
    ]


def _fp8(plan: Plan) -> Iterator[str]:
    """Yields the numbers that FP8 computes in, and the source of its scales."""
    keys, at = plan.config.quantization, plan.layout
    if keys.fp8_format is None:
        return
    formats = {"e4m3": "e4m3", "hybrid": "e4m3 forward and e5m2 for gradients"}
    scales = {
        "delayed": f"by {keys.fp8_amax_compute_algo} of the last {keys.fp8_amax_history_len} micro-batches, the same on"
        f" the tp {at.tp} * cp {at.cp} * dp {at.dp} ranks of a stage",
        "tensorwise": "from each tensor itself",
        "blockwise": "one per block of 128 (Hopper)",
        "mxfp8": "one per 32 numbers (Blackwell)",
    }
    yield (
        f"FP8 products of linear layers in {formats[keys.fp8_format]}, fp8_recipe {keys.fp8_recipe}: scales"
        f" {scales[keys.fp8_recipe]}"
    )
    yield "FP8 copies of weights are made once per step; FP32 masters, sums over micro-batches in FP32"
    if keys.first_last_layers_bf16:
        first, last = keys.num_layers_at_start_in_bf16, keys.num_layers_at_end_in_bf16
        yield f"in BF16: the first {first} and the last {last} layers"


def _policies(plan: Plan) -> Iterator[str]:
    """Yields bytes that the sync modes move and hold, on the rank with the most; nothing without a vocabulary."""
    rows, _ = _vocabulary(plan.config)
    if rows is None or plan.layout.schedule not in SCHEDULES:
        return
    yield "bytes received from other data-parallel ranks per step, and predicted memory, on the rank with the most:"
    heads = f"{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'activations':>13}{'rest':>12}"
    yield f"  {'':<28}{'moved':>12}{'held':>12} = {heads}"
    for row in sync_mode.Forecast(plan, rows).every():
        mark = " (chosen)" if row.mode == plan.config.sharding else ""
        shown = [row.memory[kind] for kind in ("parameters", "gradients", "optimizer", "activations")]
        moved, held, *kinds, rest = map(units.amount, (row.moved.total, row.held, *shown, row.held - sum(shown)))
        kept = f"{kinds[0]:>12}{kinds[1]:>12}{kinds[2]:>12}{kinds[3]:>13}{rest:>12}"
        yield f"  {footprint.mode_name(row.mode):<28}{moved:>12}{held:>12} = {kept}{mark}"
        if mark and row.held > MOST_COMMON:
            yield f"    {held} is more than an 80 GB GPU has: {sync_mode.gpus_with(row.held)}"
