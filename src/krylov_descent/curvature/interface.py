"""The interface of a kind of curvature on one micro-batch: a graph built once, and products on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from krylov_descent.objective.closure import Evaluation

# The graph of a torch.autograd.Function marked once_differentiable ends in one of these nodes: a product would silently
# lack the paths through it.
_ENDS = ("torch::autograd::DelayedError", "torch::autograd::Error")


class MicrobatchGraph(ABC):
    """One kind of curvature on one micro-batch.

    The product over B is norm(W, N) · Σ_b term_weight(w_b) · product_b, by default the mean: w_b is the weight of a
    micro-batch's mean, W the sum of weights and N the number of samples.
    """

    product_cost: ClassVar[float]
    """The cost of one product, in gradients per sample."""
    first_order: ClassVar[bool] = True
    """Whether products need only the Jacobian of the network."""

    @abstractmethod
    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def product(self, v: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return this micro-batch's product by v, one tensor per parameter."""

    @staticmethod
    def term_weight(weight: float) -> float:
        """Return the factor of a micro-batch in the sum over B, from the weight of its mean."""
        return weight

    @staticmethod
    def norm(total_weight: float, samples: float) -> float:
        """Return the factor of the whole sum."""
        return 1 / total_weight


def nodes_behind(tensors: Sequence[Tensor | None]) -> Iterator[Node]:
    """Yield every operation that led to the tensors, once."""
    stack = [get_gradient_edge(x).node for x in tensors if x is not None and x.requires_grad]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)


def refuse_cut(derivatives: Sequence[Tensor | None]) -> None:
    """Refuse derivatives whose graph is cut by a once_differentiable function.

    Raises:
        RuntimeError: the graph is cut; autograd would raise the same type if it reached the cut.
    """
    if any(node.name() in _ENDS for node in nodes_behind(derivatives)):
        raise RuntimeError(
            "the backward pass of a torch.autograd.Function is marked once_differentiable, so that it cannot be "
            "differentiated twice: write it with operations that autograd knows."
        )
