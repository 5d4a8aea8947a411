"""Rules on mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Subject
from megaaccum.config.schema import ModelConfig
from megaaccum.errors import either, equation, indivisible, nearest, nearest_multiples

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def balancing_losses(model: ModelConfig) -> list[tuple[str, float]]:
    """(type, weight) of each balancing loss."""
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    listed = kinds if isinstance(kinds, list) else [kinds]
    return list(zip(listed, weights if isinstance(weights, list) else [weights], strict=False))


def layer_pattern(subject: Subject) -> Iterator[str]:
    """A list of which layers hold experts covers every layer."""
    pattern, layers = subject.model.moe_layer_freq, subject.model.num_layers
    if isinstance(pattern, int):
        if pattern < 1:
            yield f"moe_layer_freq is {pattern}: it must be at least 1 (1 puts experts into every layer)."
        return
    if len(pattern) != layers:
        yield f"moe_layer_freq lists {len(pattern)} layers, but num_layers is {layers}: give one entry per layer."
    if set(pattern) - {0, 1}:
        yield f"moe_layer_freq holds {sorted(set(pattern) - {0, 1})}: entries are 1 (experts) or 0 (dense)."


def router(subject: Subject) -> Iterator[str]:
    """The router picks among the experts and has one way to score."""
    model, experts = subject.model, subject.model.num_experts
    if not experts:
        return
    if model.moe_router_topk > experts:
        yield f"moe_router_topk {model.moe_router_topk} is more than num_experts {experts}: set it to {experts}."
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    known = BALANCING[:3] if isinstance(kinds, list) else BALANCING
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in known:
            yield f"moe_router_load_balancing_type is {kind!r}: it must be one of {', '.join(known)}."
    losses, given = [len(each) if isinstance(each, list) else None for each in (kinds, weights)]
    if losses != given or (isinstance(kinds, list) and len(set(kinds)) < len(kinds)):
        text = f"moe_router_load_balancing_type {kinds} and moe_aux_loss_coeff {weights}"
        yield f"{text}: give one weight for each loss, each loss once, and lists for both keys or for neither."
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield "moe_router_enable_expert_bias needs moe_router_score_function sigmoid, not softmax: set it to sigmoid."
    softmax_after_topk = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if model.moe_router_topk == 1 and softmax_after_topk and model.moe_router_load_balancing_type != "sinkhorn":
        yield (
            "moe_router_topk 1 with the softmax after the selection always gives weight 1, so the router learns"
            " nothing: set moe_router_pre_softmax to true."
        )


def balancing_coefficient(subject: Subject) -> Iterator[str]:
    """A coefficient needs the loss it multiplies."""
    idle = [(kind, weight) for kind, weight in balancing_losses(subject.model) if weight > 0 and "aux_loss" not in kind]
    for kind, weight in idle if subject.model.num_experts else ():
        yield (
            f"moe_aux_loss_coeff {weight} has no effect with moe_router_load_balancing_type {kind}: set that to"
            " aux_loss or seq_aux_loss, or the coefficient to 0."
        )


def capacity(subject: Subject) -> Iterator[str]:
    """Some tokens reach their experts, by a routing that counts them."""
    model, factor = subject.model, subject.model.moe_expert_capacity_factor
    if model.num_experts is None or factor is None:
        return
    if factor <= 0:
        yield f"moe_expert_capacity_factor {factor:g} {DROPS_EVERYTHING}"
    if model.moe_pad_expert_input_to_capacity and factor * model.moe_router_topk > model.num_experts:
        yield (
            f"moe_expert_capacity_factor {factor:g} with moe_router_topk {model.moe_router_topk} of {model.num_experts}"
            " experts has places for more tokens than there are, which moe_pad_expert_input_to_capacity would fill: set"
            f" the factor to at most {model.num_experts / model.moe_router_topk:g}."
        )
    if model.moe_router_load_balancing_type == "sinkhorn":
        yield (
            "moe_expert_capacity_factor with moe_router_load_balancing_type sinkhorn: Megatron-core drops no tokens"
            " there. Set moe_router_load_balancing_type to aux_loss or none, or leave the capacity out."
        )


DROPS_EVERYTHING = (
    "drops every token: an expert takes ceil(tokens * moe_router_topk / num_experts * factor) of a rank's tokens, which"
    " is 0. Set it above 0 (1 is an even share), or leave it out, which drops none."
)


def router_groups(subject: Subject) -> Iterator[str]:
    """Group-limited routing has equal groups, and spreads top-k over some of them."""
    model, experts = subject.model, subject.model.num_experts
    groups, per_token = model.moe_router_num_groups, model.moe_router_group_topk
    if (groups is None) != (per_token is None):
        yield "moe_router_num_groups and moe_router_group_topk go together: set both, or neither."
    if experts is None or not groups or not per_token:
        return
    yield from indivisible("num_experts", experts, {"moe_router_num_groups": groups}, change="factor")
    if per_token > groups:
        yield f"moe_router_group_topk {per_token} is more than moe_router_num_groups {groups}: set it to {groups}."
    elif model.moe_router_topk % per_token:
        yield (
            f"moe_router_topk {model.moe_router_topk} is not divisible by moe_router_group_topk {per_token}, the groups"
            f" that share it: set moe_router_topk to {either(nearest_multiples(model.moe_router_topk, per_token))}."
        )
    elif (most := experts // groups * per_token) < model.moe_router_topk:
        yield (
            f"moe_router_topk {model.moe_router_topk} is more than the {most} experts of moe_router_group_topk"
            f" {per_token} of {groups} groups: set moe_router_topk to at most {most}, or moe_router_group_topk higher."
        )


def expert_parallel(subject: Subject) -> Iterator[str]:
    """Experts divide over their ranks, and their ranks over the world: world % (etp * ep * pp) == 0."""
    experts, parallel = subject.model.num_experts, subject.parallel
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or 1
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    if experts is None or min(ep, etp, pp, experts) < 1:
        return
    yield from indivisible("num_experts", experts, {"expert_model_parallel_size": ep}, change="factor")
    if (world := subject.world_size) % (etp * ep * pp):
        sizes = {"expert_tensor_parallel_size": etp, "expert_model_parallel_size": ep}
        of_ep = nearest(ep, lambda n: experts % n == 0 == world % (etp * n * pp), highest=experts)
        of_etp = nearest(etp, lambda n: tp % n == 0 == world % (n * ep * pp), highest=tp)
        legal = {"expert_model_parallel_size": of_ep, "expert_tensor_parallel_size": of_etp}
        others = [f"{key} to {either(found)}" for key, found in legal.items() if found]
        yield (
            f"world size {world} is not divisible by {equation(sizes | {'pipeline_model_parallel_size': pp})}: set the"
            f" world size to {either(nearest_multiples(world, etp * ep * pp))}, or"
            f" {', or '.join(others) or 'change one of the factors'}."
        )


def experts_with_tensor_parallel(subject: Subject) -> Iterator[str]:
    """Megatron-core's MoE layer refuses to train under tensor parallelism without sequence parallelism, but for layers
    that compute by blocks (executor/blocks.py)."""
    tp, cuts = subject.parallel.tensor_model_parallel_size, subject.parallel.sequence_parallel
    if subject.model.num_experts and tp > 1 and not cuts and subject.sharding.reproducible == "none":
        yield f"num_experts with tensor_model_parallel_size {tp} needs sequence_parallel: set it to true."


def expert_widths(subject: Subject) -> Iterator[str]:
    """Tensor parallelism cuts experts' widths evenly."""
    model, parallel = subject.model, subject.parallel
    for name, key in (
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size"),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
    ):
        width, ranks = getattr(model, name) or 0, getattr(parallel, key) or 0
        if model.num_experts is not None:
            yield from indivisible(name, width, {key: ranks}, change="value")


