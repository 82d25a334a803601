"""Which parameters have an exact rule for the Fisher diagonal, and which take the random-sign probe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from krylov_descent.checking.finding import Finding, listed
from krylov_descent.checking.problem import Problem
from krylov_descent.precondition import Fisher
from krylov_descent.stepping import pass_with_statistics


def fisher(problem: Problem) -> Iterator[Finding]:
    """By path of the module."""
    if not problem.evaluation.outputs:
        yield Finding("fisher", "warn", "no preconditioner: the closure returns no outputs to make it of")
        return
    preconditioner = Fisher().prepare()
    _, _, statistics = pass_with_statistics(
        problem.objective, [problem.batch], lambda: preconditioner.start(problem.objective, 0, 0, 0)
    )
    exact: dict[str, bool] = {}
    for i, p in enumerate(problem.parameters.params):
        if i in problem.unused:
            continue
        owner = problem.names.owner(p)
        exact[owner] = exact.get(owner, True) and i in statistics.verdict.trusted
    groups = {
        "exact": [owner for owner, is_exact in exact.items() if is_exact],
        "probe": [owner for owner, is_exact in exact.items() if not is_exact],
    }
    detail = "; ".join(f"{how}: {listed(alike(owners, exact))}" for how, owners in groups.items() if owners)
    yield Finding("fisher", "ok", detail)


def alike(paths: Iterable[str], among: Iterable[str]) -> list[str]:
    """Paths, with those of repeated blocks as one.

    Args:
        paths: to be told.
        among: all paths there are: a pattern stands for all that fit it, or for none.

    Example:
        >>> alike(["layers.0.q", "layers.1.q", "head"], ["layers.0.q", "layers.1.q", "layers.0.norm", "head"])
        ['layers.*.q', 'head']
    """
    paths = list(paths)
    inside, everywhere = Counter(map(_pattern, paths)), Counter(map(_pattern, among))
    told = (_pattern(path) if inside[_pattern(path)] == everywhere[_pattern(path)] > 1 else path for path in paths)
    return list(dict.fromkeys(told))


def _pattern(path: str) -> str:
    """The numbers of blocks left open; those of plain layers in a row, "0" or "features.3", stay."""
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and i < len(parts) - 1 else part for i, part in enumerate(parts))
