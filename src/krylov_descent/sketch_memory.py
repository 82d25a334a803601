"""What a sketch of the rational basis takes, and whether it is to be had: arithmetic and words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from krylov_descent.budget import at_hand, share

ROWS = 400  # m, unless asked for otherwise

# Of m·n numbers while rows are drawn: J, the weights of their own, their gradients (measured: 4.3 to 4.7), and a third
# more, since many small terms may have so many rows beyond m.
_COPIES = 6.25
_TIMED = 100_000  # parameters that steps were timed with (docs/performance.md); of more, nothing is known


def sketch_bytes(rows: int, numel: int, dtype: torch.dtype) -> int:
    """What a sketch of that many rows takes at its peak."""
    return int(_COPIES * rows * numel * dtype.itemsize)


def refusal(
    rows: int, numel: int, dtype: torch.dtype, device: torch.device, budget: int | None, ranks: int
) -> str | None:
    """What to say if a sketch fits neither the budget nor, without one, the memory at hand on all ranks."""
    taken, remedy = sketch_bytes(rows, numel, dtype), "Use basis='krylov', Rational(rows=...) with fewer rows, or"
    said = f"The sketch of basis='rational' takes {taken:,} bytes ({rows} rows of {numel:,} parameters)"
    if budget is not None:
        return f"{said}, more than memory_budget={budget:,}. {remedy} a larger one." if taken > budget else None
    free = at_hand(device)
    if free is None or taken <= ranks * share(free):
        return None
    remedy = f"{remedy} memory_budget={taken} to take it all the same."
    return f"{said}, more than what may be taken of the {free:,} at hand. {remedy}"


def against_rational(numel: int, dtype: torch.dtype, room: int | None) -> str | None:
    """Why not to begin with the rational basis for so many parameters, if only so many bytes may be taken."""
    if dtype != torch.float64:  # docs/integrations.md has figures
        return "basis='rational' was ahead in float64, and in float32 neither basis was"
    if numel > _TIMED:
        return f"basis='rational' was timed up to {_TIMED:,} parameters, and these are {numel:,}"
    taken = sketch_bytes(ROWS, numel, dtype)
    if room is not None and taken > room:
        return f"the sketch of basis='rational' takes {taken:,} bytes ({ROWS} rows), and {max(0, room):,} may be taken"
    return None


def fitting_basis(params: Iterable[Tensor], budget: int | None = None) -> tuple[Literal["krylov", "rational"], str]:
    """Which to begin with where residuals are squared, in a budget or in the memory at hand; if krylov, and why."""
    trained = [p for p in params if p.requires_grad]
    if not trained:
        return "krylov", "no parameter requires a gradient"
    if budget is None and (free := at_hand(trained[0].device)) is not None:
        budget = share(free)
    why_not = against_rational(sum(p.numel() for p in trained), trained[0].dtype, budget)
    return ("rational", "") if why_not is None else ("krylov", why_not)
