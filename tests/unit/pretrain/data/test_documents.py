"""Documents of text and JSONL files, plain and gzip, and the file and line of each mistake."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megaaccum.errors import DataError
from megaaccum.pretrain.data.documents import Source

TEXT = "one\nstill one\n\n  \ntwo\r\n\r\n\n three \n"


def read(path: Path, **options) -> list[str]:
    return list(Source(files=[path], **options).documents())


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_empty_lines_separate_documents(tmp_path):
    assert read(put(tmp_path / "a.txt", TEXT)) == ["one\nstill one", "two", " three "]


def test_a_file_may_be_one_document_to_the_last_byte(tmp_path):
    assert read(put(tmp_path / "a.txt", TEXT), whole_files=True) == [TEXT]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert read(put(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]


def test_jsonl(tmp_path):
    lines = [{"text": "a\nb", "id": 1}, {"text": "  "}, {"text": "ü"}]
    path = put(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read(path) == ["a\nb", "ü"]


def test_another_key(tmp_path):
    path = put(tmp_path / "a.jsonl", '{"text": "no", "body": "yes"}')
    assert read(path, json_key="body") == ["yes"]


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("a.jsonl", "auto", ["x"]),
        ("a.JSON", "auto", ["x"]),
        ("a.ndjson", "auto", ["x"]),
        ("a.txt", "auto", ['{"text": "x"}']),
        ("a.txt", "jsonl", ["x"]),
        ("a.jsonl", "text", ['{"text": "x"}']),
    ],
)
def test_the_format_follows_the_name_unless_it_is_given(tmp_path, name, format, expected):
    assert read(put(tmp_path / name, '{"text": "x"}'), format=format) == expected


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_gzip_is_recognised_by_its_bytes(tmp_path, name):
    content = TEXT if name == "a.txt" else '{"text": "x"}\n{"text": "y"}\n'
    plain = put(tmp_path / name, content)
    packed = put(tmp_path / f"{name}.gz", gzip.compress(content.encode()))
    disguised = put(tmp_path / f"packed-{name}", gzip.compress(content.encode()))
    assert read(packed) == read(plain) == read(disguised)


def test_files_are_read_in_the_order_given_and_again_the_same(tmp_path):
    files = [put(tmp_path / name, name) for name in ("b.txt", "a.txt", "c.txt")]
    source = Source(files=files)
    assert list(source.documents()) == ["b.txt", "a.txt", "c.txt"] == list(source.documents())


@pytest.mark.parametrize("packed", [False, True])
def test_progress_adds_up_to_the_size_on_disk(tmp_path, packed):
    content = "word " * 10 + "\n"
    raw = (content * 20_000).encode()
    path = put(tmp_path / "a.txt", gzip.compress(raw) if packed else raw)
    source = Source(files=[path])
    told = []
    list(source.documents(told.append))
    assert sum(told) == path.stat().st_size == source.check()
    assert min(told) > 0
    assert packed or len(told) > 10, "progress came all at once"


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.txt: No such file"):
        Source(files=[tmp_path / "nowhere.txt"]).check()


def test_a_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*: it is not a regular file"):
        Source(files=[tmp_path]).check()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{not json", r"line 3: not JSON \(.*\): \{not json"),
        ('{"text": "cut', r"line 3: not JSON"),
        ('["text"]', r"line 3: a line must be a JSON object, not \[\"text\"\]"),
        ('{"body": "x", "id": 1}', r"line 3: no key 'text'; the line has \['body', 'id'\]. Set --json-key"),
        ('{"text": 5}', r"line 3: 'text' must be a string, not 5"),
        ('{"text": null}', r"line 3: 'text' must be a string, not null"),
        ('{"text": "\\ud800"}', r"line 3: 'text' holds half a surrogate pair"),
        ("[" * 100_000, r"line 3: not JSON"),
        ('{"text": ' + "9" * 5000 + "}", r"line 3: not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, text):
    path = put(tmp_path / "a.jsonl", f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, " + text) as caught:
        read(path)
    assert len(str(caught.value)) < 1000, "the whole line does not belong in a message"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_bytes_that_are_no_text_are_named(tmp_path, name):
    path = put(tmp_path / name, b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"line 2: byte 0xe9 at column 14 is not UTF-8\. .*iconv"):
        read(path)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_gzip(tmp_path, damage):
    packed = bytearray(gzip.compress(b"some text\n" * 1000, mtime=0))
    if damage == "cut":
        packed = packed[:-20]
    else:
        packed[-6] ^= 0xFF  # in the checksum
    with pytest.raises(DataError, match=r"a\.txt\.gz is damaged gzip"):
        read(put(tmp_path / "a.txt.gz", bytes(packed)))
