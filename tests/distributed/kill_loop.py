"""Kills ranks of a training at random, and compares: ``python -m tests.distributed.kill_loop --kills 20``.

Four ranks train a small network under ``torchrun --max-restarts`` and save after every step. Ranks are killed by
SIGKILL: most of them in a phase that is chosen (the pass over A, the basis, the search, the save), before a random one
of the collectives, calls of the closure or changes of files in it; every fifth from outside, at any moment. Each
training must end with the same bits as one that was left alone, and have seen the same losses on its way. Then, a
checkpoint of four ranks goes on with two and with three. Prints a table; ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reliability.phases import STEP
from reliability.processes import running
from reliability.training import Death, Plan, told, train

ROOT = Path(__file__).parents[2]
R = 4
STEPS = 12
PHASES = (*STEP, "save")
SAME = ("sha256 of θ", "sha256 of the state")


def left_alone(plan: Plan, ranks: int) -> list[dict[str, Any]]:
    """The results of all ranks of a training, without torchrun."""
    Path(plan.directory).mkdir(parents=True, exist_ok=True)
    with running(ranks, plan.timeout, train, plan) as run:
        ended = run.ends()
    if any(end.code != 0 for end in ended):
        raise RuntimeError(f"a training on {ranks} ranks ended with {[end.code for end in ended]}")
    return [end.result for end in ended]


def torchrun(plan: Plan, ranks: int, restarts: int) -> tuple[int, str]:
    """Train under torchrun, and kill from outside what the plan says; its exit code and its errors."""
    Path(plan.directory).mkdir(parents=True)
    command = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    worker = ["-m", "reliability.training", str(plan.write())]
    with open(Path(plan.directory) / "stderr", "w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command, *worker],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            _watch(process, plan)
        finally:
            process.terminate()  # it ends its ranks
            process.wait()
        errors.seek(0)
        return process.returncode, errors.read()


def _watch(process: subprocess.Popen[bytes], plan: Plan) -> None:
    waiting = {i: death for i, death in enumerate(plan.deaths) if death.how == "outside"}
    until = time.monotonic() + 60 + 60 * (1 + len(plan.deaths))
    while process.poll() is None and time.monotonic() < until:
        for i, death in [*waiting.items()]:
            at = told(plan.directory, death.rank)
            if len(at) == 5 and int(at[0]) == i and int(at[2]) >= death.iteration:
                time.sleep(death.delay)
                os.kill(int(at[1]), signal.SIGKILL)
                now = time.monotonic()
                _, _, iteration, phase, event = told(plan.directory, death.rank)
                entry = {"rank": death.rank, "iteration": int(iteration), "phase": phase, "event": int(event)}
                with open(Path(plan.directory) / "deaths", "a") as file:
                    file.write(json.dumps({**entry, "time": now}) + "\n")
                del waiting[i]
        time.sleep(0.002 if waiting else 0.05)


def entries(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The lines of a log."""
    path = Path(plan.directory) / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compare(plan: Plan, code: int, errors: str, expected: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with a training that was killed and went on."""
    deaths, starts = entries(plan, "deaths"), entries(plan, "starts")
    if code != 0:
        return [f"torchrun ended with {code}: {errors[-2000:]}"]
    wrong = []
    if len(starts) != len(deaths) + 1:
        wrong.append(f"{len(deaths)} deaths and {len(starts)} starts")
    for rank, result in enumerate(expected):
        found = json.loads((Path(plan.directory) / f"end-{rank}.json").read_text())
        wrong += [f"rank {rank}: other {key}" for key in SAME if found[key] != result[key]]
    for entry in entries(plan, "losses"):
        loss = expected[0]["losses"][entry["iteration"]]
        if entry["loss"] != loss:
            wrong.append(f"iteration {entry['iteration']}: the loss was {entry['loss']!r}, not {loss!r}")
    return wrong


def some_deaths(count: int, done: int, expected: Sequence[dict[str, Any]], randomly: random.Random) -> list[Death]:
    """Deaths for one training: phases in turn, every fifth death from outside."""
    deaths = []
    for i, iteration in enumerate(sorted(randomly.sample(range(STEPS - 2), count))):
        rank = randomly.randrange(R)
        if (done + i) % 5 == 4:
            deaths.append(Death("outside", rank, iteration, delay=randomly.uniform(0, 0.1)))
        else:
            phase = PHASES[((done + i) - (done + i) // 5) % len(PHASES)]
            event = randomly.randrange(expected[rank]["events"][phase])
            deaths.append(Death("kill", rank, iteration, phase, event))
    return deaths


def continue_elsewhere(root: Path, expected: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """One step from a checkpoint of four ranks, on four, two and three: the same bits, and the same to 1e-10."""
    half = Plan(str(root / "half"), STEPS // 2)
    left_alone(half, R)
    same: dict[str, Any] = {}
    for ranks in (R, 2, 3):
        plan = Plan(str(root / f"half-{ranks}"), STEPS // 2 + 1)
        shutil.copytree(half.directory, plan.directory)
        result = left_alone(plan, ranks)[0]
        same = same or result
        (loss,) = result["losses"].values()
        apart = abs(loss / expected[0]["losses"][STEPS // 2] - 1)
        theta = max(abs(a - b) for a, b in zip(result["theta"], same["theta"], strict=True))
        allowed = 0.0 if ranks == R else 1e-10
        wrong = [] if apart <= allowed and theta <= allowed else ["too far apart"]
        yield f"{R} → {ranks} ranks: loss {apart:.0e} apart, θ after a step {theta:.0e}", wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, compare, print; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=5, help="kills in one training, at most 10 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    randomly = random.Random(given.seed)
    root = Path(tempfile.mkdtemp(prefix="kill-loop-"))
    began = time.monotonic()
    expected = left_alone(Plan(str(root / "alone"), STEPS), R)
    _say(f"left alone: {STEPS} steps, {expected[0]['undone']} undone, θ {expected[0]['sha256 of θ'][:16]}")
    _say(f"{'run':>4}{'rank':>5}{'iteration':>10}  {'phase':<9}{'event':>6}  {'by':<8}{'went on at':>11}{'after s':>9}")
    hit: Counter[str] = Counter()
    failures, run = [], 0
    while hit.total() < given.kills and run < 2 * given.kills:
        count = min(given.per_run, given.kills - hit.total())
        deaths = some_deaths(count, hit.total(), expected, randomly)
        plan = Plan(str(root / f"run-{run}"), STEPS, deaths=deaths)
        wrong = compare(plan, *torchrun(plan, R, count + 1), expected)
        starts = entries(plan, "starts")
        for i, (died, start) in enumerate(zip(entries(plan, "deaths"), starts[1:], strict=False)):
            hit[died["phase"]] += 1
            _say(
                f"{run:>4}{died['rank']:>5}{died['iteration']:>10}  {died['phase']:<9}{died['event']:>6}  "
                f"{'outside' if deaths[i].how == 'outside' else 'itself':<8}{start['iteration']:>11}"
                f"{start['time'] - died['time']:>9.1f}"
            )
        _say(f"{run:>4}  ended {'as if left alone, bit for bit' if not wrong else '; '.join(wrong)}")
        failures += wrong
        run += 1
    for text, wrong in continue_elsewhere(root, expected):
        _say(f"{text}: {'; '.join(wrong) or 'fine'}")
        failures += wrong
    missing = [phase for phase in PHASES if given.kills >= 2 * len(PHASES) and not hit[phase]]
    failures += [f"no kill during {phase}" for phase in missing]
    phases = ", ".join(f"{n} {phase}" for phase, n in sorted(hit.items()))
    _say(f"{hit.total()} kills ({phases}) in {run} runs, {time.monotonic() - began:.0f} s")
    _say("FAILED: " + "; ".join(failures) if failures else "all fine")
    if not failures:
        shutil.rmtree(root)
    return int(bool(failures))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
