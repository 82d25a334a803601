"""What a basis that adapts remembers from step to step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Carry:
    """What a builder that adapts hands to itself at the next step: plain numbers, which a state can hold.

    Attributes:
        damping: λ of the flow.
        length: η, of the last piece of it that was followed.
        scale: what makes of the last step the rest of its direction, 1/η − 1; 0 if it was not along the flow.
        damped: λ of the last damped step.
        lost: steps in a row that took nothing.
        waits: the share of such steps lately.
        rows: m, if more are wanted than at first.
        longest: of the pieces that might be followed in the last step; 0 for what is usual.
        fell: the loss on C at the last candidate that was taken, of that before.
    """

    damping: float
    length: float
    scale: float
    damped: float
    lost: float = 0.0
    waits: float = 0.0
    rows: float = 0.0
    longest: float = 0.0
    fell: float = 1.0
