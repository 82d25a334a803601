"""Gauss–Newton product ÷ the hand-written one, and ÷ those of other libraries, on the same batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import hand, rivals
from benchmarks.problems import Problem
from benchmarks.timing import Ratio, interleaved, ratio
from krylov_descent.curvature import CURVATURES, CurvatureProduct

RIVALS: dict[str, Callable[[Problem], Callable[[Tensor], Tensor]]] = {
    "curvlinops": rivals.curvlinops_product,
    "BackPACK": rivals.backpack_product,
    "torch.func jvp + vjp": rivals.func_product,
    "torch.func linearize + vjp": rivals.linearize_product,
}
NAMED = ("curvlinops", "BackPACK", "torch.func jvp + vjp")


def without_onednn(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same by other kernels: those of oneDNN have no forward derivative for an LSTM."""

    def run(v: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return product(v)

    return run


def defer_error(
    make: Callable[[Problem], Callable[[Tensor], Tensor]], problem: Problem, v: Tensor
) -> Callable[[Tensor], Tensor] | str:
    """A product that works, without the oneDNN kernels if need be, or why there is none."""
    why = ""
    for onednn in (True, False):
        try:
            # Attention has no second derivative by the other kernels.
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=onednn):
                warnings.simplefilter("ignore")
                bare = make(problem)
                bare(v)
        except (RuntimeError, NotImplementedError) as error:
            why = why or f"fails: {str(error).splitlines()[0][:60]}"
            continue
        return bare if onednn else without_onednn(bare)
    return why


def measure(problem: Problem, rounds: int) -> dict[str, Ratio | str]:
    """Our time ÷ each other's; in place of a ratio, why another cannot."""
    objective = problem.objective()
    v = torch.randn(objective.parameters.numel)
    v /= v.norm()
    ours = CurvatureProduct(CURVATURES["ggn"], objective, [problem.microbatch], out=torch.empty_like(v))
    expected = ours(v).clone()
    products: dict[str, Callable[[Tensor], Tensor]] = {"ours": ours}
    failures: dict[str, Ratio | str] = {}
    if problem.name in hand.WRITTEN:
        products["hand-written"] = hand.HandWritten(problem).cache(problem.x)
    for name, make in RIVALS.items():
        made = defer_error(make, problem, v)
        if isinstance(made, str):
            failures[name] = made
        else:
            products[name] = made
    for name, product in products.items():
        with sdpa_kernel(SDPBackend.MATH):
            off = float((product(v) - expected).norm() / expected.norm())
        assert off < 1e-4, f"{problem.name}: {name} is off by {off}"

    def timed(product: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def run() -> None:
            with sdpa_kernel(SDPBackend.MATH):
                product(v)

        return run

    candidates = {name: timed(product) for name, product in products.items()}
    candidates["one gradient"] = lambda: objective.value_and_gradient([problem.microbatch])
    seconds = interleaved(candidates, rounds)
    ratios: dict[str, Ratio | str] = {
        name: ratio(seconds["ours"], times) for name, times in seconds.items() if name != "ours"
    }
    # The best of those the issue of speed is settled by.
    best = [min(seconds[name][i] for name in NAMED if name in seconds) for i in range(rounds)]
    ratios["best of curvlinops, BackPACK, torch.func jvp + vjp"] = ratio(seconds["ours"], best)
    return {**ratios, **failures}
