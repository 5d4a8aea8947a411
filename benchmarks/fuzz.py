"""Random legal layouts against one process: three steps of each, whose loss, norm and weights have to agree.

    python -m benchmarks fuzz --cells N --seed S [--first I] [--of KEY] [--cell JSON] [--json F]

Cell I of a seed is the same on every machine. Axes: tp, sequence parallel, cp, pp, schedule, chunks and uneven stages,
dp, ep; backend, ZeRO stage, sync mode, replicas, order of sums, blocks of matrices and sequences; accumulation,
flushes, and calls per step with N known or not; stages of one's own, also in a V; precision; architecture, latent
attention, experts, multi-token prediction, recompute, frozen parts, dropout, Muon; masks of unequal length, documents
in a row, micro-batches of unequal length, batch warm-up, speculative steps,
ranks without a token, ranks with too few micro-batches, parameters that some micro-batches do not use, micro-batches
that are not finite (skipped, left out, or set to 0), evaluations between steps and calls, steps that a load drops, and
a resume at another layout.

What fails is made smaller, as long as it still fails, and printed as the `--cell` that repeats it. In 16 bits every
token goes to all experts, since rounding would change which it goes to.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import fuzz_cell
from benchmarks.fuzz_cell import Cell, Flags, Trained
from megaaccum.errors import ConfigError
from megaaccum.lab.verification.compare import cut
from megaaccum.lab.verification.records import Piece
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.lab.verification.testing.ranks import RanksFailed

if TYPE_CHECKING:
    from megaaccum.config import Plan

PER_START = 8
"""Cells in one start of ranks, which takes longer than a cell."""
SECONDS_PER_CELL = 40
ROPE = {"position_embedding_type": "rope"}
IN_A_V = ("zbv", "dualpipev", "v-half", "v-min")
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipev", "v-half", "v-min")
MORE_MODELS: tuple[Flags, ...] = (
    {"num_query_groups": 1}, {"add_qkv_bias": True}, {"squared_relu": True}, {"kv_channels": 6},
    {"softmax_type": "learnable"}, {"position_embedding_type": "none"}, {**ROPE, "rotary_percent": 0.5},
    {"window_size": "4,0", "window_attn_skip_freq": 2},
)  # fmt: skip
FACTOR = 4.0
"""How much farther from float64 a layout may be than one process of the same precision."""
SCALAR = {"fp64": 1e-11, "fp32": 2e-6, "bf16": 2.0**-7, "fp16": 2.0**-9}
"""Relative error of loss and norm, beyond FACTOR times that of one process in the same precision."""
CHANGE = {"fp64": 1e-9, "fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Error of the weights' change, relative to that change, beyond FACTOR times that of one process."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__)
    parser.add_argument("--cells", type=int, default=20, help="cells to run")
    parser.add_argument("--seed", type=int, default=0, help="cells of another seed are others")
    parser.add_argument("--first", type=int, default=0, help="index of the first cell")
    parser.add_argument("--of", default="", help="only cells that have this key (num_experts)")
    parser.add_argument("--cell", help="run this one cell, given as JSON, in place of drawn ones")
    parser.add_argument("--no-minimise", action="store_true", help="leave what fails as it was drawn")
    parser.add_argument("--json", type=Path, help="also write the outcome here")
    args = parser.parse_args(argv)
    if args.cell:
        cells = [Cell(**json.loads(args.cell))]
    else:
        every = (draw(args.seed, index) for index in itertools.count(args.first))
        has = (each for each in every if not args.of or args.of in each.model | each.layout | each.policies)
        cells = list(itertools.islice(has, args.cells))
    failed: dict[str, list[str]] = {}
    refused = 0
    for number, (cell, problems) in enumerate(outcomes(cells), start=1):
        if problems is None:
            refused += 1
        elif problems:
            print(f"FAILED  {cell}\n  " + "\n  ".join(problems[:12]), flush=True)
            small, why = (cell, problems) if args.no_minimise else minimised(cell)
            print(f"smallest that fails: --cell '{small}'\n  " + "\n  ".join(why[:4]), flush=True)
            failed[str(small)] = why
        if number % PER_START == 0 or number == len(cells):
            print(f"{number} of {len(cells)} cells, {len(failed)} not clean, {refused} refused", flush=True)
    if args.json:
        found = {"seed": args.seed, "first": args.first, "cells": len(cells), "refused": refused, "failed": failed}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if failed else 0


# --- drawing ---------------------------------------------------------------------------------------------------------


def draw(seed: int, index: int) -> Cell:
    """Cell `index` of `seed`: drawn until the rules of the configuration allow it."""
    chance = random.Random(f"{seed}/{index}")
    while True:
        cell = _draw(chance)
        if is_legal(cell):
            # Drawn apart, so that cells stay what they were.
            gated = random.Random(f"gates {seed}/{index}").random() < 0.3 and "mtp_num_layers" not in cell.model
            return _with_more(random.Random(f"more {seed}/{index}"), dataclasses.replace(cell, gated=gated))


def _with_more(chance: random.Random, cell: Cell) -> Cell:
    """`cell` with each of the changes that the rules allow."""
    for keys in _draw_more(chance, cell):
        changed = {name: getattr(cell, name) | each if isinstance(each, dict) else each for name, each in keys.items()}
        candidate = dataclasses.replace(cell, **changed)
        cell = candidate if is_legal(candidate) else cell
    return cell


def is_legal(cell: Cell) -> bool:
    """Whether the configuration's rules allow the cell, at its start and at its resume."""
    try:
        plans = [fuzz_cell.plan_of(cell, layout) for layout in (cell.layout, cell.resume) if layout is not None]
        fuzz_cell.reference_plan(cell, cell.lane)
    except ConfigError:
        return False
    # Megatron computes balancing losses in FP32, and adds up what the ranks that share a micro-batch have of them. Its
    # router rounds scores to FP32, and where N comes late it rounds gradients that are N times as large.
    summed = "moe_aux_loss_coeff" in cell.model and any(plan.layout.tp * plan.layout.cp > 1 for plan in plans)
    if cell.lane == "fp64" and (summed or ("num_experts" in cell.model and not cell.told)):
        return False
    experts = int(cell.model.get("num_experts", 0))
    if cell.lane in ("bf16", "fp16") and int(cell.model.get("moe_router_topk", 2)) < experts:
        return False  # rounding changes which experts a token goes to
    shared = any(plan.layout.tp * plan.layout.cp > 1 for plan in plans)
    if shared and "moe_expert_capacity_factor" in cell.model:
        return False  # each of the ranks that share a sequence drops tokens of its own part
    ordered = any(plan.config.sharding.reproducible == "layout" for plan in plans)
    if (shared or ordered or cell.documents) and "hidden_dropout" in cell.model:
        return False  # masks belong to the ranks that share a sequence, to a place in a rank's run, and to whole rows
    if cell.model.get("optimizer") == "muon" and (cell.lane != "fp32" or cell.bad is not None):
        return False  # the iteration amplifies what rounding leaves of a small gradient
    ramps = len(set(fuzz_cell.counts(cell))) > 1
    if ramps != ("batch_warmup_steps" in cell.policies):
        return False
    if (ramps and cell.resume is not None) or not _can_be_zeroed(cell, plans[0]):
        return False
    sequences = cell.microbatches * int(cell.model.get("micro_batch_size", 1))
    return all(plan.batch.global_batch_size == sequences and _can_be_called(plan, cell.calls) for plan in plans)


