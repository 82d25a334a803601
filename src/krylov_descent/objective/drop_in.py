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
from krylov_descent.vectors.devices import wide

_T = torch.Tensor
_NORMS: set[Any] = {
    *(torch.norm, _T.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.dist),
    *(F.pairwise_distance, torch.abs, _T.abs, _T.__abs__, torch.sqrt, _T.sqrt),
}
_LOSSES: set[Any] = {
    *(F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, F.cross_entropy, F.poisson_nll_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.softplus, F.logsigmoid, torch.cosh, _T.cosh),
    *(F.log_softmax, torch.log_softmax, _T.log_softmax, F.softmax, torch.softmax, _T.softmax),
    *(torch.square, _T.square, *_NORMS),
}
_POWERS: set[Any] = {torch.pow, _T.pow, _T.__pow__}
_MATRIX: set[Any] = {
    *(torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm, torch.mv, _T.mv, torch.bmm, _T.bmm),
    *(torch.einsum, torch.addmm, torch.baddbmm),
}
_PRODUCTS: set[Any] = {torch.mul, _T.mul, _T.__mul__, torch.dot, _T.dot, torch.matmul, _T.matmul, _T.__matmul__}
_NOTED = _LOSSES | _POWERS | _PRODUCTS
_LAYERS: set[Any] = {
    *(F.linear, F.bilinear, F.embedding, F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, *_MATRIX),
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
        self._norms: dict[int, Any] = {}

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
                "Remove what follows backward(), such as clip_grad_norm_; the gradient's norm is report.grad_norm, and "
                "derivatives by the inputs are torch.autograd.grad(u, x, create_graph=True)."
            )
        given = (*args, *(kwargs or {}).values()) if func in _NOTED or func in _MATRIX else ()
        if func in _LOSSES or (func in _PRODUCTS and given[0] is given[1]) or (func in _POWERS and _is_two(given[1])):
            for x in given:
                self._note(0, x, id(x) in self._norms)
        result = func(*args, **(kwargs or {}))
        if func in _LAYERS:
            self._note(1, result, func in _MATRIX and sum(map(_computed, given)) > 1)
        elif func in _LOSSES and self._wanted is _any:
            self._norms[id(result)] = result
        return result

    def _note(self, kind: int, x: Any, never: bool) -> None:
        """Note a tensor; the square of a norm is one of what the norm was given, and a product of two is no layer."""
        if isinstance(x, Tensor) and torch.is_grad_enabled() and not x.is_complex():  # else it is for display
            odd = never or torch._C._functorch.is_functorch_wrapped_tensor(x)
            self.noted[kind].append(x if self._wanted(kind, len(self.noted[kind])) and not odd else None)


def _computed(x: Any) -> bool:
    """Whether a tensor is computed from parameters, and is not one itself or a view of one."""
    return isinstance(x, Tensor) and x.requires_grad and not (x if x._base is None else x._base).is_leaf


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
        self._new = True

    def begin_step(self) -> None:
        """Look at the next call with a graph: another term may be part of the loss."""
        self._new = True

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
        compares = graph and self._calls == 4**self._looks  # at calls 1, 4, 16, …
        looks = compares or (graph and self._new)
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
            self._looks += compares
            self._new = False
            self.known, self._as_it_is = True, not (call.backwards or alone)
            if compares and call.backwards:
                _require_same_gradient(closure, batch, loss, params)
            if alone and (looks or not self._fits(call)):
                if not looks:  # another branch was taken, as by a closure that prints every hundredth loss
                    with inside(), _Call(_any) as call:
                        loss = result = closure(batch.data)
                self._choose(call, loss, batch.samples, params)
        if not (alone and self._outputs):
            return result
        if not self._fits(call):
            # Without a graph, nobody looks at the outputs.
            return result if batch.samples is not None else (result, (), self._rows)
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
        """Choose the outputs anew, unless those chosen before still carry the whole gradient."""
        if self._outputs is not None and self._fits(call):
            kind, places, _ = self._outputs
            outputs = [x for i in places if (x := call.noted[kind][i]) is not None and x.requires_grad]
            if len(outputs) == len(places) and not outside(loss, outputs, params) > 0:
                return
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
    leaves: list[Tensor] = [node.variable for node, _ in edges_behind(loss) if hasattr(node, "variable")]
    kept = [leaf.grad for leaf in leaves]
    again = closure(batch.data)
    again = again[0] if isinstance(again, tuple) else again
    given = [p.grad for p in params]
    for p in params:
        p.grad = None
    for leaf, grad in zip(leaves, kept, strict=True):
        leaf.grad = grad
    if isinstance(again, Tensor) and not torch.equal(again.detach(), loss.detach()):
        return  # a random closure, which is told later
    own = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    if (part := _difference(own, given)) > 0:
        raise ValueError(
            f"The closure's backward() gives other gradients than those of the loss that it returns: they differ by "
            f"{part:.1%} (by norm). Return the loss that backward() is called on, unscaled (without a GradScaler) and "
            "with all of its terms; leave out clipping, and write L2 regularisation as weight_decay=."
        )


