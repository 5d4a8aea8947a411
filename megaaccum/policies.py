"""What each boundary and policy moves and holds on a layout, from the plan alone: numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaaccum.config import Plan

BYTES = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Per element."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes that cross the data-parallel ranks for one rank in one step, and what it holds whole meanwhile.

    policy: `boundary sync`. gathered, reduced: bytes received per step for parameters and for gradients. whole: bytes
    of whole parameters and whole gradients held at once, beyond shards.
    """

    policy: str
    gathered: float
    reduced: float
    whole: float

    @property
    def total(self) -> float:
        return self.gathered + self.reduced


def predictions(plan: Plan, parameters: int, largest_unit: int) -> list[Predicted]:
    """Every policy on the layout of `plan`, for a rank whose stages have `parameters` elements, `largest_unit` of them
    in the largest layer. K = dp * cp ranks, P and G bytes of parameters and gradients, m micro-batches per step:

    | resident (ZeRO-3, FSDP2, Megatron) | (K-1)/K * (P + G) |
    | streaming (ZeRO-3, FSDP2) | (K-1)/K * (2P + G) * m |
    | torch DDP | 2 (K-1)/K * G |

    Padding to a multiple of K is left out (less than K elements per parameter).
    """
    sharding, k = plan.config.sharding, plan.layout.dp * plan.layout.cp
    share, m = (k - 1) / k, plan.batch.num_microbatches
    p = float(parameters * BYTES[sharding.params_dtype or "fp32"])
    g = float(parameters * BYTES[sharding.grad_reduce_dtype])
    held = float(parameters * BYTES[sharding.grad_accum_dtype])
    unit = (p + held) / max(parameters, 1) * largest_unit
    rows = []
    for boundary in ("deepspeed", "fsdp2"):
        rows.append(Predicted(f"{boundary} resident", share * p, share * g, p + held))
        rows.append(Predicted(f"{boundary} streaming", 2 * share * p * m, share * g * m, 2 * unit))
    rows.append(Predicted("megatron resident", share * p, share * g, p + held))
    rows.append(Predicted("ddp resident", 0.0, 2 * share * p, p + p))
    return rows


def chosen(plan: Plan) -> str:
    """The policy of `plan`, as `Predicted.policy` names it."""
    return f"{plan.config.sharding.boundary} {plan.config.sharding.sync}"
