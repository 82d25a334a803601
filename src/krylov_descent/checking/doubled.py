"""The same closure in float64, without its data being converted beforehand: a closure may hold them anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_AS_THEY_ARE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class _Promoting(TorchFunctionMode):
    """Every function gets float64 where it would get less; what is written in place stays what it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _AS_THEY_ARE or name in ("__set__", "__delete__"):
            return func(*args, **kwargs)
        in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        first = args[:1] if in_place else _promoted(args[:1])
        return func(*first, *_promoted(args[1:]), **{k: v if k == "out" else _promoted(v) for k, v in kwargs.items()})


def _promoted(x: Any) -> Any:
    if isinstance(x, Tensor):
        if x.dtype not in _NARROWER:
            return x
        with torch._C.DisableTorchFunction():
            return x.double()
    if type(x) in (tuple, list):
        return type(x)(_promoted(value) for value in x)
    return x


@contextmanager
def doubled(params: Sequence[Tensor], model: nn.Module | None) -> Iterator[None]:
    """Parameters and buffers hold float64 inside, and so does what is computed from them.

    The closure may still refuse: it then raises what it raises. Graphs made before lose hold of the parameters.
    """
    buffers = [] if model is None else list(model.buffers())
    single = [(x, x.data) for x in (*params, *buffers) if x.dtype in _NARROWER]
    gradients = [(p, p.grad) for p in params]
    default = torch.get_default_dtype()
    try:
        for p, _ in gradients:
            p.grad = None  # of another dtype it may not be there
        for x, data in single:
            x.data = data.double()
        torch.set_default_dtype(torch.float64)
        with _Promoting():
            yield
    finally:
        torch.set_default_dtype(default)
        for x, data in single:
            x.data = data
        for p, gradient in gradients:
            p.grad = gradient
