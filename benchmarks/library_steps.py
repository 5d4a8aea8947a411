"""Optimizer steps of the libraries themselves, as their documentation has them, noted as a verification notes ours.

What is ours here is the model's initial weights, samples, and stand-ins for layers that need a GPU (norms, cores of
attention); none of the corrections that megaaccum makes. Run on ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import library_models as models
from benchmarks import megatron_reference
from megaaccum.distributed import groups as process_groups
from megaaccum.lab.verification import subject as subjects
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.observe import piece_of, place_in
from megaaccum.lab.verification.records import GRADIENT, MODEL, Observed, Piece, Step
from megaaccum.model import names
from megaaccum.platform import cpu
from megaaccum.pretrain.model import gpt
from megaaccum.upstream import megatron


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a library is used.

    config: fields of Megatron's model configuration. ddp, optimizer: of its DistributedDataParallel and optimizer.
    frozen: parameters that do not train, a regular expression of names in the whole model. json: of DeepSpeed's
    configuration. loop: its training loop, a name in LOOPS."""

    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    frozen: str = ""
    json: dict[str, Any] = field(default_factory=dict)
    loop: str = "documented"


# --- Megatron-core ----------------------------------------------------------------------------------------------------


def of_megatron(case: Case, steps: int, options: Options) -> Observed:
    """DistributedDataParallel, the schedule, finalize_model_grads and the optimizer of megatron-core."""
    run = _Megatron(case, options)
    seen = Observed(dist.get_rank(), place_in(run.groups), run.weights())
    seen.steps += [run.take(number) for number in range(steps)]
    return seen


