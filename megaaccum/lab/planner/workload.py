"""The subject of a plan: a model, a batch, GPUs, and how megaaccum runs them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megaaccum.config import resolve
from megaaccum.config.derive import derive
from megaaccum.config.schema import Config, ModelConfig, OptimizerConfig, ShardingConfig
from megaaccum.errors import ConfigError, DataError, raise_problems
from megaaccum.lab.planner.activations import Kernels, expert_load
from megaaccum.lab.planner.candidates import Candidates, Limits
from megaaccum.lab.planner.footprint import BYTES, state_bytes
from megaaccum.lab.planner.hardware import Hardware
from megaaccum.lab.planner.layouts import SYNC_MODES
from megaaccum.lab.planner.memory import MemoryModel, Usage
from megaaccum.lab.planner.stages import Stage
from megaaccum.lab.planner.time import BIASED_ROW_PASSES, Software, TimeModel
from megaaccum.model.sizes import padded_rows
from megaaccum.optim.owners import COSTS, Cost, Matrix, at_owners
from megaaccum.pretrain.data.sources import vocab_size
from megaaccum.pretrain.metrics.flops import uncounted
from megaaccum.pretrain.model.layers import Layers, on_a_gpu
from megaaccum.units import GIB

FP8_WEIGHTS = 2.0
"""Bytes per matrix element of weights in FP8: one copy for the forward, and a transposed one for the backward
(transformer-engine 2.20: row-wise and column-wise data), kept through a step beside the BF16 weight."""


ADDED_BYTES = 10.0
"""Bytes of a 16-bit gradient, which is read, and of the FP32 sum that it is added to, which is read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A configuration whose layout is open, on a number of GPUs of a kind."""

    config: Config
    """The configuration as it was read, without its schedule: nothing of it is derived."""
    model: ModelConfig
    """Its model, with every key that can be derived filled in."""
    sharding: ShardingConfig
    """Its sharding, likewise."""
    vocab_size: int
    """Entries of the vocabulary before padding."""
    world_size: int
    hardware: Hardware
    global_batch_size: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step over all ranks."""
        return self.global_batch_size * self.model.seq_length

    def layers(self, schedule: str | None = None) -> Layers:
        """The layers of a GPU with Transformer Engine, as far as the configuration's precision, its backend and the
        schedule (None: the configuration's own) allow them: FP32 is exact in local layers alone."""
        return on_a_gpu(replace(self.config, sharding=self.sharding), schedule)

    def candidates(self, limits: Limits) -> Candidates:
        """The legal layouts within `limits`."""
        return Candidates(
            model=self.model,
            world_size=self.world_size,
            gpus_per_node=self.hardware.links.gpus_per_node,
            global_batch_size=self.global_batch_size,
            zero_stage=self.sharding.zero_stage if self.sharding.backend != "ddp" else 0,
            limits=limits,
            fused_attention=self.layers().fused_attention,
            least_fill=1 if self.config.batch.allow_underfilled_pipeline else 2,
        )

    def memory_model(self) -> MemoryModel:
        """Bytes per rank as megaaccum's own backend keeps them, for every layout."""
        config = replace(self.config, model=self.model, sharding=self.sharding)
        modes, usage = modes_of(self.sharding), self.hardware.usage
        found = memory_model(config, self.vocab_size, modes, made_of=self.layers(), usage=usage)
        return replace(found, split_kernels=kernels_of(config, self.layers("zb-h1")))

    def time_model(self, memory: MemoryModel) -> TimeModel:
        """Seconds per step as megaaccum runs: one gather before the flush, the reduction under its last backward."""
        half, in_fp8 = self.sharding.params_dtype in ("bf16", "fp16"), self.config.quantization.fp8_format is not None
        fused = self.model.gradient_accumulation_fusion or not half
        flex = self.model.moe_token_dispatcher_type == "flex"
        software = Software(
            flash=self.layers().fused_attention, precision="fp8" if in_fp8 else "16 bit" if half else "fp32",
            grad_bytes=BYTES[self.sharding.grad_reduce_dtype], added_bytes=0.0 if fused else ADDED_BYTES,
            param_bytes=BYTES[self.sharding.params_dtype or "fp32"], sharded=self.sharding.backend != "ddp",
            ep_overlap=self.config.parallel.overlap_moe_expert_parallel_comm, fused_dispatch=flex,
            in_runs=self.sharding.reproducible == "layout", offloaded=self.sharding.offload_optimizer == "cpu",
            row_passes=(6.0 if flex or not in_fp8 else 10.0) + BIASED_ROW_PASSES * self.model.add_bias_linear,
            barrier=not self.config.step.speculative_step, imbalance=expert_load(self.model),
        )  # fmt: skip
        return TimeModel(
            model=self.model, vocab_size=self.vocab_size, hardware=self.hardware, stages=memory.stages,
            matrix_flops=_matrix_flops(self.config.optimizer), software=software,
        )  # fmt: skip


