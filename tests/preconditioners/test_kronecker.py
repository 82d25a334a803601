"""Kronecker factors and D⁻¹ against dense matrices and against curvlinops."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent.curvature import output_roots as random_root
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners import statistics
from krylov_descent.preconditioners.kronecker import Kronecker, KroneckerState
from krylov_descent.preconditioners.kronecker_blocks import (
    AnyBlock,
    DiagonalBlock,
    FactoredBlock,
    LayerBlock,
    PulledBlock,
    TableBlock,
)
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.state import taken_apart
from krylov_descent.vectors.parameters import ParameterVector
from tests.least_squares import F64, dense, pinn

Loss = Callable[[Tensor, Tensor], Tensor]
WHOLE = [Microbatch(None, None)]
NEW: KroneckerState = Kronecker().init()


def objective_of(params: Sequence[Tensor] | nn.Module, closure: Callable[[Any], Any], decay: float = 0.0) -> Objective:
    params = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
    return Objective(closure, ParameterVector([{"params": params, "weight_decay": decay}]), SingleProcess())


def supervised(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Of all samples without data, else of the rows that the data name."""

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = model(x if rows is None else x[rows])
        return loss(z, y if rows is None else y[rows]), z

    return closure


def rows_of(*sizes: int) -> list[Microbatch]:
    """Micro-batches of such sizes, one after the other."""
    bounds = list(itertools.accumulate(sizes, initial=0))
    return [Microbatch(torch.arange(i, j), j - i, position=i) for i, j in itertools.pairwise(bounds)]


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        if callable(reset := getattr(layer, "reset_parameters", None)):
            reset()
    return nn.Sequential(*layers).double()


def weight_of(model: nn.Sequential, i: int) -> Tensor:
    weight = model[i].weight
    assert isinstance(weight, Tensor)
    return weight


