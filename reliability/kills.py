"""Trainings that are killed, that run out of disk or are held up, one process and four ranks, with a save every step.

A trial is one training. It is killed a few times, by SIGKILL: before a random one of the collectives, calls of the
closure or changes of files, or from outside at any moment. Each time it is started again. Or its disk takes no more
than some bytes of a file; or a process is stopped for a while, in the middle of a save (a slow disk) or of a step (a
slow rank). Whenever it is down or stopped, its checkpoint is loaded: it must be the state of the undisturbed
training after the same steps, bit for bit, and no older than the last save that had returned. At the end, bits and
losses must be those of the undisturbed training.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from reliability.phases import STEP
from reliability.processes import Running, running
from reliability.training import Death, Method, Plan, built, digest, loaded, told, train

STEPS = 8
PHASES = (*STEP, "save")
#: Of one training.
KILLS = 5
#: Seconds for which a process is stopped.
STOPPED = 0.5
SAME = ("sha256 of θ", "sha256 of the state")


@dataclass(frozen=True)
class Case:
    """What is done to a training, and on how many ranks."""

    trouble: Literal["kill", "full disk", "slow disk", "slow rank"]
    ranks: int
    method: Method = "ksd"

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.trouble}, " + ("one process" if self.ranks == 1 else f"{self.ranks} ranks")


#: Trial n is of case n modulo their number.
CASES = (
    Case("kill", 1),
    Case("kill", 4),
    Case("kill", 4, "flow"),
    Case("full disk", 1),
    Case("kill", 1, "flow"),
    Case("slow disk", 4),
    Case("kill", 4),
    Case("full disk", 4),
    Case("kill", 1),
    Case("slow rank", 4),
    Case("slow disk", 1),
)


def run(count: int, seed: int, report: Callable[[dict[str, Any]], None], done: Container[int] = ()) -> None:
    """Trials of the seeds ``seed`` to ``seed + count - 1``, without those that are done."""
    for number in range(seed, seed + count):
        if number not in done:
            report(trial(CASES[number % len(CASES)], number))


def trial(case: Case, seed: int, kills: int = KILLS) -> dict[str, Any]:
    """One training under trouble, as a flat record."""
    began, randomly = time.perf_counter(), random.Random(seed)
    expected = undisturbed(case.ranks, case.method)
    root = tempfile.mkdtemp(prefix="reliability-kill-")
    plan = Plan(root, STEPS, method=case.method)
    plan = replace(plan, deaths=_deaths(case, kills, expected, randomly))
    training = _Training(plan, case, expected)
    training.to_its_end()
    if not training.wrong:
        shutil.rmtree(root)
    return {
        "kind": "kill",
        "case": case.name,
        "outcome": "ended at the same bits" if not training.wrong else "lost",
        "lost": bool(training.wrong),
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 2),
        "times": len(training.hit),
        "method": case.method,
        "where": [f"{phase} of step {iteration}" for phase, iteration in training.hit],
        **({"why": "; ".join(training.wrong), "directory": root} if training.wrong else {}),
    }


@functools.cache
def undisturbed(ranks: int, method: Method) -> dict[str, Any]:
    """Rank 0's results of a training that nothing happens to; the events of all, seconds and the size of its file."""
    with tempfile.TemporaryDirectory() as root:
        plan = Plan(root, STEPS, method=method)
        with running(ranks, plan.timeout, train, plan) as run:
            ended = run.ends()
        if any(end.code != 0 for end in ended):
            raise RuntimeError(f"an undisturbed training on {ranks} ranks ended with {[end.code for end in ended]}")
        starts = entries(plan, "starts")
        found: dict[str, Any] = ended[0].result
        found["events"] = [end.result["events"] for end in ended]
        return {**found, "seconds": time.monotonic() - starts[0]["time"], "bytes": plan.checkpoint.stat().st_size}