def make_workload(config: Config, *, world_size: int, hardware: Hardware) -> Workload:
    """The workload of a configuration that was read.

    Raises:
        ConfigError: the model's shape, the vocabulary or global_batch_size is missing, or nothing divides.
    """
    settled = copy.deepcopy(config)
    derive(settled, [])
    if config.sharding.memory_gib is not None:
        hardware = replace(hardware, hbm_bytes=config.sharding.memory_gib * GIB)
    model, batch = settled.model, settled.batch.global_batch_size or _batch_of(config, world_size)
    problems = [
        f"{name} is required to plan; add it to the file, or give --{name} on the command line."
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
        if getattr(model, name) < 1
    ]
    if batch is None:
        problems.append(
            "global_batch_size is required to plan: it is what the layouts divide; add it to the file, or give"
            " --global_batch_size on the command line (tokens per step / seq_length)."
        )
    for name in uncounted(config):
        problems.append(
            f"{name}: the planner knows no costs of such layers; choose a layout in the file, which `megaaccum check`"
            " judges."
        )
    if world_size < 1:
        problems.append(f"the plan is for {world_size} GPUs: give --gpus or --hostfile, or the key world_size.")
    raise_problems(problems)
    assert batch is not None
    keys, layout = replace(config.batch, global_batch_size=batch), replace(config.parallel, schedule=None)
    return Workload(
        config=replace(config, batch=keys, parallel=layout), model=model, sharding=settled.sharding,
        vocab_size=vocabulary(settled), world_size=world_size, hardware=hardware, global_batch_size=batch,
    )  # fmt: skip


def _batch_of(config: Config, world_size: int) -> int | None:
    """The sequences of a step that follow from other keys of the batch at the file's own layout; None if none is
    given. Raises ConfigError if they contradict each other."""
    keys = config.batch
    is_given = keys.micro_batch_size or keys.device_batch_size or keys.pp_microbatches or keys.grad_accum_steps
    if not is_given or world_size < 1:
        return None
    run = replace(config.run, train_iters=config.run.train_iters or 1)  # a plan needs no length and no learning rate
    optimizer = replace(config.optimizer, lr=config.optimizer.lr or 1.0)
    return resolve(replace(config, run=run, optimizer=optimizer), world_size=world_size).batch.global_batch_size


