"""The problem that is checked: closure, parameters, sets, and what earlier checks learned for later ones.

``named`` and its neighbours tell what to call modules, parameters and lines of code, so that a user finds them.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from krylov_descent.checking.restore import Buffers
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.objective.closure import Evaluation
from krylov_descent.optimizer import KSD
from krylov_descent.samples.subsets import FullBatch, Microbatch, StepSets, Stream, Subsets

_NOT_THE_USERS = (
    str(Path(str(torch.__file__)).parent),
    str(Path(__file__).parent.parent),
    str(Path(str(os.__file__)).parent),
    "<frozen",
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\s*\n?\s*(?P<code>[^\n]*)')


class Names:
    """Paths of the modules and parameters of a model, or positions where parameters alone are known.

    Attributes:
        model: if one was given.
        parameters: what steps are to move and what they are not, in order.
    """

    def __init__(self, model: nn.Module | Iterable[Any]) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        named: list[tuple[str, Tensor]]
        if isinstance(model, nn.Module):
            named = list(model.named_parameters())
            self._modules = {id(module): path for path, module in model.named_modules(remove_duplicate=True)}
        else:
            named = [(f"parameter {i}", p) for i, p in enumerate(_flat(model))]
            self._modules = {}
        for _, p in named:
            if not isinstance(p, Tensor):
                raise ValueError(
                    f"model is a {type(model).__name__} that holds a {type(p).__name__}; give an nn.Module."
                )
        self.parameters = [p for _, p in named]
        self._parameters = {id(p): name for name, p in named}

    def module(self, module: nn.Module, suffix: str = "") -> str:
        """A module by class and path."""
        path = self._modules.get(id(module), "")
        if ".parametrizations." in path:  # 0.parametrizations.weight.0: the first one of 0.weight
            base, _, rest = path.partition(".parametrizations.")
            path = f"{base}.{rest.partition('.')[0]}"
        return f"{type(module).__name__}{suffix}{f' at {path}' if path else ''}"

    def parameter(self, p: Tensor) -> str:
        """A parameter by path."""
        return self._parameters[id(p)]

    def owner(self, p: Tensor) -> str:
        """The path of the module that has a parameter; its own name where that is the model itself."""
        name = self.parameter(p)
        if self.model is None:
            return name
        path = name.rpartition(".")[0].partition(".parametrizations")[0]
        return path or name


def _flat(parameters: Iterable[Any]) -> list[Tensor]:
    """Parameters of an iterable of parameters, or of groups or (name, parameter) pairs of them."""
    found: list[Tensor] = []
    for entry in parameters:
        if isinstance(entry, Mapping):
            params = entry["params"]
            found += [params] if isinstance(params, Tensor) else _flat(params)
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor this package's nor Python's own."""
    return not file.startswith(_NOT_THE_USERS) and "site-packages" not in file


def users_line(frames: Sequence[str]) -> str:
    """The innermost line of the user's among formatted frames, as "train.py:12"; empty if there is none."""
    for frame in reversed(frames):
        match = _FRAME.search(frame)
        if match and is_users(match["file"]):
            return f"{Path(match['file']).name}:{match['line']}"
    return ""


def raised_at(error: BaseException) -> str:
    """Where in the user's code an error arose, as "train.py:12, in closure: z = model(x)"; empty if nowhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            code = f": {frame.line}" if frame.line else ""
            return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}{code}"
    return ""


def passed_through(error: BaseException, folder: str) -> bool:
    """Whether an error came through code in a folder of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(folder in Path(frame.filename).parts for frame in frames)


