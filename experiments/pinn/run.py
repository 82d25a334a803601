"""One run: a method on a problem until its CPU seconds are spent, evaluated at set times, recorded in one file.

The clock runs while the method steps, and while new points are drawn; evaluations and files are off it. The file is
written when the run has ended, first under another name: a run that was interrupted leaves nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.common.budget import Budget
from experiments.common.files import encoded, machine, replacing, require_same
from experiments.common.loop import Advance, Loop, Pace, Progress, Watch
from experiments.common.packed import path_of
from experiments.common.settings import given, goes_by_budget
from experiments.pinn.fits import FITS
from experiments.pinn.further import FURTHER
from experiments.pinn.problems import PROBLEMS, Problem
from experiments.pinn.problems import problem as make_problem
from experiments.pinn.records import FOLDER, MARKS
from experiments.pinn.rivals import METHODS
from experiments.pinn.unseen import UNSEEN

_FIRST, _RATIO = 1.0, 1.3

#: Points of a picture along each axis, at most: two fields of float32 then stay below 100 kB.
_PICTURE = 110

#: What is measured at a point.
MEASURED = ("loss", "held_out", "error")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run is.

    Attributes:
        problem: a name of ``PROBLEMS``, ``UNSEEN``, ``FURTHER`` or ``FITS``.
        method: a name of ``METHODS``.
        settings: of that method.
        seconds: its budget on the clock of the process.
        seed: of initial weights, collocation points and the method.
        network: hidden layers and their width, as 3x32.
        dtype: float32 or float64.
        resample: new collocation points after so many steps; None for never.
        points: collocation points inside the domain, or samples of a fit; the problem's own number unless given.
        label: of the file; made from the above unless given.
    """

    problem: str
    method: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 60.0
    seed: int = 0
    network: str = "3x32"
    dtype: str = "float64"
    resample: int | None = None
    points: int | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The label, with the budget in it, since some methods go by it, and with all that is not as usual."""
        unusual = [self.dtype] if self.dtype != "float64" else []
        unusual += [f"points{self.points}"] if self.points else []
        unusual += [f"resample{self.resample}"] if self.resample else []
        return self.label or "-".join([self.method, *unusual, f"{self.seconds:g}s"])

    def path(self, results: Path) -> Path:
        """Its file."""
        return path_of(results / FOLDER, self.problem, self.name, self.seed, self.network)


def checked(config: RunConfig) -> RunConfig:
    """The same, with settings that came as text read.

    Raises:
        ValueError: a name, a number or a setting that there is not.
    """
    if config.problem not in (problems := (*PROBLEMS, *UNSEEN, *FURTHER, *FITS)):
        raise ValueError(f"There is no problem {config.problem!r}; there are {', '.join(problems)}.")
    if config.method not in METHODS:
        raise ValueError(f"There is no method {config.method!r}; there are {', '.join(METHODS)}.")
    for name in ("seconds", "resample", "points"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} {value:g}: must be above 0.")
    if config.resample and config.problem in FITS:
        raise ValueError(f"--resample {config.resample}: {config.problem} has no other samples to draw; leave it out.")
    settings = given(config.method, METHODS[config.method], config.settings)
    return dataclasses.replace(config, settings=settings)


def run(
    config: RunConfig,
    results: Path,
    *,
    clock: Callable[[], float] = time.process_time,
    watch: Watch | None = None,
) -> Path:
    """Run until the budget is spent, unless that was done before; returns the file.

    The solution of seed 0 is kept beside it, for pictures.

    Raises:
        ValueError: the file there belongs to a run of other settings.
    """
    config = checked(config)
    path = config.path(results)
    dtype = {"float32": torch.float32, "float64": torch.float64}[config.dtype]
    problem = make_problem(config.problem, seed=config.seed, network=config.network, dtype=dtype, points=config.points)
    header = _header(problem, config)
    if path.exists():
        require_same(path, header, scheduled=True)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    method = METHODS[config.method]
    budget = {"seconds": config.seconds} if goes_by_budget(method) else {}
    steps = method(problem, seed=config.seed, **budget, **config.settings)
    lines = drive(problem, steps, config.seconds, clock=clock, resample=config.resample, watch=watch)
    if config.seed == 0 and lines[-1]["reason"] != "diverged":
        _save_fields(problem, path.with_suffix(".npz"))
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"".join(map(encoded, [header, *lines])))
    return path


def drive(
    problem: Problem,
    steps: Iterator[float],
    seconds: float,
    *,
    clock: Callable[[], float] = time.process_time,
    resample: int | None = None,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """Take steps until the seconds are spent; returns the points, the first before any step, and the end.

    A run whose loss is not finite any more has diverged: it ends, and its result is the last finite point.
    """
    points: list[dict[str, Any]] = []
    work, pace = _Solving(problem, steps, resample), Pace(times=due(seconds))
    loop = Loop(work, Budget(seconds, "seconds"), pace, points.append, clock, watch=watch)
    end = {"kind": "end", "reason": loop.run(), "spent": loop.progress.seconds}
    last = next((p for p in reversed(points) if all(math.isfinite(p[name]) for name in MEASURED)), points[0])
    return [*points, {**end, **last, "kind": "end"}]


@dataclasses.dataclass(eq=False)
class _Solving:
    """A problem that a method takes steps on, as the loop sees it; methods are generators, which nothing can save."""

    problem: Problem
    steps: Iterator[float]
    resample: int | None = None
    count: int = 0
    samples: int = 1  # gradients are not counted

    def advance(self, share: float) -> Advance:
        if self.resample and self.count and self.count % self.resample == 0:
            self.problem.draw = self.count // self.resample
            self.problem.resample(self.problem.draw)
        loss = next(self.steps, None)
        if loss is None:
            return Advance(end="stopped", steps=0)
        self.count += 1
        return Advance(end=None if math.isfinite(loss) else "diverged")

    def point(self, progress: Progress, report: Any) -> dict[str, Any]:
        """The loss is taken anew: that which a method yields may be of a point before."""
        with torch.no_grad():
            loss = float(self.problem.closure()[0])
        measured = dict(zip(MEASURED, (loss, self.problem.held_out(), self.problem.error()), strict=True))
        return {"kind": "point", "seconds": progress.seconds, "steps": progress.step, **measured}

    def save(self, progress: Progress) -> None:
        pass


def due(seconds: float) -> tuple[float, ...]:
    """When a run is evaluated: at times of one ratio, at the marks, and at the end."""
    times = {mark for mark in MARKS if mark < seconds} | {seconds}
    time = _FIRST
    while time < seconds:
        times.add(time)
        time *= _RATIO
    return tuple(sorted(times))


def _header(problem: Problem, config: RunConfig) -> dict[str, Any]:
    return {
        "kind": "run",
        **{key: value for key, value in dataclasses.asdict(config).items() if key != "label"},
        "label": config.name,
        "n": sum(p.numel() for p in problem.model.parameters()),
        "N": sum(z.numel() for z in problem.closure()[1]),
        "clock": "cpu",
        "threads": torch.get_num_threads(),
        "started": datetime.date.today().isoformat(),
        "machine": machine(),
    }


def _save_fields(problem: Problem, path: Path) -> None:
    """The exact solution and what the network is off it, every so many points of the grid."""
    grid = problem.grid
    exact = grid.exact.double()
    # Of two fields in float32 the difference would be lost below 1e-7.
    error = grid.solution().double() - exact
    every = [math.ceil(size / _PICTURE) for size in exact.shape]
    fields = {"exact": exact[:: every[0], :: every[1]], "error": error[:: every[0], :: every[1]]}
    axes = {"first": grid.axes[0][:: every[0]], "second": grid.axes[1][:: every[1]]}
    arrays: dict[str, Any] = {key: value.float().numpy() for key, value in {**fields, **axes}.items()}
    np.savez_compressed(path, names=np.array(grid.names), **arrays)
