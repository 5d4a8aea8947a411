"""Pipeline stages of a Hugging Face causal language model of Llama's structure.

Its modules and configuration have no types here: `Any`.
"""

from __future__ import annotations

import copy
import os
from typing import Any, cast

import torch

from megaaccum.config import Plan
from megaaccum.errors import raise_problems

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose forward is embedding, layers, norm and head, with nothing between them that a cut would repeat."""


def hf_stages(model: Any, plan: Plan, rank: int | None = None) -> list[torch.nn.Module]:
    """The chunks of `model` that a rank holds, for `initialize`; layers are cut evenly and shared with `model`.

    Args:
        model: a `LlamaForCausalLM`, or one of Mistral, Qwen2 or Qwen3, with the same weights on every rank. Its
            parameters are those of the chunks: drop it to free the layers of other stages.
        plan: its layout says which stages the rank holds.
        rank: global rank; default: the launcher's RANK, else 0.

    A chunk is called as the model is, with `input_ids`, `attention_mask` and `position_ids`, and returns logits on the
    last stage. Names of parameters are the model's. Raises ConfigError for another model, for tied embeddings, and for
    fewer layers than stages.
    """
    config, stages = model.config, plan.layout.num_stages
    is_tied = config.tie_word_embeddings and stages > 1
    refused = {
        f"model_type {config.model_type}, only {', '.join(LLAMA_LIKE)}": config.model_type not in LLAMA_LIKE,
        "tie_word_embeddings over several stages: give the head a copy of the weight and set it to False": is_tied,
        f"{config.num_hidden_layers} layers on {stages} stages (pp * vpp)": config.num_hidden_layers < stages,
    }
    raise_problems([f"hf_stages does not support {what}" for what, is_so in refused.items() if is_so])
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    return [HfStage(model, stage, stages) for stage in plan.layout.stages(rank)]


class HfStage(torch.nn.Module):
    """One stage: a model of the same class with some of its layers, so that masks and rotations are the library's."""

    def __init__(self, model: Any, stage: int, stages: int):
        super().__init__()
        whole, layers = model.model, len(model.model.layers)
        mine = range(stage * layers // stages, (stage + 1) * layers // stages)
        self.pre_process, self.post_process = stage == 0, stage == stages - 1
        config = copy.deepcopy(whole.config)
        config.num_hidden_layers = len(mine)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[number] for number in mine]
        with torch.device("meta"):
            part: Any = type(whole)(config)
        part.train(whole.training)
        part.embed_tokens = whole.embed_tokens if self.pre_process else None
        part.layers = torch.nn.ModuleList(whole.layers[number] for number in mine)
        part.norm = whole.norm if self.post_process else torch.nn.Identity()
        part.rotary_emb = whole.rotary_emb
        for number, layer in zip(mine, part.layers, strict=True):
            layer.layer_number = number + 1
        self.model = part
        self.lm_head = model.lm_head if self.post_process else None
        self._received: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        """Receive what the stage before sent, [sequence, micro-batch, hidden]."""
        self._received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Hidden states [sequence, micro-batch, hidden], or logits on the last stage."""
        given: dict[str, Any] = {"input_ids": input_ids}
        if not self.pre_process:
            assert self._received is not None
            given = {"inputs_embeds": self._received.transpose(0, 1)}
        hidden: torch.Tensor = self.model(**given, **arguments, use_cache=False).last_hidden_state
        if self.lm_head is None:
            return hidden.transpose(0, 1).contiguous()
        return cast("torch.Tensor", self.lm_head(hidden))
