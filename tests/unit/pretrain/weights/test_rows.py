"""The mapping of weights is its own inverse: for every row of every family's table, whole and in parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megaaccum.checkpoint.pieces import Cut, Piece
from megaaccum.errors import CheckpointError
from megaaccum.pretrain.weights.rows import families, rows_of, table, theirs_of
from megaaccum.pretrain.weights.weights_in import mapped
from megaaccum.pretrain.weights.weights_out import to_theirs

MODEL = dict(num_layers=3, num_attention_heads=6, num_query_groups=2, kv_channels=4, vocab_size=29, num_experts=3)
HEIGHTS = {"qkv": (6 + 2 * 2) * 4, "vocabulary": 32, "gate_up": 24, "interleaved": 24, "same": 12}
ROWS = [(family, *row[:2]) for family in families()["families"] for row in table(family)]


@dataclass
class Held:
    """Tensors in memory, in the place of a folder's files."""

    tensors: dict[str, torch.Tensor]
    folder: Path = Path("model")
    asked: list[int] = field(default_factory=list)

    @property
    def files(self) -> dict[str, Path]:
        return dict.fromkeys(self.tensors, self.folder / "model.safetensors")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, *index: slice) -> torch.Tensor:
        part = self.tensors[name][index[: self.tensors[name].dim()]]
        self.asked.append(part.numel())
        return part


def example(name: str, operation: str) -> tuple[str, torch.Tensor]:
    """A parameter of a row of a table, with numbers that tell where they belong; padding is 0."""
    leaf = "bias" if "<leaf>" in name and "linear_fc2" in name else "weight"
    name = (
        name.replace("mtp.layers.<layer>", "mtp.layers.0")
        .replace("<layer>", "3")
        .replace("<expert>", "1")
        .replace("<leaf>", leaf)
    )
    height = HEIGHTS[operation.removesuffix("_t")]
    is_vector = "norm" in name or leaf == "bias" or "bias" in name or "softmax_offset" in name
    whole = torch.arange(1.0, 1 + height * (1 if is_vector else 8)).view((height,) if is_vector else (height, 8))
    if operation == "vocabulary":
        whole[MODEL["vocab_size"] :] = 0
    return name, whole


def cuts_of(whole: torch.Tensor, operation: str) -> list[Cut]:
    numel, height = whole.numel(), whole.shape[0]
    stride = 2 if operation.startswith(("gate_up", "interleaved")) else 1
    cuts = [Cut(numel)] + [Cut(numel, stride, run, 2) for run in range(2)]
    return cuts + ([Cut(numel, height, run, 4) for run in range(4)] if whole.dim() > 1 else [])


def part_of(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    return whole.view(-1)[cut.index(torch.arange(cut.numel // cut.runs))]


@pytest.mark.parametrize(("family", "ours", "operation"), ROWS)
def test_theirs_give_ours_back_whole_and_in_every_part(family, ours, operation):
    name, whole = example(ours, operation)
    rows = rows_of(family, name, whole.shape[0], MODEL)
    theirs = dict(to_theirs(rows, whole))
    for each, shape in theirs_of(rows, tuple(whole.shape)).items():
        if rows[0].stacked:  # that expert's part among those of others
            theirs[each] = torch.cat([-theirs[each], theirs[each], -theirs[each]])
        assert tuple(theirs[each].shape) == shape
    there = mapped(family, name, tuple(whole.shape), MODEL, Held(theirs))
    there.check(torch.float32)
    for cut in cuts_of(whole, operation):
        part = part_of(whole, cut)
        for start, stop in ((0, len(part)), (3, len(part) - 2), (len(part) // 2, len(part) // 2 + 1)):
            piece = Piece(name, "param", tuple(whole.shape), cut, start, stop)
            found = torch.full((stop - start,), -1.0)
            there.read(piece, found)
            assert torch.equal(found, part[start:stop]), (cut, start, stop)


def test_a_part_reads_its_own_rows_alone():
    name, whole = example("decoder.layers.<layer>.mlp.linear_fc1.weight", "gate_up")
    held = Held(dict(to_theirs(rows_of("llama", name, whole.shape[0], MODEL), whole)))
    there = mapped("llama", name, tuple(whole.shape), MODEL, held)
    there.read(Piece(name, "param", tuple(whole.shape), Cut(whole.numel(), 2, 1, 2), 8, 24), torch.empty(16))
    assert sum(held.asked) == 16


def test_a_parameter_that_the_family_lacks_is_named():
    with pytest.raises(CheckpointError, match=r"family llama have no decoder\.layers\.0\.mlp\.router\.weight"):
        mapped("llama", "decoder.layers.0.mlp.router.weight", (4, 8), MODEL, Held({}))


def test_the_layer_inside_a_prediction_is_counted_on():
    (rows,) = rows_of("deepseek_v3", "mtp.layers.1.mtp_model_layer.mlp.router.weight", 3, MODEL) or []
    assert rows.name == "model.layers.4.mlp.gate.weight"
    (rows,) = rows_of("deepseek_v3", "mtp.layers.0.enorm.weight", 8, MODEL) or []
    assert rows.name == "model.layers.3.enorm.weight"


def test_names_of_a_bare_model_lack_the_first_part():
    rows = rows_of("gpt2", "decoder.layers.0.input_layernorm.weight", 8, MODEL)
    held = Held({"h.0.ln_1.weight": torch.ones(8)})
    there = mapped("gpt2", "decoder.layers.0.input_layernorm.weight", (8,), MODEL, held)
    assert rows[0].name == "transformer.h.0.ln_1.weight" and there.rows[0].name == "h.0.ln_1.weight"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ({}, r"model has no model\.norm\.weight, of which decoder\.final_layernorm\.weight is made"),
        ({"model.norm.weight": torch.ones(9)}, r"model\.norm\.weight in .* is 9, but config\.json makes it 8"),
        ({"model.norm.weight": torch.ones(8).half()}, r"is float16, but config\.json says float32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(made, text):
    there = mapped("llama", "decoder.final_layernorm.weight", (8,), MODEL, Held(made))
    with pytest.raises(CheckpointError, match=text):
        there.check(torch.float32)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_transformers_converters_read_the_same_tensors(family):
    """Names of the tensors that transformers joins into its own; gpt_oss has them joined in its files."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    sources = {
        source.replace("*", "<expert>").lstrip(".")
        for each in get_checkpoint_conversion_mapping(family)
        if type(each).__name__ == "WeightConverter"
        for source in each.source_patterns
    }
    theirs = {name for _, _, *row in table(family) for name in row if "<expert>" in name}
    assert len(sources) == 3
    assert {source for source in sources for name in theirs if name.endswith(f".{source}")} == sources
    assert {name for source in sources for name in theirs if name.endswith(f".{source}")} == theirs
