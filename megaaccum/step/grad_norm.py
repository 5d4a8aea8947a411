"""The norm of the model's gradient, the verdict on it, and clipping: over the whole model, each parameter once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
import torch.distributed as dist

from megaaccum.distributed.groups import Groups
from megaaccum.distributed.sums import sums_over_ranks
from megaaccum.model import names
from megaaccum.platform import cpu
from megaaccum.sharding import GradShard, ShardingBackend


def global_norm(
    backend: ShardingBackend,
    groups: Groups,
    *,
    along: Sequence[torch.Tensor],
    flag: torch.Tensor,
    overflow: torch.Tensor | None,
) -> tuple[float, list[float], bool]:
    """(L2 norm of the whole model's gradient, sum of each of `along`, whether some rank's `flag` is not 0): the same on
    every rank; the norm is not finite if any gradient is not.

    Each rank adds the squares of the parts that only it holds (float64), then one all-reduce over the world sums them:
    tp, pp, dp and cp at once. A non-finite value survives the sum, so the norm carries the verdict of all ranks too.
    along: float64 scalars of this rank that are summed in the same all-reduce. overflow: 0, or inf where this rank
    knows of an overflow that its gradient does not show (FP8); the norm is then not finite either.
    """
    counted = _counted(backend, groups)
    square = exact_square(counted) if backend.sums.in_one_order else _square(counted)
    if overflow is not None:
        square = square.to(overflow.device) + overflow
    (total, *others), is_flagged = _sums_and_flag([square, *along], flag)
    return total**0.5, others, is_flagged


def _sums_and_flag(parts: Sequence[torch.Tensor], flag: torch.Tensor) -> tuple[list[float], bool]:
    """`sums_over_ranks` of `parts` over the world, and whether the `flag` of any rank is not 0. A flag makes the first
    sum infinite, so that it takes no number of its own, which costs gloo's ring more than the others together; where
    that sum is not finite, all is summed again with the flags apart."""
    first, *others = parts
    # Gradients of an offloaded optimizer lie in host memory, and NCCL carries none of that.
    sums = sums_over_ranks([torch.where(flag != 0, torch.inf, cpu.to_device(first)), *others])
    if math.isfinite(sums[0]):
        return sums, False
    *sums, flags = sums_over_ranks([*parts, flag])
    return sums, flags != 0


def own_square(backend: ShardingBackend, groups: Groups) -> torch.Tensor:
    """The sum of the squares of the gradient parts that this rank adds to the norm, float64."""
    return _square(_counted(backend, groups))


def _counted(backend: ShardingBackend, groups: Groups) -> list[torch.Tensor]:
    """The gradients that this rank adds to the norm."""
    return [shard.grad for shard in backend.shards() if shard.grad.numel() and counts_in_norm(shard, groups)]


def _square(grads: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares, float64."""
    half = (torch.bfloat16, torch.float16)  # a norm in these would be rounded to 16 bits
    wide: list[torch.Tensor] = []
    for grad in grads:
        if grad.is_cpu and grad.numel() > _PIECE:
            wide += [torch.linalg.vector_norm(part, dtype=torch.float64) for part in grad.reshape(-1).split(_PIECE)]
        else:
            wide.append(torch.linalg.vector_norm(grad, dtype=torch.float32) if grad.dtype in half else grad)
    return torch.nn.utils.get_total_norm(wide).double() ** 2


_PIECE = 2**16
"""Elements beyond which the squares of a gradient in host memory are added up in float64. Torch 2.13 adds them one
after another in FP32: the norm of 2^27 normal numbers is 1.4 % too small."""

_BITS = 30
"""An exact sum of squares has two digits of this many bits: relative to the largest square it is truncated at 2^-60."""


def exact_square(grads: list[torch.Tensor]) -> torch.Tensor:
    """The same, where the sum over all ranks does not depend on which of them holds what: integers have no rounding.

    Each square (exact in float64, of FP32) is a fraction of the largest one of all ranks, rounded up to a power of two,
    and is cut into digits. Collective over the world. Returns the sum on rank 0 and zero elsewhere, so that a sum over
    ranks is exact."""
    largest = torch.stack([grad.abs().amax().double() for grad in grads]).amax() if grads else torch.zeros(()).double()
    largest = largest.to(cpu.device())
    # A comparison with a value that is not a number is false, so that MAX may lose it.
    largest = torch.where(largest.isfinite(), largest, torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    most = float(largest)
    if not math.isfinite(most):
        return largest
    exponent = max(math.frexp(most)[1], -1000)  # 2.0**-exponent is finite
    sums = []
    for part in [part for grad in grads for part in grad.reshape(-1).split(_CHUNK)]:
        rest = (part.double() * 2.0 ** (_BITS / 2 - exponent)).square_()  # a float64 part is the gradient itself
        first = rest.floor()
        second = rest.sub_(first).mul_(2.0**_BITS).floor_()
        sums += [first.sum(), second.sum()]
    digits = cpu.to_device(torch.stack(sums) if sums else torch.zeros(2)).long().view(-1, 2)
    halves = torch.stack([digits >> 32, digits % 2**32]).sum(dim=1)  # a sum of whole ones might not fit into int64
    dist.all_reduce(halves)
    if dist.get_rank() != 0:
        return torch.zeros((), dtype=torch.float64, device=cpu.device())
    firsts, seconds = (2**32 * high + low for high, low in zip(*halves.tolist(), strict=True))
    exact = Fraction(2**_BITS * firsts + seconds, 4**_BITS)
    return torch.full((), math.ldexp(float(exact), 2 * exponent), dtype=torch.float64, device=cpu.device())


_CHUNK = 2**22
"""Elements of a gradient that are widened at a time. Their digits add up to less than 2^52, which float64 holds."""


def counts_in_norm(shard: GradShard, groups: Groups) -> bool:
    """Whether this rank adds `shard` to the norm: of several ranks that hold the same numbers, the first does."""
    is_first = shard.replica == 0 and not names.is_tied_copy(shard.param)
    return is_first and (groups.tp.rank() == 0 or not names.is_same_over_tp(shard.param))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that scales a gradient of norm `norm` to `max_norm`. The gradient is clipped if the factor is below 1;
    a max_norm of 0 does not clip."""
    return max_norm / (norm + 1e-6) if max_norm > 0 else 1.0


def scale_and_clip(backend: ShardingBackend, norm: float, max_norm: float, *, factor: float = 1.0) -> None:
    """Multiply the reduced gradient once: by `factor` (1 / (loss scale * N), whatever is still in it), and by
    max_norm / (norm + 1e-6) if `norm`, that of the gradient times `factor`, is larger (torch's and Megatron's rule; a
    max_norm of 0 does not clip). In the precision that the optimizer reads."""
    factor *= min(clip_coefficient(norm, max_norm), 1.0)
    if factor != 1.0 and (grads := [shard.grad for shard in backend.shards()]):
        torch._foreach_mul_(grads, factor)  # on a GPU few kernels, as torch's own clipping launches
