"""The truth: one process, no pipeline, no sharding, no accumulation, in float64 where the model allows.

It shares the model with the layouts that are compared with it, and no line of the package's step: forward of the whole
batch, the sum of losses / N, backward, clip, torch's optimizer. What is no sum over samples (balancing losses of
experts, means over micro-batches) is taken micro-batch by micro-batch, and the truth says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megaaccum.distributed import groups as process_groups
from megaaccum.errors import ConfigError
from megaaccum.lab.verification import borders
from megaaccum.lab.verification import subject as subjects
from megaaccum.lab.verification.case import Case, Lane
from megaaccum.lab.verification.records import GRADIENT, MODEL, TrueStep, Truth
from megaaccum.model import names
from megaaccum.optim import lr_schedule
from megaaccum.step.seeds import SampleSeeds

SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative distance between the gradient of the whole batch and the sum of those of its parts beyond which samples are
said to depend on each other. A float64 model that casts parameters to FP32 inside rounds by 1e-8."""
_BYTES_PER_ELEMENT = 8 * 7
"""Parameter, gradient, the step's sum, the weights of before, two moments, and as much again in transit."""


def truth_of(case: Case, lane: Lane, steps: int, *, keep_parts: bool = False) -> Truth:
    """Of `steps` steps of a case, in a world of one rank; keep_parts: with each micro-batch's gradient of the first."""
    try:
        process = OneProcess(case, lane)
        if problem := process.problem():
            return Truth({}, problem=problem)
        truth = Truth(process.masters_now(), notes=process.notes)
        for number in range(steps):
            truth.steps.append(process.take(number, truth, keep_parts=keep_parts and number == 0))
            if truth.problem:
                break
        return truth
    except (MemoryError, RuntimeError) as error:  # torch's allocator raises a RuntimeError on a CPU
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        return Truth({}, problem=f"one process does not hold the model in {lane} ({error}): make it smaller (--shrink)")
    except ConfigError as error:
        return Truth({}, problem=str(error))