def mlp() -> nn.Sequential:
    return network(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data(n: int = 7, *shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, *(shape or (4,)), generator=generator, dtype=F64)
    return x, torch.randint(classes, (n,), generator=generator)


def units(z: Tensor) -> Iterator[Tensor]:
    """All unit vectors of the shape of z."""
    for j in range(z.numel()):
        e = torch.zeros(z.numel(), dtype=z.dtype)
        e[j] = 1
        yield e.view(z.shape)


def expected(objective: Objective, outputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[int, AnyBlock]:
    """The exact mean of the statistics over signs: their sum with each unit vector in place of signs.

    Factors are quadratic in s, so that E over signs is the trace of that quadratic form.
    """
    total = dict(refreshed(objective)[1].blocks)  # inputs of what has influence: all of it
    found = []
    for e in units(outputs):
        monkeypatch.setattr(random_root, "keyed_signs", lambda key, position, z, e=e: e)
        found.append(refreshed(objective)[1].blocks)
    monkeypatch.undo()
    for i, signed in total.items():
        those = [blocks for blocks in found if i in blocks]
        if isinstance(signed, DiagonalBlock):
            total[i] = replace(signed, diagonal=torch.stack([diagonal(blocks, i) for blocks in those]).sum(0))
            continue
        G = torch.stack([layer(blocks, i).outputs for blocks in those])
        A = signed.inputs
        if isinstance(signed, PulledBlock):  # of trace one each time
            A = torch.stack([layer(b, i).inputs * layer(b, i).outputs.trace() for b in those]).sum(0)
        total[i] = replace(signed, inputs=A, outputs=G.sum(0))
    return total


def layer(blocks: Mapping[int, AnyBlock], i: int) -> LayerBlock | PulledBlock:
    block = blocks[i]
    assert not isinstance(block, DiagonalBlock)
    return block


def diagonal(blocks: Mapping[int, AnyBlock], i: int) -> Tensor:
    block = blocks[i]
    assert isinstance(block, DiagonalBlock)
    return block.diagonal


def kron(block: FactoredBlock) -> Tensor:
    """G ⊗ A, in the order of a flattened [W b]."""
    A = block.inputs
    return torch.kron(block.outputs, A if A.ndim == 2 else A.diag())


def refreshed(objective: Objective, *, key: tuple[int, ...] = (0,), **options: float) -> tuple[Any, KroneckerState]:
    found = Kronecker(**options).refresh(objective, WHOLE, NEW, key)
    return found.solve, found.state


def same(a: KroneckerState, b: KroneckerState) -> bool:
    """To the bit."""
    (_, numbers, tensors), other = taken_apart(a), taken_apart(b)
    alike = numbers == other.numbers and tensors.keys() == other.tensors.keys()
    return alike and all(torch.equal(x, other.tensors[name]) for name, x in tensors.items())


def assert_close(a: KroneckerState, b: KroneckerState) -> None:
    """Up to rounding."""
    (_, numbers, tensors), other = taken_apart(a), taken_apart(b)
    assert other.numbers.keys() == numbers.keys()
    for name, x in numbers.items():
        assert other.numbers[name] == (x if isinstance(x, str) else pytest.approx(x, rel=1e-7)), name
    torch.testing.assert_close(other.tensors, tensors)


def test_one_dense_layer_with_squared_error_is_the_gauss_newton_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(nn.Linear(4, 3))
    x, _ = data()
    closure = supervised(model, F.mse_loss, x, torch.ones(7, 3, dtype=F64))
    blocks = expected(objective_of(model, closure), torch.empty(7, 3, dtype=F64), monkeypatch)
    H, _ = dense(model, lambda: closure(None))
    with_bias = torch.tensor([*(5 * o + i for o in range(3) for i in range(4)), *(5 * o + 4 for o in range(3))])
    torch.testing.assert_close(kron(layer(blocks, 0))[with_bias][:, with_bias], H)


@pytest.mark.parametrize(
    ("layers", "shape", "loss"),
    [
        ((nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,), nn.MSELoss()),
        ((nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,), nn.CrossEntropyLoss()),
        ((nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)), (4,), nn.BCEWithLogitsLoss()),
        ((nn.Linear(4, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, 3)), (4,), nn.CrossEntropyLoss()),
        (
            (
                nn.Conv2d(2, 3, 3, padding=1, stride=2),
                nn.Softplus(),  # where all channels of a pixel are dead, its inputs do not count here
                nn.Conv2d(3, 2, 2, bias=False),
                nn.Flatten(),
                nn.Linear(8, 3),
            ),
            (2, 5, 6),
            nn.CrossEntropyLoss(),
        ),
    ],
    ids=["squared", "softmax", "binary", "no bias, in place", "convolutions"],
)
def test_the_mean_over_signs_is_that_of_curvlinops(
    layers: Sequence[nn.Module], shape: tuple[int, ...], loss: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which its imports use
        from curvlinops import KFACLinearOperator
    model = network(*layers)
    x, y = data(6, *shape)
    if not isinstance(loss, nn.CrossEntropyLoss):
        y = torch.rand(6, 3, dtype=F64).round()
    objective = objective_of(model, supervised(model, loss, x, y))
    found = expected(objective, torch.empty(6, 3, dtype=F64), monkeypatch)
    params = objective.parameters.params
    kfac = KFACLinearOperator(
        model, loss, params, [(x, y)], fisher_type="type-2", separate_weight_and_bias=False, check_deterministic=False
    )
    kfac.compute_kronecker_factors()
    for i, p in enumerate(params):
        if p.ndim == 1:
            assert i not in found
            continue
        name = next(n for n, m in model.named_modules() if getattr(m, "weight", None) is p)
        theirs = torch.kron(kfac._gradient_covariances[name], kfac._input_covariances[name])
        torch.testing.assert_close(kron(layer(found, i)), theirs)


def test_signs_have_that_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many keys: softmax, and a diagonal."""
    model = network(nn.Linear(4, 3), nn.LayerNorm(3))
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()))
    exact = expected(objective, torch.empty(7, 3, dtype=F64), monkeypatch)
    kronecker, state = Kronecker(memory=0.99999), NEW
    for k in range(300):
        state = kronecker.refresh(objective, WHOLE, state, (5, k)).state
    pairs = [(layer(state.blocks, 0).outputs, layer(exact, 0).outputs)]
    pairs += [(diagonal(state.blocks, i), diagonal(exact, i)) for i in (2, 3)]
    for found, mean in pairs:
        assert 0 < (found - mean).norm() < 0.2 * mean.norm()
    torch.testing.assert_close(layer(state.blocks, 0).inputs, layer(exact, 0).inputs)


class Words(nn.Module):
    """A table of rows, a layer at each position, and a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.rnn = nn.LSTM(4, 3, batch_first=True)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.table(x))
        out: Tensor = self.head(self.norm(h)) * self.scale
        return out.sum(1)


def words() -> tuple[Words, Callable[[Any], tuple[Tensor, Tensor]]]:
    model = Words().double()
    x = torch.tensor([[1, 2, 2], [5, 0, 1], [4, 4, 0], [2, 1, 1]])
    return model, supervised(model, F.mse_loss, x, torch.ones(4, 2, dtype=F64))


def test_parameters_outside_of_layers_have_what_the_gauss_newton_matrix_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of norms and free parameters the diagonal; of recurrent weights sums over rows, and over columns."""
    model, closure = words()
    objective = objective_of(model, closure)
    found = expected(objective, torch.empty(4, 2, dtype=F64), monkeypatch)
    H, _ = dense(model, lambda: closure(None))
    sizes = objective.parameters.sizes
    for i, (name, p) in enumerate(model.named_parameters()):
        start = sum(sizes[:i])
        own = H[start : start + sizes[i], start : start + sizes[i]]
        if name.startswith("rnn.weight"):
            block = own.view(*p.shape, *p.shape)
            torch.testing.assert_close(layer(found, i).outputs, torch.einsum("ajbj->ab", block))
            torch.testing.assert_close(layer(found, i).inputs, torch.einsum("jajb->ab", block))
        elif name.startswith(("rnn", "norm", "scale")):
            torch.testing.assert_close(diagonal(found, i), own.diagonal())
        else:
            assert not isinstance(found.get(i), DiagonalBlock)
        assert isinstance(found.get(i), FactoredBlock) == (p.ndim == 2)
    _, state = refreshed(objective)
    assert float(layer(state.blocks, 2).inputs.trace()) == pytest.approx(1)


def test_an_embedding_is_a_dense_layer_on_unit_vectors() -> None:
    """The padding apart, which has no influence."""
    x = torch.tensor([[1, 2, 2], [5, 3, 1], [4, 4, 1], [2, 1, 1]])
    y = torch.ones(4, 3, 2, dtype=F64)
    model = network(nn.Embedding(6, 3), nn.Tanh(), nn.Linear(3, 2))
    twin = network(nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        weight_of(twin, 0).copy_(weight_of(model, 0).T)
        for mine, other in zip(model[2].parameters(), twin[2].parameters(), strict=True):
            other.copy_(mine)
    solve, state = refreshed(objective_of(model, supervised(model, F.mse_loss, x, y)))
    other, expected = refreshed(objective_of(twin, supervised(twin, F.mse_loss, F.one_hot(x, 6).double(), y)))
    table, dense_layer = layer(state.blocks, 0), layer(expected.blocks, 0)
    torch.testing.assert_close(table.inputs.diag(), dense_layer.inputs)
    torch.testing.assert_close(table.outputs, dense_layer.outputs)
    w = torch.randn(26, dtype=F64)
    turned = torch.cat([w[:18].view(6, 3).T.reshape(-1), w[18:]])
    result = other(turned)
    torch.testing.assert_close(solve(w), torch.cat([result[:18].view(3, 6).T.reshape(-1), result[18:]]))

    padded, closure = words()
    _, state = refreshed(objective_of(padded, closure))
    assert layer(state.blocks, 1).inputs.tolist() == pytest.approx([0, 0.4, 0.3, 0, 0.2, 0.1])


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_solver_inverts_what_it_says(decay: float) -> None:
    model = network(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()), decay)
    solve, state = refreshed(objective, damping=0.1)
    P = objective.parameters.numel
    layers = [layer(state.blocks, i) for i in (0, 4)]
    norm = torch.cat([diagonal(state.blocks, 2), diagonal(state.blocks, 3)])
    trace = sum(float(block.inputs.trace() * block.outputs.trace()) for block in layers)
    lam = 0.1 * (trace + float(norm.sum())) / P + decay
    blocks = []
    for A, G in ((block.inputs, block.outputs) for block in layers):
        pi = math.sqrt(float(A.trace()) / len(A) / (float(G.trace()) / len(G)))
        damped = [M + math.sqrt(lam) * s * torch.eye(len(M), dtype=F64) for M, s in ((G, 1 / pi), (A, pi))]
        blocks.append(torch.kron(*damped))
    D = torch.zeros(P, P, dtype=F64)
    first = torch.tensor([*(5 * o + i for o in range(5) for i in range(4)), *(5 * o + 4 for o in range(5))])
    D[:25, :25] = blocks[0][first][:, first]
    D[25:35, 25:35] = (norm + lam).diag()
    D[35:, 35:] = blocks[1]
    w = torch.randn(P, dtype=F64)
    torch.testing.assert_close(solve(w), torch.linalg.solve(D, w))
    torch.testing.assert_close(torch.stack([solve(e) for e in torch.eye(P, dtype=F64)]), torch.linalg.inv(D))


def test_a_loss_alone_gives_none() -> None:
    model = mlp()
    x, y = data()
    objective = objective_of(model, lambda _: F.cross_entropy(model(x), y))
    for given in (KroneckerState(updates=3), NEW):
        found = Kronecker().refresh(objective, WHOLE, given, (0,))
        assert found.solve is None
        assert found.state is given


def test_refresh_is_pure_and_keyed() -> None:
    model, closure = words()
    objective = objective_of(model, closure)
    kronecker = Kronecker()
    solve, first = refreshed(objective)
    assert solve is not None
    w = torch.randn(objective.parameters.numel, dtype=F64)
    kept, before = copy.deepcopy(first), solve(w)
    again = [kronecker.refresh(objective, WHOLE, first, (1,)) for _ in range(2)]
    third = kronecker.refresh(objective, WHOLE, first, (2,)).state
    assert same(first, kept)
    assert torch.equal(solve(w), before)
    assert again[0].solve is not None
    assert again[1].solve is not None
    assert torch.equal(again[0].solve(w), again[1].solve(w))
    assert taken_apart(again[0].state).tensors.keys() == taken_apart(first).tensors.keys()
    assert same(again[0].state, again[1].state)
    assert not torch.equal(layer(third.blocks, 8).outputs, layer(again[0].state.blocks, 8).outputs)
    assert all(p.grad is None for p in model.parameters())


def test_averages_and_when_inverses_are_made() -> None:
    model = network(nn.Linear(4, 3))
    x, _ = data(40)
    scale = torch.ones((), dtype=F64)

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = model(x * scale)
        return 0.5 * (z - 1).square().sum(1).mean(), z

    objective = objective_of(model, closure)
    kronecker = Kronecker(memory=0.98)
    state, last = NEW, None
    made, expected = [], torch.zeros(5, 5, dtype=F64)
    for n in range(1, 71):
        scale.fill_(1 + n / 100)
        state = kronecker.refresh(objective, WHOLE, state, (n,)).state
        block = layer(state.blocks, 0)
        e = min(0.98, 1 - 1 / n)
        a = torch.cat([x * scale, torch.ones(40, 1, dtype=F64)], dim=1)
        expected = e * expected + (1 - e) * a.T @ a / 40
        torch.testing.assert_close(block.inputs, expected)
        assert state.updates == n
        if block.inputs_inverse is not last:
            made.append(n)
            assert state.age == 0
        last = block.inputs_inverse
    assert made[:7] == [*range(1, 7), 8]  # 1 − e = 1/n > 0.15
    assert [b - a for a, b in itertools.pairwise(made)][-2:] == [9, 9]  # 1 − 0.98⁹ > 0.15
    for damping, anew in ((1.15e-2, False), (1.25e-2, True), (0.8e-2, True)):
        later = Kronecker(damping=damping).refresh(objective, WHOLE, replace(state, age=0.0), (1,)).state
        assert (layer(later.blocks, 0).inputs_inverse is not last) == anew, damping


@pytest.mark.parametrize(("noise", "part"), [(1.0, 1.0), (0.4, 0.4), (0.0, 0.05)])
def test_damping_falls_with_the_noise(noise: float, part: float) -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()))
    lam = [Kronecker().refresh(objective, WHOLE, NEW, (0,), **given).state.damping for given in ({}, {"noise": noise})]
    assert lam[1] == pytest.approx(part * lam[0], rel=1e-12)


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: (z - 1).square().mean()], ids=["softmax", "squared"])
def test_micro_batches_have_the_factors_of_one_batch(loss: Loss) -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, loss, *data(11)))
    assert_close(*(Kronecker().refresh(objective, rows_of(*sizes), NEW, (3,)).state for sizes in ((11,), (4, 4, 3))))


def test_weights_count() -> None:
    """A masked loss, with the number of terms that count as the weight, has the factors of what is not masked."""
    model = mlp()
    x, y = data(9)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)

    def closure(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = model(x[rows])
        terms = F.cross_entropy(z, y[rows], reduction="none") * mask[rows]
        return terms.sum() / mask[rows].sum().clamp(min=1), z, mask[rows].sum()

    objective = objective_of(model, closure)
    found = [Kronecker().refresh(objective, rows_of(*sizes), NEW, (0,)) for sizes in ((9,), (4, 4, 1))]
    assert found[0].solve is not None
    one, many = (layer(refreshed.state.blocks, 0) for refreshed in found)
    torch.testing.assert_close(many.outputs, one.outputs)
    # Inputs are those of samples that count.
    a = torch.cat([x, torch.ones(9, 1, dtype=F64)], dim=1)[mask]
    for block in (one, many):
        torch.testing.assert_close(block.inputs, a.T @ a / 4)


def test_several_calls_count_as_positions() -> None:
    class Twice(nn.Module):
        def __init__(self, together: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.together = nn.Linear(4, 3), together

        def forward(self, x: Tensor) -> Tensor:
            if self.together:
                out: Tensor = torch.tanh(self.layer(torch.stack([x, x.flip(1)], dim=1))).sum(1)
                return out
            return torch.tanh(self.layer(x)) + torch.tanh(self.layer(x.flip(1)))

    found = [
        refreshed(objective_of(model, supervised(model, F.cross_entropy, *data())))[1]
        for model in (Twice(True).double(), Twice(False).double())
    ]
    assert_close(*found)


class Experts(nn.Module):
    """Two dense layers, each for the samples of its kind alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(4, 3).double() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            mask = x[:, 0] > 0 if k else x[:, 0] <= 0
            out = out.index_put((mask.nonzero()[:, 0],), expert(x[mask]))
        return out


def test_calls_on_nothing_tell_nothing_of_the_inputs() -> None:
    model = Experts()
    x, y = data(12)
    x[:, 0] = torch.tensor([1.0] * 3 + [-1.0] * 9)
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    kronecker = Kronecker()
    one, parts = (kronecker.refresh(objective, rows_of(*s), NEW, (3,)).state for s in ((12,), (3, 3, 3, 3)))
    assert_close(one, parts)
    # Nor does a step in which an expert has no sample.
    x[:, 0] = -1.0
    later = kronecker.refresh(objective, rows_of(12), one, (4,)).state
    assert torch.equal(layer(later.blocks, 2).inputs, layer(one.blocks, 2).inputs)


def test_a_layer_that_begins_late_is_young_all_the_same() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 4).double()])
    x = torch.randn(40, 4, dtype=F64)
    scale, late = torch.ones((), dtype=F64), [False]

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = layers[0](x)
        if late[0]:
            z = layers[1](scale * x) + z
        return 0.5 * (z - 1).square().sum(1).mean(), z

    objective, kronecker = objective_of(layers, closure), Kronecker()
    state = NEW
    for n in range(1, 31):
        late[0] = n > 20
        scale.fill_(float(n))
        state = kronecker.refresh(objective, WHOLE, state, (n,)).state
    mean = sum(float(n) ** 2 for n in range(21, 31)) / 10
    torch.testing.assert_close(layer(state.blocks, 2).inputs[:4, :4], mean * x.T @ x / 40)
    assert {i: block.begun for i, block in state.blocks.items()} == {0: 1, 2: 21}


