"""Megatron flags whose meaning depends on other flags: one function per family of the table with treatment `rule`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from megaaccum.errors import either, nearest_multiples
from megaaccum.interop.deepspeed_json import read_json
from megaaccum.interop.megatron_reading import Reading


def lengths(reading: Reading) -> None:
    """Lengths in samples or tokens become optimizer steps of global_batch_size sequences of seq_length tokens."""
    _keep_the_shorter(reading)
    for unit, names in _LENGTHS.items():
        for name, key in names.items():
            number = reading.number(name)
            if number is not None:
                _put_steps(reading, name, key, int(number), unit)


_LENGTHS: dict[str, dict[str, str]] = {
    "samples": {
        "--train-samples": "train_iters",
        "--lr-decay-samples": "lr_decay_iters",
        "--lr-warmup-samples": "lr_warmup_iters",
        "--lr-wsd-decay-samples": "lr_wsd_decay_iters",
    },
    "tokens": {
        "--train-tokens": "train_iters",
        "--lr-decay-tokens": "lr_decay_iters",
        "--lr-warmup-tokens": "lr_warmup_iters",
    },
}


def _keep_the_shorter(reading: Reading) -> None:
    """Megatron-DeepSpeed ends at the first of --train-samples and --train-tokens, so the larger has no effect."""
    samples, tokens = reading.number("--train-samples"), reading.number("--train-tokens")
    seq_length = reading.known("seq_length")
    if samples is None or tokens is None or not isinstance(seq_length, int):
        return
    longer = "--train-samples" if samples * seq_length >= tokens else "--train-tokens"
    del reading.given[longer]
    reading.notes.append(f"without effect: {longer}. --train-samples and --train-tokens: the run ends at the first.")


def _put_steps(reading: Reading, name: str, key: str, number: int, unit: str) -> None:
    needed = ["global_batch_size"] + (["seq_length"] if unit == "tokens" else [])
    sizes = [reading.known(size) for size in needed]
    writer = str(reading.given[name])
    flag = "--" + key.replace("_", "-")
    if reading.unresolved & {"--global-batch-size", "--seq-length"}:
        return
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        missing = " and ".join("--" + size.replace("_", "-") for size in needed)
        reading.problems.append(f"{writer}: {missing} must stand beside it to make steps of it; or write {flag}.")
        return
    per_step = math.prod(sizes)  # type: ignore[arg-type]
    if number % per_step == 0:
        reading.put(key, number // per_step, writer)
        return
    near = nearest_multiples(number, per_step)
    steps = either([multiple // per_step for multiple in near])
    reading.problems.append(
        f"{writer}: a step takes {per_step} {unit} ({' * '.join(needed)}), so this is {number / per_step:.2f} steps;"
        f" write {name} {either(near)}, or {flag} {steps}."
    )


def query_groups(reading: Reading) -> None:
    """--group-query-attention switches --num-query-groups on; Megatron-LM's default is one group."""
    switch, number = "--group-query-attention" in reading.given, reading.number("--num-query-groups")
    if switch and number is None:
        if reading.known("num_query_groups") is None:
            reading.put("num_query_groups", 1, "--group-query-attention")
    elif number is not None and not switch:
        reading.problems.append(
            f"--num-query-groups {number} does nothing in Megatron-LM without --group-query-attention: add that flag,"
            " or leave this one out."
        )
    elif number is not None:
        reading.put("num_query_groups", number, f"--num-query-groups {number}")


def rotary(reading: Reading) -> None:
    """--use-rotary-position-embeddings is an older way to say rope, beside which there is no learned table."""
    if "--use-rotary-position-embeddings" in reading.given:
        reading.put("position_embedding_type", "rope", "--use-rotary-position-embeddings")
    if "--no-position-embedding" in reading.given and reading.known("position_embedding_type") != "rope":
        reading.problems.append(
            "--no-position-embedding: Megatron-LM takes it with rotary positions only; write"
            " --position-embedding-type rope, or --position-embedding-type none for a model without positions."
        )


_HUGGING_FACE = ("HuggingFaceTokenizer", "HFTokenizer")


