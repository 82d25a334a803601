"""A rational basis: steps (H + λ)⁻¹g in place of polynomials in H, from a sketch of the curvature.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, λ damping, φ [P] the flow's
direction, μ momentum, η length of a step along it, α [P] its acceleration, c weight decay. P stands for this rank's
part of the parameters; ``comm.sum`` completes inner products.

Deviations from the paper:

1. Its subspace is span{(D⁻¹H)^k D⁻¹g}; this one is spanned by (H + λ)⁻¹g and needs no D. By Woodbury, a step costs
   one product by Jᵀ after one factorisation of J.
2. The search begins at the best of some candidates, and goes on only where none is better than staying.

Two families of candidates:

- The flow, ηφ + ½η²α with φ = argmin ‖Jφ + ρ‖² + λ‖φ − μφ_prev‖²: a Gauss–Newton direction of all rows that were drawn
  in the last 1/(1 − μ) steps or so, of which only a short piece is followed, around its bend. All residuals then shrink
  alike, whatever their curvature, where steps that lower the loss as much as they can satisfy the stiff ones first and
  end in a valley.
- Damped steps −(JᵀJ + λ)⁻¹g for a grid of λ, for when the flow leads nowhere: the whole gradient, so that enough
  damping always descends.

Where no piece of the flow lowers the loss, φ is what the rows of a few sketches want, and not all: the parameters stay,
and φ gathers more rows. Only if that has not helped for a while are damped steps looked at. Where many of the last
steps had to wait like this, sketches get more rows.

λ of the flow follows η: larger where only very short pieces lower the loss, smaller where long ones do. Pieces are an
eighth at most, and up to a half where the loss has fallen along such as far as all residuals together can: by (1 − η)².
A sketch of all rows, whose direction needs no others, may be followed further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed import together
from krylov_descent.flow.factored import Factored, acceleration, damped_steps, flow_direction, new_damping
from krylov_descent.flow.sketch import ROWS, Sketch, Sketcher, finite_rows, refusal, require_plain, sketch_bytes
from krylov_descent.krylov.basis import Subspace, Turn, spanned_basis
from krylov_descent.krylov.candidates import Carry, Family, Starts
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.storage import Rows

_FIRST, _LEAST, _MOST = 1e-6, 1e-18, 1e-5  # λ of the flow, relative to the trace of K: at first, and its bounds
_SHORTEST = 2.0**-14
_LONGEST = 2.0**-3  # longer pieces lower the loss faster at first, and end higher, unless it falls as the flow says;
_LONGEST_EVER = 0.5  # then up to this,
_LONGER, _AS_SAID = 1.26, 0.85  # twice as long in three steps; how much of the logarithm of the fall is as it says
_LONGEST_WHOLE, _LEAST_WHOLE = 2.0, 1e-14  # where all rows are known: long pieces, which too little damping spoils
_LENGTHS = 5  # halvings and doublings of the last length that are looked at, at most
_WAIT = 8  # steps in a row that gather rows, at most
_LATELY = 0.1  # weight of a step in the share of those that gather
_OFTEN = 0.25  # a share beyond which sketches have too few rows
_GROWTH, _MOST_ROWS = 1.5, 4  # of m at a time, and in all
_ROOM = 2**30  # bytes that a sketch may grow to where no budget says so; not what is free, or runs would depend on it

_DAMPED, _RATIO = 9, 3.0  # damped steps: dampings, and the factor between them
_FIRST_DAMPED, _LEAST_DAMPED, _MOST_DAMPED = 1e-3, 1e-12, 1e2


@dataclass(frozen=True)
class Rational:
    """Settings of the rational basis; the defaults are the same for every problem of `experiments pinn`.

    Args:
        rows: m, rows of the sketch at first: more cost O(m²n + m³) and about 5 m·n numbers of memory while they are
            drawn, fewer see less of the curvature. Where the flow waits for rows too often, m grows, to four times as
            many at most, as far as ``memory_budget`` allows (1 GiB if there is none).
        momentum: μ, how much of the last direction is kept where the rows drawn now say nothing.

    Example:
        >>> from krylov_descent import KSD, Rational
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], basis=Rational(rows=200))
    """

    rows: int = ROWS
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"Rational(rows={self.rows!r}): must be a whole number ≥ 1.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Rational(momentum={self.momentum!r}): must be a number in [0, 1).")


def reduced_curvature(J: Tensor, V: Rows, objective: Objective) -> Tensor:
    """H̄ = (JVᵀ)ᵀJVᵀ and the decay's part, float64 [r, r] for the r rows of V."""
    comm, rows = objective.comm, V.tensor()
    JV = comm.sum(J @ rows.T).double()
    H = JV.T @ JV
    if any(objective.parameters.decay):
        for i, v in enumerate(rows):
            w = torch.zeros_like(v)
            objective.add_decay(w, v)
            H[i] += comm.sum(V.dots(w))
    return H


