"""The two objects that every loop around Megatron-core drives, over a sharding backend: chunks with the protocol of
Megatron's DistributedDataParallel, and an optimizer with that of its MegatronOptimizer.

    the loop calls                                  what happens
    chunk.zero_grad_buffer, optimizer.zero_grad     gradients of a step that was not taken are dropped
    the schedule's first backward region            the step begins or continues: parameters are gathered
    config.grad_scale_func = optimizer.scale_loss   the loss is multiplied by the loss scale; nothing is divided
    finalize_model_grads, ours or Megatron's        N is recorded; nothing is divided
    optimizer.step                                  the transaction of step/: reduce, divide once, judge, update

A step's gradient equals that of Megatron's DistributedDataParallel for the same loss functions: with
`calculate_per_token_loss` the sum over the tokens of all micro-batches and ranks, otherwise the mean over data-parallel
ranks of what Megatron's schedules have divided by the number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megaaccum import sharding
from megaaccum.config import Plan
from megaaccum.distributed.agreement import assert_same_on_ranks, raise_on_all_ranks
from megaaccum.distributed.groups import Groups, default_collection, share_reports
from megaaccum.distributed.start import groups_of, start_together
from megaaccum.errors import ConfigError, StepError, raise_problems
from megaaccum.executor import entry
from megaaccum.loop import checkpoint as loop_checkpoint
from megaaccum.model import names
from megaaccum.optim import by_pattern
from megaaccum.optim.chosen import OptimizerFactory, optimizer_of
from megaaccum.platform import cpu
from megaaccum.sharding import ShardingBackend
from megaaccum.step import chunk_config
from megaaccum.step.train_step import PARTIAL_UPDATE, TrainStep
from megaaccum.upstream import pytorch


class LoopStep:
    """The step that the chunks and the optimizer of a foreign loop share.

    chunks: this rank's, unwrapped. per_token: whether loss functions return sums over tokens, which Megatron counts
    (`calculate_per_token_loss`).
    """

    def __init__(
        self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], backend: ShardingBackend, *, per_token: bool
    ):
        self.plan, self.groups, self.chunks, self.backend = plan, groups, chunks, backend
        self.train_steps = TrainStep(plan, groups, chunks, backend)
        self.transaction = self.train_steps.transaction
        self._per_token = per_token
        self._in_flush = self._unfinished = False
        self._factor = 1.0
        self._hidden: list[tuple[torch.nn.Parameter, str, torch.Tensor]] = []

    def fill_hooks(self) -> None:
        """Set the hooks of Megatron's schedules in the chunks' configuration, around the backend's own."""
        for chunk in self.chunks:
            config: Any = chunk.config
            config.calculate_per_token_loss = self._per_token
            config.no_sync_func = self.no_sync
            config.grad_scale_func = self.scale_loss
            config.finalize_model_grads_func = self.finalize

    # --- a flush ---

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context around all but a chunk's last backward. Every schedule enters it before its first forward."""
        self.before_forward()
        with self.backend.no_sync_func():
            yield

    def before_forward(self) -> None:
        """Gather the parameters that are not whole; the first forward of a flush begins the flush."""
        if not torch.is_grad_enabled():
            self.backend.gather()
        elif not self._in_flush:
            self._show()
            self._in_flush = True
            expected = None if self._per_token else 1.0 / self.plan.batch.num_microbatches
            self._factor = self.train_steps.begin_flush(expected)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss with which a backward starts, multiplied by the loss scale and by the divisor of the reduction over
        ranks. (Megatron reads the scale of side losses by a number without a gradient.)"""
        self._unfinished |= loss.requires_grad
        return self.backend.grad_scale_func(loss) * self._factor

    def finalize(self, models: Any = None, num_tokens: torch.Tensor | float | None = None, **unused: Any) -> None:
        """`config.finalize_model_grads_func`: end a flush. num_tokens: on this rank; None if losses are means, which
        weigh 1 on each data-parallel rank however many flushes a step has, because Megatron adds them up."""
        self._in_flush = False
        self.backend.finalize_model_grads_func(self.chunks)
        if num_tokens is None:
            is_first = self.train_steps.opened is None or not self.train_steps.opened.tally.weights
            num_tokens = float(is_first and self.groups.pp.rank() == 0)
        self.train_steps.end_flush(num_tokens)
        self._unfinished = False

    # --- Megatron's own finalize_model_grads ---

    def finish_grad_sync(self) -> None:
        """End a flush when Megatron's finalize_model_grads begins. Gradients are hidden from it: what it would sum over
        tp and over copies of an embedding, the backend sums later."""
        if not self._in_flush:
            return
        if self._per_token and self.plan.layout.placement == "v":
            raise ConfigError(_V_AND_THEIRS.format(self.plan.layout.schedule)).printed_once()
        self.finalize(num_tokens=0.0 if self._per_token else None)
        params = [param for chunk in self.chunks for param in chunk.parameters()]
        held = [(param, name, getattr(param, name, None)) for param in params for name in ("grad", "main_grad")]
        self._hidden = [(param, name, grad) for param, name, grad in held if grad is not None]
        for param, name, _ in self._hidden:
            setattr(param, name, None)

    def note_scaling(self, factor: torch.Tensor | float) -> None:
        """Record `factor`, 1 / N, by which Megatron's finalize_model_grads would multiply the gradient now: the commit
        does. Raises ConfigError if losses are means, which the commit divides by the ranks alone."""
        if not self._per_token:
            raise ConfigError(_MEANS).printed_once()
        total = 1.0 / float(factor)
        whole = float(round(total))  # a quotient in FP32, as Megatron makes it of whole tokens, is not exact
        total = whole if math.isclose(total, whole, rel_tol=1e-6) else total
        self.train_steps.end_flush(total if dist.get_rank() == 0 else 0.0)

    def _show(self) -> None:
        """Restore the gradients that were hidden."""
        for param, name, grad in self._hidden:
            setattr(param, name, grad)
        self._hidden.clear()

    # --- the step ---

    def abandon(self) -> None:
        """Drop the gradients of a step that was begun but not taken."""
        self._show()
        self._in_flush = self._unfinished = False
        self.train_steps.abandon()

    def problem(self) -> StepError | None:
        """Why no flush can begin and no step be taken after an error of the user's own code, which the loop caught."""
        text = PARTIAL_UPDATE if self.train_steps.amid else _UNFINISHED.format(self.transaction.step + 1)
        return StepError(text) if self.train_steps.amid or self._unfinished else None

    def step(self) -> tuple[bool, float]:
        """Take the step. Returns (whether all ranks have updated, gradient norm before clipping), the same on every
        rank."""
        self._show()
        problem, self._in_flush, self._unfinished = self.problem(), False, False
        result = self.train_steps.optim_step(problem=problem)
        if result.note and dist.get_rank() == 0:
            print(f"step {result.step}: {result.note}{' (skipped)' if result.skipped else ''}", flush=True)
        return not result.skipped, result.grad_norm

    def adopt(self) -> None:
        """Make the weights those that were written into the backend's state."""
        self.backend.adopt_state(self.transaction.num_updates)


