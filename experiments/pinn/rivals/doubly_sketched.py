"""DSGNAR of Webb, Jerad & Cartis 2026 (arXiv 2607.02194): Gauss–Newton in two sketches, steps of a set gain.

Letters: f = ½‖ρ‖², J [N, n]. S [m, N] is a count sketch: each residual is added, with random signs, to a few of m sums.
Ω [n, k] has orthonormal columns: k of the cosine transform, the parameters in random order and with random signs. Both
are drawn anew for each step. B = SJΩ = UΣVᵀ, w = ΣUᵀSρ; p(λ) = −ΩV(Σ² + λ)⁻¹w is a step, and λ goes by its length r.
γ(r) is the decrease of f over that of the model, ½Σ w²(Σ² + 2λ)/(Σ² + λ)².

Adaptive ratio: lengths between r/window and r·window are tried, r the last one, and the step is taken at which the
running minimum of γ falls to ``target``, far below 1: steps as long as they may be. Once λ begins to rise, it is ½.

The authors' program was followed in the lengths tried, interpolation, thresholds and the SVD. Deviations:
- lengths are tried in ascending order and those beyond the crossing are left out, which changes no step;
- the weights of the loss terms are not adapted, since the loss of the study is fixed;
- no steps are made in float32 first;
- where lengths vanish, their run ends; here it goes on from length 1 with half the target, down to a hundredth;
- with ``hashes`` 0, m residuals are drawn as for SPRING in place of sums, and no other rows of J are computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.pinn.rivals.least_squares import ALL, LeastSquares, Trainable

_SMALLEST = {torch.float64: 1e-8, torch.float32: 1e-4}  # lengths of a step
_LARGEST = 1e3
_LATE = 0.5  # the ratio aimed at when λ has passed its minimum
_GRACE, _LAST = 80, 30  # steps before that is looked for, and those it is seen by
_LEAST = 1e-2  # ratio to aim at
_NEWTON = 80  # iterations for a λ, at most; a few do


def dsgnar(
    problem: Trainable,
    *,
    seed: int,
    rows: int = 2000,
    columns: int = 2000,
    target: float = 0.075,
    probes: int = 24,
    window: float = 3.0,
    hashes: int = 4,
) -> Iterator[float]:
    """One step at a time, also those that are refused.

    Args:
        problem: what is solved.
        seed: of the sketches.
        rows: m; all residuals as they are if there are no more.
        columns: k; all parameters as they are if there are no more.
        target: the part of the predicted decrease that is to come true.
        probes: lengths that are tried at each step, at most.
        window: how much longer or shorter than the last step they are, at most.
        hashes: sums that a residual is added to; 0 to draw residuals in place of sums.
    """
    squares, generator = LeastSquares(problem), torch.Generator().manual_seed(seed)
    f, radius, iteration, late = squares.value(), 1.0, 0, False
    dampings: list[float] = []
    while math.isfinite(f):
        theta = squares.point()
        smallest = _SMALLEST[theta.dtype]
        J, rho = squares.rows(ALL if hashes else rows, (seed, iteration))
        iteration += 1
        if hashes and len(rho) > rows:
            S = count_sketch(rows, len(rho), hashes, generator, rho)
            J, rho = S @ J, S @ rho
        Omega = cosines(len(theta), columns, generator, rho) if columns < len(theta) else None
        B = J if Omega is None else J @ Omega
        if not bool(B.isfinite().all()):
            return
        model = Model.of(B, rho)
        step = _Steps(squares, theta, f, model, Omega)
        low, high = max(radius / window, smallest), min(radius * window, _LARGEST)
        radius, tried = longest(step, torch.linspace(math.log(low), math.log(high), probes).exp().tolist(), target)
        if tried.gain > 0:
            squares.move(theta, tried.direction)
            f = tried.loss
            dampings.append(tried.damping)
        else:
            squares.move(theta)
            radius = low
            dampings.append(dampings[-1] if dampings else tried.damping)
        yield f
        if radius < 10 * smallest:  # the sketches are too coarse for that ratio, or this is the minimum
            target, radius = target / 2, 1.0
            if target < _LEAST:
                return
        if not late and len(dampings) > _GRACE and rising(dampings[-_LAST:]):
            target, late = max(target, _LATE), True
        if squares.renewed():
            f = squares.value()
    yield math.nan


class Model(NamedTuple):
    """½‖Bp + ρ‖² by the singular values: the step of a length, and what is gained by it."""

    V: Tensor
    squares: Tensor
    w: Tensor

    @classmethod
    def of(cls, B: Tensor, rho: Tensor) -> Model:
        """With a tall B, of the triangle of [B ρ] in its place."""
        if B.shape[0] > B.shape[1]:
            R = torch.linalg.qr(torch.cat([B, rho[:, None]], 1), mode="r").R
            B, rho = R[: B.shape[1], :-1], R[: B.shape[1], -1]
        U, values, Vt = torch.linalg.svd(B, full_matrices=False)
        floor = float(values[0]) * torch.finfo(B.dtype).eps
        return cls(Vt.T, values.clamp(min=max(floor, 1e-150)).square(), values * (U.T @ rho))

    def damping(self, length: float) -> float:
        """λ of the step that is so long; 0 if none is. 1/‖p(λ)‖ is concave: Newton's method comes from below."""
        damping = 0.0
        for _ in range(_NEWTON):
            p = self.w / (self.squares + damping)
            norm = float(p.norm())
            if norm <= length * (1 + 1e-10):
                break
            slope = float(p.square() @ (1 / (self.squares + damping))) / norm**2  # of −log ‖p‖
            damping += (norm / length - 1) / slope
        return damping

    def step(self, damping: float) -> Tensor:
        """p, in the coordinates of B."""
        return -(self.V @ (self.w / (self.squares + damping)))

    def decrease(self, damping: float) -> float:
        """By that step."""
        part = self.w / (self.squares + damping)
        return 0.5 * float(part.square() @ (self.squares + 2 * damping))


