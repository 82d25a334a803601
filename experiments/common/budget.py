"""How long a run may take: seconds, or gradients over the training set, which no machine can make slower."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Literal

Clock = Literal["wall", "cpu"]

#: The seconds of the process do not run while it waits for a core, so that runs beside other work stay comparable. What
#: processes share otherwise, caches and memory, still slows them.
CLOCKS: Mapping[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class Budget:
    """An amount of "seconds" or "gradients".

    Example:
        >>> Budget.parse("5m")
        Budget(amount=300.0, unit='seconds')
        >>> str(Budget.parse("100g"))
        '100g'
    """

    amount: float
    unit: Literal["seconds", "gradients"]

    @staticmethod
    def parse(text: str) -> Budget:
        """From "60s", "5m", "1h", or "100g" for gradients over the training set.

        Raises:
            ValueError: anything else.
        """
        match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(s|m|min|h|g|ge)", text.strip())
        if match is None or not float(match[1]) > 0:
            raise ValueError(
                f"--budget {text!r} is not understood. Give seconds (60s), minutes (5m), hours (1h), "
                "or gradients over the training set (100g)."
            )
        amount = float(match[1])
        if match[2] in ("g", "ge"):
            return Budget(amount, "gradients")
        return Budget(amount * _SECONDS[match[2]], "seconds")

    def spent(self, seconds: float, gradients: float) -> float:
        """What of it is spent."""
        return seconds if self.unit == "seconds" else gradients

    def __str__(self) -> str:
        return f"{self.amount:.12g}{'s' if self.unit == 'seconds' else 'g'}"
