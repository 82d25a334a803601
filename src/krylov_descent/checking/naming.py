"""What to call modules, parameters and lines of code, so that a user finds them."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
