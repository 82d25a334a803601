"""The command ``krylov-descent doctor``."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

from krylov_descent import __version__
from krylov_descent.checking.device import CHECKS, Row, diagnosed
from krylov_descent.checking.finding import counted
from krylov_descent.checking.problem import first_line
from krylov_descent.cli.options import Doctor
from krylov_descent.cli.screen import say
from krylov_descent.cli.target import UsageError

_ABOVE = f"{'':<24}{'differs from CPU by':^20}{'seconds on':^16}{'a step':^18}"
_HEAD = f"{'':<8}{'check':<16}{'curvature':>10}{'loss':>9}{'device':>9}{'CPU':>8}{'operators':>11}{'reads':>7}"


def examine(command: Doctor) -> int:
    """Run the checks, print the report, and return 1 if one failed."""
    device = _device(command.device)
    if unknown := sorted(set(command.skip) - CHECKS.keys()):
        raise UsageError(f"There is no check {unknown[0]!r}.", f"The checks are {', '.join(CHECKS)}.")
    say(f"{_surroundings(device)}\n\n{_ABOVE}\n{_HEAD}")
    begin = time.perf_counter()
    rows = []
    for row in diagnosed(device, command.skip):
        rows.append(row)
        say(_line(row))
    passed, skipped, failed = ([row.name for row in rows if row.status == s] for s in ("ok", "skipped", "FAILED"))
    skipped += command.skip
    took = f"{time.perf_counter() - begin:.0f} seconds"
    say(f"\n{len(passed)} passed, {len(skipped)} skipped, {len(failed)} failed on {device} in {took}.")
    if failed:
        say(f"FAILED: {', '.join(failed)}. Please paste all of this into an issue.")
    elif device.type != "cpu":
        say("Please paste this into an issue: no device is known to work before someone says so.")
    return 1 if failed else 0


def _surroundings(device: torch.device) -> str:
    """Return versions and the device, in two lines."""
    module: Any = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else platform.machine()
    cuda = f"CUDA {torch.version.cuda}, " if device.type == "cuda" else ""
    return (
        f"krylov-descent {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.platform(terse=True)}\n"
        f"{device}: {name}, {cuda}float32 products {torch.get_float32_matmul_precision()!r}, "
        f"{counted(torch.get_num_threads(), 'thread')}"
    )


def _device(name: str | None) -> torch.device:
    """Return a device on which torch can make a tensor, with its number."""
    found = name or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        device = torch.zeros(1, device=found).device
        torch.get_device_module(device)
        return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"torch cannot use the device {str(found)!r}: {first_line(error)}",
            "Install a build of torch for it, or give --device cpu.",
        ) from error


def _line(row: Row) -> str:
    head = f"{row.status:<8}{row.name:<16}"
    if not row.differences:
        return head + " ".join(row.notes)
    (curvature, loss), (device, cpu), (operators, reads) = row.differences, row.seconds, row.counts
    notes = [f"{'':<24}{note}" for note in row.notes]
    numbers = f"{curvature:>10.0e}{loss:>9.0e}{device:>9.2f}{cpu:>8.2f}{operators:>11,}{reads:>7,}"
    return "\n".join([head + numbers, *notes])
