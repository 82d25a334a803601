"""Which module ran what: the modules that are at work, and those that made the nodes of an autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class Trace:
    """What ran inside ``traced``.

    Attributes:
        active: (module, arguments) of the calls under way, the innermost last; after an error, those it arose in.
        maker: node → the innermost module whose call made it; nodes made outside of all modules are not in it.
    """

    def __init__(self) -> None:
        self.active: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self.maker: dict[Node, nn.Module | None] = {}

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._claim(args, self.active[-1][0] if self.active else None)
        self.active.append((module, args))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        self.active.pop()
        self._claim((args, kwargs), self.active[-1][0] if self.active else None)
        self._claim(output, module)

    def _claim(self, tensors: Any, module: nn.Module | None) -> None:
        """Nodes that no one has claimed yet are this module's: inner calls end before outer ones."""
        roots = [x.grad_fn for x in _tensors(tensors) if x.grad_fn is not None]
        for node in walk(roots, self.maker):
            self.maker[node] = module


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from _tensors(value)
    elif isinstance(x, Sequence) and not isinstance(x, str):
        for value in x:
            yield from _tensors(value)


def walk(roots: Iterable[Node | None], known: Mapping[Node, Any] | None = None) -> list[Node]:
    """The nodes of a graph, those nearest to the roots first, up to those that are known already."""
    known = {} if known is None else known
    found: dict[Node, None] = {}
    front = [node for node in roots if node is not None and node not in known]
    while front:
        following: list[Node] = []
        for node in front:
            if node not in found:
                found[node] = None
                following += [parent for parent, _ in node.next_functions if parent is not None]
        front = [node for node in following if node not in known and node not in found]
    return list(found)


@contextmanager
def traced() -> Iterator[Trace]:
    """Note which modules run inside, also those that are no part of the model (losses)."""
    trace = Trace()
    handles = [
        register_module_forward_pre_hook(trace._enter),
        register_module_forward_hook(trace._leave, with_kwargs=True),
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
            # torch forgets this entry, and torch.compile would take it for a hook for the rest of the process.
            _global_forward_hooks_with_kwargs.pop(handle.id, None)
