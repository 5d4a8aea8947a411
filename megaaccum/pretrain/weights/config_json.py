"""A model's config.json and the keys of ours, in both directions; what has no counterpart is refused by name. No torch.

families.yaml has the keys that are the same under another name. Facts that several keys hold are parts: a function that
takes its keys out of config.json and gives ours, and one that gives theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.keys import all_keys
from megaaccum.config.schema import Config
from megaaccum.config.schema.model import ModelConfig
from megaaccum.errors import CheckpointError, ConfigError, raise_problems
from megaaccum.pretrain.weights.rows import families
from megaaccum.texts import parse_json, read_text

Keys = dict[str, Any]

_OTHER_NAMES = {"num_experts": "num_local_experts"}
"""Names of keys in config.json that versions of transformers write in their place."""
_NO_TOKENS: Keys = {"bos_token_id": None, "eos_token_id": None}


def read_json(folder: Path) -> Keys:
    """The config.json of a model's folder. Raises ConfigError if there is none."""
    path = folder / "config.json"
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"{folder} has a LoRA adapter (adapter_config.json), which is not read: merge it into its model"
        )
    content = read_object(path)
    if not isinstance(content.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type")
    if content.get("num_nextn_predict_layers") and not _predicts(folder, content):
        content["num_nextn_predict_layers"] = 0
    return content


def _predicts(folder: Path, content: Keys) -> bool:
    """Whether the files hold prediction layers, whose number transformers writes without them."""
    from megaaccum.pretrain.weights.safetensors_folder import Weights

    try:
        files = Weights(folder).files
    except CheckpointError:  # the weights come later, or their error does
        return True
    return any(name.startswith(f"model.layers.{content.get('num_hidden_layers')}.") for name in files)


def read_object(path: Path) -> Keys:
    """The object in a JSON file. Raises ConfigError if there is none."""
    try:
        content = parse_json(read_text(path))
    except OSError as error:
        remedy = "give the folder of a model (a run's weights: set load to its checkpoints, and finetune)"
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}: {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def end_ids(content: Keys) -> list[int]:
    """The tokens that end a text, by a config.json or generation_config.json."""
    given = content.get("eos_token_id")
    return [given] if isinstance(given, int) else list(given or ())


def family_of(content: Keys) -> str:
    """The family of a config.json. Raises ConfigError, naming the families, for another."""
    kind = content["model_type"]
    if kind not in families()["families"]:
        raise ConfigError(f"model_type {kind} is none of the families {', '.join(families()['families'])}")
    return str(kind)


def keys_from(content: Keys) -> Keys:
    """Our keys of the section model, fields of Megatron's configuration among them, for a config.json. Raises
    ConfigError with everything in it that has no counterpart."""
    facts = families()["families"][family_of(content)]
    left, problems, found = facts.get("defaults", {}) | content, [], dict(facts["ours"])
    defaults = families()["common"]["defaults"]  # of what is null

    def value_of(theirs: str) -> Any:
        value = left.pop(theirs, None)
        return defaults.get(theirs) if value is None else value

    for ours, theirs in facts["keys"].items():
        name = theirs if theirs in left else _OTHER_NAMES.get(theirs, theirs)
        if (value := value_of(name)) is not None or name in defaults:
            found[ours] = value
        else:
            problems.append(f"config.json has no {theirs}, of which {ours} is made.")
    found |= {ours: not value_of(theirs) for ours, theirs in facts.get("opposites", {}).items()}
    for name, ours in facts.get("repeats", {}).items():
        if (here := value_of(name)) not in (None, found.get(ours)):
            problems.append(f"config.json: {name} is {here!r}, but {ours}, which has it too, is {found.get(ours)!r}.")
    for name, value in facts["theirs"].items():
        if (here := content.get(name, value)) != value:
            problems.append(f"config.json: {name} is {here!r}, but only {value!r} is computed here.")
    if not (wrong := list(_wrong_values(found))):  # parts compute with these, and count up to the layers
        problems += [text for part in facts["parts"] for text in _add_part(part, left, found)]
        wrong = list(_wrong_values(found))
    problems += wrong + _without_counterpart(left, facts["theirs"])
    raise_problems(problems)
    return found


def _without_counterpart(left: Keys, checked: Keys) -> list[str]:
    """Problems with keys of config.json that no key of ours is made of, beside those `checked`."""
    problems = []
    layers = left.pop("layer_types", None) or []
    if not isinstance(layers, list) or any(each != "full_attention" for each in layers):
        problems.append("config.json: layer_types has other kinds than full_attention; no key here sets them by layer.")
    ignored = {*families()["ignored"].split(), *checked}
    return problems + [
        f"config.json: {name} {value!r} has no key here, and may change what the model computes."
        for name, value in left.items()
        if name not in ignored and value is not None
    ]


def _add_part(part: str, left: Keys, found: Keys) -> list[str]:
    """Move the keys of a part from `left` into `found`. Returns the problems with them."""
    try:
        found |= _PARTS[part][0](left, found)
    except ConfigError as error:
        return [f"config.json: {text}" for text in error.problems]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return [f"config.json: {part}: a value is missing or of another kind ({error!r})."]
    return []


def _wrong_values(found: Keys) -> Iterator[str]:
    """Yields problems with values that are of another kind than their key, or beyond its limit."""
    for name in sorted(found.keys() & all_keys().keys()):
        value, key = found[name], all_keys()[name]
        try:
            if value is not None:
                coerce(value, key.annotation)
        except NotOfType as error:
            yield f"config.json: {name} is made of {value!r}, but must be {error}."
        else:
            if isinstance(value, int | float) and not key.facts.allow(value):
                yield f"config.json: {name} is {value}, but must be {key.facts.range}."


def json_from(config: Config, family: str, vocab_size: int) -> Keys:
    """The config.json of a resolved configuration as a model of `family`, without the tokens that begin and end a text,
    of which transformers' class has ids of another vocabulary. Raises ConfigError if a part cannot be written there."""
    facts, model = families()["families"][family], model_keys(config, vocab_size)
    content: Keys = {"architectures": [facts["architecture"]], "model_type": family} | _NO_TOKENS
    content |= {theirs: model.get(ours) for ours, theirs in facts["keys"].items()}
    content |= {theirs: not model.get(ours) for ours, theirs in facts.get("opposites", {}).items()}
    content |= {theirs: model.get(ours) for theirs, ours in facts.get("repeats", {}).items()}
    content |= facts["theirs"]
    for part in facts["parts"]:
        content |= _PARTS[part][1](model)
    return content


def model_keys(config: Config, vocab_size: int) -> Keys:
    """All keys of a resolved configuration's model, and Megatron's fields. vocab_size: before padding."""
    return _completed(asdict(config.model) | config.megatron | {"vocab_size": vocab_size})


def differences(config: Config, content: Keys, vocab_size: int) -> list[str]:
    """Texts on the keys of a resolved configuration that make another model than config.json describes."""
    here, there = model_keys(config, vocab_size), _completed(asdict(ModelConfig()) | keys_from(content))
    return [
        f"{name} is {here.get(name)} in the configuration, but {there.get(name)} in config.json: set it to that"
        for name in sorted((here.keys() | there.keys()) - set(families()["of_training"].split()))
        if not _equal(here.get(name), there.get(name)) and not _idle(name, here)
    ]


def _completed(model: Keys) -> Keys:
    """The keys of a model, with those filled in that follow from others."""
    heads = model["num_attention_heads"]
    filled: Keys = {
        "num_query_groups": model["num_query_groups"] or heads,
        "kv_channels": model["kv_channels"] or model["hidden_size"] // heads,
        "add_qkv_bias": model["add_qkv_bias"] or model["add_bias_linear"],
        "ffn_hidden_size": (width := model["ffn_hidden_size"] or 4 * model["hidden_size"]),
        "moe_ffn_hidden_size": model.get("moe_ffn_hidden_size") or width,
        "window_attn_skip_freq": _window_pattern(model),
        **{name: model.get(name) or 1 for name in ("moe_router_num_groups", "moe_router_group_topk")},
    }
    return model | filled


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other) or (not one and not other)


