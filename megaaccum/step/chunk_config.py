"""Flags that a step relies on in the configuration of a user's Megatron chunks: set, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig

from megaaccum.config import Plan
from megaaccum.config.rules.model import unfit_for_fusion
from megaaccum.distributed.agreement import gathered, raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.errors import ConfigError, listed, raise_problems
from megaaccum.model import names, router_state
from megaaccum.model.attention import accept_packed_sequences
from megaaccum.model.torch_chunk import TorchChunk
from megaaccum.model.unfit import module_problems, parameter_problems
from megaaccum.sharding import DRIVEN, experts
from megaaccum.step.side_losses import SideLosses

HOOKS = (
    "no_sync_func", "param_sync_func", "grad_sync_func", "grad_scale_func", "finalize_model_grads_func",
    "moe_grad_scale_func", "mtp_grad_scale_func",
)  # fmt: skip
"""Megatron's hooks, which the sharding backend and `SideLosses` fill."""


def prepare_together(plan: Plan, groups: Groups, chunks: Sequence[torch.nn.Module]) -> None:
    """`prepare` on every rank, and compare what ranks have built. Collective over the world; raises ConfigError on
    every rank."""
    raise_on_all_ranks(prepare, plan, groups, chunks)
    if plan.layout.pp > 1:
        raise_on_all_ranks(check_stages, groups, chunks)
    experts.check_same_on_ranks(groups, chunks)


def prepare(plan: Plan, groups: Groups, chunks: Sequence[torch.nn.Module]) -> None:
    """Set what can be set in the chunks' configuration. Raises ConfigError with everything else, on this rank."""
    if plan.written is not None and plan.written.parallel.schedule == "auto":
        raise ConfigError(
            "schedule auto is resolved by `megaaccum train`, which prices the layers of its own model: name a schedule"
            " for chunks of your own (`megaaccum schedule --schedule auto --profile FILE` ranks them), or leave it"
            f" out for {plan.layout.schedule}"
        )
    if any(id(each) in DRIVEN for chunk in chunks for each in (*chunk.modules(), *chunk.parameters())):
        raise ConfigError(
            "the model, or a part of it, is another engine's already, whose hooks and partitions stay on it: build the"
            " model again, or use that engine"
        )
    for chunk in chunks:
        if isinstance(chunk, TorchChunk) or not hasattr(chunk, "config"):
            chunk.config = _own_config(plan, [chunk, *chunks])
    problems = [*_layout_problems(plan, groups), *_chunk_problems(plan, groups, chunks)]
    of_configs = [text for chunk in chunks for text in _config_problems(plan, chunk.config)]
    problems += dict.fromkeys([*experts.problems(plan, chunks), *of_configs])  # chunks share a configuration
    raise_problems(problems)
    accept_packed_sequences(chunks)
    for chunk in chunks:
        _answer_schedules(chunk)
        names.mark_cut_offsets(chunk)
        router_state.keep_fp32(chunk)
        config: Any = chunk.config
        config.deallocate_pipeline_outputs = plan.layout.pp > 1
        config.variable_seq_lengths = plan.config.batch.variable_seq_lengths
        config.timers = None
        if plan.layout.pp > 1 and config.pipeline_dtype is None:
            config.pipeline_dtype = next(param.dtype for chunk in chunks for param in chunk.parameters())
        if plan.layout.schedule == "interleaved":
            # Batched, next and previous rank of pp 2 are one, and activations and gradients swap without an error.
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
            # By these Megatron counts the forwards before the first backward.
            config.virtual_pipeline_model_parallel_size = plan.layout.vpp
            config.microbatch_group_size_per_vp_stage = plan.config.parallel.microbatch_group_size_per_vp_stage


def _answer_schedules(chunk: Any) -> None:
    """Give a user's module what Megatron's schedules ask of it: a type, and layers of what it calls its decoder, on
    which they number micro-batches for CUDA graphs."""
    if not hasattr(chunk, "model_type"):
        chunk.model_type = ModelType.encoder_or_decoder
    decoder: Any = getattr(chunk, "decoder", None)
    if isinstance(decoder, torch.nn.Module) and not hasattr(decoder, "layers"):
        decoder.layers = ()  # type: ignore[assignment]  # no module


def check_stages(groups: Groups, chunks: Sequence[torch.nn.Module]) -> None:
    """Raise ConfigError where two stages have a parameter of one name, which a checkpoint and `whole_weights` would
    hold once, send each other different dtypes, or the first and the last have unlike copies of a tied embedding. If
    one does not train, only the other would come to add them up; a checkpoint holds one, by its name, for both.
    Collective over the pipeline."""
    named, copies = list[tuple[int, str]](), list[str]()
    for number, chunk in enumerate(chunks):
        for name, param in names.named_parameters([chunk]):
            if names.is_tied(param):
                total = param.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64)
                copies.append(f"{name} ({'trained' if param.requires_grad else 'frozen'}, its bytes add up to {total})")
            else:
                named.append((groups.stage(number), name))
    sent = str(getattr(chunks[0].config, "pipeline_dtype", None)).removeprefix("torch.")
    named_on, sent_by, tied_on = zip(*gathered((named, sent, copies), groups.pp), strict=True)
    unlike = sorted({copy for on_rank in tied_on for copy in on_rank})
    one_end = groups.embedding is not None and bool(tied_on[0]) != bool(tied_on[-1])  # a V has both on one rank
    if len(unlike) > 1 or one_end:
        raise ConfigError(
            f"the first and the last stage have unlike copies of a tied embedding, {' and '.join(unlike)}: build each"
            " with the same name, requires_grad and weights, or set share_embeddings_and_output_weights=False"
        )
    count = Counter(name for on_rank in named_on for _, name in set(on_rank))
    if twice := sorted(name for name, stages in count.items() if stages > 1):
        raise ConfigError(
            f"several stages have a parameter {listed(twice)}: give each chunk a name_in_model such as 'stages.3.', or"
            " the layers in its ModuleList `layers` a layer_number, from 1 over the whole model"
        )
    if len(dtypes := dict.fromkeys(sent_by)) > 1:
        raise ConfigError(
            f"stages of the pipeline send {' and '.join(dtypes)}: build their parameters in one dtype, or give their"
            " config one pipeline_dtype"
        )


