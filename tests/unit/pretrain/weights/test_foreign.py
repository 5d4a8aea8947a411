"""Which checkpoint of another program's folder is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaaccum.errors import CheckpointError
from megaaccum.pretrain.weights import deepspeed_folder, foreign
from megaaccum.pretrain.weights.weights_in import HuggingFaceFolder
from tests.support import huggingface as hf
from tests.support.configs import make, plan


def test_load_step_names_one_of_deepspeeds_or_lists_what_there_is(tmp_path: Path):
    for step in (3, 5, 10):
        place = tmp_path / f"global_step{step}" / "zero" / "embedding.weight"
        place.mkdir(parents=True)
        (place / "fp32.pt").touch()
    (tmp_path / "latest").write_text("global_step5")
    assert foreign.holds_foreign(tmp_path)
    assert foreign._open(tmp_path, make(), 64).folder.name == "global_step5"
    assert foreign._open(tmp_path, make(), 64, 3).folder.name == "global_step3"
    with pytest.raises(CheckpointError) as caught:
        foreign._open(tmp_path, make(), 64, 4)
    there = "global_step3, global_step5, global_step10"
    assert str(caught.value) == f"load_step 4: {tmp_path} holds no global_step4, but: {there}"


def test_load_step_names_one_of_megatrons_or_lists_what_there_is(tmp_path: Path):
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(CheckpointError, match=r"load_step 3: .* holds no iter_0000003, but: iter_0000005"):
        foreign._open(tmp_path, make(), 64, 3)
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError, match="iter_0000003 is no torch_dist checkpoint"):
        foreign._open(tmp_path, make(), 64, 3)


@pytest.mark.parametrize(("stage", "is_list"), [(1, False), (1, True), (2, True), (3, False)])
def test_moments_of_deepspeed_are_those_of_each_rank_and_group_without_its_padding(tmp_path: Path, stage, is_list):
    """DeepSpeed pads a group's flat tensor, and keeps the masters without that."""
    files, masters, expected = [], [], []
    for rank in range(2):
        flat = [torch.arange(6.0) + 100 * rank + 10 * group for group in range(2)]
        states = [{"exp_avg": each, "exp_avg_sq": -each} for each in flat]
        state = states if is_list else {"state": dict(enumerate(states))}
        files.append(str(tmp_path / f"{rank}_optim_states.pt"))
        key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        torch.save({"optimizer_state_dict": {key: state}}, files[-1])
        masters.append([torch.zeros(6), torch.zeros(4)])
        expected.append([-flat[0], -flat[1][:4]])
    found = deepspeed_folder._moments(lambda *_: (stage, 2, masters), "exp_avg_sq", files, str(tmp_path))
    assert found[:2] == (stage, 2)
    for mine, wanted in zip(found[2], expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, wanted, strict=True))


def test_a_skipped_step_of_deepspeed_is_no_update(tmp_path: Path):
    (tmp_path / "zero").mkdir()
    state = {"global_steps": 9, "global_samples": 72, "skipped_steps": 2}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    assert deepspeed_folder.DeepSpeedFolder(tmp_path, make(), 64).reached(with_optimizer=True) == (9, 7, 72)


def test_each_file_of_a_universal_checkpoint_is_one_tensor(tmp_path: Path):
    for name in ("embedding.word_embeddings.weight", "other.weight"):
        place = tmp_path / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": torch.arange(6.0)}, place / "fp32.pt")
        torch.save({"param": -torch.arange(6.0)}, place / "exp_avg.pt")
    folder = deepspeed_folder.DeepSpeedFolder(tmp_path, make(), 64)
    name = "embedding.word_embeddings.weight"
    assert torch.equal(folder.whole(name, "param", (2, 3)), torch.arange(6.0).view(2, 3))
    assert torch.equal(folder.whole(name, "exp_avg", (2, 3)), -torch.arange(6.0).view(2, 3))
    assert folder.rest({name: (2, 3)}) == ["other.weight"]


def test_a_checkpoint_of_deepspeed_that_pipeline_stages_wrote_is_refused(tmp_path: Path):
    (tmp_path / "layer_00-model_00-model_states.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="with tensor or pipeline parallelism"):
        deepspeed_folder.DeepSpeedFolder(tmp_path, make(), 64)


def test_names_of_a_family_are_joined_and_padded_as_the_run_has_them(tmp_path: Path):
    """Weights and moments are joined alike; rows of the vocabulary's padding are zero."""
    config = plan(
        hidden_size=64, num_query_groups=8, ffn_hidden_size=96, swiglu=True, normalization="RMSNorm",
        position_embedding_type="rope", add_bias_linear=False, untie_embeddings_and_output_weights=True,
    ).config  # fmt: skip
    layer = "model.layers.0.mlp."
    theirs = {"model.embed_tokens.weight": torch.randn(61, 64)}
    theirs |= {f"{layer}{name}_proj.weight": torch.randn(96, 64) for name in ("gate", "up")}
    for name, tensor in theirs.items():
        place = tmp_path / "zero" / name
        place.mkdir(parents=True)
        for kind, sign in (("fp32", 1), ("exp_avg", -1)):
            torch.save({"param": sign * tensor}, place / f"{kind}.pt")
    folder = deepspeed_folder.DeepSpeedFolder(tmp_path, config, 61)
    words = torch.cat([theirs["model.embed_tokens.weight"], torch.zeros(3, 64)])
    both = torch.cat([theirs[f"{layer}gate_proj.weight"], theirs[f"{layer}up_proj.weight"]])
    for kind, sign in (("param", 1), ("exp_avg", -1)):
        assert torch.equal(folder.whole("embedding.word_embeddings.weight", kind, (64, 64)), sign * words)
        assert torch.equal(folder.whole("decoder.layers.0.mlp.linear_fc1.weight", kind, (192, 64)), sign * both)
    with pytest.raises(CheckpointError, match=r"has neither output_layer\.weight nor lm_head\.weight"):
        folder.whole("output_layer.weight", "param", (64, 64))


def test_layers_that_a_run_leaves_out_are_no_rest_of_a_model_and_less_precision_than_it_says_is_refused(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = hf.add_prediction(hf.write("deepseek_v3", tmp_path))
    config = hf.plan_of(folder, 1).config
    last, norm = f"model.layers.{config.model.num_layers}.", {"decoder.final_layernorm.weight": (32,)}
    for layers in (1, None):
        config.model.mtp_num_layers = layers
        rest = HuggingFaceFolder(folder, config, hf.VOCAB).rest(norm)
        assert any(name.startswith(last) for name in rest) == (layers == 1)
        assert any(name.startswith("model.layers.0.") for name in rest) and "model.norm.weight" not in " ".join(rest)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].half()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* is float16, but config\.json says float32"):
        HuggingFaceFolder(folder, config, hf.VOCAB).rest(norm)