def _idle(name: str, model: Keys) -> bool:
    """Whether a key has no effect in this model."""
    needs = all_keys()[name].facts.needs if name in all_keys() else ""
    latent = model["multi_latent_attention"]
    positions = name in ("rotary_base", "rotary_percent") and model["position_embedding_type"] == "learned_absolute"
    table = name == "max_position_embeddings" and model["position_embedding_type"] != "learned_absolute"
    fused = name == "bias_gelu_fusion" and (model["swiglu"] or model["openai_gelu"])
    return bool(needs and not model.get(needs)) or positions or table or fused or (latent and name == "kv_channels")


def family_for(config: Config, vocab_size: int, among: Iterable[str] | None = None) -> str:
    """The first family (of these, default all) that has everything of a resolved configuration. Raises ConfigError with
    the differences from the nearest one."""
    found: dict[str, list[str]] = {}
    for family in among or families()["families"]:
        try:
            found[family] = differences(config, json_from(config, family, vocab_size), vocab_size)
        except ConfigError as error:
            found[family] = error.problems
        if not found[family]:
            return str(family)
    nearest = min(found, key=lambda family: len(found[family]))
    kind = "no family of Hugging Face's has this model; the nearest is" if among is None else "this is no model of"
    raise ConfigError([f"{kind} {nearest}:", *found[nearest]])


