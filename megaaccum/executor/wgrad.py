"""Linear layers whose weight gradient waits until the schedule asks for it.

Megatron-core's local linear layers compute input and weight gradient in one autograd function, so that a backward split
by autograd alone computes both of them twice. Here the backward computes the input gradient, and what the weight
gradient needs (the layer's input and its output's gradient) is put aside until `WeightGrads.compute`. The mathematics
and the collectives are those of megatron.core.tensor_parallel.layers (0.19). Biases and norms, whose gradients are
cheap, are not split: they are computed with the input gradient.

Transformer Engine's layers split their backward themselves where Megatron's delay_wgrad_compute is set; what theirs
leave for later is put aside in the same place.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from megaaccum.errors import ConfigError
from megaaccum.platform.replacing import replaced
from megaaccum.upstream import megatron, pytorch, te


@dataclass(slots=True)
class Product:
    """A linear layer's weight gradient, grad_output^T @ input. gather: tp ranks hold parts of the input's sequence."""

    input: torch.Tensor
    grad_output: torch.Tensor
    gather: dist.ProcessGroup | None
    coming: tuple[torch.Tensor, dist.Work] | None = None

    @torch.no_grad()
    def begin(self) -> None:
        """Start to gather the input: one product before its own, under which it travels."""
        if self.gather is not None and self.coming is None:
            self.coming = start_gather(self.input, self.gather)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        self.begin()
        whole = self.input
        if self.coming is not None:
            whole, work = self.coming
            work.wait()
        return flat_rows(self.grad_output).t().matmul(flat_rows(whole).to(self.grad_output.dtype))  # under autocast


AddWeightGrad = Callable[[torch.nn.Parameter, torch.Tensor], None]


class WeightGrads:
    """The weight gradients that one micro-batch's pass through one chunk still owes."""

    def __init__(self) -> None:
        self._owed: deque[tuple[torch.nn.Parameter, Callable[[], torch.Tensor], int]] = deque()
        self._uses: dict[tuple[int, int], int] = {}
        self._left: list[tuple[Any, queue.Queue[Any]]] = []

    def add(self, weight: torch.nn.Parameter, compute: Callable[[], torch.Tensor], source: int = 0) -> None:
        """Owe `compute()` to the gradient of `weight`, from the tokens of `source`."""
        self._owed.append((weight, compute, source))
        self._uses[id(weight), source] = self._uses.get((id(weight), source), 0) + 1

    def add_left(self, module: Any, left: queue.Queue[Any]) -> None:
        """Defer the weight gradient of a layer that splits its own backward."""
        self._left.append((module, left))

    def compute(self, add: AddWeightGrad | None = None) -> None:
        """Compute the deferred weight gradients, layer by layer, and `add` them to the parameters (None: by autograd).
        Their inputs are released on the way. The gradient of a weight that several layers share is added once for
        each source."""
        add = add or pytorch.add_by_autograd
        sums: dict[tuple[int, int], torch.Tensor] = {}
        self._begin_next()
        while self._owed:
            weight, compute, source = self._owed.popleft()
            self._begin_next()
            key, grad = (id(weight), source), compute()
            self._uses[key] -= 1
            if self._uses[key] or key in sums:
                grad = grad.to(pytorch.sum_dtype(weight))  # as autograd adds up the uses of a weight
            if key in sums:
                grad = grad + sums.pop(key)
            if self._uses[key]:
                sums[key] = grad
            else:
                with tokens_from(source):
                    add(weight, grad)
        while self._left:
            for weight, grad in te.delayed_gradients(*self._left.pop(0)):
                add(weight, grad)

    def _begin_next(self) -> None:
        if self._owed and isinstance(self._owed[0][1], Product):
            self._owed[0][1].begin()

    def nbytes(self) -> int:
        """Bytes that they need until they are computed, each storage once."""
        kept = [each for _, at, _ in self._owed if isinstance(at, Product) for each in (at.input, at.grad_output)]
        kept += [each for _, left in self._left for each in te.operands_of(left)]
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}.values())

    def __len__(self) -> int:
        return len(self._owed) + len(self._left)


@dataclass
class _Mode:
    """A mode of the process, like torch's grad mode, because autograd calls a layer's backward without arguments. Not
    thread-local: autograd has threads for GPUs."""

    receiver: WeightGrads | None = None
    """Receiver of the weight gradients of backwards that run now."""
    source: int = 0
    in_forward: bool = False


_mode = _Mode()


def tokens_from(number: int) -> AbstractContextManager[None]:
    """Context in which installed layers multiply tokens of source `number`, or gradients from them arrive: of one rank
    of several whose tokens an expert has at once."""
    return replaced(_mode, source=number)


def forward_pass() -> AbstractContextManager[None]:
    """Context of a forward, in which installed layers refuse a backward: its weight gradients would be taken for those
    of the loss."""
    return replaced(_mode, in_forward=True)


def source() -> int:
    """The source whose tokens are multiplied, or whose gradient arrives."""
    return _mode.source


@contextmanager
def put_aside(into: WeightGrads, splitting: Iterable[torch.nn.Module] = (), *, at_once: bool = False) -> Iterator[None]:
    """Backwards inside leave the weight gradients of installed layers in `into`.

    splitting: layers that split their own backward, the model's last first: gradients are handed on in this order, in
    which backends reduce them. at_once: weight gradients are computed before this ends, for callers that look at
    single micro-batches; W then finds nothing to do.
    """
    assert _mode.receiver is None, "weight gradients are put aside already"
    with replaced(_mode, receiver=None if at_once else into):
        yield
        for module in splitting:
            if (left := te.pop_delayed(module)) is not None:
                into.add_left(module, left)
        if at_once:
            into.compute()


