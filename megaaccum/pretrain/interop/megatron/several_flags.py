"""Rules for Megatron's arguments that are not one key each, one function per subject."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from megaaccum.config import megatron_arguments
from megaaccum.config.batch_ramp import BatchRamp, parse_schedule, requested_intervals
from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.keys import all_keys, unmet_need, value
from megaaccum.config.schema import BatchConfig, Config
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.deepspeed.reconcile import read_json
from megaaccum.pretrain.interop.megatron.parser import ParsedFlags
from megaaccum.texts import parse_json, read_text


@dataclass(slots=True)
class Reading:
    """A list of flags as megaaccum's keys."""

    values: dict[str, object] = field(default_factory=dict)
    """Typed values by key."""
    writers: dict[str, str] = field(default_factory=dict)
    """The origin of each key: a flag as written, or Megatron's default."""
    sources: dict[str, str] = field(default_factory=dict)
    """The destination of each key that a flag set."""
    megatron: dict[str, object] = field(default_factory=dict)
    """Fields of Megatron's model configuration without a key."""
    deepspeed: dict[str, object] | None = None
    """The JSON of --deepspeed_config."""
    outranking: Collection[str] = ()
    """Keys of the command line, which hold against flags of a file or script."""
    whole: bool = True
    """Whether it is a whole run, not a few flags beside a configuration file."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, key: str, value: object, given: ParsedFlags, name: str = "") -> None:
        """Set a key to a value of its type, because of the argument `name` or, if empty, of Megatron's default."""
        writer = given.written.get(name, "Megatron's default")
        try:
            value = coerce(value, all_keys()[key].annotation)
        except NotOfType as error:
            self.problems.append(f"{writer}: {key} must be {error}.")
            return
        if key in self.values and self.values[key] != value:
            other = self.writers[key]
            if key in self.outranking:
                self.notes.append(f"{writer} is set aside: the command line gives {other}.")
                return
            self.problems.append(f"{other} makes {key} {self.values[key]} and {writer} makes it {value}: keep one.")
            return
        self.values[key], self.writers[key] = value, writer
        if name:
            self.sources[key] = name


def _shape(given: ParsedFlags, reading: Reading) -> None:
    """Set layers, key/value heads and positions, which have more than one flag each."""
    args, checked = given.args, given.checked
    layers = checked.num_layers if checked is not None else args.num_layers or args.encoder_num_layers
    if layers is not None and given.has("num_layers", "encoder_num_layers", "hybrid_layer_pattern"):
        reading.put("num_layers", layers, given, "num_layers" if given.has("num_layers") else "encoder_num_layers")
    if args.group_query_attention:
        reading.put("num_query_groups", args.num_query_groups, given, "num_query_groups")
    elif given.has("num_query_groups"):
        reading.notes.append(f"{given.shown('num_query_groups')}: no effect without --group-query-attention.")
    if given.has("add_position_embedding") and args.position_embedding_type not in ("rope", "yarn"):
        if not args.use_rotary_position_embeddings:
            reading.problems.append("--no-position-embedding needs --position-embedding-type rope, or none instead.")
    if given.has("sequence_parallel"):
        if args.tensor_model_parallel_size > 1:
            reading.put("sequence_parallel", True, given, "sequence_parallel")
        else:
            reading.notes.append("--sequence-parallel: there is nothing to split at tensor_model_parallel_size 1.")
    if args.recompute_activations:
        reading.put("recompute_granularity", "selective", given, "recompute_activations")
    if given.has("checkpoint_num_layers") and given.has("recompute_num_layers"):
        reading.values["recompute_num_layers"] = args.checkpoint_num_layers