class RationalBuilder:
    """Builds the span of the flow's direction and bend, damped steps, the gradient and the previous step."""

    announced = True  # nothing is done in parts

    def __init__(self, options: Rational, memory_budget: int | None) -> None:
        self._options, self._budget = options, memory_budget
        self._sketcher = Sketcher(options.rows)
        self._V: Rows | None = None

    def __call__(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        precondition: Callable[[Tensor], Tensor],
        g: Tensor,
        d_prev: Tensor | None,
        turn: Turn,
    ) -> Subspace:
        """The subspace and where to begin in it; ``precondition`` is not used."""
        comm = objective.comm
        most = self._most_rows(objective)
        self._sketcher.rows = min(max(self._options.rows, int(turn.carry.rows if turn.carry else 0)), most)
        drawn = self._sketcher.draw(objective, batches, (turn.seed, turn.iteration))
        sketch = finite_rows(drawn, comm)
        factored = Factored(sketch.J, comm)
        usual = _longest(turn.carry, kept=d_prev is not None)
        longest, least = (_LONGEST_WHOLE, _LEAST_WHOLE) if sketch.whole else (usual, _LEAST)
        carry = self._bounded(factored.trace, longest, max(least, torch.finfo(g.dtype).eps ** 2), turn.carry)
        carry, note = (carry, "") if sketch.whole else _asked(carry, self._sketcher.rows, most)
        carry = replace(carry, longest=0.0 if sketch.whole else longest)
        note = drawn.note or note
        phi, alpha = self._flow(objective, sketch, factored, d_prev, carry)
        patient = carry.lost + 1 < _WAIT
        dampings = carry.damped * _RATIO ** (torch.arange(_DAMPED, dtype=torch.float64, device="cpu") - _DAMPED // 2)
        damped = () if patient else tuple(damped_steps(factored, g, dampings))
        vectors = [v for v in (phi, alpha, *damped, g, d_prev) if v is not None]
        room = min(_DAMPED + 4, objective.parameters.count)
        if self._V is None or not self._V.holds(room, g):
            self._V = Rows(room, g)
        V = self._V
        J = sketch.J
        subspace = spanned_basis(lambda V: reduced_curvature(J, V, objective), vectors, V, room, comm)

        def in_basis(d: Tensor) -> Tensor:
            c = comm.sum(V.dots(d)).to("cpu", torch.float64)
            return c if bool(c.isfinite().all()) else torch.zeros_like(c)

        lengths = _lengths(carry.length, longest)
        towards, bend = in_basis(phi), in_basis(alpha)
        flow = Family(
            torch.stack([eta * towards + eta**2 / 2 * bend for eta in lengths]),
            lengths.index(carry.length),
            tuple(self._after(carry, eta) for eta in lengths),
        )
        shorter = max(carry.length / 2, _SHORTEST)
        if patient:
            # φ is remembered as if it were the last step, and taken up as it is.
            waiting = replace(carry, length=shorter, scale=1.0, lost=carry.lost + 1)
            starts = Starts((flow,), waiting, kept=towards)
        else:
            lost = replace(carry, length=shorter, scale=0.0, lost=0)
            rescue = Family(
                torch.stack([in_basis(d) for d in damped]),
                _DAMPED // 2,
                tuple(replace(lost, damped=lam) for lam in dampings.tolist()),
            )
            starts = Starts((flow, rescue), replace(lost, damped=float(dampings[-1])))
        finite = subspace.finite and len(J) == len(drawn.J)
        return replace(subspace, starts=starts, finite=finite, note=note)

    def _flow(
        self, objective: Objective, sketch: Sketch, factored: Factored, d_prev: Tensor | None, carry: Carry
    ) -> tuple[Tensor, Tensor]:
        """φ and α, with the decay as curvature c and residual cθ: (JᵀJ + λ + c)φ = −Jᵀρ − cθ + λμφ_prev.

        Where groups decay differently, in coordinates √(λ + c)φ, in which the damping of all of them is 1.
        """
        lam, decay, here = carry.damping, objective.parameters.decay, objective.point()
        carried = None if d_prev is None or not carry.scale else d_prev * (carry.scale * self._options.momentum)
        c, pull = torch.zeros_like(here), torch.zeros_like(here)
        if any(decay):
            objective.add_decay(c, torch.ones_like(here))
            objective.add_decay(pull)
            carried = -pull / (lam + c) if carried is None else (lam * carried - pull) / (lam + c)
        unlike, damping = len(set(decay)) > 1, lam + max(decay, default=0.0)
        if unlike:
            root, damping = (lam + c).sqrt(), 1.0
            factored = Factored(sketch.J / root, objective.comm)
            carried = None if carried is None else carried * root
        lams = torch.tensor([damping], dtype=torch.float64, device="cpu")
        phi = flow_direction(factored, sketch.rho, carried, lams)

        def change() -> Tensor:
            objective.move_to(here + carry.length * (phi / root if unlike else phi))
            changed = sketch.change()
            objective.move_to(here)
            return changed

        alpha = acceleration(factored, phi, carry.length, change, lams)
        return (phi / root, alpha / root) if unlike else (phi, alpha)

    @staticmethod
    def _after(carry: Carry, eta: float) -> Carry:
        """After a piece of length η; what is left of the direction is (1 − η)φ."""
        damping = new_damping(carry.damping, eta)
        return replace(carry, damping=damping, length=eta, scale=max(0.0, 1 / eta - 1), lost=0)

    @staticmethod
    def _bounded(trace: float, longest: float, least: float, carry: Carry | None) -> Carry:
        """What is remembered, within what this curvature can feel."""
        if not 0 < trace < math.inf:
            return Carry(1.0, _LONGEST, 0.0, 1.0, _WAIT)
        if carry is None:
            return Carry(_FIRST * trace, min(0.5, longest), 0.0, _FIRST_DAMPED * trace, 0)
        damping = min(max(carry.damping, least * trace), _MOST * trace)
        damped = min(max(carry.damped, _LEAST_DAMPED * trace), _MOST_DAMPED * trace)
        halvings = max(0, math.ceil(math.log2(carry.length / longest)))  # lengths stay halvings of each other
        return replace(carry, damping=damping, damped=damped, length=carry.length / 2.0**halvings)

    def _most_rows(self, objective: Objective) -> int:
        """How many a sketch may come to have: in the budget, and no more than there are parameters to tell apart."""
        parameters, first = objective.parameters, self._options.rows
        room = _ROOM if self._budget is None else self._budget
        taken = torch.tensor(float(sketch_bytes(1, parameters.numel, parameters.dtype)), device="cpu")
        fitting = room // int(objective.comm.max(taken))  # ranks may have parts of other lengths, and must agree
        return max(first, min(_MOST_ROWS * first, fitting, parameters.count))

    @property
    def rows(self) -> Rows | None:
        """V of the last step."""
        return self._V

    def require_room(self, objective: Objective) -> None:
        """Before anything runs.

        Raises:
            ValueError: the budget, or at first the memory at hand, is too small for the sketch, or parameters are on a
                mesh.
        """
        parameters, rows = objective.parameters, self._options.rows
        require_plain(objective.comm, parameters.numel)

        def check() -> None:
            ranks = objective.comm.ranks
            if said := refusal(rows, parameters.numel, parameters.dtype, parameters.device, self._budget, ranks):
                raise ValueError(said)

        if self._budget is not None:
            check()  # the same on all ranks
        elif self._V is None:  # later, what is at hand lacks what the last sketch took
            together(objective.comm, check)

    def announce(self, objective: Objective, batches: Sequence[Microbatch]) -> None:
        """Nothing to say."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy of an optimizer needs no copy of its workspace, and is of other parameters.
        return {**self.__dict__, "_V": None, "_sketcher": Sketcher(self._options.rows)}


def _longest(carry: Carry | None, *, kept: bool) -> float:
    """Of the pieces that may be followed now: more where the longest was followed and all residuals shrank alike.

    Not after a step that was undone, or not taken: ``kept`` is False then.
    """
    if carry is None:
        return _LONGEST
    longest = max(carry.longest, _LONGEST)
    followed_longest = kept and not carry.lost and 2 * carry.length > longest  # lengths are halvings
    said = (1 - min(carry.length, _LONGEST_EVER)) ** 2
    if followed_longest and 0 < carry.fell <= said**_AS_SAID:
        return max(_LONGEST, min(_LONGER * longest, _LONGEST_EVER))
    return max(_LONGEST, longest / 2)


def _asked(carry: Carry, rows: int, most: int) -> tuple[Carry, str]:
    """With more rows from the next step on, where too many of the last ones had to gather some; and a note of that."""
    waits = carry.waits + _LATELY * (float(carry.lost > 0) - carry.waits)
    if waits <= _OFTEN or rows >= most:
        return replace(carry, waits=waits), ""
    more = min(round(_GROWTH * rows), most)
    note = f"Many of the last steps had to gather rows: sketches have {more} from now on."
    return replace(carry, waits=0.0, rows=more), note


def _lengths(length: float, longest: float) -> list[float]:
    """Halvings and doublings of a length, longest first."""
    tried = (length * 2.0**-k for k in range(-_LENGTHS, _LENGTHS + 1))
    return [eta for eta in tried if _SHORTEST <= eta <= longest]