class Tried(NamedTuple):
    """A step: γ, the loss after it, λ and the way."""

    gain: float
    loss: float
    damping: float
    direction: Tensor


class _Steps:
    """length → the step."""

    def __init__(self, squares: LeastSquares, theta: Tensor, f: float, model: Model, Omega: Tensor | None) -> None:
        self._squares, self._theta, self._f, self._model, self._Omega = squares, theta, f, model, Omega

    def __call__(self, length: float) -> Tried:
        damping = self._model.damping(length)
        p = self._model.step(damping)
        direction = p if self._Omega is None else self._Omega @ p
        self._squares.move(self._theta, direction)
        loss = self._squares.value()
        gain = (self._f - loss) / max(self._model.decrease(damping), 1e-300)
        return Tried(gain if math.isfinite(gain) else -1.0, loss, damping, direction)


def longest(step: Callable[[float], Tried], lengths: Sequence[float], target: float) -> tuple[float, Tried]:
    """The length at which γ falls below ``target``, and the step; the last length if it does nowhere, or the first."""
    gains: list[float] = []
    below = None
    for i, length in enumerate(lengths):
        tried = step(length)
        gains.append(min([max(-1.0, min(1.0, tried.gain)), *gains[-1:]]))
        if i == 0:
            first = tried
        if below is not None:
            break  # one more than the crossing is needed for slopes there
        if gains[-1] < target:
            if i == 0:
                return length, first
            below = i
    if below is None:
        return length, tried
    t = crossing(gains, below, target)
    length = lengths[below - 1] * (lengths[below] / lengths[below - 1]) ** t
    return length, step(length)


def crossing(values: Sequence[float], i: int, target: float) -> float:
    """Where between i − 1 and i the monotone cubic (Fritsch & Carlson 1980) through falling values is ``target``."""
    secants = [b - a for a, b in itertools.pairwise(values)]

    def slope(at: int) -> float:
        if 0 < at < len(secants):
            a, b = secants[at - 1], secants[at]
            return 2 * a * b / (a + b) if a * b > 0 else 0.0
        if len(secants) == 1:
            return secants[0]
        a, b = (secants[0], secants[1]) if at == 0 else (secants[-1], secants[-2])
        return min(0.0, (3 * a - b) / 2)

    y0, y1, m0, m1 = values[i - 1], values[i], slope(i - 1), slope(i)
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        t = (low + high) / 2
        y = y0 + (y1 - y0) * t * t * (3 - 2 * t) + t * (1 - t) * ((1 - t) * m0 - t * m1)
        low, high = (t, high) if y >= target else (low, t)
    return (low + high) / 2


def rising(history: Sequence[float]) -> bool:
    """Whether the logarithm of these rises, by a line through them: by 1e-4 decades a step, of correlation 0.1."""
    y = torch.tensor([max(x, 1e-300) for x in history], dtype=torch.float64).log10()
    x = torch.arange(len(y), dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    product, xx, yy = float(x @ y), float(x @ x), float(y @ y)
    return product > 1e-4 * xx and product > 0.1 * math.sqrt(xx * yy)


def count_sketch(rows: int, N: int, hashes: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """S [rows, N], sparse, ±1/√hashes at as many places of a column; they may coincide, and are then added."""
    places = torch.randint(rows, (hashes * N,), generator=generator)
    signs = 2 * torch.randint(2, (hashes * N,), generator=generator).to(like.dtype) - 1
    which = torch.arange(N).repeat(hashes)
    return torch.sparse_coo_tensor(
        torch.stack([places, which]), signs / math.sqrt(hashes), (rows, N), check_invariants=True
    ).coalesce()


def cosines(n: int, columns: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Ω [n, columns]: columns of the orthonormal cosine transform, their rows in random order and with random signs."""
    signs = 2 * torch.randint(2, (n, 1), generator=generator).to(like.dtype) - 1
    order = torch.randperm(n, generator=generator)
    frequencies = torch.randperm(n, generator=generator)[:columns]
    angles = (order[:, None].to(torch.float64) + 0.5) * (frequencies.to(torch.float64) * (math.pi / n))
    scale = torch.full((columns,), math.sqrt(2 / n), dtype=torch.float64)
    scale[frequencies == 0] = math.sqrt(1 / n)
    return signs * (angles.cos_() * scale).to(like.dtype)
