"""Functions that parity tests run on ranks: the gradient of a layout, and the reference's on the full batch.

Every function here runs inside ranks and returns plain data; `distance.py` compares it. All sizes are tiny.

`Case` is a layout in command-line words, of which a test has dozens; the reference's loop is that of
`megaaccum verify` (lab/verification/reference).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from unittest.mock import patch

import torch

from megaaccum.config import precision
from megaaccum.config.keys import ALIASES
from megaaccum.platform import cpu
from megaaccum.pretrain.interop.load import load

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend
    from megaaccum.step.result import StepResult
    from megaaccum.step.train_step import TrainStep

SEQ, VOCAB = 16, 61
MODEL = (
    "--num_layers 8 --hidden_size 32 --num_attention_heads 4 --seq_length 16 --attention_dropout 0 --hidden_dropout 0 "
    "--make_vocab_size_divisible_by 16 --train_iters 20 --lr 1e-3 --init_method_std 0.1 --clip_grad 0 "
    "--micro_batch_size 1 --loss_norm token --data_path none"
)
LOSS_SCALE = 65536.0
"""Loss scale of the FP16 lane, in the reference process and in megaaccum's default."""
MASKED_OUT = 5
"""The sequence whose tokens are all masked."""
SYNC_MODES = {
    "ZeRO-3 resident": "",
    "ZeRO-3 streaming": "--sync streaming ",
    "FSDP2 resident": "--backend fsdp2 ",
    "FSDP2 streaming": "--backend fsdp2 --sync streaming ",
    "Megatron": "--backend megatron ",
    "DDP": "--backend ddp ",
}
REPLICAS = {
    "HSDP resident": "--backend fsdp2 --data_parallel_replicas 2 ",
    "HSDP streaming": "--backend fsdp2 --data_parallel_replicas 2 --sync streaming ",
}
"""2 x 2 data-parallel ranks."""


def merged(*texts: str) -> list[str]:
    """Command-line flags; of one that is given twice, the last."""
    flags = {flag.split()[0]: flag.split()[1:] for flag in " ".join(texts).split("--") if flag.strip()}
    return [word for name, values in flags.items() for word in ("--" + name, *values)]


def lane_flags(lane: str, *flags: str) -> str:
    """The precision of a lane, beside other flags, which may give one."""
    if lane == "fp32" and any(f"--{key}" in each for each in flags for key in precision.KEYS):
        return ""
    return f"--params_dtype {lane}" + " --backend ddp" * (lane == "fp64")


@dataclass(frozen=True)
class Case:
    """A layout and the model it holds, as command-line flags. `model`: those that one process gets too. `lane`: fp64 is
    torch DDP, fp32 and bf16 are DeepSpeed (ZeRO-3 unless `layout` says otherwise)."""

    world_size: int
    layout: str
    model: str = ""
    lane: str = "fp32"

    def flags(self) -> list[str]:
        engine = self.lane != "fp64" and "--backend" not in self.layout
        buckets = "--reduce_bucket_size 20000" if engine else ""  # several buckets per stage
        return merged(MODEL, buckets, lane_flags(self.lane, self.model, self.layout), self.model, self.layout)

    def plan(self):
        from megaaccum import config

        return config.resolve(load(None, self.flags()), world_size=self.world_size)

    def __str__(self) -> str:
        short = {key: alias for alias, key in reversed(ALIASES.items())}
        flags = [flag.split() for flag in f"{self.layout} {self.model}".split("--")]
        keys = ["=".join([short.get(name, name), *values]) for name, *values in filter(None, flags)]
        return "-".join([f"{self.world_size}ranks", self.lane, *keys])


@dataclass(frozen=True)
class Gradient:
    """A step on one rank: {global name: this tp rank's part of the gradient that the optimizer receives, in float64
    numbers}, and what the step reports."""

    parts: dict[str, torch.Tensor]
    norm: float
    loss: float
    num_tokens: int
    tp_rank: int = 0


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cuts a parameter: along which axis, and whether it holds [gate; up]."""

    axis: int
    gated: bool


@dataclass(frozen=True)
class Reference:
    """One process' gradient, and how tensor parallelism would cut each parameter."""

    gradient: Gradient
    cuts: dict[str, Cut]


# --- data ----------------------------------------------------------------------------------------------------------