class _Megatron:
    def __init__(self, case: Case, options: Options):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.plan, self.subject = case.plan(), subjects.subject_of(case)
        process_groups.destroy()
        self.groups = process_groups.build(self.plan.layout, timeout_minutes=5)
        self.config: Any = gpt.transformer_config(self.plan)
        self.config.moe_aux_loss_coeff = self.plan.config.model.moe_aux_loss_coeff  # as written
        for name, value in options.config.items():
            setattr(self.config, name, value)
        gpt.seed_dropout(self.groups, seed=self.plan.config.run.seed)
        self.chunks = [self._chunk(number, subjects.vocab_size_of(case)) for number in range(self.plan.layout.vpp)]
        for name, param in names.named_parameters(self.chunks):
            if options.frozen and re.search(options.frozen, name):
                param.requires_grad_(False)
        ddp = DistributedDataParallelConfig(**options.ddp)
        self.model = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        keys = self.plan.config.optimizer
        settings = OptimizerConfig(
            optimizer="adam", lr=keys.lr, weight_decay=keys.weight_decay, adam_beta1=keys.adam_beta1,
            adam_beta2=keys.adam_beta2, adam_eps=keys.adam_eps, clip_grad=keys.clip_grad,
            use_distributed_optimizer=ddp.use_distributed_optimizer, **options.optimizer,
        )  # fmt: skip
        with cpu.cuda_type_names():
            self.optimizer = get_megatron_optimizer(settings, self.model, use_gloo_process_groups=False)
        OptimizerParamScheduler(  # which says too what is not decayed
            self.optimizer, init_lr=keys.lr, max_lr=keys.lr, min_lr=keys.lr, lr_warmup_steps=0, lr_decay_steps=1,
            lr_decay_style="constant", start_wd=keys.weight_decay, end_wd=keys.weight_decay, wd_incr_steps=1,
            wd_incr_style="constant",
        )  # fmt: skip
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if ddp.overlap_grad_reduce:
            no_sync = [each.no_sync for each in self.model]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._gradient: list[Piece] = []
        for each in self._inner():
            each.optimizer.register_step_pre_hook(self._note_gradient)

    def _chunk(self, number: int, vocab_size: int) -> Any:
        chunk = gpt.build_chunk(self.plan, self.groups, self.config, vocab_size, number)
        for param in chunk.parameters():
            param.data = param.data.to(self.config.params_dtype)
        gpt.initialize(chunk, self.groups, seed=self.plan.config.run.seed)
        return chunk

    def _inner(self) -> list[Any]:
        """One, or those of dense and expert parameters."""
        every = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [each for each in every if each.optimizer is not None]

    def take(self, number: int) -> Step:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count, dp = self.plan.batch.num_microbatches, self.groups.dp
        mine = self.subject.microbatches(number, count * dp.size())[dp.rank() :: dp.size()]
        iterators = [iter([dict(each) for each in mine]) for _ in self.model]
        self._gradient = []
        for each in self.model:
            each.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=megatron_reference.forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=count,
            seq_length=self.plan.config.model.seq_length,
            micro_batch_size=self.plan.batch.micro_batch_size,
            forward_only=False,
        )
        lr = self.optimizer.param_groups[0]["lr"]
        with cpu.cuda_type_names():
            _, norm, _ = self.optimizer.step()
        loss, weight = self._loss([each["lm loss"].tolist() for each in reports])
        step = Step(loss, weight, float(norm), lr, 1.0, False)
        weights = self.weights()
        step.tensors = {GRADIENT: self._gradient, "param": weights, MODEL: weights}
        step.buffers = {name: each.double().clone() for name, each in names.named_buffers(self.chunks)}
        return step

    def _loss(self, mine: list[list[float]]) -> tuple[float, float]:
        """(loss, its weight) of all ranks' micro-batches. mine: each one's (sum, number of tokens), of this rank's part
        of the sequences."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self.groups.tp.rank(), self.groups.dp.rank(), mine))
        parts: dict[tuple[int, int], list[float]] = {}
        for tp, dp, rank in every:
            for number, (value, tokens) in enumerate(rank if tp == 0 else ()):
                had = parts.setdefault((dp, number), [0.0, 0.0])
                had[0], had[1] = had[0] + value, had[1] + tokens
        if self.plan.batch.loss_norm == "token":
            total = sum(tokens for _, tokens in parts.values())
            return sum(value for value, _ in parts.values()) / total, total
        return sum(value / tokens for value, tokens in parts.values()) / len(parts), float(len(parts))

    def weights(self) -> list[Piece]:
        return [self._piece(name, param, param, 0) for name, param in names.named_parameters(self.chunks)]

    def _note_gradient(self, *_: Any) -> None:
        """Clipped, just before the first inner optimizer's step."""
        if self._gradient:
            return
        for name, param in names.named_parameters(self.chunks):
            grad = getattr(param, "main_grad", None)
            if grad is None:
                continue
            start, stop = self._share(param)
            if stop > start:
                self._gradient.append(self._piece(name, param, grad.view(-1)[start:stop], start))

    def _share(self, param: Any) -> tuple[int, int]:
        """The run of the flattened parameter that this rank updates."""
        if not self.model[0].ddp_config.use_distributed_optimizer:
            return 0, param.numel()
        found = [megatron.share(each, param) for each in self._inner()]
        return next((each for each in found if each[1] > each[0]), (0, 0))

    def _piece(self, name: str, param: Any, values: torch.Tensor, start: int) -> Piece:
        return piece_of(self.chunks[0], self.groups, name, param, values, start)


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def of_deepspeed(case: Case, steps: int, options: Options) -> Observed:
    """Steps of DeepSpeed's engine over a user's model, whose optimizer is `library_models.sgd`."""
    run = DeepSpeed(case, options)
    seen = Observed(dist.get_rank(), place_in(run.groups), run.pieces(run.model()))
    seen.steps += [run.take(number) for number in range(steps)]
    return seen


