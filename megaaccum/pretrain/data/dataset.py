"""Training and validation samples: Megatron's GPT datasets over the configured pairs, checked before they are used.

No collective is issued here. Every rank builds or loads alone, and where several share a cache folder the first
that gets its lock builds. So a bad dataset is one error on every rank, and hosts need not share a file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from megaaccum.config.plan import Plan
from megaaccum.errors import ConfigError, DataError
from megaaccum.platform.replacing import replaced
from megaaccum.pretrain.data import chat_rows, fim
from megaaccum.pretrain.data.files import digest_of, disk_errors, locked, make_once, staging_folder, with_suffix
from megaaccum.pretrain.data.indexed import IndexedPair, check_ids, check_tables, open_pair
from megaaccum.pretrain.data.order import Corpus, Order, SampleDataset, Span
from megaaccum.pretrain.data.sources import (
    Blend,
    Sources,
    data_folder,
    read_run_vocabulary,
    read_sources,
    resolve_prefix,
)
from megaaccum.pretrain.data.tokenizer import Vocabulary
from megaaccum.pretrain.data.train_valid_split import check_ranges, epoch_samples, split_ranges
from megaaccum.texts import regular_file

_TRAIN, _VALID = 0, 1
_LOOKED_AT = 1 << 20
"""Tokens at each end of a pair among which there has to be one that ends a document."""
_MASKS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasets:
    """The samples of a run. The same on every rank."""

    train: Order
    """At least the samples that training consumes, in the order in which it consumes them."""
    valid: SampleDataset | None
    """The samples of one evaluation, the same each time; None where evaluation is off."""
    valid_batches: int
    """Global batches of one evaluation: eval_iters, or fewer where validation data has fewer in one pass."""
    vocabulary: Vocabulary
    """Every token id was, or will be, found to be below its size."""
    digest: str
    """Hash of the contents, the vocabulary, and what orders the training samples but for their number, 16 hexadecimal
    digits; independent of paths and of evaluation. Equal on two ranks, or before and after a restart, when they train
    on the same data."""
    facts: dict[str, str]
    """The values under the digest, for readers."""

    def state(self, consumed: int) -> dict[str, Any]:
        """The record of them in a checkpoint after `consumed` samples: plain numbers and texts."""
        return {"digest": self.digest, "facts": self.facts} | self.train.state(consumed)

    def differences(self, state: dict[str, Any]) -> dict[str, str]:
        """The facts in which these samples differ from those of `state`, with both values, and the keys to set back."""
        if state.get("digest") == self.digest:
            return {}
        then = state.get("facts", {})
        differing = {name: fact for name, fact in self.facts.items() if then.get(name) != fact}
        texts = {
            f"{name}: {then.get(name)} in the checkpoint, {fact} here": f"set {name} back"
            for name, fact in differing.items()
        }
        return texts or {"data: the contents are not those of the checkpoint": "restore the files"}

    def after(self, state: dict[str, Any], *, consumed: int, needed: int) -> Datasets:
        """These data for a run that continues after `consumed` samples up to sample `needed`, if a checkpoint recorded
        `state`: no sample comes twice and none is lost. Raises as `build_datasets`."""
        same = state.get("digest") == self.digest
        return replace(self, train=self.train.after(state, consumed, needed, same_data=same))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Everything that decides which samples there are."""

    sources: Sources
    """With paths of pairs in place of 'embedded'."""
    pairs: dict[str, IndexedPair]
    vocabulary: Vocabulary
    train_samples: int
    valid_samples: int
    plan: Plan

    @property
    def seq_length(self) -> int:
        return self.plan.config.model.seq_length

    @property
    def masks(self) -> list[str]:
        """The keys that mask tokens, positions or scores of a sample."""
        return [key for key in _MASKS if getattr(self.plan.config.data, key)]

    def shown(self) -> dict[str, str]:
        """The facts that decide the training samples, for readers."""
        train = self.sources.train
        weights = train.weights or [1.0] * len(train.prefixes)
        sizes = [f"{self.pairs[prefix].num_tokens:,} tokens of {Path(prefix).name}" for prefix in train.prefixes]
        return {
            "data": ", ".join(f"{weight:g} of {size}" for weight, size in zip(weights, sizes, strict=True)),
            "split": str(self.sources.split),
            "vocabulary": f"{self.vocabulary.size} ids ({self.vocabulary.digest[:8]})",
            "seq_length": str(self.seq_length),
            "seed": str(self.plan.config.run.seed),
            "masks": ", ".join(self.masks) or "none",
        } | ({"fim": str(fim.settings(self.plan.config.data))} if self.plan.config.data.fim_data else {})

    def facts(self) -> list[object]:
        """The facts that decide the order of training samples, apart from the contents of the pairs."""
        places = {prefix: place for place, prefix in enumerate(self.pairs)}
        blends = [
            blend and ([places[prefix] for prefix in blend.prefixes], blend.weights)
            for blend in (self.sources.train, self.sources.valid)
        ]
        vocabulary = [self.vocabulary.digest, self.vocabulary.size]
        order = [self.train_samples, self.seq_length, self.plan.config.run.seed]
        return [blends, self.sources.split, vocabulary, order]