def vocabulary(config: Config) -> int:
    """Entries of the vocabulary before padding. Raises ConfigError if neither a key nor the data says."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        return vocab_size(config)
    except DataError as error:
        raise ConfigError(
            f"the plan needs the vocabulary: set vocab_size, as there is no dataset yet ({error})."
        ) from None


def kernels_of(config: Config, made_of: Layers) -> Kernels:
    """Kernels that decide what these layers keep. In FP8 the inputs of matrix products are kept in FP8."""
    element = BYTES[config.sharding.params_dtype or "fp32"]
    return Kernels(
        element=int(element),
        local=made_of.local,
        on_gpu=made_of.on_gpu,
        flash=made_of.fused_attention,
        matmul_element=None if config.quantization.fp8_format is None else 1.0,
        recompute_modules=frozenset(config.model.recompute_modules or ["core_attn"]),
        # Megatron's vocabulary-parallel loss: the logits, FP32 exponentials, and the logits' gradient.
        logit_bytes=2 * element + 4.0,
    )


def modes_of(sharding: ShardingConfig) -> list[ShardingConfig]:
    """The sync modes that a layout can name with this backend: those of its ZeRO stages and syncs that there are."""
    plain = replace(sharding, sync="resident", max_live_parameters=0)
    resident = [replace(plain, zero_stage=stage) for stage in range(4)]  # type: ignore[arg-type]
    streaming = replace(sharding, sync="streaming", zero_stage=3)
    return [*resident, streaming] if sharding.backend in ("deepspeed", "fsdp2") else resident


def memory_model(
    config: Config,
    vocab_size: int,
    modes: Sequence[ShardingConfig],
    *,
    made_of: Layers,
    usage: Usage | None = None,
    stages: Sequence[Stage] | None = None,
    flushes: int = 1,
) -> MemoryModel:
    """Bytes per rank of `config`, whose model and sharding are derived, under `modes`.

    modes: of one backend; they differ in ZeRO stage and sync. stages: those of the one layout that is asked for, whose
    other keys of the pipeline and of recompute hold too; default: of any. flushes: per step. In FP8 Transformer Engine
    keeps the layers' weights in FP8 too, and `speculative_step` keeps a copy of what an update changes.
    """
    model, sharding, in_fp8 = config.model, config.sharding, config.quantization.fp8_format is not None
    if stages is None:  # planned layouts recompute every layer alone, or none
        model = replace(model, recompute_method=None, recompute_num_layers=None)
    first, reduce = modes[0], BYTES[sharding.grad_reduce_dtype]
    moments = 1 if config.optimizer.optimizer == "lion" else 2
    more = dict(with_experts=model.num_experts is not None, with_undo=config.step.speculative_step)
    # DeepSpeed allocates a bucket in full and copies what is in it for the reduction.
    bucket = float(sharding.reduce_bucket_size) if first.backend == "deepspeed" else 0.0
    return MemoryModel(
        model=model,
        vocab_size=padded_rows(model, vocab_size, sharding.reproducible_tensor_blocks or 1),
        kernels=kernels_of(config, made_of),
        usage=usage or Usage(),
        states={
            (each.zero_stage, SYNC_MODES.index(each.sync)): state_bytes(each, **more, moments=moments) for each in modes
        },
        buffer_bytes=bucket * reduce,
        bucket_elements=bucket,
        bucket_bytes=reduce,
        sharded_over_dp=first.backend != "ddp",
        replicas=first.data_parallel_replicas,
        flushes=flushes,
        second_moment=_second_moment(config),
        soap=config.optimizer.optimizer == "soap",
        at_owners=at_owners(replace(config, sharding=first), 1),
        live_elements=max(mode.max_live_parameters for mode in modes),
        head_copy=sharding.reproducible == "layout",
        context_blocks=sharding.reproducible_context_blocks or 1,
        weight_cache=FP8_WEIGHTS if in_fp8 else 0.0,
        joined_units=first.backend == "fsdp2",
        fixed_stages=None if stages is None else tuple(stages),
        group_size=None if stages is None else config.parallel.microbatch_group_size_per_vp_stage,
    )


def _matrix_flops(keys: OptimizerConfig) -> Cost | None:
    """Operations of a matrix' own update; None if AdamW or Lion steps it."""
    if keys.optimizer == "soap":
        return Matrix.soap_flops
    return partial(Matrix.flops, steps=keys.muon_num_ns_steps) if keys.optimizer == "muon" else None


def _second_moment(config: Config) -> float:
    """Bytes per element of a moment of AdamW's that a matrix does not have: none on this device if they are
    offloaded."""
    sharding = config.sharding
    if config.optimizer.optimizer not in COSTS or sharding.offload_optimizer == "cpu":
        return 0.0
    return BYTES["fp64" if sharding.params_dtype == "fp64" else "fp32"]
