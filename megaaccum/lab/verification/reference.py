"""The reference: one process, no pipeline, no sharding, no accumulation, in float64 if the model allows.

It shares the model with the layouts that are compared with it, and no line of the package's step: forward of the full
global batch, the sum of losses / N, backward, clip, torch's optimizer, Megatron's learning-rate schedule. Terms that
are no sum over samples (balancing losses of experts, means over micro-batches) are taken micro-batch by micro-batch.

`PlainLoop` is the loop alone; the parity tests and the fuzz put their own batches through it. `reference_of` puts the
micro-batches of a case through it and checks first that its step can be compared at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megaaccum.config import Plan
from megaaccum.distributed import groups as process_groups
from megaaccum.errors import ConfigError, is_for_memory, raise_problems
from megaaccum.lab.verification import borders, subject
from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.records import GRADIENT, KINDS, MODEL, Reference, ReferenceStep
from megaaccum.model import names
from megaaccum.model.unfit import module_problems
from megaaccum.optim import by_pattern
from megaaccum.step.seeds import SampleSeeds
from megaaccum.upstream import megatron

SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative distance between the gradient of the full batch and the sum over its micro-batches beyond which samples
depend on each other. A float64 model that casts parameters to FP32 rounds by 1e-8."""
_BYTES_PER_ELEMENT = 8 * 7
"""Parameter, gradient, the step's sum, the weights before it, two moments, and as much again in transit."""

Gradients = dict[str, torch.Tensor]
"""By the parameter's name in the whole model, in the precision of its master."""


class PlainLoop:
    """A plain training loop over a whole model in one process.

    16-bit parameters have FP32 masters, and their gradients are added in FP32.

    Args:
        model: the whole model.
        loss: returns (sum of the losses, weight) of a micro-batch.
        means: the loss of a micro-batch is a mean over its tokens, so N is the number of micro-batches; default: N is
            the sum of weights.
        optimizer: makes an optimizer of (name, master) pairs; default: none, the loop makes gradients only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any], tuple[torch.Tensor, float]],
        *,
        means: bool = False,
        optimizer: Callable[[list[tuple[str, torch.Tensor]]], torch.optim.Optimizer] | None = None,
    ):
        megatron.mend_padding_masks()
        self.model, self.loss, self._means = model, loss, means
        self.named: list[tuple[str, torch.nn.Parameter]] = list(names.named_parameters([model]))  # type: ignore[list-item]
        self.trained = [(name, param) for name, param in self.named if param.requires_grad]
        self.masters = {
            name: param.detach().float().clone() if param.element_size() == 2 else param.detach()
            for name, param in self.named
        }
        if optimizer is not None:
            self.adam = optimizer([(name, self.masters[name]) for name, _ in self.trained])

    def divisor(self, total: float, count: int) -> float:
        """N of a step of `count` micro-batches whose weights add up to `total`."""
        return float(count) if self._means else total

    def backward(
        self, batch: Any, total: float, count: int, *, scale: float = 1.0, share: float | None = None
    ) -> tuple[float, Gradients]:
        """Forward and backward of a micro-batch. Returns (its part of the loss, its part of the gradient).

        total, count: see `divisor`. scale: the loss scale, which is divided out. share: of the micro-batch in the mean
        of balancing losses; default: 1 / count."""
        for _, param in self.named:
            param.grad = None
        value, _ = self.loss(batch)
        divisor = self.divisor(total, count)
        self._scale_side_losses(batch, divisor, scale, 1 / count if share is None else share)
        (value / divisor * scale).backward()
        grads = {name: torch.zeros_like(self.masters[name]) for name, _ in self.trained}
        for name, param in self.trained:
            if param.grad is not None:
                grads[name] = param.grad.to(self.masters[name].dtype) / scale
        return float(value.detach()) / divisor, grads

    def _scale_side_losses(self, batch: Any, divisor: float, scale: float, share: float) -> None:
        """Set Megatron's scales: a balancing loss is multiplied by the tokens of its micro-batch, and the loss of
        prediction layers is a sum over tokens, as the main one."""
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale * share / num_tokens(batch), dtype=torch.float64))
        tokens = max(float(batch["loss_mask"].sum()), 1.0) if self._means else 1.0
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale / (divisor * tokens), dtype=torch.float64))

    def update(self, grads: Gradients) -> None:
        """Step the optimizer on `grads`, and move the biases of routers."""
        for name, _ in self.trained:
            self.masters[name].grad = grads[name].to(self.masters[name].dtype)
        self.adam.step()
        for name, param in self.trained:
            param.data.copy_(self.masters[name])
        for router in self._routers():
            # Balancing without a loss: towards the experts that had fewer tokens than the mean.
            if getattr(router, "expert_bias", None) is not None:
                config: Any = self.model.config
                had = router.local_tokens_per_expert
                router.expert_bias.add_(torch.sign(had.mean() - had) * config.moe_router_bias_update_rate)

    def forget_tokens(self) -> None:
        """Reset the routers' counts of tokens per expert, before a step."""
        for router in self._routers():
            router.local_tokens_per_expert.zero_()

    def _routers(self) -> list[Any]:
        return [each for each in self.model.modules() if getattr(each, "local_tokens_per_expert", None) is not None]