def _can_be_zeroed(cell: Cell, plan: Plan) -> bool:
    """Whether one process knows what a rank's own gradient is, in which `nonfinite: zero` sets elements to 0. Of a row
    of the word table, or of a router, that is a matter of which tokens the rank has."""
    if cell.policies.get("nonfinite") != "zero":
        return True
    layout, sharding = plan.layout, plan.config.sharding
    tokens_are_cut = layout.cp > 1 or (layout.tp > 1 and "num_experts" in cell.model)
    has_copies = layout.pp > 1 or sharding.reproducible == "layout"
    sums_overlap = sharding.backend == "fsdp2" and sharding.sync == "streaming" and layout.splits_backward
    return not tokens_are_cut and not (has_copies and "mtp_num_layers" in cell.model) and not sums_overlap


def _can_be_called(plan: Plan, calls: int) -> bool:
    """Whether a step's micro-batches can be cut into as many calls, each a whole number of flushes."""
    each, left = divmod(plan.batch.num_microbatches, calls)
    if left or (plan.batch.flush == "per_round" and each % plan.batch.microbatches_per_flush):
        return calls == 1
    return calls == 1 or plan.layout.schedule != "interleaved" or each % plan.layout.pp == 0


def _draw(chance: random.Random) -> Cell:
    world_size = chance.choice((1, 2, 2, 4, 4, 4, 4))
    lane = chance.choice(("fp64", "fp64", "fp64", "fp32", "fp32", "fp32", "bf16", "fp16"))
    microbatches = chance.choice((8, 8, 8, 16))
    nonfinite = chance.choice(("skip", "drop_microbatch", "zero", "zero")) if chance.random() < 0.25 else None
    model = _draw_model(chance, lane, experts=chance.random() < 0.5, latent=chance.random() < 0.2)
    tp = chance.choice((1, 1, 1, 2))
    layout = _draw_layout(chance, world_size, tp, lane, microbatches, model)
    resume = None
    if chance.random() < 0.3:
        resume = _draw_layout(chance, world_size, tp, lane, microbatches, model)
    short = chance.random() < 0.15
    calls = 1 if short else chance.choice((1, 1, 2, 4))
    policies: Flags = {"nonfinite": nonfinite} if nonfinite else {}
    policies |= {"short_batch": chance.choice(("pad", "pad", "drop"))} if short else {}
    ramps = not short and calls == 1 and chance.random() < 0.4
    policies |= {"batch_warmup_steps": 2} if ramps else {}
    lengths = chance.random() < 0.25
    policies |= {"variable_seq_lengths": True} if lengths else {}
    return Cell(
        world_size=world_size,
        lane=lane,
        microbatches=microbatches,
        model=model,
        layout=layout,
        resume=resume,
        policies=policies,
        masks=chance.choice(("full", "prefix", "prefix", "sparse")),
        hollow=chance.randrange(4) if chance.random() < 0.15 else None,
        bad=chance.randrange(microbatches) if nonfinite else None,
        short=chance.choice((1, 2, microbatches)) if short else 0,
        frozen=chance.choice(("", "", "", *fuzz_cell.FROZEN)),
        evaluate=not ramps and chance.random() < 0.3,
        calls=calls,
        told=calls == 1 or chance.random() < 0.5,
        lengths=lengths,
        dropped=chance.random() < 0.2,
    )