def entries(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut off is left out."""
    path = Path(plan.directory) / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _deaths(case: Case, kills: int, expected: dict[str, Any], randomly: random.Random) -> list[Death]:
    """One for each attempt, at later and later steps."""
    if case.trouble == "full disk":
        iteration = randomly.randrange(1, STEPS)
        return [Death("full", 0, iteration, event=randomly.choice([0, randomly.randrange(expected["bytes"])]))]
    deaths = []
    for i, iteration in enumerate(sorted(randomly.sample(range(STEPS - 1), kills))):
        rank = randomly.randrange(case.ranks)
        phase = "save" if case.trouble == "slow disk" or i % 2 else randomly.choice(PHASES)
        if case.trouble == "slow rank":
            phase = randomly.choice(STEP)
        event = randomly.randrange(expected["events"][rank][phase])
        if case.trouble in ("slow disk", "slow rank"):
            deaths.append(Death("stop", rank, iteration, phase, event))
        elif i % 3 == 2:
            deaths.append(Death("outside", rank, iteration, delay=randomly.uniform(0, 2 * expected["seconds"] / STEPS)))
        else:
            deaths.append(Death("kill", rank, iteration, phase, event))
    return deaths if case.trouble == "kill" else deaths[:1]


def _quietly(group: Any, plan: Plan, attempt: int) -> dict[str, Any]:
    """``train``, with its complaints in a file: most of them are what is wanted."""
    with open(Path(plan.directory) / "stderr", "ab") as file:
        os.dup2(file.fileno(), 2)
    return train(group, plan, attempt)


class _Training:
    """One training, its attempts and what is wrong with it.

    Attributes:
        hit: phase and iteration of each time that it was disturbed.
        wrong: what was promised and not kept.
    """

    def __init__(self, plan: Plan, case: Case, expected: dict[str, Any]) -> None:
        self._plan, self._case, self._expected = plan, case, expected
        self.hit: list[tuple[str, int]] = []
        self.wrong: list[str] = []

    def to_its_end(self) -> None:
        for attempt in range(len(self._plan.deaths) + 1):
            before = len(entries(self._plan, "deaths"))
            with running(self._case.ranks, self._plan.timeout, _quietly, self._plan, attempt) as run:
                self._trouble(run, attempt)
                ended = run.ends()
            for died in entries(self._plan, "deaths")[before:]:
                self.hit.append((died["phase"], died["iteration"]))
            self._compare_newest()
            if all(end.code == 0 for end in ended):
                self._compare_end(ended[0].result)
                return
            if before == len(entries(self._plan, "deaths")):
                self.wrong.append(f"attempt {attempt} ended with {[end.code for end in ended]}, and nothing was done")
                return
        self.wrong.append("the last attempt failed")

    def _trouble(self, run: Running, attempt: int) -> None:
        """What is done to an attempt from outside."""
        deaths = self._plan.deaths
        death = deaths[attempt] if attempt < len(deaths) else None
        if death is not None and death.how == "outside":
            while run.alive():
                at = told(self._plan.directory, death.rank)
                if len(at) == 5 and int(at[0]) == attempt and int(at[2]) >= death.iteration:
                    time.sleep(death.delay)
                    try:
                        os.kill(run.pids[death.rank], signal.SIGKILL)
                    except ProcessLookupError:  # it has come to its end
                        return
                    _, _, iteration, phase, event = told(self._plan.directory, death.rank)
                    entry = {"rank": death.rank, "iteration": int(iteration), "phase": phase, "event": int(event)}
                    with open(Path(self._plan.directory) / "deaths", "a") as file:
                        file.write(json.dumps(entry) + "\n")
                    return
                time.sleep(0.002)
        elif death is not None and death.how == "stop":
            while run.alive() and not entries(self._plan, "deaths"):
                time.sleep(0.005)
            time.sleep(STOPPED)
            self._compare_newest()
            os.kill(run.pids[death.rank], signal.SIGCONT)

    def _compare_newest(self) -> None:
        """The newest checkpoint must load, and be the state after some step that is no older than the last save."""
        model, optimizer = built(self._plan)
        try:
            steps = loaded(self._plan, model, optimizer)
        except Exception as error:
            self.wrong.append(f"the newest checkpoint does not load: {type(error).__name__}: {error}")
            return
        # A step begins when the save of the last one has returned: its loss is known a little later.
        saved = max((entry["iteration"] for entry in entries(self._plan, "losses")), default=0)
        if steps < saved:
            self.wrong.append(f"the newest checkpoint is of {steps} steps, and {saved} were saved")
        if digest(model, optimizer) != self._expected["digests"][steps]:
            self.wrong.append(f"the checkpoint after {steps} steps has other bits")
        if self._case.trouble == "full disk" and any(Path(self._plan.directory).glob(".*.tmp")):
            self.wrong.append("what could not be written was left on a disk that is full")

    def _compare_end(self, found: dict[str, Any]) -> None:
        self.wrong += [f"other {key} at the end" for key in SAME if found[key] != self._expected[key]]
        for entry in entries(self._plan, "losses"):
            loss = self._expected["losses"][entry["iteration"]]
            if entry["loss"] != loss:
                self.wrong.append(f"step {entry['iteration']}: the loss was {entry['loss']!r}, not {loss!r}")
