"""Three models under many layouts, ten optimizer steps each: one loss, one norm and one model to the bit, or not.

    python -m benchmarks layouts [--model gpt,mtp,own] [--precision fp32,bf16] [--mode layout|none] [--steps N]
        [--only WORDS] [--json F]

gpt: LayerNorm, a tied embedding. mtp: RMSNorm, an untied one, two prediction layers. own: benchmarks/own_model. Real
text, dropout 0.1, AdamW, gradients clipped in every step. Each row is a run of `megaaccum train`'s parts on ranks of
this machine: its last loss and norm, and a digest of all weights and moments. Rows of one model and precision with
equal numbers of micro-batches per step are compared with the first of them; without `reproducible: layout` (--mode
none) they differ. Returns 1 where a row of --mode layout differs. CPU lane.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import own_model
from benchmarks.schedules import conditions
from megaaccum.lab.verification.testing import run_ranks

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
}
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
    parser.add_argument("--only", default="", help="rows whose flags hold these words, and the first of each number")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for model, precision in itertools.product(args.model, args.precision):
            for row in measured(model, precision, args.mode, args.steps, args.only, folder):
                print(line(row, first_of(row, rows)), flush=True)
                rows.append(row)
    alike = sum(same(row, first_of(row, rows)) for row in rows)
    print(f"{alike} of {len(rows)} rows have the bits of the first with as many micro-batches, its model and precision")
    if args.json:
        figures = {"conditions": conditions(), "model": MODEL, "mode": args.mode, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(args.mode == "layout" and alike < len(rows))


def measured(model: str, precision: str, mode: str, steps: int, only: str, folder: str) -> Iterator[Row]:
    """The rows of one model and precision, run one after the other."""
    for count, ranks, layout in ROWS:
        if only and ranks > 1 and only not in layout:
            continue
        flags = f"{MODEL} {MODELS[model]} {layout} --global_batch_size {count} --reproducible {mode}"
        flags += f" --output_dir {folder}"
        flags += " --bf16" if precision == "bf16" else ""
        loss, norm, state = run_ranks(train, ranks, flags, steps, model == "own", timeout=60 + 30 * steps)[0]
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


def train(flags: str, steps: int, own: bool = False) -> tuple[float, float, str]:
    """(last loss, last norm, digest of weights and moments) of a run, of own_model if asked; the same on every rank."""
    import torch

    from megaaccum.config import Plan
    from megaaccum.config.plan import resolve
    from megaaccum.distributed import groups as process_groups
    from megaaccum.engine import initialize
    from megaaccum.model import gpt
    from megaaccum.model.gpt_forward import REPORTS, GptForwardStep
    from megaaccum.pretrain.data.dataset import build_datasets
    from megaaccum.pretrain.interop.load import load
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
    # Its stages read more than Megatron's: each takes another way by the parity of a micro-batch's tokens.
    reads = patch.object(evaluation, "read_by", lambda chunks: ("tokens", "labels", "loss_mask"))
    with reads if own else nullcontext(), closing(loader_of(engine, data.train, data, consumed_samples=0)) as loader:
        for _ in range(steps):
            microbatches, problem = loader.try_next_step(plan.batch.num_microbatches)
            result = engine.train_step(microbatches, problem=problem)
            loader.commit(plan.batch.global_batch_size)
    return result.loss, result.grad_norm, digest(state_of(engine.backend))


def state_of(backend: Any) -> dict[str, Any]:
    """{parameter/kind: flat tensor} of the whole model's weights and moments, on every rank."""
    pieces: dict[str, list] = {}
    for piece in backend.state():
        for kind, tensor in piece.tensors.items():
            pieces.setdefault(f"{piece.name}/{kind}", []).append((piece.start, tensor.detach().clone()))
    return gathered(pieces)


def gathered(mine: dict[str, list]) -> dict[str, Any]:
    """{name: flat tensor} of all ranks' pieces [(start, values)]. Raises AssertionError where two ranks hold different
    values of an element."""
    import torch

    everyone: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for name in sorted({name for pieces in everyone for name in pieces}):
        found = [each for pieces in everyone for each in pieces.get(name, ()) if each[1].numel()]
        size = max(start + values.numel() for start, values in found)
        flat = torch.full((size,), float("nan"), dtype=found[0][1].dtype)
        for start, values in found:
            part = flat[start : start + values.numel()]
            assert part.isnan().logical_or_(part == values).all(), f"{name} differs between ranks"
            part.copy_(values)
        whole[name] = flat
    return whole


def digest(tensors: dict[str, Any]) -> str:
    """16 hexadecimal digits of names and bits; a zero counts without its sign."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hashed.update(name.encode() + (tensor + 0.0).view(-1).numpy().tobytes())
    return hashed.hexdigest()[:16]