def _draw_model(chance: random.Random, lane: str, *, experts: bool, latent: bool) -> Flags:
    def maybe(probability: float, **keys: Any) -> Flags:
        return keys if chance.random() < probability else {}

    model: Flags = {"num_layers": chance.choice((4, 4, 4, 8))}
    model |= maybe(0.4, swiglu=True) | maybe(0.4, normalization="RMSNorm")
    model |= maybe(0.2, qk_layernorm=True) | maybe(0.5, untie_embeddings_and_output_weights=True)
    model |= maybe(0.5, **ROPE) | maybe(0.4, add_bias_linear=False)
    model |= maybe(0.3, micro_batch_size=2) | maybe(0.3, loss_norm="microbatch") | maybe(0.5, clip_grad=0.5)
    model |= maybe(0.15, mtp_num_layers=chance.choice((1, 2)), mtp_loss_scaling_factor=0.5, **ROPE)
    if latent:
        model |= {"multi_latent_attention": True, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
        model |= {"v_head_dim": chance.choice((6, 8))} | maybe(0.5, q_lora_rank=8)
    else:
        model |= maybe(0.4, num_query_groups=2)
    if experts:
        model |= {"num_experts": 4, "add_bias_linear": False, "moe_router_dtype": "fp64", "moe_ffn_hidden_size": 32}
        model |= {"moe_router_load_balancing_type": chance.choice(("aux_loss", "seq_aux_loss", "none"))}
        if model["moe_router_load_balancing_type"] != "none":
            model |= {"moe_aux_loss_coeff": 0.1}
        model |= maybe(0.5, moe_z_loss_coeff=0.01) | maybe(0.3, moe_shared_expert_intermediate_size=32)
        model |= maybe(0.3, moe_router_topk=1, moe_router_pre_softmax=True) | maybe(0.3, moe_layer_freq=2)
        model |= {"moe_router_topk": 4} if lane in ("bf16", "fp16") else {}
        model |= maybe(0.2, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
        model |= maybe(0.2, moe_token_dispatcher_type="allgather")
        if lane in ("fp64", "fp32"):  # in 16 bits rounding would change which tokens are dropped
            model |= _draw_capacity(chance, lane)
    return model


def _draw_more(chance: random.Random, cell: Cell) -> Iterator[Flags]:
    """Single changes of a cell. Some are not legal."""

    def maybe(probability: float) -> bool:
        return chance.random() < probability

    pp, schedule = cell.layout.get("pipeline_model_parallel_size", 1), cell.layout.get("schedule")
    if schedule == "interleaved" and maybe(0.3):
        yield {"layout": {"virtual_pipeline_model_parallel_size": 4}}
    if schedule == "interleaved" and maybe(0.3):
        yield {"layout": {"microbatch_group_size_per_vp_stage": chance.choice((2, 4))}}
    if pp > 1 and schedule not in IN_A_V and maybe(0.3):
        chunks = 2 if schedule == "interleaved" else 1
        yield {"layout": {"pipeline_model_parallel_layout": _draw_stages(chance, chunks, pp, cell.model)}}
    if maybe(0.4):
        # Four would pad the vocabulary to other rows than the reference's.
        blocks = {"reproducible_tensor_blocks": 2, "reproducible_context_blocks": chance.choice((1, 2, 4))}
        yield {"layout": {"reproducible": "layout"} | blocks}
    if maybe(0.25):
        yield {"model": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}
    if maybe(0.25):
        yield {"documents": True, "policies": {"reset_attention_mask": True}}
    if maybe(0.15):
        yield {"model": {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}}
    if maybe(0.5):
        yield {"model": chance.choice(MORE_MODELS)}
    if "moe_aux_loss_coeff" in cell.model and maybe(0.3):
        several = ["aux_loss", "seq_aux_loss"]
        yield {"model": {"moe_router_load_balancing_type": several, "moe_aux_loss_coeff": [0.1, 0.05]}}
    if "num_experts" in cell.model and maybe(0.3):
        yield {"model": {"moe_router_num_groups": 2, "moe_router_group_topk": 1}}


def _draw_layout(chance: random.Random, world_size: int, tp: int, lane: str, microbatches: int, model: Flags) -> Flags:
    """Draw keys of a layout. Some are not legal; then the cell is drawn again."""
    experts = "num_experts" in model
    pp = chance.choice([size for size in (1, 2, 2, 4) if size <= world_size])
    layout: Flags = {}
    if tp > 1:
        layout |= {"tensor_model_parallel_size": tp, "sequence_parallel": experts or chance.random() < 0.6}
    cp = chance.choice((1, 1, 2)) if world_size // (tp * pp) > 1 else 1
    layout |= {"context_parallel_size": cp} if cp > 1 else {}
    if cp == 1 and lane in ("fp64", "fp32") and chance.random() < 0.2:
        layout |= {"attention_backend": "fused"}
    if lane == "bf16" and chance.random() < 0.3:
        layout |= {"cross_entropy_loss_fusion": True}
    layout |= _draw_pipeline(chance, pp, model) if pp > 1 else {}
    per_rank = microbatches // max(world_size // (tp * cp * pp), 1)
    rounds = chance.choice((1, 1, 2, 4))
    layout |= {"grad_accum_steps": rounds, "pp_microbatches": max(per_rank // rounds, 1)}
    if rounds > 1 and chance.random() < 0.4:
        layout |= {"flush": "per_round"}
    layout |= _draw_recompute(chance, experts=experts)
    if "moe_shared_expert_intermediate_size" in model and chance.random() < 0.3:
        layout |= {"moe_shared_expert_overlap": True}
    if experts and world_size > pp and chance.random() < 0.6:
        spread = chance.choice([size for size in (1, 2, 2, 4) if size * pp <= world_size])
        layout |= {"expert_model_parallel_size": spread, "expert_tensor_parallel_size": chance.choice((1, 1, tp))}
        if lane == "bf16" and chance.random() < 0.3:
            layout |= {"overlap_moe_expert_parallel_comm": True}
    return layout | _draw_sharding(chance, lane, experts=experts)


def _draw_pipeline(chance: random.Random, pp: int, model: Flags) -> Flags:
    keys: Flags = {"pipeline_model_parallel_size": pp, "schedule": chance.choice(SCHEDULES)}
    if keys["schedule"] == "interleaved":
        keys |= {"virtual_pipeline_model_parallel_size": 2}
    elif keys["schedule"] in ("1f1b", "gpipe", "zb-h1") and chance.random() < 0.2:
        keys |= {"decoder_first_pipeline_num_layers": 1}
    elif keys["schedule"] in IN_A_V:
        if chance.random() < 0.3:
            keys |= {"pipeline_model_parallel_layout": _draw_stages(chance, 2, pp, model, in_a_v=True)}
        if chance.random() < 0.4:
            keys |= {"speculative_step": True}
    return keys


def _draw_stages(chance: random.Random, chunks: int, pp: int, model: Flags, *, in_a_v: bool = False) -> str:
    """Stages of unequal numbers of layers, in Megatron's notation."""
    layers, predicting = int(model["num_layers"]), int(model.get("mtp_num_layers", 0))
    stages = chunks * pp
    of_rank = [(rank, -1 - rank) if in_a_v else range(rank, stages, pp) for rank in range(pp)]
    # A rank trains something; where stages are in a row, the first and the last rank do without a layer, too.
    needy = of_rank if in_a_v else of_rank[1:-1]
    counts = [0] * stages
    while not any(counts) or any(sum(counts[stage] for stage in mine) == 0 for mine in needy):
        ends = [0, *sorted(chance.randint(0, layers) for _ in range(stages - 1)), layers]
        counts = [end - start for start, end in itertools.pairwise(ends)]
    texts = ["t" * count for count in counts]
    at = -2 if not in_a_v and not counts[-1] and chance.random() < 0.5 else -1
    texts[at] += "m" * predicting
    return "E" + "|".join(texts) + "L"


def _draw_sharding(chance: random.Random, lane: str, *, experts: bool) -> Flags:
    by_lane = {"fp64": ("ddp", "fsdp2"), "fp16": ("deepspeed", "fsdp2", "ddp")}
    backends = by_lane.get(lane, ("deepspeed", "deepspeed", "fsdp2", "megatron", "ddp"))
    keys: Flags = {"backend": chance.choice(backends)}
    if chance.random() < 0.2:
        keys |= chance.choice(({"deterministic": True}, {"reproducible": "layout"}))
    if keys["backend"] == "fsdp2":
        keys |= {"sync": chance.choice(("resident", "streaming"))}
        keys |= {"data_parallel_replicas": 2} if chance.random() < 0.3 else {}
    if keys["backend"] == "deepspeed":
        keys |= {"zero_stage": chance.choice((1, 2, 3, 3, 3)), "reduce_bucket_size": chance.choice((5000, 20000))}
        if keys["zero_stage"] == 3:
            keys |= {"sync": chance.choice(("resident", "streaming"))}
            if keys["sync"] == "streaming" and chance.random() < 0.4:
                keys |= {"max_live_parameters": 20000}
            elif experts:
                keys |= _draw_cold_experts(chance)
        keys |= {"offload_optimizer": "cpu"} if chance.random() < 0.15 else {}
    return keys


def _draw_capacity(chance: random.Random, lane: str) -> Flags:
    """Draw a limit of experts' tokens. In FP32 rounding would change which have the lowest probabilities."""
    if chance.random() < 0.7:
        return {}
    filled: Flags = {"moe_pad_expert_input_to_capacity": True} if chance.random() < 0.4 else {}
    policy = chance.choice(("probs", "position"))
    policy = policy if lane == "fp64" else "position"
    return {"moe_expert_capacity_factor": chance.choice((0.75, 1.25)), "moe_token_drop_policy": policy, **filled}


def _draw_cold_experts(chance: random.Random) -> Flags:
    cold: Flags = {"cold_expert_offload": True, "cold_expert_steps": 1, "cold_expert_tokens": 20}
    return cold if chance.random() < 0.3 else {}


def _draw_recompute(chance: random.Random, *, experts: bool) -> Flags:
    kind = chance.choice((None, None, None, "uniform", "block", "selective"))
    if kind is None:
        return {}
    if kind == "selective":
        modules = ["core_attn", "mlp", *(["moe"] if experts else [])]
        return {"recompute_granularity": "selective", "recompute_modules": chance.sample(modules, 2)}
    return {"recompute_granularity": "full", "recompute_method": kind, "recompute_num_layers": chance.choice((1, 2))}


# --- running ---------------------------------------------------------------------------------------------------------


def outcomes(cells: Sequence[Cell]) -> Iterator[tuple[Cell, list[str] | None]]:
    """(cell, what was wrong with it; None if the ranks refused it) of each, in an order of their own."""
    for size in sorted({cell.world_size for cell in cells}):
        mine = [cell for cell in cells if cell.world_size == size]
        for at in range(0, len(mine), PER_START):
            yield from _together(mine[at : at + PER_START])


def _together(cells: list[Cell]) -> Iterator[tuple[Cell, list[str] | None]]:
    """Check cells of one world size in one start of ranks; each alone if one ends the ranks."""
    try:
        problems = check(cells)
    except RanksFailed:
        problems = [_alone(cell) for cell in cells]
    yield from zip(cells, problems, strict=True)


def _alone(cell: Cell) -> list[str] | None:
    try:
        return check([cell])[0]
    except RanksFailed as error:
        kinds = [outcome.error for outcome in error.outcomes if outcome.error is not None]
        if kinds and all(kind.kind == "ConfigError" for kind in kinds) and len(kinds) == cell.world_size:
            print(f"refused {cell}\n  {kinds[0].text[:300]}", flush=True)
            return None
        lines = [line for line in str(error).splitlines() if line.strip()]
        return lines[:1] + [f"{kind.kind}: {kind.text}"[:300] for kind in kinds] + lines[-12:]


def check(cells: list[Cell]) -> list[list[str]]:
    """The problems of each of `cells`, all of one world size. Raises RanksFailed."""
    limit = SECONDS_PER_CELL * len(cells) + 60.0
    exact, near = zip(*run_ranks(fuzz_cell.references, 1, cells, timeout=limit)[0], strict=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        by_rank = run_ranks(fuzz_cell.train_each, cells[0].world_size, cells, folder, timeout=limit)
    return [
        problems(cell, list(ranks), true, like)
        for cell, ranks, true, like in zip(cells, zip(*by_rank, strict=True), exact, near, strict=True)
    ]


def problems(cell: Cell, ranks: list[Trained], exact: Trained, near: Trained) -> list[str]:
    """How `ranks` differ from `exact`, one process in float64, by more than `near`, one in the cell's precision."""
    found = []
    for rank, got in enumerate(ranks):
        for step, (mine, true, like) in enumerate(zip(got.steps, exact.steps, near.steps, strict=True), start=1):
            where = f"rank {rank}, step {step}"
            got_it, due = (mine.skipped, mine.num_tokens), (true.skipped, true.num_tokens)
            if got_it != due:
                found.append(f"{where}: (skipped, tokens) {got_it}, not {due}")
            for name in () if true.skipped else ("loss", "norm"):
                found += _scalar(f"{where}: {name}", cell.lane, *(getattr(each, name) for each in (mine, true, like)))
        for number, values in enumerate(zip(got.evaluations, exact.evaluations, near.evaluations, strict=True)):
            found += _scalar(f"rank {rank}: evaluation {number}", cell.lane, *values)
    return found + _weights(cell, ranks, exact, near)


def _scalar(name: str, lane: str, mine: float, true: float, like: float) -> list[str]:
    limit = FACTOR * abs(like - true) + SCALAR[lane] * abs(true)
    return [] if abs(mine - true) <= limit else [f"{name} {mine!r}, not {true!r}"]


def _weights(cell: Cell, ranks: list[Trained], exact: Trained, near: Trained) -> list[str]:
    """Each parameter's change over the steps, on every tp rank, and that none is missing."""
    pieces: dict[tuple[str, int], list[Piece]] = {}
    for got in ranks:
        for part in got.parts:
            pieces.setdefault((part.name, part.tp_rank), []).append(part)
    names = {part.name for part in exact.parts}
    found = [f"{name} is on no rank" for name in sorted(names - {name for name, _ in pieces})]
    trues, likes, starts = ({part.name: part for part in of} for of in (exact.parts, near.parts, exact.before))
    total = sum(float((trues[n].values - starts[n].values).square().sum()) for n in names) / len(names)
    for (name, tp_rank), parts in pieces.items():
        true, like, start = (cut(each[name].values, parts[0]) for each in (trues, likes, starts))
        size = max(float((true - start).norm()), 0.03 * total**0.5)
        limit = FACTOR * float((like - true).norm()) / size + CHANGE[cell.lane]
        error = float((_whole(parts, true) - true).norm()) / size
        if not error <= limit:
            found.append(f"{name} (tp rank {tp_rank}): its change is off by {error:.2e} > {limit:.1e}")
    return found


def _whole(parts: list[Piece], like: torch.Tensor) -> torch.Tensor:
    """Put `parts` together, in the size of `like`; nan where there is no part, and where two parts disagree."""
    flat = torch.full_like(like, float("nan"))
    for part in parts:
        here = flat[part.start : part.start + part.values.numel()]
        values = part.values.reshape(-1)
        agree = here.isnan() | ((here - values).abs() <= 1e-6 * values.abs() + 1e-9)
        here.copy_(torch.where(agree, values, torch.full_like(values, float("nan"))))
    return flat


# --- making smaller --------------------------------------------------------------------------------------------------


def minimised(cell: Cell, seconds: float = 300.0) -> tuple[Cell, list[str]]:
    """The smallest cell that still fails of those that leave out one thing after the other, and how it fails."""
    end = time.monotonic() + seconds
    why = _alone(cell)
    if not why:
        return cell, ["it does not fail alone: what a cell before it left matters"]
    kind, smaller = _kind(why), True
    while smaller and time.monotonic() < end:
        smaller = False
        for candidate in _smaller(cell):
            if time.monotonic() > end or not is_legal(candidate):
                continue
            problems = _alone(candidate)
            if problems and _kind(problems) == kind:
                cell, why, smaller = candidate, problems, True
                break
    return cell, why


def _kind(problems: list[str]) -> str:
    """The kind of a failure: the errors' classes, or other numbers."""
    classes = {line.split(":")[0] for line in problems if re.match(r"[A-Z]\w+(Error|Disagreement): ", line)}
    return " ".join(sorted(classes)) or ("ended" if "failed first" in problems[0] else "numbers")


def _smaller(cell: Cell) -> Iterator[Cell]:
    """`cell` with one thing less, the largest first."""
    change: Callable[..., Cell] = lambda **keys: dataclasses.replace(cell, **keys)  # noqa: E731
    for name, plain in (
        ("resume", None), ("bad", None), ("hollow", None), ("short", 0), ("frozen", ""), ("evaluate", False),
        ("calls", 1), ("told", True), ("masks", "full"), ("lane", "fp32"), ("microbatches", 8),
        ("lengths", False), ("dropped", False), ("gated", False), ("documents", False),
    ):  # fmt: skip
        if getattr(cell, name) != plain:
            yield change(**{name: plain})
    for size in (1, 2):
        if size < cell.world_size:
            yield change(world_size=size)
    for part in ("model", "layout", "resume", "policies"):
        keys = getattr(cell, part) or {}
        for key in keys:
            yield change(**{part: {name: value for name, value in keys.items() if name != key}})


if __name__ == "__main__":
    sys.exit(main())
