"""A workspace for steps with one closure: buffers, and verdicts on its layers."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Workspace:
    """One object of each kind, created on first use; not saved, as a resumed run creates it again.

    Args:
        closure: the identity of the closure and its parameters.

    Example:
        >>> workspace = Workspace()
        >>> workspace.of(list).append(1)
        >>> workspace.of(list)
        [1]
    """

    def __init__(self, closure: tuple[object, ...] = ()) -> None:
        self.closure = closure
        self._kept: dict[type[Any], Any] = {}

    def of(self, kind: type[T]) -> T:
        """Return the object of this kind."""
        if kind not in self._kept:
            self._kept[kind] = kind()
        kept: T = self._kept[kind]
        return kept

    def of_closure(self, closure: tuple[object, ...]) -> Workspace:
        """Return this workspace, or a new one if it belongs to another closure."""
        return self if closure == self.closure else Workspace(closure)