_MEANS = "scale_gradients: losses are means, divided by the ranks alone: set calculate_per_token_loss before wrap"
_UNFINISHED = (
    "step {}: a flush has begun its backwards but not ended, so its gradients are part of a sum: drop them by"
    " optimizer.zero_grad() (without Megatron's schedules, finish_grad_sync() ends a flush)"
)
_V_AND_THEIRS = (
    "Megatron's finalize_model_grads takes the tokens of the last pipeline rank, but with schedule {} the last stage is"
    " on the first: leave config.finalize_model_grads_func as wrap() has set it"
)


class LoopChunk(DistributedDataParallel):  # type: ignore[misc]  # Megatron-core has no types
    """A chunk with the protocol of Megatron's DistributedDataParallel, which `unwrap_model` knows, but without its
    buffers: the sharding backend has the gradients.

    module: the chunk as given, possibly a Float16Module.
    """

    def __init__(self, module: torch.nn.Module, step: LoopStep, number: int):
        MegatronModule.__init__(self, config=module.config)
        self.module = module
        self.ddp_config = DistributedDataParallelConfig()
        self.buffers: list[Any] = []
        self.expert_parallel_buffers: list[Any] = []
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.params_with_grad: list[torch.nn.Parameter] = []
        self.force_all_reduce = self.use_forward_hook = self.overlap_param_gather_with_optimizer_step = False
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}
        self._step, self._number = step, number
        self.sharding_backend = step.backend  # for megaaccum's executor, which hands it split backwards
        for name in ("dp", "dp_cp", "expt_dp", "tp", "pp", "ep"):  # as Megatron's wrapper has them
            setattr(self, f"{name}_group", getattr(step.groups.collection, name, None))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._step.before_forward()
        return pytorch.without_base(self.module(*inputs, **kwargs))

    def set_is_first_microbatch(self) -> None:
        """Forward the call to Transformer Engine's modules, if the chunk is one of Megatron's. Schedules make it as a
        flush begins. Raises StepError if an error has left gradients of a flush that did not end."""
        if self._number == 0 and torch.is_grad_enabled() and (problem := self._step.problem()) is not None:
            raise problem
        if isinstance(self.module, MegatronModule):
            self.module.set_is_first_microbatch()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context around all but the last backward. Only the first chunk's acts: the backend's hook serves all
        chunks."""
        return self._step.no_sync() if self._number == 0 else nullcontext()

    def zero_grad_buffer(self) -> None:
        """Drop the gradients of a step that was not taken."""
        self._step.abandon()

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: the backend reduces inside the last backward or, if every backward was inside `no_sync`, in
        `optimizer.step`. Raises ConfigError if the backend cannot defer the reduction."""
        if not self._step.backend.can_defer:
            name = self._step.plan.config.sharding.backend
            raise ConfigError(
                f"start_grad_sync: backend {name} reduces inside the last backward alone: run that one outside"
                " no_sync, and leave this call out"
            ).printed_once()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """End the flush."""
        if force_all_reduce:
            raise ConfigError("force_all_reduce (save_wgrads_interval) needs whole gradients: drop it").printed_once()
        self._step.finish_grad_sync()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Record 1 / N, by which the commit multiplies once; every chunk is passed the same factor."""
        if self._number == 0:
            self._step.note_scaling(scaling_factor)

    def broadcast_params(self) -> None:
        """Do nothing: `wrap` has broadcast the parameters."""

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Do nothing: parameters are gathered before they are read."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The chunk's state_dict with whole tensors, in host memory."""
        with self._step.backend.whole():
            return loop_checkpoint.copied(self.module.state_dict(*args, **kwargs))

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The chunk's state_dict for checkpoints with whole tensors, in host memory."""
        with self._step.backend.whole():
            return loop_checkpoint.copied(self.module.state_dict_for_save_checkpoint(*args, **kwargs))  # type: ignore[operator]

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Load whole weights into the chunk and the optimizer's masters. Raises CheckpointError."""
        step = self._step
        loop_checkpoint.load_weights(step.backend, step.chunks[self._number], state_dict, strict=strict)
        step.adopt()


