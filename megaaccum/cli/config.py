"""`megaaccum config`: write the keys of a Hugging Face model's config.json as YAML: the model, its weights to begin
from, its tokenizer. What has no key is refused by name. Add batch, layout, learning rate, length and data for a run, in
the file or on the command line:

  megaaccum config --from-hf DIR > model.yaml
  megaaccum train model.yaml --data_path DATA --global_batch_size 64 --lr 1e-5 --train_iters 1000
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from megaaccum.cli.arguments import command_parser
from megaaccum.pretrain.weights import config_json

_LENGTH = 4096
"""The sequence length that is written for a model that takes more."""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum config` with these arguments; returns the exit code. Raises ConfigError for a model that has no
    configuration here."""
    parser = command_parser("config", __doc__)
    parser.add_argument("--from-hf", type=Path, required=True, metavar="DIR", help="a folder with a config.json")
    print(as_yaml(parser.parse_args(list(argv)).from_hf), end="")
    return 0


def as_yaml(folder: Path) -> str:
    """The configuration of the model in `folder`. Raises ConfigError."""
    content = config_json.read_json(folder)
    keys = {name: value for name, value in config_json.keys_from(content).items() if value is not None}
    longest = keys["max_position_embeddings"]
    sections = {
        # Rows of padding would be part of the softmax, and a run would not begin with the model's own loss.
        "model": keys | {"seq_length": min(longest, _LENGTH), "make_vocab_size_divisible_by": 1},
        "run": {"init_from": str(folder)},
    }
    if (folder / "tokenizer.json").is_file():
        sections["data"] = {"tokenizer_model": str(folder / "tokenizer.json")}
    head = f"# The {content['model_type']} model in {folder}. seq_length is up to you: at most {longest}.\n"
    if (window := content.get("sliding_window") or 0) >= longest:
        head += f"# sliding_window {window} is left out: it masks nothing in rows of up to {longest} tokens.\n"
    return head + yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=118)
