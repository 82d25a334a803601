"""Helpers of several integrations: eval mode during a step, the residuals of a loss, notes in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from krylov_descent.report import StepReport

LOGGER = logging.getLogger("krylov_descent.integrations")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and each of its modules back as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class Residuals:
    """Collects the residuals that a physics-informed network gives to its loss functions, while a closure runs."""

    def __init__(self) -> None:
        self._collected: list[Tensor] | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """Yield the list of the residuals that are seen inside."""
        collected: list[Tensor] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    def see(self, residual: Tensor) -> Tensor:
        """Return the residual to go on with: a node of its own if collected, as one may be computed from another."""
        if self._collected is None or not residual.requires_grad:
            return residual
        plain = residual.as_subclass(Tensor)
        plain = plain.view_as(plain)
        self._collected.append(plain)
        return plain


def log_notes(report: StepReport) -> None:
    """Log the notes of the first step, for runs whose reports nobody reads."""
    if report.iteration == 0 and report.notes:
        LOGGER.warning("First step: %s", " ".join(report.notes))


def numbers(report: StepReport) -> dict[str, float]:
    """Return the numbers of a step that loggers show beside its loss."""
    return {
        "grad_norm": report.grad_norm,
        "search_loss": report.search_loss_after,
        "evaluations": float(report.inner_evaluations),
        "accepted": float(report.accepted),
        "seconds": sum(report.seconds.values()),
    }
