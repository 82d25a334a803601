"""How a trial ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """How a trial ended.

    Attributes:
        ended: "improved", "level" (moved, and no better), "unchanged", "refused" (an error of this package, with its
            remedy), "raised as given" (the closure's own), "same bits" (as if nothing had happened) or another word.
        lost: what was promised and not kept, one phrase each.
        times: how often the fault came in this trial.
        told: what is worth a look: the message of a refusal, curves of a long run.
    """

    ended: str = "unchanged"
    lost: list[str] = field(default_factory=list)
    times: int = 1
    told: dict[str, Any] = field(default_factory=dict)