def _choose(
    call: _Call, loss: Tensor, samples: int | None, params: Sequence[Tensor]
) -> tuple[int, tuple[int, ...], int]:
    """Return the kind, the places and the number of the noted tensors that are outputs.

    The loss must be curved in them; where it is linear in the last ones, those behind them are tried. The absolute
    value has no curvature in any: then the first that carry the gradient are taken.
    """
    left, flat = 1.0, None
    for kind, noted in enumerate(call.noted):
        found = {i: x for i, x in enumerate(noted) if x is not None and x.requires_grad}
        if samples is not None:
            found = {i: x for i, x in found.items() if x.ndim and len(x) == samples}
        while places := _last(found, loss, params, _rows if kind == 0 else _several):
            outputs = [found[i] for i in places]
            if (left := outside(loss, outputs, params)) > 0:
                break
            if _curved(loss, outputs):
                return kind, places, len(noted)
            flat = flat or (kind, places, len(noted))
            found = {i: x for i, x in found.items() if i not in places}
    if flat is None:
        raise _not_found(left)
    return flat


def _curved(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether the loss has a second derivative in the outputs; a gradient of zero or NaN does not tell."""
    slopes = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True, materialize_grads=True)
    if not any(bool(d.any()) for d in slopes) or not all(bool(d.isfinite().all()) for d in slopes):
        return True
    along = [(d * irregular(d)).sum() for d in slopes if d.requires_grad]
    if not along:
        return False
    second = torch.autograd.grad(sum(along[1:], along[0]), outputs, retain_graph=True, allow_unused=True)
    return any(h is not None and bool(h.any()) for h in second)


def irregular(x: Tensor) -> Tensor:
    """Return irregular weights in the shape of x, so that a weighted sum does not cancel."""
    return torch.linspace(1, 2, max(1, x.numel()), dtype=x.dtype, device=x.device)[: x.numel()].view(x.shape).sin()


def _not_found(part: float) -> ValueError:
    return ValueError(
        "The closure returns the loss alone, and the outputs behind it were not found: a part of the gradient "
        f"({part:.2%} by norm) passes through no loss function, square or last layer. Return them: `return loss, "
        "outputs` (outputs = model(x), or the residuals that are squared). Or use KSD(..., curvature='hessian'), which "
        "needs the loss alone; L2 regularisation is weight_decay=."
    )


def _last(
    noted: dict[int, Tensor], loss: Tensor, params: Sequence[Tensor], size: Callable[[Tensor], int]
) -> tuple[int, ...]:
    """Return the places of tensors between the parameters and the loss from which no other of them is computed.

    One that is smaller than another that it is computed from is a sum over samples already, such as a norm.
    """
    of_loss, trained = edges_behind(loss), set(map(edge_of, params))
    edge = {i: edge_of(x) for i, x in noted.items()}
    between = {i: x for i, x in noted.items() if edge[i] in of_loss}
    while True:
        inner = edges_behind(*between.values())
        last = {i: edges_behind(x) for i, x in between.items() if edge[i] not in inner}
        sums = {
            i
            for i, behind in last.items()
            if any(size(between[i]) < size(x) and edge[j] in behind for j, x in between.items())
        }
        if not sums:
            break
        between = {i: x for i, x in between.items() if i not in sums}
    return tuple({edge[i]: i for i, behind in last.items() if behind & trained}.values())


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
    return 0.0 if x is None else float(wide(whole(x.detach())).norm())