def add(grads: Gradients, part: Gradients) -> None:
    """Add the gradient of a micro-batch to that of the ones before it."""
    for name, grad in part.items():
        grads[name] = grads[name] + grad if name in grads else grad


def norm_of(grads: Gradients) -> float:
    """The norm over all parameters."""
    return sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5


def clip_factor(norm: float, most: float) -> float:
    """The factor that clips a gradient to the norm `most`; 1 if that is 0."""
    return min(most / (norm + 1e-6), 1.0) if most > 0 else 1.0


def num_tokens(batch: Any) -> int:
    """Tokens of a micro-batch, masked or not, without padding; 1 if it has none."""
    fields = batch if isinstance(batch, dict) else {}
    if "padding_mask" in fields:
        return int((~fields["padding_mask"]).sum())
    tokens = fields.get("tokens", fields.get("input_ids"))
    return tokens.numel() if isinstance(tokens, torch.Tensor) else 1


def lr_schedule(adam: torch.optim.Optimizer, plan: Plan) -> OptimizerParamScheduler:
    """Megatron's schedule of a run whose steps all take the same batch; it counts samples."""
    keys, size, steps = plan.config.optimizer, plan.batch.global_batch_size, plan.config.run.train_iters
    decay = keys.lr_decay_samples or (keys.lr_decay_iters or steps) * size
    warmup: float = keys.lr_warmup_samples or (keys.lr_warmup_iters or 0) * size
    if keys.lr_warmup_fraction is not None:
        warmup = keys.lr_warmup_fraction * decay
    anneal = keys.lr_wsd_decay_samples or (keys.lr_wsd_decay_iters or 0) * size or None
    start, end = keys.start_weight_decay, keys.end_weight_decay
    return OptimizerParamScheduler(
        adam,
        init_lr=keys.lr_warmup_init, max_lr=keys.lr, min_lr=keys.min_lr, lr_warmup_steps=warmup, lr_decay_steps=decay,
        lr_decay_style=keys.lr_decay_style, start_wd=keys.weight_decay if start is None else start,
        end_wd=keys.weight_decay if end is None else end, wd_incr_steps=steps * size,
        wd_incr_style=keys.weight_decay_incr_style,
        wsd_decay_steps=anneal, lr_wsd_decay_style=keys.lr_wsd_decay_style,
    )  # fmt: skip


# --- the steps of a case ----------------------------------------------------------------------------------------------


def reference_of(case: Case, lane: Lane, steps: int, *, keep_parts: bool = False) -> Reference:
    """Take `steps` steps of a case, in a world of one rank. keep_parts: keep each micro-batch's gradient of the
    first."""
    try:
        run = _Run(case, lane)
        if problem := run.problem():
            return Reference({}, problem=problem)
        reference = Reference(run.masters_now())
        for number in range(steps):
            reference.steps.append(run.step(number, reference, keep_parts=keep_parts and number == 0))
            if reference.problem:
                break
        return reference
    except (MemoryError, RuntimeError) as error:
        if not is_for_memory(error):
            raise
        problem = f"one process does not hold the model in {lane} ({error}): make it smaller (--shrink)"
        return Reference({}, problem=problem)
    except ConfigError as error:
        return Reference({}, problem=str(error))


