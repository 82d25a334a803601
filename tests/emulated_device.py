"""A device without hardware: its tensors compute on the CPU, and what a GPU would wait for and launch is counted.

A GPU runs behind the program: it is told operations (launches), and the program waits for it only where it reads a
number (a synchronisation). Both are counted by source line and by phase of a step. Reads are ``float``, ``bool``,
``item``, ``tolist``, copies between host and device unless ``non_blocking``, and operations whose result's size depends
on values (``nonzero``, indices of truth values, ``unique``). Operations on tensors of both host and device raise.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import krylov_descent
from krylov_descent.stepping.step_log import StepLog

DEVICE = torch.device("maia", 0)  # of no build of torch, so that nothing else answers to it
_PACKAGE = str(Path(krylov_descent.__file__).parent) + "/"
_aten: Any = torch.ops.aten
#: Operations for whose result the program waits.
_WAITS = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.is_nonzero,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
}
_INDEX = {_aten.index, _aten.index_put_, _aten.index_put}
#: Operations that only describe memory.
_NO_LAUNCH = {
    _aten.detach, _aten.view, _aten._unsafe_view, _aten.t, _aten.transpose, _aten.permute, _aten.expand, _aten.alias,
    _aten.slice, _aten.select, _aten.split, _aten.split_with_sizes, _aten.unsqueeze, _aten.squeeze, _aten.as_strided,
    _aten.diagonal, _aten.unbind, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.view_as,
    _aten._reshape_alias, _aten.reshape, _aten.unfold, _aten.lift_fresh,
}  # fmt: skip


class OnDevice(Tensor):
    """A tensor on the device; ``host`` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        assert not isinstance(host, OnDevice)
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype
        )
        made.host = host
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device, which in C++ is the CPU."""
        return DEVICE

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.host})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Answer what torch would answer in C++ by the device of the wrapper, the CPU."""
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.tolist:
                return _moved(args[0], torch.device("cpu")).tolist()
            if func is Tensor.numpy:
                raise TypeError(f"can't convert {DEVICE} device type tensor to numpy")
            if func in (Tensor.data_ptr, Tensor.untyped_storage):
                return func(getattr(args[0], "host", args[0]))
            if func is Tensor.cpu:
                return _moved(args[0], torch.device("cpu"))
            if func is Tensor.to:
                return _to(*args, **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Compute outside of a count."""
        return _run(func, args, kwargs or {}, lambda kind: None)


def _to(x: Tensor, *args: Any, non_blocking: bool = False, copy: bool = False, **named: Any) -> Tensor:
    like = next((a for a in (*args, named.pop("other", None)) if isinstance(a, Tensor)), None)
    device = DEVICE if isinstance(like, OnDevice) else getattr(like, "device", named.pop("device", None))
    dtype = getattr(like, "dtype", named.pop("dtype", None))
    for a in args:
        device = torch.device(a) if isinstance(a, (str, torch.device)) else device
        dtype = a if isinstance(a, torch.dtype) else dtype
    assert not any(isinstance(a, bool) for a in args)
    y = x if dtype in (None, x.dtype) and not copy else x.to(dtype=dtype or x.dtype, copy=copy)
    return y if device is None else _moved(y, torch.device(device), non_blocking=non_blocking)


def _moved(x: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    if (device.type == DEVICE.type) == isinstance(x, OnDevice):
        return x
    made: Tensor = _Move.apply(x, non_blocking)  # type: ignore[no-untyped-call]
    return made


class _Move(torch.autograd.Function):
    """A copy between host and device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, non_blocking: bool) -> Tensor:
        _count("host to device" if not isinstance(x, OnDevice) else "device to host", waits=not non_blocking)
        return x.host.clone() if isinstance(x, OnDevice) else OnDevice(x.clone())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Move.apply(g, False), None  # type: ignore[no-untyped-call]


_counting: list[Count] = []


