"""Try to break KSD, and count: ``python -m reliability [problems|checkpoints|kills|soak|all|pack|table|figure]``.

Without ``--count``, as many trials as docs/reliability.md has. Every trial is a line in results/reliability; the same
command again goes on after a cut, and passes over the trials that are there. ``pack`` makes one line of trials that
ended alike, which is what git keeps. Ends with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reliability.figures import figure
from reliability.records import appending, pack, read
from reliability.tables import table

RESULTS = Path("results/reliability")
MARKS = ("<!-- table -->", "<!-- /table -->")
#: Kinds of trouble: the module with ``run``, and the trials of the whole suite.
KINDS = {
    "problems": ("reliability.problems", 5500),
    "checkpoints": ("reliability.corruption", 760),
    "kills": ("reliability.kills", 91),
    "soak": ("reliability.soak", 4),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and do it; 1 if a trial was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m reliability", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="all", choices=[*KINDS, "all", "pack", "table", "figure"])
    parser.add_argument("--count", type=int, help="trials of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; those after it have the next ones")
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
        for path in sorted(given.results.glob("*.jsonl")):
            pack(path)
        return 0
    if given.command == "table":
        text = table(given.results)
        if given.into is None:
            sys.stdout.write(text)
        else:
            from experiments.common.markdown import put

            put(text, given.into, MARKS)
        return 0
    if given.command == "figure":
        for path in figure(given.results, given.out):
            sys.stdout.write(f"{path}\n")
        return 0
    if given.count is not None and given.count < 1:
        raise ValueError(f"--count {given.count}: must be at least 1.")
    lost = 0
    for kind in KINDS if given.command == "all" else (given.command,):
        module, whole = KINDS[kind]
        lost += _try(kind, module, whole if given.count is None else given.count, given)
    return int(lost > 0)


def _try(kind: str, module: str, count: int, given: argparse.Namespace) -> int:
    """All trials of a kind that are not recorded yet; how many are lost, recorded ones included."""
    from tqdm import tqdm

    path = given.results / f"{kind}.jsonl"
    wanted = range(given.seed, given.seed + count)
    before = [record for record in read(path) if record["seed"] in wanted]
    lost = sum(int(record["lost"]) for record in before)
    with appending(path) as append, tqdm(total=count, initial=len(before), desc=kind, disable=given.quiet) as bar:

        def report(record: dict[str, Any]) -> None:
            nonlocal lost
            append(record)
            lost += record["lost"]
            if record["lost"]:
                bar.write(f"LOST: {kind}, seed {record['seed']}, {record['case']}: {record.get('why', '')}")
            bar.set_postfix(lost=lost, refresh=False)
            bar.update()

        importlib.import_module(module).run(count, given.seed, report, {record["seed"] for record in before})
    return lost


if __name__ == "__main__":
    sys.exit(main())
