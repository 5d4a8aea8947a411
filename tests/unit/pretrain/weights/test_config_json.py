"""config.json and keys of ours, in both directions; what has no counterpart is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict

import pytest

from megaaccum.cli.config import as_yaml
from megaaccum.config.schema.model import ModelConfig
from megaaccum.errors import ConfigError
from megaaccum.pretrain.weights import config_json
from tests.support import huggingface as hf
from tests.support.configs import plan


def content_of(family: str) -> dict:
    """The config.json of a family's small model."""
    import transformers

    name, arguments = hf.MODELS[family]
    return json.loads(getattr(transformers, f"{name}Config")(**arguments).to_json_string())


@pytest.fixture(params=hf.MODELS)
def family(request) -> str:
    return request.param


def planned(tmp_path, content: dict):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return hf.plan_of(folder, 1).config


def test_both_directions_give_the_same_model(family, tmp_path):
    config = planned(tmp_path, content := content_of(family))
    assert config_json.differences(config, content, hf.VOCAB) == []
    back = config_json.json_from(config, family, hf.VOCAB)
    assert config_json.differences(config, back, hf.VOCAB) == []
    there, here = config_json.keys_from(content), config_json.keys_from(back)  # which has what was left out, too
    assert here == {name: here[name] if value is None else value for name, value in there.items()}
    fitting = config_json.family_for(config, hf.VOCAB)
    assert fitting == ("llama" if family == "mistral" else family)  # without a window it is one


def test_what_is_written_is_read_by_transformers(family, tmp_path):
    import transformers

    written = config_json.json_from(planned(tmp_path, content_of(family)), family, hf.VOCAB)
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    said = ("transformers_version", "dtype", "_name_or_path", "architectures", "attention_dropout", "rope_parameters")
    expected = {key: value for key, value in content_of(family).items() if key not in said and value is not None}
    bare = {"bos_token_id", "eos_token_id", "head_dim", "num_nextn_predict_layers", "n_inner", "layer_types"}
    assert {key: read.get(key) for key in expected.keys() - bare} == {
        key: expected[key] for key in expected.keys() - bare
    }


@pytest.mark.parametrize(
    ("family", "changed", "text"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu'"),
        ("llama", {"attention_bias": True}, "mlp_bias is False, but add_bias_linear"),
        ("llama", {"num_hidden_layers": None, "logit_scale": 2.0}, "logit_scale 2.0 has no key here"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "built in"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.5}}, "10000.5 is no whole number"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen2", {"hidden_size": None}, "config.json has no hidden_size, of which hidden_size is made"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has other kinds"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob: the weights of several experts"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1}, "norm_topk_prob: the weights of several experts"),
        ("deepseek_v3", {"num_experts_per_tok": 4}, "n_group: groups are chosen by their best 4 experts here"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, but only 1e-06 is computed here"),
        ("deepseek_v3", {"q_lora_rank": None}, "config.json has no q_lora_rank"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, but only 1.702"),
        ("gpt_oss", {"layer_types": ["chunked_attention"]}, "['chunked_attention']"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type default with"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop is 0.3, but hidden_dropout"),
        ("gpt2", {"activation_function": "relu"}, "activation_function relu"),
    ],
)
def test_what_has_no_key_is_refused_by_name(family, changed, text):
    with pytest.raises(ConfigError) as caught:
        config_json.keys_from(content_of(family) | changed)
    assert any(text in problem for problem in caught.value.problems), caught.value.problems


def test_what_a_file_leaves_out_is_what_transformers_takes(family, tmp_path):
    """Each key in turn, unless a file without it is refused here, or there."""
    import transformers

    def model_of(content: dict) -> dict:
        return config_json._completed(asdict(ModelConfig()) | config_json.keys_from(content))

    content, file, accepted = content_of(family), tmp_path / "config.json", 0
    for name in content.keys() - {"model_type", "num_nextn_predict_layers", "num_hidden_layers"}:
        less = {key: value for key, value in content.items() if key != name}
        with suppress(ConfigError):
            mine = model_of(less)
            file.write_text(json.dumps(less))
            read = transformers.AutoConfig.from_pretrained(tmp_path).to_json_string()
            assert mine == model_of(json.loads(read)), f"without {name}"
            accepted += 1
    assert accepted > 5


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
        ("llama", {"max_sequence_length": 64}),
        ("qwen2", {"use_mrope": False, "sliding_window": 32, "max_window_layers": 2}),
        ("gpt2", {"output_past": True, "_num_labels": 1}),
    ],
)
def test_what_published_files_say_beside_the_model_is_read_over(family, more):
    assert config_json.keys_from(content_of(family) | more) == config_json.keys_from(content_of(family))


