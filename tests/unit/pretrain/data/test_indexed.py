"""The indexed pair: the same bytes as Megatron's builder writes, and every way in which a pair can be damaged."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from megaaccum.errors import DataError
from megaaccum.pretrain.data.indexed import PairWriter, check_ids, check_tables, id_type, open_pair
from tests.support.data_samples import write_pair

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.fixture
def pair(tmp_path) -> Path:
    return write_pair(tmp_path / "corpus", DOCUMENTS)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(content)


@pytest.mark.parametrize("vocab_size", [1000, 100_000])
def test_bytes_and_reading_are_megatrons(tmp_path, vocab_size):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    ours = write_pair(tmp_path / "ours", DOCUMENTS, vocab_size)
    assert id_type(vocab_size) == DType.optimal_dtype(vocab_size)
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for ids in DOCUMENTS:
        theirs.add_document(np.array(ids), [len(ids)])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    read = IndexedDataset(str(ours))
    assert [read[i].tolist() for i in range(len(read))] == DOCUMENTS


def test_id_type_changes_where_megatrons_does():
    assert id_type(65499) == np.uint16
    assert id_type(65500) == np.int32


def test_what_a_good_pair_says_of_itself(pair):
    opened = open_pair(pair)
    check_tables(opened)
    check_ids(opened, 12)
    assert (opened.num_sequences, opened.num_bounds, opened.num_tokens) == (4, 5, 11)
    assert opened.lengths.tolist() == [3, 1, 5, 2]
    assert opened.ids.tolist() == list(range(1, 12))
    assert [opened.tokens_between(i, i + 1) for i in range(4)] == [3, 1, 5, 2]
    assert [opened.tokens_between(*bounds) for bounds in ((0, 4), (1, 3), (4, 4), (0, 0))] == [11, 6, 0, 0]


@pytest.mark.parametrize(
    ("suffix", "text"), [(".bin", r"corpus\.idx is there alone"), (".idx", r"corpus\.bin is there alone")]
)
def test_one_file_is_missing(pair, suffix, text):
    pair.with_suffix(suffix).unlink()
    with pytest.raises(DataError, match=text):
        open_pair(pair)


def test_both_files_are_missing(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist \(.*nowhere\.bin is missing too\)"):
        open_pair(tmp_path / "nowhere")


def test_truncated_bin(pair):
    content = pair.with_suffix(".bin").read_bytes()
    pair.with_suffix(".bin").write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"corpus\.bin is truncated: 18 bytes, where .*\.idx says 22"):
        open_pair(pair)


def test_bin_of_another_build(pair):
    with open(pair.with_suffix(".bin"), "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(DataError, match=r"corpus\.bin is too long: 24 bytes, where .*\.idx says 22"):
        open_pair(pair)


@pytest.mark.parametrize("keep", [0, 10, 33])
def test_index_shorter_than_its_header(pair, keep):
    content = pair.with_suffix(".idx").read_bytes()
    pair.with_suffix(".idx").write_bytes(content[:keep])
    with pytest.raises(DataError, match=rf"corpus\.idx is cut short: {keep} bytes, .* takes 34"):
        open_pair(pair)


def test_index_cut_in_its_tables(pair):
    content = pair.with_suffix(".idx").read_bytes()
    pair.with_suffix(".idx").write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"is 114 bytes, but its 4 sequences and 5 document bounds take 122"):
        open_pair(pair)


@pytest.mark.parametrize(
    ("offset", "content", "text"),
    [
        (0, b"GARBAGE!!", r"not an index of Megatron: it starts with b'GARBAGE!!'"),
        (9, struct.pack("<Q", 2), "has version 2; only version 1 is known"),
        (17, b"\x07", "has ids of type code 7; integer types are"),
        (17, b"\x63", "has ids of type code 99"),
        (18, struct.pack("<Q", 1 << 40), "its 1,099,511,627,776 sequences"),
    ],
)
def test_damaged_header(pair, offset, content, text):
    overwrite(pair.with_suffix(".idx"), offset, content)
    with pytest.raises(DataError, match=text):
        open_pair(pair)


@pytest.mark.parametrize(
    ("offset", "content", "text"),
    [
        (34 + 4, struct.pack("<i", -1), "length -1 of sequence 1 is negative"),
        (34 + 4, struct.pack("<i", 2), "offset 8 of sequence 2 is not the end of the one before"),
        (50 + 8, struct.pack("<q", 1 << 50), f"offset {1 << 50} of sequence 1 is not the end"),
        (82, struct.pack("<q", 1), r"document bounds run \[1, 4\], not from 0 to 4"),
        (82 + 32, struct.pack("<q", 3), r"document bounds run \[0, 3\], not from 0 to 4"),
        (82 + 16, struct.pack("<q", 9), "document bound 9 at 2 is larger than the next one"),
    ],
)
def test_damaged_tables(pair, offset, content, text):
    overwrite(pair.with_suffix(".idx"), offset, content)
    with pytest.raises(DataError, match=text):
        check_tables(open_pair(pair))


def test_empty_pair(tmp_path):
    with pytest.raises(DataError, match=r"empty: 0 sequences, a \.bin of 0 bytes"):
        open_pair(write_pair(tmp_path / "corpus", []))


def test_ids_beyond_the_vocabulary_are_named_with_their_place(pair):
    with pytest.raises(DataError, match=r"token 9 has id 10, but the vocabulary has 10 entries.*tokenizer_model"):
        check_ids(open_pair(pair), 10)


def test_negative_ids(tmp_path):
    pair = open_pair(write_pair(tmp_path / "corpus", [[1, 2, -3]], vocab_size=100_000))
    with pytest.raises(DataError, match="token 2 has id -3"):
        check_ids(pair, 100_000)


@pytest.mark.parametrize("place", [0, 999])
def test_a_large_bin_is_looked_at_in_blocks_that_include_both_ends(tmp_path, place):
    ids = [1] * 1000
    ids[place] = 7
    pair = open_pair(write_pair(tmp_path / "corpus", [ids]))
    with pytest.raises(DataError, match=f"token {place} has id 7"):
        check_ids(pair, 5, num_blocks=4, block_tokens=16)


def test_a_small_bin_is_looked_at_whole(tmp_path):
    for place in range(0, 100, 7):
        ids = [1] * 100
        ids[place] = 7
        pair = open_pair(write_pair(tmp_path / f"corpus{place}", [ids]))
        with pytest.raises(DataError, match=f"token {place} has id 7"):
            check_ids(pair, 5, num_blocks=10, block_tokens=10)


def test_nothing_is_indexed_when_writing_fails(tmp_path):
    with suppress(KeyError), PairWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add(np.array([1, 2]), [2])
        raise KeyError
    assert not (tmp_path / "corpus.idx").exists()