class DeepSpeed:
    """An engine of DeepSpeed's, on this rank."""

    def __init__(self, case: Case, options: Options):
        import deepspeed

        assert case.user_model is not None and case.user_model.optimizer is not None
        self.plan, self.subject = case.plan(), subjects.subject_of(case)
        self._model, self._loop = case.user_model, options.loop
        process_groups.destroy()
        self.groups = process_groups.build(self.plan.layout, timeout_minutes=5)
        self.chunk: Any
        (self.chunk,) = self.subject.chunks(self.plan, self.groups)
        json = {
            "train_micro_batch_size_per_gpu": self.plan.batch.micro_batch_size,
            "gradient_accumulation_steps": self.plan.batch.num_microbatches,
            "gradient_clipping": self.plan.config.optimizer.clip_grad,
            "zero_allow_untested_optimizer": True,
            **options.json,
        }
        trained = [param for param in self.chunk.parameters() if param.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=self.chunk, optimizer=case.user_model.optimizer(trained), config=json
        )
        self._norm = float("nan")

    def take(self, number: int) -> Step:
        count, dp = self.plan.batch.num_microbatches, self.groups.dp
        every = self.subject.microbatches(number, count * dp.size())
        sums = LOOPS[self._loop](self, every[dp.rank() :: dp.size()])
        gathered: list[Any] = [None] * dp.size()
        dist.all_gather_object(gathered, sums)
        parts = list(itertools.chain(*gathered))
        weight = sum(each for _, each in parts)
        norm = self.engine.get_global_grad_norm()
        step = Step(
            sum(value for value, _ in parts) / weight, weight, self._norm if norm is None else float(norm), models.LR,
            1.0, False,
        )  # fmt: skip
        step.tensors = {
            GRADIENT: self.pieces(self._read(models.GRADIENT)), "param": self.pieces(self._read("")),
            MODEL: self.pieces(self.model()),
        }  # fmt: skip
        return step

    # --- what a loop does ---

    def loss_of(self, batch: Any) -> tuple[torch.Tensor, float]:
        """(sum, weight) of a micro-batch."""
        output, loss_func = self._model.forward_step_func(iter([batch]), self.engine)
        total, weight, _ = loss_func(output)
        return total, float(weight)

    def step(self) -> None:
        """ZeRO-0 reports no norm in FP32: what it clips by is the norm of these."""
        grads = [param.grad for param in self.chunk.parameters() if param.grad is not None]
        self._norm = float(sum(float(grad.double().square().sum()) for grad in grads)) ** 0.5
        self.engine.step()

    # --- what is read after it ---

    def _named(self) -> list[tuple[str, Any]]:
        return list(names.named_parameters([self.chunk]))

    def model(self) -> dict[str, torch.Tensor]:
        """The weights that the next forward reads."""
        import deepspeed

        is_cut = self.engine.zero_optimization_stage() == 3
        with deepspeed.zero.GatheredParameters(list(self.chunk.parameters()), enabled=is_cut):
            return {name: param.detach().double().clone() for name, param in self._named()}

    def _read(self, state: str) -> dict[str, torch.Tensor]:
        """A state of the optimizer by name, or its masters where no state is named; nothing where DeepSpeed's functions
        read none (ZeRO-0 in BF16)."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        own = isinstance(self.engine.optimizer, torch.optim.Optimizer)  # ZeRO-0 in FP32: the user's
        found: dict[str, Any] = {}
        for name, param in self._named():
            if own or not param.requires_grad:
                of_param = self.engine.optimizer.state[param] if own and param.requires_grad else {}
                found[name] = of_param.get(state, torch.zeros_like(param)) if state else param.detach()
            else:
                found[name] = safe_get_full_optimizer_state(param, state) if state else safe_get_full_fp32_param(param)
        if any(each is None for each in found.values()):
            return {}
        trained = {name: each for name, each in found.items() if dict(self._named())[name].requires_grad}
        return {name: each.double().clone() for name, each in (trained if state else found).items()}

    def pieces(self, tensors: dict[str, torch.Tensor]) -> list[Piece]:
        params = dict(self._named())
        return [piece_of(self.chunk, self.groups, name, params[name], each, 0) for name, each in tensors.items()]


Sums = list[tuple[float, float]]
"""(sum of losses, weight) of each micro-batch."""


def _documented(run: DeepSpeed, batches: list[Any]) -> Sums:
    """forward, backward, step for each micro-batch."""
    return [_one(run, batch) for batch in batches]


def _one(run: DeepSpeed, batch: Any) -> tuple[float, float]:
    total, weight = run.loss_of(batch)
    run.engine.backward(total / weight)
    run.step()
    return float(total.detach()), weight


def _boundary(run: DeepSpeed, batches: list[Any]) -> Sums:
    """set_gradient_accumulation_boundary in place of the engine's own count, and one step."""
    sums = []
    for number, batch in enumerate(batches):
        run.engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        sums.append(_backward(run, batch))
    run.step()
    return sums


