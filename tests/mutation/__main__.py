"""Faults of one line, each in a copy of the source, and the tests that must notice: ``python -m tests.mutation``.

``faults.json`` has the table: a file, a part of one line that occurs once, what takes its place, why it is a fault, the
tests that must fail, and who chose it: a reader of the source who had not seen the tests, or its authors. Prints a line
for each fault; ends with 1 if any went unnoticed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_SECONDS = 300  # after which a fault counts as noticed: something hangs


class Fault(NamedTuple):
    """A row of the table."""

    file: str
    before: str
    after: str
    why: str
    tests: str
    chosen: str


FAULTS = [Fault(**row) for row in json.loads(Path(__file__).with_name("faults.json").read_text())]


def verdict(fault: Fault) -> tuple[str, float]:
    """What the tests say of a fault: "noticed", "unnoticed" or "broken", where no test ran; and how long it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "krylov_descent" / fault.file
        text = path.read_text()
        assert text.count(fault.before) == 1, f"{fault.file} has {fault.before!r} {text.count(fault.before)} times"
        path.write_text(text.replace(fault.before, fault.after))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly"]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [*command, *fault.tests.split()], cwd=ROOT, env=environment, capture_output=True, timeout=_SECONDS
            )
            said = {0: "unnoticed", 1: "noticed"}.get(done.returncode, "broken")
        except subprocess.TimeoutExpired:
            said = "noticed"
    return said, time.monotonic() - start


def main() -> int:
    """Try all faults, or those whose file or line contains a word."""
    parser = argparse.ArgumentParser(description="Faults of one line, and the tests that must notice.")
    parser.add_argument("word", nargs="?", default="", help="only faults whose file or line contains it")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.word in fault.file or given.word in fault.before]
    unnoticed = 0
    with ThreadPoolExecutor(given.processes) as pool:
        for fault, (said, seconds) in zip(chosen, pool.map(verdict, chosen), strict=True):
            unnoticed += said != "noticed"
            sys.stdout.write(f"{said:10}{seconds:6.0f} s  {fault.file}: {fault.before[:60]} → {fault.after[:60]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - unnoticed} of {len(chosen)} faults noticed\n")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
