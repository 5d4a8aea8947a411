"""`megaaccum data build`: text or JSONL to a .bin/.idx pair with its tokenizer beside it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum.errors import DataError
from megaaccum.pretrain.data.documents import Progress, Source
from megaaccum.pretrain.data.encode import encode_all
from megaaccum.pretrain.data.files import disk_errors, publish_pair, staging_folder, with_suffix
from megaaccum.pretrain.data.indexed import PairWriter, id_type
from megaaccum.pretrain.data.tokenizer import read_tokenizer, require_end_of_document, train_tokenizer

if TYPE_CHECKING:
    import tokenizers

_VOCAB_SIZE = 32768
_SUFFIXES = (".bin", ".idx", ".tokenizer.json")


def build_pair(
    texts: Iterable[str], prefix: Path, tokenizer: tokenizers.Tokenizer, *, append_eod: bool, num_workers: int
) -> tuple[int, int, int]:
    """Encode `texts`, one document each, into `prefix`.bin, .idx and .tokenizer.json. Returns the number of documents,
    those of white space alone left out, of token ids with those that end documents, and of the vocabulary's entries.

    The files are written aside and moved when they are complete: an error or a signal leaves what was there before. The
    bytes depend on texts and tokenizer alone, not on `num_workers` (processes; 1 works in this one).

    Raises:
        DataError: no document has a token, the disk is full or refuses, a worker died, another process builds the same
            pair, or the tokenizer has no end-of-document token and `append_eod` asks for it.
    """
    eod = require_end_of_document(tokenizer) if append_eod else None
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    tokenizer_json = tokenizer.to_str(pretty=False)
    num_tokens = 0
    with staging_folder(prefix) as folder:
        staged = folder / prefix.name
        with disk_errors("cannot write", prefix):
            with PairWriter(staged, id_type(vocab_size)) as writer:
                for ids, lengths in encode_all(texts, tokenizer_json, eod, num_workers=num_workers):
                    writer.add(ids, lengths)
                    num_tokens += len(ids)
                if num_tokens == 0:
                    raise DataError("the input holds no text: every file is empty, or white space alone")
            with_suffix(staged, ".tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        publish_pair(staged, prefix)
    return writer.num_documents, num_tokens, vocab_size


def main(argv: list[str]) -> int:
    """Run `megaaccum data build` with the arguments after those words. Returns the exit code.

    Raises:
        DataError: the input, the tokenizer or the output cannot be used; nothing is left half written.
    """
    args = _parse(argv)
    prefix = Path(args.output_prefix)
    there = [str(path) for suffix in _SUFFIXES if (path := with_suffix(prefix, suffix)).exists()]
    if there and not args.overwrite:
        raise DataError(f"{', '.join(there)} exists; choose another --output-prefix, or add --overwrite")
    source = Source(
        files=[Path(name) for name in args.input],
        format=args.format,
        json_key=args.json_key,
        whole_files=args.one_document_per_file,
    )
    size = source.check()
    start = time.monotonic()
    with _ended_by_sigterm():
        tokenizer = _tokenizer(args, source, size)
        with _progress_bar("encoding", size) as progress:
            num_documents, num_tokens, vocab_size = build_pair(
                source.documents(progress), prefix, tokenizer, append_eod=args.append_eod, num_workers=args.workers
            )
    print(
        f"{prefix}.bin, .idx, .tokenizer.json: {num_documents:,} documents, {num_tokens:,} tokens, "
        f"vocabulary {vocab_size:,}, {time.monotonic() - start:.1f} s"
    )
    return 0


def _tokenizer(args: argparse.Namespace, source: Source, size: int) -> tokenizers.Tokenizer:
    if args.tokenizer:
        return read_tokenizer(args.tokenizer)
    with _progress_bar("training the tokenizer", size) as progress:
        return train_tokenizer(source.documents(progress), args.vocab_size or _VOCAB_SIZE)


@contextmanager
def _progress_bar(what: str, size: int) -> Iterator[Progress | None]:
    """A bar of bytes read, on a terminal; None if stderr is a file."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)
        bar.update(task, completed=size)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what was written aside is removed."""

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megaaccum data build",
        description="Make a .bin/.idx pair for training, its tokenizer beside it, from text or JSONL, plain or gzip.",
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files, in the order to read them")
    add("--output-prefix", required=True, metavar="P", help="write P.bin, P.idx and P.tokenizer.json")
    add("--format", choices=("auto", "text", "jsonl"), default="auto", help="auto: by name (.jsonl, .json, .ndjson)")
    add("--json-key", default="text", metavar="KEY", help="key of the text in JSONL (default: text)")
    one = "a text file is one document (default: empty lines separate documents)"
    add("--one-document-per-file", action="store_true", help=one)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", metavar="FILE", help="Hugging Face tokenizers file, or a folder with one")
    which.add_argument("--train-tokenizer", action="store_true", help="train a byte-level BPE tokenizer on the input")
    add("--vocab-size", type=_positive, metavar="N", help=f"of a trained tokenizer (default: {_VOCAB_SIZE})")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    cores = len(os.sched_getaffinity(0))
    add("--workers", type=_positive, default=cores, metavar="N", help="processes (default: the cores)")
    add("--overwrite", action="store_true", help="replace an existing pair")
    args = parser.parse_args(argv)
    if args.tokenizer and args.vocab_size:
        parser.error(f"--vocab-size {args.vocab_size} is for --train-tokenizer; {args.tokenizer} has its own size")
    return args
