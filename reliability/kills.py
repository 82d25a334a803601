"""Trainings that are killed or held up, in one process and on three ranks, with a save at every step.

A trial is one training. It is killed a few times, by SIGKILL: before a random one of the collectives, calls of the
closure or changes of files, or from outside at any moment. Each time it is started again. Or a process is stopped for
a while. Ranks that survive another one must say so in time, with everything as before their step. Whenever it is down
or stopped, its checkpoint is loaded: it must be the state of the undisturbed training after the same steps, bit for
bit, and no older than the last save that had returned. At the end, bits and losses must be those of the undisturbed
training.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from reliability.methods import digest
from reliability.outcome import Outcome
from reliability.phases import STEP
from reliability.processes import Running, running
from reliability.training import Death, Plan, built, loaded, log, told, train

STEPS = 5
PHASES = (*STEP, "save")
RANKS = 3
#: Seconds for which a process is stopped.
STOPPED = 0.5
#: Seconds after which ranks that survive another one must have said so.
BOUND = 15.0
SAME = ("sha256 of θ", "sha256 of the state")


def sigkill(method: str, seed: int, times: int = 4) -> Outcome:
    """A training of one process is killed and goes on from its checkpoint."""
    return _trial(method, seed, 1, "kill", times)


def rank_loss(method: str, seed: int, times: int = 3) -> Outcome:
    """One of three ranks is killed; the others raise, restored, and the training goes on from its checkpoint."""
    return _trial(method, seed, RANKS, "kill", times)


def held_up(method: str, seed: int) -> Outcome:
    """A process is stopped for half a second, in a step or a save; every other trial is of three ranks."""
    return _trial(method, seed, RANKS if seed % 2 else 1, "stop", 1)


def _trial(method: str, seed: int, ranks: int, how: str, times: int) -> Outcome:
    randomly, expected = random.Random(seed), undisturbed(ranks, method)
    root = tempfile.mkdtemp(prefix="reliability-kill-")
    plan = Plan(root, STEPS, timeout=BOUND, method=method)
    plan = replace(plan, deaths=_deaths(how, times, ranks, expected, randomly))
    training = _Training(plan, ranks, expected)
    training.to_its_end()
    where = [f"{phase} of step {iteration}" for phase, iteration in training.hit]
    if not training.wrong:
        shutil.rmtree(root)
    return Outcome("same bits", training.wrong, len(where), {"where": where, "directory": root})


@functools.cache
def undisturbed(ranks: int, method: str) -> dict[str, Any]:
    """Rank 0's results of a training that nothing happens to; and the events of all, and seconds."""
    with tempfile.TemporaryDirectory() as root:
        plan = Plan(root, STEPS, method=method)
        with running(ranks, plan.timeout, train, plan) as run:
            ended = run.ends()
        if any(end.code != 0 for end in ended):
            raise RuntimeError(f"an undisturbed training on {ranks} ranks ended with {[end.code for end in ended]}")
        found: dict[str, Any] = ended[0].result
        found["events"] = [end.result["events"] for end in ended]
        return {**found, "seconds": time.monotonic() - entries(plan, "starts")[0]["time"]}


def entries(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut off is left out."""
    path = Path(plan.directory) / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _deaths(how: str, times: int, ranks: int, expected: dict[str, Any], randomly: random.Random) -> list[Death]:
    """One for each attempt, at later and later steps."""
    deaths = []
    for i, iteration in enumerate(sorted(randomly.sample(range(STEPS - 1), min(times, STEPS - 1)))):
        rank = randomly.randrange(ranks)
        phase = "save" if i % 2 else randomly.choice(PHASES)
        event = randomly.randrange(expected["events"][rank][phase])
        if i % 3 == 2:
            deaths.append(Death("outside", rank, iteration, delay=randomly.uniform(0, 2 * expected["seconds"] / STEPS)))
        else:
            deaths.append(Death(how, rank, iteration, phase, event))
    return deaths


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

    def __init__(self, plan: Plan, ranks: int, expected: dict[str, Any]) -> None:
        self._plan, self._ranks, self._expected = plan, ranks, expected
        self.hit: list[tuple[str, int]] = []
        self.wrong: list[str] = []

    def to_its_end(self) -> None:
        for attempt in range(len(self._plan.deaths) + 1):
            before = [len(entries(self._plan, name)) for name in ("deaths", "survivors")]
            with running(self._ranks, self._plan.timeout, _quietly, self._plan, attempt) as run:
                self._trouble(run, attempt)
                ended = run.ends()
            died = entries(self._plan, "deaths")[before[0] :]
            self.hit += [(each["phase"], each["iteration"]) for each in died]
            self._compare_newest()
            if all(end.code == 0 for end in ended):
                self._compare_end(ended[0].result)
                return
            if not died:
                self.wrong.append(f"attempt {attempt} ended with {[end.code for end in ended]}, and nothing was done")
                return
            self._judge_survivors(died[0], entries(self._plan, "survivors")[before[1] :])
            if any(end.code is None for end in ended):
                self.wrong.append("a rank that survived another one did not end")
        self.wrong.append("the last attempt failed")

    def _judge_survivors(self, died: dict[str, Any], survivors: list[dict[str, Any]]) -> None:
        for each in survivors:
            if not each["said"].startswith("RankError"):
                self.wrong.append(f"rank {each['rank']} raised {each['said']}")
            if each["changed"]:
                self.wrong.append(f"{each['changed']} of rank {each['rank']} changed when another one was lost")
            if each["time"] - died["time"] > BOUND:
                self.wrong.append(
                    f"rank {each['rank']} waited {each['time'] - died['time']:.0f} s for one that was lost"
                )

    def _trouble(self, run: Running, attempt: int) -> None:
        """What is done to an attempt from outside."""
        deaths = self._plan.deaths
        death = deaths[attempt] if attempt < len(deaths) else None
        if death is not None and death.how == "outside":
            self._kill(run, attempt, death)
        elif death is not None and death.how == "stop":
            while run.alive() and not entries(self._plan, "deaths"):
                time.sleep(0.005)
            time.sleep(STOPPED)
            self._compare_newest()
            os.kill(run.pids[death.rank], signal.SIGCONT)

    def _kill(self, run: Running, attempt: int, death: Death) -> None:
        while run.alive():
            at = told(self._plan.directory, death.rank)
            if len(at) == 5 and int(at[0]) == attempt and int(at[2]) >= death.iteration:
                time.sleep(death.delay)
                try:
                    os.kill(run.pids[death.rank], signal.SIGKILL)
                except ProcessLookupError:  # it has come to its end
                    return
                _, _, iteration, phase, event = told(self._plan.directory, death.rank)
                where = {"iteration": int(iteration), "phase": phase, "event": int(event)}
                log(self._plan.directory, "deaths", rank=death.rank, **where, time=time.monotonic())
                return
            time.sleep(0.002)

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

    def _compare_end(self, found: dict[str, Any]) -> None:
        self.wrong += [f"other {key} at the end" for key in SAME if found[key] != self._expected[key]]
        for entry in entries(self._plan, "losses"):
            loss = self._expected["losses"][entry["iteration"]]
            if entry["loss"] != loss:
                self.wrong.append(f"step {entry['iteration']}: the loss was {entry['loss']!r}, not {loss!r}")