def build_datasets(plan: Plan, *, train_samples: int | None = None) -> Datasets:
    """The training and validation datasets of `plan`, from `plan.config.data`. Call it on every rank.

    Sample orders are built once per cache folder and kept there (data_cache_path, or data in output_dir), so that a
    later start only maps them. `train_samples` is the number of samples that training will consume; default
    what train_iters steps consume. Another number is another order, as the last epoch is cut to it.

    Raises:
        ConfigError: eval_interval asks for validation data, but there are none.
        DataError: a pair is missing, damaged, shorter than one sample or built with a larger vocabulary; validation has
            no sample; the tokenizer cannot be read or lacks an end-of-document token that a key asks for; the cache
            folder cannot be written; or Megatron's index builder is missing.
    """
    needed = plan.ramp.samples_after(plan.config.run.train_iters) if train_samples is None else train_samples
    if plan.config.data.mock_data:
        return _mock_datasets(plan, needed)
    if plan.config.data.sft:
        return _chat_datasets(plan, needed)
    request = _request(plan, needed)
    _require_end_of_document(request)
    train, valid = _orders(request)

    def own_order(count: int) -> SampleDataset:
        return train if count == request.train_samples else _orders(replace(request, train_samples=count))[0]

    weights = request.sources.train.weights or [1.0]
    corpora = [
        Corpus(_content_digest(request, [prefix]), weight, partial(_one_pass, request, prefix))
        for prefix, weight in zip(request.sources.train.prefixes, weights, strict=True)
    ]
    return Datasets(
        train=Order([Span(0, request.train_samples)], corpora, own_order),
        valid=valid,
        valid_batches=request.valid_samples // plan.batch.global_batch_size,
        vocabulary=request.vocabulary,
        digest=_content_digest(request, request.sources.train.prefixes),
        facts=request.shown(),
    )


def _orders(request: _Request) -> tuple[SampleDataset, SampleDataset | None]:
    """Megatron's orders for training and validation, built if the cache folder does not have them."""
    config = request.plan.config
    folder = data_folder(config) / "index" / _cache_key(request)
    make_once(folder, data_folder(config) / ".lock", lambda: _build_orders(request, folder))
    return _both_datasets(request, folder)


def _one_pass(request: _Request, prefix: str, number: int) -> SampleDataset:
    """The training share of one pair, every sample once, in the order of pass `number`."""
    sources = replace(request.sources, train=Blend(prefixes=[prefix]), valid=None)
    alone = replace(request, sources=sources, pairs={prefix: request.pairs[prefix]}, train_samples=1, valid_samples=0)
    folder, seed = data_folder(request.plan.config), request.plan.config.run.seed + number
    with locked(folder / ".lock"), disk_errors("cannot write the order of samples to", folder):
        return _megatron_dataset(alone, folder / "index" / "passes" / _cache_key(alone), _TRAIN, 1, seed)


def _mock_datasets(plan: Plan, train_samples: int) -> Datasets:
    """Megatron's made-up samples: counting tokens, the same on every rank and in every run."""
    _require_index_builder()
    run, batch = plan.config.run, plan.batch.global_batch_size
    vocabulary = read_run_vocabulary(plan.config)
    valid_batches = run.eval_iters if run.eval_interval > 0 else 0
    facts = {
        "data": "mock_data",
        "vocabulary": f"{vocabulary.size} ids",
        "seq_length": str(plan.config.model.seq_length),
        "seed": str(run.seed),
        "split": plan.config.data.split,
    }
    digest = digest_of(facts)
    corpora = [Corpus(digest, 1.0, lambda number: _mock(plan, vocabulary, _TRAIN, 1, run.seed + number))]

    valid = _mock(plan, vocabulary, _VALID, valid_batches * batch, run.seed) if valid_batches else None
    return Datasets(
        train=Order([Span(0, train_samples)], corpora, lambda count: _mock(plan, vocabulary, _TRAIN, count, run.seed)),
        valid=valid,
        valid_batches=valid_batches,
        vocabulary=vocabulary,
        digest=digest,
        facts=facts,
    )


