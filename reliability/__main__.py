"""Try to break every method by every fault, and count: ``python -m reliability [matrix|pack|table|figure]``.

Every trial is a line in results/reliability/matrix.jsonl; the same command again goes on after a cut, and passes over
the trials that are there. ``--only Ctrl-C --only "rank loss"`` tries some faults, ``--share 0.1`` a tenth of their
trials, ``--lost`` those again that were lost. ``pack`` makes one line of trials that ended alike, which is what git
keeps. Ends with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reliability import pool
from reliability.figures import figure
from reliability.matrix import FAULTS, cells
from reliability.records import appending, key, pack, read
from reliability.tables import table

RESULTS = Path("results/reliability/matrix.jsonl")
MARKS = ("<!-- table -->", "<!-- /table -->")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and do it; 1 if a trial was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="matrix", choices=["matrix", "pack", "table", "figure"])
    parser.add_argument("--only", action="append", choices=[*FAULTS], metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the trials of each cell (%(default)s)")
    parser.add_argument("--lost", action="store_true", help="try again what was lost")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials at a time (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where trials are recorded (%(default)s)")
    parser.add_argument("--into", type=Path, help=f"table: put it into this file, between {' and '.join(MARKS)}")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="figure: where to (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    given = parser.parse_args(arguments)
    try:
        return _do(given)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"{error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted; the same command goes on with the trials that are missing.") from None


def _do(given: argparse.Namespace) -> int:
    if given.command == "pack":
        pack(given.results)
    elif given.command == "table" and given.into is None:
        sys.stdout.write(table(given.results))
    elif given.command == "table":
        from experiments.common.markdown import put

        put(table(given.results), given.into, MARKS)
    elif given.command == "figure":
        for path in figure(given.results, given.out):
            sys.stdout.write(f"{path}\n")
    else:
        return _try(given)
    return 0


def _try(given: argparse.Namespace) -> int:
    """All trials that are not recorded yet; 1 if any is lost, recorded ones included."""
    from tqdm import tqdm

    if not 0 < given.share <= 1:
        raise ValueError(f"--share {given.share}: must be above 0, and at most 1.")
    wanted = list(cells(given.only or [*FAULTS], given.share))
    before = {key(record): record for record in read(given.results)}
    done = [cell for cell in wanted if cell in before and not (given.lost and before[cell]["lost"])]
    lost = sum(before[cell]["lost"] for cell in done)
    with appending(given.results) as append, tqdm(total=len(wanted), initial=len(done), disable=given.quiet) as bar:

        def report(record: dict[str, Any]) -> None:
            nonlocal lost
            append(record)
            lost += record["lost"]
            if record["lost"]:
                bar.write(f"LOST: {record['fault']}, {record['method']}, seed {record['seed']}: {record['why'][:300]}")
            bar.set_description(record["fault"], refresh=False)
            bar.set_postfix(lost=lost, refresh=False)
            bar.update()

        passed = set(done)
        pool.run((cell for cell in wanted if cell not in passed), report, max(1, given.jobs or 1))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
