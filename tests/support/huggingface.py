"""Small models of transformers' own classes, and runs over their folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megaaccum.config import Plan
    from megaaccum.engine import Engine

VOCAB, SEQ = 64, 32
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.1,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
_LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
_ROUTED = dict(
    n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
    first_k_dense_replace=1, n_shared_experts=2,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _COMMON | dict(rope_parameters=LLAMA3)),
    "qwen2": ("Qwen2", _COMMON | dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", _COMMON | dict(head_dim=16)),
    "mistral": ("Mistral", _COMMON | dict(sliding_window=None, head_dim=16)),
    "mixtral": ("Mixtral", _COMMON | dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": (
        "Qwen3Moe",
        _COMMON
        | dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16, norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
    "deepseek_v3": ("DeepseekV3", _COMMON | _LATENT | _ROUTED),
    "gpt_oss": (
        "GptOss",
        _COMMON
        | dict(
            num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=16,
            ),
        ),
    ),
    "gpt2": (
        "GPT2",
        dict(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=4, n_head=4, initializer_range=0.1, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        ),
    ),
}  # fmt: skip
"""By family, the class of transformers and the arguments of its configuration."""


def model_of(family: str) -> torch.nn.Module:
    """A random model of a family, the same each time, with no weight at its initial 0 or 1."""
    import torch
    import transformers

    name, arguments = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**arguments)
    torch.manual_seed(5)
    kind = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = kind(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() < 2:
                param.add_(torch.randn_like(param) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def write(family: str, folder: Path, **options: Any) -> Path:
    """The folder of a family's model below `folder`."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model_of(family).save_pretrained(folder / family, **options)
    return folder / family


def add_prediction(folder: Path) -> Path:
    """Give DeepSeek-V3's model in `folder` a layer that predicts one token more, as its published files have it:
    transformers neither writes nor reads that one."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    file, content = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, last = load_file(file), content["num_hidden_layers"]
    draw, width = torch.Generator().manual_seed(6), content["hidden_size"]
    shapes = {name.replace(f".{last - 1}.", f".{last}.", 1): tuple(each.shape) for name, each in tensors.items()}
    shapes = {name: shape for name, shape in shapes.items() if name.startswith(f"model.layers.{last}.")}
    shapes |= {f"model.layers.{last}.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"model.layers.{last}.eh_proj.weight"] = (width, 2 * width)
    tensors |= {name: torch.randn(shape, generator=draw) * 0.1 + (len(shape) == 1) for name, shape in shapes.items()}
    tensors[f"model.layers.{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"model.layers.{last}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content | {"num_nextn_predict_layers": 1}))
    return folder


def prediction_loss(folder: Path) -> float:
    """The loss of that layer, of the token after next, by transformers' own layers. In a process without stand-ins of
    the CPU lane."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), batch()
    last = model.config.num_hidden_layers
    mine = {
        name.removeprefix(f"model.layers.{last}."): each
        for name, each in load_file(folder / "model.safetensors").items()
        if name.startswith(f"model.layers.{last}.")
    }

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], mine[f"{name}.weight"], model.config.rms_norm_eps
        )

    with torch.no_grad():
        hidden = model.model(rows[:, :-2]).last_hidden_state
        merged = torch.cat((norm(model.model.embed_tokens(rows[:, 1:-1]), "enorm"), norm(hidden, "hnorm")), -1)
        # Its decoder layer takes the place of the model's last one, and all others are left out.
        layers = model.model.layers[-1:]
        state = {name: each for name, each in mine.items() if not name.startswith(("e", "hnorm", "shared_head"))}
        _, unexpected = layers[0].load_state_dict(_stacked(state), strict=False)
        assert not unexpected, unexpected
        model.model.layers, model.model.norm = layers, torch.nn.Identity()
        model.config.num_hidden_layers = 1
        after = model.model(inputs_embeds=merged @ mine["eh_proj.weight"].T, use_cache=False).last_hidden_state
        logits = norm(after, "shared_head.norm") @ mine["shared_head.head.weight"].T
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten()))


def _stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors as transformers 5 holds them: its experts in one tensor."""
    import torch

    experts = sorted({int(name.split(".")[2]) for name in state if name.startswith("mlp.experts.")})
    of = {kind: [state[f"mlp.experts.{e}.{kind}_proj.weight"] for e in experts] for kind in ("gate", "up", "down")}
    both = [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
    rest = {name: each for name, each in state.items() if not name.startswith("mlp.experts.")}
    return rest | {"mlp.experts.gate_up_proj": torch.stack(both), "mlp.experts.down_proj": torch.stack(of["down"])}


def plan_of(folder: Path, world_size: int, *words: str) -> Plan:
    """The plan of a run that begins with the model in `folder`, as `megaaccum config` writes it."""
    from megaaccum.cli.config import as_yaml
    from megaaccum.config import resolve
    from megaaccum.pretrain.interop.load import load

    path = folder.parent / f"{folder.name}.{os.getpid()}.yaml"
    path.write_text(as_yaml(folder))
    fixed = ["--seq_length", str(SEQ), "--lr", "1e-3", "--train_iters", "20", "--micro_batch_size", "1"]
    fixed += ["--global_batch_size", "8", "--data_path", "none", "--clip_grad", "0"]
    return resolve(load(path, [*fixed, *words]), world_size=world_size)


def engine_of(plan: Plan) -> Engine:
    """An engine of the plan's model, with weights of its own."""
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep

    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    step = GptForwardStep(built, plan.batch.loss_norm)
    return initialize(plan, chunks, groups=built, forward_step_func=step, reports=REPORTS)


