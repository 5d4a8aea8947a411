"""A tokenizer with a chat template, and conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """A byte-level tokenizer of `folder`, of 259 entries, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` lines of every form that is read, of different lengths."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return "".join(draw.choices("abcde ", k=draw.randint(1, most)))

    def turn(role: str, most: int = 8) -> dict[str, str]:
        return {"role": role, "content": words(most)}

    lines: list[dict[str, Any]] = []
    for number in range(count):
        kind = number % 4
        if kind == 0:
            lines.append({"messages": [turn("user"), turn("assistant")]})
        elif kind == 1:
            lines.append(
                {"messages": [turn("system"), turn("user"), turn("assistant"), turn("user"), turn("assistant")]}
            )
        elif kind == 2:
            lines.append({"prompt": words(9), "response": words(9)})
        else:
            lines.append({"prompt": [turn("user"), turn("assistant"), turn("user")], "completion": [turn("assistant")]})
    return lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
