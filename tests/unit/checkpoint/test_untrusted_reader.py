"""Lists of tensors that were made to harm: each is one CheckpointError, in bounded time, and changes nothing."""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import pickle
import resource
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.checkpoint.pieces import Cut, Piece, StoredPieces
from megaaccum.checkpoint.untrusted_reader import CheckpointReader
from megaaccum.errors import CheckpointError

KEY = "layer.weight/param/4x2/1:0of1/0:8"


def entry(tensor: torch.Tensor, **storage: object) -> tuple[bytes, bytes]:
    """(a list of one tensor, its bytes). storage: parts of its entry that are not true."""
    torch.save(tensor, file := io.BytesIO())
    content = file.getvalue()
    info = _StorageInfo("__0_0.distcp", 0, len(content))
    info.sha256 = hashlib.sha256(content).hexdigest()
    for name, value in storage.items():
        setattr(info, name, value)
    size = torch.Size([8])
    chunk = dcp.ChunkStorageMetadata(torch.Size([0]), size)
    what = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch.float32), size, [chunk])
    index = dcp.MetadataIndex(KEY, torch.Size([0]), 0)
    return pickle.dumps(dcp.Metadata({KEY: what}, None, {index: info}, dcp.StorageMeta(Path("there")))), content


def reader(folder: Path, metadata: bytes, content: bytes = b"") -> CheckpointReader:
    (folder / ".metadata").write_bytes(metadata)
    (folder / "__0_0.distcp").write_bytes(content)
    return CheckpointReader(folder, hashlib.sha256(metadata).hexdigest())


def test_a_good_list_is_read(tmp_path):
    found = reader(tmp_path, *entry(torch.arange(8.0)))
    found.check_files([KEY])
    assert found.read([KEY])[KEY].tolist() == list(range(8))
    assert found.stored[KEY].size == (8,)


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


PATH, METADATA = named("pathlib", "PosixPath"), named("torch.distributed.checkpoint.metadata", "Metadata")
STATE = b"N}\x8c\x06is_dirK\x01s\x86"  # (None, {"is_dir": 1}), which BUILD sets by setattr
BUILDS = {
    "class": PATH + STATE + b"b.",
    "class, dict": PATH + b"}\x8c\x06is_dirK\x01sb.",
    "instance": PATH + b")R" + STATE + b"b.",
    "torch.Size": named("torch", "Size") + STATE + b"b.",
    "dtype": named("torch", "float32") + STATE + b"b.",
    "Metadata": METADATA + b"N}\x8c\x08__init__K\x01s\x86b.",
    "then a list": PATH + STATE + b"b0" + METADATA + b")\x81}b.",
}


@pytest.mark.parametrize("build", BUILDS)
def test_no_class_that_a_list_names_can_be_changed(tmp_path, build):
    watched = (pathlib.PosixPath, torch.Size, dcp.Metadata, dcp.MetadataIndex, _StorageInfo)
    before = [dict(vars(each)) for each in watched]
    with pytest.raises(CheckpointError):
        reader(tmp_path, b"\x80\x04" + BUILDS[build])
    assert [dict(vars(each)) for each in watched] == before
    assert pathlib.PosixPath("/").is_dir() is True


@pytest.mark.parametrize(
    "pickled",
    [
        named("os", "system") + b"\x8c\x02id\x85R.",
        named("torch.serialization", "load") + b")R.",
        named("torch", "load") + b")R.",
        b"\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
        named("builtins", "eval") + b".",
    ],
)
def test_no_other_name_is_looked_up(tmp_path, pickled):
    with pytest.raises(CheckpointError, match="which no list of tensors holds"):
        reader(tmp_path, b"\x80\x04" + pickled)


def nested_key(depth: int = 200) -> bytes:
    """A dictionary whose key is a tuple of twice the same, `depth` times: its hash takes 2^depth steps."""
    return b"})\x94" + b"h\x00h\x00\x86q\x00" * depth + b"K\x01s."


