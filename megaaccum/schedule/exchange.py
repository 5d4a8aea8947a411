"""The all-to-all of experts inside a schedule: a lane of its own beside a rank's compute.

A layer with experts sends its tokens to their experts (dispatch, D) and back (combine, C), in a forward and again in an
input gradient. A pass alone waits for each. In a fused pair (`Pair`) the exchanges of one pass run under the compute of
the other, layer by layer, in the order in which Megatron-core launches them (0.19: TransformerLayerSchedulePlan.run):

    exchanges   C of the gradient | D of the forward, D of the gradient      | C of the forward
    compute     attention         | experts' gradient, experts               | attention's gradient

So a table says by its pairs what is hidden, the profile by its costs how much, and a search can choose both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Span = tuple[float, float]


class Layer(NamedTuple):
    """Seconds of one micro-batch in a layer. forward, input_grad: of its compute (up to the dispatch, between dispatch
    and combine), each by the layers' order in the forward. exchange: of one dispatch or combine; 0 without experts."""

    forward: tuple[float, float]
    input_grad: tuple[float, float]
    exchange: float = 0.0


class Joint(NamedTuple):
    """A forward and an input gradient at once, either of which may be absent. exchanges: (kind, whether of the
    forward, layer, span) of each, from the start of the pass."""

    seconds: float
    exchanges: tuple[tuple[Literal["D", "C"], bool, int, Span], ...]


@lru_cache(maxsize=4096)
def together(forward: tuple[Layer, ...], backward: tuple[Layer, ...]) -> Joint:
    """The passes of one micro-batch through the layers `forward`, and of another's gradient back through the layers
    `backward`: two lanes, each of which does what it was given in order."""
    compute = lane = up = down = 0.0  # when each lane is free, when each pass has its next input
    found: list[tuple[Literal["D", "C"], bool, int, Span]] = []

    def run(seconds: float, ready: float) -> float:
        nonlocal compute
        compute = max(compute, ready) + seconds
        return compute

    def send(kind: Literal["D", "C"], layer: int, seconds: float, ready: float, *, of_forward: bool) -> float:
        nonlocal lane
        if not seconds:
            return ready
        start = max(lane, ready)
        lane = start + seconds
        found.append((kind, of_forward, layer, (start, lane)))
        return lane

    for step in range(max(len(forward), len(backward))):
        at, last = step, len(backward) - 1 - step
        f, b = forward[at] if at < len(forward) else None, backward[last] if last >= 0 else None
        if b is not None:
            down = send("C", last, b.exchange, down, of_forward=False)
        if f is not None:
            up = run(f.forward[0], up)
        if b is not None:
            down = run(b.input_grad[1], down)
        if f is not None:
            up = send("D", at, f.exchange, up, of_forward=True)
        if b is not None:
            down = send("D", last, b.exchange, down, of_forward=False)
        if f is not None:
            up = send("C", at, f.exchange, run(f.forward[1], up), of_forward=True)
        if b is not None:
            down = run(b.input_grad[0], down)
    return Joint(max(up, down), tuple(found))