@pytest.mark.parametrize("coupled", [False, True])
def test_a_note_says_where_gradients_stand_for_curvature(coupled: bool) -> None:
    model = network(nn.Linear(4, 70))
    x, _ = data(20)

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = model(x)
        return (1 + z.square().sum(1)).sqrt().mean() if coupled else z.square().mean(), z

    objective = objective_of(model, closure)
    state, said = NEW, []
    for n in range(4):
        found = Kronecker().refresh(objective, WHOLE, state, (n,))
        state = found.state
        said.append("empirical Fisher" in found.note)
    assert said == ([True, False, False, True] if coupled else [False] * 4)


def test_a_loss_without_a_second_derivative_is_explained() -> None:
    model = network(nn.Linear(4, 3))
    x, _ = data(6)

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = model(x)
        one = torch.ones(1, dtype=torch.long)
        return F.ctc_loss(z.log_softmax(1)[:, None], one[None], 6 * one, one), z

    with pytest.raises(ValueError, match=r"cannot be differentiated twice.*CTC"):
        refreshed(objective_of(model, closure))


def kinds(objective: Objective) -> dict[int, Any]:
    """The class of each parameter's block, or "bias", after some refreshes that must stay finite."""
    state = NEW
    for k in range(3):
        found = Kronecker().refresh(objective, WHOLE, state, (k,))
        solve, state = found.solve, found.state
        assert solve is not None
        assert bool(solve(torch.ones(objective.parameters.numel, dtype=objective.parameters.dtype)).isfinite().all())
    biases = [b.bias for b in state.blocks.values() if isinstance(b, FactoredBlock) and b.bias is not None]
    return {i: type(block) for i, block in state.blocks.items()} | dict.fromkeys(biases, "bias")


