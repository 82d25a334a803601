"""The base classes of the optimizers: parameter groups, checks of the closure, atomic steps, and their state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.utils.data import DataLoader

from krylov_descent.distributed import Comm, SingleProcess, run_on_all
from krylov_descent.distributed.sharded import is_sharded, lean_graphs
from krylov_descent.objective.closure import no_inference_mode
from krylov_descent.objective.consistency import check_consistency, steady
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.precision import warn_if_reduced
from krylov_descent.objective.workspace import Workspace
from krylov_descent.progress import Tell, nobody
from krylov_descent.report import Settlement, StepReport
from krylov_descent.run import Run
from krylov_descent.safety.atomic import RestoreOnError, current_point
from krylov_descent.safety.checksum import require_intact, with_checksum
from krylov_descent.safety.footprint import Footprint
from krylov_descent.safety.peak import Phases
from krylov_descent.safety.untrusted import require_plain
from krylov_descent.samples.given import policy_of
from krylov_descent.samples.interface import FullBatch, Microbatch, SamplePolicy, Stateless, kinds_of_policy
from krylov_descent.state import (
    Parts,
    on_rank,
    parts_of,
    put_together,
    read_state,
    require_parts,
    require_values,
    require_whole,
    taken_apart,
    write_state,
)
from krylov_descent.stepping.acceptance import Acceptance, Sampler, settle
from krylov_descent.stepping.continuity import Continuity
from krylov_descent.vectors.parameters import ParameterVector, check_uniform
from krylov_descent.vectors.ranks import gathered, require_same

Sets: TypeAlias = SamplePolicy | DataLoader[Any] | None


class ClosureOptimizer(Optimizer):
    """An optimizer whose step takes a closure that returns the loss, and optionally a sample policy."""

    #: Attributes to copy and pickle, beside torch's own.
    _KEPT: ClassVar[tuple[str, ...]] = ()

    #: Called with a ``Progress`` while a step runs, if not None.
    on_progress: Tell | None = None

    #: Whether a learning rate, which has no effect, is warned of; trainers that always set one switch it off.
    warns_of_lr: bool = True

    def __init__(self, params: ParamsT, weight_decay: float, comm: Comm | None = None) -> None:
        self._comm: Comm = SingleProcess() if comm is None else comm
        self._workspace = Workspace()
        super().__init__(params, {"lr": 1.0, "weight_decay": weight_decay})
        check_uniform([p for group in self.param_groups for p in group["params"] if p.requires_grad])

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse arguments of other optimizers in words."""
        for name in kwargs.keys() & _HABITS.keys() - inspect.signature(cls.__init__).parameters.keys():
            raise TypeError(f"{cls.__name__} takes no {name}: {_HABITS[name]}. Leave it out.")
        return super().__new__(cls)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, optionally with their own ``weight_decay``; they are trained from the next step on."""
        decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if not (isinstance(decay, (int, float)) and 0 <= decay < math.inf):
            raise ValueError(f"weight_decay={decay!r}: must be a number ≥ 0.")
        super().add_param_group(param_group)

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any] | None = None, sets: Sets = None
    ) -> StepReport:
        """Take one step."""
        raise NotImplementedError

    def run(
        self,
        closure: Callable[..., Any],
        sets: Sets = None,
        *,
        max_steps: int | None = None,
        seconds: float | None = None,
        gtol: float = 0.0,
        patience: int | None = 20,
        monitor: Callable[[], float] | None = None,
        progress: bool = False,
    ) -> Run:
        """Return a run to iterate over, which takes steps until a reason to end.

        Args:
            closure: as for ``step``.
            sets: as for ``step``.
            max_steps: the largest number of steps.
            seconds: end after the step that passes this time.
            gtol: end when the gradient's norm is at most this.
            patience: end after this number of steps in a row without a better loss on A, or a better ``monitor``.
            monitor: called after each step; the best point is then the one of its lowest value (a held-out loss).
            progress: show a progress bar on standard error (needs tqdm).

        Returns:
            An iterable of reports, with ``reason``, ``loss``, ``best`` and ``restore_best()`` after the end. With
            sets, the last step has then been judged (``settle``), also after a ``break`` in a single process.

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
        """Return the communicator of the ranks that step together."""
        return self._comm

    def trained(self) -> list[Tensor]:
        """Return the trained parameters, in order."""
        return self._parameters().params

    def _parameters(self) -> ParameterVector:
        """Return the parameters of the present groups.

        Raises:
            ValueError: they are DTensors, which this optimizer does not support.
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
        """Return a context that disables an outer autocast, which must not cast vectors of all parameters."""
        device = self._first_parameter().device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def _first_parameter(self) -> Tensor:
        first: Tensor = next(p for group in self.param_groups for p in group["params"])
        return first

    def _objective(
        self,
        closure: Callable[..., Any] | None,
        sets: Sets,
        parameters: ParameterVector,
        footprint: Footprint | None = None,
    ) -> Objective:
        """Return the objective over the present groups.

        Raises:
            ValueError: the closure or the sets cannot be used.
        """
        if closure is None or not callable(closure):
            raise ValueError(
                f"step() was given {closure!r} for a closure. Pass the function that computes the loss, as for "
                "torch.optim.LBFGS: optimizer.step(closure), without a GradScaler; or optimizer.step(closure, loader)."
            )
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
        # The closure's code, since the closure itself may hold data that must be freed with it.
        called = closure
        while isinstance(called, functools.partial):
            called = called.func
        identity = getattr(called, "__code__", type(called))
        self._workspace = self._workspace.of_closure((identity, *map(id, parameters.params)))
        objective = Objective(call, parameters, self._comm, self._workspace, footprint)
        objective.tell = self.on_progress or nobody
        objective.form.needs_outputs = self._needs_outputs()
        objective.form.begin_step()
        return objective

    def _needs_outputs(self) -> bool:
        """Return whether the curvature needs the model's outputs."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state with a version and a checksum, by which ``load_state_dict`` refuses a damaged file."""
        return with_checksum(super().state_dict(), self._owner())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as torch does.

        Raises:
            ValueError: the state is damaged, of another optimizer, of another model, or of a newer version.
        """
        require_intact(state_dict, self._owner(), self.param_groups)
        here = [p for group in self.param_groups for p in group["params"]]
        there = [i for group in state_dict["param_groups"] for i in group["params"]]
        self._check_entries([state_dict["state"].get(i, {}) for i in there])
        super().load_state_dict(state_dict)
        # torch has cast all tensors in a parameter's state to its dtype, also those that are not of its shape.
        for i, p in zip(there, here, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, dict):
                    moved = {k: x.to(p.device) if isinstance(x, Tensor) else x for k, x in value.items()}
                    self.state[p][key] = moved

    def _check_entries(self, entries: list[Mapping[str, Any]]) -> None:
        """Raise a ValueError if the states of the parameters, in their order, cannot be loaded."""

    def _owner(self) -> str:
        """Return the name of the class right below those of this file; a user's subclass of it has the same state."""
        return next(c.__name__ for c in type(self).__mro__ if c not in _BASES and not _BASES.isdisjoint(c.__bases__))

    def __getstate__(self) -> dict[str, Any]:
        # torch's own method keeps only state, groups and defaults, so that a copy would lack the settings.
        return {**super().__getstate__(), **{k: self.__dict__[k] for k in ("_comm", *self._KEPT)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._workspace = Workspace()  # a copy has other parameters


class CurvatureOptimizer(ClosureOptimizer):
    """An optimizer whose steps are atomic, resumable, and taken by several ranks together.

    A method defines the state of a new run (``_fresh``) and one step (``_advance``).
    """

    #: K; a sample policy may size its sets by 1/K.
    krylov_dim: int

    @property
    def _acceptance(self) -> Acceptance:
        """The acceptance rule for the last step."""
        raise NotImplementedError

    def _fresh(self, policy: SamplePolicy) -> Any:
        """Return the state of a new run, a ``MethodState``."""
        raise NotImplementedError

    def _advance(
        self, objective: Objective, samples: Sampler, state: Any, theta: Callable[[], Tensor]
    ) -> tuple[StepReport, Any]:
        """Take one step; return its report and the new state."""
        raise NotImplementedError

    def _prepare(self, objective: Objective, samples: Sampler, state: Any) -> None:
        """Raise or warn before a step if the method does not suit the problem."""

    def _settings(self) -> str:
        """Return the settings that must be equal on all ranks, beside those that their error names."""
        raise NotImplementedError

    def _phases(self, objective: Objective, batch: Microbatch | None) -> Phases:
        """Return the bytes of a step on a rank by phase and owner, graphs of ``batch`` included."""
        raise NotImplementedError

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any] | None = None, sets: Sets = None
    ) -> StepReport:
        """Take one step.

        Args:
            closure: called as ``closure(batch)`` with ``sets``, otherwise as ``closure()``. It returns the mean loss
                and the model outputs it was computed from (a tensor or a tuple, list or dict of tensors), and
                optionally the weight of that mean. Or it returns the loss alone, as for torch.optim.LBFGS: its
                ``backward`` is left out, and the outputs are found from the loss. An autocast belongs inside the
                closure; one around ``step`` is switched off.
            sets: draws A, B and C: ``Subsets``, ``Growing``, ``Points``, or a DataLoader, which stands for ``Subsets``
                of its data set. None for A = B = C, the samples that the closure evaluates.

        Returns:
            The report of the step; ``float(report)`` is the loss before the step.

        Raises:
            ValueError: the closure cannot be used; the message has the remedy, and the parameters are as before.
        """
        no_inference_mode()
        parameters = self._parameters()
        policy = policy_of(sets)
        state = self._remember(parameters, policy)
        decays = [group["weight_decay"] for group in self.param_groups]
        settings = zlib.crc32(f"{self._settings()} {decays} {policy}".encode())
        samples_held = run_on_all(self._comm, policy.fingerprint) if self._comm.ranks > 1 else 0
        require_same(self._comm, parameters, (state.iteration, state.seed, self.krylov_dim, settings, samples_held))
        theta = current_point(parameters, state.earlier, state.last_step, self._comm)
        theta_is = [p._version for p in parameters.params]
        footprint = Footprint(parameters.device)
        with self._atomic(parameters, theta, footprint, policy):
            objective, samples = self._objective(closure, sets, parameters, footprint), self._sampler(policy)
            self._prepare(objective, samples, state)
            if state.iteration:
                objective.first_look = steady
            else:
                warn_if_reduced(parameters.params)
                first = samples.choose(0, state.samples).sets
                check_consistency(objective, first, curvature_of_outputs=self._needs_outputs())
                run_on_all(self._comm, first.warn_if_random)
            report, state = self._advance(objective, samples, state, theta)
            self._store(parameters, state)
        if sets is None:
            self._workspace.of(Continuity).see(report, theta_is, [p._version for p in parameters.params])
        self._tell_of_lr()
        return report

    def _tell_of_lr(self) -> None:
        lr = next((group["lr"] for group in self.param_groups if group["lr"] != 1.0), None)
        if lr is not None and self.warns_of_lr:
            self.warns_of_lr = False
            warnings.warn(
                f"lr={lr!r} has no effect: the length of a step comes from a search on the loss. Leave out the "
                "learning rate, and its scheduler.",
                stacklevel=3,
            )

    def settle(self, closure: Callable[..., Any], sets: Sets = None) -> Settlement:
        """Judge the last step of a run as the next step would: undo it if it raised the loss on A.

        Returns:
            The final loss on A, and whether the last step was kept.

        Example:
            >>> import torch
            >>> from krylov_descent import KSD, Subsets
            >>> w = torch.nn.Parameter(torch.zeros(2))
            >>> sets = Subsets((torch.randn(100, 2),), batch_size=50, seed=0)
            >>> optimizer = KSD([w], krylov_dim=2)
            >>> def closure(batch):
            ...     r = batch[0] - w
            ...     return r.square().sum(1).mean(), r
            >>> report = optimizer.step(closure, sets)
            >>> optimizer.settle(closure, sets).loss <= report.loss
            True
        """
        no_inference_mode()
        parameters = self._parameters()
        policy = policy_of(sets)
        state = self._remember(parameters, policy)
        theta = current_point(parameters, state.earlier, state.last_step, self._comm)
        footprint = Footprint(parameters.device)
        with self._atomic(parameters, theta, footprint, policy):
            objective = self._objective(closure, sets, parameters, footprint)
            settlement, samples = settle(objective, self._sampler(policy), state, self._acceptance)
            if not settlement.accepted:
                undone = dataclasses.replace(
                    state, samples=samples, last_step=None, earlier=None, acceptance=self._acceptance.init()
                )
                self._store(parameters, undone)
        return settlement

    def _atomic(
        self, parameters: ParameterVector, theta: Callable[[], Tensor], footprint: Footprint, policy: SamplePolicy
    ) -> AbstractContextManager[Any]:
        """Return the context of a step: gradients on, full precision, and everything restored if it raises."""
        stack = ExitStack()
        stack.push(lambda kind, *_: policy.interrupted() if kind is not None else None)
        for context in (
            RestoreOnError(parameters, theta, self.state, footprint),
            torch.enable_grad(),
            self._full_precision(),
            lean_graphs(parameters.params),
        ):
            stack.enter_context(context)
        return stack

    def _sampler(self, policy: SamplePolicy) -> Sampler:
        return Sampler(policy, self.krylov_dim, *self._comm.shard_of_sets)

    @property
    def numel(self) -> int:
        """Return P, the number of trainable parameters."""
        return self._parameters().numel

    def whole_state(self) -> Parts:
        """Return the state of the run, gathered from all ranks, for checkpoints; a collective.

        Returns:
            Vectors [P], numbers and other tensors, by name. Tensors are in host memory of rank 0, and may be shared
            with the optimizer; other ranks get the numbers alone.

        Raises:
            ValueError: the parameters are DTensors, or the ranks are not at the same step.
        """
        parameters = self._parameters()
        parts = run_on_all(self._comm, lambda: self._parts(parameters))
        return Parts(*gathered(self._comm, parameters, *parts))

    def check_whole_state(self, state: Parts) -> None:
        """Check a state as ``load_whole_state`` does; tensors on the device "meta" are checked by shape alone."""
        require_whole(state, self._parameters())
        self._check_names(state)

    def _check_names(self, state: Parts) -> None:
        """Require the names and types of this optimizer's strategies, and of a known sample policy."""
        fresh, kinds = self._fresh(FullBatch()), kinds_of_policy(state.numbers.get("policy"))
        if len(kinds) == 1:
            found = put_together(dataclasses.replace(fresh, samples=kinds[0]()), state)
        else:  # it tells at the next step
            found = put_together(fresh, state.without("samples."))
        params = [p for group in self.param_groups for p in group["params"]]
        for field in dataclasses.fields(found):
            if callable(check := getattr(getattr(found, field.name), "check", None)):
                check(params)

    def _check_entries(self, entries: list[Mapping[str, Any]]) -> None:
        if parts := parts_of(entries):
            require_values(parts)
            self._check_names(parts)
            dtype = self._first_parameter().dtype
            for name, x in ((name, x) for entry in entries for name, x in entry.items() if isinstance(x, Tensor)):
                local = x.to_local() if is_sharded(x) else x
                if name != "earlier" and not bool(local.to(dtype).isfinite().all()):
                    raise ValueError(f"The state cannot be used: {name} is not finite in {dtype}. Load an older one.")

    def load_whole_state(self, state: Parts) -> None:
        """Load the result of ``whole_state`` on rank 0, for any number of ranks; each rank is given all of it.

        Raises:
            ValueError: the state is of another optimizer or model, or not finite; nothing is changed then.
        """
        require_plain(state)
        state = require_parts(state)
        self.check_whole_state(state)
        parameters = self._parameters()
        parts = on_rank(state, parameters, self._comm)
        write_state(self.state, self._first_parameter(), parameters, parts, self._comm)

    def _parts(self, parameters: ParameterVector) -> Parts:
        found = read_state(self.state, self._first_parameter(), parameters, self._comm)
        return taken_apart(self._fresh(FullBatch())) if found is None else found

    def _remember(self, parameters: ParameterVector, policy: SamplePolicy) -> Any:
        """Return the state of the run; a sample policy of another class than the last begins anew."""
        fresh = self._fresh(policy)
        parts = read_state(self.state, self._first_parameter(), parameters, self._comm)
        if parts is None:
            return fresh
        if parts.numbers.get("policy") != fresh.policy:
            parts = parts.without("samples.")
            parts.numbers["policy"] = fresh.policy
            known = put_together(dataclasses.replace(fresh, samples=Stateless()), parts)
            return dataclasses.replace(known, samples=fresh.samples)
        return put_together(fresh, parts)

    def _store(self, parameters: ParameterVector, state: Any) -> None:
        write_state(self.state, self._first_parameter(), parameters, taken_apart(state), self._comm)


_BASES = {ClosureOptimizer, CurvatureOptimizer}


#: Arguments of other optimizers, and what there is instead.
_HABITS = {
    "lr": "the length of a step comes from a search on the loss, and there is no learning rate",
    "momentum": "the last step is part of the subspace",
    "betas": "the curvature scales the step",
    "eps": "the curvature scales the step",
    "damping": "the search on the loss does its work",
    "max_iter": "call run(closure, max_steps=...)",
    "max_eval": "call run(closure, max_steps=...)",
    "history_size": "krylov_dim is the size of the subspace",
    "line_search_fn": "each step searches over its subspace",
    "tolerance_grad": "call run(closure, gtol=...)",
    "tolerance_change": "call run(closure, patience=...)",
}


def whole(name: str, value: Any) -> int:
    """Return an argument as an integer.

    Raises:
        ValueError: it is not an integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be a whole number.") from None
