"""Blocks of the Kronecker-factored Gauss–Newton matrix: running means, damped inverses, and solves with them.

Letters: A [in + 1, in + 1] and G [out, out] the factors of a layer's matrix V [out, in + 1], λ the damping plus the
weight decay. A ⊗ G + λI is approximated by (A + π√λ I) ⊗ (G + √λ/π I), where π² = (tr A/dim A)/(tr G/dim G) keeps the
cross terms small (Martens & Grosse 2015, section 6.3). D⁻¹V = (G + √λ/π I)⁻¹ V (A + π√λ I)⁻¹.

A block is a frozen dataclass, part of the preconditioner's state; its tensors are never written to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from krylov_descent.vectors.devices import summed, wide
from krylov_descent.vectors.products import numbers_of

B = TypeVar("B", bound="KroneckerBlock")
F = TypeVar("F", bound="FactoredBlock")
L = TypeVar("L", bound="LayerBlock")

_LOST = 1e-3  # relative error of an inverse beyond which it is computed in float64


@dataclass(eq=False)
class FactorSums:
    """Sums over micro-batches whose means are A and G.

    Attributes:
        inputs: the sum for A.
        outputs: the sum for G.
        calls: the total weight of the micro-batches that called the layer, 0-D.
    """

    inputs: Tensor
    outputs: Tensor
    calls: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all sums, in the same order on every rank."""
        return [self.inputs, self.outputs, self.calls]


@dataclass(eq=False)
class DiagonalSums:
    """Sums over micro-batches of the squared pull-back X∘X to a parameter."""

    diagonal: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all sums."""
        return [self.diagonal]


Sums = FactorSums | DiagonalSums


@dataclass(frozen=True, eq=False, kw_only=True)
class KroneckerBlock(ABC):
    """The curvature of one parameter, or of a layer's weight and bias together.

    Attributes:
        kind: the name of the class in a saved state.
        begun: the number of the block's first update.
        alone: whether it is computed from pull-backs to the parameter itself, not from calls of a layer.
    """

    kind: str
    begun: int = 1
    alone: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def sums(p: Tensor, biased: bool, dtype: torch.dtype) -> Sums:
        """Return zero sums for this parameter; ``biased`` if the layer's bias is part of the block."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Yield the running means."""

    def trace(self) -> float:
        """Return the trace of the block, the product of its tensors' traces."""
        return math.prod(traces(self.tensors()))

    @abstractmethod
    def averaged(self: B, fresh: KroneckerBlock, e: float) -> B:
        """Return e·self + (1 − e)·fresh."""

    @abstractmethod
    def continues(self, old: KroneckerBlock) -> bool:
        """Whether ``old`` is an earlier mean of the same statistics."""

    @abstractmethod
    def belongs(self, i: int, params: Sequence[Tensor]) -> bool:
        """Whether the block's shapes fit parameter i."""

    @abstractmethod
    def placed(self: B, device: torch.device, dtype: torch.dtype) -> B:
        """Return the block on another device or in another dtype."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DiagonalBlock(KroneckerBlock):
    """E[X∘X] of a parameter outside of layers, where X is the pull-back to it."""

    kind: str = "diagonal"
    diagonal: Tensor
    alone: ClassVar[bool] = True

    @staticmethod
    def sums(p: Tensor, biased: bool, dtype: torch.dtype) -> DiagonalSums:
        """Return zeros [p]."""
        return DiagonalSums(torch.zeros(p.numel(), dtype=dtype, device=p.device))

    @classmethod
    def mean(cls, sums: DiagonalSums, total_weight: float) -> DiagonalBlock:
        """Return the mean over the weight W of all micro-batches."""
        return cls(diagonal=sums.diagonal.div_(total_weight))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the diagonal."""
        yield self.diagonal

    def averaged(self, fresh: KroneckerBlock, e: float) -> DiagonalBlock:
        """Return the average, in the memory of ``fresh``."""
        assert isinstance(fresh, DiagonalBlock)
        return replace(self, diagonal=fresh.diagonal.lerp_(self.diagonal, e))

    def continues(self, old: KroneckerBlock) -> bool:
        """Whether ``old`` is diagonal, too."""
        return isinstance(old, DiagonalBlock)

    def belongs(self, i: int, params: Sequence[Tensor]) -> bool:
        """Whether there is one number for each entry of parameter i."""
        return self.diagonal.shape == (params[i].numel(),)

    def placed(self, device: torch.device, dtype: torch.dtype) -> DiagonalBlock:
        """Return the block with its diagonal moved."""
        return replace(self, diagonal=self.diagonal.to(device, dtype))


