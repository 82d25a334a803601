"""Closures as torch.optim.LBFGS takes them: ``backward`` is left out, and the outputs are found from the loss.

Two kinds of tensors may be the outputs: those that a loss function, a square, a norm or a softmax was given; else the
results of the last layers. They must carry the whole gradient, as no part of the loss may go without curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from krylov_descent.distributed.sharded import local_part, whole
from krylov_descent.objective.closure import edge_of, edges_behind, gradients_of, require_dense
from krylov_descent.safety.footprint import same_bits
from krylov_descent.samples.interface import Microbatch

_T = torch.Tensor
_LOSSES: set[Any] = {
    *(F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.cross_entropy, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(F.log_softmax, torch.log_softmax, _T.log_softmax, F.softmax, torch.softmax, _T.softmax),
    *(torch.square, _T.square, torch.norm, _T.norm, torch.linalg.norm, torch.linalg.vector_norm),
}
_POWERS: set[Any] = {torch.pow, _T.pow, _T.__pow__}
_PRODUCTS: set[Any] = {torch.mul, _T.mul, _T.__mul__, torch.dot, _T.dot, torch.matmul, _T.matmul, _T.__matmul__}
_NOTED = _LOSSES | _POWERS | _PRODUCTS
_LAYERS: set[Any] = {
    *(F.linear, F.bilinear, F.embedding, F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.matmul, _T.matmul, _T.__matmul__, torch.bmm, torch.einsum, torch.addmm),
}
_READ_GRAD: Any = getattr(_T, "grad").__get__  # noqa: B009 — a descriptor, for which types have a tensor


class _Call(TorchFunctionMode):
    """Notes what may be the outputs in one call of a closure, and leaves its ``backward`` out.

    Attributes:
        noted: the tensors given to losses, and those that layers returned, in the order of the calls; None for those
            that are not ``wanted``.
        backwards: the number of calls of ``backward``.
    """

    def __init__(self, wanted: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.noted: tuple[list[Tensor | None], list[Tensor | None]] = ([], [])
        self.backwards = 0
        self._wanted = wanted

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():  # what is inside of a compiled function is not seen
            return func(*args, **(kwargs or {}))
        if func is _T.backward:
            self.backwards += 1
            return None
        if self.backwards and func == _READ_GRAD:
            raise ValueError(
                "The closure reads .grad after backward(), which is left out: the optimizer differentiates by itself. "
                "Remove what follows backward(), such as clip_grad_norm_; the gradient's norm is report.grad_norm."
            )
        given = (*args, *(kwargs or {}).values()) if func in _NOTED else ()
        if func in _LOSSES or (func in _PRODUCTS and given[0] is given[1]) or (func in _POWERS and _is_two(given[1])):
            for x in given:
                self._note(0, x)
        result = func(*args, **(kwargs or {}))
        if func in _LAYERS:
            self._note(1, result)
        return result

    def _note(self, kind: int, x: Any) -> None:
        if isinstance(x, Tensor) and torch.is_grad_enabled():  # else it is for display
            keep = self._wanted(kind, len(self.noted[kind])) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
            self.noted[kind].append(x if keep else None)


class Form:
    """How a closure is called, as its first call with a graph showed.

    Attributes:
        needs_outputs: whether outputs must be found if the closure does not return them.
        known: whether the closure has been called with a graph.
    """

    def __init__(self) -> None:
        self.needs_outputs = self.known = False
        self._as_it_is = False
        self._outputs: tuple[int, tuple[int, ...], int] | None = None  # kind, places, and how many were noted
        self._rows = 1
        self._calls = 1  # the number of the next call with a graph
        self._looks = 0

    def call(
        self,
        closure: Callable[[Any], Any],
        batch: Microbatch,
        params: Sequence[Tensor],
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Any:
        """Return what the closure, called in the context ``inside()``, returns without its ``backward``.

        The outputs are added if they are found.

        Raises:
            ValueError: they are not found, or ``backward`` gives other gradients than those of the loss.
        """
        if self._as_it_is:
            with inside():
                return closure(batch.data)
        graph = torch.is_grad_enabled() and params[0].requires_grad
        looks = graph and self._calls == 4**self._looks  # at calls 1, 4, 16, …
        before = [local_part(p.detach(), p).clone() for p in params] if looks else []
        with inside(), _Call(_any if looks else self._is_output) as call:
            result = closure(batch.data)
        if looks and not all(same_bits(local_part(p.detach(), p), x) for p, x in zip(params, before, strict=True)):
            raise ValueError("The closure changes the parameters by itself. Do that between the steps, not inside.")
        alone = isinstance(result, Tensor) and self.needs_outputs
        loss = result[0] if isinstance(result, tuple) and result else result
        # A loss without a graph is that of a masked batch, or a mistake that is told later.
        if graph and isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
            self._calls += 1
            self._looks += looks
            self.known, self._as_it_is = True, not (call.backwards or alone)
            if looks and call.backwards:
                _require_same_gradient(closure, batch, loss, params)
            if alone and (looks or not self._fits(call)):
                if not looks:  # another branch was taken, as by a closure that prints every hundredth loss
                    with inside(), _Call(_any) as call:
                        loss = result = closure(batch.data)
                self._choose(call, loss, batch.samples, params)
        if not (alone and self._outputs):
            return result
        if not self._fits(call):
            return result, (), self._rows  # without a graph, nobody looks at the outputs
        kind, places, _ = self._outputs
        outputs = tuple(x for i in places if (x := call.noted[kind][i]) is not None)
        self._rows = sum(map(_rows, outputs))
        return result, outputs

    @property
    def found(self) -> bool:
        """Whether outputs are found rather than returned."""
        return self._outputs is not None

    def _fits(self, call: _Call) -> bool:
        return self._outputs is not None and len(call.noted[self._outputs[0]]) == self._outputs[2]

    def _choose(self, call: _Call, loss: Tensor, samples: int | None, params: Sequence[Tensor]) -> None:
        """Choose the outputs, or require that those chosen before still carry the whole gradient."""
        if self._outputs is not None and self._fits(call):
            kind, places, _ = self._outputs
            outputs = [x for i in places if (x := call.noted[kind][i]) is not None]
            if (part := outside(loss, outputs, params)) > 0:
                raise _not_found(part)
        else:
            self._outputs = _choose(call, loss, samples, params)

    def _is_output(self, kind: int, place: int) -> bool:
        return self._outputs is not None and kind == self._outputs[0] and place in self._outputs[1]


def _is_two(x: Any) -> bool:
    return isinstance(x, int | float) and x == 2


def _any(kind: int, place: int) -> bool:
    return True


def _require_same_gradient(
    closure: Callable[[Any], Any], batch: Microbatch, loss: Tensor, params: Sequence[Tensor]
) -> None:
    """Call the closure as it is: its .grad must be the gradient of the loss that it returns."""
    closure(batch.data)
    given = [p.grad for p in params]
    for p in params:
        p.grad = None
    own = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    if (part := _difference(own, given)) > 0:
        raise ValueError(
            f"The closure's backward() gives other gradients than those of the loss that it returns: they differ by "
            f"{part:.0%} (by norm). Return the loss that backward() is called on, unscaled (without a GradScaler) and "
            "with all of its terms; leave out clipping, and write L2 regularisation as weight_decay=."
        )


def _choose(
    call: _Call, loss: Tensor, samples: int | None, params: Sequence[Tensor]
) -> tuple[int, tuple[int, ...], int]:
    """Return the kind, the places and the number of the noted tensors that are outputs."""
    left = 1.0
    for kind, noted in enumerate(call.noted):
        found = {i: x for i, x in enumerate(noted) if x is not None and x.requires_grad}
        if samples is not None:
            found = {i: x for i, x in found.items() if x.ndim and len(x) == samples}
        places = _last(found, loss, params, _rows if kind == 0 else _several)
        if not places:
            continue
        left = outside(loss, [found[i] for i in places], params)
        if not left > 0:
            return kind, places, len(noted)
    raise _not_found(left)


def _not_found(part: float) -> ValueError:
    return ValueError(
        f"The closure returns the loss alone, and the outputs behind it were not found: {part:.2g} of the gradient (by "
        "norm) passes through no loss function, square or last layer. Return them: `return loss, outputs` (outputs = "
        "model(x), or the residuals that are squared). Or use KSD(..., curvature='hessian'), which needs the loss "
        "alone; L2 regularisation is weight_decay=."
    )


def _last(
    noted: dict[int, Tensor], loss: Tensor, params: Sequence[Tensor], size: Callable[[Tensor], int]
) -> tuple[int, ...]:
    """Return the places of tensors between the parameters and the loss from which no other of them is computed.

    One that is smaller than another that it is computed from is a sum over samples already, such as a norm.
    """
    edge = {i: edge_of(x) for i, x in noted.items()}
    behind = {i: edges_behind(x) for i, x in noted.items()}
    trained, of_loss = set(map(edge_of, params)), edges_behind(loss)
    between = [i for i in noted if edge[i] in of_loss and behind[i] & trained]
    between = [i for i in between if not any(edge[j] in behind[i] and size(noted[i]) < size(noted[j]) for j in between)]
    last = [i for i in between if not any(edge[i] in behind[j] for j in between)]
    return tuple({edge[i]: i for i in reversed(last)}.values())[::-1]


def _rows(x: Tensor) -> int:
    return len(x) if x.ndim else 1


def _several(x: Tensor) -> int:
    return min(2, x.numel())


def outside(loss: Tensor, outputs: Sequence[Tensor], params: Sequence[Tensor]) -> float:
    """Return the part of ∂loss/∂θ, by norm, outside of Jᵀ ∂loss/∂z of the outputs z; 0 if it is rounding.

    Raises:
        ValueError: a gradient is sparse.
    """
    both = gradients_of(loss, (*params, *outputs), retain_graph=True)
    own = both[: len(params)]
    require_dense(own)
    carried = [(z, d) for z, d in zip(outputs, both[len(params) :], strict=True) if d is not None]
    if not carried:
        return 0.0  # refused where the product is built
    heads, slopes = zip(*carried, strict=True)
    return _difference(own, torch.autograd.grad(heads, params, slopes, retain_graph=True, allow_unused=True))


def _difference(own: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """Return ‖own − other‖ / ‖own‖ of gradients; 0 if it is rounding."""
    pairs = zip(own, other, strict=True)
    left = math.hypot(*(_norm(x if y is None else y if x is None else x - y) for x, y in pairs))
    size = math.hypot(*map(_norm, own))
    noise = max((torch.finfo(x.dtype).eps ** 0.5 for x in own if x is not None), default=0.0)
    return left / size if size > 0 and left > noise * size else 0.0


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(whole(x.detach()).double().norm())
