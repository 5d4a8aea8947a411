"""`pretrain`: Megatron-LM's pretraining loop with the two objects of `wrap` in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import unwrap_model

from megaaccum.config import Plan, megatron_arguments
from megaaccum.distributed.start import groups_of
from megaaccum.errors import ConfigError
from megaaccum.loop.contract import get_forward_backward_func, wrap
from megaaccum.model.names import tied_pair
from megaaccum.upstream import megatron_training

if TYPE_CHECKING:
    from megaaccum.distributed.groups import Groups
    from megaaccum.loop.contract import LoopOptimizer


def pretrain(
    cfg_container: Any,
    train_valid_test_dataset_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    model_provider: Callable[..., Any] | None = None,
    *others: Any,
    keys: Mapping[str, Any] | None = None,
    **named: Any,
) -> None:
    """`megatron.training.pretrain`, over this package's sharding and schedules. Arguments as Megatron's.

    What Megatron's arguments do not say is in `keys`, by the names of this package: `zero_stage`, `backend`, `sync`,
    `schedule` (zbv and dualpipev want --num-virtual-stages-per-pipeline-rank 2), ... Default: ZeRO-3 with DeepSpeed,
    resident, under the schedule that Megatron runs; with --use-distributed-optimizer Megatron's own distributed
    optimizer.

    Raises ConfigError on every rank, before anything starts, for arguments that do not go together with this.
    """
    args = megatron_training.args_of_run()
    plan = plan_of(args, keys or {})
    if args.rank == 0:
        print("".join(f"megaaccum: {note}\n" for note in plan.notes), end="", flush=True)
    # A sharding backend overlaps reductions and gathers in its own way, and owns the gradient buffers.
    args.overlap_grad_reduce = args.overlap_param_gather = args.gradient_accumulation_fusion = False
    objects = _Objects(plan, megatron_training.function("get_model"))
    stages = {"is_pipeline_first_stage": 0, "is_pipeline_last_stage": plan.layout.num_stages - 1}
    in_v = {name: partial(objects.is_stage, stage) for name, stage in stages.items()}
    names: dict[str, Callable[..., Any]] = {
        "get_model": objects.get_model,
        "get_megatron_optimizer": lambda *_, **__: objects.optimizer,
        "get_forward_backward_func": lambda *_, **__: get_forward_backward_func(plan),
    }
    if getattr(cfg_container, "model", None) is not None:
        cfg_container.model.gradient_accumulation_fusion = False
        builder = cfg_container.model.get_builder_cls()
        cfg_container.model.get_builder_cls = lambda: objects.builder(builder)
    with megatron_training.in_place_of(**names, **(in_v if plan.layout.placement == "v" else {})):
        megatron_training.function("pretrain")(
            cfg_container,
            train_valid_test_dataset_provider,
            model_type,
            forward_step_func,
            model_provider and partial(objects.seated, model_provider),
            *others,
            **named,
        )


HONOURED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size",
    "sequence_parallel", "num_experts",
    "hidden_size", "distributed_timeout_minutes", "micro_batch_size", "seq_length", "global_batch_size",
    "bf16", "fp16", "lr", "min_lr", "decoupled_lr",
    "decoupled_min_lr", "weight_decay", "apply_wd_to_qk_layernorm", "adam_beta1", "adam_beta2", "adam_eps",
    "clip_grad",
)  # fmt: skip
"""Arguments that are keys of the plan under the same name."""


def plan_of(args: Any, keys: Mapping[str, Any]) -> Plan:
    """The plan that Megatron's arguments and `keys` make. Its first notes are on arguments that act otherwise here.
    Raises ConfigError."""
    flags = megatron_training.flags_of_run(args)
    rows = [
        (row, ", ".join(flags[name] for name in row.names if name in flags))
        for row in megatron_arguments.lists_in_loop()
    ]
    chosen, notes, problems = megatron_arguments.optimizer_of(args, flags)
    problems += [row.text(shown) for row, shown in rows if shown and row.loop == "refuse"]
    if problems:
        raise ConfigError(problems).printed_once()
    notes += [row.text(shown) for row, shown in rows if shown and row.loop == "note"]
    values = {name: getattr(args, name) for name in HONOURED} | _translated(args, flags, keys, notes)
    if not args.num_experts:
        del values["expert_tensor_parallel_size"]  # Megatron's check sets it to tp in dense models too
    values["optimizer"] = {"optimizer": chosen}  # a section has the key's name
    plan = Plan.of(
        batch={name: values.pop(name) for name in ("micro_batch_size", "seq_length", "global_batch_size")},
        **(values | dict(keys)),
    )
    return replace(plan, notes=notes + plan.notes)


def _translated(args: Any, flags: Mapping[str, str], keys: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The keys that arguments of other names set, or those that have an effect with another one alone. keys: those that
    are given beside them, and outrank them."""
    acting = megatron_arguments.loss_scale_keys(args)
    idle = [flags[name] for name in megatron_arguments.LOSS_SCALE if name in flags and name not in acting]
    if idle:
        notes.append(f"{', '.join(idle)}: {megatron_arguments.NO_EFFECT_ON_SCALE[args.fp16]}.")
    values: dict[str, Any] = {name: getattr(args, name) for name in acting}
    is_muon, is_lion = args.optimizer in ("muon", "dist_muon"), args.optimizer == "lion"
    if is_muon:
        # Megatron orthogonalises gate and up projection as one matrix.
        values |= {name: getattr(args, name) for name in megatron_arguments.MUON} | {"muon_split_gated": False}
    values |= {name: getattr(args, name) for name in megatron_arguments.LION} if is_lion else {}
    values |= megatron_arguments.SOAP if args.optimizer == "soap" else {}
    for optimizer, acts in (("muon", is_muon), ("lion", is_lion)):
        unused = [text for name, text in flags.items() if name.startswith(f"{optimizer}_")]
        if unused and not acts:
            notes.append(f"{', '.join(unused)}: no effect without --optimizer {optimizer}.")
    values |= {"grad_reduce_dtype": "bf16"} if args.grad_reduce_in_bf16 else {}
    values |= {"offload_optimizer": "cpu"} if args.optimizer_cpu_offload else {}
    # Megatron moves --use-distributed-optimizer to the other argument where the optimizer is Muon.
    shards_state = args.use_distributed_optimizer or getattr(args, "use_layer_wise_distributed_optimizer", False)
    if shards_state and not {"backend", "zero_stage"} & keys.keys():
        chosen, note = megatron_arguments.distributed_optimizer(args, offload=bool(args.optimizer_cpu_offload))
        values |= chosen
        notes += [f"--use-distributed-optimizer: {note}"] if note else []
    if args.deterministic_mode:
        if megatron_arguments.repeats_to_the_bit(values | dict(keys)):
            values["deterministic"] = True
        else:
            notes.append(megatron_arguments.ORDER_OF_COLLECTIVES)
    return values


