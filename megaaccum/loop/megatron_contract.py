"""The two objects that every loop around Megatron-core drives, over a sharding backend: chunks with the protocol of
its DistributedDataParallel, and an optimizer with that of its MegatronOptimizer.

    the loop calls                                  what happens
    chunk.zero_grad_buffer, optimizer.zero_grad     gradients of a step that was not taken are dropped
    the schedule's first backward region            the step begins, or goes on: parameters are gathered
    config.grad_scale_func = optimizer.scale_loss   the loss times the loss scale; nothing is divided
    finalize_model_grads, ours or Megatron's        N is noted; nothing is divided
    optimizer.step                                  the transaction of step/: reduce, divide once, judge, update

A step's gradient is what Megatron's own DistributedDataParallel makes of the same loss functions: with
`calculate_per_token_loss` their sums over the tokens of all micro-batches and ranks, else the mean over data-parallel
ranks of what Megatron's schedules have divided by the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from megaaccum import sharding
from megaaccum.distributed.agreement import printed_once, raise_on_all_ranks
from megaaccum.distributed.groups import default_collection
from megaaccum.distributed.start import start_together
from megaaccum.engine import OptimizerFactory, groups_of, optimizer_of
from megaaccum.errors import ConfigError
from megaaccum.executor import entry
from megaaccum.loop import megatron_checkpoint
from megaaccum.platform import cpu
from megaaccum.step import chunk_config
from megaaccum.step.train_step import TrainStep

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megaaccum.config import Plan
    from megaaccum.distributed.groups import Groups
    from megaaccum.sharding import ShardingBackend


class LoopStep:
    """The step that another loop drives: what its chunks and its optimizer share.

    chunks: this rank's, without wrappers. per_token: whether loss functions return sums over tokens, which Megatron
    counts (`calculate_per_token_loss`).
    """

    def __init__(
        self, plan: Plan, groups: Groups, chunks: list[torch.nn.Module], backend: ShardingBackend, *, per_token: bool
    ):
        self.plan, self.groups, self.chunks, self.backend = plan, groups, chunks, backend
        self.train_steps = TrainStep(plan, groups, chunks, backend)
        self.transaction = self.train_steps.transaction
        self._per_token = per_token
        self._in_flush = self._gathered = False
        self._flushes, self._factor = 0, 1.0
        self._hidden: list[tuple[torch.nn.Parameter, str, torch.Tensor]] = []

    def fill_hooks(self) -> None:
        """Put what follows the loop's schedules into the chunks' configuration, around the backend's own hooks."""
        configs: dict[int, Any] = {id(chunk.config): chunk.config for chunk in self.chunks}
        for config in configs.values():
            config.calculate_per_token_loss = self._per_token
            config.no_sync_func = self.no_sync
            config.grad_scale_func = self.scale_loss
            config.finalize_model_grads_func = self.finalize

    # --- a flush ---

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all but a chunk's last backward. Every schedule enters it before its first forward."""
        self.before_forward()
        with self.backend.no_sync_func():
            yield

    def before_forward(self) -> None:
        """Parameters are whole after this; the first forward of a flush begins it."""
        if not torch.is_grad_enabled():
            self._gather()
        elif not self._in_flush:
            self._show()
            self._in_flush = True
            expected = None if self._per_token else 1.0 / self.plan.batch.num_microbatches
            self._factor = self.train_steps.begin_flush(expected)
            self._gathered = True

    def _gather(self) -> None:
        if not self._gathered:
            self.backend.gather()
            self._gathered = True

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that a backward starts from: times the loss scale, and what the reduction over ranks divides by."""
        return self.backend.grad_scale_func(loss) * self._factor

    def finalize(self, models: Any = None, num_tokens: torch.Tensor | None = None, **unused: Any) -> None:
        """`config.finalize_model_grads_func`: a flush is over. num_tokens: of this rank, where losses are per token."""
        self._end_flush(num_tokens)

    def _end_flush(self, weight: torch.Tensor | float | None) -> None:
        """weight: of the flush on this rank. None: its losses are means, and weigh 1 on each data-parallel rank however
        many flushes a step has, because Megatron adds them up."""
        self._in_flush = False
        self.backend.finalize_model_grads_func(self.chunks)
        if weight is None:
            weight = float(self._flushes == 0 and self.groups.pp.rank() == 0)
        self.train_steps.end_flush(weight)
        self._flushes += 1

    # --- Megatron's own finalize_model_grads ---

    def finish_grad_sync(self) -> None:
        """Megatron's finalize_model_grads begins. What it would sum over tp, and over copies of an embedding, the
        backend sums later with the rest, so that it is shown no gradient."""
        if not self._in_flush:
            return
        if self._per_token and self.plan.layout.placement == "v":
            raise printed_once(ConfigError(_V_AND_THEIRS.format(self.plan.layout.schedule)))
        self._end_flush(0.0 if self._per_token else None)
        for chunk in self.chunks:
            for param in chunk.parameters():
                for name in ("grad", "main_grad"):
                    if getattr(param, name, None) is not None:
                        self._hidden.append((param, name, getattr(param, name)))
                        setattr(param, name, None)

    def note_scaling(self, factor: torch.Tensor | float) -> None:
        """Megatron's finalize_model_grads would multiply the gradient by `factor`, 1 / N, now: the commit does."""
        first = dist.get_rank() == 0
        self.train_steps.end_flush(float(round(1.0 / float(factor))) if first else 0.0)

    def _show(self) -> None:
        """Give parameters back the gradients that were hidden."""
        for param, name, grad in self._hidden:
            setattr(param, name, grad)
        self._hidden.clear()

    # --- the step ---

    def abandon(self) -> None:
        """Drop the gradients of a step that was begun and not taken."""
        self._show()
        self._in_flush, self._flushes = False, 0
        self.train_steps.abandon()

    def step(self) -> tuple[bool, float]:
        """(whether all ranks have updated, gradient norm before clipping): the same on every rank."""
        self._show()
        self._in_flush, self._flushes = False, 0
        result = self.train_steps.optim_step()
        self._gathered = False
        if result.note:
            self._print(f"step {result.step}: {result.note}{' (skipped)' if result.skipped else ''}")
        return not result.skipped, result.grad_norm

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, parameters are whole; no flush may be open."""
        self._gathered = False
        with self.backend.whole():
            yield

    def adopt(self) -> None:
        """Take what was written into the backend's state as the weights."""
        self._gathered = False
        self.backend.adopt_state(self.transaction.num_updates)

    def _print(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)


