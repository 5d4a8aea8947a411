"""Six models under many layouts, ten optimizer steps each: one loss, one norm and one model to the bit, or not.

    python -m benchmarks layouts [--model gpt,mtp,own,experts,cut,all] [--precision fp32,bf16] [--mode layout|none]
        [--steps N] [--only WORDS] [--resumed] [--json F]

gpt: LayerNorm, a tied embedding. mtp: RMSNorm, an untied one, two prediction layers. own: benchmarks/own_model.
experts: four in every layer, with side losses, over ep 1, 2 and 4. cut: gpt by two blocks of columns and two of each
sequence, over tp and cp 1 and 2. all: experts by such blocks, over ep, tp and cp at once. Real text, dropout 0.1,
AdamW, gradients clipped in every step. With --resumed, every row but the first of its number begins in the middle, with
the first one's checkpoint. Each row is a run of `megaaccum train`'s parts on ranks of this machine: its last loss and
norm, and a digest of all weights and moments. Rows of one model and precision with equal numbers of micro-batches per
step are compared with the first of them; without `reproducible: layout` (--mode none) they differ. Returns 1 where a
row of --mode layout differs. CPU lane.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import own_model
from benchmarks.schedules import conditions
from megaaccum.lab.verification.testing import run_ranks, tensors

MODEL = (
    "--num_layers 8 --hidden_size 64 --num_attention_heads 4 --seq_length 64 --micro_batch_size 1 --data_path embedded"
    " --attention_dropout 0.1 --hidden_dropout 0.1 --clip_grad 0.5 --lr 3e-3 --lr_warmup_iters 2 --train_iters 20"
    " --num_workers 0 --eval_interval 0 --save_at_end false"
)
MODELS = {
    "gpt": "",
    "mtp": (
        "--normalization RMSNorm --untie_embeddings_and_output_weights true --position_embedding_type rope"
        " --mtp_num_layers 2"
    ),
    "own": "",
    "experts": (
        "--num_experts 4 --moe_router_topk 2 --moe_aux_loss_coeff 0.01 --moe_z_loss_coeff 0.001"
        " --disable_bias_linear --moe_ffn_hidden_size 64"
    ),
    "cut": "--reproducible_tensor_blocks 2 --reproducible_context_blocks 2",
}
MODELS["all"] = f"{MODELS['experts']} {MODELS['cut']} --loss_norm token"
PP2, PP4 = "--pipeline_model_parallel_size 2", "--pipeline_model_parallel_size 4"
STREAM, FSDP2 = "--sync streaming", "--backend fsdp2"
ROWS = (
    (16, 1, "--pp_microbatches 16"),
    (16, 1, "--pp_microbatches 4 --grad_accum_steps 4 --zero_stage 2"),
    (16, 2, "--pp_microbatches 8"),
    (16, 2, f"--pp_microbatches 8 {STREAM}"),
    (16, 2, "--pp_microbatches 2 --grad_accum_steps 4 --zero_stage 1"),
    (16, 2, f"--pp_microbatches 8 {FSDP2} {STREAM}"),
    (16, 2, "--pp_microbatches 8 --backend megatron"),
    (16, 2, f"{PP2} --pp_microbatches 16"),
    (16, 2, f"{PP2} --pp_microbatches 4 --grad_accum_steps 4 --flush per_round"),
    (16, 2, f"{PP2} --virtual_pipeline_model_parallel_size 2 --pp_microbatches 16 --backend ddp"),
    (16, 2, f"{PP2} --schedule zbv --pp_microbatches 16 --recompute_granularity full"),
    (16, 4, "--pp_microbatches 4"),
    (16, 4, "--pp_microbatches 4 --zero_stage 1"),
    (16, 4, f"--pp_microbatches 4 {FSDP2}"),
    (16, 4, "--pp_microbatches 4 --backend megatron"),
    (16, 4, f"--pp_microbatches 2 --grad_accum_steps 2 {STREAM}"),
    (16, 4, f"{PP2} --pp_microbatches 8 --zero_stage 2"),
    (16, 4, f"{PP2} --schedule dualpipev --pp_microbatches 8 {STREAM}"),
    (16, 4, f"{PP2} --schedule zb-h1 --pp_microbatches 8 {FSDP2}"),
    (16, 4, f"{PP2} --schedule v-min --pp_microbatches 8 --backend megatron"),
    (16, 4, f"{PP2} --schedule v-half --pp_microbatches 8 {FSDP2} {STREAM}"),
    (16, 4, f"{PP2} --schedule gpipe --pp_microbatches 8 {STREAM} --recompute_granularity full"),
    (16, 4, f"{PP4} --pp_microbatches 8 --grad_accum_steps 2"),
    (16, 4, f"{PP4} --schedule zb-h1 --pp_microbatches 16 --zero_stage 1"),
    (16, 8, f"{PP2} --pp_microbatches 4 --zero_stage 1"),
    (16, 8, f"{PP4} --virtual_pipeline_model_parallel_size 2 --pp_microbatches 8 {STREAM}"),
    (16, 8, f"{PP4} --schedule dualpipev --pp_microbatches 8"),
    (12, 1, "--pp_microbatches 12"),
    (12, 2, "--pp_microbatches 3 --grad_accum_steps 2 --backend megatron"),
    (12, 4, "--pp_microbatches 3"),
    (12, 4, f"{PP2} --pp_microbatches 6 {STREAM}"),
    (12, 3, "--pp_microbatches 4"),
    (12, 3, f"--pp_microbatches 4 {STREAM}"),
    (12, 3, "--pp_microbatches 2 --grad_accum_steps 2 --zero_stage 1"),
    (12, 3, f"--pp_microbatches 4 {FSDP2}"),
    (12, 3, f"--pp_microbatches 4 {FSDP2} {STREAM}"),
    (12, 3, "--pp_microbatches 4 --backend megatron"),
    (12, 3, "--pp_microbatches 4 --backend ddp"),
    (12, 6, f"{PP2} --pp_microbatches 4"),
    (12, 6, f"{PP2} --schedule zbv --pp_microbatches 4 --zero_stage 2"),
    (20, 1, "--pp_microbatches 20"),
    (20, 2, f"{PP2} --pp_microbatches 10 --grad_accum_steps 2 --zero_stage 2"),
    (20, 4, f"--pp_microbatches 5 {FSDP2} {STREAM}"),
    (20, 5, "--pp_microbatches 4"),
    (20, 4, f"{PP2} --schedule zbv --pp_microbatches 10"),
)
"""(micro-batches of the global batch, ranks, flags)."""
EP2, EP4 = "--expert_model_parallel_size 2", "--expert_model_parallel_size 4"
EXPERT_ROWS = (
    (16, 1, "--pp_microbatches 16"),
    (16, 2, "--pp_microbatches 8"),
    (16, 2, f"--pp_microbatches 8 {EP2}"),
    (16, 2, f"--pp_microbatches 2 --grad_accum_steps 4 {EP2} --zero_stage 1"),
    (16, 4, "--pp_microbatches 4"),
    (16, 4, f"--pp_microbatches 4 {EP2}"),
    (16, 4, f"--pp_microbatches 4 {EP4}"),
    (16, 4, f"--pp_microbatches 4 {EP4} --zero_stage 2"),
    (16, 4, f"{PP2} --pp_microbatches 8 {EP2} --recompute_granularity full"),
    (16, 4, f"{PP2} --schedule zbv --pp_microbatches 8 {EP2} --zero_stage 2"),
    (16, 4, f"{PP2} --schedule dualpipev --pp_microbatches 8 {EP2}"),
    (16, 4, f"{PP4} --schedule zb-h1 --pp_microbatches 16"),
    (12, 1, "--pp_microbatches 12"),
    (12, 4, f"--pp_microbatches 3 {EP4}"),
    (12, 6, f"{PP2} --pp_microbatches 4"),
    (12, 6, f"--pp_microbatches 2 {EP2}"),
)
TP2, CP2 = "--tensor_model_parallel_size 2", "--context_parallel_size 2"
CUT_ROWS = (
    (16, 1, "--pp_microbatches 16"),
    (16, 2, "--pp_microbatches 8"),
    (16, 2, f"--pp_microbatches 16 {TP2}"),
    (16, 2, f"--pp_microbatches 4 --grad_accum_steps 4 {TP2} --zero_stage 1"),
    (16, 2, f"--pp_microbatches 16 {CP2}"),
    (16, 4, f"--pp_microbatches 16 {TP2} {CP2}"),
    (16, 4, f"--pp_microbatches 8 {TP2} --zero_stage 2"),
    (16, 4, f"--pp_microbatches 8 {CP2}"),
    (16, 4, f"--pp_microbatches 8 {CP2} --zero_stage 1"),
    (16, 4, f"{PP2} --pp_microbatches 16 {TP2} --recompute_granularity full"),
    (16, 4, f"{PP2} --schedule zbv --pp_microbatches 16 {TP2}"),
    (16, 4, f"{PP2} --schedule dualpipev --pp_microbatches 16 {CP2}"),
    (16, 4, f"{PP2} --schedule zb-h1 --pp_microbatches 16 {CP2} --recompute_granularity full"),
    (16, 8, f"{PP2} --pp_microbatches 16 {TP2} {CP2}"),
    (12, 1, "--pp_microbatches 12"),
    (12, 6, f"--pp_microbatches 4 {TP2}"),
    (12, 6, f"--pp_microbatches 4 {CP2}"),
)
ALL_ROWS = (
    (16, 1, "--pp_microbatches 16"),
    (16, 1, "--pp_microbatches 4 --grad_accum_steps 4 --recompute_granularity full"),
    (16, 2, f"--pp_microbatches 8 {EP2}"),
    (16, 2, f"--pp_microbatches 16 {TP2}"),
    (16, 2, f"--pp_microbatches 16 {CP2}"),
    (16, 2, f"--pp_microbatches 16 {CP2} {EP2} --zero_stage 1"),
    (16, 2, f"{PP2} --schedule zbv --pp_microbatches 16"),
    (16, 4, "--pp_microbatches 4 --zero_stage 2"),
    (16, 4, f"--pp_microbatches 4 {EP4}"),
    (16, 4, f"--pp_microbatches 8 {EP2} {TP2}"),
    (16, 4, f"--pp_microbatches 4 --grad_accum_steps 2 {EP2} {TP2} --zero_stage 2"),
    (16, 4, f"--pp_microbatches 8 {EP2} {CP2}"),
    (16, 4, f"--pp_microbatches 8 {EP4} {CP2} --zero_stage 1"),
    (16, 4, f"--pp_microbatches 16 {TP2} {CP2}"),
    (16, 4, f"--pp_microbatches 16 {EP2} {TP2} {CP2}"),
    (16, 4, f"{PP2} --pp_microbatches 8 {EP2} --recompute_granularity full"),
    (16, 4, f"{PP2} --schedule dualpipev --pp_microbatches 16 {TP2}"),
    (16, 4, f"{PP2} --schedule zbv --pp_microbatches 16 {EP2} {CP2} --zero_stage 1"),
    (16, 4, f"{PP2} --schedule zb-h1 --pp_microbatches 16 {CP2} --zero_stage 2"),
    (16, 4, f"{PP4} --schedule dualpipev --pp_microbatches 16"),
    (16, 8, f"{PP2} --pp_microbatches 16 {EP2} {TP2} {CP2}"),
    (16, 8, f"--pp_microbatches 8 {EP4} {TP2} {CP2}"),
    (12, 1, "--pp_microbatches 12"),
    (12, 6, f"--pp_microbatches 4 {EP2} {CP2}"),
    (12, 6, f"--pp_microbatches 4 {TP2} --zero_stage 1"),
)
ROWS_OF = {"experts": EXPERT_ROWS, "cut": CUT_ROWS, "all": ALL_ROWS}


@dataclass(frozen=True)
class Row:
    """The result of a run. state: a digest of weights and moments."""

    model: str
    precision: str
    num_microbatches: int
    ranks: int
    layout: str
    loss: float
    norm: float
    state: str


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks layouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--mode", choices=("layout", "none"), default="layout", help="the key `reproducible` (layout)")
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each run")
    parser.add_argument("--resumed", action="store_true", help="begin with the first row's checkpoint of the middle")
    parser.add_argument("--only", default="", help="rows whose flags hold these words, and the first of each number")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for model, precision in itertools.product(args.model, args.precision):
            for row in measured(model, precision, args, folder):
                print(line(row, first_of(row, rows)), flush=True)
                rows.append(row)
    alike = sum(same(row, first_of(row, rows)) for row in rows)
    print(f"{alike} of {len(rows)} rows have the bits of the first with as many micro-batches, its model and precision")
    if args.json:
        figures = {"conditions": conditions(), "model": MODEL, "mode": args.mode, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(args.mode == "layout" and alike < len(rows))


def measured(model: str, precision: str, args: argparse.Namespace, folder: str) -> Iterator[Row]:
    """The rows of one model and precision, run one after the other."""
    for count, ranks, layout in ROWS_OF.get(model, ROWS):
        if args.only and ranks > 1 and args.only not in layout:
            continue
        flags = f"{MODEL} {MODELS[model]} {layout} --global_batch_size {count} --reproducible {args.mode}"
        flags = flags if args.mode == "layout" else flags.replace(MODELS["cut"], "")
        flags += f" --output_dir {folder}"
        flags += " --bf16" if precision == "bf16" else ""
        middle = f"{folder}/{model}-{precision}-{count}" if args.resumed else None
        asked = flags, args.steps, model == "own", middle
        loss, norm, state = run_ranks(train, ranks, *asked, timeout=60 + 30 * args.steps)[0]
        yield Row(model, precision, count, ranks, layout.replace("--", ""), loss, norm, state)


def first_of(row: Row, rows: Iterable[Row]) -> Row:
    """The row that `row` is compared with."""
    at = (row.model, row.precision, row.num_microbatches)
    return next((each for each in rows if (each.model, each.precision, each.num_microbatches) == at), row)


def same(row: Row, first: Row) -> bool:
    return (row.loss, row.norm, row.state) == (first.loss, first.norm, first.state)


def line(row: Row, first: Row) -> str:
    mark = "" if same(row, first) else "   differs"
    return (
        f"{row.model} {row.precision} {row.num_microbatches:>3} micro-batches, {row.ranks} ranks"
        f"  {row.loss:.15f}  {row.norm:.15f}  {row.state}  {row.layout}{mark}"
    )


# --- on the ranks ----------------------------------------------------------------------------------------------------


def train(flags: str, steps: int, own: bool = False, middle: str | None = None) -> tuple[float, float, str]:
    """(last loss, last norm, digest of weights and moments) of a run, of own_model if asked, on rank 0.
    middle: a folder that gets the checkpoint of the middle, or has one to begin with."""
    import torch

    from megaaccum.config import Plan
    from megaaccum.config.plan import resolve
    from megaaccum.distributed import groups as process_groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.data.dataset import build_datasets
    from megaaccum.pretrain.interop.load import load
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
    from megaaccum.pretrain.training import evaluation
    from megaaccum.pretrain.training.evaluation import loader_of

    plan: Plan = resolve(load(None, flags.split()), world_size=torch.distributed.get_world_size())
    groups = process_groups.build(plan.layout, timeout_minutes=5)
    data = build_datasets(plan)
    if own:
        chunks: list[Any] = own_model.build_stages(plan, data.vocabulary.size)
        engine = initialize(plan, chunks, groups=groups, forward_step_func=own_model.forward_step)
    else:
        chunks = gpt.build_chunks(plan, groups, vocab_size=data.vocabulary.size)
        forward_step = GptForwardStep(groups, plan.batch.loss_norm)
        engine = initialize(plan, chunks, groups=groups, forward_step_func=forward_step, reports=REPORTS)
    saves = middle is not None and not engine.load(middle)
    start, after = engine.consumed_samples // plan.batch.global_batch_size, engine.consumed_samples
    # Its stages read more than Megatron's: each takes another way by the parity of a micro-batch's tokens.
    reads = patch.object(evaluation, "read_by", lambda chunks: ("tokens", "labels", "loss_mask"))
    with (
        reads if own else nullcontext(),
        closing(loader_of(engine, data.train, data, consumed_samples=after)) as loader,
    ):
        for step in range(start, steps):
            if middle is not None and saves and step == steps // 2:
                engine.save(middle)
            microbatches, problem = loader.try_next_step(plan.batch.num_microbatches)
            result = engine.train_step(microbatches, problem=problem)
            loader.commit(plan.batch.global_batch_size)
    return result.loss, result.grad_norm, digest(state_of(engine.backend))


def state_of(backend: Any) -> dict[str, Any]:
    """{parameter/kind: flat tensor} of the whole model's weights and moments, on rank 0; empty on the others."""
    pieces: dict[str, list] = {}
    for piece in backend.state():
        for kind, tensor in piece.tensors.items():
            pieces.setdefault(f"{piece.name}/{kind}", []).append((piece.start, tensor.detach().clone()))
    return gathered(pieces, cuts_of(backend))