@dataclass(frozen=True, eq=False, kw_only=True)
class FactoredBlock(KroneckerBlock):
    """The Kronecker product A ⊗ G.

    Attributes:
        inputs: A.
        outputs: G.
        bias: the index of the bias that is the last column of V, or None.
        inputs_inverse: (A + π√λ I)⁻¹, once it was used.
        outputs_inverse: (G + √λ/π I)⁻¹.
    """

    inputs: Tensor
    outputs: Tensor
    bias: int | None = None
    inputs_inverse: Tensor | None = None
    outputs_inverse: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield A and G."""
        yield self.inputs
        yield self.outputs

    def averaged(self: F, fresh: KroneckerBlock, e: float) -> F:
        """Return the average, in the memory of ``fresh``, with the inverses of ``self``."""
        assert isinstance(fresh, FactoredBlock)
        A, G = fresh.inputs.lerp_(self.inputs, e), fresh.outputs.lerp_(self.outputs, e)
        return replace(self, inputs=A, outputs=G)

    def continues(self, old: KroneckerBlock) -> bool:
        """Whether ``old`` has the same kind and the same bias."""
        return type(old) is type(self) and isinstance(old, FactoredBlock) and old.bias == self.bias

    def belongs(self, i: int, params: Sequence[Tensor]) -> bool:
        """Whether the factors and inverses have the shapes of parameter i's matrix, and the bias its length."""
        p, j = params[i], self.bias
        if p.ndim < 2 or (j is not None and not (j < len(params) and params[j].numel() == len(self.outputs))):
            return False
        expected = self.sums(p.new_empty(p.shape, device="meta"), j is not None, torch.float32)
        assert isinstance(expected, FactorSums)
        pairs = ((self.inputs, expected.inputs), (self.outputs, expected.outputs))
        inverses = ((self.inputs_inverse, expected.inputs), (self.outputs_inverse, expected.outputs))
        return all(x is None or x.shape == y.shape for x, y in (*pairs, *inverses))

    def placed(self: F, device: torch.device, dtype: torch.dtype) -> F:
        """Return the block with its factors and inverses moved."""
        A, G = self.inputs.to(device, dtype), self.outputs.to(device, dtype)
        inverses = [None if x is None else x.to(device, dtype) for x in (self.inputs_inverse, self.outputs_inverse)]
        return replace(self, inputs=A, outputs=G, inputs_inverse=inverses[0], outputs_inverse=inverses[1])

    def inverted(self: F, damping: float) -> F:
        """Return the block with inverses for λ = ``damping`` > 0."""
        return inverted({0: self}, {0: damping}, {0: traces(self.tensors())})[0]

    def solved(self, W: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return D⁻¹V as the parts of the weight and of the bias, for V = [W b]."""
        A, G = self.inputs_inverse, self.outputs_inverse
        assert A is not None
        assert G is not None
        V = W.view(len(G), -1)
        if b is None:
            return G @ V @ A, None
        X = G @ torch.cat([V, b[:, None]], dim=1) @ A
        return X[:, :-1], X[:, -1]


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerBlock(FactoredBlock):
    """A dense or convolutional layer."""

    kind: str = "layer"

    @staticmethod
    def sums(p: Tensor, biased: bool, dtype: torch.dtype) -> FactorSums:
        """Return zeros [in + 1, in + 1] and [out, out]."""
        width = p.numel() // p.shape[0] + biased
        return _factor_sums((width, width), p.shape[0], p.device, dtype)

    @classmethod
    def mean(cls: type[L], sums: FactorSums, total_weight: float, bias: int | None, calls: float) -> L | None:
        """Return A averaged over the micro-batches that called the layer, and G over all; None without calls."""
        if not calls > 0:
            return None
        return cls(inputs=sums.inputs.div_(calls), outputs=sums.outputs.div_(total_weight), bias=bias)


@dataclass(frozen=True, eq=False, kw_only=True)
class TableBlock(LayerBlock):
    """An embedding, whose A is diagonal: the frequency with which each row is looked up."""

    kind: str = "table"

    @staticmethod
    def sums(p: Tensor, biased: bool, dtype: torch.dtype) -> FactorSums:
        """Return zeros [rows] and [out, out]."""
        return _factor_sums((p.shape[0],), p.shape[1], p.device, dtype)

    def solved(self, W: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return D⁻¹W, row by row."""
        A, G = self.inputs_inverse, self.outputs_inverse
        assert A is not None
        assert G is not None
        return W.view(len(A), -1) @ G * A[:, None], None


@dataclass(frozen=True, eq=False, kw_only=True)
class PulledBlock(FactoredBlock):
    """A matrix outside of layers: G = E[XXᵀ], A = E[XᵀX]/E[tr XᵀX], where X is the pull-back to it."""

    kind: str = "pulled"
    alone: ClassVar[bool] = True

    @staticmethod
    def sums(p: Tensor, biased: bool, dtype: torch.dtype) -> FactorSums:
        """Return zeros [in, in] and [out, out]."""
        width = p.numel() // p.shape[0]
        return _factor_sums((width, width), p.shape[0], p.device, dtype)

    @classmethod
    def mean(cls, sums: FactorSums, total_weight: float) -> PulledBlock:
        """Return G averaged over all micro-batches, and A divided by its trace."""
        A = sums.inputs
        return cls(inputs=A.div_(traces([A])[0] or 1.0), outputs=sums.outputs.div_(total_weight))


AnyBlock = LayerBlock | TableBlock | PulledBlock | DiagonalBlock


def _factor_sums(inputs: tuple[int, ...], outputs: int, device: torch.device, dtype: torch.dtype) -> FactorSums:
    shapes = (inputs, (outputs, outputs), ())
    return FactorSums(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))