def test_a_model_without_groups_of_experts_is_written_with_one(tmp_path):
    """transformers has a number of groups always, and reads no null."""
    config = planned(tmp_path, content_of("deepseek_v3") | {"n_group": None, "topk_group": None})
    written = config_json.json_from(config, "deepseek_v3", hf.VOCAB)
    assert (written["n_group"], written["topk_group"]) == (1, 1)
    assert config_json.family_for(config, hf.VOCAB) == "deepseek_v3"


def test_a_family_that_is_asked_for_has_to_have_the_model(tmp_path):
    config = planned(tmp_path, content_of("qwen2"))
    assert config_json.family_for(config, hf.VOCAB, ["qwen2"]) == "qwen2"
    with pytest.raises(ConfigError) as caught:
        config_json.family_for(config, hf.VOCAB, ["llama"])
    assert "llama" in caught.value.problems[0] and "add_qkv_bias is True" in caught.value.problems[1]


def test_a_key_that_is_left_out_has_the_familys_default():
    """transformers' defaults of its classes, with which it would read the same file."""
    mixtral, mistral = content_of("mixtral"), content_of("mistral") | {"max_position_embeddings": 8192}
    del mixtral["rope_parameters"], mistral["sliding_window"]
    assert config_json.keys_from(mixtral)["rotary_base"] == 1_000_000
    assert config_json.keys_from(mistral)["window_size"] == [4095, 0]
    assert "window_size" not in config_json.keys_from(mistral | {"sliding_window": None})


@pytest.mark.parametrize(("kind", "text"), [("bert", "none of the families")])
def test_other_models_are_refused_by_name(kind, text):
    with pytest.raises(ConfigError, match=text):
        config_json.keys_from({"model_type": kind})


def test_an_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="LoRA adapter"):
        config_json.read_json(tmp_path)


def test_a_missing_key_is_named():
    content = content_of("llama")
    del content["num_hidden_layers"]
    with pytest.raises(ConfigError, match="no num_hidden_layers, of which num_layers is made"):
        config_json.keys_from(content)


@pytest.mark.parametrize("bad", ["x", [[]], {"a": 1}, None, 10**400, True], ids=lambda value: repr(value)[:10])
def test_a_value_of_another_kind_is_a_problem(family, bad):
    content = content_of(family)
    for name in content.keys() - {"model_type"}:
        with suppress(ConfigError):
            config_json.keys_from(content | {name: bad})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "rope: a value is missing or of another kind"),
        ({"hidden_size": "x"}, "hidden_size is made of 'x', but must be"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000, but must be at least 1 and at most"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but must be at least 1"),
        ({"layer_types": 3}, "layer_types has other kinds"),
    ],
)
def test_what_a_value_has_to_be_is_told(changed, told):
    with pytest.raises(ConfigError) as caught:
        config_json.keys_from(content_of("llama") | changed)
    assert [text for text in caught.value.problems if text.startswith(f"config.json: {told}")]