def _uneven_stages(given: ParsedFlags, reading: Reading) -> None:
    """Set the pipeline layout if embedding and loss count as a layer each."""
    args = given.args
    first, last = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    if given.checked is None or not (first or last) or args.pipeline_model_parallel_size == 1:
        return
    stages = args.pipeline_model_parallel_size * (given.checked.virtual_pipeline_model_parallel_size or 1)
    per, rest = divmod(given.checked.num_layers + int(first) + int(last), stages)
    if rest:
        reading.problems.append(f"{stages} stages do not divide the layers, embedding and loss of this split.")
        return
    mtp = "m" * (args.mtp_num_layers or 0)
    layers = ["t" * (per - (index == 0 and first) - (index == stages - 1 and last)) for index in range(stages)]
    layers[0], layers[-1] = "E" + layers[0], layers[-1] + mtp + "L"
    name = "account_for_loss_in_pipeline_split" if last else "account_for_embedding_in_pipeline_split"
    reading.put("pipeline_model_parallel_layout", "|".join(layers), given, name)
    for key in ("num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size"):
        reading.values.pop(key, None)


def _precision(given: ParsedFlags, reading: Reading) -> None:
    """Set the precision of gradient sums, FP32 unless BF16 is requested, and for FP16 the loss scale."""
    if given.args.grad_reduce_in_bf16:
        reading.put("grad_reduce_dtype", "bf16", given, "grad_reduce_in_bf16")
    acting, why = megatron_arguments.loss_scale_keys(given.args), megatron_arguments.NO_EFFECT_ON_SCALE[given.args.fp16]
    if "fp16" in (reading.deepspeed or {}):
        acting, why = (), "the JSON says how the loss is scaled, as in Megatron-DeepSpeed"
    for name in megatron_arguments.LOSS_SCALE:
        if given.has(name) and name in acting:
            reading.put(name, getattr(given.args, name), given, name)
        elif given.has(name) and getattr(given.args, name):
            reading.notes.append(f"{given.written[name]}: {why}.")


def _optimizer(given: ParsedFlags, reading: Reading) -> None:
    """Set the optimizer."""
    chosen, notes, problems = megatron_arguments.optimizer_of(given.args, given.written)
    if given.has("optimizer") and not problems:
        reading.put("optimizer", chosen, given, "optimizer")
    reading.notes += notes
    reading.problems += problems


def _experts(given: ParsedFlags, reading: Reading) -> None:
    """Set the number of experts: --num-experts is Megatron-core's MoE, unless other flags show that DeepSpeed's is
    meant."""
    args = given.args
    theirs = ("mlp_type", "topk", "expert_interval", "moe_loss_coeff", "moe_train_capacity_factor", "moe_min_capacity",
              "disable_moe_token_dropping", "disable_moe_top2_2nd_expert_sampling")  # fmt: skip
    fork = given.has(*theirs) or (given.has("deepspeed") and not given.has("moe_router_topk"))
    if fork:
        reading.values.pop("expert_model_parallel_size", None)
        if args.num_experts not in (None, 1):
            reading.problems.append(
                f"{given.shown('num_experts', *theirs)}: this is DeepSpeed's own MoE layer (capacity limits, dropped"
                " tokens, its gating), which computes something else than Megatron-core's; write --num-experts with"
                " --moe-router-topk and --moe-aux-loss-coeff instead, and expect other numbers."
            )
        elif given.has(*theirs):
            reading.notes.append(f"{given.shown(*theirs)}: the model is dense, so there is nothing to route.")
    elif args.num_experts is not None:
        for name in ("num_experts", "expert_tensor_parallel_size"):
            if (size := getattr(args, name)) is not None:
                reading.put(name, size, given, name)


def _deepspeed(given: ParsedFlags, reading: Reading) -> None:
    """Read DeepSpeed's JSON and set the ZeRO stage."""
    args = given.args
    if given.has("deepspeed_config"):
        path = given.locate(args.deepspeed_config)
        reading.deepspeed = read_json(path, given.written["deepspeed_config"], reading.problems)
    if given.has("zero_stage") and args.zero_stage == 0 and (args.fp16 or args.bf16 or reading.deepspeed is not None):
        reading.put("zero_stage", 1, given, "zero_stage")
        reading.notes.append("--zero-stage 0: ZeRO-1, which shards the optimizer state; the step is the same.")
    elif given.has("zero_stage") and args.zero_stage == 0:
        reading.put("backend", "ddp", given, "zero_stage")
        reading.notes.append("--zero-stage 0: torch DistributedDataParallel, with nothing sharded.")
    elif given.has("zero_stage"):
        reading.put("zero_stage", args.zero_stage, given, "zero_stage")
    elif given.has("deepspeed") and "zero_optimization" not in (reading.deepspeed or {}):
        reading.put("zero_stage", 1, given, "deepspeed")


