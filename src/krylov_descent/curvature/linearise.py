"""The outputs of one micro-batch as a linear function of the parameters, by reverse mode only.

Letters: z outputs, J = ∂z/∂θ at the current θ, u in the space of z.
Jᵀu is linear in u, so differentiating it with respect to u gives J: v → Jv costs one backward pass through the
graph of a backward pass, with no forward mode needed (many operations have none). Both graphs are built once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from krylov_descent.curvature.interface import refuse_cut


class Linearisation:
    """v → Jv and u → Jᵀu of one micro-batch, on graphs that are kept for all products."""

    def __init__(self, outputs: Sequence[Tensor], params: Sequence[Tensor]) -> None:
        self.outputs = tuple(outputs)
        self._params = tuple(params)
        # The value of u is irrelevant: Jᵀu is linear in it.
        self._u = tuple(torch.zeros_like(z, requires_grad=True) for z in self.outputs)
        Jt_u = torch.autograd.grad(self.outputs, self._params, self._u, create_graph=True, allow_unused=True)
        refuse_cut(Jt_u)
        # Edges of the graph, since the tensors would keep P numbers for every micro-batch.
        self._Jt_u = [(i, get_gradient_edge(x)) for i, x in enumerate(Jt_u) if x is not None and x.requires_grad]

    def jvp(self, v: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """v → Jv, one tensor per output."""
        if not self._Jt_u:
            return tuple(torch.zeros_like(z) for z in self.outputs)
        return torch.autograd.grad(
            [x for _, x in self._Jt_u],
            self._u,
            [v[i] for i, _ in self._Jt_u],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    def vjp(self, u: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """u → Jᵀu, one tensor per parameter; None where no output depends on it."""
        return torch.autograd.grad(self.outputs, self._params, u, retain_graph=True, allow_unused=True)


def pull_back_each(
    outputs: Sequence[Tensor], params: Sequence[Tensor], us: Sequence[Sequence[Tensor]]
) -> Iterator[Sequence[Tensor | None]]:
    """Yield Jᵀu for each u, by a batched backward pass, or by one for each if an operation cannot be batched."""
    if len(us) > 1:
        stacked = [torch.stack(u) for u in zip(*us, strict=True)]
        try:
            with warnings.catch_warnings():  # of operations that are batched by a loop, which is right
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                rows = torch.autograd.grad(
                    outputs, params, stacked, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except RuntimeError:
            pass
        else:
            yield from ([None if x is None else x[k] for x in rows] for k in range(len(us)))
            return
    for u in us:
        yield torch.autograd.grad(outputs, params, u, retain_graph=True, allow_unused=True)
