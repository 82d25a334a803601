"""The footprint of a closure: buffers of the modules that it calls, torch's generators, the fast path.

All of it is noted in this thread alone: models that other threads run meanwhile are neither noted nor restored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Footprint:
    """The modules that ran inside its context in this thread, and their buffers from before.

    Args:
        device: the device of the parameters, whose generators are noted.

    Attributes:
        modules: the modules that ran, by identity.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with Footprint() as seen:
        ...     y = norm(torch.randn(5, 2))
        >>> seen.changed(lambda module, buffer: buffer)
        ['.num_batches_tracked', '.running_mean', '.running_var']
        >>> seen.restore()
        >>> int(norm.num_batches_tracked)
        0
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.modules: dict[int, nn.Module] = {}
        self._buffers: dict[int, tuple[nn.Module, bool, dict[str, tuple[Tensor, Tensor] | None]]] = {}
        self._restore_generators = generators([] if device is None else [device])
        self._thread = threading.get_ident()
        self._handle: Any = None

    def __enter__(self) -> Footprint:
        self._handle = register_module_forward_pre_hook(self._before_forward)  # process-wide
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _before_forward(self, module: nn.Module, args: object) -> None:
        if self._handle is not None and threading.get_ident() == self._thread:
            self.note(module)

    def note(self, module: nn.Module) -> None:
        """Note a module that is about to run, and copy its buffers and those of its parts."""
        self.modules[id(module)] = module
        if id(module) in self._buffers:
            return
        for part in module.modules():
            kept = {key: None if x is None else (x, x.detach().clone()) for key, x in part._buffers.items()}
            self._buffers.setdefault(id(part), (part, part.training, kept))

    def changed(self, name: Callable[[nn.Module, str], str]) -> list[str]:
        """Return the names of buffers whose values have changed; one that was created since is none of them."""
        moved = [
            name(module, f".{key}")
            for module, _, kept in self._buffers.values()
            for key, pair in kept.items()
            if pair is not None and (_buffer(module, key) is not pair[0] or not same_bits(*pair))
        ]
        return sorted(set(moved))

    def restore(self) -> None:
        """Restore buffers, modes and generators, and end the context and this thread's claim on the fast path."""
        self._stop()
        _FAST_PATH.release()
        self._restore_generators()
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Restore the buffers and modes of all noted modules."""
        for module, training, kept in self._buffers.values():
            if module.training != training:
                module.training = training
            for key in [key for key, _ in module._buffers.items() if key not in kept]:
                del module._buffers[key]
            for key, pair in kept.items():
                before = None if pair is None else pair[0]
                if _buffer(module, key) is not before:
                    module._buffers[key] = before
                if pair is not None and not same_bits(*pair):
                    _set(*pair)


def _buffer(module: nn.Module, key: str) -> Tensor | None:
    return dict(module._buffers.items()).get(key)  # a scripted module's are no dict


def _set(buffer: Tensor, value: Tensor) -> None:
    """Set a buffer by .data, so that graphs that hold it stay valid."""
    if buffer.shape == value.shape:
        buffer.data.copy_(value)
    else:
        buffer.data = value.clone()


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether all entries are equal; NaN equals NaN. Those of meta and nested tensors are not looked at."""
    if x.is_meta or x.is_nested:
        return True
    if x.shape != y.shape:
        return False
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    return bool(((x == y) | ((x != x) & (y != y))).all())


def generators(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function that restores torch's generators: the CPU's, and those of devices that have one."""
    cpu, states = torch.get_rng_state(), []
    for device in devices:
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "get_rng_state"):
            states.append((module, device, module.get_rng_state(device)))

    def restore() -> None:
        torch.set_rng_state(cpu)
        for module, device, state in states:
            module.set_rng_state(state, device)

    return restore


class _FastPath:
    """The switch of nn.TransformerEncoder's inference kernels, which torch has once per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._enabled = True

    def claim(self) -> None:
        """Switch it off until this thread and all others have released it."""
        with self._lock:
            if not self._threads:
                self._enabled = torch.backends.mha.get_fastpath_enabled()
            self._threads.add(threading.get_ident())
            torch.backends.mha.set_fastpath_enabled(False)

    def release(self) -> None:
        """End this thread's claim, if it has one."""
        with self._lock:
            if threading.get_ident() not in self._threads:
                return
            if self._threads == {threading.get_ident()}:
                torch.backends.mha.set_fastpath_enabled(self._enabled)
            self._threads.discard(threading.get_ident())


_FAST_PATH = _FastPath()


@contextmanager
def same_path_as_with_gradients() -> Iterator[None]:
    """Disable nn.TransformerEncoder's inference-only kernels, so that losses are comparable between passes."""
    _FAST_PATH.claim()
    try:
        yield
    finally:
        _FAST_PATH.release()
