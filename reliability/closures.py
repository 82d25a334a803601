"""Closures that return the wrong thing, or raise, at a chosen call."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: What a closure raises at a call, once.
RAISES = (
    *("RuntimeError", "RuntimeError of grad", "RuntimeError of twice", "ValueError", "IndexError", "Unusual"),
    *("KeyboardInterrupt", "SystemExit", "GeneratorExit", "StopIteration", "MemoryError", "OutOfMemoryError"),
)


class Unusual(Exception):  # noqa: N818 — the name of a user
    """An exception that cannot be made again from its arguments."""

    def __init__(self, where: str, call: int) -> None:
        super().__init__(f"{where} at call {call}")
        self.where, self.call = where, call


def exception_of(name: str, call: int) -> BaseException:
    """What a user's closure may raise, by its name in ``RAISES``."""
    texts: dict[str, BaseException] = {
        "RuntimeError of grad": RuntimeError("the gradebook cannot be read"),
        "RuntimeError of twice": RuntimeError("this file cannot be differentiated twice"),
        "OutOfMemoryError": torch.OutOfMemoryError("CUDA out of memory"),
        "Unusual": Unusual("reading", call),
    }
    if name in texts:
        return texts[name]
    kind: type[BaseException] = getattr(builtins, name)
    return kind(f"at call {call}")


class Faulty:
    """A closure with a fault from call number ``at`` on; an exception is raised once.

    Attributes:
        raised: what it raised last, by its fault or because the model did.
        given: what it was called with then.
    """

    def __init__(self, right: Callable[..., tuple[Any, ...]], fault: str, at: int) -> None:
        self._right, self._fault, self._at = right, fault, at
        self._calls = 0
        self.raised: BaseException | None = None
        self.given: tuple[Any, ...] = ()

    def __call__(self, *batch: Any) -> Any:
        """Called as KSD calls closures."""
        try:
            return self._call(*batch)
        except BaseException as error:
            self.raised, self.given = error, batch
            raise

    @property
    def raised_by_fault(self) -> bool:
        """Whether it was the fault that raised."""
        return self._fault in RAISES and self._calls == self._at

    def _call(self, *batch: Any) -> Any:
        self._calls += 1
        if self._fault == "none":
            return self._right(*batch)
        if self._calls < self._at:
            return self._right(*batch)
        if self._fault in RAISES:
            if self._calls == self._at:
                raise exception_of(self._fault, self._calls)
            return self._right(*batch)
        loss, outputs, *weight = self._right(*batch)
        first = outputs if isinstance(outputs, Tensor) else next(iter(outputs.values()))
        return _WRONG[self._fault](loss, outputs, first, weight)


def _backward(loss: Tensor, outputs: Any, first: Tensor, weight: list[Any]) -> Any:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, outputs


def _other(loss: Tensor, outputs: Any, first: Tensor, weight: list[Any]) -> Any:
    w = nn.Parameter(torch.ones_like(first))
    z = w * first.detach()
    return z.square().mean(), z


_WRONG: dict[str, Callable[[Tensor, Any, Tensor, list[Any]], Any]] = {
    "nothing": lambda f, z, one, w: None,
    "float": lambda f, z, one, w: float(f.detach()),
    "integer loss": lambda f, z, one, w: (f.detach().nan_to_num(0, 1, -1).clamp(-9, 9).long(), z),
    "complex loss": lambda f, z, one, w: (f.to(torch.complex64), z),
    "loss of many elements": lambda f, z, one, w: (one.reshape(-1).repeat(2), z),
    "loss without elements": lambda f, z, one, w: (one.reshape(-1)[:0], z),
    "loss without graph": lambda f, z, one, w: (f.detach(), z),
    "list": lambda f, z, one, w: [f, z],
    "four values": lambda f, z, one, w: (f, z, 1, 1),
    "no values": lambda f, z, one, w: (),
    "loss alone": lambda f, z, one, w: f,
    "outputs none": lambda f, z, one, w: (f, None),
    "outputs text": lambda f, z, one, w: (f, "logits"),
    "outputs integer": lambda f, z, one, w: (f, one.detach().nan_to_num(0, 1, -1).clamp(-9, 9).long()),
    "outputs empty": lambda f, z, one, w: (f, []),
    "outputs without graph": lambda f, z, one, w: (f, one.detach()),
    "outputs twice": lambda f, z, one, w: (f, [one, one]),
    "outputs softmax": lambda f, z, one, w: (f, one.softmax(-1)),
    "outputs flattened": lambda f, z, one, w: (f, one.reshape(-1)),
    "outputs cut": lambda f, z, one, w: (f, one[:0]),
    "weight negative": lambda f, z, one, w: (f, z, -1),
    "weight nan": lambda f, z, one, w: (f, z, float("nan")),
    "weight zero": lambda f, z, one, w: (f, z, 0),
    "weight text": lambda f, z, one, w: (f, z, "many"),
    "swapped": lambda f, z, one, w: (z, f),
    "backward": _backward,
    "random": lambda f, z, one, w: (f * torch.rand(()), z, *w),
    "nan loss": lambda f, z, one, w: (f * float("nan"), z, *w),
    "inf loss": lambda f, z, one, w: (f + float("inf"), z, *w),
    "nan outputs": lambda f, z, one, w: ((one * float("nan")).square().mean(), one * float("nan"), *w),
    "other parameters": _other,
}
#: What a closure does that it should not, from a call on.
RETURNS = tuple(_WRONG)