# --- parts: (from theirs, to theirs) ---------------------------------------------------------------------------------


def _rope(part: str, left: Keys, found: Keys) -> Keys:
    """Rotation in either form: rope_parameters, or rope_theta and rope_scaling."""
    theta, old = left.pop("rope_theta", None), left.pop("rope_scaling", None)
    rope = dict(left.pop("rope_parameters", None) or old or {})
    theta, kind = rope.pop("rope_theta", None) or theta or 10000.0, rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    if theta != int(theta):
        raise ConfigError(f"rope_theta {theta} is no whole number, which rotary_base has to be.")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("rope: partial_rotary_factor: a share of the channels is rotated otherwise here.")
    kinds = families()["rotations"][part]
    facts = kinds.get(kind, {})
    rope, numbers, built_in = facts.get("defaults", {}) | rope, facts.get("numbers", {}), facts.get("built_in", {})
    if kind not in kinds or (kind == "yarn" and rope.keys() != numbers.keys()):
        raise ConfigError(f"rope_type {kind} with {sorted(rope)} has no keys here; {' and '.join(kinds)} have.")
    if {name: rope.get(name) for name in built_in} != built_in:
        raise ConfigError(f"rope {rope}: Megatron-core 0.19 has {built_in} built in.")
    return {"rotary_base": int(theta), **facts.get("ours", {}), **{ours: rope[name] for name, ours in numbers.items()}}