def biases_of_experts(subject: Subject) -> Iterator[str]:
    """Megatron-core's experts have biases only if tensor parallelism does not cut them. A model of the user's own has
    the biases that it was built with, whatever the key says."""
    model, ranks = subject.model, subject.parallel.expert_tensor_parallel_size
    if not subject.own_model and model.num_experts and model.add_bias_linear and ranks and ranks > 1:
        yield (
            f"num_experts {model.num_experts} with add_bias_linear does not allow expert_tensor_parallel_size {ranks}:"
            " set it to 1, or add_bias_linear to false, as mixtures of experts mostly have it."
        )


def shared_experts(subject: Subject) -> Iterator[str]:
    """Megatron-core's shared experts have no biases."""
    model = subject.model
    if model.num_experts and model.moe_shared_expert_intermediate_size and model.add_bias_linear:
        yield "moe_shared_expert_intermediate_size needs linear layers without biases: set add_bias_linear to false."


def gathered_tokens(subject: Subject) -> Iterator[str]:
    """Megatron-core's allgather dispatcher gathers as many tokens from every rank of the experts. Experts that are
    padded take as many from each as they have of their own rank: it sends no counts."""
    model, parallel = subject.model, subject.parallel
    ranks = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    gathers = model.num_experts is not None and model.moe_token_dispatcher_type == "allgather" and ranks > 1
    if gathers and subject.batch.variable_seq_lengths:
        yield (
            f"moe_token_dispatcher_type allgather gathers as many tokens from each of {ranks} ranks, but"
            " variable_seq_lengths lets them differ: set moe_token_dispatcher_type to alltoall, or variable_seq_lengths"
            " to false and pad to seq_length."
        )
    pads = model.moe_pad_expert_input_to_capacity and parallel.expert_model_parallel_size > 1
    if pads and subject.batch.variable_seq_lengths:
        yield (
            "moe_pad_expert_input_to_capacity takes as many tokens from each rank, but variable_seq_lengths lets them"
            " differ: set it, or variable_seq_lengths, to false."
        )