def _count(kind: str, *, waits: bool) -> None:
    for count in _counting:
        count.note(kind, waits=waits)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], see: Callable[[Any], None]) -> Any:
    """Compute an operation on the values of its tensors."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    device = kwargs.get("device")
    on_device = [x for x in tensors if isinstance(x, OnDevice)]
    packet = func.overloadpacket
    if packet is _aten.copy_ and len(on_device) == 1:
        _count("device to host" if on_device[0] is args[1] else "host to device", waits=args[2:3] != (True,))
    elif packet is not _aten._to_copy and on_device:
        alone = [x for x in tensors if x.ndim and not isinstance(x, OnDevice)]
        if alone and packet not in _INDEX:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} of {_here()}")
    if on_device:
        see(func)
        if packet in _INDEX and any(x is not None and x.dtype == torch.bool for x in args[1]):
            _count("index of truth values", waits=True)
        elif packet in _WAITS:
            _count(str(packet).removeprefix("aten."), waits=True)
    target = on_device if device is None else device.type == DEVICE.type
    if packet is _aten._to_copy and device is not None and bool(on_device) != bool(target):
        _count("host to device" if target else "device to host", waits=not kwargs.get("non_blocking"))
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(OnDevice, lambda x: x.host, (args, kwargs))
    given = {id(x.host): x for x in on_device}
    out = func(*args, **kwargs)
    if not target:
        return out
    return tree_map_only(Tensor, lambda x: given[id(x)] if id(x) in given else OnDevice(x), out)


def _here() -> str:
    """Return the innermost line of the package, as "krylov/bfgs.py:12"."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return "outside" if frame is None else f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_lineno}"


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts synchronisations and launches while active.

    Attributes:
        waits: the number of synchronisations by (phase, kind, line).
        launches: the number of launched operations by (phase, line).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.launches: Counter[tuple[str, str]] = Counter()
        self._phase = "around"
        self._pending: list[tuple[str | None, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self._see)

    def _see(self, func: Any) -> None:
        if func.overloadpacket not in _NO_LAUNCH:
            self._pending.append((None, _here()))

    def note(self, kind: str, *, waits: bool) -> None:
        """Note a synchronisation, or a copy for which the program does not wait."""
        self._pending.append((kind if waits else None, _here()))

    def close(self, phase: str) -> None:
        """Count what was noted since the last call as this phase."""
        for kind, line in self._pending:
            if kind is None:
                self.launches[phase, line] += 1
            else:
                self.waits[phase, kind, line] += 1
        self._pending = []

    def by_line(self) -> list[str]:
        """Return the synchronisations by line, the most frequent first."""
        return [f"{n:5} {' '.join(key)}" for key, n in self.waits.most_common()]

    def phases(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of synchronisations and launches of each phase."""
        names = sorted({phase for phase, *_ in self.waits} | {phase for phase, _ in self.launches})
        return {
            name: (
                sum(n for key, n in self.waits.items() if key[0] == name),
                sum(n for key, n in self.launches.items() if key[0] == name),
            )
            for name in names
        }


@contextlib.contextmanager
def counted() -> Iterator[Count]:
    """Count inside, by phase of the steps."""
    count, lap, begin = Count(), StepLog.lap, StepLog.__init__

    def begun(self: StepLog, comm: Any) -> None:
        count.close("around")
        begin(self, comm)

    def lapped(self: StepLog, phase: str) -> None:
        count.close(phase)
        lap(self, phase)

    _counting.append(count)
    StepLog.lap, StepLog.__init__ = lapped, begun  # type: ignore[method-assign]
    try:
        with count:
            yield count
    finally:
        StepLog.lap, StepLog.__init__ = lap, begin  # type: ignore[method-assign]
        _counting.remove(count)
        count.close("around")


def on_device(x: Any) -> Any:
    """Return tensors, or the parameters and buffers of a module, on the device."""
    if isinstance(x, torch.nn.Module):
        for module in x.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = torch.nn.Parameter(OnDevice(p.detach()), p.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = OnDevice(buffer)
        return x
    return OnDevice(x.detach()).requires_grad_(x.requires_grad)
