"""Points that the user's function draws, the same from step to step until the loss on other points parts from theirs.

A = B = C, so that losses compare from step to step and a step can reuse one graph. The next draw serves as held-out
points: nothing was trained on them. If the loss there is well above the training loss, the network has learnt the
points and not the equation, and these points, or more if that happens again and again, are the next to train on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from krylov_descent.samples.interface import Choice, Microbatch, SamplePolicy
from krylov_descent.samples.loading import same_values, tensor_bits

_EVERY = 5  # steps between two looks at the held-out points: a look costs less than a tenth of a step
_PARTED = 2.0  # ratio of held-out to training loss, above which points are drawn anew
_OFTEN = 3  # looks in a row with such a ratio, after which there are twice as many points
_DOUBLINGS = 3  # at most: eight times the points

Draw = Callable[[int, torch.Generator], Any]


@dataclass(frozen=True)
class PointsState:
    """The state of drawn points.

    Attributes:
        draw: the number of the draw, from 0.
        doublings: how often the number of points was doubled.
        parted: the number of looks in a row at which the held-out loss was well above the training loss.
    """

    draw: int = 0
    doublings: int = 0
    parted: int = 0


class Points(SamplePolicy):
    """Draws the points of a loss that is a mean over a domain, and draws others when the network overfits them.

    The points stay the same from step to step, A = B = C. Every fifth step also computes the loss on the next draw,
    ``report.details["held_out"]``. If that is more than twice the training loss, the step continues on those points;
    the third time in a row it draws twice as many, up to eight times ``size``. ``report.notes`` says so, and
    ``report.details["draw"]`` has the number of the draw. Losses of different draws are not compared.

    The points depend on ``seed`` and the number of the draw, which the optimizer remembers, so that a new Points
    continues a resumed run. With several ranks, all of them draw the same points, and each takes an equal share of
    every tensor; up to ranks − 1 points of a tensor are left out.

    Args:
        draw: ``draw(n, generator)`` returns about n points as the closure takes them: a tensor, or a tuple, list or
            dict of tensors, for example one for each term. The first dimension counts the points. The generator is
            that of the CPU.
        size: n at first.
        seed: any integer.

    Raises:
        ValueError: if an argument is out of range; in a step, if ``draw`` returns no points.

    Example:
        >>> import torch
        >>> from krylov_descent import GaussNewtonFlow, Points
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1)).double()
        >>> def draw(n, generator):
        ...     return 3 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
        >>> def closure(t):  # u' = −u with u(0) = 1
        ...     t = t.requires_grad_()
        ...     u = 1 + t * model(t)
        ...     (rate,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        ...     r = rate + u
        ...     return r.square().mean(), r
        >>> optimizer, points = GaussNewtonFlow(model.parameters()), Points(draw, 200)
        >>> reports = [optimizer.step(closure, points) for _ in range(30)]
        >>> reports[0].set_sizes
        {'A': 200, 'B': 200, 'C': 200}
        >>> reports[-1].loss < 1e-3 * reports[0].loss and reports[-1].details["held_out"] < 1e-3 * reports[0].loss
        True
    """

    State = PointsState

    def __init__(self, draw: Draw, size: int, *, seed: int = 0) -> None:
        if not callable(draw):
            raise ValueError(
                f"draw is a {type(draw).__name__}, not a function. Pass draw(n, generator), which returns n points; "
                "for points that never change, write a closure without arguments and leave out Points."
            )
        for name, value, least in (("size", size, 1), ("seed", seed, None)):
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                bound = "" if least is None else f" ≥ {least}"
                raise ValueError(f"{name} is {value!r}: pass a whole number{bound}, as in Points(draw, 3000, seed=0).")
        self._draw, self._size, self._seed = draw, size, seed
        self._drawn: dict[tuple[int, int], Any] = {}
        self._fingerprint: int | None = None

    def __repr__(self) -> str:
        return f"Points({self._size} points, seed={self._seed})"

    def choose(self, iteration: int, state: Any, *, shard: int, of_shards: int, **_: object) -> Choice:
        """Return the same points for the same state."""
        return Choice(PointSets(self, state, shard, of_shards), state, details={"draw": float(state.draw)})

    def reviewed(
        self, iteration: int, choice: Choice, loss: float, value: Callable[[Iterable[Microbatch]], float]
    ) -> Choice:
        """Return other points at every fifth step if the loss on them is well above that on the present ones."""
        sets, state = choice.sets, choice.state
        assert isinstance(sets, PointSets)
        if (iteration + 1) % _EVERY or not math.isfinite(loss):
            return choice
        held_out = value(sets.next.a)
        details = {**choice.details, "held_out": held_out}
        if not 0 <= _PARTED * loss < held_out < math.inf:
            return replace(choice, state=replace(state, parted=0), details=details)
        more = state.parted + 1 >= _OFTEN and state.doublings < _DOUBLINGS
        state = PointsState(state.draw + 1, state.doublings + more, 0 if more else state.parted + 1)
        sets = replace(sets, state=state)
        times = f"{held_out / loss:.3g} times" if loss > 0 else "above"
        new = f"{sets.sizes['A']:,} points" if more else "other points"
        note = f"The loss on other points is {times} that on the training points: {new} from now on."
        return Choice(sets, state, (*choice.notes, note), {**details, "draw": float(state.draw)})

    def fingerprint(self) -> int:
        """Return a number made of the first points."""
        if self._fingerprint is None:
            leaves = pytree.tree_leaves(self.draw_anew(PointsState()))
            self._fingerprint = sum((i + 1) * tensor_bits(x) for i, x in enumerate(leaves)) % 2**52
        return self._fingerprint

    def drawn(self, state: PointsState) -> Any:
        """Return the points of a state; those drawn last are kept."""
        key = (state.draw, self.size(state))
        if key not in self._drawn:
            points = self.draw_anew(state)
            self._drawn = {k: self._drawn[k] for k in list(self._drawn)[-1:]} | {key: points}
        return self._drawn[key]

    def draw_anew(self, state: PointsState) -> Any:
        """Return the points of a state.

        Raises:
            ValueError: the user's function returned no points.
        """
        generator = torch.Generator("cpu").manual_seed((self._seed * 1_000_003 + state.draw) % 2**63)
        points = self._draw(self.size(state), generator)
        leaves = pytree.tree_leaves(points)
        for x in leaves or [points]:
            if not isinstance(x, Tensor) or x.ndim == 0 or len(x) == 0:
                what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise ValueError(
                    f"draw({self.size(state)}, generator) returned {what} where points are needed. Return a tensor of "
                    "points [n, dimensions], or a tuple, list or dict of such tensors."
                )
        return points

    def size(self, state: PointsState) -> int:
        """Return the number of points to draw."""
        return self._size << state.doublings


@dataclass(frozen=True, eq=False)
class PointSets:
    """The rank's share of the points of one draw, as A, B and C."""

    policy: Points
    state: PointsState
    shard: int
    of_shards: int

    covers_all = searches_all = searches_b = True
    holds_out = False
    grows = False
    probe = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of points to draw, for each set."""
        return dict.fromkeys("ABC", self.policy.size(self.state))

    @property
    def b(self) -> Sequence[Microbatch]:
        """All points as one micro-batch; how many samples they are, only the closure knows."""
        return (Microbatch(pytree.tree_map(self._share, self.policy.drawn(self.state)), None),)

    a = a_in_parts = statistics = c = b

    @property
    def next(self) -> PointSets:
        """The next draw, of as many points."""
        return replace(self, state=replace(self.state, draw=self.state.draw + 1))

    def warn_if_random(self) -> None:
        """Refuse a function that draws other points for the same generator.

        Raises:
            ValueError: it does.
        """
        if not same_values(self.policy.drawn(self.state), self.policy.draw_anew(self.state)):
            raise ValueError(
                "draw(n, generator) returned different points for the same generator, so that a run could not be "
                "resumed. Pass the generator to torch: torch.rand(n, 2, generator=generator)."
            )

    def _share(self, x: Tensor) -> Tensor:
        if self.of_shards == 1:
            return x
        n = len(x) // self.of_shards
        if n == 0:
            raise ValueError(
                f"draw returned a tensor of {len(x)} points, too few for {self.of_shards} ranks. Return at least one "
                "for each rank."
            )
        return x.detach()[n * self.shard : n * (self.shard + 1)].requires_grad_(x.requires_grad)