class LoopOptimizer(MegatronOptimizer):  # type: ignore[misc]  # Megatron-core has no types
    """An optimizer with the protocol of MegatronOptimizer; its step is this package's transaction.

    optimizer: torch's, whose groups the backend has filled with this rank's partitions.
    """

    is_stub_optimizer = False

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: LoopStep):
        super().__init__(optimizer, config)
        self._step = step
        for group in self.param_groups:
            group.setdefault("default_config", "max_lr" not in group)  # Megatron's loop prints the lr of this group

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, for a learning-rate schedule."""
        return self._step.backend.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that was not taken."""
        self._step.abandon()

    def step(self) -> tuple[bool, float, None]:
        """Take the step. Returns (whether all ranks have updated, gradient norm before clipping, None: zeros are not
        counted).

        Collective over the world. The verdict is the same on all ranks; a skipped step leaves weights, moments and
        random states unchanged. Raises StepError on every rank if the plan ends the run, or if no backward ran.
        """
        return *self._step.step(), None

    def get_loss_scale(self) -> torch.Tensor:
        """The loss scale of the next backward, shape [1]; 1 without FP16."""
        return torch.full((1,), self._step.train_steps.recovery.loss_scale, device=cpu.device())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss with which a backward starts."""
        return self._step.scale_loss(loss)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Copy the chunks' weights into the masters, or those of `state_dict`: whole, by the names of Megatron's
        checkpoints (`model`, or `model0`, `model1`, ...). Raises CheckpointError.

        Without a state_dict, load weights before `wrap` or by a chunk's load_state_dict: most backends keep parameters
        in partitions, into which nothing can be written in place.
        """
        step = self._step
        if state_dict is None:
            with step.backend.whole():
                loop_checkpoint.copy_in(step.backend, dict(names.named_parameters(step.chunks)))
        else:
            for number, chunk in enumerate(step.chunks):
                weights = state_dict["model" if len(step.chunks) == 1 else f"model{number}"]
                loop_checkpoint.load_weights(step.backend, chunk, weights, strict=True)
        step.adopt()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, **unused: Any
    ) -> dict[str, Any]:
        """Masters and moments for torch_dist, by their names in the whole model, and the counters; they load at another
        dp and pp. Raises StepError, unless `is_loading`, if an update failed midway."""
        return self._with_counters(loop_checkpoint.sharded_state(self._step.backend, self._step.groups), is_loading)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """This rank's masters and moments in host memory, and the counters; they load at the same layout only. Raises
        StepError, unless `is_loading`, if an update failed midway."""
        return self._with_counters(loop_checkpoint.local_state(self._step.backend, self._step.groups), is_loading)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `sharded_state_dict` or `state_dict` returned."""
        loop_checkpoint.load_state(self._step.backend, self._step.groups, state_dict)
        counters = state_dict["counters"]
        self._step.transaction.load_state_dict(
            counters["transaction"], step=counters["step"], consumed_samples=counters["consumed_samples"]
        )
        self._step.train_steps.recovery.load_state_dict(counters["train_step"])
        self._step.adopt()
        self._step.train_steps.settle()

    def _with_counters(self, state: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        if not is_loading:
            self._step.train_steps.refuse_partial_update()
        of, recovery = self._step.transaction, self._step.train_steps.recovery
        counters = {"step": of.step, "consumed_samples": of.consumed_samples, "transaction": of.state_dict()}
        return state | {"counters": counters | {"train_step": recovery.state_dict()}}

    def part_of_step(self, *unused: Any) -> Any:
        """Refuse what of a step `step` alone does: a loop that calls parts would take two."""
        raise ConfigError(
            "prepare_grads, step_with_ready_grads, get_grad_norm, clip_grad_norm, count_zeros: step() reduces, takes"
            " the norm, judges, clips and updates as one; call step(), and read what it returns"
        )

    prepare_grads = step_with_ready_grads = get_grad_norm = clip_grad_norm = count_zeros = part_of_step


# --- wrap -----------------------------------------------------------------------------------------------------------

NOT_HERE = (
    "the loop is Megatron's: a step that goes wrong is skipped on all ranks, but its micro-batches are not run again to"
    " find the bad one, none is dropped (nonfinite: drop_microbatch), and ranks that disagree on the number of"
    " micro-batches are noticed in optimizer.step(), or hang in the schedule before it"
)
"""Printed at start: the difference to an engine's step."""