_V_AND_THEIRS = (
    "Megatron's finalize_model_grads takes the tokens of the last pipeline rank, but with schedule {} the last stage is"
    " on the first: leave config.finalize_model_grads_func as wrap() has set it"
)


class LoopChunk(DistributedDataParallel):
    """A chunk as Megatron's loops see it. Its base is Megatron's wrapper, which `unwrap_model` knows, but without the
    buffers: the sharding backend has the gradients.

    module: the chunk as it was given, which may be a Float16Module.
    """

    def __init__(self, module: torch.nn.Module, step: LoopStep, number: int):
        MegatronModule.__init__(self, config=module.config)  # type: ignore[arg-type]
        self.module = module
        self.ddp_config = DistributedDataParallelConfig()
        self.buffers: list[Any] = []  # type: ignore[assignment]
        self.expert_parallel_buffers: list[Any] = []
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.params_with_grad: list[torch.nn.Parameter] = []
        self.force_all_reduce = self.use_forward_hook = self.overlap_param_gather_with_optimizer_step = False
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}
        self._step, self._number = step, number
        for name in ("dp", "dp_cp", "expt_dp", "tp", "pp", "ep"):  # as Megatron's wrapper has them
            setattr(self, f"{name}_group", getattr(step.groups.collection, name, None))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._step.before_forward()
        return self.module(*inputs, **kwargs)

    def set_is_first_microbatch(self) -> None:
        """For Transformer Engine's modules, where the chunk is one of Megatron's."""
        if isinstance(self.module, MegatronModule):
            self.module.set_is_first_microbatch()

    def no_sync(self) -> AbstractContextManager[None]:
        """Around all but the last backward. Of several chunks the first speaks for all, as the backend's hook does."""
        return self._step.no_sync() if self._number == 0 else nullcontext()

    def zero_grad_buffer(self) -> None:
        """Drop the gradients of a step that was not taken."""
        self._step.abandon()

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing to do: the backend reduces inside the last backward, or in `optimizer.step` where every backward was
        inside `no_sync`. Raises ConfigError where the backend cannot."""
        backend = self._step.backend
        if not backend.can_defer:
            name = self._step.plan.config.sharding.backend
            raise printed_once(
                ConfigError(
                    f"start_grad_sync: backend {name} reduces inside the last backward alone: run that one outside"
                    " no_sync, and leave this call out"
                )
            )

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """The flush is over."""
        if force_all_reduce:
            raise printed_once(
                ConfigError("force_all_reduce (save_wgrads_interval) needs whole gradients: leave it out")
            )
        self._step.finish_grad_sync()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Take note of 1 / N, with which the commit divides once; the chunks are given the same one."""
        if self._number == 0:
            self._step.note_scaling(scaling_factor)

    def broadcast_params(self) -> None:
        """Nothing to do: `wrap` has broadcast them, and every rank keeps its part of one model since."""

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Nothing to do: parameters are gathered before they are read."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The chunk's, whole, in host memory."""
        with self._step.whole():
            return megatron_checkpoint.copied(self.module.state_dict(*args, **kwargs))

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The chunk's, whole, in host memory."""
        with self._step.whole():
            return megatron_checkpoint.copied(self.module.state_dict_for_save_checkpoint(*args, **kwargs))  # type: ignore[operator]

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        """Take whole weights; the optimizer's masters become these weights. Raises CheckpointError."""
        step = self._step
        megatron_checkpoint.load_weights(step.backend, step.chunks[self._number], state_dict, strict=strict)
        step.adopt()