def test_older_files_say_rotation_and_experts_otherwise():
    content = content_of("llama") | {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    del content["rope_parameters"]
    found = config_json.keys_from(content)
    assert (found["rotary_base"], found["seq_len_interpolation_factor"]) == (500000, 4.0)
    del content["rope_theta"], content["rope_scaling"]
    assert config_json.keys_from(content)["rotary_base"] == 10000
    content = content_of("qwen3_moe")
    content["num_experts"] = content.pop("num_local_experts")
    assert config_json.keys_from(content)["num_experts"] == 4


def test_a_window_is_counted_as_megatron_does():
    found = config_json.keys_from(content_of("mistral") | {"sliding_window": 16})
    assert found["window_size"] == [15, 0]


def test_a_window_that_no_row_fills_is_left_out_and_said_to_be(tmp_path):
    longest = content_of("mistral")["max_position_embeddings"]
    for window, lines in ((longest, 2), (longest - 1, 1), (None, 1)):
        (tmp_path / "config.json").write_text(json.dumps(content_of("mistral") | {"sliding_window": window}))
        text = as_yaml(tmp_path)
        assert (text.count("# "), "window_size" in text) == (lines, window == longest - 1)


def test_windows_lie_in_the_layers_that_have_them():
    content = content_of("gpt_oss")
    found = config_json.keys_from(content)
    assert (found["window_size"], found["window_attn_skip_freq"]) == ([7, 0], [1, 0, 1, 0])
    everywhere = config_json.keys_from(content | {"layer_types": ["full_attention"] * 4})
    assert "window_size" not in everywhere


def test_a_model_without_windows_is_written_with_one_that_no_sequence_fills(tmp_path):
    """transformers makes a mask of the windows of GPT-OSS whether or not a layer has one."""
    config = planned(tmp_path, content_of("gpt_oss") | {"layer_types": ["full_attention"] * 4})
    written = config_json.json_from(config, "gpt_oss", hf.VOCAB)
    assert written["sliding_window"] == config.model.max_position_embeddings
    assert config_json.differences(config, written, hf.VOCAB) == []


def test_a_frequency_of_windows_is_the_list_of_layers(tmp_path):
    config = planned(tmp_path, content := content_of("gpt_oss"))
    config.megatron["window_attn_skip_freq"] = 2
    assert config_json.differences(config, content, hf.VOCAB) == []


def test_a_model_of_no_family_is_refused_with_the_nearest_ones_differences():
    with pytest.raises(ConfigError) as caught:
        config_json.family_for(plan(swiglu=True, position_embedding_type="rope").config, 100)
    assert "nearest is" in caught.value.problems[0] and any(
        "normalization" in each for each in caught.value.problems[1:]
    )


def test_gelu_has_to_say_which_one_it_is():
    config = plan(attention_dropout=0.0).config
    with pytest.raises(ConfigError, match="say by which one"):
        config_json.json_from(config, "gpt2", 100)
    assert config_json.family_for(plan(openai_gelu=True).config, 100) == "gpt2"


def test_exact_gelu_stays_exact(tmp_path):
    content = content_of("gpt2") | {"activation_function": "gelu"}
    found, config = config_json.keys_from(content), planned(tmp_path, content)
    assert found["bias_gelu_fusion"] is False and not found.get("openai_gelu")
    assert config_json.json_from(config, "gpt2", hf.VOCAB)["activation_function"] == "gelu"
    assert config_json.family_for(config, hf.VOCAB) == "gpt2"


@pytest.mark.parametrize(
    ("step", "dense", "frequency"),
    [(1, [], 1), (3, [], [0, 0, 1, 0, 0, 1]), (2, [3], [0, 1, 0, 0, 0, 1]), (1, [1, 3, 5], [1, 0, 1, 0, 1, 0])],
)
def test_experts_lie_in_the_layers_that_have_them(step, dense, frequency, tmp_path):
    changed = {"num_hidden_layers": 6, "decoder_sparse_step": step, "mlp_only_layers": dense}
    content = content_of("qwen3_moe") | changed | {"layer_types": None}
    assert config_json.keys_from(content)["moe_layer_freq"] == frequency
    config = planned(tmp_path, content)
    if frequency == [1, 0, 1, 0, 1, 0]:
        config.model.moe_layer_freq = 2  # Megatron's number: each second layer from the first
    written = config_json.json_from(config, "qwen3_moe", hf.VOCAB)
    sparse = frequency if isinstance(frequency, list) else [frequency] * 6
    assert written["decoder_sparse_step"] == 1
    assert written["mlp_only_layers"] == [layer for layer in range(6) if not sparse[layer]]


def test_another_model_is_named_with_the_value_to_set(tmp_path):
    content = content_of("llama")
    config = planned(tmp_path, content)
    texts = config_json.differences(config, content | {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}, hf.VOCAB)
    assert len(texts) == 2 and "norm_epsilon is 1e-06 in the configuration, but 1e-05" in texts[0]


def test_a_folder_without_config_json_is_told_what_a_run_needs(tmp_path):
    """`init_from` of a run of megaaccum is a mistake that suggests itself."""
    with pytest.raises(ConfigError, match=r"config.json cannot be read: .* set load to its checkpoints, and finetune"):
        config_json.read_object(tmp_path / "config.json")