class _Run:
    """The model of a case in one process, and how far its own rounding goes."""

    def __init__(self, case: Case, lane: Lane):
        self.case, self.lane, self.plan = case, lane, case.one_process(lane)
        layout = case.plan()
        self.count = layout.batch.num_microbatches * layout.layout.dp
        self.subject = subject.subject_of(case)
        process_groups.destroy()
        built = process_groups.build(self.plan.layout, timeout_minutes=5)
        (model,) = self.subject.chunks(self.plan, built)
        raise_problems([*module_problems(model)])
        by_pattern.freeze(self.plan, [model])
        # The masks of dropout belong to samples, as tokens do: they are the only thing shared with the step.
        self._seeds = SampleSeeds(self.plan, built, [model] if case.user_model is None else [])
        self.loop = PlainLoop(
            model,
            lambda batch: self.subject.loss(self.plan, model, batch),
            means=case.user_model is None and self.plan.batch.loss_norm != "token",
            optimizer=lambda named: self.subject.optimizer(named, self.plan),
        )
        has_schedule = layout.config.optimizer.lr and layout.config.run.train_iters  # as the engine's
        self._batch_size = layout.batch.global_batch_size
        self._schedule = lr_schedule(self.loop.adam, layout) if has_schedule else None
        self._scale = _LossScale(layout.config.step) if lane == "fp16" else None
        self._rounding = 0.0

    # --- whether anything can be verified ---

    def problem(self) -> str:
        """The reason why no step of this model can be compared; empty if one can."""
        needed = sum(param.numel() for _, param in self.loop.named) * _BYTES_PER_ELEMENT
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            return (
                f"one process would need {needed / 2**30:.1f} GiB for the model in {self.lane}, but"
                f" {free / 2**30:.1f} GiB are free: make it smaller (--shrink, or fewer layers)"
            )
        return self._difference_between_two_forwards()

    @contextmanager
    def _seeded(self, step: int, microbatch: int) -> Iterator[None]:
        """Seed a forward as the layout does. A user's model draws from the process' state, which shows its noise."""
        if self.case.user_model is not None:
            yield
            return
        with self._seeds.flush(step):
            self._seeds.begin_forward(0, microbatch)
            yield

    def _difference_between_two_forwards(self) -> str:
        """The first module, in the order of the calls, whose output differs if the same micro-batch comes again."""
        batch = self.subject.microbatches(0, self.count)[0]
        runs: list[list[tuple[str, list[torch.Tensor]]]] = []
        for _ in range(2):
            runs.append([])
            watched = borders.noting_outputs(self.loop.model, partial(_keep, runs[-1]))
            with torch.no_grad(), self._seeded(0, 0), watched:
                self.loop.loss(dict(batch) if isinstance(batch, dict) else batch)
        for (name, first), (_, again) in zip(*runs, strict=False):
            if any(not _repeats(one, other) for one, other in zip(first, again, strict=False)):
                module = self.loop.model.get_submodule(name)
                shown = name.removeprefix("module.") or "the model"
                return (
                    f"the model is not deterministic: {shown} ({type(module).__name__}) gives another output when the"
                    " same micro-batch comes again. Switch its randomness off (dropout 0), or have it depend on the"
                    " micro-batch alone"
                )
        return ""

    # --- a step ---

    def step(self, number: int, reference: Reference, *, keep_parts: bool) -> ReferenceStep:
        batches = self.subject.microbatches(number, self.count)
        scale = self._scale.scale if self._scale else 1.0
        lr = float(self._schedule.get_lr({}) if self._schedule else self.loop.adam.param_groups[0]["lr"])
        grads, loss, total = self._gradient(number, batches, scale, reference, keep_parts=keep_parts)
        overflows = self.case.overflow is not None and self.case.overflow[0] == number
        overflows = overflows or any(not bool(grad.isfinite().all()) for grad in grads.values())
        if self._scale:
            self._scale.update(overflows)
        if overflows:
            buffers = self._buffers()
            return ReferenceStep(loss, total, float("inf"), lr, scale, True, tensors=self._state(), buffers=buffers)
        norm = norm_of(grads)
        clip = clip_factor(norm, self.plan.config.optimizer.clip_grad)
        clipped = {name: grad * clip for name, grad in grads.items()}
        reference.clip = clip if number == 0 else reference.clip
        self.loop.update(clipped)
        if self._schedule is not None:
            self._schedule.step(increment=self._batch_size)
        amplification = {name: self._sizes[name] / max(float(grad.norm()), 1e-300) for name, grad in grads.items()}
        return ReferenceStep(
            loss, total, norm, lr, scale, False, amplification=amplification, rounding=self._rounding,
            tensors=self._state() | {GRADIENT: {name: grad.double() for name, grad in clipped.items()}},
            buffers=self._buffers(),
        )  # fmt: skip

    def _gradient(
        self, number: int, batches: list[Any], scale: float, reference: Reference, *, keep_parts: bool
    ) -> tuple[Gradients, float, float]:
        """(gradient, loss, N). Micro-batch by micro-batch first, which shows what each adds; then, if all samples are
        independent, in one forward of the full batch, whose gradient it is."""
        for batch in batches:
            if isinstance(batch, dict):
                batch.pop("overflows", None)
        with torch.no_grad():
            total = sum(self.loop.loss(batch)[1] for batch in batches)
        self.loop.forget_tokens()
        self._sizes = {name: 0.0 for name, _ in self.loop.trained}
        grads: Gradients = {}
        loss = 0.0
        for index, batch in enumerate(batches):
            watched = self.loop.model if keep_parts else torch.nn.Identity()
            of_layers = borders.of_layers(watched, scale / self.loop.divisor(total, len(batches)))
            with self._seeded(number + 1, index), of_layers as layers:
                share = self._share(batch, total, len(batches))
                value, part = self.loop.backward(batch, total, len(batches), scale=scale, share=share)
            loss += value
            add(grads, part)
            for name, grad in part.items():
                self._sizes[name] += float(grad.norm())
            if keep_parts:
                reference.parts.append({name: grad.double() for name, grad in part.items()})
                with torch.no_grad():
                    reference.weights.append(self.loop.loss(batch)[1])
                reference.layers.append(layers)
        together = subject.whole_batch(batches) if self._is_sum_over_samples() else None
        if together is None:
            return grads, loss, total
        value, whole = self.loop.backward(together, total, 1, scale=scale)
        self._note_rounding(grads, whole, reference)
        if problem := self._samples_depend(grads, whole):
            reference.problem = problem
        return whole, value, total

    def _share(self, batch: Any, total: float, count: int) -> float:
        """Balancing losses are a mean over micro-batches if N is known before the backward; else each is weighed by all
        its tokens / N."""
        known = self.case.user_model is None or hasattr(self.case.user_model.forward_step_func, "weights")
        return 1 / count if known else num_tokens(batch) / self.loop.divisor(total, count)

    def _is_sum_over_samples(self) -> bool:
        """Whether the step's gradient is a sum over samples, so that the full batch can go through at once."""
        keys, config = self.plan.config.model, getattr(self.loop.model, "config", None)
        if self.case.user_model is None:
            has_masks = keys.hidden_dropout or keys.attention_dropout  # each sample has masks of its own
            if self.plan.batch.loss_norm != "token" or has_masks:
                return False
        return not (getattr(config, "num_moe_experts", None) or getattr(config, "mtp_num_layers", None))

    def _note_rounding(self, parts: Gradients, whole: Gradients, reference: Reference) -> None:
        """Note how far the model's own rounding takes the sum of the parts from the whole; beside the other gradients
        if one is tiny. The next steps start from what this one rounds."""
        least = 1e-3 * (sum(float(grad.square().sum()) for grad in whole.values()) / max(len(whole), 1)) ** 0.5
        errors = {
            name: float((parts[name] - grad).norm()) / max(float(grad.norm()), least, 1e-300)
            for name, grad in whole.items()
        }
        self._rounding = max(self._rounding, *errors.values())
        rounded = [name for name, error in errors.items() if error > 1e-10]
        if self.lane == "fp64" and rounded and not reference.notes:
            reference.notes.append(f"the model computes partly in FP32, first in {rounded[0]}: float64 is held to that")

    def _samples_depend(self, parts: Gradients, whole: Gradients) -> str:
        limit = SAME.get(next(iter(whole.values())).dtype, 0.5) if self.lane in ("fp64", "fp32") else 0.5
        error = norm_of({name: parts[name] - whole[name] for name in whole}) / max(norm_of(whole), 1e-300)
        if error <= limit:
            return ""
        return (
            f"samples depend on each other: in one process the gradient of the whole batch is {error:.1e} away from"
            " the sum over its micro-batches. A loss that is weighed by a mean over its micro-batch, or a layer that"
            " mixes samples, has no accumulated step that equals the full batch: take the weights from the data"
        )

    # --- the numbers that are compared ---

    def masters_now(self) -> dict[str, torch.Tensor]:
        return {name: self.loop.masters[name].detach().double().clone() for name, _ in self.loop.named}

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        state: dict[str, dict[str, torch.Tensor]] = {
            "param": self.masters_now(),
            MODEL: {name: param.detach().double().clone() for name, param in self.loop.named},
        }
        for name, _ in self.loop.trained:
            for kind, value in self.loop.adam.state.get(self.loop.masters[name], {}).items():
                if kind in KINDS:
                    state.setdefault(kind, {})[name] = value.double().clone()
        return state

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: each.double().clone() for name, each in names.named_buffers([self.loop.model])}  # type: ignore[list-item]


def _keep(outputs: list[tuple[str, list[torch.Tensor]]], name: str, tensors: list[torch.Tensor]) -> None:
    outputs.append((name, [each.detach().clone() for each in tensors]))


def _repeats(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the same input gave the same output; on a GPU, where kernels add in any order, but for rounding."""
    if one.is_cuda and one.is_floating_point():
        return torch.allclose(one, other, rtol=0.0, atol=64 * torch.finfo(one.dtype).eps * float(one.abs().max()))
    return torch.equal(one, other)


class _LossScale:
    """Megatron's loss scale: halved at the `hysteresis`-th overflow and at each further one. The window after which it
    doubles is longer than a verification."""

    def __init__(self, keys: Any):
        self.scale = float(keys.loss_scale or keys.initial_loss_scale)
        self._fixed, self._left = keys.loss_scale is not None, int(keys.hysteresis)

    def update(self, overflow: bool) -> None:
        if overflow and not self._fixed:
            self._left -= 1
            self.scale = self.scale / 2 if self._left <= 0 else self.scale