def first_line(error: BaseException) -> str:
    """The error's kind and the first line of its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


_FEW = 8  # samples

Curvature = Literal["ggn", "hessian", "fisher"]


class Problem:
    """What every check looks at.

    Attributes:
        names: of modules and parameters.
        optimizer: made for the check; it takes no step.
        parameters: as one vector.
        natural: the objective of the closure as it is.
        objective: of a closure that draws the same random numbers and finds the same buffers at every call, so that
            later checks tell something even where those for dropout or BatchNorm failed.
        krylov_dim, curvature, sets: as given.
        draw: the sets of the first step.
        batch: the small batch that most checks look at; all there is, without sets.
        few: some samples of it, for what is dear or disturbed by many; all there is, without sets.
        evaluation: of that batch.
        wrapped: whether the closure calls a model in a wrapper that no product goes through.
        deterministic: whether the closure gave the same loss twice.
        unused: the parameters, by index, that the loss does not depend on.
        bypass: the part of the gradient that does not pass through the outputs.
        working: the curvature to use: the one asked for, or one that was found to work where that does not.
        room: bytes that a step may take beside the graphs of B; None before the memory was looked at.
        line: arguments of ``KSD`` that differ from the defaults.
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
        buffers: Buffers,
    ) -> None:
        self.names, self.sets, self.krylov_dim, self.curvature = names, sets, krylov_dim, curvature
        self.optimizer = KSD(names.parameters, krylov_dim=krylov_dim, curvature=curvature)
        self.parameters = self.optimizer._parameters()
        self.natural = self.optimizer._objective(closure, sets, self.parameters)
        # Checked above: it is callable, with or without a batch as sets want it.
        self.objective = self.optimizer._objective(_repeatable(closure, buffers), sets, self.parameters)
        self.wrapped = False
        self.deterministic = True
        self.unused: set[int] = set()
        self.bypass = 0.0
        self.working: Curvature | None = curvature
        self.room: int | None = None
        self.line: dict[str, str] = {}

    def load(self) -> None:
        """Draw the sets of the first step, and load a small batch."""
        self.draw = (FullBatch() if self.sets is None else self.sets).draw(0, krylov_dim=self.krylov_dim)
        probe = self.draw.probe
        self.batch = next(iter(self.draw.a)) if probe is None else probe[0]
        self.few = self.batch
        if isinstance(self.sets, Subsets):
            shards = -(-self.draw.sizes["A"] // _FEW)
            small = self.sets.draw(0, krylov_dim=self.krylov_dim, of_shards=shards)
            self.few = next(iter(small.a))

    def evaluate_few(self) -> Evaluation:
        """An evaluation of ``few``; from now on of the whole small batch, if all terms of those are masked."""
        evaluation = self.objective.evaluate(self.few)
        if evaluation.weight == 0:
            self.few = self.batch
            evaluation = self.objective.evaluate(self.few)
        return evaluation

    @property
    def samples(self) -> dict[str, int]:
        """Samples in A, B and C; without sets, all that the closure evaluates."""
        return dict(self.draw.sizes) or dict.fromkeys("ABC", self.evaluation.samples)

    def first_microbatch(self, of: Literal["A", "B", "C"]) -> tuple[Microbatch, int]:
        """A micro-batch of a set, as large as those of a step, and how many of them the set has."""
        a = self.draw.a
        if not isinstance(self.sets, Subsets) or not isinstance(a, Stream):
            batches = {"A": self.draw.a, "B": self.draw.b, "C": self.draw.c}[of]
            return next(iter(batches)), len(batches) if isinstance(batches, Sized) else 1
        number = -(-self.samples[of] // a.sample_set.batch_size)
        # The set in as many shards as it has micro-batches: only the first is loaded.
        first = self.sets.draw(0, krylov_dim=self.krylov_dim, of_shards=number)
        batches = {"A": first.a, "B": first.b, "C": first.c}[of]
        return next(iter(batches)), number

    def direction(self) -> Tensor:
        """A random vector [P] that changes every parameter by about as much as it is large."""
        generator = torch.Generator("cpu").manual_seed(0)
        parts = []
        for p in self.parameters.params:
            x = torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu")
            size = float(p.detach().double().square().mean().sqrt()) if p.numel() else 0.0
            parts.append((x * (size or 1.0)).to(self.parameters.device))
        return self.parameters.flatten(parts)

    def product(self, curvature: Curvature, v: Tensor) -> Tensor:
        """v [P] → Hv [P] on few samples, as a step takes it."""
        return CurvatureProduct(CURVATURES[curvature], self.objective, [self.few])(v)

    def full_precision(self) -> AbstractContextManager[Any]:
        """As a step runs."""
        return self.optimizer._full_precision()


def _repeatable(closure: Callable[..., Any], buffers: Buffers) -> Callable[..., Any]:
    @functools.wraps(closure, updated=())
    def repeatable(*batch: Any) -> Any:
        torch.manual_seed(0)
        try:
            return closure(*batch)
        finally:
            buffers.restore()

    return repeatable
