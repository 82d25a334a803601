"""The settings of each method: few, with the defaults that tuning starts from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class KSDSettings:
    """``fraction`` is the share of the samples in B and in C: 1/K unless given, 1 for the full batch.

    ``paper`` takes ``PAPER`` for all that is not set here.
    """

    krylov_dim: int = 20
    floor: float = 1e-2
    curvature: Literal["ggn", "hessian"] = "ggn"
    fraction: float | None = None
    paper: bool = False


@dataclasses.dataclass(frozen=True)
class KroneckerSettings:
    """``KSD(**DEEP)`` on ``Growing`` sets as they are; what differs is for ablations.

    ``start`` and ``grows`` are of the sets, ``damping`` and ``memory`` of the preconditioner; ``searches`` minimises
    the loss over the subspace in every step; without ``earlier``, only the last step is ever in it.
    """

    krylov_dim: int = 1
    preconditioner: Literal["kronecker", "fisher", "none"] = "kronecker"
    damping: float = 1e-2
    memory: float = 0.98
    start: int = 500
    grows: bool = True
    searches: bool = False
    earlier: bool = True


@dataclasses.dataclass(frozen=True)
class KFACSettings:
    """The Kronecker-factored preconditioner with the step of the quadratic model, on sets that do not grow."""

    batch: int = 1000
    damping: float = 1e-2


@dataclasses.dataclass(frozen=True)
class HessianFreeSettings:
    """``damping`` is λ₀; ``fraction`` the share of the samples that curvature products see, 1 for all."""

    damping: float = 45.0
    curvature: Literal["ggn", "hessian"] = "ggn"
    fraction: float = 0.25
    cg_iterations: int = 250


@dataclasses.dataclass(frozen=True)
class CGSettings:
    """Nonlinear conjugate gradients have nothing to set."""


@dataclasses.dataclass(frozen=True)
class LBFGSSettings:
    """``history`` of 10, as in the paper."""

    history: int = 10


@dataclasses.dataclass(frozen=True)
class SGDSettings:
    """Nesterov momentum; the learning rate falls to zero over the budget along a cosine."""

    lr: float = 0.01
    momentum: float = 0.9
    batch: int = 200


@dataclasses.dataclass(frozen=True)
class AdamSettings:
    """The learning rate falls to zero over the budget along a cosine."""

    lr: float = 1e-3
    batch: int = 200


@dataclasses.dataclass(frozen=True)
class NesterovSettings(SGDSettings):
    """As SGD, with a schedule to choose and a warm-up."""

    schedule: Literal["cosine", "linear"] = "cosine"


@dataclasses.dataclass(frozen=True)
class ScheduledSettings:
    """Of AdamW and SOAP: the learning rate rises in a fiftieth of the budget and falls to zero by its end.

    Along a cosine, or linearly in the second half.
    """

    lr: float = 1e-3
    batch: int = 200
    schedule: Literal["cosine", "linear"] = "cosine"


def changed(name: str, settings: Any, changes: Mapping[str, Any]) -> Any:
    """Settings with some changed; strings are read as the type of the field.

    Raises:
        ValueError: no such setting, or a value that cannot be it.
    """
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    read = {}
    for key, value in changes.items():
        key = key.replace("-", "_")
        if key not in fields:
            raise ValueError(f"{name} has no setting {key!r}; it has {', '.join(fields) or 'none'}.")
        read[key] = _read(name, key, value, fields[key]) if isinstance(value, str) else value
    return dataclasses.replace(settings, **read)


def _read(name: str, key: str, text: str, default: Any) -> Any:
    """A setting from the command line: of the default's type, and positive if a number."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}: {key}={text!r} must be true or false.")
        return text.lower() == "true"
    if default is None and text.lower() == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name}: {key}={text!r} is not a number.") from None
    if not 0 < number < math.inf or (isinstance(default, int) and number != int(number)):
        kind = "whole number" if isinstance(default, int) else "number"
        raise ValueError(f"{name}: {key}={text!r} must be a {kind} above 0.")
    return int(number) if isinstance(default, int) else number


def pair(text: str) -> tuple[str, str]:
    """The two sides of a ``--set key=value``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r} is not understood; write --set key=value.")
    return key.replace("-", "_"), value