class LoopOptimizer(MegatronOptimizer):
    """An optimizer as Megatron's loops see it: its step is the transaction of this package.

    optimizer: torch's, whose groups the backend has filled with this rank's partitions.
    """

    is_stub_optimizer = False

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: LoopStep):
        super().__init__(optimizer, config)
        self._step = step
        for group in self.param_groups:
            group.setdefault("default_config", "max_lr" not in group)  # whose lr Megatron's loop prints

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, for a learning-rate schedule."""
        return self._step.backend.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step that was not taken."""
        self._step.abandon()

    def step(self) -> tuple[bool, float, None]:  # type: ignore[override]
        """(whether all ranks have updated, gradient norm before clipping, None: zeros are not counted).

        Collective over the world; the verdict is one for all ranks, and a skipped step leaves weights, moments and
        random states as they were. Raises StepError on every rank where the plan ends the run, or no backward came."""
        return *self._step.step(), None

    def get_loss_scale(self) -> torch.Tensor:
        """Of the next backward, shape [1]; 1 without FP16."""
        return torch.full((1,), self._step.train_steps.recovery.loss_scale, device=cpu.device())

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that a backward starts from."""
        return self._step.scale_loss(loss)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Make the chunks' weights the masters, or those of `state_dict`: whole, by the names of a checkpoint of
        Megatron's (`model`, or `model0`, `model1`, ...). (Without one, load weights before `wrap`, or by a chunk's
        load_state_dict: most backends keep parameters in partitions, to which nothing can be written.) Raises
        CheckpointError."""
        step = self._step
        if state_dict is None:
            with step.whole():
                megatron_checkpoint.reload_weights(step.backend, step.chunks)
        else:
            for number, chunk in enumerate(step.chunks):
                weights = state_dict["model" if len(step.chunks) == 1 else f"model{number}"]
                megatron_checkpoint.load_weights(step.backend, chunk, weights, strict=True)
        step.adopt()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, **unused: Any
    ) -> dict[str, Any]:
        """For torch_dist: masters and moments by their names in the whole model, so that they load at another layout of
        dp and pp, and the counters."""
        return megatron_checkpoint.sharded_state(self._step.backend, self._step.groups) | {"counters": self._counters()}

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """This rank's parts, copied to host memory; to be loaded at the same layout."""
        return megatron_checkpoint.local_state(self._step.backend, self._step.groups) | {"counters": self._counters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `sharded_state_dict` or `state_dict` was taken."""
        megatron_checkpoint.take_state(self._step.backend, self._step.groups, state_dict)
        counters = state_dict["counters"]
        transaction = self._step.transaction
        transaction.load_state_dict(
            counters["transaction"], step=counters["step"], consumed_samples=counters["consumed_samples"]
        )
        self._step.train_steps.recovery.load_state_dict(counters["train_step"])
        self._step.adopt()

    def _counters(self) -> dict[str, Any]:
        of = self._step.transaction
        return {
            "step": of.step,
            "consumed_samples": of.consumed_samples,
            "transaction": of.state_dict(),
            "train_step": self._step.train_steps.recovery.state_dict(),
        }

    # --- parts of a step that `step` takes as one ---

    def prepare_grads(self) -> bool:
        raise ConfigError(_ONE_STEP.format("prepare_grads"))

    def step_with_ready_grads(self) -> bool:
        raise ConfigError(_ONE_STEP.format("step_with_ready_grads"))

    def get_grad_norm(self) -> float:
        raise ConfigError(_ONE_STEP.format("get_grad_norm"))

    def clip_grad_norm(self, clip_grad: float) -> float:
        raise ConfigError(_ONE_STEP.format("clip_grad_norm"))

    def count_zeros(self) -> float:
        raise ConfigError(_ONE_STEP.format("count_zeros"))


_ONE_STEP = (
    "{}: step() reduces, takes the norm, judges, clips and updates as one; call step(), and read what it returns"
)


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
    """(chunks, optimizer) with the protocols of Megatron's DistributedDataParallel and MegatronOptimizer, over the
    plan's sharding backend; collective over the world.

    Args:
        chunks: this rank's Megatron chunks in the order of the schedule, bare or in a Float16Module, with
            `config.calculate_per_token_loss` as their loss functions mean it (without a `config`: the plan's
            `loss_norm`). Their weights on the first data-parallel rank are the initial ones, broadcast here. Their
            hooks have to be None.
        groups: Megatron's ProcessGroupCollection of the layout; None: those of `parallel_state`.
        plan: layout, sharding, what happens to a bad step, `clip_grad`; its numbers of micro-batches are those of a
            usual step, which the loop need not keep to.
        optimizer: a torch optimizer class, or what makes one of a list of parameters; default: AdamW by the plan.

    The loop then calls a schedule and `optimizer.step()` as with Megatron's own objects. Raises ConfigError on every
    rank where chunks, groups and the plan do not fit together, or the plan asks for what such a loop cannot have.
    """
    start_together(plan)
    built = groups_of(plan, groups)
    bare: list[torch.nn.Module] = unwrap_model(list(chunks))
    config: Any = getattr(bare[0], "config", None)
    per_token = plan.batch.loss_norm == "token" if config is None else config.calculate_per_token_loss
    raise_on_all_ranks(_check, plan, bare)
    raise_on_all_ranks(chunk_config.prepare, plan, built, bare)
    _broadcast(built, bare)
    inner = optimizer_of(plan, bare, optimizer)
    step = LoopStep(plan, built, bare, sharding.build(plan, built, bare, inner), per_token=per_token)
    step.fill_hooks()
    for chunk in bare:
        if hasattr(chunk, "sharded_state_dict"):
            megatron_checkpoint.write_whole(chunk, step.whole)
    if dist.get_rank() == 0:
        print(f"megaaccum: {NOT_HERE}.", flush=True)
    settings = OptimizerConfig(optimizer="adam", clip_grad=plan.config.optimizer.clip_grad)
    return (
        [LoopChunk(chunk, step, number) for number, chunk in enumerate(chunks)],
        LoopOptimizer(inner, settings, step),
    )


def _check(plan: Plan, chunks: list[torch.nn.Module]) -> None:
    """Refuse what only an engine can do, because the step's micro-batches are its own."""
    problems = []
    if plan.config.step.nonfinite == "drop_microbatch":
        problems.append(
            "nonfinite drop_microbatch runs the step's micro-batches again, which Megatron's loop does not"
            " hand over: set nonfinite to skip, zero or raise"
        )
    if any(getattr(getattr(chunk, "config", None), "fp8", None) for chunk in chunks):
        problems.append(
            "fp8: scales are to follow micro-batches, which Megatron's loop does not hand over: leave fp8_format out,"
            " or train with megaaccum.initialize"
        )
    if plan.config.step.skipped_samples == "retried":
        problems.append("skipped_samples retried: Megatron's loop has moved on in its data: set it to consumed")
    if plan.config.step.speculative_step:
        problems.append(
            "speculative_step: the next step's micro-batches come after this one's verdict in Megatron's loop: leave it"
            " out, or train with megaaccum.initialize"
        )
    if problems:
        raise ConfigError(problems)


def _broadcast(groups: Groups, chunks: list[torch.nn.Module]) -> None:
    """Make the first data-parallel rank's weights and buffers those of all."""
    for chunk in chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            group = groups.dp_cp if getattr(tensor, "allreduce", True) else groups.collection.expt_dp
            dist.broadcast(tensor.data, src=dist.get_global_rank(group, 0), group=group)


def get_forward_backward_func(plan: Plan) -> Callable[..., list]:
    """`megaaccum.get_forward_backward_func(plan)`, with the reports of loss functions also where Megatron's loops look
    for them: on the last pipeline rank. (In a V the last stage is on the first one, which has them too.)"""
    run = entry.get_forward_backward_func(plan)
    return partial(_report_on_last_rank, run) if plan.layout.placement == "v" else run


def _report_on_last_rank(run: Callable[..., list], *, pg_collection: Any = None, **arguments: Any) -> list:
    reports = run(pg_collection=pg_collection, **arguments)
    pp = (pg_collection or default_collection()).pp
    sent = [[_on(torch.device("cpu"), each) for each in reports]]
    dist.broadcast_object_list(sent, src=dist.get_global_rank(pp, 0), group=pp)
    return [_on(cpu.device(), each) for each in sent[0]] if pp.rank() == pp.size() - 1 else reports


def _on(device: torch.device, report: Any) -> Any:
    """A report, with its tensors on `device`."""
    if isinstance(report, dict):
        return {name: _on(device, each) for name, each in report.items()}
    return report.to(device) if isinstance(report, torch.Tensor) else report
