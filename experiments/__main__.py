"""The studies: ``python -m experiments {run,tune,study,pack,table,figure,pca,pinn,deep,unseen} --help``.

Those without a name of their own are the paper's.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import tyro

from experiments.common.packed import pack
from experiments.deep.commands import Deep
from experiments.paper.commands import RESULTS, Figure, Pca, Run, Study, Table, Tune
from experiments.pinn.commands import Pinn
from experiments.unseen.commands import Unseen


@dataclasses.dataclass(frozen=True)
class Pack:
    """Put the runs of all studies in a folder, one file each, into the few files that git keeps; trains nothing."""

    results: Path = RESULTS

    def execute(self) -> None:
        """Write the packed files."""
        for path in pack(self.results):
            sys.stdout.write(f"{path}\n")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and do it; mistakes of the user end with their message alone."""
    command = Run | Tune | Study | Pack | Table | Figure | Pca | Pinn | Deep | Unseen
    options = tyro.cli(command, prog="python -m experiments", description=__doc__, args=arguments)
    try:
        options.execute()
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("KRYLOV_DESCENT_TRACEBACK"):
            raise
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
