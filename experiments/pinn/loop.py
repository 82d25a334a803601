"""One run: a method on a problem until its CPU seconds are spent, evaluated at set times, recorded in one file.

The clock runs while the method steps, and while new points are drawn; evaluations and files are off it. The file is
written when the run has ended, first under another name: a run that was interrupted leaves nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.files import encoded, machine, require_same
from experiments.pinn.fits import FITS
from experiments.pinn.problems import PROBLEMS, Problem
from experiments.pinn.problems import problem as make_problem
from experiments.pinn.records import MARKS, Point, path_of
from experiments.pinn.rivals import METHODS
from experiments.pinn.unseen import UNSEEN

_FIRST, _RATIO = 1.0, 1.3

#: Points of a picture along each axis, at most: two fields of float32 then stay below 100 kB.
_PICTURE = 110

Watch = Callable[[float, Point | None], None]
"""Called after every step with the seconds spent, and with the point where there is one."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run is.

    Attributes:
        problem: a name of ``PROBLEMS``, ``UNSEEN`` or ``FITS``.
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


def checked(config: RunConfig) -> RunConfig:
    """The same, with settings that came as text read.

    Raises:
        ValueError: a name, a number or a setting that there is not.
    """
    if config.problem not in (problems := (*PROBLEMS, *UNSEEN, *FITS)):
        raise ValueError(f"There is no problem {config.problem!r}; there are {', '.join(problems)}.")
    if config.method not in METHODS:
        raise ValueError(f"There is no method {config.method!r}; there are {', '.join(METHODS)}.")
    for name in ("seconds", "resample", "points"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name} {value:g}: must be above 0.")
    if config.resample and config.problem in FITS:
        raise ValueError(f"--resample {config.resample}: {config.problem} has no other samples to draw; leave it out.")
    known = _settings_of(config.method)
    unknown = [key for key in config.settings if known is not None and key not in known]
    if unknown:
        raise ValueError(f"{config.method} has no setting {unknown[0]!r}; it has {', '.join(known or ()) or 'none'}.")
    settings = {key: _read(value) if isinstance(value, str) else value for key, value in config.settings.items()}
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
    path = path_of(results, config.problem, config.network, config.name, config.seed)
    dtype = {"float32": torch.float32, "float64": torch.float64}[config.dtype]
    problem = make_problem(config.problem, seed=config.seed, network=config.network, dtype=dtype, points=config.points)
    header = _header(problem, config)
    if path.exists():
        require_same(path, header, scheduled=True)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    given = dict(config.settings)
    if "seconds" in inspect.signature(METHODS[config.method]).parameters:
        given["seconds"] = config.seconds
    steps = METHODS[config.method](problem, seed=config.seed, **given)
    lines = drive(problem, steps, config.seconds, clock=clock, resample=config.resample, watch=watch)
    if config.seed == 0 and lines[-1]["reason"] != "diverged":
        _save_fields(problem, path.with_suffix(".npz"))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(b"".join(map(encoded, [header, *lines])))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
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
    times = iter(due(seconds))
    wanted = next(times)
    points = [_evaluate(problem, 0.0, 0)]
    spent, count, reason = 0.0, 0, None if points[0].finite else "diverged"
    while reason is None:
        began = clock()
        if resample and count and count % resample == 0:
            problem.draw = count // resample
            problem.resample(problem.draw)
        loss = next(steps, None)
        spent += clock() - began
        point = None
        if loss is None:
            reason = "stopped"
        else:
            count += 1
            reason = "diverged" if not math.isfinite(loss) else "budget" if spent >= seconds else None
        if reason in ("stopped", "budget") or (reason is None and spent >= wanted):
            point = _evaluate(problem, spent, count)
            points.append(point)
            wanted = next((t for t in times if t > spent), seconds)
            reason = reason if point.finite else "diverged"
        if watch is not None:
            watch(spent, point)
    last = next((p for p in reversed(points) if p.finite), points[0])
    end = {"kind": "end", "reason": reason, "spent": spent, **dataclasses.asdict(last)}
    return [*({"kind": "point", **dataclasses.asdict(p)} for p in points), end]


def due(seconds: float) -> Sequence[float]:
    """When a run is evaluated: at times of one ratio, at the marks, and at the end."""
    times = {mark for mark in MARKS if mark < seconds} | {seconds}
    time = _FIRST
    while time < seconds:
        times.add(time)
        time *= _RATIO
    return sorted(times)


def _evaluate(problem: Problem, seconds: float, steps: int) -> Point:
    """The loss is taken anew: that which a method yields may be of a point before."""
    with torch.no_grad():
        loss = float(problem.closure()[0])
    return Point(seconds, steps, loss, problem.held_out(), problem.error())


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


def _settings_of(method: str) -> list[str] | None:
    """The settings that a method has; None if it takes whatever comes."""
    parameters = inspect.signature(METHODS[method]).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.name not in ("problem", "seed", "seconds")]


def _read(text: str) -> Any:
    """A number, a truth value, None or a tuple, if it is one; else the text."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
