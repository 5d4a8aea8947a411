"""The batch: the cut of an optimizer step's sequences over ranks, accumulation steps and pipeline micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megaaccum.config.schema import BatchConfig
from megaaccum.errors import ConfigError, equation, indivisible, raise_problems

Flush = Literal["merged", "per_round"]
LossNorm = Literal["token", "microbatch"]

SIZES = ("micro_batch_size", "pp_microbatches", "device_batch_size", "grad_accum_steps", "global_batch_size")
"""The keys of the five sizes. Of these, device = micro * pp_microbatches and global = device * steps * dp."""
DEEPSPEED_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The sizes of a DeepSpeed JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch of one optimizer step. The same on every rank; sizes are in sequences, unless named tokens.

    Build one with `solve`, which checks every rule, rather than by hand.
    """

    micro_batch_size: int
    """Sequences in one pipeline micro-batch on one data-parallel rank."""
    pp_microbatches: int
    """Pipeline micro-batches that one device batch is cut into."""
    grad_accum_steps: int
    """Device batches per optimizer step."""
    data_parallel_size: int
    """Ranks that see different sequences: world / (tp * cp * pp)."""
    pipeline_model_parallel_size: int
    """Pipeline ranks."""
    seq_length: int
    """Tokens per sequence."""
    flush: Flush = "merged"
    """One pipeline flush per optimizer step, or one per accumulation step."""
    loss_norm: LossNorm = "token"
    """The divisor of the step's loss."""

    def sample_index(self, index: int, dp_rank: int, *, in_runs: bool) -> int:
        """The position in the global batch, counted in micro-batches, of micro-batch `index` of a data-parallel rank.
        Ranks take turns; with in_runs each has `num_microbatches` consecutive ones."""
        return dp_rank * self.num_microbatches + index if in_runs else index * self.data_parallel_size + dp_rank

    @property
    def device_batch_size(self) -> int:
        """Sequences that a data-parallel rank takes in per accumulation step."""
        return self.micro_batch_size * self.pp_microbatches

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per optimizer step on one data-parallel rank; the divisor of a mean over micro-batches."""
        return self.grad_accum_steps * self.pp_microbatches

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.device_batch_size * self.grad_accum_steps * self.data_parallel_size

    @property
    def microbatches_per_flush(self) -> int:
        """Micro-batches of one call of the schedule, which fills and drains the pipeline once."""
        return self.num_microbatches if self.flush == "merged" else self.pp_microbatches

    @property
    def num_flushes(self) -> int:
        """Calls of the schedule per optimizer step."""
        return self.num_microbatches // self.microbatches_per_flush

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks, masked ones included."""
        return self.global_batch_size * self.seq_length

    def describe(self) -> str:
        """The arithmetic, one equation a line, every factor with its name."""
        lines = [
            f"device_batch_size = micro_batch_size {self.micro_batch_size} * pp_microbatches {self.pp_microbatches}"
            f" = {self.device_batch_size} sequences",
            f"num_microbatches = grad_accum_steps {self.grad_accum_steps} * pp_microbatches {self.pp_microbatches}"
            f" = {self.num_microbatches}",
            f"global_batch_size = device_batch_size {self.device_batch_size} * grad_accum_steps"
            f" {self.grad_accum_steps} * data_parallel_size {self.data_parallel_size}"
            f" = {self.global_batch_size:,} sequences",
            f"tokens_per_step = global_batch_size {self.global_batch_size} * seq_length {self.seq_length}"
            f" = {self.tokens_per_step:,} tokens",
            f"flush: {self.flush}, so {self.num_flushes} flush{'es' * (self.num_flushes > 1)} of"
            f" {self.microbatches_per_flush} micro-batches per step",
        ]
        return "\n".join(lines)

    @classmethod
    def solve(
        cls, keys: BatchConfig, *, data_parallel_size: int, seq_length: int, pipeline_model_parallel_size: int = 1
    ) -> BatchPlan:
        """The plan that follows from any of the five sizes in `keys`.

        Sizes that stay open: micro_batch_size is 1, there is one accumulation step, and pp_microbatches is what the
        other sizes leave (1 if none gives the size of the batch, as in Megatron-LM).

        Raises:
            ConfigError: a size is not positive, sizes contradict each other or do not divide, or a flush has too few
                micro-batches for the pipeline. One text per broken rule.
        """
        check_sizes(keys, data_parallel_size)
        micro, chunks, steps = _split(keys, data_parallel_size)
        plan = cls(
            micro_batch_size=micro,
            pp_microbatches=chunks,
            grad_accum_steps=steps,
            data_parallel_size=data_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            seq_length=seq_length,
            flush=keys.flush,
            loss_norm=keys.loss_norm,
        )
        if (problem := pipeline_fill_problem(plan)) and not keys.allow_underfilled_pipeline:
            raise ConfigError(problem)
        return plan