def _own_config(plan: Plan, chunks: Sequence[torch.nn.Module]) -> ModelParallelConfig:
    """The fields that Megatron's schedules read, for a chunk without a configuration. chunks: this one, and others,
    whose dtype it has if it has no parameter."""
    dtype = next((param.dtype for chunk in chunks for param in chunk.parameters()), torch.float32)
    config = ModelParallelConfig(**_sizes(plan), params_dtype=dtype, pipeline_dtype=dtype, batch_p2p_sync=False)
    config.hidden_size = plan.config.model.hidden_size
    return config


def _sizes(plan: Plan) -> dict[str, Any]:
    """The layout as Megatron's configuration names it."""
    return {
        "tensor_model_parallel_size": plan.layout.tp,
        "pipeline_model_parallel_size": plan.layout.pp,
        "context_parallel_size": plan.layout.cp,
    }


def _layout_problems(plan: Plan, groups: Groups) -> list[str]:
    """Groups that are not of the plan's sizes."""
    layout = plan.layout
    wanted = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    if experts.has_own_ranks(plan):
        wanted |= {"ep": layout.ep, "expt_tp": layout.etp, "expt_dp": layout.edp}
    found = {name: getattr(groups.collection, name, None) for name in wanted}
    sizes = {name: "is missing" if group is None else f"has {group.size()} ranks" for name, group in found.items()}
    return [
        f"the {name} group {sizes[name]}, but the plan says {size}: give the groups of this layout, every one of them,"
        " or Plan.of a layout that has the groups' sizes"
        for name, size in wanted.items()
        if sizes[name] != f"has {size} ranks"
    ]


def _chunk_problems(plan: Plan, groups: Groups, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Chunks that are not those of this rank."""
    if len(chunks) != plan.layout.vpp:
        return [
            f"the model is {len(chunks)} chunks on this rank, but schedule {plan.layout.schedule} has"
            f" {plan.layout.vpp}: give as many, in the order of the schedule"
        ]
    problems = []
    last = plan.layout.pp * plan.layout.vpp - 1
    for number, chunk in enumerate(chunks):
        stage = groups.stage(number)
        for name, expected in (("pre_process", stage == 0), ("post_process", stage == last)):
            if getattr(chunk, name, expected) != expected:
                problems.append(
                    f"chunk {number} of pipeline rank {groups.pp.rank()} is stage {stage} of {last + 1}, but it"
                    f" was built with {name}={not expected}: it is a chunk of another stage"
                )
        if not hasattr(chunk, "set_input_tensor"):
            problems.append(
                f"chunk {number} ({type(chunk).__name__}) has no set_input_tensor(tensor), by which a pipeline gives a"
                " stage its input [sequence, micro-batch, hidden]; a plain torch module runs at pp 1, not in a list"
            )
        if plan.layout.pp > 1 and not getattr(chunk.config, "hidden_size", 0):
            problems.append("the size of what stages send is not known: give Plan.of the hidden_size of the model")
        problems += module_problems(chunk)
    held = Counter(id(param) for chunk in chunks for param in chunk.parameters() if param.requires_grad)
    if shared := [name for name, param in names.named_parameters(chunks) if held[id(param)] > 1]:
        problems.append(
            f"{listed(shared)}: one parameter in two chunks of this rank, which would both reduce it: give each its own"
        )
    return problems + parameter_problems(plan.config.sharding, dict(names.named_parameters(chunks)))


def _config_problems(plan: Plan, config: Any) -> list[str]:
    """Keys that would change the gradient, and that the user has to decide."""
    problems = [
        f"{name} of the chunks' configuration is set already; megaaccum fills it: leave it None"
        for name in HOOKS
        if (hook := getattr(config, name, None)) is not None
        and getattr(hook, "__module__", None) != SideLosses.__module__  # of an engine before, on this configuration
    ]
    if getattr(config, "gradient_accumulation_fusion", False):
        unfit = unfit_for_fusion(plan.config.sharding, plan.layout.schedule)
        problems += [f"{unfit}: build the chunks with gradient_accumulation_fusion=False"] if unfit else []
    sizes = _sizes(plan)
    if getattr(config, "num_moe_experts", None) is not None:
        sizes |= {"expert_model_parallel_size": plan.layout.ep, "expert_tensor_parallel_size": plan.layout.etp}
    problems += [
        f"{name} of the chunks' configuration is {getattr(config, name)}, but the plan's is {size}: make them equal"
        for name, size in sizes.items()
        if getattr(config, name, size) != size
    ]
    return problems
