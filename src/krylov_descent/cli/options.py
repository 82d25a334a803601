"""What can be asked for on the command line: one class for each command, one field for each option."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Check:
    """Look for everything that would make training fail, go wrong silently, or take long; no step is taken."""

    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    """module:function, found from the current directory; it returns (model, closure) or (model, closure, sets)."""
    krylov_dim: int = 20
    """K, the Krylov vectors of a step."""
    curvature: Literal["ggn", "hessian", "fisher"] = "ggn"
    """Gauss–Newton, the exact Hessian, or the empirical Fisher matrix."""
    json: bool = False
    """Print JSON in place of a table."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Train until there is a reason to end; log, checkpoint and model are written to a directory.

    Ctrl-C ends a run cleanly; --resume goes on with it as if it had never stopped.
    """

    target: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="TARGET")]]
    """module:function, found from the current directory; it returns (model, closure) or (model, closure, sets)."""
    out: Path = Path("ksd-run")
    """Where log.jsonl, checkpoint.safetensors and model.pt go."""
    resume: bool = False
    """Go on from the checkpoint in the directory; from the start if there is none."""
    max_steps: int | None = None
    """End after so many steps, those before a resume included."""
    seconds: float | None = None
    """End after the step that passes this time."""
    patience: int = 20
    """End after so many steps in a row without a better loss."""
    gtol: float = 0.0
    """End when the gradient's norm is at most this."""
    method: Literal["ksd", "flow"] = "ksd"
    """flow: GaussNewtonFlow, for physics-informed networks; the command check tells."""
    krylov_dim: int = 20
    """K, the Krylov vectors of a step; ksd only."""
    curvature: Literal["ggn", "hessian", "fisher"] = "ggn"
    """Gauss–Newton, the exact Hessian, or the empirical Fisher matrix; ksd only."""
    weight_decay: float = 0.0
    """c of ½·c·‖θ‖², added to the loss."""
    progress: bool = True
    """Show a bar of the steps; a line for each where the output is no terminal."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draw the log of a run: loss, time by phase, curvature and coefficients."""

    log: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="LOG")]]
    """log.jsonl of a run, or the directory that it is in."""
    out: Path = Path("overview.png")
    """The picture: .png, .pdf or .svg."""