class _Objects:
    """Stand-ins for the functions by which Megatron's loop makes model and optimizer and finds the ends of a V."""

    optimizer: LoopOptimizer

    def __init__(self, plan: Plan, get_model: Callable[..., list[torch.nn.Module]]):
        self._plan, self._get_model = plan, get_model

    @cached_property
    def groups(self) -> Groups:
        """The process groups that Megatron has initialised."""
        return groups_of(self._plan, None)

    def get_model(self, model_provider_func: Any, *args: Any, **kwargs: Any) -> list[torch.nn.Module]:
        """Megatron's get_model of a model_provider, its chunks wrapped by `wrap`."""
        return self._wrapped(self._get_model, model_provider_func, *args, **kwargs)

    def builder(self, theirs: type) -> type:
        """Megatron's builder of a model configuration, its models wrapped by `wrap`."""
        objects = self

        class Builder(theirs):  # type: ignore[misc]
            def build_model(self, pg_collection: Any, *args: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
                build = super().build_model
                return objects.seated(build, *args, vp_stage=vp_stage, pg_collection=pg_collection, **kwargs)

            def build_distributed_models(self, *args: Any, **kwargs: Any) -> list[torch.nn.Module]:
                return objects._wrapped(super().build_distributed_models, *args, **kwargs)

        return Builder

    def seated(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A chunk built by `build`, Megatron's model_provider or builder; in a V, with the stage that it has there."""
        if self._plan.layout.placement != "v":
            return build(*args, **kwargs)
        chunk = kwargs["vp_stage"]
        stage, last = self.groups.stage(chunk), self._plan.layout.num_stages - 1
        ends = {"pre_process": stage == 0, "post_process": stage == last}
        with self.groups.seated(chunk):
            return build(*args, **(kwargs | ends | {"pg_collection": self.groups.collection_of(chunk)}))

    def _wrapped(self, build: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        """The chunks that `build` builds, without Megatron's own wrapper and in that of `wrap`."""
        if not kwargs.get("wrap_with_ddp", True):
            return build(*args, **kwargs)
        chunks = build(*args, **(kwargs | {"wrap_with_ddp": False}))
        pair = tied_pair(unwrap_model(chunks))
        if pair is not None:  # a V has embedding and head on one rank, and no group that would make them equal
            pair[1].data.copy_(pair[0].data)
        wrapped, self.optimizer = wrap(chunks, self.groups, self._plan)
        return list(wrapped)

    def is_stage(self, stage: int, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        """Whether this rank's chunk `vp_stage` is stage `stage` of a V, its first or last. Without a chunk: whether
        this is the first or last rank of the pipeline; the last rank receives the reports."""
        pp = self.groups.pp
        if ignore_virtual or vp_stage is None:
            return pp.rank() == (0 if stage == 0 else pp.size() - 1)
        return self.groups.stage(vp_stage) == stage
