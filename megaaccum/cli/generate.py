"""`megaaccum generate`: continue prompts, greedily unless --temperature is given: to look at what was trained, not to
serve it. A token is one forward of the whole text. RUN is the output_dir of a run, whose layout is kept, and DIR a
Hugging Face folder; keys of the configuration change layout and precision, as in --tensor_model_parallel_size 2. It
starts the ranks of this machine itself, or is one of those that torchrun starts.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megaaccum.cli.arguments import command_parser, fewest_ranks, refuse_idle
from megaaccum.config.source import flag_groups
from megaaccum.distributed import preload
from megaaccum.errors import ConfigError
from megaaccum.pretrain.launch import local

_USAGE = "megaaccum generate RUN|DIR --prompt TEXT [--prompt TEXT ...] [options] [--key value ...]"


def main(argv: Sequence[str]) -> int:
    """Generate, on this rank or on ranks that this process starts. Returns an exit code; raises MegaaccumError."""
    args, words = _parse(argv)
    preload.libraries()  # the CPU lane's stand-ins have to be there before Megatron is imported
    from megaaccum.pretrain.training.generate import Generation, generate
    from megaaccum.pretrain.training.sampling import Draw

    wanted = Generation(args.source, args.prompt, args.max_new_tokens, words, args.checkpoint, args.chat)
    if "RANK" not in os.environ:
        nproc = wanted.config.run.nproc_per_node or fewest_ranks(wanted.config)
        return local.launch_local(list(argv), nproc=nproc, worker="megaaccum.cli.generate:main")
    for prompt, text in generate(wanted, Draw(args.temperature, args.top_k, args.top_p), int(os.environ["WORLD_SIZE"])):
        if os.environ["RANK"] == "0":
            print(f"{prompt}{os.linesep if args.chat else ''}{text}", flush=True)
    return 0


def utf_8(word: str) -> str:
    """A word of the command line. Raises ValueError, which argparse tells with the option's name, for other bytes."""
    return word.encode().decode()


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = command_parser("generate", __doc__, _USAGE)
    parser.add_argument("source", type=Path, metavar="RUN|DIR", help="output_dir of a run, or a Hugging Face folder")
    parser.add_argument("--prompt", action="append", type=utf_8, required=True, metavar="TEXT", help="may be repeated")
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message, by the chat template")
    parser.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help="at most (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, metavar="N", help="draw among the N likeliest tokens")
    parser.add_argument("--top_p", type=float, default=1.0, metavar="P", help="draw among those of this probability")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="of a run (default: the current one)")
    args, words = parser.parse_known_args(list(argv))
    if args.max_new_tokens < 1 or not 0 <= args.temperature < float("inf") or args.top_k < 0 or not 0 < args.top_p <= 1:
        raise ConfigError("max_new_tokens must be at least 1, temperature and top_k at least 0, top_p in (0, 1]")
    keys = {flag.lstrip("-").replace("-", "_"): True for flag, _ in flag_groups(words)[0]}
    rules = {"--top_k": "--temperature", "--top_p": "--temperature", "--world_size": "not --nproc_per_node"}
    refuse_idle(parser, argparse.Namespace(**vars(args) | keys), rules)
    return args, words
