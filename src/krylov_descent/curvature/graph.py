"""What every kind of curvature is on one micro-batch: a graph built once, and products on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from krylov_descent.closure import Evaluation


class MicrobatchGraph(ABC):
    """One kind of curvature on one micro-batch.

    The product over B is norm(W, N) · Σ_b share(w_b) · product_b, with weights w_b of the micro-batches' means, W their
    sum and N the number of samples; by default the mean.
    """

    product_cost: ClassVar[float]
    """Of one product, in gradients per sample."""
    first_order: ClassVar[bool] = True
    """Whether products need no more of the network than its Jacobian."""

    @abstractmethod
    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def product(self, v: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """v → this micro-batch's product, one tensor per parameter."""

    @staticmethod
    def share(weight: float) -> float:
        """The factor of this micro-batch in the sum over B, from the weight of its mean."""
        return weight

    @staticmethod
    def norm(total_weight: float, samples: float) -> float:
        """The factor of the whole sum."""
        return 1 / total_weight
