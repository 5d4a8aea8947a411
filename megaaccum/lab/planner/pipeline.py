"""The effect of a schedule on memory and time, in closed form: micro-batches in flight, cost of filling and draining.

The one place that knows schedules. F is a forward, B a backward, I and W its two halves (input, weight); m the
micro-batches of a flush, p the pipeline ranks, v the chunks per rank. Sources: GPipe and 1F1B: arXiv 2104.04473,
section 2.2; interleaved: the same, and megatron.core.pipeline_parallel.schedules (warm-up count); ZB-H1, ZB-H2 and
ZB-V: arXiv 2401.10241, table 2 and section 6; DualPipeV: simulation of its table, less than its README's bound.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from megaaccum.lab.planner.stages import V_SHAPED
from megaaccum.schedule.build import build
from megaaccum.schedule.controllable import v_half_limit, v_min_limit
from megaaccum.schedule.memory import Memory
from megaaccum.schedule.simulate import Costs, by_executor, simulate


def in_flight(name: str, *, pp: int, vpp: int, rank: int, microbatches: Any) -> list[Any]:
    """Micro-batches whose activations rank `rank` holds at its peak, for each of its chunks; one per entry of
    `microbatches` (m).

    Chunks of one rank are held at the same moment: the first backward of the rank's steady phase.
    """
    m = np.asarray(microbatches)
    if name == "none":
        return [np.minimum(m, 1)]
    if name == "gpipe":
        return [m]
    if name == "1f1b":
        return [np.minimum(m, pp - rank)]
    if name == "interleaved":
        return _interleaved_in_flight(pp, vpp, rank, m)
    if name == "zb-h1":
        # Rank r still holds weight-gradient inputs of r micro-batches, which are nearly as large as activations.
        return [np.minimum(m, pp)]
    if name == "zb-h2":
        return [np.minimum(m, 2 * pp - 1)]
    if name == "zbv":
        return [np.minimum(m, pp)] * 2
    if name == "dualpipev":
        return [np.minimum(m, pp + 1), np.minimum(m, pp)]
    if name in ("v-half", "v-min"):
        limit = v_half_limit(pp) if name == "v-half" else v_min_limit(pp)
        return [np.minimum(m, limit // 2)] * 2
    raise KeyError(name)


def owed(name: str, *, pp: int, rank: int, microbatches: Any) -> Any:
    """Passes through a chunk of rank `rank` whose weight gradient is not computed yet, at most; one per entry of
    `microbatches`. Counted in the schedule's table, where more than 4 pp micro-batches owe no more; zb-h2 has none."""
    if not splits(name):
        return np.zeros(len(microbatches))
    m = np.minimum(np.asarray(microbatches), 4 * pp).astype(int)
    most = {count: _owed(name, pp, int(count))[rank] for count in np.unique(m)}
    return np.array([most[count] for count in m])


def splits(name: str) -> bool:
    """Whether the schedule's table has backwards in two parts (zb-h2 has no table)."""
    return by_executor(name) and name != "zb-h2"


@cache
def _owed(name: str, pp: int, microbatches: int) -> tuple[float, ...]:
    schedule = build(name, pp=pp, num_microbatches=microbatches, short=True)
    none = (0.0,) * schedule.num_stages
    return Memory(activation=none, deferred=(1.0,) * schedule.num_stages, state=none).peaks(schedule)


def _interleaved_in_flight(pp: int, vpp: int, rank: int, m: Any) -> list[Any]:
    """Megatron runs groups of p micro-batches through chunk 0, then chunk 1, and so on; a rank has done
    2 (p - rank - 1) + (v - 1) p + 1 forwards when its first backward begins."""
    forwards = np.minimum(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, vpp * m)
    rounds, rest = forwards // (pp * vpp), forwards % (pp * vpp)
    return [pp * rounds + np.clip(rest - chunk * pp, 0, pp) for chunk in range(vpp)]


def fill_seconds(
    name: str, *, pp: int, vpp: int, forward: Any, input_grad: Any, weight_grad: Any, p2p: Any, m: Any,
    barrier: bool = True,
) -> Any:  # fmt: skip
    """Seconds by which a flush is longer than the slowest rank's own work: filling and draining.

    forward, input_grad, weight_grad: seconds of one micro-batch on a rank on average, all its chunks together. p2p:
    seconds that one activation needs from rank to rank. m: micro-batches, each of which V-Half and V-Min make wait
    where passes are unequal. barrier: a step waits for the slowest rank of the one before; without one
    (`speculative_step`) ZB-V alone gains. Megatron's own schedules send a gradient when the whole
    backward is done, the others when its first half is. V-shaped schedules have no published formula for unequal
    halves: theirs are what simulation gives.
    """
    whole, hop = forward + input_grad + weight_grad, 2 * (pp - 1) * p2p
    if name in ("none", "1f1b"):
        return (pp - 1) * whole + hop
    if name == "gpipe":
        return (pp - 1) * (forward + input_grad) + hop
    if name == "interleaved":
        return (pp - 1) / vpp * whole + hop
    if name == "zb-h1":
        return (pp - 1) * np.maximum(0, forward + input_grad - weight_grad) + hop
    if name == "zb-h2":
        return (pp - 1) * np.maximum(0, forward + input_grad - 2 * weight_grad) + hop
    half = 0.5  # of a rank's time goes to each of its two chunks
    if name == "zbv" and not barrier:
        waits = (forward - input_grad, 2 * forward - input_grad - weight_grad, 2 * (input_grad - weight_grad))
        return (pp - 1) * half * np.maximum.reduce(np.broadcast_arrays(0.0, *waits)) + hop
    if name == "zbv":
        # The optimizer waits for the slowest rank, so that the first pass is not hidden (as with a barrier).
        longest = np.maximum(np.maximum(forward, input_grad), forward + 2 * input_grad - 3 * weight_grad)
        return (pp - 1) * half * longest + hop
    if name == "dualpipev":
        return (pp - 1) * half * np.maximum(forward, forward + 2 * (input_grad - weight_grad)) + hop
    if name in ("v-half", "v-min"):
        rows = np.broadcast(m, forward, input_grad, weight_grad, p2p)
        return np.array([_simulated_fill(name, pp, *row) for row in rows])
    raise KeyError(name)


def _simulated_fill(name: str, pp: int, m: int, *seconds: float) -> float:
    """seconds: forward, input_grad, weight_grad and p2p."""
    *passes, p2p = seconds
    costs = Costs.per_rank(*passes, chunks=2, p2p=p2p)
    return simulate(build(name, pp=pp, num_microbatches=int(m)), costs).makespan - int(m) * sum(passes)


def exposed_hops(name: str, *, pp: int, vpp: int) -> float:
    """Messages per micro-batch that a rank waits for in its steady phase.

    1F1B sends an activation and receives a gradient in one exchange, twice per micro-batch, and computes nothing
    meanwhile. The schedules with chunks post their messages ahead; a fifth of their time is taken as seen.
    """
    if pp == 1:
        return 0.0
    return 2.0 if name in ("gpipe", "1f1b") else 0.2 * 2 * max(1, messages(name, pp=pp, vpp=vpp))


def messages(name: str, *, pp: int, vpp: int) -> int:
    """Activations that a rank sends on per micro-batch, forward: every chunk's output."""
    if pp == 1:
        return 0
    return 2 if name in V_SHAPED else vpp
