"""What the fronts of all methods share: groups with a weight decay, the check of a closure, a copy with settings."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from krylov_descent.distributed import Comm, SingleProcess
from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.objective.objective import Objective
from krylov_descent.progress import Tell, nobody
from krylov_descent.report import StepReport
from krylov_descent.run import Run
from krylov_descent.safety.checksum import require_sound, sealed
from krylov_descent.samples.subsets import Subsets
from krylov_descent.vectors.parameters import ParameterVector, check_uniform


class ClosureOptimizer(Optimizer):
    """An optimizer whose step takes a closure that returns the loss, and optionally sets to call it on."""

    #: Attributes that a copy takes along, beside torch's own.
    _KEPT: ClassVar[tuple[str, ...]] = ()

    #: Called while a step runs, with a ``Progress``; None for nobody.
    on_progress: Tell | None = None

    def __init__(self, params: ParamsT, weight_decay: float, comm: Comm | None = None) -> None:
        self._comm: Comm = SingleProcess() if comm is None else comm
        super().__init__(params, {"lr": 1.0, "weight_decay": weight_decay})
        check_uniform([p for group in self.param_groups for p in group["params"] if p.requires_grad])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with a ``weight_decay`` of their own if wanted; they join at the next step."""
        decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if not (isinstance(decay, (int, float)) and 0 <= decay < math.inf):
            raise ValueError(f"weight_decay={decay!r}: must be a number ≥ 0.")
        super().add_param_group(param_group)

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any], sets: Subsets | None = None
    ) -> StepReport:
        """One step."""
        raise NotImplementedError

    def run(
        self,
        closure: Callable[..., Any],
        sets: Subsets | None = None,
        *,
        max_steps: int | None = None,
        seconds: float | None = None,
        gtol: float = 0.0,
        patience: int | None = 20,
        monitor: Callable[[], float] | None = None,
        progress: bool = False,
    ) -> Run:
        """Steps until there is a reason to end.

        Args:
            closure: as for ``step``.
            sets: as for ``step``.
            max_steps: end after so many steps.
            seconds: end after the step that passes this time.
            gtol: end when the gradient's norm is at most this.
            patience: end after so many steps in a row without a better loss on A, or a better ``monitor``; steps that
                only gather rows (``StopReason.GATHERING``) do not count.
            monitor: called after each step; what is best is then the lowest value that it returned (a held-out loss).
            progress: show a progress bar on standard error (needs tqdm).

        Returns:
            What to iterate over; then ``reason``, ``loss``, ``best`` and ``restore_best()`` tell how it ended. With
            sets, the last step has been judged (``settle``); after a ``break`` it has not.

        Example:
            >>> import torch
            >>> from krylov_descent import KSD
            >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
            >>> run = KSD([w]).run(lambda: ((w**4).mean(), w), gtol=1e-9)
            >>> losses = [report.loss for report in run]
            >>> run.reason
            <EndReason.GRADIENT: 'gradient'>
            >>> run.best.value < 1e-9
            True
        """
        return Run(
            self,
            closure,
            sets,
            max_steps=max_steps,
            seconds=seconds,
            gtol=gtol,
            patience=patience,
            monitor=monitor,
            progress=progress,
        )

    @property
    def comm(self) -> Comm:
        """Of the ranks that step together."""
        return self._comm

    def trained(self) -> list[Tensor]:
        """The parameters that steps move, in order."""
        return self._parameters().params

    def _parameters(self) -> ParameterVector:
        """The parameters as they are grouped now.

        Raises:
            ValueError: they are spread over a mesh, which this optimizer cannot do with.
        """
        parameters = ParameterVector(self.param_groups)
        if any(map(is_sharded, parameters.params)):
            self._comm = self._mesh_comm(parameters)
        return parameters

    def _mesh_comm(self, parameters: ParameterVector) -> Comm:
        raise ValueError(
            f"{type(self).__name__} was given DTensor parameters, whose inner products it would take of this rank's "
            "parts only. Use krylov_descent.KSD, or plain parameters."
        )

    def _full_precision(self) -> AbstractContextManager[Any]:
        """No autocast from outside: its casts are not for vectors of all parameters."""
        device = self._first_parameter().device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def _first_parameter(self) -> Tensor:
        first: Tensor = next(p for group in self.param_groups for p in group["params"])
        return first

    def _objective(self, closure: Callable[..., Any], sets: Subsets | None, parameters: ParameterVector) -> Objective:
        """The objective over the groups as they are now.

        Raises:
            ValueError: the closure or the sets cannot be used.
        """
        if not callable(closure):
            raise ValueError(
                f"step() was given {closure!r} for a closure. Pass a function that returns loss, outputs: "
                "optimizer.step(closure) or optimizer.step(closure, sets)."
            )
        if sets is not None and not hasattr(sets, "draw"):
            raise ValueError(f"sets is a {type(sets).__name__}; pass Subsets(train_set, batch_size=..., seed=...).")
        try:
            inspect.signature(closure).bind(*(() if sets is None else (None,)))
        except TypeError as error:
            raise ValueError(
                "step(closure, sets) calls closure(batch), and step(closure) calls closure(); "
                f"this closure does not take that: {error}."
            ) from None
        except ValueError:
            pass  # a builtin without a signature
        call = closure if sets is not None else (lambda _: closure())
        # Its code and not itself, which may hold data that should die with it.
        identity = getattr(closure, "__code__", type(closure))
        objective = Objective(call, parameters, self._comm, identity)
        objective.tell = self.on_progress or nobody
        return objective

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with a version and a checksum: what was damaged on a disk is refused by ``load_state_dict``."""
        return sealed(super().state_dict(), self._owner())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: it is damaged, of another optimizer, of another model, or newer than this version.
        """
        require_sound(state_dict, self._owner(), self.param_groups)
        super().load_state_dict(state_dict)
        # torch has cast all of it to the parameters' dtype, in which factors, and parts of directions, may not fit.
        here = [p for group in self.param_groups for p in group["params"]]
        there = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(there, here, strict=True):
            found = state_dict["state"].get(i, {})
            for key in (key for key in found if key.endswith("_part")):
                self.state[p][key] = found[key].to(p.device)
            factors = found.get("factors")
            if factors is not None:
                self.state[p]["factors"] = {
                    name: x.to(p.device) if isinstance(x, Tensor) else x for name, x in factors.items()
                }

    def _owner(self) -> str:
        """The method's own class, right below this one: a class that a user derives from it has the same state."""
        return next(c.__name__ for c in type(self).__mro__ if ClosureOptimizer in c.__bases__)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own keeps only state, groups and defaults, so that a copy would have no settings.
        return {**super().__getstate__(), **{k: self.__dict__[k] for k in ("_comm", *self._KEPT)}}


def whole(name: str, value: Any) -> int:
    """An argument as an integer.

    Raises:
        ValueError: it is none.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be a whole number.") from None
