"""The command line. It imports nothing heavy until a subcommand needs it."""

from __future__ import annotations

import importlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import megaaccum
from megaaccum.errors import ConfigError, LaunchError, MegaaccumError, as_users_error, exit_code_of
from megaaccum.platform.replacing import without_collections

COMMANDS = {
    "train": "train the model of a config; starts the ranks of this machine itself",
    "check": "resolve a config and print its plan, or every error in it at once",
    "keys": "list the keys of a config, or say what one of them means",
    "verify": "prove that the accumulated step of a config equals the full batch's",
    "convert": "write Megatron's flags or a recorded script as a YAML file",
    "config": "write a Hugging Face model's config.json as a configuration",
    "export": "write a run's weights as a Hugging Face model",
    "generate": "continue prompts with a run's weights, or a Hugging Face model's",
    "schedule": "price, compare and draw pipeline schedules",
    "plan": "rank the layouts of a config on a number of GPUs by memory and time",
    "tune": "run the planner's best layouts for some steps, and take the fastest",
    "calibrate": "measure this machine, or a model's layers, for the planner",
    "report": "write an HTML page of a run, or of two beside each other",
    "data build": "make an indexed dataset from text or JSONL",
    "doctor": "say what is installed, what is missing, and what to do about it",
}
"""A line of help for each command; `module_of` names the module whose `main(argv)` it is."""

_EXAMPLES = """\
examples:
  megaaccum check configs/tiny_cpu.yaml --world-size 4
  megaaccum train configs/tiny_cpu.yaml --train_iters 50

`megaaccum COMMAND --help` lists the options of a command."""


def module_of(command: str) -> str:
    """The module of a command."""
    return "megaaccum.pretrain.data.build" if command == "data build" else f"megaaccum.cli.{command}"


def usage() -> str:
    """The text of `megaaccum --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command:<{width}}  {text}" for command, text in COMMANDS.items()]
    head = "usage: megaaccum COMMAND [ARGUMENTS]\n       megaaccum --version"
    return "\n".join([head, "", (megaaccum.__doc__ or "").splitlines()[0], "", "commands:", *lines, "", _EXAMPLES])


def find(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The command that `argv` names, and its arguments. Raises ConfigError when there is none such."""
    for length in (1, 2):
        if (name := " ".join(argv[:length])) in COMMANDS:
            return name, list(argv[length:])
    from difflib import get_close_matches

    begun = [name for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    near = begun or get_close_matches(argv[0], COMMANDS, n=1)
    hint = f"did you mean `megaaccum {near[0]}`?" if near else f"the commands are {', '.join(COMMANDS)}"
    raise ConfigError(f"there is no command {' '.join(argv[: 2 if begun else 1])!r}; {hint}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command of `argv` (default: this process' arguments) and returns its exit code.

    An error meant for the user is printed to stderr as one message without a traceback: exit code 2 for a ConfigError
    or a file that the system refuses, or an unknown command, 1 for the other classes of megaaccum.errors, 130 for
    Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except (MegaaccumError, KeyboardInterrupt) as error:
        return complain(error, exit_code_of(error))
    except BrokenPipeError:
        return _unread()
    except ImportError as error:
        return complain(_other_megatron(error), 1)
    except OSError as error:  # a file that the user named; of a run the place in the code counts
        is_run = argv[:1] == ["train"] and argv[1:2] not in ([], ["-h"], ["--help"])
        if (shown := as_users_error(error)) is error or is_run:
            raise
        return complain(shown, exit_code_of(shown))


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"megaaccum {megaaccum.__version__}")
        return 0
    command, arguments = find(argv)
    return _prepared(command).main(arguments) or 0


def _prepared(command: str) -> ModuleType:
    """A command's module, with this process prepared for it."""
    with without_collections():
        from megaaccum.config import slurm
        from megaaccum.platform import quiet

        quiet.install()  # whatever the command imports
        slurm.adopt()  # a task of srun then looks like a rank of torchrun to every command
        return importlib.import_module(module_of(command))


def _other_megatron(error: ImportError) -> LaunchError:
    """The error to show if a Megatron-core of another version is found before the installed one: of a checkout of
    Megatron-LM, whose own programs have it on PYTHONPATH. Raises any other `error` again."""
    from importlib.metadata import distribution

    own = distribution("megatron-core")
    found = [place for each in sys.path if (place := Path(each, "megatron/core/package_info.py")).is_file()]
    text = found[0].read_text(encoding="utf-8") if found else ""
    theirs = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))
    if own.version.startswith(theirs):
        raise error
    return LaunchError(
        f"Megatron-core {theirs} in {found[0].parent} is imported in place of the installed and tested {own.version} in"
        f" {own.locate_file('megatron/core')}, and fails: take {found[0].parents[2]} out of PYTHONPATH; if it is the"
        f" current folder, start `megaaccum` in place of `python -m megaaccum` ({error})"
    )


def _unread() -> int:
    """The exit code if the reader of stdout has gone, as `| head` does; any other broken pipe is raised again."""
    stdout, poll = 1, select.poll()
    poll.register(stdout, 0)  # an error is reported whatever is asked for
    if not poll.poll(0):
        raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # for the interpreter's own flush at its end
    return 128 + signal.SIGPIPE


GRACE_SECONDS = 10.0
"""Before a rank that says nothing ends: torchrun and deepspeed end all ranks with the first one, and who speaks may be
late."""
_OF_LAUNCHERS = {"TORCHELASTIC_USE_AGENT_STORE", "SLURM_PROCID"}
"""Variables of launchers that start all ranks of a host with the same files and command line."""


def complain(error: BaseException, code: int) -> int:
    """Prints the error as the user reads it, and returns `code`.

    Under torchrun or the deepspeed launcher each rank prints its own, with its number; what ranks have in common, one
    of them prints. A rank that was started by hand prints it too, unless it has been ended meanwhile: its files and its
    command line may be others.
    """
    rank = os.environ.get("RANK")
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
    speaker = {"rank 0": "RANK", "one rank per host": "LOCAL_RANK"}.get(getattr(error, "printed_by", ""))
    if speaker is not None:
        if os.environ.get(speaker, "0") == "0":
            rank = None
        else:
            time.sleep(GRACE_SECONDS)
            if speaker == "RANK" or _OF_LAUNCHERS & os.environ.keys():
                return code
    print(f"megaaccum: {f'rank {rank}: ' if rank else ''}{text}", file=sys.stderr)
    return code