def tokenizer(reading: Reading) -> None:
    """megaaccum reads Hugging Face tokenizers files; for anything else, say how to get one."""
    kind = reading.given.get("--tokenizer-type")
    model = reading.given.get("--tokenizer-model")
    vocabulary = [reading.given[name] for name in ("--vocab-file", "--merge-file") if name in reading.given]
    name = kind.values[0] if kind else None
    if name == "NullTokenizer" and reading.known("vocab_size") is None:
        reading.problems.append("--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens.")
    elif name == "NullTokenizer" or (name is None and not vocabulary) or (name in _HUGGING_FACE and model):
        if model:
            reading.put("tokenizer_model", model.values[0], str(model))
    elif name in _HUGGING_FACE:
        reading.problems.append(f"{kind} needs --tokenizer-model, a tokenizer.json or a folder with one.")
    else:
        given = " ".join(str(item) for item in (kind, model, *vocabulary) if item)
        reading.problems.append(
            f"{given}: megaaccum reads Hugging Face tokenizers files; {_how_to_convert(name, len(vocabulary) == 2)} and"
            " write --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json instead."
        )


def _how_to_convert(name: str | None, with_merges: bool) -> str:
    if with_merges or name == "GPT2BPETokenizer":
        return "make one in Python with tokenizers.ByteLevelBPETokenizer(vocab_file, merge_file).save('tokenizer.json')"
    if name in ("Llama2Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        return "take the tokenizer.json that is published with the model, or convert the SentencePiece model to one"
    return "take or make a tokenizer.json with the same vocabulary"


def data_files(reading: Reading) -> None:
    """Data paths that stand in a file are read at once, as Megatron-LM does."""
    listing, by_split = reading.given.get("--data-args-path"), reading.given.get("--per-split-data-args-path")
    if listing and (text := _read_text(reading, str(listing), listing.values[0])) is not None:
        reading.put("data_path", text.split(), str(listing))
    if by_split and (text := _read_text(reading, str(by_split), by_split.values[0])) is not None:
        try:
            paths = json.loads(text)
            blends = {split: [str(item) for item in paths[split]] for split in ("train", "valid", "test")}
        except (ValueError, TypeError, KeyError):
            expected = '{"train": [...], "valid": [...], "test": [...]}'
            reading.problems.append(f"{by_split}: the file must be JSON with a list per split: {expected}.")
            return
        for split, blend in blends.items():
            if blend:
                reading.put(f"{split}_data_path", blend, str(by_split))


def _read_text(reading: Reading, writer: str, name: str) -> str | None:
    try:
        return Path(reading.base_dir, name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reading.problems.append(f"{writer}: cannot read {Path(reading.base_dir, name)}: {reason}.")
        return None


def loss_scaling(reading: Reading) -> None:
    """Loss scaling belongs to FP16; without FP16 the flags say nothing."""
    given = {name: reading.given[name] for name in _LOSS_SCALING if name in reading.given}
    if reading.known("fp16") is True:
        for name, item in given.items():
            reading.put(_LOSS_SCALING[name], item.values[0], str(item))
    elif given:
        texts = ", ".join(str(item) for item in given.values())
        reading.notes.append(f"without effect: {texts}. Only FP16 needs its loss scaled.")


_LOSS_SCALING = {
    "--loss-scale": "loss_scale",
    "--initial-loss-scale": "initial_loss_scale",
    "--min-loss-scale": "min_loss_scale",
    "--loss-scale-window": "loss_scale_window",
    "--hysteresis": "hysteresis",
}


_FORK = ("--deepspeed", "--zero-stage", "--no-pipeline-parallel", "--deepspeed-activation-checkpointing")
_FORK_EXPERTS = "Experts of Megatron-DeepSpeed"


def experts(reading: Reading) -> None:
    """--num-experts is Megatron-core's MoE, unless the rest of the list says that DeepSpeed's own is meant."""
    given = reading.given.get("--num-experts")
    theirs = [item for item in reading.given.values() if item.flag.family.title == _FORK_EXPERTS]
    counts = given.values if given else ()
    if len(counts) > 1:
        reading.problems.append(f"{given}: every MoE layer has the same number of experts here; give one number.")
        return
    number = reading.number("--num-experts")
    fork = bool(theirs) or any(name in reading.given for name in _FORK)
    if number is None or (number == 1 and fork):
        if theirs and number in (None, 1):
            names = ", ".join(item.written for item in theirs)
            reading.notes.append(f"without effect: {names}. The model is dense.")
        return
    if theirs or ("--deepspeed" in reading.given and "--moe-router-topk" not in reading.given):
        reading.problems.append(_write_core_experts(reading, [str(given), *map(str, theirs)]))
    else:
        reading.put("num_experts", number, str(given))


def _write_core_experts(reading: Reading, written: list[str]) -> str:
    """The problem text, with Megatron-core's flags for the numbers given or Megatron-DeepSpeed's defaults."""
    numbers = {"--num-experts": "1", **_FORK_DEFAULTS}
    numbers |= {name: reading.given[name].values[0] for name in numbers if name in reading.given}
    return (
        f"{' '.join(written)}: this is DeepSpeed's own MoE layer (capacity limits, dropped tokens, its gating), which"
        " computes something else than Megatron-core's; write instead --num-experts {--num-experts}"
        " --expert-model-parallel-size {--moe-expert-parallel-size} --moe-router-topk {--topk} --moe-layer-freq"
        " {--expert-interval} --moe-aux-loss-coeff {--moe-loss-coeff}, and expect other numbers.".format(**numbers)
    )


_FORK_DEFAULTS = {
    "--moe-expert-parallel-size": "1",
    "--topk": "1",
    "--expert-interval": "2",
    "--moe-loss-coeff": "0.1",
}


def distributed_optimizer(reading: Reading) -> None:
    """Megatron's distributed optimizer shards what ZeRO-1 shards; an explicit stage outranks it."""
    if "--use-distributed-optimizer" not in reading.given:
        return
    block = reading.values.get("deepspeed")
    elsewhere = isinstance(block, dict) and "zero_optimization" in block
    if "--zero-stage" in reading.given or reading.known("zero_stage") is not None or elsewhere:
        reading.notes.append("without effect: --use-distributed-optimizer. The ZeRO stage that is given holds.")
        return
    reading.put("zero_stage", 1, "--use-distributed-optimizer")
    reading.notes.append(
        "--use-distributed-optimizer: zero_stage 1 shards the same optimizer state; --zero-stage 2 and 3 shard"
        " gradients and parameters as well."
    )


def fork_recompute(reading: Reading) -> None:
    """--checkpoint-activations keeps only the input of every --checkpoint-num-layers layers (default 1)."""
    layers = reading.number("--checkpoint-num-layers")
    if "--checkpoint-activations" in reading.given:
        reading.put("recompute_granularity", "full", "--checkpoint-activations")
        reading.put("recompute_method", "uniform", "--checkpoint-activations")
        reading.put("recompute_num_layers", 1 if layers is None else layers, "--checkpoint-activations")
    elif layers is not None:
        reading.notes.append("without effect: --checkpoint-num-layers. --checkpoint-activations is not given.")


def deepspeed(reading: Reading) -> None:
    """DeepSpeed's JSON, the ZeRO stage, and Megatron-DeepSpeed's switch for no pipeline."""
    if given := reading.given.get("--deepspeed_config"):
        path = Path(reading.base_dir, given.values[0])
        block = read_json(path, given.written, reading.problems)
        if block is not None:
            reading.values["deepspeed"] = block
    stage = reading.number("--zero-stage")
    if stage == 0:
        reading.problems.append(
            "--zero-stage 0: without sharding there is no DeepSpeed engine to use; write --zero-stage 1, 2 or 3, or"
            " --backend ddp for plain data parallelism."
        )
    elif stage is not None:
        reading.put("zero_stage", str(stage), f"--zero-stage {stage}")
    if "--no-pipeline-parallel" in reading.given:
        reading.put("pipeline_model_parallel_size", 1, "--no-pipeline-parallel")


def masked_loss(reading: Reading) -> None:
    """Megatron-LM's mean over micro-batches of means differs from the default here where tokens are masked."""
    if reading.known("eod_mask_loss") is True and reading.known("loss_norm") is None:
        reading.notes.append(
            "--eod-mask-loss without --calculate-per-token-loss: Megatron-LM weighs every micro-batch alike, whatever"
            " its number of unmasked tokens; loss_norm: token weighs every token alike. For Megatron-LM's, write"
            " --loss-norm microbatch."
        )


RULES: dict[str, Callable[[Reading], None]] = {
    "DeepSpeed": deepspeed,
    "Lengths in samples or tokens": lengths,
    "Grouped-query attention": query_groups,
    "Rotary positions": rotary,
    "Tokenizer": tokenizer,
    "Data paths in a file": data_files,
    "FP16 loss scaling": loss_scaling,
    "Experts": experts,
    "Distributed optimizer": distributed_optimizer,
    "Recompute in Megatron-DeepSpeed": fork_recompute,
    "Masked loss": masked_loss,
}
"""By the family of the table that each decides on, in the order in which they run: the DeepSpeed JSON first, because
others look into it. 'Experts' decides on Megatron-DeepSpeed's experts too, and 'Masked loss' only notes."""
