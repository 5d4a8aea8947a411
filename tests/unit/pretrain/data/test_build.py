"""`megaaccum data build`: the same bytes for any number of workers, whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from megaaccum.errors import DataError
from megaaccum.pretrain.data import encode
from megaaccum.pretrain.data.build import build_pair, main
from megaaccum.pretrain.data.encode import encode_all
from megaaccum.pretrain.data.indexed import check_tables, open_pair
from megaaccum.pretrain.data.tokenizer import read_tokenizer, read_vocabulary, train_tokenizer
from tests.support.data_samples import largest_file, sentences

SUFFIXES = (".bin", ".idx", ".tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(sentences(200), 300).save(str(path))
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(sentences(300)))
    return path


def build(prefix: Path, *files: Path, **options: object) -> None:
    words = ["--input", *map(str, files), "--output-prefix", str(prefix), "--workers", "1"]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    assert main(words) == 0


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_suffix(suffix).read_bytes() for suffix in SUFFIXES]


def decoded(prefix: Path) -> list[str]:
    """The documents of a pair, as text."""
    pair, tokenizer = open_pair(prefix), read_tokenizer(prefix.with_suffix(".tokenizer.json"))
    check_tables(pair)
    ends = pair.lengths.cumsum()
    documents = [pair.ids[end - length : end].tolist() for end, length in zip(ends, pair.lengths, strict=True)]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents]


def test_text_to_ids_to_text(tmp_path, text, capsys):
    build(tmp_path / "corpus", text, train_tokenizer=True, vocab_size=300)
    assert decoded(tmp_path / "corpus") == sentences(300)
    assert "300 documents" in capsys.readouterr().out


def test_the_end_of_document_token_ends_each_document(tmp_path, text, tokenizer_file):
    build(tmp_path / "corpus", text, tokenizer=tokenizer_file, append_eod=True)
    assert decoded(tmp_path / "corpus") == [document + "<|endoftext|>" for document in sentences(300)]


def test_megatron_reads_what_was_built(tmp_path, text, tokenizer_file):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    build(tmp_path / "corpus", text, tokenizer=tokenizer_file)
    dataset, tokenizer = IndexedDataset(str(tmp_path / "corpus")), read_tokenizer(tokenizer_file)
    assert [tokenizer.decode(ids.tolist()) for ids in dataset[0:300]] == sentences(300)


def test_the_number_of_workers_changes_no_byte(tmp_path, text, tokenizer_file, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 2000)  # many tasks, so that workers finish out of order
    for workers in (1, 2, 3):
        build(tmp_path / f"by{workers}", text, tokenizer=tokenizer_file, append_eod=True, workers=workers)
    assert contents(tmp_path / "by1") == contents(tmp_path / "by2") == contents(tmp_path / "by3")
    assert len(decoded(tmp_path / "by1")) == 300


def test_gzip_and_jsonl_of_the_same_text_give_the_same_bytes(tmp_path, text, tokenizer_file):
    lines = "".join(json.dumps({"text": document}) + "\n" for document in sentences(300))
    inputs = {
        "plain": text,
        "packed": tmp_path / "t.txt.gz",
        "json": tmp_path / "t.jsonl",
        "jsongz": tmp_path / "t.jsonl.gz",
    }
    inputs["packed"].write_bytes(gzip.compress(text.read_bytes()))
    inputs["json"].write_text(lines)
    inputs["jsongz"].write_bytes(gzip.compress(lines.encode()))
    for name, path in inputs.items():
        build(tmp_path / name, path, tokenizer=tokenizer_file)
    assert all(contents(tmp_path / name) == contents(tmp_path / "plain") for name in inputs)


def test_one_document_per_file(tmp_path, tokenizer_file):
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in files:
        path.write_text("first part\n\nsecond part\n")
    build(tmp_path / "corpus", *files, tokenizer=tokenizer_file, one_document_per_file=True)
    assert decoded(tmp_path / "corpus") == ["first part\n\nsecond part\n"] * 2


def test_an_existing_pair_is_replaced_only_when_told(tmp_path, text, tokenizer_file):
    build(tmp_path / "corpus", text, tokenizer=tokenizer_file)
    before = contents(tmp_path / "corpus")
    with pytest.raises(DataError, match=r"corpus\.bin, .*corpus\.idx, .* exists; .*--overwrite"):
        build(tmp_path / "corpus", text, tokenizer=tokenizer_file, append_eod=True)
    assert contents(tmp_path / "corpus") == before
    build(tmp_path / "corpus", text, tokenizer=tokenizer_file, append_eod=True, overwrite=True)
    assert contents(tmp_path / "corpus") != before
    assert len(decoded(tmp_path / "corpus")) == 300


@pytest.mark.parametrize("content", ["", " \n\n\t\n"])
def test_empty_input(tmp_path, tokenizer_file, content):
    (tmp_path / "empty.txt").write_text(content)
    with pytest.raises(DataError, match="holds no text"):
        build(tmp_path / "corpus", tmp_path / "empty.txt", tokenizer=tokenizer_file)
    assert not list(tmp_path.glob("*corpus*"))


def test_a_mistake_in_the_middle_leaves_nothing(tmp_path, tokenizer_file):
    lines = [json.dumps({"text": document}) for document in sentences(300)]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines, "{bad"]))
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"bad\.jsonl, line 301: not JSON"):
            build(tmp_path / "corpus", tmp_path / "bad.jsonl", tokenizer=tokenizer_file, workers=workers)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


@pytest.mark.parametrize(
    ("name", "option", "match"),
    [
        ("a.txt", {"json_key": "content"}, "--json-key content: no file is JSONL: add --format jsonl"),
        ("a.jsonl", {"one_document_per_file": True}, "--one-document-per-file: every file is JSONL"),
    ],
)
def test_an_option_of_the_other_format_is_refused(tmp_path, tokenizer_file, name, option, match):
    """Lines of JSON in a .txt became tokens as they are, braces and keys too, although a key was named."""
    (tmp_path / name).write_text('{"content": "a", "text": "b"}\n')
    with pytest.raises(DataError, match=match):
        build(tmp_path / "corpus", tmp_path / name, tokenizer=tokenizer_file, **option)


def test_an_end_of_document_that_the_tokenizer_lacks(tmp_path, text):
    Tokenizer(models.WordLevel({"the": 0}, unk_token="the")).save(str(tmp_path / "words.json"))
    with pytest.raises(DataError, match="--append-eod needs a token that ends a document"):
        build(tmp_path / "corpus", text, tokenizer=tmp_path / "words.json", append_eod=True)
    assert not list(tmp_path.glob("*corpus*"))


def test_a_document_without_tokens_is_left_out(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"known": 0, "</s>": 1}, unk_token="missing"))
    texts = ["known", "\n", "known"]
    tokenizer.normalizer = normalizers.Strip()
    num_documents, num_tokens, _ = build_pair(texts, tmp_path / "corpus", tokenizer, append_eod=True, num_workers=1)
    assert (num_documents, num_tokens) == (2, 4)
    assert open_pair(tmp_path / "corpus").ids.tolist() == [0, 1, 0, 1]


def test_the_tokenizers_own_truncation_is_not_used(tmp_path, text, tokenizer_file):
    cutting = Tokenizer.from_file(str(tokenizer_file))
    cutting.enable_truncation(3)
    cutting.enable_padding(length=50)
    cutting.save(str(tmp_path / "cutting.json"))
    build(tmp_path / "corpus", text, tokenizer=tmp_path / "cutting.json")
    assert decoded(tmp_path / "corpus") == sentences(300)


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_full_disk_leaves_the_pair_that_was_there(tmp_path, text, tokenizer_file, size):
    build(tmp_path / "corpus", text, tokenizer=tokenizer_file)
    before = contents(tmp_path / "corpus")
    assert len(before[0]) > 20_000, "the .bin fits, so this test shows nothing"
    with (
        largest_file(size),
        pytest.raises(DataError, match=r"cannot write .*corpus: no space left \([\d,]+ bytes are free"),
    ):
        build(tmp_path / "corpus", text, tokenizer=tokenizer_file, append_eod=True, overwrite=True)
    assert contents(tmp_path / "corpus") == before
    assert not list(tmp_path.glob(".*")), "something half made was left"


def test_a_folder_that_cannot_be_made(tmp_path, text, tokenizer_file):
    with pytest.raises(DataError, match="cannot write beside"):
        build(text / "corpus", text, tokenizer=tokenizer_file)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "one of the arguments --tokenizer --train-tokenizer is required"),
        (["--tokenizer", "a", "--train-tokenizer"], "not allowed with"),
        (["--tokenizer", "a", "--vocab-size", "300"], "--vocab-size 300 is for --train-tokenizer"),
        (["--train-tokenizer", "--vocab-size", "0"], "0 is not positive"),
        (["--train-tokenizer", "--workers", "-1"], "-1 is not positive"),
    ],
)
def test_options_that_contradict(capsys, options, text):
    with pytest.raises(SystemExit) as caught:
        main(["--input", "a", "--output-prefix", "p", *options])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def worker_modules(texts: list[str]) -> object:
    return sorted(name for name in ("torch", "megatron", "deepspeed", "rich") if name in sys.modules)


def test_workers_import_no_torch():
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    code = (
        "import sys, megaaccum.pretrain.data.build, megaaccum.pretrain.data.corpus;"
        "print([m for m in ('torch', 'megatron', 'deepspeed') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    tokenizer = train_tokenizer(["a b"], 257).to_str()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=encode._start_worker, initargs=(tokenizer, 0)) as pool:
        assert "torch" not in pool.submit(worker_modules, []).result(timeout=60)


def die(texts: list[str]) -> object:
    os._exit(1)


def test_a_worker_that_dies_is_an_error(monkeypatch):
    tokenizer = train_tokenizer(["a b"], 257).to_str()
    monkeypatch.setattr(encode, "_encode_in_worker", die)
    with pytest.raises(DataError, match=r"a worker process ended early.*--workers"):
        list(encode_all(["a b"], tokenizer, None, num_workers=2))


BUILD_SLOWLY = """
import signal, sys, time
from pathlib import Path
from megaaccum.pretrain.data import build

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it

