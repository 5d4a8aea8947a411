"""One cell of the fuzz: its configurations, its data, and its steps on ranks."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaaccum import config
from megaaccum.lab.verification.records import Piece
from megaaccum.pretrain.interop.load import load

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.step.result import StepResult

Flags = dict[str, Any]

SEQ, VOCAB, STEPS = 16, 61, 3
LOSS_SCALE = 1024.0
BASE: Flags = {
    "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, "attention_dropout": 0, "hidden_dropout": 0,
    "make_vocab_size_divisible_by": 32, "train_iters": 20, "init_method_std": 0.1, "micro_batch_size": 1,
    "clip_grad": 0, "weight_decay": 0.1, "data_path": "none", "lr": 1e-2, "lr_decay_style": "constant",
    # Far above the gradients, so that Adam's step is nearly linear in them: rounding of small ones stays small.
    "adam_eps": 1e-2,
}  # fmt: skip
LANE: dict[str, Flags] = {
    "fp64": {"params_dtype": "fp64"},
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "loss_scale": LOSS_SCALE},
}
FROZEN = {
    "start": r"embedding\.|decoder\.layers\.0\.",
    "layer": r"decoder\.layers\.1\.",
    "norms": r".*norm",
    "matrices": r"decoder\.layers\.\d+\..*linear_(fc1|qkv)\.weight",
}
"""Names (from their beginning) of what does not train."""
BAD_STEP, HOLLOW_STEP, SHORT_STEP, RESUME_AFTER, DROP_STEP = 1, 0, 2, 1, 1
"""Steps, from 0, in which things happen."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model, a layout, and what happens to it in three steps.

    microbatches: of a step over all ranks. layout: keys that the reference does not get. resume: the layout that goes
    on from a checkpoint. policies: keys of what happens to bad and short steps. hollow: of which data-parallel rank
    (modulo their number) all tokens are masked. bad: index of the micro-batch whose gradient is not a number. short:
    how many micro-batches the last data-parallel rank lacks. frozen: key of FROZEN. calls: of forward_backward in a
    step; of one, train_step is called. told: the calls are given N of the whole step. lengths: micro-batches have
    lengths of their own. dropped: a step is opened, and a load drops it. gated: the first and the last stage have a
    parameter each that about half of the micro-batches do not use. documents: rows hold several, each alone.
    """

    world_size: int
    lane: str = "fp32"
    microbatches: int = 8
    model: Flags = field(default_factory=dict)
    layout: Flags = field(default_factory=dict)
    resume: Flags | None = None
    policies: Flags = field(default_factory=dict)
    masks: str = "prefix"
    hollow: int | None = None
    bad: int | None = None
    short: int = 0
    frozen: str = ""
    evaluate: bool = False
    calls: int = 1
    told: bool = True
    lengths: bool = False
    dropped: bool = False
    gated: bool = False
    documents: bool = False

    def __str__(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    num_tokens: int
    skipped: bool
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Trained:
    """Three steps on a rank. parts, before: of the masters after and before them; whole parameters of one process."""

    steps: list[Step]
    evaluations: list[float]
    parts: list[Piece]
    before: list[Piece] = field(default_factory=list)


# --- configurations --------------------------------------------------------------------------------------------------


def plan_of(cell: Cell, layout: Flags) -> Plan:
    """The plan of a cell in a layout. Raises ConfigError if it is not legal."""
    keys = BASE | LANE[cell.lane] | cell.model | layout | cell.policies
    return config.resolve(load(None, _words(keys)), world_size=cell.world_size)


def reference_plan(cell: Cell, lane: str) -> Plan:
    """The plan of the model in one process, in the precision `lane`. Raises ConfigError if it is not legal."""
    keys = BASE | LANE[lane] | cell.model | {"pp_microbatches": cell.microbatches}
    return config.resolve(load(None, _words(keys | ({"backend": "ddp"} if lane == "fp64" else {}))), world_size=1)


def counts(cell: Cell) -> list[int]:
    """Micro-batches of each step over all ranks, and of the evaluation: fewer while the batch warms up."""
    if "batch_warmup_steps" not in cell.policies:
        return [cell.microbatches] * (STEPS + 1)
    ramp, sizes = plan_of(cell, cell.layout).ramp, list[int]()
    for _ in range(STEPS):
        sizes.append(ramp.size_at(sum(sizes)))
    return [size // int(cell.model.get("micro_batch_size", 1)) for size in sizes] + [cell.microbatches]


def has_bf16_sums(cell: Cell) -> bool:
    """Whether a layout of the cell adds gradients up in BF16."""
    return "bf16" in (*cell.layout.values(), *(cell.resume or {}).values())


def _words(flags: Flags) -> list[str]:
    words = []
    for name, value in flags.items():
        if value is None:  # leaves out the lane's
            continue
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(str(each).lower() if isinstance(each, bool) else str(each) for each in values)]
    return words


def ranks_of_a_model(layout: Flags) -> int:
    """Ranks among which one sequence is: tp * cp * pp."""
    keys = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    return math.prod(int(layout.get(key, 1)) for key in keys)


# --- data ------------------------------------------------------------------------------------------------------------


def microbatch(cell: Cell, step: int, index: int, *, hollow: bool) -> dict[str, torch.Tensor]:
    """Micro-batch `index` of `step`, counted over all ranks: number i of data-parallel rank r is index i * dp + r."""
    rows = int(cell.model.get("micro_batch_size", 1))
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=generator)
    mask = torch.ones(rows, SEQ)
    if cell.masks == "prefix":
        mask = (torch.arange(SEQ) < torch.randint(0, SEQ, (rows, 1), generator=generator)).float()
    elif cell.masks == "sparse":
        mask = (torch.rand(rows, SEQ, generator=generator) < 0.3).float()
    positions = torch.arange(SEQ).expand(rows, SEQ)
    made = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}
    length = 4 * int(torch.randint(1, SEQ // 4 + 1, (), generator=generator)) if cell.lengths else SEQ
    made |= {"loss_mask": mask * (not hollow)}
    if cell.documents:
        starts = torch.rand(rows, SEQ, generator=generator) < 0.2
        made |= {"document_starts": starts | (positions == 0)}
    return {name: each[:, :length].contiguous() for name, each in made.items()}


def indices(cell: Cell, step: int, dp: int) -> list[list[int]]:
    """The indices of the micro-batches that each data-parallel rank has in `step`."""
    by_rank = [list(range(rank, counts(cell)[step], dp)) for rank in range(dp)]
    if step == SHORT_STEP and cell.short:
        by_rank[-1] = by_rank[-1][: max(len(by_rank[-1]) - cell.short, 0)]
    return by_rank


def is_hollow(cell: Cell, step: int, index: int, dp: int) -> bool:
    return step == HOLLOW_STEP and cell.hollow is not None and index % dp == cell.hollow % dp


def is_bad(cell: Cell, step: int, index: int) -> bool:
    """Whether its gradient is made not to be a number; that of one without a token is left alone, as are stand-ins."""
    if step != BAD_STEP or index != cell.bad:
        return False
    return bool(microbatch(cell, step, index, hollow=False)["loss_mask"].any())


# --- on the ranks ----------------------------------------------------------------------------------------------------


def train_each(cells: list[Cell], folder: str) -> list[Trained]:
    """Train each cell with the package on this rank; folder: for checkpoints, empty."""
    return [_train(cell, Path(folder, str(number))) for number, cell in enumerate(cells)]


def _train(cell: Cell, folder: Path) -> Trained:
    from megaaccum.step import evaluation

    run = _Run(cell, cell.layout)
    steps, evaluations = [], []
    for step in range(STEPS):
        if step == RESUME_AFTER + 1 and cell.resume is not None:
            run.save(folder, step, num_updates=sum(not each.skipped for each in steps))
            before, run = run, _Run(cell, cell.resume)
            run.load(folder)
            run.go_on_after(before)
        if cell.dropped and step == DROP_STEP:
            run.save(folder / "again", step, num_updates=sum(not each.skipped for each in steps))
            batch = run.step.batch_of(run.microbatches(step))
            run.step.forward_backward(batch, step=step + 1, last=False)
            run.step.abandon()
            run.load(folder / "again")
        result = run.take(step)
        steps.append(Step(result.loss, result.grad_norm, result.num_tokens, result.skipped, result.loss_scale))
        if cell.evaluate:
            evaluations.append(evaluation.evaluate(run.step, run.microbatches(STEPS))[0])
    return Trained(steps, evaluations, run.parts())


class _Run:
    """A model of the package under one layout."""

    def __init__(self, cell: Cell, layout: Flags):
        from megaaccum import sharding
        from megaaccum.distributed import groups
        from megaaccum.model import names
        from megaaccum.optim import adamw, lr_schedule
        from megaaccum.pretrain.model import gpt
        from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
        from megaaccum.step.loss import ReportReducer
        from megaaccum.step.speculation import SpeculativeTrainStep
        from megaaccum.step.train_step import TrainStep
        from megaaccum.step.transaction import Transaction

        self.cell, self.plan = cell, plan_of(cell, layout)
        groups.destroy()
        self.groups = groups.build(self.plan.layout, timeout_minutes=1)
        self.chunks = gpt.build_chunks(self.plan, self.groups, vocab_size=VOCAB)
        for chunk in self.chunks:
            chunk.config.variable_seq_lengths = cell.lengths  # as `initialize` sets it
        for chunk in self.chunks if cell.gated else ():
            add_gates(chunk)
        freeze(cell, names.named_parameters(self.chunks))
        self.backend = sharding.build(self.plan, self.groups, self.chunks, adamw.build(self.plan, self.chunks))
        forward_step = _WithNan(GptForwardStep(self.groups, self.plan.batch.loss_norm))
        reports = ReportReducer(REPORTS)
        kind = SpeculativeTrainStep if self.plan.config.step.speculative_step else TrainStep
        self.step = kind(self.plan, self.groups, self.chunks, self.backend, forward_step, reports=reports)
        self.schedule = lr_schedule.build(self.backend, self.plan.config, self.plan.ramp)
        self.step.transaction = Transaction(self.plan, self.schedule)
        self._upcoming: list[dict[str, torch.Tensor]] | None = None
        self.buffers = dict(names.named_buffers(self.chunks))

    def go_on_after(self, other: _Run) -> None:
        """Take over what a checkpoint has beside tensors."""
        self.schedule.load_state_dict(other.schedule.state_dict())
        had = other.step.transaction
        self.step.transaction.load_state_dict(had.state_dict(), step=had.step, consumed_samples=had.consumed_samples)
        self.step.recovery.load_state_dict(other.step.recovery.state_dict())

    def take(self, step: int) -> StepResult:
        """One optimizer step. With several calls, an evaluation comes between the first two."""
        from megaaccum.step import evaluation

        cell = self.cell
        mine, self._upcoming = self._upcoming or self.microbatches(step), None
        if cell.calls == 1:
            if self.plan.config.step.speculative_step and step + 1 < STEPS:
                self._upcoming = self.microbatches(step + 1)
            return self.step.train(mine, step=step + 1, upcoming=self._upcoming)
        size = len(mine) // cell.calls
        total = self._total_weight(step) if cell.told else None
        for start in range(0, len(mine), size):
            batch = self.step.batch_of(mine[start : start + size])
            self.step.forward_backward(batch, step=step + 1, last=start + size == len(mine), total=total)
            if cell.evaluate and start == 0:
                evaluation.forward(self.step, self.step.batch_of(self.microbatches(STEPS)))
        return self.step.optim_step()

    def _total_weight(self, step: int) -> float:
        """N over all ranks."""
        dp = self.groups.dp.size()
        masks = [
            microbatch(self.cell, step, index, hollow=is_hollow(self.cell, step, index, dp))["loss_mask"]
            for index in range(self.cell.microbatches)
        ]
        return float(sum(mask.sum() for mask in masks)) if self.plan.batch.loss_norm == "token" else float(len(masks))

    def microbatches(self, step: int) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches."""
        dp, rank = self.groups.dp.size(), self.groups.dp.rank()
        found = []
        for index in indices(self.cell, step, dp)[rank]:
            made = microbatch(self.cell, step, index, hollow=is_hollow(self.cell, step, index, dp))
            found.append(made | ({"bad": torch.ones(())} if is_bad(self.cell, step, index) else {}))
        return found

    def save(self, folder: Path, step: int, *, num_updates: int) -> None:
        from megaaccum.checkpoint import save_load
        from megaaccum.checkpoint.folders import Progress

        progress = Progress(
            step=step, consumed_samples=0, lr_schedule={}, data={}, shape={}, transaction={"num_updates": num_updates}
        )
        save_load.save(folder, self.backend, self.groups, progress, keep_last=1, buffers=self.buffers)

    def load(self, folder: Path) -> None:
        from megaaccum.checkpoint import save_load

        current = save_load.latest(folder)
        assert current is not None
        save_load.load(current, self.backend, self.groups, shape={}, buffers=self.buffers)

    def parts(self) -> list[Piece]:
        from megaaccum.lab.verification.observe import piece_of

        return [
            piece_of(self.chunks[0], self.groups, each.name, each.param, each.tensors["param"], each.start)
            for each in self.backend.state()
            if "param" in each.tensors  # momenta at owners are pieces of their own
        ]


