"""Megatron's notation for the layers of each pipeline stage, read without Megatron.

`E` embedding, `t` transformer layer, `m` multi-token-prediction layer, `L` head and loss; `|` ends a stage; `x*n` and
`(...)*n` repeat; commas are ornament: `Et*3|(tt|)*29,mL`. Stages are listed chunk by chunk: with pp ranks, stage s is
chunk s // pp of rank s % pp (megatron.core.transformer.pipeline_parallel_layer_layout).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_REPEATED_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_REPEATED_LAYER = re.compile(r"([EtmL|])\*(\d+)")
_LONGEST = 100_000


def parse_layout(layout: str) -> list[str]:
    """The layers of each stage as a string of `E`, `t`, `m` and `L`, in model order.

    Raises:
        ValueError: the text is not in the notation; its message says where.
    """
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (_REPEATED_GROUP, _REPEATED_LAYER):
        length = len(text) + sum(len(m[1]) * int(m[2]) for m in pattern.finditer(text))
        if length > _LONGEST:
            raise ValueError(f"it describes more than {_LONGEST} layers")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    if stray := re.search(r"[^EtmL|]", text):
        raise ValueError(f"{stray[0]!r} is none of E, t, m, L, |, and (...)*n must have no group inside")
    return text.split("|")


def layout_problems(stages: list[str], *, num_layers: int, mtp_num_layers: int, pp: int) -> Iterator[str]:
    """The reasons why Megatron-core would refuse the stages of a layout."""
    text = "".join(stages)
    if len(stages) % pp:
        yield (f"it has {len(stages)} stages, which is not divisible by pipeline_model_parallel_size {pp}")
    if text[:1] != "E" or text.count("E") != 1:
        yield "E (the embedding) must come first, and once"
    if text[-1:] != "L" or text.count("L") != 1:
        yield "L (head and loss) must come last, and once"
    if text.count("t") != num_layers:
        yield f"it has {text.count('t')} layers t, but num_layers is {num_layers}"
    if text.count("m") != mtp_num_layers:
        yield f"it has {text.count('m')} layers m, but mtp_num_layers is {mtp_num_layers}"
    elif "m" in text:
        yield from _mtp_problems(stages)


def _mtp_problems(stages: list[str]) -> Iterator[str]:
    """Only on the last stage does Megatron-core 0.19 share the embedding with prediction layers: on another rank their
    copy of it stays zero, and on the first one a collective of two ranks is called on one."""
    text, holders = "".join(stages), [i for i, stage in enumerate(stages) if "m" in stage]
    if "t" in text[text.index("m") :]:
        yield "every t must come before the first m"
    if len(holders) > 1:
        yield f"all m must be in one stage, not in {len(holders)}"
    elif holders[0] < len(stages) - 1:
        yield "m must be in the last stage, where prediction layers share the embedding: move it there (...mL)"
