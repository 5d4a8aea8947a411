"""FP32 sums of 16-bit gradients: each gradient is added as it comes, without a copy of it in FP32.

With `grad_dtype` FP32 autograd casts a gradient, then adds the copy: 20 bytes per parameter and micro-batch with the
product's own write. With `grad_dtype` None it adds the 16-bit gradient to the FP32 sum in one operation: 12 bytes and
the same bits, since every 16-bit number is one of FP32. Two gradients still have to be cast: the first of a step, which
becomes the sum, and that of a parameter which a micro-batch uses more than once, because autograd adds up the uses
before it adds them to the sum, and would do so in 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from megaaccum.executor import wgrad
from megaaccum.model import names
from megaaccum.sharding.sum_tree import AnyOrder
from megaaccum.upstream import pytorch


class Fp32Sums:
    """Decides for each of `params` which of its gradients are cast to FP32. chunks: the modules that use them; every
    gradient is cast until a chunk's first forward with a graph has shown how often a micro-batch uses a parameter.

    A re-entrant checkpoint hides the uses inside it, and is assumed to use no parameter twice.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], chunks: list[torch.nn.Module]):
        self.params = list(params)
        self._chunk_of = {id(param): number for number, chunk in enumerate(chunks) for param in chunk.parameters()}
        self._uses: dict[int, Counter[int]] = {}
        """By chunk that has been looked at, how many edges of a micro-batch's graph lead to each parameter."""
        modules = [module for chunk in chunks for module in chunk.modules()]
        owners = Counter(id(param) for module in modules for param in module.parameters(recurse=False))
        self._shared = {key for key, count in owners.items() if count > 1}
        self._shared |= {id(param) for param in self.params if names.is_tied(param)}
        self._hooks: dict[int, Any] = {}
        looked_at = enumerate(chunks) if self.params else ()
        self._forwards = [chunk.register_forward_hook(partial(self._look, n)) for n, chunk in looked_at]
        for param in self.params:
            param.grad_dtype = torch.float32

    def _look(self, chunk: int, module: torch.nn.Module, args: object, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        roots = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        if roots and not pytorch.in_backward():
            self._uses[chunk] = Counter(map(id, pytorch.leaves_in_graph(roots)))
            self._forwards[chunk].remove()

    def is_used_once(self, param: torch.nn.Parameter, *, seen: bool) -> bool:
        """Whether a micro-batch brings one gradient of `param`. seen: it has to be known, not taken to be so."""
        uses = self._uses.get(self._chunk_of[id(param)])
        if uses is None or id(param) in self._shared or uses[id(param)] > 1:
            return False
        return not seen or wgrad.is_put_off(param) or uses[id(param)] == 1

    def begin(self) -> None:
        """The sums are empty: cast the next gradient of each parameter, and add those after it as they come."""
        for param in self.params:
            param.grad_dtype = torch.float32
            if id(param) not in self._hooks:
                self._hooks[id(param)] = param.register_post_accumulate_grad_hook(self._has_sum)

    def begin_apart(self) -> None:
        """Sums that are not `param.grad`: a gradient is cast where it is added to them, if nothing is added to it
        before."""
        for param in self.params:
            param.grad_dtype = None if self.is_used_once(param, seen=True) else torch.float32

    def _has_sum(self, param: torch.nn.Parameter) -> None:
        if param.grad is not None:  # a layer whose weight gradient comes in W brings none in I
            self._hooks.pop(id(param)).remove()
            if self.is_used_once(param, seen=False):
                param.grad_dtype = None


class SumsOfKernels(AnyOrder):
    """FP32 sums to which products of weight gradients are added by their own kernel (gradient_accumulation_fusion): 8
    bytes per parameter and micro-batch.

    The contract is that of Megatron's DDP: `weight.main_grad` is the sum; a layer that has added to it sets
    `grad_added_to_main_grad` and gives autograd a gradient in its place, of which nothing counts unless
    `zero_out_wgrad` makes it zeros, for a weight that has other uses too. Any other gradient is added here.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]):
        self.params: list[Any] = list(params)
        for param in self.params:
            param.main_grad, param.grad_dtype = None, None  # a gradient stays in its precision until it is added

    def clear(self) -> None:
        """Begin with sums of zero."""
        for param in self.params:
            param.main_grad = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
            param.grad_added_to_main_grad = False

    def accept(self, param: Any) -> bool:
        """Add what autograd has brought, unless it is there in place of what a kernel has added."""
        if not param.grad_added_to_main_grad or getattr(param, "zero_out_wgrad", False):
            param.main_grad.add_(param.grad)
        param.grad = None
        return True

    def give_back(self, param: Any) -> None:
        """Put the parameter's sum into `param.grad`."""
        param.grad, param.main_grad = param.main_grad, None

    def tensors(self) -> Iterator[torch.Tensor]:
        """The sums that are held."""
        return (param.main_grad for param in self.params if param.main_grad is not None)