def wrap(
    chunks: Sequence[torch.nn.Module],
    groups: Groups | ProcessGroupCollection | None,
    plan: Plan,
    *,
    optimizer: OptimizerFactory | None = None,
) -> tuple[list[LoopChunk], LoopOptimizer]:
    """Wrap chunks and their optimizer in the protocols of Megatron's DistributedDataParallel and MegatronOptimizer
    over the plan's sharding backend. Collective over the world.

    Args:
        chunks: this rank's Megatron chunks in the order of the schedule, bare or in a Float16Module. Their hooks have
            to be None. `config.calculate_per_token_loss` has to match their loss functions (without one the plan's
            `loss_norm` holds). The weights of the first data-parallel rank are broadcast.
        groups: Megatron's ProcessGroupCollection of the layout; None: those of `parallel_state`.
        plan: layout, sharding, treatment of bad steps, `clip_grad`. A step of the loop may have another number of
            micro-batches than the plan's.
        optimizer: a torch optimizer class, or a function of a list of parameters; default: AdamW by the plan.

    Returns:
        (chunks, optimizer). The loop then calls a schedule and `optimizer.step()` as with Megatron's own objects.

    Raises:
        ConfigError: on every rank, if chunks, groups and the plan do not match, or the plan asks for something that
            such a loop cannot have.
        RankDisagreement: on every rank, if the chunks' `calculate_per_token_loss` differs.
    """
    start_together(plan)
    built = groups_of(plan, groups)
    bare: list[torch.nn.Module] = unwrap_model(list(chunks))
    key, by_tokens = "calculate_per_token_loss", plan.batch.loss_norm == "token"
    per_token = [getattr(getattr(chunk, "config", None), key, by_tokens) for chunk in bare]
    assert_same_on_ranks(f"{key} in the chunks' config", " and ".join(map(str, dict.fromkeys(per_token))))
    raise_on_all_ranks(_check, plan, bare)
    chunk_config.prepare_together(plan, built, bare)
    by_pattern.freeze(plan, bare)
    for chunk in bare:  # every data-parallel rank begins with the weights of the first
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            dist.broadcast(tensor.data, group=names.dp_group(tensor, built), group_src=0)
    inner = optimizer_of(plan, bare, optimizer)
    step = LoopStep(plan, built, bare, sharding.build(plan, built, bare, inner), per_token=per_token[0])
    step.fill_hooks()
    for chunk in bare:
        if hasattr(chunk, "sharded_state_dict"):
            loop_checkpoint.write_whole(chunk, step.backend.whole)
    if dist.get_rank() == 0:
        print(f"megaaccum: {NOT_HERE}.", flush=True)
    settings = OptimizerConfig(optimizer="adam", clip_grad=plan.config.optimizer.clip_grad)
    return (
        [LoopChunk(chunk, step, number) for number, chunk in enumerate(chunks)],
        LoopOptimizer(inner, settings, step),
    )


