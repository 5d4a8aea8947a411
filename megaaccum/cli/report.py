"""`megaaccum report`: write one HTML page of a run of `megaaccum train`: losses, norms, memory, bytes, seconds,
goodput, the schedule, and the plan against what was measured. Of two runs, both beside each other, with the keys that
differ. The page holds all that it shows: it loads nothing and can be sent as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megaaccum.cli.arguments import command_parser
from megaaccum.errors import MegaaccumError
from megaaccum.texts import replace_text


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum report` with these arguments; returns the exit code. Raises MegaaccumError if a folder is no
    run's, or the page cannot be written."""
    args = _parse(argv)
    from megaaccum.pretrain.metrics.report import page
    from megaaccum.pretrain.metrics.report.run import Run

    try:
        runs = [Run.read(folder) for folder in filter(None, (args.run, args.other))]
        text = page.render_run(runs[0]) if len(runs) == 1 else page.render_comparison(*runs)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise MegaaccumError(
            f"the receipts or log.jsonl of {args.run} hold what no run writes ({type(error).__name__}: {error})"
        ) from error
    output = args.output or args.run / ("report.html" if len(runs) == 1 else f"report_with_{args.other.name}.html")
    try:
        replace_text(output, text)
    except OSError as error:
        raise MegaaccumError(f"{output} cannot be written: {error.strerror or error}; give --output") from None
    for log in [run.folder / "log.jsonl" for run in runs if not run.train]:
        print(f"no step was recorded in {log}: the page has the plan, starts and keys of that run alone")
    print(f"wrote {output}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("report", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument("other", type=Path, nargs="?", metavar="RUN2", help="another, to compare it with")
    parser.add_argument("--output", type=Path, metavar="F", help="the page (default: RUN/report.html)")
    return parser.parse_args(list(argv))