class _WithNan:
    """A forward step function. The gradient of its last stage is not a number for micro-batches with `bad`."""

    def __init__(self, inner):
        self._inner = inner
        self.weights, self.token_weights, self.routed_tokens = inner.weights, inner.token_weights, inner.routed_tokens

    def __call__(self, data_iterator: Iterator, chunk: Any, **plan: Any):
        made = dict(next(data_iterator))
        bad = made.pop("bad", None)
        chunk.is_open = is_open(made)
        output, loss_func = self._inner(iter([made]), chunk, **plan)
        if bad is not None and made["loss_mask"].any() and chunk.post_process and output.requires_grad:
            output.register_hook(lambda grad: grad * float("nan"))
        return output, loss_func


def is_open(made: dict[str, torch.Tensor]) -> bool:
    """Whether a micro-batch uses the parameters of `add_gates`."""
    return int(made["tokens"][0, 0]) % 2 == 0


def add_gates(chunk: Any) -> None:
    """Let the embedding and the final norm, if a chunk has them, scale their output by a vector while `is_open`. They
    are not recomputed."""
    for module in (getattr(chunk, "embedding", None), getattr(chunk.decoder, "final_layernorm", None)):
        if module is not None:
            gate: Any = torch.nn.Parameter(torch.zeros(chunk.config.hidden_size, dtype=chunk.config.params_dtype))
            gate.sequence_parallel = chunk.config.sequence_parallel
            module.register_parameter("gate", gate)
            module.register_forward_hook(
                lambda module, _args, output: output * (1 + module.gate) if chunk.is_open else output
            )


def freeze(cell: Cell, named: Iterator[tuple[str, torch.nn.Parameter]]) -> None:
    for name, param in named:
        if cell.frozen and re.match(FROZEN[cell.frozen], name):
            param.requires_grad_(False)