def _chat_datasets(plan: Plan, train_samples: int) -> Datasets:
    """Rows of conversations, in passes that the seed shuffles."""
    _require_index_builder()
    run, batch = plan.config.run, plan.batch.global_batch_size
    sources, vocabulary = read_sources(plan.config.data), read_run_vocabulary(plan.config)
    train_parts, valid_parts = chat_rows.read_parts(plan.config, sources, with_valid=_evaluates(plan, sources))
    facts = chat_rows.shown(plan.config, train_parts) | {
        "vocabulary": f"{vocabulary.size} ids ({vocabulary.digest[:8]})"
    }
    train, valid = ([part.corpus(run.seed) for part in each] for each in (train_parts, valid_parts))
    valid_batches = 0
    if valid:
        samples = epoch_samples([len(part.rows) for part in valid_parts], [part.weight for part in valid_parts])
        valid_batches = min(run.eval_iters, max(1, samples // batch))
    return Datasets(
        train=Order([Span(0, train_samples, {})], train),
        valid=Order([Span(0, valid_batches * batch, {})], valid) if valid else None,
        valid_batches=valid_batches,
        vocabulary=vocabulary,
        digest=digest_of([facts | {"data": ""}, [(corpus.digest, corpus.weight) for corpus in train]]),
        facts=facts,
    )


def _mock(plan: Plan, vocabulary: Vocabulary, part: int, count: int, seed: int) -> SampleDataset:
    """`count` samples of Megatron's made-up dataset of a `part`, without the others: an index takes half a second."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

    with _no_process_group():
        tokenizer = _MegatronTokenizer(vocabulary)
        config = GPTDatasetConfig(random_seed=seed, split=plan.config.data.split, tokenizer=tokenizer, **_forms(plan))
        config.split_matrix = [cut if at == part else None for at, cut in enumerate(config.split_matrix)]
        builder = BlendedMegatronDatasetBuilder(MockGPTDataset, [count] * 3, lambda: True, config)
        built: SampleDataset = builder.build()[part]
        return built


def _request(plan: Plan, train_samples: int) -> _Request:
    """The parts to build, and the samples of all global batches of an evaluation."""
    config, batch = plan.config, plan.batch.global_batch_size
    sources = read_sources(config.data)
    evaluates = _evaluates(plan, sources)
    vocabulary = read_run_vocabulary(config)
    sources, pairs = _open_pairs(sources, plan)
    train_ranges, valid_ranges = split_ranges(sources, pairs)
    check_ranges("train", train_ranges, sources.split, config.model.seq_length)
    valid_batches = 0
    if evaluates:
        check_ranges("valid", valid_ranges, sources.split, config.model.seq_length)
        blend = sources.valid or sources.train
        samples = epoch_samples([part.num_samples(config.model.seq_length) for part in valid_ranges], blend.weights)
        valid_batches = min(config.run.eval_iters, max(1, samples // batch))
    return _Request(
        sources=sources,
        pairs=pairs,
        vocabulary=vocabulary,
        train_samples=train_samples,
        valid_samples=valid_batches * batch,
        plan=plan,
    )


def _evaluates(plan: Plan, sources: Sources) -> bool:
    """Whether the run evaluates. Raises ConfigError if it has no data for that."""
    run = plan.config.run
    evaluates = run.eval_interval > 0 and run.eval_iters > 0
    if evaluates and sources.split is None and sources.valid is None:
        raise ConfigError(
            f"eval_interval is {run.eval_interval}, but train_data_path has no valid_data_path beside it; "
            f"set valid_data_path, or eval_interval to 0"
        )
    return evaluates


def _open_pairs(sources: Sources, plan: Plan) -> tuple[Sources, dict[str, IndexedPair]]:
    """`sources` with paths for 'embedded' and weights for blends without, and the pairs by their prefix."""
    paths = {prefix: str(resolve_prefix(prefix, plan.config).absolute()) for prefix in sources.prefixes}
    pairs = {path: open_pair(path) for path in paths.values()}

    def resolved(blend: Blend) -> Blend:
        named = Blend(prefixes=[paths[prefix] for prefix in blend.prefixes], weights=blend.weights)
        if named.weights or len(named.prefixes) == 1:
            return named
        # Megatron's weights of a blend without any; it stops after one pass, and with them the blend continues.
        ranges, _ = split_ranges(replace(sources, train=named, valid=None), pairs)
        return replace(named, weights=[float(part.num_samples(plan.config.model.seq_length)) for part in ranges])

    valid = resolved(sources.valid) if sources.valid else None
    return Sources(train=resolved(sources.train), valid=valid, split=sources.split), pairs


def _require_end_of_document(request: _Request) -> None:
    wanted = request.masks
    if wanted and request.vocabulary.eod is None:
        raise DataError(
            f"{', '.join(wanted)} needs the token that ends a document, but there is no tokenizer that has one; set "
            f"tokenizer_model to a tokenizers file with, for example, <|endoftext|>, or leave {', '.join(wanted)} out"
        )
    for pair in request.pairs.values() if wanted else ():
        parts = pair.ids[:_LOOKED_AT], pair.ids[-_LOOKED_AT:]
        if not any((part == request.vocabulary.eod).any() for part in parts):
            raise DataError(
                f"{', '.join(wanted)} needs the token that ends a document, but id {request.vocabulary.eod} is not in"
                f" dataset {pair.prefix}, which ends with {pair.ids[-1]}: build it with --append-eod or, if Megatron"
                " did with the eos_token of a Hugging Face tokenizer, set tokenizer_type to HuggingFaceTokenizer"
            )


def _cache_key(request: _Request) -> str:
    """Changes with everything that the order of samples depends on, the files' sizes and times included."""
    paths = [with_suffix(Path(prefix), suffix) for prefix in request.pairs for suffix in (".idx", ".bin")]
    files = [(str(path), status.st_size, status.st_mtime_ns) for path in paths for status in [path.stat()]]
    facts = [request.facts(), request.valid_samples, files, version("megatron-core"), version("numpy")]
    facts += ["fim"] if request.plan.config.data.fim_data else []  # Megatron's files have the name of the class in them
    return digest_of(facts)


def _content_digest(request: _Request, prefixes: list[str]) -> str:
    """A hash of what the training samples of some pairs are, and of their shares: sizes, and the first and last 64 KiB
    of their files (no whole read of a large dataset), and what cuts them into samples."""
    facts = [request.shown() | {"data": ""}, request.sources.train.weights if len(prefixes) > 1 else None]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for prefix in prefixes:
        pair = request.pairs[prefix]
        digest.update(f"{pair.num_sequences} {pair.num_tokens} {pair.dtype}".encode())
        for suffix in (".idx", ".bin"):
            content = np.memmap(with_suffix(Path(prefix), suffix), dtype=np.uint8, mode="r")
            digest.update(content[: 1 << 16].tobytes() + content[-(1 << 16) :].tobytes())
    return digest.hexdigest()[:16]


def _build_orders(request: _Request, folder: Path) -> None:
    """Checks the pairs from end to end and has Megatron write its sample orders to `folder`, which appears complete."""
    for pair in request.pairs.values():
        check_tables(pair)
        check_ids(pair, request.vocabulary.size)
    with staging_folder(folder) as staging, disk_errors("cannot write the order of samples to", folder):
        staged = staging / "index"
        _both_datasets(request, staged)
        staged.rename(folder)


def _both_datasets(request: _Request, cache: Path) -> tuple[SampleDataset, SampleDataset | None]:
    """Training and validation, with the orders from `cache`, or built there when it is empty."""
    _require_index_builder()
    train = _megatron_dataset(request, cache, _TRAIN, request.train_samples)
    if not request.valid_samples:
        return train, None
    return train, _megatron_dataset(request, cache, _VALID, request.valid_samples)


def _megatron_dataset(
    request: _Request, cache: Path, part: int, num_samples: int, seed: int | None = None
) -> SampleDataset:
    """Megatron's dataset of one part (its position in train, valid, test), the other parts left out. seed: default the
    run's.

    Left out, because Megatron counts the epochs of a share without tokens for ever, and test is never read.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    check_orders(cache)
    sizes = [num_samples if i == part else 0 for i in range(3)]
    with _no_process_group():
        kind, config = _megatron_config(request, cache, part, num_samples)
        config.random_seed = config.random_seed if seed is None else seed
        return cast("SampleDataset", BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()[part])


def check_orders(cache: Path) -> None:
    """Raise DataError for an order that is no array of whole numbers. Megatron would unpickle one of objects."""
    for path in cache.glob("*.npy"):
        try:
            os.close(regular_file(path))
            order = np.load(path, mmap_mode="r", allow_pickle=False)
            if order.dtype.kind not in "iu":
                raise ValueError(f"it holds {order.dtype}, not whole numbers")
        except Exception as error:  # numpy reads the header as a Python literal
            raise DataError(f"the sample order {path} is damaged ({error}): delete {cache}, and start again") from None


def _megatron_config(request: _Request, cache: Path, part: int, num_samples: int) -> tuple[Any, Any]:
    """Megatron's class of datasets, and its configuration."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    data, sources = request.plan.config.data, request.sources
    tokenizer = _MegatronTokenizer(request.vocabulary)
    kind, config_kind, more = GPTDataset, GPTDatasetConfig, {}
    if data.fim_data:
        (kind, config_kind), more = fim.dataset_classes(), fim.settings(data)
        tokenizer._tokenizer = fim.FIMTokenizer(request.plan.config)
        tokenizer.pad = tokenizer._tokenizer.tokens_to_ids(data.fim_pad_token)
    source = (sources.valid if part == _VALID else None) or sources.train
    blend = (source.prefixes, source.weights)
    config = config_kind(
        random_seed=request.plan.config.run.seed,
        blend=blend if sources.split else None,
        blend_per_split=None if sources.split else [blend if i == part else None for i in range(3)],
        split=sources.split,
        path_to_cache=str(cache),
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,
        # Each part's share is rounded up, so a blend is longer than asked by up to its number of parts; in a small
        # run Megatron's own 0.5 % does not cover what it then draws.
        mid_level_dataset_surplus=0.005 + len(source.prefixes) / num_samples,
        **_forms(request.plan),
        **more,
    )
    if sources.split:
        config.split_matrix = [bounds if i == part else None for i, bounds in enumerate(config.split_matrix)]
    return kind, config


def _forms(plan: Plan) -> dict[str, Any]:
    """Arguments of Megatron's configuration that say what a sample holds."""
    masks = {key: getattr(plan.config.data, key) for key in _MASKS}
    # A mask of attention is sequence length squared: the loader has where documents begin.
    return {"sequence_length": plan.config.model.seq_length, "create_attention_mask": False} | masks


class _MegatronTokenizer:
    """The names that GPTDataset reads from a tokenizer."""

    _tokenizer: fim.FIMTokenizer
    """For fill in the middle."""
    pad: int
    """Likewise, where this token fills up a sample and does not count; no other samples are padded."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocab_size = vocabulary.size
        self.eod = vocabulary.eod
        self.unique_identifiers = {"vocabulary": vocabulary.digest, "size": vocabulary.size}


def _require_index_builder() -> None:
    """Raise DataError if megatron-core's C++ index builder is missing. Wheels have it; from source it is compiled."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"Megatron-core {version('megatron-core')} was installed without its index builder "
            f"(megatron.core.datasets.helpers_cpp: {error}). Its wheels hold it for Linux on x86-64 and arm64; "
            f"elsewhere, have a C++ compiler and install it from source: "
            f"pip install --force-reinstall --no-deps --no-binary megatron-core megatron-core"
        ) from error


@contextmanager
def _no_process_group() -> Iterator[None]:
    """Lets Megatron's builder believe that this process is alone.

    With a process group, it builds on global rank 0 only and waits in a barrier: ranks of other hosts then look for
    files that only rank 0's host has, and an error on rank 0 leaves the others in the barrier until it times out.

    A thread that builds a pass ahead believes it alone: Megatron's layers, which run meanwhile, ask too. On the main
    thread all do, as Megatron builds the parts of a blend on others.
    """
    import torch

    is_there, builder = torch.distributed.is_initialized, threading.current_thread()

    def is_seen() -> bool:
        return builder is not threading.main_thread() and builder is not threading.current_thread() and is_there()

    with replaced(torch.distributed, is_initialized=is_seen), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not determine rank")  # for want of a group and of $RANK
        yield
