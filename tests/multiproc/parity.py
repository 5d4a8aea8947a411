"""What parity tests run on ranks: the gradient of a layout, and of one process on the whole batch.

A case is a list of command-line overrides over the small model below. Every function here runs inside ranks and returns
plain data; the comparisons are in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SEQ, VOCAB = 16, 61
MODEL = (
    "--num_layers 8 --hidden_size 32 --num_attention_heads 4 --seq_length 16 --attention_dropout 0 --hidden_dropout 0 "
    "--make_vocab_size_divisible_by 16 --train_iters 20 --lr 1e-3 --min_lr 1e-4 --init_method_std 0.1 "
    "--micro_batch_size 1 --data_path none"
).split()


@dataclass
class Gradient:
    """One rank's view of a gradient: {name: (flat tensor with holes filled by nan, shape, tp slice)}, and the norm."""

    parts: dict[str, torch.Tensor]
    norm: float
    loss: float
    divisor: int


def sample(index: int, masked: bool = True) -> dict[str, torch.Tensor]:
    """Sequence `index` of the made-up data set: tokens, and a mask whose count differs from sequence to sequence."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, VOCAB, (SEQ + 1,), generator=generator)
    mask = torch.ones(SEQ)
    if masked:
        mask[int(torch.randint(1, SEQ, (1,), generator=generator)) :] = 0.0
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": torch.arange(SEQ)}


def stack(indices) -> dict[str, torch.Tensor]:
    samples = [sample(i) for i in indices]
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def microbatches(plan, dp_rank: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one data-parallel rank, of the global batch that starts at sample `first`."""
    size, dp = plan.batch.micro_batch_size, plan.layout.dp
    starts = [first + (m * dp + dp_rank) * size for m in range(plan.batch.num_microbatches)]
    return [stack(range(start, start + size)) for start in starts]


def make(case: list[str], world_size: int):
    """Plan, groups, chunks, boundary and stepper of a case, on a rank."""
    from megaaccum import boundary, config, groups, model, optimizer
    from megaaccum.step import Stepper

    buckets = [] if "ddp" in case else ["--reduce_bucket_size", "20000"]  # several buckets per stage
    plan = config.resolve(config.load(None, [*MODEL, *buckets, *case]), world_size=world_size)
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = model.build_chunks(plan, built, vocab_size=VOCAB)
    bound = boundary.build(plan, built, chunks, optimizer.build(plan, chunks))
    return plan, built, chunks, bound, Stepper(plan, built, chunks, bound)


def gradients(cases: list[list[str]]) -> list[Gradient]:
    """The reduced gradient of each case on this rank's parameters, assembled over its data-parallel ranks."""
    from megaaccum import grad_norm

    results = []
    for case in cases:
        plan, built, chunks, bound, stepper = make(case, torch.distributed.get_world_size())
        batches = microbatches(plan, built.dp.rank())
        loss = stepper.gradient(batches)
        parts = assemble(bound, built, chunks)
        results.append(Gradient(parts, grad_norm.global_norm(bound, built), 0.0, loss.num_tokens))
    return results


def assemble(bound, built, chunks) -> dict[str, torch.Tensor]:
    """{name: whole gradient of this rank's tp part} from the shards of all data-parallel ranks (nan where none has)."""
    from megaaccum import model

    mine = [(s.name, s.start, s.grad.detach().clone()) for s in bound.shards() if s.grad.numel()]
    everyone: list = [None] * built.dp_cp.size()
    torch.distributed.all_gather_object(everyone, mine, group=built.dp_cp)
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters(chunks)}
    whole = {name: torch.full((torch.Size(shape).numel(),), float("nan"), dtype=torch.float64)
             for name, shape in shapes.items()}  # fmt: skip
    for rank_parts in everyone:
        for name, start, grad in rank_parts:
            whole[name][start : start + grad.numel()] = grad.double().view(-1)
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}


def reference(case: list[str], global_batch: int, dtype: str) -> tuple[dict[str, torch.Tensor], dict, float]:
    """One process, no pipeline, the whole batch at once: {name: gradient in float64 numbers}, tp metadata, loss.

    With loss_norm microbatch the whole batch is still one forward; each token weighs 1 / (tokens of its micro-batch *
    number of micro-batches).
    """
    from megaaccum import config, groups, model

    one = [*MODEL, "--num_chunks", "1", *case, "--params_dtype", dtype, "--boundary", "ddp"]
    plan = config.resolve(config.load(None, one), world_size=1)
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    (chunk,) = model.build_chunks(plan, built, vocab_size=VOCAB)
    if dtype == "bf16":
        for param in chunk.parameters():
            param.grad_dtype = torch.float32
    batch = stack(range(global_batch))
    losses = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    losses = losses if losses.dtype is torch.float64 else losses.float()
    weights = batch["loss_mask"].to(losses.dtype)
    if plan.batch.loss_norm == "token":
        weights = weights / batch["loss_mask"].sum().to(losses.dtype)
    else:
        weights = weights / weights.sum(dim=1, keepdim=True) / global_batch
    loss = (losses * weights).sum()
    loss.backward()
    grads = {name: param.grad.double() for name, param in model.named_parameters([chunk])}
    layout = {
        name: (getattr(param, "partition_dim", -1), bool(chunk.config.gated_linear_unit) and "linear_fc1" in name)
        for name, param in model.named_parameters([chunk])
    }
    return grads, layout, float(loss)