class OneProcess:
    """A plain training loop. 16-bit models have FP32 masters and add gradients in FP32."""

    def __init__(self, case: Case, lane: Lane):
        self.case, self.lane, self.plan = case, lane, case.one_process(lane)
        layout = case.plan()
        self.count = layout.batch.num_microbatches * layout.layout.dp
        self._keys = layout.config.step
        self.subject = subjects.of(case)
        process_groups.destroy()
        built = process_groups.build(self.plan.layout, timeout_minutes=5)
        self.module = self.subject.whole(self.plan, built)
        self._seeds = SampleSeeds(self.plan, built, [self.module] if case.own is None else [])
        self.named = [(name, param) for name, param in _named(self.module)]
        self.trained = [(name, param) for name, param in self.named if param.requires_grad]
        self.config: Any = getattr(self.module, "config", None)
        half = lane in ("bf16", "fp16")
        self.masters = {name: param.detach().float().clone() if half else param.detach() for name, param in self.named}
        self.adam = self.subject.optimizer([(name, self.masters[name]) for name, _ in self.trained], self.plan)
        has_schedule = layout.config.optimizer.lr and layout.config.run.train_iters  # as the engine's
        self._schedule = lr_schedule.build(self.adam, layout.config, layout.ramp) if has_schedule else None
        self.notes: list[str] = []
        self._scale = _LossScale(layout.config.step) if lane == "fp16" else None
        self._rounding = 0.0

    # --- can anything be verified ---

    def problem(self) -> str:
        """Why no step of this model can be compared; empty where one can."""
        needed = sum(param.numel() for _, param in self.named) * _BYTES_PER_ELEMENT
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            return (
                f"one process would need {needed / 2**30:.1f} GiB for the model in {self.lane}, and"
                f" {free / 2**30:.1f} GiB"
                " are free: make it smaller (--shrink, or fewer layers)"
            )
        return self._what_differs_between_two_forwards()

    @contextmanager
    def _seeded(self, step: int, microbatch: int) -> Iterator[None]:
        """Around a forward, as the layout seeds it; a model of a user's own draws from what it finds, so that its noise
        is seen."""
        if self.case.own is not None:
            yield
            return
        with self._seeds.flush(step):
            self._seeds.begin_forward(0, microbatch)
            yield

    def _what_differs_between_two_forwards(self) -> str:
        """The first module, in the order of the calls, whose output differs when the same micro-batch comes again."""
        batch = self.subject.microbatches(0, self.count)[0]
        outputs: list[list[tuple[str, list[torch.Tensor]]]] = []
        for _ in range(2):
            with torch.no_grad(), self._seeded(0, 0), _outputs_of(self.module) as seen:
                self._loss(dict(batch) if isinstance(batch, dict) else batch)
            outputs.append(seen)
        for (name, first), (_, again) in zip(*outputs, strict=False):
            if any(not torch.equal(one, other) for one, other in zip(first, again, strict=False)):
                module = self.module.get_submodule(name)
                shown = name.removeprefix("module.") or "the model"
                return (
                    f"the model is not deterministic: {shown} ({type(module).__name__}) gives another output when the"
                    " same micro-batch comes again. Switch its randomness off (dropout 0), or have it depend on the"
                    " micro-batch alone"
                )
        return ""

    # --- a step ---

    def take(self, number: int, truth: Truth, *, keep_parts: bool) -> TrueStep:
        batches = self.subject.microbatches(number, self.count)
        scale = self._scale.scale if self._scale else 1.0
        lr = float(self.adam.param_groups[0]["lr"])
        grads, loss, total = self._gradient(number, batches, scale, truth, keep_parts=keep_parts)
        overflows = self.case.overflow is not None and self.case.overflow[0] == number
        overflows = overflows or any(not bool(grad.isfinite().all()) for grad in grads.values())
        if self._scale:
            self._scale.update(overflows)
        if overflows:
            return self._as_it_was(loss, total, lr, scale)
        norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
        most = self.plan.config.optimizer.clip_grad
        clip = min(most / (norm + 1e-6), 1.0) if most > 0 else 1.0
        clipped = {name: grad * clip for name, grad in grads.items()}
        truth.clip = clip if number == 0 else truth.clip
        self._update(clipped)
        step = TrueStep(
            loss, total, norm, lr, scale, False, amplification=self._amplification(grads), rounding=self._rounding
        )
        step.tensors = self._state() | {GRADIENT: {name: grad.double() for name, grad in clipped.items()}}
        step.buffers = self._move_biases()
        return step

    def _as_it_was(self, loss: float, total: float, lr: float, scale: float) -> TrueStep:
        return TrueStep(loss, total, float("inf"), lr, scale, True, tensors=self._state(), buffers=self._buffers())

    def _gradient(
        self, number: int, batches: list[Any], scale: float, truth: Truth, *, keep_parts: bool
    ) -> tuple[dict[str, torch.Tensor], float, float]:
        """(gradient by name, loss, N). Micro-batch by micro-batch first, which shows what each adds; then, where all
        samples are independent, in one forward of the whole batch, whose gradient it is."""
        for batch in batches:
            if isinstance(batch, dict):
                batch.pop("overflows", None)
        with torch.no_grad():
            total = sum(self._loss(batch)[1] for batch in batches)
        self._forget_tokens()
        self._sizes = {name: 0.0 for name, _ in self.trained}
        grads: dict[str, torch.Tensor] = {}
        loss = 0.0
        for index, batch in enumerate(batches):
            looked_at = self.module if keep_parts else torch.nn.Identity()
            of_layers = borders.of_layers(looked_at, scale / self._divisor(total, len(batches)))
            with self._seeded(number + 1, index), of_layers as layers:
                value, part = self._backward(batch, total, scale, len(batches))
            loss += value
            for name, grad in part.items():
                grads[name] = grads[name] + grad if name in grads else grad
                self._sizes[name] += float(grad.norm())
            if keep_parts:
                truth.parts.append({name: grad.double() for name, grad in part.items()})
                with torch.no_grad():
                    truth.weights.append(self._loss(batch)[1])
                truth.layers.append(layers)
        together = subjects.whole_batch(batches) if self._is_sum_over_samples() else None
        if together is None:
            return grads, loss, total
        value, whole = self._backward(together, total, scale, 1)
        truth.whole = True
        self._note_rounding(grads, whole, truth)
        if problem := self._samples_depend(grads, whole):
            truth.problem = problem
        return whole, value, total

    def _is_sum_over_samples(self) -> bool:
        """Whether the step's gradient is a sum over samples, so that the whole batch can go through at once."""
        if self.plan.batch.loss_norm != "token" and self.case.own is None:
            return False
        model = self.plan.config.model
        if self.case.own is None and (model.hidden_dropout or model.attention_dropout):
            return False  # each sample has masks of its own
        return not (getattr(self.config, "num_moe_experts", None) or getattr(self.config, "mtp_num_layers", None))

    def _note_rounding(self, parts: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], truth: Truth) -> None:
        """How far a model's own rounding takes the sum of the parts from the whole; beside the other gradients where
        one is tiny. What one step rounds, the next ones begin with."""
        least = 1e-3 * (sum(float(grad.square().sum()) for grad in whole.values()) / max(len(whole), 1)) ** 0.5
        errors = {
            name: float((parts[name] - grad).norm()) / max(float(grad.norm()), least, 1e-300)
            for name, grad in whole.items()
        }
        self._rounding = max(self._rounding, *errors.values())
        rounded = [name for name, error in errors.items() if error > 1e-10]
        if self.lane == "fp64" and rounded and not truth.notes:
            truth.notes.append(f"the model computes in part in FP32, first in {rounded[0]}: float64 is held to that")

    def _samples_depend(self, parts: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> str:
        distance = sum(float((parts[name] - whole[name]).double().square().sum()) for name in whole)
        size = sum(float(grad.double().square().sum()) for grad in whole.values())
        limit = SAME.get(next(iter(whole.values())).dtype, 0.5) if self.lane in ("fp64", "fp32") else 0.5
        error = (distance / max(size, 1e-300)) ** 0.5
        if error <= limit:
            return ""
        return (
            f"samples depend on each other: in one process the gradient of the whole batch is {error:.1e} away from"
            f" the sum"
            " over its micro-batches. A loss that is weighed by a mean over its micro-batch, or a layer that mixes"
            " samples,"
            " has no accumulated step that equals the big batch: have the weights come with the data"
        )

    def _backward(self, batch: Any, total: float, scale: float, count: int) -> tuple[float, dict[str, torch.Tensor]]:
        """(loss / N, gradient by name) of one forward."""
        for _, param in self.named:
            param.grad = None
        value, weight = self._loss(batch)
        divisor = self._divisor(total, count)
        self._set_side_scales(batch, weight, divisor, scale, count)
        (value / divisor * scale).backward()
        grads = {
            name: (
                torch.zeros_like(self.masters[name]) if param.grad is None else param.grad.to(self.masters[name].dtype)
            )
            / scale
            for name, param in self.trained
        }
        return float(value.detach()) / divisor, grads

    def _divisor(self, total: float, count: int) -> float:
        """N, or the number of micro-batches."""
        return total if self.plan.batch.loss_norm == "token" or self.case.own is not None else float(count)

    def _set_side_scales(self, batch: Any, weight: float, divisor: float, scale: float, count: int) -> None:
        """Balancing losses are a mean over micro-batches where N is known before the backward, and weighed by all
        tokens / N where not; Megatron multiplies them by the tokens. Prediction layers are sums over tokens, as the
        loss is."""
        tokens = batch.get("tokens", batch.get("input_ids")) if isinstance(batch, dict) else None
        rows = tokens.numel() if isinstance(tokens, torch.Tensor) else 1
        known = self.case.own is None or hasattr(self.case.own.forward_step_func, "weights")
        balance = scale / (count * rows) if known else scale / divisor
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(balance, dtype=torch.float64))
        per_token = divisor
        if self.case.own is None and self.plan.batch.loss_norm != "token":
            per_token = divisor * max(float(batch["loss_mask"].sum()), 1.0)
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale / per_token, dtype=torch.float64))

    def _loss(self, batch: Any) -> tuple[torch.Tensor, float]:
        return self.subject.loss(self.plan, self.module, batch)

    def _update(self, grads: dict[str, torch.Tensor]) -> None:
        for name, _ in self.trained:
            self.masters[name].grad = grads[name].to(self.masters[name].dtype)
        self.adam.step()
        for name, param in self.trained:
            param.data.copy_(self.masters[name])
        if self._schedule is not None:
            self._schedule.step()

    # --- what is compared ---

    def masters_now(self) -> dict[str, torch.Tensor]:
        return {name: self.masters[name].detach().double().clone() for name, _ in self.named}

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        state: dict[str, dict[str, torch.Tensor]] = {
            "param": self.masters_now(),
            MODEL: {name: param.detach().double().clone() for name, param in self.named},
        }
        for name, _ in self.trained:
            for kind, value in self.adam.state.get(self.masters[name], {}).items():
                if kind in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(kind, {})[name] = value.double().clone()
        return state

    def _amplification(self, grads: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: self._sizes[name] / max(float(grad.norm()), 1e-300) for name, grad in grads.items()}

    # --- routers ---

    def _routers(self) -> list[Any]:
        return [each for each in self.module.modules() if getattr(each, "local_tokens_per_expert", None) is not None]

    def _forget_tokens(self) -> None:
        for router in self._routers():
            router.local_tokens_per_expert.zero_()

    def _move_biases(self) -> dict[str, torch.Tensor]:
        """Aux-loss-free balancing: towards the experts that had fewer tokens than the mean."""
        for router in self._routers():
            if getattr(router, "expert_bias", None) is not None:
                had = router.local_tokens_per_expert
                router.expert_bias.add_(torch.sign(had.mean() - had) * self.config.moe_router_bias_update_rate)
        return self._buffers()

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: each.double().clone() for name, each in names.named_buffers([self.module])}


class _LossScale:
    """Megatron's rule: halved at the `hysteresis`-th overflow and at each further one; doubled after a window."""

    def __init__(self, keys: Any):
        self.scale = float(keys.loss_scale or keys.initial_loss_scale)
        self._fixed, self._left = keys.loss_scale is not None, int(keys.hysteresis)

    def update(self, overflow: bool) -> None:
        if overflow and not self._fixed:
            self._left -= 1
            self.scale = self.scale / 2 if self._left <= 0 else self.scale


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By names in the whole model. A plain module's are its own."""
    yield from names.named_parameters([module])


@contextmanager
def _outputs_of(model: torch.nn.Module) -> Iterator[list[tuple[str, list[torch.Tensor]]]]:
    """Collects (name, tensors) of each module's output, innermost first."""
    seen: list[tuple[str, list[torch.Tensor]]] = []

    def note(name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            given = output if isinstance(output, tuple | list) else [output]
            seen.append((name, [each.detach().clone() for each in given if isinstance(each, torch.Tensor)]))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