Cuts = dict[str, tuple[int, int, tuple[int, ...]]]
"""{parameter: (dimension that tp cuts, matrices one after the other in it, shape of a tp rank's part)}."""


def cuts_of(backend: Any) -> Cuts:
    """How tp cuts the parameters of this rank."""
    from megaaccum.model import names

    found: Cuts = {}
    for piece in backend.state():
        param: Any = piece.param
        if names.is_sharded_over_tp(param):
            stride = 2 if getattr(param, "partition_stride", 1) == 2 else 1
            found[piece.name] = param.partition_dim, stride, tuple(getattr(param, "ds_shape", param.shape))
    return found


def gathered(mine: dict[str, list], cuts: Cuts) -> dict[str, Any]:
    """{name: flat tensor of the whole parameter} of all ranks' pieces [(start, values)] of parameters, or of
    parameter/kind, on rank 0; empty on the others. Raises AssertionError where two ranks hold different values of an
    element."""
    import torch
    from megatron.core import parallel_state

    is_first = torch.distributed.get_rank() == 0
    sent: list = [None] * torch.distributed.get_world_size() if is_first else []
    # As bytes: torch unpickles each tensor on its own, a quarter of the time of a small layout.
    content = tensors.dumps((mine, cuts, parallel_state.get_tensor_model_parallel_rank()))
    torch.distributed.gather_object(content, sent if is_first else None)
    everyone = list(map(pickle.loads, sent))
    whole: dict[str, torch.Tensor] = {}
    for name in sorted({name for pieces, *_ in everyone for name in pieces}):
        cut = next((cuts[at] for _, cuts, _ in everyone for at in (name, name.rsplit("/", 1)[0]) if at in cuts), None)
        by_rank: dict[int, list] = {}
        for pieces, _, tp_rank in everyone:
            by_rank.setdefault(0 if cut is None else tp_rank, []).extend(pieces.get(name, ()))
        parts = [joined(name, by_rank[rank]) for rank in sorted(by_rank)]
        if cut is not None and len(parts) > 1:
            dim, stride, shape = cut
            blocks = zip(*(part.view(shape).chunk(stride, dim) for part in parts), strict=True)
            parts = [torch.cat([each for block in blocks for each in block], dim).view(-1)]
        whole[name] = parts[0]
    return whole


def joined(name: str, pieces: list) -> Any:
    """One flat tensor of pieces [(start, values)], which may overlap where they are equal."""
    import torch

    found = [each for each in pieces if each[1].numel()]
    size = max(start + values.numel() for start, values in found)
    flat = torch.full((size,), float("nan"), dtype=found[0][1].dtype)
    for start, values in found:
        part = flat[start : start + values.numel()]
        assert part.isnan().logical_or_(part == values).all(), f"{name} differs between ranks"
        part.copy_(values)
    return flat


def digest(whole: dict[str, Any]) -> str:
    """16 hexadecimal digits of names and bits; a zero counts without its sign."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(whole.items()):
        hashed.update(name.encode() + (tensor + 0.0).view(-1).numpy().tobytes())
    return hashed.hexdigest()[:16]