LAYOUTS = {
    "zero3": "",
    "streaming": "--sync streaming",
    "fsdp2": "--backend fsdp2",
    "tp2": "--tensor_model_parallel_size 2 --sequence_parallel",
    "pp2": "--pipeline_model_parallel_size 2",
    "v": "--pipeline_model_parallel_size 2 --schedule zbv",
    "ep2": "--expert_model_parallel_size 2",
    "ep4": "--expert_model_parallel_size 4",
}
"""Layouts of 4 ranks."""
_WITHOUT_EXPERTS = {
    "ep2": "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2",
    "ep4": "--zero_stage 1 --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2",
}
"""Layouts of models that have none, in place of those that spread them."""


def words_of(family: str, layout: str) -> list[str]:
    """The layout as command-line words."""
    sparse = family in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
    if family == "gpt_oss" and layout == "tp2":
        return [*LAYOUTS[layout].split(), "--expert_tensor_parallel_size", "1"]  # its experts have biases
    return (LAYOUTS[layout] if sparse else _WITHOUT_EXPERTS.get(layout, LAYOUTS[layout])).split()


def batch() -> torch.Tensor:
    """Eight sequences, and the token after each."""
    import torch

    return torch.randint(0, VOCAB, (8, SEQ + 1), generator=torch.Generator().manual_seed(0))


def own_microbatches(engine: Engine) -> list[dict[str, torch.Tensor]]:
    """This rank's sequences of the batch."""
    import torch

    rows, dp, plan = batch(), engine.groups.dp, engine.plan
    numbers = [plan.batch.sample_index(m, dp.rank(), in_runs=plan.in_runs) for m in range(plan.batch.num_microbatches)]
    return [
        {
            "tokens": rows[i : i + 1, :-1],
            "labels": rows[i : i + 1, 1:],
            "loss_mask": torch.ones(1, SEQ),
            "position_ids": torch.arange(SEQ)[None],
        }
        for i in numbers
    ]


def loss_of(folder: Path) -> float:
    """transformers' loss of the batch, by the model in a folder. In a process without stand-ins of the CPU lane."""
    import torch
    from transformers import AutoModelForCausalLM

    model, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), batch()
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def round_trip(family: str, folder: Path, layout: str, steps: int, save: Path | None) -> tuple[list[str], float, float]:
    """(tensors that are not the folder's own, bit by bit, after a way into the ranks of a layout and out of them; the
    loss of the batch at step 0; and after `steps`, whose weights are written to `save`)."""
    import torch

    from megaaccum.pretrain.weights import config_json, foreign, weights_out
    from megaaccum.pretrain.weights.rows import rows_of
    from megaaccum.pretrain.weights.safetensors_folder import Weights

    plan = plan_of(folder, 4, *words_of(family, layout))
    engine = engine_of(plan)
    foreign.load(engine, folder, vocab_size=VOCAB)
    weights, wrong, seen = Weights(folder), [], set()
    for name, tensor in engine.whole_weights():
        rows = rows_of(family, name, tensor.shape[0], config_json.model_keys(plan.config, VOCAB))
        for theirs, made in weights_out.to_theirs(rows or [], tensor):
            seen.add(theirs)
            of_expert = slice(rows[0].expert, rows[0].expert + 1) if rows and rows[0].stacked else slice(0, None)
            there = weights.read(theirs, of_expert)
            if made.dtype != there.dtype or not torch.equal(made, there):
                wrong.append(theirs)
    wrong += sorted(weights.files.keys() - seen)
    microbatches = own_microbatches(engine)
    first, _ = engine.evaluate(microbatches)
    for _ in range(steps):
        engine.train_step(microbatches)
    last, _ = engine.evaluate(microbatches)
    if save is not None:
        engine.save(save)
    return wrong, first, last


def round_trips(
    cells: list[tuple[str, str, int]], folder: str
) -> dict[tuple[str, str], tuple[list[str], float, float]]:
    """`round_trip` of each (family, layout, steps); a text in place of the list if it raised one."""
    found = {}
    for family, layout, steps in cells:
        save = Path(folder) / f"{family}-{layout}" if steps else None
        found[family, layout] = round_trip(family, Path(folder) / family, layout, steps, save)
    return found


def export(family: str, run: Path, source: Path, folder: Path) -> Path:
    """Write the current checkpoint in `run` as a model of the family, with a config.json made of the configuration."""
    from megaaccum.checkpoint.folders import latest
    from megaaccum.pretrain.weights.config_json import family_for
    from megaaccum.pretrain.weights.weights_out import Export

    config = plan_of(source, 1).config
    current = latest(run)
    assert current is not None
    fitting = family_for(config, VOCAB)
    assert fitting == ("llama" if family == "mistral" else family)
    made = Export(checkpoint=current, config=config, vocab_size=VOCAB, family=fitting, dtype=_float32())
    made.write(folder)
    return folder


def _float32() -> torch.dtype:
    import torch

    return torch.float32
