"""The matrices that Muon or SOAP steps in a configured model: shapes in closed form, owners, FLOPs and bytes. Without
torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megaaccum.config.layout import RankLayout
from megaaccum.config.plan import Plan
from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.footprint import BYTES
from megaaccum.lab.planner.layouts import Layouts
from megaaccum.lab.planner.stages import Stage, chunks_of_rank, stages_of
from megaaccum.lab.planner.weights import Elements
from megaaccum.optim.owners import COSTS, Matrix, assign, at_owners, balance
from megaaccum.pretrain.metrics.layer_shapes import elements, expert_layers, layer_matrices


def rank_matrices(model: ModelConfig, chunks: Iterable[Stage], at: RankLayout | Layouts) -> Elements:
    """Elements of matrices of one rank with these chunks, as `rank_parameters` has all parameters."""
    total = Elements(0, 0)
    for stage in chunks:
        for moe, count in ((False, stage.dense), (True, stage.moe), *_predicted(model, stage)):
            cut, whole, expert = map(elements, layer_matrices(model, moe=moe))
            total = total + Elements(cut // at.tp + whole, expert // (at.ep * at.etp)) * count
        total = total + Elements(2 * model.hidden_size**2 // at.tp, 0) * stage.prediction
    return total


def stage_matrices(model: ModelConfig, chunks: Iterable[Stage]) -> Iterator[Matrix]:
    """Every whole matrix of these chunks. Names begin with `whole` if tp does not cut the parameter, and with `expert`
    for routed experts, whose number comes next."""
    for number, stage in enumerate(chunks):
        kinds = [False] * stage.dense + [True] * stage.moe
        kinds += [moe for moe, count in _predicted(model, stage) for _ in range(count)]
        for layer, moe in enumerate(kinds):
            cut, whole, experts = layer_matrices(model, moe=moe)
            each = len(experts) // (model.num_experts or 1)
            params = [(f"cut {n}", shapes) for n, shapes in enumerate(cut)]
            params += [(f"whole {n}", shapes) for n, shapes in enumerate(whole)]
            params += [(f"expert {n // each} {n % each}", shapes) for n, shapes in enumerate(experts)]
            for name, shapes in params:
                yield from (Matrix(f"{name} {number}.{layer}", part, *shape) for part, shape in enumerate(shapes))
        for layer in range(stage.prediction):
            yield Matrix(f"cut prediction {number}.{layer}", 0, model.hidden_size, 2 * model.hidden_size)


def _predicted(model: ModelConfig, stage: Stage) -> list[tuple[bool, int]]:
    return [(expert_layers(model)[-1], stage.prediction)] if stage.prediction else []


def owners_of(plan: Plan, matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """The matrices of each rank of a stage, as the run assigns them: an expert's owner is among the ranks that hold
    it."""
    at, every = plan.layout, list(matrices)
    ranks, share = tuple(range(at.tp * at.cp * at.dp)), (plan.config.model.num_experts or 1) // at.ep
    of_expert = [tuple(rank for rank in ranks if rank // at.etp % at.ep == number) for number in range(at.ep)]
    experts = {each.name: each.name.split() for each in every}
    holders = {n: of_expert[int(words[1]) // share] if words[0] == "expert" else ranks for n, words in experts.items()}
    return assign(every, len(ranks), holders, COSTS[plan.config.optimizer.optimizer])


def _cut(plan: Plan, matrix: Matrix) -> tuple[int, int]:
    """(ranks that share a matrix' tensor-parallel parts, number of these parts)."""
    kind = matrix.name.split()[0]
    among = plan.layout.etp if kind == "expert" else plan.layout.tp
    return among, 1 if kind == "whole" else among


def most_owned(plan: Plan, chunks: Iterable[Stage]) -> int:
    """Elements of momenta, or of SOAP's state, on the rank of a stage that keeps the most, if owners keep them: under
    tensor parallelism the parts of a momentum are on the ranks beside the matrix' owner."""
    held: Counter[int] = Counter()
    for rank, matrices in enumerate(owners_of(plan, stage_matrices(plan.config.model, chunks))):
        for matrix in matrices:
            if plan.config.optimizer.optimizer == "soap":
                held[rank] += matrix.soap_elements
                continue
            among, parts = _cut(plan, matrix)
            held.update({rank // among * among + other: matrix.numel // parts for other in range(among)})
    return max(held.values(), default=0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step of Muon or SOAP on the stage with the most work.

    flops: of the busiest owner's iterations. balance: its cost over the mean. at_owners: whether gradients are reduced
    straight to owners, who keep the momenta. to_owners, back: bytes that a rank receives in exchanges, in the mean over
    the stage, if each rank holds an even share of every matrix (ZeRO-1, -2 and Megatron's optimizer cut a run of all
    parameters, of which an update's way is up to ranks / (ranks - 1) times as long). saved: bytes of AdamW's moments
    that the stage does not hold; below 0 for those that SOAP's state has more.
    """

    count: int
    flops: int
    balance: float
    at_owners: bool
    to_owners: float
    back: float
    saved: float


def forecast(plan: Plan) -> Forecast:
    """The prediction for a plan with `optimizer: muon` or `soap`."""
    at, keys, sharding = plan.layout, plan.config.optimizer, plan.config.sharding
    stages, ranks = stages_of(plan.config), at.tp * at.cp * at.dp
    chunks = [chunks_of_rank(stages, pp_rank, pp=at.pp, schedule=at.schedule) for pp_rank in range(at.pp)]
    of_stages = [list(stage_matrices(plan.config.model, each)) for each in chunks]
    is_soap, cost = keys.optimizer == "soap", COSTS[keys.optimizer]
    most = max(of_stages, key=lambda matrices: sum(map(cost, matrices)))
    owned, width = owners_of(plan, most), BYTES["fp64" if sharding.params_dtype == "fp64" else "fp32"]
    in_bf16 = not is_soap and keys.muon_fp32_matmul_prec == "medium" and width == BYTES["fp32"]
    wire = BYTES["bf16"] if in_bf16 else width
    straight, to_owners, back = at_owners(plan.config, plan.batch.num_microbatches), 0.0, 0.0
    for matrix in most:
        among, parts = _cut(plan, matrix)
        replicas = at.edp if matrix.name.startswith("expert") else at.dp * at.cp
        # Replicas that hold all of a matrix send nothing to an owner among them, and all of them get its update.
        copies = (replicas if sharding.backend == "ddp" else sharding.data_parallel_replicas) * among // parts
        to_owners += matrix.numel * (1 - 1 / parts if straight else 1 - copies / (among * replicas))
        back += matrix.numel * copies * (1 - 1 / (among * replicas))
    saved = sum(matrix.numel for matrix in most) * width  # Muon has a momentum in place of two moments
    if is_soap:
        saved = 2 * saved - sum(matrix.soap_elements for matrix in most) * BYTES["fp32"]
    return Forecast(
        count=len(most),
        flops=max(sum(map(cost, matrices)) for matrices in owned) * (1 if is_soap else keys.muon_num_ns_steps),
        balance=balance(owned, cost),
        at_owners=straight,
        to_owners=to_owners * width / ranks,
        back=back * wire / ranks,
        saved=saved,
    )
