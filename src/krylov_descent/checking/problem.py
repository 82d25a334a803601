"""The problem that is checked, what earlier checks learned for later ones, and names by which a user finds things."""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from krylov_descent.checking.finding import TrialRow
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.objective.closure import Evaluation
from krylov_descent.optimizer import KSD
from krylov_descent.safety.footprint import Footprint
from krylov_descent.samples.given import policy_of
from krylov_descent.samples.interface import FullBatch, Microbatch, StepSets
from krylov_descent.samples.subsets import Stream, Subsets
from krylov_descent.vectors.devices import wide

_NOT_THE_USERS = (
    str(Path(str(torch.__file__)).parent),
    str(Path(__file__).parent.parent),
    str(Path(str(os.__file__)).parent),
    "<frozen",
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class Names:
    """Names of the modules and parameters of a model: paths, or positions if only parameters are known.

    Attributes:
        model: the model, or None.
        argument: the first argument of an optimizer in a line to paste.
        parameters: all parameters in order, frozen ones included.
    """

    def __init__(self, model: nn.Module | Iterable[Any]) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        self.argument = "params" if self.model is None else "model.parameters()"
        self._modules: dict[int, str] = {}
        named: list[tuple[str, Tensor]]
        if isinstance(model, nn.Module):
            named = list(model.named_parameters())
            self._modules = {id(module): path for path, module in model.named_modules()}
        else:
            named = [(f"parameter {i}", p) for i, p in enumerate(_flat(model))]
        for _, p in named:
            if not isinstance(p, Tensor):
                raise ValueError(
                    f"model is a {type(model).__name__} that holds a {type(p).__name__}; give an nn.Module."
                )
        self.parameters = [p for _, p in named]
        self._parameters = {id(p): name for name, p in named}

    def module(self, module: nn.Module, suffix: str = "") -> str:
        """Return the class and path of a module."""
        path = self._modules.get(id(module), "")
        if ".parametrizations." in path:  # 0.parametrizations.weight.0 is the first of 0.weight
            base, _, rest = path.partition(".parametrizations.")
            path = f"{base}.{rest.partition('.')[0]}"
        return f"{type(module).__name__}{suffix}{f' at {path}' if path else ''}"

    def parameter(self, p: Tensor) -> str:
        """Return the path of a parameter."""
        return self._parameters[id(p)]

    def owner(self, p: Tensor) -> str:
        """Return the path of the module that owns a parameter; the parameter's own name if that is the model."""
        name = self.parameter(p)
        if self.model is None:
            return name
        path = name.rpartition(".")[0].partition(".parametrizations")[0]
        return path or name


def _flat(parameters: Iterable[Any]) -> list[Tensor]:
    """Return the parameters from an iterable of parameters, groups, or (name, parameter) pairs."""
    found: list[Tensor] = []
    for entry in parameters:
        if isinstance(entry, Mapping):
            params = entry["params"]
            found += [params] if isinstance(params, Tensor) else _flat(params)
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def is_users(file: str) -> bool:
    """Whether a file belongs to neither torch, nor this package, nor Python."""
    return not file.startswith(_NOT_THE_USERS) and "site-packages" not in file


def users_line(frames: Sequence[str]) -> str:
    """Return the innermost user's line among formatted frames, as "train.py:12"; empty if there is none."""
    for frame in reversed(frames):
        match = _FRAME.search(frame)
        if match and is_users(match["file"]):
            return f"{Path(match['file']).name}:{match['line']}"
    return ""


def raised_at(error: BaseException) -> str:
    """Return the user's line that raised an error, as "train.py:12, in closure: z = model(x)"; empty if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            code = f": {frame.line}" if frame.line else ""
            return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}{code}"
    return ""


def first_line(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


_FEW = 8  # samples

Curvature = Literal["ggn", "hessian", "fisher"]


class Problem:
    """The subject of every check.

    Attributes:
        names: names of modules and parameters.
        optimizer: the optimizer of the check, which takes no step.
        parameters: the parameters as one vector.
        natural: the objective of the unchanged closure.
        objective: the objective of a closure with the same random numbers and buffers at every call, so that later
            checks are meaningful even if those for dropout or BatchNorm failed.
        closure, krylov_dim, curvature, sets: arguments of ``check``.
        draw: the sets of the first step.
        batch: the small batch of most checks; without sets, all samples.
        few: some samples of it, for expensive checks and finite differences; without sets, all samples.
        evaluation: the evaluation of ``batch``.
        wrapped: whether the closure calls a model in a wrapper that allows no products.
        deterministic: whether the closure gave the same loss twice.
        unused: indices of the parameters that the loss does not depend on.
        bypass: the part of the gradient that does not pass through the outputs.
        working: the curvature to use: the one asked for, or another one if that fails.
        room: the bytes that a step may take beside the graphs of B; None before the memory was checked.
        line: arguments of ``KSD`` that differ from the defaults.
        flow: whether to begin with ``GaussNewtonFlow`` in place of KSD.
        trial: the methods that were tried.
        winner: the one of them that is advised.
    """

    batch: Microbatch
    few: Microbatch
    draw: StepSets
    evaluation: Evaluation

    def __init__(
        self,
        closure: Callable[..., Any],
        names: Names,
        sets: Any,
        krylov_dim: int,
        curvature: Curvature,
        buffers: Footprint,
    ) -> None:
        self.names, self.krylov_dim, self.curvature = names, krylov_dim, curvature
        self.sets: Any = None if sets is None else policy_of(sets)
        self.closure = closure
        self.optimizer = KSD(names.parameters, krylov_dim=krylov_dim, curvature=curvature)
        self.parameters = self.optimizer._parameters()
        self.natural = self.optimizer._objective(closure, sets, self.parameters)
        # The line above has checked the closure's signature.
        self.objective = self.optimizer._objective(_repeatable(closure, buffers), sets, self.parameters)
        self.wrapped = False
        self.deterministic = True
        self.unused: set[int] = set()
        self.bypass = 0.0
        self.working: Curvature | None = curvature
        self.room: int | None = None
        self.line: dict[str, str] = {}
        self.flow = False
        self.trial: tuple[TrialRow, ...] = ()
        self.winner: TrialRow | None = None

    def load(self) -> None:
        """Draw the sets of the first step, and load a small batch."""
        policy = FullBatch() if self.sets is None else self.sets
        self.draw = policy.choose(0, policy.init(), krylov_dim=self.krylov_dim, shard=0, of_shards=1).sets
        probe = self.draw.probe
        self.batch = next(iter(self.draw.a)) if probe is None else probe[0]
        self.few = self.batch
        if isinstance(self.sets, Subsets):
            shards = -(-self.draw.sizes["A"] // _FEW)
            small = self.sets.draw(0, krylov_dim=self.krylov_dim, of_shards=shards)
            self.few = next(iter(small.a))

    def evaluate_few(self) -> Evaluation:
        """Return an evaluation of ``few``, which becomes the whole small batch if all of its terms are masked."""
        evaluation = self.objective.evaluate(self.few)
        if evaluation.weight == 0:
            self.few = self.batch
            evaluation = self.objective.evaluate(self.few)
        return evaluation

    def first_of_b(self) -> tuple[Microbatch, int]:
        """Return a micro-batch of B, as large as those of a step, and their number."""
        a = self.draw.a
        if not isinstance(self.sets, Subsets) or not isinstance(a, Stream):
            return next(iter(self.draw.b)), len(self.draw.b)
        number = -(-self.draw.sizes["B"] // a.sample_set.batch_size)
        # As many shards as micro-batches, so that only the first is loaded.
        return self.sets.draw(0, krylov_dim=self.krylov_dim, of_shards=number).b[0], number

    def direction(self) -> Tensor:
        """Return a random vector [P] with entries about as large as those of each parameter."""
        generator = torch.Generator("cpu").manual_seed(0)
        parts = []
        for p in self.parameters.params:
            x = torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu")
            size = float(wide(p.detach()).square().mean().sqrt()) if p.numel() else 0.0
            parts.append((x * (size or 1.0)).to(self.parameters.device, self.parameters.dtype))
        return self.parameters.flatten(parts)

    def product(self, curvature: Curvature, v: Tensor) -> Tensor:
        """Return Hv [P] on few samples, by the product of a step."""
        return CurvatureProduct(CURVATURES[curvature], self.objective, [self.few])(v)

    def full_precision(self) -> AbstractContextManager[Any]:
        """Return the context in which a step runs."""
        return self.optimizer._full_precision()


def _repeatable(closure: Callable[..., Any], buffers: Footprint) -> Callable[..., Any]:
    @functools.wraps(closure, updated=())
    def repeatable(*batch: Any) -> Any:
        torch.manual_seed(0)
        try:
            return closure(*batch)
        finally:
            buffers.restore_buffers()

    return repeatable