def sample(index: int) -> dict[str, torch.Tensor]:
    """Sequence `index` of the made-up data set: tokens, and a mask whose count differs from sequence to sequence."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, VOCAB, (SEQ + 1,), generator=generator)
    mask = torch.ones(SEQ)
    mask[int(torch.randint(1, SEQ, (1,), generator=generator)) :] = 0.0
    if index == MASKED_OUT:
        mask.zero_()
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": torch.arange(SEQ)}


def stack(indices: Iterable[int]) -> dict[str, torch.Tensor]:
    samples = [sample(i) for i in indices]
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def microbatches(plan, dp_rank: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one data-parallel rank, of the global batch that starts at sample `first`."""
    size, batch = plan.batch.micro_batch_size, plan.batch
    places = [batch.sample_index(m, dp_rank, in_runs=plan.in_runs) for m in range(batch.num_microbatches)]
    starts = [first + place * size for place in places]
    return [stack(range(start, start + size)) for start in starts]


# --- a layout ------------------------------------------------------------------------------------------------------


@dataclass
class Rig:
    """One rank of a model that can take steps."""

    case: Case
    plan: Plan
    groups: Groups
    chunks: list[torch.nn.Module]
    backend: ShardingBackend
    train_step: TrainStep

    @classmethod
    def of(cls, case: Case) -> Self:
        """Collective."""
        from megaaccum import sharding
        from megaaccum.distributed import groups
        from megaaccum.optim import adamw
        from megaaccum.pretrain.model import gpt
        from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep
        from megaaccum.step.loss import ReportReducer
        from megaaccum.step.train_step import TrainStep

        # DeepSpeed collects garbage at each start, and need not visit the cases before, whose memory would be given
        # back and taken again: a tenth of a file's time.
        gc.freeze()
        plan = case.plan()
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
        backend = sharding.build(plan, built, chunks, adamw.build(plan, chunks))
        forward_step = GptForwardStep(built, plan.batch.loss_norm)
        return cls(
            case,
            plan,
            built,
            chunks,
            backend,
            TrainStep(plan, built, chunks, backend, forward_step, reports=ReportReducer(REPORTS)),
        )

    def microbatches(self, first: int = 0) -> list[dict[str, torch.Tensor]]:
        """This rank's part of the global batch that starts at sample `first`."""
        return microbatches(self.plan, self.groups.dp.rank(), first)

    def train(self, step: int = 0, first: int = 0) -> StepResult:
        """A step on the global batch that starts at sample `first`."""
        return self.train_step.train(self.microbatches(first), step=step)

    def watched(self, batch: list[dict[str, torch.Tensor]] | None = None, step: int = 0) -> tuple[Gradient, StepResult]:
        """A step that leaves the weights as they are, and its gradient at the moment when the optimizer would read it:
        without parts if it does not."""
        seen: dict[str, torch.Tensor] = {}
        with patch.object(self.backend, "step", lambda: seen.update(self.assemble())):
            result = self.train_step.train(self.microbatches() if batch is None else batch, step=step)
        return Gradient(seen, result.grad_norm, result.loss, result.num_tokens, self.groups.tp.rank()), result

    def assemble(self) -> dict[str, torch.Tensor]:
        """{name: whole gradient of this rank's tp part}, from the shards of all dp ranks; nan without one."""
        return self.whole((shard.name, shard.param, shard.start, shard.grad) for shard in self.backend.shards())

    def whole(self, parts: Iterable[tuple[str, torch.nn.Parameter, int, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """{name: this rank's tp part of a parameter, whole} of (name, parameter, start, flat part) on all dp ranks."""
        from megaaccum.model import names

        params = dict(names.named_parameters(self.chunks))
        mine = [
            # Arrays are pickled faster. Ranks of another place in a parameter's tp group hold another part of it.
            (name, start, flat.detach().cpu().double().numpy(), names.tp_group(param, self.groups).rank())
            for name, param, start, flat in parts
            if flat.numel()
        ]
        group = self.groups.collection.tp_dp_cp
        everyone: list = [None] * group.size()
        torch.distributed.all_gather_object(everyone, mine, group=group)
        shapes = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in params.items()}
        whole = {
            name: torch.full((torch.Size(shape).numel(),), float("nan"), dtype=torch.float64)
            for name, shape in shapes.items()
        }
        for pieces in everyone:
            for name, start, grad, tp_rank in pieces:
                if name in whole and tp_rank == names.tp_group(params[name], self.groups).rank():
                    whole[name][start : start + grad.size] = torch.from_numpy(grad).view(-1)
        return {name: flat.view(shapes[name]) for name, flat in whole.items()}


def gradients(cases: list[Case]) -> list[Gradient]:
    return [gradient(case) for case in cases]


def gradient(case: Case) -> Gradient:
    """The gradient of one whole step of `case`."""
    return Rig.of(case).watched()[0]


# --- one process ---------------------------------------------------------------------------------------------------


def references(wanted: list[tuple[str, int | Sequence[int], str]]) -> list[Reference]:
    """`reference` of each (model flags, global batch, dtype), on a world of one rank."""
    return [reference(*each) for each in wanted]


def reference(model_flags: str, global_batch: int | Sequence[int], dtype: str) -> Reference:
    """The gradient of one process without pipeline, sharding or accumulation: the full batch in one forward.
    global_batch: the number of its first sequences, or their numbers."""
    indices = range(global_batch) if isinstance(global_batch, int) else global_batch
    return gradient_of(*one_process(model_flags, dtype), indices)


def gradient_of(chunk, plan, indices: Iterable[int]) -> Reference:
    """The reference's gradient of these sequences by `chunk`, which `one_process` built. It has zeros for what is
    trained but not used, and nothing for what is frozen."""
    from megaaccum.lab.verification.reference import add, norm_of

    loop, batch = plain_loop(chunk, plan), on_device(stack(indices))
    scale = LOSS_SCALE if plan.config.sharding.params_dtype == "fp16" else 1.0
    parts, grads, loss = microbatches_of(plan, batch), {}, 0.0
    tokens = float(batch["loss_mask"].sum())
    for part in parts:
        value, mine = loop.backward(part, tokens, len(parts), scale=scale)
        loss += value
        add(grads, mine)
    grads = {name: grad.cpu().double() for name, grad in grads.items()}
    gated = bool(chunk.config.gated_linear_unit)
    cuts = {n: Cut(getattr(p, "partition_dim", -1), gated and "linear_fc1" in n) for n, p in named(chunk)}
    return Reference(Gradient(grads, norm_of(grads), loss, int(tokens)), cuts)


def plain_loop(chunk, plan, **keys):
    """The reference's loop over `chunk`, which `one_process` built."""
    from megaaccum.lab.verification.reference import PlainLoop
    from megaaccum.lab.verification.subject import gpt_loss

    means, size = plan.batch.loss_norm != "token", plan.batch.micro_batch_size

    def loss(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        if not means or len(batch["tokens"]) == size:
            return gpt_loss(chunk, batch, means=means)
        losses = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        losses = losses if losses.dtype is torch.float64 else losses.float()
        # The full batch: a token weighs 1 / (tokens of its micro-batch * micro-batches).
        rows = batch["loss_mask"].to(losses.dtype).view(-1, size * SEQ)
        weights = rows / rows.sum(dim=1, keepdim=True).clamp(min=1) / len(rows)
        return (losses * weights.view_as(losses)).sum(), 1.0

    return PlainLoop(chunk, loss, means=means, **keys)


def microbatches_of(plan, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The batch whole; micro-batch by micro-batch with experts or prediction layers, whose losses are no sums over
    tokens."""
    if not plan.config.model.num_experts and not plan.config.model.mtp_num_layers:
        return [batch]
    size = plan.batch.micro_batch_size
    return [{name: each[at : at + size] for name, each in batch.items()} for at in range(0, len(batch["tokens"]), size)]


def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.to(cpu.device()) for name, each in batch.items()}


def one_process(model_flags: str, dtype: str):
    """The whole model in `dtype` on one rank, and its plan. 16-bit parameters add their gradients up in FP32."""
    from megaaccum import config
    from megaaccum.distributed import groups
    from megaaccum.pretrain.model import gpt

    flags = merged(MODEL, f"--num_chunks 1 {lane_flags(dtype, model_flags)}", model_flags)
    plan = config.resolve(load(None, flags), world_size=1)
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    (chunk,) = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    for param in chunk.parameters():
        if dtype in ("bf16", "fp16"):
            param.grad_dtype = torch.float32
    return chunk, plan


def named(chunk):
    from megaaccum.model import names

    return list(names.named_parameters([chunk]))