BOMBS = {
    "memo": b"Nr\xff\xff\xff\xff.",
    "long text": b"\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "long array": b"\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "long frame": b"\x95" + struct.pack("<Q", 1 << 40) + b"x.",
    "hash": nested_key(),
    "hash, many": b"}" + b"()\x94" + b"h\x00h\x00\x86q\x00" * 200 + b"K\x01u.",
    "depth": b"]" * 100_000 + b"a" * 99_999 + b".",
    "persistent": b"Pabc\n.",
    "extension": b"\x82\x01.",
    "empty": b"",
    "no end": b"N",
    "no mark": b"u.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_go_off_in_no_time_and_no_memory(tmp_path, bomb):
    """The limits are for hangs: an unbounded one would take hours, or tens of GiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        with pytest.raises(CheckpointError):
            reader(tmp_path, b"\x80\x04" + BOMBS[bomb])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "storage",
    [{"length": -1}, {"offset": -8}, {"offset": 1 << 80}, {"length": "8"}, {"length": 8.0}, {"length": True},
     {"relative_path": "../theirs"}, {"relative_path": ""}, {"relative_path": 7}, {"sha256": None}],
    ids=str,
)  # fmt: skip
def test_an_entry_that_was_made_up_is_refused(tmp_path, storage):
    with pytest.raises(CheckpointError, match=r"in the entry of a tensor|not in its folder|no list of tensors"):
        reader(tmp_path, *entry(torch.zeros(8), **storage))


@pytest.mark.parametrize("where", ["name", "size", "offset"])
def test_a_nested_tuple_is_neither_hashed_nor_printed(tmp_path, where):
    """Each takes 2^200 steps."""
    bomb: tuple = ()
    for _ in range(200):
        bomb = (bomb, bomb)
    listed = pickle.loads(entry(torch.zeros(8))[0])
    (info,), (what,) = listed.storage_data.values(), listed.state_dict_metadata.values()
    if where == "name":
        (index,) = listed.storage_data
        object.__setattr__(index, "fqn", bomb)
    elif where == "size":
        what.size = _Size(bomb)
    else:
        info.offset = bomb
    with pytest.raises(CheckpointError, match="is no list of tensors"):
        reader(tmp_path, pickle.dumps(listed))


class _Size:
    """Pickled, it is a torch.Size of anything."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        return torch.Size, (self.content,)


def test_an_entry_that_is_missing_is_refused(tmp_path):
    listed = pickle.loads(entry(torch.zeros(8))[0])
    listed.storage_data.clear()
    with pytest.raises(CheckpointError, match="is no list of tensors"):
        reader(tmp_path, pickle.dumps(listed))
    with pytest.raises(CheckpointError, match="is no list of tensors"):
        reader(tmp_path, METADATA + b")\x81.")


@pytest.mark.parametrize("tensor", [torch.zeros(9), torch.zeros(2, 4), {"a": 1}, torch.zeros(1).expand(1 << 40)])
def test_a_tensor_of_another_size_is_refused(tmp_path, tensor):
    found = reader(tmp_path, *entry(tensor))
    with pytest.raises(CheckpointError, match="does not hold"):
        found.read([KEY])


@pytest.mark.parametrize(("content", "kind"), [({"a": 1}, "dict"), ([], "list"), (torch.Size([1]), "Size")])
def test_another_object_is_named(tmp_path, content, kind):
    with pytest.raises(CheckpointError, match=f"holds a {kind}, not a list of tensors"):
        reader(tmp_path, pickle.dumps(content))


def test_bytes_that_are_no_tensor_are_refused(tmp_path):
    content = b"nothing"
    metadata, _ = entry(torch.zeros(8), length=7, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(CheckpointError, match="holds no tensor"):
        reader(tmp_path, metadata, content).read([KEY])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pipe_in_place_of_a_file_holds_nobody_up(tmp_path, name):
    metadata, content = entry(torch.zeros(8))
    reader(tmp_path, metadata, content)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(DamagedCheckpoint, match="not a regular file"):
        CheckpointReader(tmp_path, hashlib.sha256(metadata).hexdigest()).read([KEY])


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["", "weight", "w/param/4x2/1:0of1/0:", "w/param/4x2/1:0of1/-1:8", "w/param/4x2/1:0of1/4:12",
     "w/param/4x2/1:2of2/0:4", "w/param/4x2/3:0of1/0:8", "w/param/4x2/1:0of0/0:8", "w/param/0x2/1:0of1/0:8",
     "w/param/4x2/1:0of1/8:0", f"w/param/{'9' * 5000}/1:0of1/0:8", "w/param/4x-2/1:0of1/0:8"],
    ids=range(12),
)  # fmt: skip
def test_a_key_that_is_no_piece_is_refused(key):
    with pytest.raises(CheckpointError, match="has an unknown tensor"):
        StoredPieces({key: (8,)})


def test_a_piece_of_another_size_is_refused():
    for size in ((), (7,), (4, 2)):
        with pytest.raises(CheckpointError, match="has an unknown tensor"):
            StoredPieces({KEY: size})


def test_a_kind_that_is_missing_or_cut_endlessly_is_damage():
    wanted = Piece("layer.weight", "exp_avg", (4, 2), Cut(8), 0, 8)
    stored = StoredPieces({KEY: (8,)})
    with pytest.raises(DamagedCheckpoint, match=r"lacks elements of layer\.weight \(exp_avg\)"):
        stored.overlapping(wanted)
    endless = f"layer.weight/exp_avg/{1 << 50}/1:0of{1 << 50}/0:1"
    with pytest.raises(DamagedCheckpoint, match="lacks elements"):
        StoredPieces({endless: (1,)}).overlapping(wanted)
    assert stored.overlapping(Piece("layer.weight", "param", (4, 2), Cut(8), 2, 5)) == [(Piece.parse(KEY), 2, 5)]


def test_the_key_of_a_scalar_is_read_as_one():
    scalar = Piece("scale", "param", (), Cut(1), 0, 1)
    assert Piece.parse(scalar.key) == scalar
    assert StoredPieces({scalar.key: (1,)}).shape("scale") == ()