def test_which_parameters_have_factors() -> None:
    x, y = data()
    layer, alone, diagonal, bias = LayerBlock, PulledBlock, DiagonalBlock, "bias"

    def of(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> dict[int, Any]:
        params = [p for p in model.parameters() if p.requires_grad]
        return kinds(objective_of(params, supervised(forward or model, F.cross_entropy, x, y)))  # type: ignore[arg-type]

    assert of(mlp()) == {0: layer, 1: bias, 2: layer, 3: bias}

    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    assert of(frozen) == {0: diagonal, 1: layer, 2: bias}

    frozen = mlp()
    frozen[0].bias.requires_grad_(False)
    assert of(frozen) == {0: layer, 1: layer, 2: bias}

    tied = network(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    tied[2].weight = tied[0].weight
    assert of(tied) == {0: alone, 1: diagonal, 2: diagonal, 3: layer, 4: bias}

    shared = network(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    shared[2].bias = shared[0].bias
    assert of(shared) == {0: layer, 1: diagonal, 2: layer, 3: layer, 4: bias}

    elsewhere = mlp()
    weight = weight_of(elsewhere, 0)
    assert of(elsewhere, lambda x: elsewhere(x) + (x @ weight.T)[:, :3]) == {
        0: alone,
        1: diagonal,
        2: layer,
        3: bias,
    }

    unused = mlp()
    unused.extra = nn.Linear(2, 2).double()
    head = nn.Sequential(*list(unused)[:3])
    assert of(unused, head) == {0: layer, 1: bias, 2: layer, 3: bias}

    grouped = network(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 3))
    assert of(grouped) == {0: alone, 1: diagonal, 2: layer, 3: bias}


def test_a_network_differentiated_inside_the_closure_has_no_calls_to_go_by() -> None:
    model, closure = pinn()
    found = kinds(objective_of(model, lambda _: closure()))
    assert found == {i: PulledBlock if i in (0, 2) else DiagonalBlock for i in range(6)}


def test_large_matrices_outside_of_layers_have_a_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "LARGE", 5)
    model, closure = pinn()
    assert set(kinds(objective_of(model, lambda _: closure())).values()) == {DiagonalBlock}


def test_a_weight_that_begins_to_act_elsewhere_is_found_out() -> None:
    model, elsewhere = mlp(), False
    x, y = data()

    def closure(_: Any) -> tuple[Tensor, Tensor]:
        z = model(x) + ((x @ weight_of(model, 0).T)[:, :3] if elsewhere else 0)
        return F.cross_entropy(z, y), z

    objective = objective_of(model, closure)
    state = NEW
    for k in range(4):
        elsewhere = k > 0
        state = Kronecker().refresh(objective, WHOLE, state, (k,)).state
        known = {i: (type(block), block.begun) for i, block in state.blocks.items()}
        if k < 3:
            assert known == {0: (LayerBlock, 1), 2: (LayerBlock, 1)}
            assert layer(state.blocks, 0).bias == 1
    assert known == {0: (PulledBlock, 4), 1: (DiagonalBlock, 4), 2: (LayerBlock, 1)}


def test_float32_with_a_dead_input_and_inputs_that_are_all_but_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Sigmoid(), nn.Linear(20, 10))
    x = torch.rand(12, 1).expand(12, 30) + 1e-6 * torch.randn(12, 30)  # fewer samples than inputs, too
    x[:, 3] = 0
    objective = objective_of(model, supervised(model, F.mse_loss, 1e3 * x, torch.zeros(12, 10)))
    for damping in (1e-2, 1e-12):
        solve, state = refreshed(objective, damping=damping)
        w = torch.randn(objective.parameters.numel)
        assert bool(solve(w).isfinite().all())
        assert float(w @ solve(w)) > 0
        block = layer(state.blocks, 0)
        assert block.inputs_inverse is not None
        A, G = block.inputs.double(), block.outputs.double()
        pi = math.sqrt(float(A.trace()) / len(A) / (float(G.trace()) / len(G)))
        inverse = torch.linalg.inv(A + math.sqrt(state.damping) * pi * torch.eye(len(A), dtype=F64))
        assert (inverse - block.inputs_inverse).norm() < 1e-2 * inverse.norm()