class Slow(build.Source):
    def documents(self, progress=None):
        for text in super().documents(progress):
            yield text
            print(text[:1], flush=True)
            time.sleep(0.01)

build.Source = Slow
build.encode_all.__globals__["CHUNK_CHARACTERS"] = 100
sys.exit(build.main(sys.argv[1:]))
"""


def start_slow_build(tmp_path: Path, text: Path, tokenizer_file: Path, workers: int) -> subprocess.Popen:
    options = ["--input", str(text), "--output-prefix", str(tmp_path / "corpus"), "--tokenizer", str(tokenizer_file)]
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD_SLOWLY, *options, "--workers", str(workers)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(30):
        assert process.stdout.readline(), process.stderr.read()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_leaves_nothing(tmp_path, text, tokenizer_file, number):
    process = start_slow_build(tmp_path, text, tokenizer_file, workers=2)
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_a_killed_build_leaves_no_pair_and_no_worker_and_the_next_one_cleans_up(tmp_path, text, tokenizer_file):
    process = start_slow_build(tmp_path, text, tokenizer_file, workers=2)
    children = children_of(process.pid)
    assert len(children) >= 2
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in children), "a worker outlived its parent"
    assert not list(tmp_path.glob("corpus*"))
    build(tmp_path / "corpus", text, tokenizer=tokenizer_file)
    assert decoded(tmp_path / "corpus") == sentences(300)
    assert not list(tmp_path.glob(".*"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_vocabulary_beside_the_pair_is_the_one_it_was_built_with(tmp_path, text, tokenizer_file):
    build(tmp_path / "corpus", text, tokenizer=tokenizer_file)
    beside = read_vocabulary(tmp_path / "corpus.tokenizer.json")
    assert (beside.size, beside.eod) == (300, 0)