def defer(weight: torch.nn.Parameter, compute: Callable[[], torch.Tensor], source: int = 0) -> None:
    """Call `compute()`, the gradient of `weight`, at the schedule's W, or at once if no schedule splits the backward.
    For the backward of a layer of one's own, which does not read the weight any more: a backend may release it when its
    gradient comes. source: whose tokens the layer multiplied (`tokens_from`)."""
    if _mode.receiver is not None:
        mark_put_off(weight)
        _mode.receiver.add(weight, compute, source)
    else:
        with tokens_from(source):
            pytorch.add_by_autograd(weight, compute())


def mark_put_off(weight: torch.nn.Parameter) -> None:
    """Say that the gradient of `weight` comes in W, on this rank as on all others. `install` and `defer` do; a layer of
    one's own that some ranks may skip in a step says so for its weights when it is built."""
    weight.is_put_off = True  # type: ignore[attr-defined]


def is_put_off(weight: torch.nn.Parameter) -> bool:
    """Whether the gradient of `weight` comes in W where the backward is split."""
    return getattr(weight, "is_put_off", False)


def is_splitting() -> bool:
    """Whether a backward that runs now puts weight gradients aside."""
    return _mode.receiver is not None


def install(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Let every column- and row-parallel linear layer of `chunk` put its weight gradient aside; twice is once. Returns
    the layers that split their own backward (Transformer Engine's).

    Outside `put_aside` such layers compute it in the backward, as before. Raises ConfigError for layers that add their
    gradient into a buffer on their own (gradient_accumulation_fusion) or keep it back (defer_embedding_wgrad_compute).
    """
    splitting = list(te.delayed_modules(chunk))
    for module in splitting:
        _refuse(module.config)
    for module in chunk.modules():
        if megatron.is_parallel_linear(module):
            _refuse(module.config)
            megatron.set_linear_forward(module, _forward)
            if module.weight is not None:  # a head that is tied to the embedding is given its weight in each forward
                mark_put_off(module.weight)  # type: ignore[arg-type]
    return splitting


def _refuse(config: Any) -> None:
    for key in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute"):
        if getattr(config, key):
            raise ConfigError(f"{key} adds weight gradients at times other than the schedule's: set {key} to false")


def _forward(
    *,
    input: torch.Tensor,
    weight: torch.nn.Parameter,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None = None,
    **fused: Any,
) -> torch.Tensor:
    """The product of a parallel linear layer; arguments as Megatron-core's own."""
    if not weight.requires_grad or not torch.is_grad_enabled():
        return megatron.linear_forward(
            input=input, weight=weight, bias=bias, allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel, tp_group=tp_group, **fused,
        )  # fmt: skip
    if not input.requires_grad:
        input = input.detach().requires_grad_()  # else the backward would not visit this layer at all
    mark_put_off(weight)
    # The weight goes in where autograd does not look: it would call the hooks on its gradient at once, with none.
    operands = _Operands(weight, tp_group, allreduce_dgrad, sequence_parallel, _mode.source)
    return cast("torch.Tensor", _Linear.apply(input, bias, operands))


@dataclass(frozen=True, slots=True)
class _Operands:
    weight: torch.nn.Parameter
    tp: dist.ProcessGroup | None
    allreduce: bool
    sequence_parallel: bool
    source: int


class _Linear(torch.autograd.Function):
    """input [.., in] @ weight^T [in, out] + bias. With sequence parallelism the input is gathered along dimension 0
    over tp, and its gradient is reduce-scattered; else, where asked for, its gradient is summed over tp."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, at: _Operands) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.at, ctx.has_bias = at, bias is not None
        whole = input
        if at.sequence_parallel:
            whole, work = start_gather(input, at.tp)
            work.wait()
        output = torch.matmul(whole, at.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        if _mode.in_forward or torch.is_grad_enabled():
            raise ConfigError(
                "a forward differentiates through a linear layer of Megatron's (torch.autograd.grad), whose weight"
                " gradient this schedule would add to that of the loss: set schedule to 1f1b or interleaved"
            )
        (input,) = ctx.saved_tensors
        at = ctx.at
        grad_input, work = _reduced(grad_output.matmul(at.weight.to(grad_output.dtype)), at)
        # Where it is not put off, it is computed while the input's gradient is reduced.
        defer(at.weight, Product(input, grad_output, at.tp if at.sequence_parallel else None), at.source)
        grad_bias = flat_rows(grad_output).sum(dim=0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return grad_input, grad_bias, None


def _reduced(grad: torch.Tensor, at: _Operands) -> tuple[torch.Tensor, dist.Work | None]:
    """The input's gradient, reduced over the tp ranks, and the handle to wait for before it is used."""
    if at.sequence_parallel:
        assert at.tp is not None
        part = grad.new_empty(grad.shape[0] // at.tp.size(), *grad.shape[1:])
        return part, dist.reduce_scatter_tensor(part, grad.contiguous(), group=at.tp, async_op=True)
    return grad, dist.all_reduce(grad, group=at.tp, async_op=True) if at.allreduce else None


def start_gather(part: torch.Tensor, tp: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    """The whole sequence of `part` [sequence / tp, ...], and what is waited for before it is read."""
    assert tp is not None
    whole = part.new_empty(part.shape[0] * tp.size(), *part.shape[1:])
    work = dist.all_gather_into_tensor(whole, part.contiguous(), group=tp, async_op=True)
    assert work is not None
    return whole, work


def flat_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[.., columns] as [rows, columns]."""
    return tensor.reshape(-1, tensor.shape[-1])