def test_layers_without_influence_and_losses_without_curvature() -> None:
    model = mlp()
    x, y = data()
    nn.init.zeros_(weight_of(model, 2))  # nothing reaches the first layer
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    solve, state = refreshed(objective)
    w = torch.randn(objective.parameters.numel, dtype=F64)
    torch.testing.assert_close(solve(w)[:25], w[:25] / state.damping)
    linear = objective_of(model, lambda _: ((z := model(x)).mean(), z))
    solve, _ = refreshed(linear)
    assert solve is None  # and the report says so


def test_what_is_not_finite_is_not_taken_in() -> None:
    model = mlp()
    x, y = data()
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    kronecker = Kronecker()
    solve, state = refreshed(objective)
    x[0, 0] = math.nan
    again = kronecker.refresh(objective, WHOLE, state, (1,))
    w = torch.randn(objective.parameters.numel, dtype=F64)
    assert again.solve is not None
    assert torch.equal(again.solve(w), solve(w))
    assert same(again.state, state)
    first = kronecker.refresh(objective, WHOLE, NEW, (1,))
    assert first.solve is None
    assert same(first.state, NEW)


def test_a_state_of_other_shapes_or_places_begins_anew() -> None:
    x, y = data()
    wide = network(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    _, others = refreshed(objective_of(wide, supervised(wide, F.cross_entropy, x, y)))
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    _, fresh = refreshed(objective)
    assert fresh.places == (0, 1, 2, 3)
    last = layer(fresh.blocks, 2)
    odd: dict[str, AnyBlock] = {
        "an inverse of others": replace(last, inputs_inverse=layer(others.blocks, 2).inputs_inverse),
        "a bias that there is not": replace(last, bias=4),
        "a bias of another shape": replace(last, bias=1),
        "no bias": replace(last, bias=None),
        "a table": TableBlock(inputs=torch.ones(3, dtype=F64), outputs=torch.eye(4, dtype=F64)),
    }
    wrong = {name: replace(fresh, blocks={**fresh.blocks, 2: block}) for name, block in odd.items()}
    # Of a vector none of them is, nor of a parameter that there is not.
    wrong |= {f"{i}, {kind}": replace(fresh, blocks={i: b}) for i in (1, 9) for kind, b in odd.items()}
    wrong |= {
        "others": others,
        "unfrozen": replace(fresh, places=(1, 2, 3, 4)),
        "more": replace(fresh, places=tuple(range(5))),
    }
    for name, given in wrong.items():
        assert same(Kronecker().refresh(objective, WHOLE, given, (0,)).state, fresh), name
    assert Kronecker().refresh(objective, WHOLE, fresh, (0,)).state.updates == 2
    assert Kronecker().refresh(objective, WHOLE, replace(fresh, places=(0, 1)), (0,)).state.updates == 2  # more joined


def test_an_empty_set_and_masked_sets() -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()))
    with pytest.raises(ValueError, match="every term is masked"):
        Kronecker().refresh(objective, [], NEW, (0,))


