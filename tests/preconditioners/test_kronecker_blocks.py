"""Blocks of the Kronecker preconditioner: means, what they continue and belong to, inverses and solves, all dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.distributed import SingleProcess
from krylov_descent.preconditioners.kronecker import KroneckerState, averaged
from krylov_descent.preconditioners.kronecker_blocks import (
    AnyBlock,
    DiagonalBlock,
    DiagonalSums,
    FactorSums,
    KroneckerBlock,
    LayerBlock,
    PulledBlock,
    TableBlock,
)
from krylov_descent.preconditioners.statistics import BLOCKS, ParameterRole
from krylov_descent.vectors.parameters import ParameterVector
from tests.least_squares import F64

PARAMS: Sequence[Tensor] = [torch.ones(3, 4, dtype=F64), torch.ones(3, dtype=F64)]


def spd(n: int, seed: int) -> Tensor:
    X = torch.randn(n, 2 * n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return X @ X.T / n


def blocks() -> dict[str, AnyBlock]:
    """Of a parameter [3, 4], which for a table has rows."""
    return {
        "layer": LayerBlock(inputs=spd(4, 0), outputs=spd(3, 1)),
        "layer with a bias": LayerBlock(inputs=spd(5, 2), outputs=spd(3, 3), bias=1),
        "table": TableBlock(inputs=spd(3, 4).diagonal().clone(), outputs=spd(4, 5)),
        "pulled": PulledBlock(inputs=spd(4, 6), outputs=spd(3, 7)),
        "diagonal": DiagonalBlock(diagonal=spd(12, 8).diagonal().clone()),
    }


def tensors(block: KroneckerBlock) -> list[Tensor]:
    return [x.clone() for x in block.tensors()]


NAMES = list(blocks())
FACTORED = NAMES[:-1]


def test_sums_have_the_shapes_of_means() -> None:
    p = PARAMS[0]
    for name, block in blocks().items():
        sums = type(block).sums(p, name == "layer with a bias", torch.float32)
        means = tensors(block)
        assert [x.shape for x in sums.tensors()][: len(means)] == [x.shape for x in means], name
        assert all(x.dtype == torch.float32 and not x.any() for x in sums.tensors())
    assert LayerBlock.sums(torch.ones(3, 2, 5, 5), True, F64).inputs.shape == (51, 51)  # a convolution


def test_means_of_sums() -> None:
    """A over the weight of what called the layer, or over its trace; G and diagonals over all."""
    A, G, d = spd(4, 0), spd(3, 1), torch.arange(12.0, dtype=F64)

    def sums(calls: float) -> FactorSums:
        return FactorSums(A.clone(), G.clone(), torch.tensor(calls, dtype=F64))

    layer = LayerBlock.mean(sums(2.0), 5.0, bias=1, calls=2.0)
    assert layer is not None
    assert (layer.bias, layer.begun, layer.inputs_inverse) == (1, 1, None)
    torch.testing.assert_close([*layer.tensors()], [A / 2, G / 5])
    assert type(TableBlock.mean(sums(2.0), 5.0, None, 2.0)) is TableBlock
    assert LayerBlock.mean(sums(0.0), 5.0, bias=1, calls=0.0) is None  # nothing called it
    torch.testing.assert_close([*PulledBlock.mean(sums(0.0), 5.0).tensors()], [A / A.trace(), G / 5])
    nothing = PulledBlock.mean(FactorSums(torch.zeros(4, 4), torch.zeros(3, 3), torch.zeros(())), 5.0)
    assert not any(x.any() for x in nothing.tensors())
    torch.testing.assert_close(DiagonalBlock.mean(DiagonalSums(d.clone()), 5.0).diagonal, d / 5)


@pytest.mark.parametrize("name", NAMES)
def test_traces(name: str) -> None:
    block = blocks()[name]
    dense = block.diagonal.diag() if isinstance(block, DiagonalBlock) else undamped(block)
    assert block.trace() == pytest.approx(float(dense.trace()))


def undamped(block: LayerBlock | PulledBlock) -> Tensor:
    A, G = block.inputs, block.outputs
    return torch.kron(A.diag(), G) if A.ndim == 1 else torch.kron(G, A)


@pytest.mark.parametrize("name", FACTORED)
def test_solves_are_those_of_the_dense_matrix(name: str) -> None:
    """(G + √λ/π I) ⊗ (A + π√λ I), which has what A ⊗ G + λI has, and twice the middle of the damping."""
    block, lam = blocks()[name], 0.3
    assert not isinstance(block, DiagonalBlock)
    A = block.inputs.diag() if name == "table" else block.inputs
    G, root = block.outputs, math.sqrt(lam)
    pi = math.sqrt(float(A.trace()) / len(A) / (float(G.trace()) / len(G)))
    A, G = A + root * pi * torch.eye(len(A), dtype=F64), G + root / pi * torch.eye(len(G), dtype=F64)
    D = torch.kron(A, G) if name == "table" else torch.kron(G, A)
    rest = D - undamped(block) - lam * torch.eye(len(D), dtype=F64)
    assert float(torch.linalg.eigvalsh(rest).min()) > 0
    assert float(rest.trace()) == pytest.approx(2 * len(D) * root * math.sqrt(block.trace() / len(D)))
    before = tensors(block)
    inverted = block.inverted(lam)
    assert (block.inputs_inverse, block.outputs_inverse) == (None, None)
    torch.testing.assert_close(tensors(block), before, rtol=0, atol=0)
    W, b = torch.randn(12, dtype=F64), torch.randn(3, dtype=F64) if block.bias is not None else None
    X, x = inverted.solved(W, b)
    v = W if b is None else torch.cat([W.view(3, 4), b[:, None]], dim=1).reshape(-1)
    expected = torch.linalg.solve(D, v)
    if b is None:
        assert x is None
        torch.testing.assert_close(X.reshape(-1), expected)
    else:
        assert x is not None
        torch.testing.assert_close(torch.cat([X, x[:, None]], dim=1).reshape(-1), expected)
    assert inverted.inputs is block.inputs


@pytest.mark.parametrize(("a", "g"), [(0, 1), (1, 0)])
def test_without_influence_there_is_the_damping_alone(a: int, g: int) -> None:
    block = LayerBlock(inputs=a * spd(4, 0), outputs=g * spd(3, 1))
    W = torch.randn(12, dtype=F64)
    torch.testing.assert_close(block.inverted(0.3).solved(W, None)[0].reshape(-1), W / 0.3)


def test_what_rounding_made_negative_is_inverted_all_the_same() -> None:
    M = spd(4, 0)
    M[0] = M[:, 0] = 0
    M[0, 0] = -1e-3 * float(M.trace())
    inverse = LayerBlock(inputs=M, outputs=spd(3, 1)).inverted(1e-12).inputs_inverse
    assert inverse is not None
    assert float(torch.linalg.eigvalsh(inverse).min()) > 0
    assert inverse.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_averages(name: str) -> None:
    """e of the past; inverses and the first update stay, and the past is not written to."""
    old, fresh, e = blocks()[name], blocks()[name], 0.75
    if not isinstance(old, DiagonalBlock):
        old = old.inverted(0.1)
    old = replace(old, begun=3)
    for x in fresh.tensors():
        x.mul_(5)
    kept, expected = tensors(old), [e * x + (1 - e) * y for x, y in zip(old.tensors(), fresh.tensors(), strict=True)]
    new = old.averaged(fresh, e)
    assert type(new) is type(old)
    assert new.begun == 3
    torch.testing.assert_close(tensors(new), expected)
    torch.testing.assert_close(tensors(old), kept, rtol=0, atol=0)
    if not isinstance(old, DiagonalBlock):
        assert not isinstance(new, DiagonalBlock)
        assert new.inputs_inverse is old.inputs_inverse is not None
        assert new.outputs_inverse is old.outputs_inverse is not None
        assert new.bias == old.bias


@pytest.mark.parametrize("before", NAMES)
@pytest.mark.parametrize("now", NAMES)
def test_a_block_of_another_kind_or_bias_begins_anew(before: str, now: str) -> None:
    old, fresh = blocks()[before], blocks()[now]
    assert fresh.continues(old) == (before == now)
    expected = tensors(old if before == now else fresh)
    (new,), e = (found := averaged({0: old}, {0: fresh}, memory=0.5, n=7))[0].values(), found[1]
    assert (type(new), new.begun) == (type(fresh), 1 if before == now else 7)
    torch.testing.assert_close(tensors(new), expected)
    assert e == 0.5


def test_another_bias_is_another_layer() -> None:
    old = blocks()["layer with a bias"]
    assert not isinstance(old, DiagonalBlock)
    assert not replace(old, bias=2).continues(old)
    assert old.continues(old.inverted(0.1))


def test_the_past_counts_by_the_age_of_each_block() -> None:
    """e = min(memory, 1 − 1/(n − begun + 1)); the smallest is told, and a block that has nothing fresh stays."""

    def diagonal(x: float, begun: int = 1) -> DiagonalBlock:
        return DiagonalBlock(diagonal=torch.full((2,), x, dtype=F64), begun=begun)

    old: dict[int, AnyBlock] = {5: diagonal(1.0), 2: diagonal(1.0, begun=8), 3: diagonal(1.0)}
    new, e = averaged(old, {5: diagonal(0.0), 2: diagonal(0.0), 1: diagonal(4.0)}, memory=0.9, n=9)
    assert list(new) == [1, 2, 3, 5]
    assert {i: block.begun for i, block in new.items()} == {1: 9, 2: 8, 3: 1, 5: 1}
    values = {i: float(block.diagonal[0]) for i, block in new.items() if isinstance(block, DiagonalBlock)}
    assert values == pytest.approx({1: 4.0, 2: 0.5, 3: 1.0, 5: 1 - 1 / 9})
    assert new[3] is old[3]
    assert e == pytest.approx(0.5)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_block_belongs_to(name: str) -> None:
    block = blocks()[name]
    if not isinstance(block, DiagonalBlock):
        block = block.inverted(0.1)
    assert block.belongs(0, PARAMS)
    for shape in ((2, 4), (3, 5), (4, 4), (3,), (13,), ()):
        assert not block.belongs(0, [torch.ones(shape), PARAMS[1]]), shape
    if not isinstance(block, DiagonalBlock):
        assert not replace(block, inputs=spd(9, 0)).belongs(0, PARAMS)
        assert not replace(block, outputs=spd(9, 0)).belongs(0, PARAMS)
        assert not replace(block, inputs_inverse=spd(9, 0)).belongs(0, PARAMS)
        assert not replace(block, outputs_inverse=spd(9, 0)).belongs(0, PARAMS)
        assert replace(block, inputs_inverse=None, outputs_inverse=None).belongs(0, PARAMS)
        assert block.belongs(0, PARAMS[:1]) == (block.bias is None)
        assert block.belongs(0, [PARAMS[0], torch.ones(4)]) == (block.bias is None)


@pytest.mark.parametrize("name", NAMES)
def test_placed_elsewhere(name: str) -> None:
    block = replace(blocks()[name], begun=4)
    if not isinstance(block, DiagonalBlock):
        bare = block.placed(torch.device("meta"), torch.float32)
        assert (bare.inputs_inverse, bare.outputs_inverse) == (None, None)
        block = block.inverted(0.1)
    placed = block.placed(torch.device("meta"), torch.float32)
    assert (type(placed), placed.begun) == (type(block), 4)
    moved = [*placed.tensors()]
    if not isinstance(placed, DiagonalBlock):
        assert not isinstance(block, DiagonalBlock)
        assert placed.inputs_inverse is not None
        assert placed.outputs_inverse is not None
        assert placed.bias == block.bias
        moved += [placed.inputs_inverse, placed.outputs_inverse]
    assert all(x.is_meta and x.dtype == torch.float32 for x in moved)


def test_a_state_is_that_of_its_parameters_or_new() -> None:
    model = nn.Linear(4, 3)
    parameters = ParameterVector([{"params": list(model.parameters()), "weight_decay": 0.0}])
    state = KroneckerState(4, 0.1, 0.2, 0.3, (0, 1), {0: blocks()["layer with a bias"]})
    found = state.of(parameters, SingleProcess())
    assert (found.updates, found.age, found.damping, found.decay, found.places) == (4, 0.1, 0.2, 0.3, (0, 1))
    assert all(x.dtype == torch.float32 for x in found.blocks[0].tensors())
    assert replace(state, places=(0,)).of(parameters, SingleProcess()).updates == 4  # others have joined
    for wrong in (
        replace(state, places=(0, 2)),
        replace(state, places=(0, 1, 2)),
        replace(state, blocks={1: blocks()["layer with a bias"]}),
        replace(state, blocks={2: blocks()["diagonal"]}),
        replace(state, blocks={0: LayerBlock(inputs=spd(4, 0), outputs=spd(3, 1), bias=1)}),
        replace(state, blocks={0: blocks()["layer"], 1: blocks()["diagonal"]}),
    ):
        anew = wrong.of(parameters, SingleProcess())
        assert (anew.updates, anew.damping, anew.places, anew.blocks) == (0, 0.0, (), {})


def test_roles_travel_as_numbers() -> None:
    """Of the opinions of several ranks the largest counts: that it has a block before that it is a bias."""
    roles = [ParameterRole(LayerBlock, bias_of=0), ParameterRole(LayerBlock, bias_of=6), *map(ParameterRole, BLOCKS)]
    codes = [role.encoded() for role in roles]
    assert [ParameterRole.decoded(*code) for code in codes] == roles
    assert codes == sorted(codes)
    assert min(kind for kind, _ in codes) > 0
    assert [block.alone for block in BLOCKS] == [False, False, True, True]