_STAGES = {"no_shard": 1, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _sharding(given: ParsedFlags, reading: Reading) -> None:
    """Set the backend or ZeRO stage that gives the same result as Megatron's own sharding."""
    args, values = given.args, reading.values
    chosen = {"backend", "zero_stage"} & values.keys() or reading.deepspeed is not None
    offload = "offload_optimizer" in values
    if chosen:
        used = given.shown("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2")
        if used:
            reading.notes.append(f"{used}: the backend or ZeRO stage that is given beside it holds.")
    elif args.use_torch_fsdp2 and not offload:
        reading.put("backend", "fsdp2", given, "use_torch_fsdp2")
        reading.notes.append("--use-torch-fsdp2: backend fsdp2, torch's fully_shard under megaaccum's own hooks.")
    elif args.use_megatron_fsdp or args.use_torch_fsdp2:
        strategy = "optim_grads_params" if args.use_torch_fsdp2 or offload else args.data_parallel_sharding_strategy
        name = "use_torch_fsdp2" if args.use_torch_fsdp2 else "use_megatron_fsdp"
        reading.put("zero_stage", _STAGES[strategy], given, name)
        reading.notes.append(f"{given.written[name]}: DeepSpeed ZeRO-{_STAGES[strategy]} shards the same in its place.")
    elif args.use_distributed_optimizer:
        keys, note = megatron_arguments.distributed_optimizer(args, offload=offload)
        for key, value in keys.items():
            reading.put(key, value, given, "use_distributed_optimizer")
        reading.notes += [f"--use-distributed-optimizer: {note}"] if note else []


def _deterministic(given: ParsedFlags, reading: Reading) -> None:
    if not given.args.deterministic_mode:
        return
    if megatron_arguments.repeats_to_the_bit(reading.values):
        reading.put("deterministic", True, given, "deterministic_mode")
    else:
        reading.notes.append(megatron_arguments.ORDER_OF_COLLECTIVES)


def _tokenizer(given: ParsedFlags, reading: Reading) -> None:
    kind, model = given.args.tokenizer_type, given.args.tokenizer_model
    if model is not None:
        reading.put("tokenizer_model", model, given, "tokenizer_model")
    if given.has("sft") and kind == "SFTTokenizer":
        return  # a Hugging Face tokenizer with a chat template
    if kind in ("NullTokenizer", "NullMultimodalTokenizer") and given.args.vocab_size is None:
        reading.problems.append(f"{given.written['tokenizer_type']} needs --vocab-size, the number of tokens.")
    elif kind is not None:
        reading.put("tokenizer_type", kind, given, "tokenizer_type")


def _data(given: ParsedFlags, reading: Reading) -> None:
    """Set data paths, of which files of paths are read at once, as Megatron-LM does."""
    if given.args.fim_data:
        reading.notes.append(
            "--fim-data: where a sample is cut is drawn from the seed and the sample's number, so that layouts and"
            " restarts train the same samples; in Megatron each reader draws on its own."
        )
    listing, by_split = given.args.data_args_path, given.args.per_split_data_args_path
    if listing and (text := _read(given, reading, "data_args_path", listing)) is not None:
        reading.put("data_path", text.split(), given, "data_args_path")
    if by_split and (text := _read(given, reading, "per_split_data_args_path", by_split)) is not None:
        try:
            blends = parse_json(text)
            for split in ("train", "valid", "test"):
                if blends[split]:
                    paths = [str(item) for item in blends[split]]
                    reading.put(f"{split}_data_path", paths, given, "per_split_data_args_path")
        except (ValueError, TypeError, KeyError):
            expected = '{"train": [...], "valid": [...], "test": [...]}'
            reading.problems.append(f"{given.written['per_split_data_args_path']}: the file must be JSON: {expected}.")


def _read(given: ParsedFlags, reading: Reading, name: str, path: str) -> str | None:
    try:
        return read_text(given.locate(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reading.problems.append(f"{given.written[name]}: cannot read {path}: {reason}.")
        return None


def _conversations(given: ParsedFlags, reading: Reading) -> None:
    """Read --sft with the tokenizer's chat template, under which Megatron trains on prompts too; its own templates are
    refused."""
    if not given.has("sft"):
        return
    if (kind := given.args.sft_tokenizer_prompt_format) != "default":
        reading.problems.append(
            f"--sft-tokenizer-prompt-format {kind}: a chat template of Megatron's own; leave it and --sft out, and set"
            " sft true with chat_template_path, that template in a file."
        )
        return
    reading.put("sft", True, given, "sft")
    reading.values.setdefault("assistant_only_loss", False)
    reading.notes.append(
        "--sft: trains on all tokens of a conversation, as Megatron does with this template (assistant_only_loss"
        " false); rows hold several conversations."
    )


def _hybrid(given: ParsedFlags, reading: Reading) -> None:
    """Pass on the layer pattern of a HybridModel, whose kernels need a GPU, and refuse layers of a user's own."""
    pattern = given.args.hybrid_layer_pattern or given.args.hybrid_override_pattern
    if pattern is not None:
        # The second sets how initial weights are scaled by depth.
        reading.megatron |= {"hybrid_layer_pattern": pattern, "is_hybrid_model": True}
        reading.notes.append(
            "a hybrid model: its Mamba layers need a GPU with mamba_ssm and Transformer Engine; memory and times are"
            " predicted as if each layer were attention and an MLP."
        )
    elif given.args.spec is not None:
        reading.problems.append(
            f"{given.written['spec']}: layers of one's own need a model of one's own; leave it out."
        )
    if given.args.experimental_attention_variant is not None:
        reading.notes.append(
            f"{given.written['experimental_attention_variant']}: needs a GPU with Transformer Engine (and fla for"
            " linear attention)."
        )


def _starting_over(given: ParsedFlags, reading: Reading) -> None:
    """Refuse --no-load-lr-state for a run that resumes: Megatron-DeepSpeed then ignores the checkpoint's schedule."""
    if given.has("no_load_lr_state") and not given.has("reset_iteration", "finetune"):
        reading.problems.append(
            "--no-load-lr-state: a run that resumes continues its schedule; write --override-opt_param-scheduler for"
            " another one, or --reset-iteration."
        )


def _without_effect(given: ParsedFlags, reading: Reading) -> None:
    """Drop, with a note, flags of a whole list that do nothing without another one: Megatron ignores them."""
    values = reading.values
    if not reading.whole:
        return
    if "fp8_format" in values and not (given.args.bf16 or given.args.fp16 or reading.deepspeed):
        del values["fp8_format"]
        reading.notes.append(
            f"{given.shown('fp8')}: no effect without --bf16: FP8 quantizes BF16, and these parameters are FP32."
        )
    if "aux_loss" not in str(values.get("moe_router_load_balancing_type", "aux_loss")) and given.args.num_experts:
        if values.pop("moe_aux_loss_coeff", None):
            reading.notes.append(f"{given.shown('moe_aux_loss_coeff')}: no effect without a balancing loss.")
    factor = values.get("moe_expert_capacity_factor")
    if isinstance(factor, float | int) and factor < 0:
        del values["moe_expert_capacity_factor"]
        reading.notes.append(f"{given.shown('moe_expert_capacity_factor')}: below 0, no token is dropped.")
    needs: dict[str, list[str]] = {}
    for key, name in reading.sources.items():
        need = unmet_need(key, lambda other: values.get(other, value(Config(), other))) if key in values else ""
        if need and all_keys()[key].section != "parallel":
            needs.setdefault(need, []).append(name)
            del values[key]
    reading.notes += [f"{given.shown(*names)}: no effect without {need}." for need, names in needs.items()]


def _overlap(given: ParsedFlags, reading: Reading) -> None:
    """Switch off overlapped communication where it is not supported; only time changes."""
    values = reading.values
    weighs_each = values.get("mtp_num_layers") and values.get("loss_norm") != "token"
    if values.get("overlap_moe_expert_parallel_comm") and weighs_each:
        values["overlap_moe_expert_parallel_comm"] = False
        reading.notes.append("--overlap-moe-expert-parallel-comm: off, as prediction layers weigh each micro-batch.")


_LENGTHS = {
    "train_samples": "train_iters",
    "train_tokens": "train_iters",
    "lr_decay_tokens": "lr_decay_samples",
    "lr_warmup_tokens": "lr_warmup_samples",
}


def _batch_ramp(reading: Reading) -> BatchRamp | None:
    """The batch of each step by the flags, before rounding; None without one, or if `resolve` is going to refuse it."""
    values: dict[str, Any] = reading.values
    size, seq_length = values.get("global_batch_size"), values.get("seq_length") or 1
    ramp, steps = values.get("rampup_batch_size"), values.get("step_batch_size_schedule")
    try:
        if size is None:
            return BatchRamp(tuple(parse_schedule(steps, seq_length)), {}) if steps else None
        if not ramp and not steps:
            return BatchRamp(((0, size),), {})
        keys = BatchConfig(rampup_batch_size=ramp, step_batch_size_schedule=steps)
        return BatchRamp(tuple(requested_intervals(keys, seq_length=seq_length, global_batch_size=size)), {})
    except ConfigError:
        return None


def _lengths(given: ParsedFlags, reading: Reading) -> None:
    """Convert the run's length to whole optimizer steps, and spans of the schedule in tokens to samples, which it
    counts."""
    values: dict[str, Any] = reading.values
    for name, key in _LENGTHS.items():
        number = getattr(given.args, name)
        if not given.has(name) or number is None:
            continue
        unit, of_run = values.get("seq_length") if name.endswith("tokens") else 1, key == "train_iters"
        ramp = _batch_ramp(reading) if of_run else BatchRamp(((0, 1),), {})
        if ramp is None or not unit:
            needed = " and ".join(["--global-batch-size"] * (ramp is None) + ["--seq-length"] * (not unit))
            made = f"must be given to make {'steps' if of_run else 'samples'} of it"
            reading.problems.append(f"{given.written[name]}: {needed} {made}.")
            continue
        length = ramp.steps_within(number // unit)
        in_steps = key.replace("_samples", "_iters")
        if not of_run and in_steps in values and (batches := _batch_ramp(reading)) is not None:
            values[key] = batches.samples_after(values.pop(in_steps))
            reading.writers[key] = reading.writers[in_steps]
        if ramp.samples_after(length) * unit != number:
            size = ramp.size_at(number // unit) * unit
            whole = f"whole {'batches' if of_run else 'samples'} of {size} {name.split('_')[-1]}"
            reading.notes.append(f"{given.written[name]}: {key} {length}, {whole}.")
        if key in values:
            values[key] = first = min(length, values[key])
            reading.notes.append(
                f"{given.written[name]} beside {reading.writers[key]}: {key} {first}, the first to end."
            )
        else:
            reading.put(key, length, given, name)
    if reading.whole and given.args.train_samples and not {"lr_decay_samples", "lr_decay_iters"} & values.keys():
        reading.put("lr_decay_samples", given.args.train_samples, given, "train_samples")


RULES: tuple[Callable[[ParsedFlags, Reading], None], ...] = (
    _shape, _uneven_stages, _lengths, _deepspeed, _precision, _optimizer, _experts, _sharding, _deterministic,
    _tokenizer, _data, _conversations, _hybrid, _starting_over, _without_effect, _overlap,
)  # fmt: skip
"""The rules in the order in which they run: later ones read keys that earlier ones set."""