def given_sizes(keys: BatchConfig) -> dict[str, int]:
    """The batch sizes that have a value."""
    return {name: size for name in SIZES if (size := getattr(keys, name)) is not None}


def check_sizes(keys: BatchConfig, dp: int) -> None:
    """Check that some plan has the sizes in `keys`, for any pipeline. dp: data-parallel ranks.

    Raises:
        ConfigError: a size is not positive, sizes contradict each other or do not divide.
    """
    problems = [f"{name} is {value}: it must be at least 1." for name, value in given_sizes(keys).items() if value < 1]
    raise_problems(problems or [*_device_problems(keys)] or [*_global_problems(keys, dp)])


def _device_problems(keys: BatchConfig) -> Iterator[str]:
    device, micro, chunks = keys.device_batch_size, keys.micro_batch_size, keys.pp_microbatches
    if device is None:
        return
    if micro is not None and chunks is not None and device != micro * chunks:
        yield (
            f"device_batch_size {device} contradicts micro_batch_size {micro} * pp_microbatches {chunks} ="
            f" {micro * chunks}: set device_batch_size to {micro * chunks}, or leave one of the three out."
        )
    elif size := chunks or micro:
        name = "pp_microbatches" if chunks else "micro_batch_size"
        yield from indivisible("device_batch_size", device, {name: size})


def _global_problems(keys: BatchConfig, dp: int) -> Iterator[str]:
    """The rule on global_batch_size that a sound device batch breaks."""
    if (whole := keys.global_batch_size) is None:
        return
    inner = ("micro_batch_size", "pp_microbatches") if keys.device_batch_size is None else ("device_batch_size",)
    factors = {name: getattr(keys, name) for name in (*inner, "grad_accum_steps")} | {"data_parallel_size": dp}
    known: dict[str, int] = {name: value for name, value in factors.items() if value is not None}
    product = math.prod(known.values())
    if len(known) < len(factors):
        yield from indivisible("global_batch_size", whole, known, change="value", more=", or change one of the factors")
    elif whole != product:
        yield (
            f"global_batch_size {whole} contradicts {equation(known)}: set global_batch_size to {product}, or leave out"
            " one of these keys to have it derived."
        )


def _split(keys: BatchConfig, dp: int) -> tuple[int, int, int]:
    """(micro_batch_size, pp_microbatches, grad_accum_steps) of sizes without problems."""
    per_rank = None if keys.global_batch_size is None else keys.global_batch_size // dp
    micro, chunks, device, steps = (getattr(keys, name) for name in SIZES[:4])
    if device is None and per_rank is not None and steps is not None:
        device = per_rank // steps
    if micro is None:
        micro = device // chunks if device is not None and chunks is not None else 1
    if chunks is None and device is not None:
        chunks = device // micro
    if chunks is None:
        chunks = 1 if per_rank is None else per_rank // micro
    if steps is None:
        steps = 1 if per_rank is None else per_rank // (micro * chunks)
    return micro, chunks, steps


def bubble_fraction(*, pp: int, vpp: int, microbatches: int) -> float:
    """Share of a flush that a rank idles, with stages of equal time and free communication.

    A rank works for vpp * microbatches chunk passes and waits for pp - 1 (arXiv 2104.04473, section 2.2, where the
    wait is put in proportion to the work instead).
    """
    return (pp - 1) / (vpp * microbatches + pp - 1)


def pipeline_fill_problem(plan: BatchPlan) -> str | None:
    """The text of the rule that a flush holds at least two micro-batches per pipeline rank, or None if it does.

    With fewer, ranks idle most of the step, and schedules that fill the pipeline from both ends cannot run at all.
    """
    pp, m = plan.pipeline_model_parallel_size, plan.microbatches_per_flush
    if pp == 1 or m >= 2 * pp:
        return None
    chunks, steps = plan.pp_microbatches, plan.grad_accum_steps
    chunks_needed = -(-2 * pp // steps) if plan.flush == "merged" else 2 * pp
    remedies = [f"pp_microbatches to {chunks_needed} (device_batch_size {plan.micro_batch_size * chunks_needed})"]
    if plan.flush == "merged":
        has = f"grad_accum_steps {steps} * pp_microbatches {chunks} = {m}"
        remedies.append(f"grad_accum_steps to {-(-2 * pp // chunks)}")
        remedies.append(f"global_batch_size to {2 * pp * plan.micro_batch_size * plan.data_parallel_size}")
    else:
        has = f"flush: per_round makes flushes of pp_microbatches {chunks}"
        if plan.num_microbatches >= 2 * pp:
            remedies.append(f"flush to merged (flushes of {plan.num_microbatches})")
    remedies.append(f"pipeline_model_parallel_size to {max(1, m // 2)}")
    return (
        f"pipeline_model_parallel_size {pp} needs at least 2 * {pp} = {2 * pp} micro-batches in a flush, but {has}:"
        f" set {', or '.join(remedies)}; or, to accept a longer bubble, allow_underfilled_pipeline to true."
    )