def hessian(loss: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    H: Tensor = torch.autograd.functional.hessian(loss, z)  # type: ignore[no-untyped-call]
    return H


def root_of(z: Tensor, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """S → L S for signs S in the shape of z."""

    def root(s: Tensor) -> Tensor:
        leaf = z.clone().requires_grad_()
        delta = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
        u = random_root._root(leaf, delta, s, torch.Generator().manual_seed(0))
        return random_root._empirical(delta, s) if u is None else u

    return root


@pytest.mark.parametrize("name", ["softmax", "softmax, weighted", "pixels", "last", "coupled"])
def test_roots_of_coupled_outputs(name: str) -> None:
    """LLᵀ = H, more classes than have blocks among them."""
    torch.manual_seed(0)
    shape = {
        "softmax": (3, 70),
        "softmax, weighted": (3, 70),
        "pixels": (2, 5, 3),
        "last": (2, 3, 5),
        "coupled": (4, 3),
    }
    z = 3 * torch.randn(*shape[name], dtype=F64)
    y = torch.tensor([[0, 3, 1], [2, 2, -100]]) if z.ndim == 3 else torch.arange(len(z)) % z.shape[1]
    weight = torch.rand(z.shape[1], dtype=F64)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda z: F.cross_entropy(z, y, label_smoothing=0.1),
        "softmax, weighted": lambda z: F.cross_entropy(z, y, weight=weight),
        "pixels": lambda z: F.cross_entropy(z, y),
        "last": lambda z: F.cross_entropy(z.flatten(0, 1), y.flatten()),
        "coupled": lambda z: (1 + z.square().sum(1)).sqrt().mean(),
    }
    root = root_of(z, losses[name])
    H = hessian(losses[name], z).reshape(z.numel(), z.numel())
    L = torch.stack([root(e).reshape(-1) for e in units(z)], dim=1)
    torch.testing.assert_close(L @ L.T, H)


def test_rows_that_softmax_is_sure_of_do_not_count_for_more() -> None:
    """In float32, where their weight cannot be told from rounding."""
    z = torch.zeros(64, 10).index_fill_(1, torch.tensor([2]), 16.0) + torch.randn(64, 10)
    z[:8] = torch.randn(8, 10)
    y = torch.arange(64) % 10
    exact = hessian(lambda z: F.cross_entropy(z, y), z.double())
    diagonal = exact.reshape(640, 640).diagonal().view(64, 10)
    root = root_of(z, lambda z: F.cross_entropy(z, y))
    mean = torch.stack([root(random_root.keyed_signs((k,), 0, z)).double() for k in range(200)]).square().mean(0)
    torch.testing.assert_close(mean.sum(1), diagonal.sum(1), rtol=0.5, atol=0)


def test_one_sample_of_two_classes() -> None:
    """Half of the time both signs are the same."""
    z = torch.tensor([[0.3, -0.2]], dtype=F64)
    y = torch.tensor([1])
    root = root_of(z, lambda z: F.cross_entropy(z, y))
    signs = [torch.tensor([pair], dtype=F64) for pair in itertools.product((-1, 1), repeat=2)]
    mean = sum((u := root(s)).T @ u for s in signs) / 4
    H = hessian(lambda z: F.cross_entropy(z, y), z).view(2, 2)
    torch.testing.assert_close(mean, H)


def test_without_a_root_the_loss_speaks_for_itself() -> None:
    """Rows that the loss couples: the empirical Fisher matrix, one sign a row."""
    z = torch.randn(4, 70, dtype=F64)
    s = random_root.keyed_signs((0,), 0, z)

    def loss(z: Tensor) -> Tensor:
        return (z @ z.T).square().sum()

    leaf = z.clone().requires_grad_()
    (delta,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(root_of(z, loss)(s), 2 * s[:, :1] * delta)


def test_signs_are_fair_and_follow_their_samples() -> None:
    z = torch.empty(500, 70)
    s = random_root.keyed_signs((1,), 0, z)
    assert bool((s.abs() == 1).all())
    assert s.mean().abs() < 5 / math.sqrt(z.numel())
    assert torch.equal(random_root.keyed_signs((1,), 123, z[123:200]), s[123:200])
    gram = s.T @ s / 500 - torch.eye(70)
    assert gram.abs().max() < 5 / math.sqrt(500)
    other = random_root.keyed_signs((2,), 0, z)
    assert (s * other).mean().abs() < 5 / math.sqrt(z.numel())
    assert (s[1:] * s[:-1]).mean().abs() < 5 / math.sqrt(z.numel())
    assert random_root.keyed_signs((1,), 0, torch.empty(())).shape == ()


def test_half_precision_parameters_are_averaged_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).bfloat16()
    x, y = data()
    objective = objective_of(model, supervised(model, F.cross_entropy, x.bfloat16(), y))
    solve, state = refreshed(objective)
    assert {x.dtype for x in taken_apart(state).tensors.values()} == {torch.float32}
    w = torch.randn(objective.parameters.numel)
    assert bool(solve(w).isfinite().all())


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="damping=0"):
        Kronecker(damping=0)
    with pytest.raises(ValueError, match=r"memory=1\.0"):
        Kronecker(memory=1.0)


def test_what_it_costs_is_counted() -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, *data(11)))
    Kronecker().refresh(objective, rows_of(4, 4, 3), NEW, (0,))
    assert objective.sample_gradients == 11
