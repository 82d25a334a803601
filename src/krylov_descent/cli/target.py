"""The user's problem: ``module:function`` → model, closure and sets."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

_SHAPE = "def make_problem():\n      ...\n      return model, closure  # or model, closure, sets"


class UsageError(Exception):
    """An impossible request, with a remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


@dataclass(frozen=True, eq=False)
class Target:
    """The values that a user's function returned."""

    model: Any
    closure: Callable[..., Any]
    sets: Any


def load(target: str) -> Target:
    """Import a module, with the current directory on the path, and call its function.

    Raises:
        UsageError: there is no such module or function, it fails, or it returns something else.
    """
    from torch import nn

    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name) or module_name.endswith(".py"):
        suggestion = (
            f"{module_name.removesuffix('.py').replace('/', '.') or 'mymodule'}:{function_name or 'make_problem'}"
        )
        raise UsageError(f"{target!r} is not module:function.", f"For example: {suggestion}")
    make = _function(module_name, function_name)
    try:
        made = make()
    except Exception as error:
        raise _failed(f"{function_name}()", error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        found = tuple(type(x).__name__ for x in made) if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{target} returned {found}, not (model, closure) or (model, closure, sets).", _SHAPE)
    if not callable(made[1]):
        raise UsageError(f"{target} returned a {type(made[1]).__name__} for a closure.", _SHAPE)
    return Target(made[0], made[1], made[2] if len(made) == 3 else None)


def _function(module_name: str, function_name: str) -> Callable[[], Any]:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise _failed(f"import {module_name}", error) from error
        raise UsageError(
            f"There is no module {module_name!r} in {os.getcwd()}, nor among the installed ones.",
            f"Go to the directory that has {module_name.replace('.', '/')}.py.",
        ) from None
    except Exception as error:
        raise _failed(f"import {module_name}", error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        has = sorted(
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        )
        raise UsageError(
            f"{module_name} has no function {function_name!r}.",
            f"It has {', '.join(has)}." if has else f"Write one:\n  {_SHAPE}",
        )
    return cast(Callable[[], Any], function)


def _failed(what: str, error: Exception) -> UsageError:
    from krylov_descent.checking.problem import first_line, raised_at

    where = raised_at(error)
    return UsageError(
        f"{what} failed: {first_line(error)}{f' ({where})' if where else ''}",
        "Run it by itself in Python to see the whole traceback.",
    )
