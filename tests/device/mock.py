"""The device "mock" of device.cpp: built once, then registered for the rest of a process."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

SOURCE = Path(__file__).with_name("device.cpp")


class Counts(NamedTuple):
    """Operators launched on the device, reads by the host, and the values in them."""

    launches: int
    reads: int
    values: int


def library() -> Path:
    """Return the built library, of this source and this torch; a second process that asks waits for the first."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "krylov-descent" / "device"
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"{key}.so"
    with (cache / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    from torch.utils import cpp_extension

    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        out = Path(folder) / "device.so"
        line = [*compiler, *include, str(SOURCE), "-o", str(out), *libraries]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)}\n{done.stderr}")
        out.rename(built)


@functools.cache
def register() -> torch.device:
    """Make "mock" a device of this process, for good, and return it."""
    untyped: Any = torch
    untyped.ops.load_library(library())
    untyped.utils.rename_privateuse1_backend("mock")
    untyped._register_device_module("mock", _module())
    untyped.utils.generate_methods_for_privateuse1_backend()
    untyped.ops.mock_device.register()
    return torch.device("mock", 0)


def _module() -> types.ModuleType:
    """Return ``torch.mock``, which torch asks for what it asks of ``torch.cuda``."""
    ops: Any = torch.ops.mock_device
    state: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": ops.seed,
        "manual_seed_all": ops.seed,
        "get_rng_state": lambda device=0: ops.random_state(),
        "set_rng_state": lambda state, device=0: ops.set_random_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    module = types.ModuleType("torch.mock")
    vars(module).update(state)
    return module


def counts() -> Counts:
    """Return the counts since the device was registered."""
    return Counts(*torch.ops.mock_device.counts())


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Make the device refuse tensors in float64, as Apple's GPUs do."""
    torch.ops.mock_device.set_has_float64(False)
    try:
        yield
    finally:
        torch.ops.mock_device.set_has_float64(True)