def _to_rope(part: str, model: Keys) -> Keys:
    """Rotation as transformers 5 writes it, and as versions before it and other programs read it."""
    scaling: Keys = {}
    for kind, facts in families()["rotations"][part].items():
        ours, defaults = facts.get("ours", {}), facts.get("defaults", {})
        numbers = {theirs: model.get(name, defaults.get(theirs)) for theirs, name in facts.get("numbers", {}).items()}
        if all(model.get(name) == value for name, value in ours.items()) if ours else any(numbers.values()):
            scaling = {"rope_type": kind} | numbers | facts.get("built_in", {})
    rope = {"rope_theta": float(model["rotary_base"]), "rope_type": "default"} | scaling
    return {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": scaling or None}


def _window(left: Keys, found: Keys) -> Keys:
    window = left.pop("sliding_window", None)
    if window is None or window >= found.get("max_position_embeddings", 0):
        return {}
    return {"window_size": [window - 1, 0]}  # Megatron counts the tokens before it


def _to_window(model: Keys) -> Keys:
    window = model.get("window_size")
    return {"sliding_window": None if window is None else window[0] + 1}


def _windows(left: Keys, found: Keys) -> Keys:
    count = found.get("num_layers", 0)
    kinds = left.pop("layer_types", None) or ["sliding_attention", "full_attention"] * count
    windows = [int(kind == "sliding_attention") for kind in kinds[:count]]
    if others := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise ConfigError(f"layer_types has other kinds than sliding_attention and full_attention: {others}.")
    made = _window(left, found) if any(windows) else {}
    return made | ({"window_attn_skip_freq": windows} if made else {})


def _to_windows(model: Keys) -> Keys:
    kinds = [f"{'sliding' if each else 'full'}_attention" for each in model["window_attn_skip_freq"]]
    # transformers makes a mask of the windows even if no layer has one.
    return _to_window({"window_size": [model["max_position_embeddings"] - 1, 0]} | model) | {"layer_types": kinds}


def _window_pattern(model: Keys) -> list[int]:
    """1 for each layer with a window, 0 for the others."""
    every, layers = model.get("window_attn_skip_freq"), range(model["num_layers"])
    if isinstance(every, list | tuple):
        return list(every)
    return [int(bool(model.get("window_size")) and (not every or (layer + 1) % every != 0)) for layer in layers]


def _frequency(model: Keys) -> list[int]:
    """1 for each layer with experts, 0 for the others."""
    every, count = model["moe_layer_freq"], model["num_layers"]
    return list(every) if isinstance(every, list) else [int(layer % every == 0) for layer in range(count)]


def _as_frequency(pattern: list[int]) -> Keys:
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _sparse_step(left: Keys, found: Keys) -> Keys:
    step, dense = left.pop("decoder_sparse_step", 1), left.pop("mlp_only_layers", None) or []
    layers = range(found.get("num_layers", 0))
    return _as_frequency([int(layer not in dense and (layer + 1) % step == 0) for layer in layers])


def _to_sparse_step(model: Keys) -> Keys:
    dense = [layer for layer, sparse in enumerate(_frequency(model)) if not sparse]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _dense_first(left: Keys, found: Keys) -> Keys:
    dense = left.pop("first_k_dense_replace", 0)
    return _as_frequency([int(layer >= dense) for layer in range(found.get("num_layers", 0))])


def _routing(left: Keys, found: Keys) -> Keys:
    if left.pop("norm_topk_prob", True) != _to_routing(found)["norm_topk_prob"]:
        raise ConfigError("norm_topk_prob: the weights of several experts sum to 1 here, that of one is its score.")
    return {}


def _to_routing(model: Keys) -> Keys:
    count, chosen = model["moe_router_topk"], model.get("moe_router_group_topk") or 1
    if chosen < (model.get("moe_router_num_groups") or 1) and count // chosen != 2:
        raise ConfigError(f"n_group: groups are chosen by their best {count // chosen} experts here, there by 2.")
    return {"norm_topk_prob": count > 1, "n_group": model.get("moe_router_num_groups") or 1, "topk_group": chosen}


def _shared_experts(left: Keys, found: Keys) -> Keys:
    count = left.pop("n_shared_experts", None)
    return {"moe_shared_expert_intermediate_size": count * found["moe_ffn_hidden_size"]} if count else {}


def _to_shared_experts(model: Keys) -> Keys:
    shared, width = model.get("moe_shared_expert_intermediate_size"), model["moe_ffn_hidden_size"]
    if shared and shared % width:
        raise ConfigError(
            f"moe_shared_expert_intermediate_size {shared} is no multiple of moe_ffn_hidden_size {width}: config.json"
            " counts shared experts of that width."
        )
    return {"n_shared_experts": shared // width if shared else None}


def _prediction(left: Keys, found: Keys) -> Keys:
    return {"mtp_num_layers": left.pop("num_nextn_predict_layers", None) or None}


def _gelu(left: Keys, found: Keys) -> Keys:
    kind = left.pop("activation_function", "gelu_new")
    if kind not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        raise ConfigError(f"activation_function {kind} has no key here; gelu and gelu_new have.")
    return {"openai_gelu": True} if kind != "gelu" else {"bias_gelu_fusion": False}


def _to_gelu(model: Keys) -> Keys:
    if not model["openai_gelu"] and model["bias_gelu_fusion"]:
        raise ConfigError(
            "bias_gelu_fusion computes GELU by tanh on a GPU and exactly elsewhere: say by which one the model is, with"
            " --openai_gelu true or --bias_gelu_fusion false."
        )
    return {"activation_function": "gelu_new" if model["openai_gelu"] else "gelu"}


_PARTS: Mapping[str, tuple[Callable[[Keys, Keys], Keys], Callable[[Keys], Keys]]] = {
    **{name: (partial(_rope, name), partial(_to_rope, name)) for name in ("rope", "latent_rope", "yarn")},
    "window": (_window, _to_window),
    "windows": (_windows, _to_windows),
    "sparse_step": (_sparse_step, _to_sparse_step),
    "dense_first": (_dense_first, lambda model: {"first_k_dense_replace": _frequency(model).count(0)}),
    "routing": (_routing, _to_routing),
    "shared_experts": (_shared_experts, _to_shared_experts),
    "prediction": (_prediction, lambda model: {"num_nextn_predict_layers": model["mtp_num_layers"] or 0}),
    "gelu": (_gelu, _to_gelu),
}
