"""The acceptance table of mixtures of experts: backend and sync mode x schedule x how experts and sequences are spread,
with kinds of loss, side losses and doors taken in turn. Each cell's gradient is that of one process, parameter by
parameter. The suite runs a part of it, `python -m benchmarks experts` all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from megaaccum.lab.verification.compare import relative_error
from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import both_references, own_part, problems_with
from tests.support.engines import Calls, in_calls
from tests.support.megatron_loop import Loop, loop_gradient
from tests.support.parity import REPLICAS, SYNC_MODES, Case, Gradient, gradient

MODEL = (
    "--num_layers 4 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_router_dtype fp64 "
)
SIDE = {
    "none": "",
    "aux and z": "--moe_router_load_balancing_type aux_loss --moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 ",
    "seq_aux": "--moe_router_load_balancing_type seq_aux_loss --moe_aux_loss_coeff 0.1 ",
}
CAPACITY = "--moe_expert_capacity_factor 0.75 "
"""A quarter of the tokens is dropped, or more. Ranks that share a sequence each drop of their own part, which is
another routing than one process has (tests/multiproc/test_expert_capacity.py)."""
MODES = {"ZeRO-1": "--zero_stage 1 ", "ZeRO-2": "--zero_stage 2 "} | SYNC_MODES
EP2, EP4 = "--expert_model_parallel_size 2 ", "--expert_model_parallel_size 4 "
TP = "--tensor_model_parallel_size 2 --sequence_parallel "
WHOLE = TP + "--expert_tensor_parallel_size 1 "
TP4 = "--tensor_model_parallel_size 4 --sequence_parallel "
CP = "--context_parallel_size 2 "
SMALL = {"ep2": EP2, "ep2 tp2 etp1": EP2 + WHOLE, "ep2 cp2": EP2 + CP}
"""How experts and sequences are spread over the two ranks of a stage."""
LARGE = {
    "ep4": EP4,
    "ep2 tp2 etp2": EP2 + TP,
    "ep4 tp2 etp1": EP4 + WHOLE,
    "ep2 cp2 dp2": EP2 + CP,
    "ep2 tp2 etp2 cp2": EP2 + TP + CP,
    "ep4 cp2": EP4 + CP,
    "ep2 tp2 etp1 cp2": EP2 + WHOLE + CP,
}
"""Over the four of a stage."""
REPLICATED = {"ep2 dp4": EP2, "ep2 cp2 dp2": EP2 + CP, "ep2 tp2 etp1": EP2 + WHOLE}
"""Over four, two of which hold the same experts."""
PP = "--pipeline_model_parallel_size 2 "
SCHEDULES = {
    "1f1b": PP,
    "interleaved": PP + "--virtual_pipeline_model_parallel_size 2 ",
    "zbv": PP + "--schedule zbv ",
    "dualpipev": PP + "--schedule dualpipev ",
}
SEQUENCES = 16
DOORS = ("train", "engine", "loop")
EACH = 1e-5
"""FP32: the most that a parameter's gradient is off, relative to its own norm."""


Turn = tuple[str, str, str, bool]
"""Side losses, divisor, door, and whether tokens may be dropped."""


@dataclass(frozen=True)
class Cell:
    """A case and how it is entered: the step of `megaaccum train`, an Engine with a user's chunks, `wrap` under
    Megatron's train_step."""

    name: str
    case: Case
    door: str = "train"

    def __str__(self) -> str:
        return f"{self.name}-{self.door}"


def _cell(mode: str, schedule: str, spread: str, flags: str, ranks: int, turn: Iterator[Turn]) -> Cell:
    """The cell with the loss, side losses, door and capacity whose turn it is, in float64 if the backend can."""
    side, norm, door, drops = next(turn)
    stage = ranks // (2 if schedule else 1)
    shared = (4 if TP4 in flags else 2 if TP in flags else 1) * (2 if CP in flags else 1)
    backend = (MODES | REPLICAS)[mode]
    late = door == "loop"  # N comes last: the router rounds its scores to FP32, and a side loss cannot wait for N
    # Megatron sums balancing losses of ranks that share a micro-batch in FP32.
    exact = ("fsdp2" in backend or "ddp" in backend) and not late and (side == "none" or shared == 1)
    model = MODEL + SIDE["none" if late else side]
    drops = drops and shared == 1
    model += CAPACITY if drops else ""
    model += "--loss_norm microbatch " if norm == "microbatch" and door == "train" else ""
    rounds = SEQUENCES // (4 * (stage // shared))
    precision = "--params_dtype fp64 " if exact else ""
    layout = f"--pp_microbatches 4 --grad_accum_steps {rounds} {backend}{precision}"
    lane = "fp64" if exact else "fp32"
    words = (mode, schedule, spread, norm, "none" if late else side, "dropping" if drops else "")
    name = "-".join(each for each in words if each)
    return Cell(name, Case(ranks, layout + SCHEDULES.get(schedule, "") + flags, model, lane), door)


def table() -> list[Cell]:
    """All cells, those of few ranks first."""
    norms = ("token", "microbatch")
    turn = cycle(
        [(side, norm, door, drops) for drops in (False, True) for norm in norms for side in SIDE for door in DOORS]
    )
    small = [(m, s, name, flags, 4) for m in MODES for s in SCHEDULES for name, flags in SMALL.items()]
    large = [(m, s, name, flags, 8) for m in MODES for s in SCHEDULES for name, flags in LARGE.items()]
    hybrid = [(m, s, name, flags, 8) for m in REPLICAS for s in SCHEDULES for name, flags in REPLICATED.items()]
    parts = EP2 + TP4 + "--expert_tensor_parallel_size 2 "  # an expert is cut over two of a dense matrix' four ranks
    small += [(m, "", "ep2 tp4 etp2", parts, 4) for m in MODES]
    # Every other one of the large ones: half of the table's time.
    return [_cell(*each, turn) for each in (*small, *large[::2], *hybrid)]


def made(cells: Sequence[Cell]) -> list[Gradient]:
    """The gradient of each cell, on a rank."""
    return [_made(cell) for cell in cells]


def _made(cell: Cell) -> Gradient:
    if cell.door == "loop":
        return loop_gradient(Loop(cell.case))
    if cell.door == "engine":
        count = cell.case.plan().batch.num_microbatches
        return in_calls(cell.case, Calls((4,) * (count // 4), known="total"))
    return gradient(cell.case)


def measured(cells: Sequence[Cell]) -> dict[Cell, list[str]]:
    """The problems of each cell, after one start of ranks; all cells have one world size."""
    (world_size,) = {cell.case.world_size for cell in cells}
    by_rank = run_ranks(made, world_size, list(cells), timeout=60 + 15 * len(cells))
    return {cell: problems(cell, list(ranks)) for cell, ranks in zip(cells, zip(*by_rank, strict=True), strict=True)}


def problems(cell: Cell, ranks: list[Gradient]) -> list[str]:
    """Why `ranks`, what each rank got, is not one process' gradient; empty if it is."""
    exact, near = both_references(cell.case, SEQUENCES)
    found = problems_with(cell.case, ranks, exact, near)
    for number, got in enumerate(ranks if cell.case.lane == "fp32" else ()):
        for name, part in got.parts.items():
            error = relative_error(part, own_part(name, part, got, exact))
            if not error <= EACH:
                found.append(f"rank {number}: {name} is off by {error:.2e} of its norm")
    return found