def traces(tensors: Iterable[Tensor]) -> list[float]:
    """Return the trace of each matrix, or diagonal matrix stored as a vector, read at once."""
    return numbers_of([summed(x.diagonal() if x.ndim == 2 else x) for x in tensors])


def inverted(
    blocks: Mapping[int, F], damping: Mapping[int, float], known: Mapping[int, Sequence[float]]
) -> dict[int, F]:
    """Return the blocks with inverses (A + π√λ I)⁻¹ and (G + √λ/π I)⁻¹ for their λ > 0 and the known traces of A and G.

    Example:
        >>> block = LayerBlock(inputs=torch.ones(2), outputs=torch.full((1, 1), 4.0))
        >>> found = inverted({0: block}, {0: 4.0}, {0: (2.0, 4.0)})[0]
        >>> found.inputs_inverse, found.outputs_inverse
        (tensor([0.5000, 0.5000]), tensor([[0.1250]]))
    """
    tried: list[_Inverse] = []
    for i, block in blocks.items():
        A, G, root = block.inputs, block.outputs, math.sqrt(damping[i])
        a, g = known[i][0] / len(A), known[i][1] / len(G)
        if a > 0 and g > 0:
            pi = math.sqrt(a) / math.sqrt(g)
            tried += [_inverse(A, known[i][0], root * pi), _inverse(G, known[i][1], root / pi)]
        else:  # a layer without influence so far: damping alone
            tried += [_inverse(torch.zeros_like(M), 0.0, root) for M in (A, G)]
    failed = numbers_of([x.failed for x in tried])
    found = iter([x.again() if f else x.inverse for x, f in zip(tried, failed, strict=True)])
    return {i: replace(block, inputs_inverse=next(found), outputs_inverse=next(found)) for i, block in blocks.items()}


class _Inverse(NamedTuple):
    """An inverse, whether it failed (not zero, 0-d), and how to compute it then."""

    inverse: Tensor
    failed: Tensor
    again: Callable[[], Tensor]


def _inverse(M: Tensor, trace: float, added: float) -> _Inverse:
    """Return (M + added·I)⁻¹, computed in float64 where float32 is too inaccurate."""
    if M.ndim == 1:
        return _Inverse((M + added).reciprocal_(), M.new_zeros(()), lambda: M)
    condition = 1 + trace / added  # upper bound
    dtype = M.dtype if condition * torch.finfo(M.dtype).eps < _LOST else torch.float64
    damped = _plus(M, added, dtype)
    L, failed = torch.linalg.cholesky_ex(damped)
    return _Inverse(_from_factor(L, M), failed, lambda: _raised_inverse(M, added))


def _raised_inverse(M: Tensor, added: float) -> Tensor:
    """Return (M + added·I)⁻¹ in float64, with more added while rounding leaves a negative eigenvalue."""
    damped = _plus(M, added, torch.float64)
    L, failed = torch.linalg.cholesky_ex(damped)
    while int(failed):
        added *= 10
        damped.diagonal().add_(added)
        L, failed = torch.linalg.cholesky_ex(damped)
    return _from_factor(L, M)


def _plus(M: Tensor, added: float, dtype: torch.dtype) -> Tensor:
    damped = (wide(M) if dtype == torch.float64 else M).clone()
    damped.diagonal().add_(added)
    return damped


def _from_factor(L: Tensor, M: Tensor) -> Tensor:
    # Row-major, as a checkpoint restores it: products with the column-major result would round differently.
    return torch.cholesky_inverse(L).mT.to(M).contiguous()
