"""The commands and options of the command line: one class for each command, one field for each option."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Check:
    """Look for everything that would make training fail, go wrong silently, or take long; no step without --try."""

    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    """module:function, found from the current directory; it returns (model, closure) or (model, closure, sets)."""
    krylov_dim: int = 20
    """K, the Krylov vectors of a step."""
    curvature: Literal["ggn", "hessian", "fisher"] = "ggn"
    """Gauss–Newton, the exact Hessian, or the empirical Fisher matrix."""
    try_for: Annotated[str | None, tyro.conf.arg(name="try", metavar="SECONDS")] = None
    """Try each method for this much processor time, such as 20s, and print the line of the best."""
    picture: Path = Path("trial.png")
    """The file of the picture of a trial."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="R")] = None
    """Print what a step would take on each of so many ranks, and check nothing; the model may be on "meta"."""
    json: bool = False
    """Print JSON in place of a table."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Train until a stopping criterion holds; write log, checkpoint and model to a directory.

    Ctrl-C ends a run cleanly; --resume continues it as if it had never stopped.
    """

    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    """module:function, found from the current directory; it returns (model, closure) or (model, closure, sets)."""
    out: Path = Path("ksd-run")
    """The directory for log.jsonl, checkpoint.safetensors and model.pt."""
    resume: bool = False
    """Continue from the checkpoint in the directory; from the start if there is none."""
    max_steps: int | None = None
    """End after this number of steps, including those before a resume."""
    seconds: float | None = None
    """End after the step that passes this time."""
    patience: int = 20
    """End after this number of steps in a row without a better loss."""
    gtol: float = 0.0
    """End when the gradient's norm is at most this."""
    method: Literal["ksd", "flow"] = "ksd"
    """flow: GaussNewtonFlow, for physics-informed networks; the command check advises."""
    krylov_dim: int = 20
    """K, the Krylov vectors of a step; ksd only."""
    curvature: Literal["ggn", "hessian", "fisher"] = "ggn"
    """Gauss–Newton, the exact Hessian, or the empirical Fisher matrix; ksd only."""
    weight_decay: float = 0.0
    """c, for the term ½·c·‖θ‖² of the loss."""
    progress: bool = True
    """Show a progress bar; one line for each step if the output is no terminal."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the log of a run: loss, time by phase, curvature and coefficients."""

    log: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="LOG")]]
    """The log.jsonl of a run, or its directory."""
    out: Path = Path("overview.png")
    """The file of the picture: .png, .pdf or .svg."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Check a device by small trainings on it, each compared with the CPU; the report is to be pasted into an issue."""

    device: Annotated[str | None, tyro.conf.arg(metavar="DEVICE")] = None
    """cuda, cuda:1, mps, xpu or cpu; by default the accelerator that torch finds, or else the CPU."""
    skip: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CHECK ...")] = ()
    """Checks to leave out, by name."""