def _check(plan: Plan, chunks: list[torch.nn.Module]) -> None:
    """Refuse what needs an Engine, which has the step's micro-batches before they run. Raises ConfigError."""
    step, here = plan.config.step, cpu.device()
    in_fp8 = any(getattr(getattr(chunk, "config", None), "fp8", None) for chunk in chunks)
    elsewhere = any(param.device.type != here.type for chunk in chunks for param in chunk.parameters())
    refused = {
        "nonfinite drop_microbatch runs the step's micro-batches again, which Megatron's loop does not"
        " hand over: set nonfinite to skip, zero or raise": step.nonfinite == "drop_microbatch",
        "fp8: scales are to follow micro-batches, which Megatron's loop does not hand over: leave fp8_format out,"
        " or train with megaaccum.initialize": in_fp8,
        "skipped_samples retried: Megatron's loop has moved on in its data: set it to consumed": step.skipped_samples
        == "retried",
        "speculative_step: the next step's micro-batches come after this one's verdict in Megatron's loop: leave it"
        " out, or train with megaaccum.initialize": step.speculative_step,
        f"parameters of the model are not on {here}, on which this rank computes and weights are broadcast:"
        " move the chunks there first (chunk.to(device))": elsewhere,
    }
    raise_problems([text for text, applies in refused.items() if applies])


def get_forward_backward_func(plan: Plan) -> Callable[..., list[Any]]:
    """The schedule of `plan` as a function with Megatron's signature (`megaaccum.get_forward_backward_func`). Reports
    of loss functions are on the last pipeline rank, where Megatron's loops read them; in a V, whose last stage is on
    the first rank, on that rank too."""
    run = entry.get_forward_backward_func(plan)
    return partial(_report_on_last_rank, run) if plan.layout.placement == "v" else run


def _report_on_last_rank(run: Callable[..., list[Any]], *, pg_collection: Any = None, **arguments: Any) -> list[Any]:
    reports = run(pg_collection=pg_collection, **arguments)
    pp = (pg_collection or default_collection()).pp
    shared = share_reports(reports, pp, source=0)
    return shared if pp.rank() == pp.size() - 1 else reports