def _backward(run: DeepSpeed, batch: Any, divisor: float = 1.0) -> tuple[float, float]:
    total, weight = run.loss_of(batch)
    run.engine.backward(total / weight / divisor)
    return float(total.detach()), weight


def _evaluating(run: DeepSpeed, batches: list[Any]) -> Sums:
    """An evaluation before the first micro-batch, and one after it."""
    _evaluate(run, batches[-1])
    sums = [_one(run, batches[0])]
    _evaluate(run, batches[-1])
    return sums + [_one(run, batch) for batch in batches[1:]]


def _evaluate(run: DeepSpeed, batch: Any) -> None:
    run.engine.eval()
    with torch.no_grad():
        run.loss_of(batch)
    run.engine.train()


def _weighed(run: DeepSpeed, batches: list[Any]) -> Sums:
    """Sums of losses, multiplied by a user who knows the engine's divisors: the number of micro-batches and of
    ranks."""
    weight = torch.tensor(sum(float(batch["loss_mask"].sum()) for batch in batches))
    dist.all_reduce(weight)
    found = []
    for batch in batches:
        total, own = run.loss_of(batch)
        run.engine.backward(total * (len(batches) * dist.get_world_size() / float(weight)))
        run.step()
        found.append((float(total.detach()), own))
    return found


def _unsynced(run: DeepSpeed, batches: list[Any]) -> Sums:
    """no_sync() around all but the last backward; the user divides (gradient_accumulation_steps is 1)."""
    sums = []
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else run.engine.no_sync():
            sums.append(_backward(run, batch, len(batches)))
    run.step()
    return sums


def _coalesced(run: DeepSpeed, batches: list[Any]) -> Sums:
    """coalesce_grad_reduction() around all backwards; the user divides (gradient_accumulation_steps is 1)."""
    with run.engine.coalesce_grad_reduction():
        sums = [_backward(run, batch, len(batches)) for batch in batches]
    run.step()
    return sums


def _unmanaged(run: DeepSpeed, batches: list[Any]) -> Sums:
    """managed_gradient_accumulation false: backwards, and one step."""
    sums = [_backward(run, batch) for batch in batches]
    run.step()
    return sums


def _torch_style(run: DeepSpeed, batches: list[Any]) -> Sums:
    """loss.backward() in place of the engine's."""
    sums = []
    for batch in batches:
        total, weight = run.loss_of(batch)
        (total / weight).backward()
        run.step()
        sums.append((float(total.detach()), weight))
    return sums


def _in_halves(run: DeepSpeed, batches: list[Any]) -> Sums:
    """Two backwards for each step(): half of the loss each, from forwards of their own."""
    sums = []
    for batch in batches:
        _backward(run, batch, 2.0)
        sums.append(_backward(run, batch, 2.0))
        run.step()
    return sums


def _from_one_graph(run: DeepSpeed, batches: list[Any]) -> Sums:
    """Two backwards of one forward for each step(): half of the loss each, the first with retain_graph."""
    sums = []
    for batch in batches:
        total, weight = run.loss_of(batch)
        run.engine.backward(total / weight / 2, retain_graph=True)
        run.engine.backward(total / weight / 2)
        run.step()
        sums.append((float(total.detach()), weight))
    return sums


def _forwards_first(run: DeepSpeed, batches: list[Any]) -> Sums:
    """All forwards, then all backwards, as under a pipeline."""
    losses = [run.loss_of(batch) for batch in batches]
    for total, weight in losses:
        run.engine.backward(total / weight)
        run.step()
    return [(float(total.detach()), weight) for total, weight in losses]


LOOPS: dict[str, Callable[[DeepSpeed, list[Any]], Sums]] = {
    "documented": _documented, "boundary": _boundary, "evaluating": _evaluating, "weighed": _weighed,
    "no_sync": _unsynced, "coalesced": _coalesced, "unmanaged": _unmanaged, "torch style": _torch_style,
    "in halves": _in_halves, "from one graph": _from_one_graph, "forwards first": _forwards_first,
}  # fmt: skip
