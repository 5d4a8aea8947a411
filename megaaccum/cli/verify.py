"""`megaaccum verify`: proof that the accumulated step of a configuration is exactly the step on the full global batch.

    megaaccum verify CONFIG [--layout tp=2,pp=2] [--world-size N] [--shrink] [--steps N] [--key value ...]
    megaaccum verify --weights DIR [--run RUN]     (a Hugging Face folder; `megaaccum verify --weights --help`)

One process takes the full global batch in float64, without pipeline, sharding or accumulation; the ranks of the layout,
started on this machine, take the accumulated step. Both take the first samples of the data that CONFIG names, or random
tokens. Every number of both is compared: loss, weight, each parameter's gradient, norm, change of weights, moments,
loss scale, router biases. More than 8 ranks or a large model are made smaller, with every axis of the layout kept, and
the report says so. A step that differs is traced to the axis, the border of a stage, the parameter and the factor.

    --layout KEYS     other keys of the layout, as in pp=2,schedule=zbv (any key may also be given as --key value)
    --world-size N    ranks of the real layout; default: the fewest that tp, cp, pp and ep allow, twice for dp
    --shrink          make it smaller in any case; --whole never does
    --steps N         optimizer steps (default 2)
    --device gpu      on this machine's GPUs, one rank each, BF16 too: a run's layers (Transformer Engine's where it is
                      installed), kernels, streams and NCCL; --dry-run takes the same path without a GPU
    --json FILE       write the report as JSON
    --picture FILE    draw each parameter's error (.png)

Under a launcher (torchrun --nproc-per-node 4 -m megaaccum verify CONFIG) its ranks are those of the layout.

Exit codes: 0 it is the full batch's step, 1 it is not, 2 the configuration is refused, 3 it cannot be verified (the
reason is printed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megaaccum import config as configuration
from megaaccum.cli import verify_weights
from megaaccum.cli.arguments import fewest_ranks, pop_option, read_source
from megaaccum.config.load import given
from megaaccum.distributed import preload
from megaaccum.errors import ConfigError

if TYPE_CHECKING:
    from megaaccum.lab.verification.shrink import Shrunk


def main(argv: Sequence[str]) -> int:
    """Verify, and return the exit code. Raises MegaaccumError."""
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    if argv[0].partition("=")[0] == "--weights":
        return verify_weights.main(argv)
    from megaaccum.lab.verification import launched, report, user_model

    source = read_source(argv)
    words, options = _options(source.words)
    steps = int(options.get("--steps", 2))
    num_gpus = _num_gpus(options)
    with source.with_words(words).load() as loaded:
        shrunk = _case(loaded.checked(), loaded.world_size, options, steps)
    if num_gpus is not None:
        shrunk = replace(shrunk, case=replace(shrunk.case, device="gpu"))
        shrunk.notes.append(f"--device gpu: {f'on {num_gpus} GPUs' if num_gpus else 'a dry run, without a GPU'}")
        if launched.num_ranks() == 1 and shrunk.case.world_size > num_gpus > 0:
            raise ConfigError(
                f"the layout that is verified has {shrunk.case.world_size} ranks, but this machine has {num_gpus} GPUs,"
                f" one for each rank: set --world-size to {num_gpus} or less, or start its ranks by torchrun"
            )
    progress = user_model.to_stderr() if launched.is_first() else lambda text: None
    verdict = user_model.run(shrunk.case, steps, progress)
    if not launched.is_first():
        return verdict.exit_code
    verdict.notes = shrunk.notes + verdict.notes
    print(report.text(verdict))
    for name in ("--json", "--picture"):
        if name in options:
            report.write(verdict, Path(options[name]))
    return verdict.exit_code


_WITH_VALUE = ("--layout", "--world-size", "--steps", "--json", "--picture", "--device", "--local_rank")
_SWITCHES = ("--shrink", "--whole", "--dry-run")


def _options(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split into the configuration's words, with --layout as keys at the end, and the command's own options."""
    rest, options = list(argv), {}
    for name in _WITH_VALUE:
        rest, value = pop_option(rest, name)
        if value is not None:
            options[name] = value
    for name in _SWITCHES:
        if name in rest:
            rest.remove(name)
            options[name] = ""
    for pair in filter(None, options.get("--layout", "").split(",")):
        if "=" not in pair:
            raise ConfigError(f"--layout takes keys such as pp=2,schedule=zbv, but {pair!r} is none")
        name, value = pair.split("=", 1)
        rest += [f"--{name.strip()}", value.strip()]
    return rest, options


def _num_gpus(options: dict[str, str]) -> int | None:
    """GPUs of this machine that --device gpu asks for, 0 in a dry run; None without that option. Raises ConfigError if
    there are none."""
    device = options.get("--device", "cpu")
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"--device is cpu or gpu, not {device}")
    if device == "cpu":
        if "--dry-run" in options:
            raise ConfigError("--dry-run is of --device gpu: add that, or leave it out")
        return None
    if "--dry-run" in options:
        return 0
    preload.import_torch()
    import torch

    if not (count := torch.cuda.device_count()):
        raise ConfigError("--device gpu: torch finds no GPU here; add --dry-run to take the same path on the CPU")
    return count


def _case(config: configuration.Config, recorded: int | None, options: dict[str, str], steps: int) -> Shrunk:
    """The case of a configuration in its real layout, made smaller if it is too large."""
    from megaaccum.lab.planner import auto_schedule
    from megaaccum.lab.verification import shrink
    from megaaccum.lab.verification.launched import is_first, num_ranks
    from megaaccum.pretrain.metrics.param_count import count_parameters

    launched = num_ranks()
    world_size = int(options.get("--world-size", 0)) or recorded or (launched if launched > 1 else _world_size(config))
    plan = configuration.resolve(config, world_size=world_size)
    if auto_schedule.is_open(plan):
        plan = auto_schedule.choose_schedule(plan)
        assert plan.written is not None
        config = plan.written
    parameters = count_parameters(plan.config, plan.config.model.vocab_size or 1).total
    too_many = world_size > max(shrink.MOST_RANKS, launched)
    large = too_many or parameters > shrink.MOST_PARAMETERS
    if "--whole" in options and too_many:
        raise ConfigError(f"--whole: {world_size} ranks do not start on one machine: at most {shrink.MOST_RANKS}")
    smaller = "--shrink" in options or (large and "--whole" not in options)
    has_kernels = options.get("--device") == "gpu" and "--dry-run" not in options
    shrunk = shrink.as_case(config, plan, shrink=smaller, on_gpu=has_kernels)
    if not any(given(config, name) for name in ("data_path", "train_data_path", "mock_data")) or not is_first():
        return shrunk
    from megaaccum.lab.verification.first_samples import with_first_samples

    return with_first_samples(shrunk, plan, steps)


def _world_size(config: configuration.Config) -> int:
    """Twice the fewest ranks that the layout allows if the batch can be cut for them, else the fewest."""
    fewest = fewest_ranks(config)
    for world_size in (2 * fewest, fewest):
        try:
            configuration.resolve(config, world_size=world_size)
        except ConfigError:
            continue
        return world_size
    return fewest  # its errors are the ones to show
