"""Kronecker factors and D⁻¹ against dense matrices and against curvlinops."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent.curvature import output_roots as random_root
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners import statistics as kronecker_factors
from krylov_descent.preconditioners.kronecker import Factors, Kronecker, KroneckerPreconditioner
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from tests.least_squares import F64, dense, pinn

Loss = Callable[[Tensor, Tensor], Tensor]
WHOLE = [Microbatch(None, None)]


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


def expected(objective: Objective, outputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The exact mean of the statistics over signs: their sum with each unit vector in place of signs.

    Factors are quadratic in s, so that E over signs is the trace of that quadratic form.
    """
    total: dict[str, Tensor] = {}
    _, signed = Kronecker().prepare().refresh(objective, WHOLE, None, (0,))  # inputs of what has influence: all of it
    for e in units(outputs):
        monkeypatch.setattr(random_root, "keyed_signs", lambda key, position, z, e=e: e)
        _, factors = Kronecker().prepare().refresh(objective, WHOLE, None, (0,))
        for name, x in factors.items():
            number = name.partition(".")[0]
            if name.endswith(".inputs") and f"{number}.pulled" in factors:  # of trace one each time
                x = x * factors[f"{number}.outputs"].trace()
                total[name] = total.get(name, torch.zeros_like(x)) + x
            elif name.endswith((".outputs", ".diagonal")):
                total[name] = total.get(name, torch.zeros_like(x)) + x
            elif x.ndim:
                total[name] = signed[name]
    monkeypatch.undo()
    return total


def block(factors: Mapping[str, Tensor], i: int) -> Tensor:
    """G ⊗ A, in the order of a flattened [W b]."""
    A = factors[f"{i}.inputs"]
    return torch.kron(factors[f"{i}.outputs"], A if A.ndim == 2 else A.diag())


def refreshed(objective: Objective, *, key: tuple[int, ...] = (0,), **options: float) -> tuple[Any, Factors]:
    return Kronecker(**options).prepare().refresh(objective, WHOLE, None, key)


def test_one_dense_layer_with_squared_error_is_the_gauss_newton_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(nn.Linear(4, 3))
    x, _ = data()
    closure = supervised(model, F.mse_loss, x, torch.ones(7, 3, dtype=F64))
    factors = expected(objective_of(model, closure), torch.empty(7, 3, dtype=F64), monkeypatch)
    H, _ = dense(model, lambda: closure(None))
    with_bias = torch.tensor([*(5 * o + i for o in range(3) for i in range(4)), *(5 * o + 4 for o in range(3))])
    torch.testing.assert_close(block(factors, 0)[with_bias][:, with_bias], H)


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
            assert f"{i}.inputs" not in found
            continue
        name = next(n for n, m in model.named_modules() if getattr(m, "weight", None) is p)
        theirs = torch.kron(kfac._gradient_covariances[name], kfac._input_covariances[name])
        torch.testing.assert_close(block(found, i), theirs)


def test_signs_have_that_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many keys: softmax, and a diagonal."""
    model = network(nn.Linear(4, 3), nn.LayerNorm(3))
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()))
    exact = expected(objective, torch.empty(7, 3, dtype=F64), monkeypatch)
    prepared, factors = Kronecker(memory=0.99999).prepare(), None
    for k in range(300):
        _, factors = prepared.refresh(objective, WHOLE, factors, (5, k))
    assert factors is not None
    for name in ("0.outputs", "2.diagonal", "3.diagonal"):
        assert (factors[name] - exact[name]).norm() < 0.2 * exact[name].norm()
        assert (factors[name] - exact[name]).norm() > 0
    torch.testing.assert_close(factors["0.inputs"], exact["0.inputs"])


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
            torch.testing.assert_close(found[f"{i}.outputs"], torch.einsum("ajbj->ab", block))
            torch.testing.assert_close(found[f"{i}.inputs"], torch.einsum("jajb->ab", block))
        elif name.startswith(("rnn", "norm", "scale")):
            torch.testing.assert_close(found[f"{i}.diagonal"], own.diagonal())
        else:
            assert f"{i}.diagonal" not in found
        assert (f"{i}.inputs" in found) == (p.ndim == 2)
    _, factors = refreshed(objective)
    assert float(factors["2.inputs"].trace()) == pytest.approx(1)


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
    solve, factors = refreshed(objective_of(model, supervised(model, F.mse_loss, x, y)))
    other, expected = refreshed(objective_of(twin, supervised(twin, F.mse_loss, F.one_hot(x, 6).double(), y)))
    torch.testing.assert_close(factors["0.inputs"].diag(), expected["0.inputs"])
    torch.testing.assert_close(factors["0.outputs"], expected["0.outputs"])
    w = torch.randn(26, dtype=F64)
    turned = torch.cat([w[:18].view(6, 3).T.reshape(-1), w[18:]])
    result = other(turned)
    torch.testing.assert_close(solve(w), torch.cat([result[:18].view(3, 6).T.reshape(-1), result[18:]]))

    padded, closure = words()
    _, factors = refreshed(objective_of(padded, closure))
    assert factors["1.inputs"].tolist() == pytest.approx([0, 0.4, 0.3, 0, 0.2, 0.1])


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_solver_inverts_what_it_says(decay: float) -> None:
    model = network(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()), decay)
    solve, f = refreshed(objective, damping=0.1)
    P = objective.parameters.numel
    trace = sum(float(f[f"{i}.inputs"].trace() * f[f"{i}.outputs"].trace()) for i in (0, 4))
    lam = 0.1 * (trace + float(f["2.diagonal"].sum() + f["3.diagonal"].sum())) / P + decay
    blocks = []
    for i in (0, 4):
        A, G = f[f"{i}.inputs"], f[f"{i}.outputs"]
        pi = math.sqrt(float(A.trace()) / len(A) / (float(G.trace()) / len(G)))
        damped = [M + math.sqrt(lam) * s * torch.eye(len(M), dtype=F64) for M, s in ((G, 1 / pi), (A, pi))]
        blocks.append(torch.kron(*damped))
    D = torch.zeros(P, P, dtype=F64)
    first = torch.tensor([*(5 * o + i for o in range(5) for i in range(4)), *(5 * o + 4 for o in range(5))])
    D[:25, :25] = blocks[0][first][:, first]
    D[25:35, 25:35] = (torch.cat([f["2.diagonal"], f["3.diagonal"]]) + lam).diag()
    D[35:, 35:] = blocks[1]
    w = torch.randn(P, dtype=F64)
    torch.testing.assert_close(solve(w), torch.linalg.solve(D, w))
    torch.testing.assert_close(torch.stack([solve(e) for e in torch.eye(P, dtype=F64)]), torch.linalg.inv(D))


def test_a_loss_alone_gives_none() -> None:
    model = mlp()
    x, y = data()
    factors: Factors = {"updates": torch.tensor(3.0, dtype=F64)}
    objective = objective_of(model, lambda _: F.cross_entropy(model(x), y))
    assert Kronecker().prepare().refresh(objective, WHOLE, factors, (0,)) == (None, factors)
    assert Kronecker().prepare().refresh(objective, WHOLE, None, (0,)) == (None, {})


def test_refresh_is_pure_and_keyed() -> None:
    model, closure = words()
    objective = objective_of(model, closure)
    prepared = Kronecker().prepare()
    solve, first = prepared.refresh(objective, WHOLE, None, (0,))
    assert solve is not None
    w = torch.randn(objective.parameters.numel, dtype=F64)
    kept, before = {name: x.clone() for name, x in first.items()}, solve(w)
    again = [prepared.refresh(objective, WHOLE, first, (1,)) for _ in range(2)]
    _, third = prepared.refresh(objective, WHOLE, first, (2,))
    for name, x in kept.items():
        assert torch.equal(first[name], x)
    assert torch.equal(solve(w), before)
    assert again[0][0] is not None
    assert again[1][0] is not None
    assert torch.equal(again[0][0](w), again[1][0](w))
    assert set(again[0][1]) == set(first)
    assert all(torch.equal(x, again[1][1][name]) for name, x in again[0][1].items())
    assert not torch.equal(third["8.outputs"], again[0][1]["8.outputs"])
    assert all(p.grad is None for p in model.parameters())


def test_averages_and_when_inverses_are_made() -> None:
    model = network(nn.Linear(4, 3))
    x, _ = data(40)
    scale = torch.ones((), dtype=F64)

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = model(x * scale)
        return 0.5 * (z - 1).square().sum(1).mean(), z

    objective = objective_of(model, closure)
    prepared = Kronecker(memory=0.98).prepare()
    factors: Factors | None = None
    made, expected = [], torch.zeros(5, 5, dtype=F64)
    for n in range(1, 71):
        scale.fill_(1 + n / 100)
        before = None if factors is None else factors["0.inputs_inverse"]
        _, factors = prepared.refresh(objective, WHOLE, factors, (n,))
        e = min(0.98, 1 - 1 / n)
        a = torch.cat([x * scale, torch.ones(40, 1, dtype=F64)], dim=1)
        expected = e * expected + (1 - e) * a.T @ a / 40
        torch.testing.assert_close(factors["0.inputs"], expected)
        assert float(factors["updates"]) == n
        if factors["0.inputs_inverse"] is not before:
            made.append(n)
            assert float(factors["age"]) == 0
    assert made[:7] == [*range(1, 7), 8]  # 1 − e = 1/n > 0.15
    assert [b - a for a, b in itertools.pairwise(made)][-2:] == [9, 9]  # 1 − 0.98⁹ > 0.15
    assert factors is not None
    for damping, anew in ((1.15e-2, False), (1.25e-2, True), (0.8e-2, True)):
        aged = {**factors, "age": torch.zeros((), dtype=F64)}
        _, later = Kronecker(damping=damping).prepare().refresh(objective, WHOLE, aged, (1,))
        assert (later["0.inputs_inverse"] is not factors["0.inputs_inverse"]) == anew, damping


@pytest.mark.parametrize(("noise", "part"), [(1.0, 1.0), (0.4, 0.4), (0.0, 0.05)])
def test_damping_falls_with_the_noise(noise: float, part: float) -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()))
    lam = [
        float(Kronecker().prepare().refresh(objective, WHOLE, None, (0,), **given)[1]["damping"])
        for given in ({}, {"noise": noise})
    ]
    assert lam[1] == pytest.approx(part * lam[0], rel=1e-12)


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: (z - 1).square().mean()], ids=["softmax", "squared"])
def test_micro_batches_have_the_factors_of_one_batch(loss: Loss) -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, loss, *data(11)))
    wholes = [Kronecker().prepare().refresh(objective, rows_of(*sizes), None, (3,))[1] for sizes in ((11,), (4, 4, 3))]
    for name, x in wholes[0].items():
        torch.testing.assert_close(wholes[1][name], x, msg=name)


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
    solve, one = Kronecker().prepare().refresh(objective, rows_of(9), None, (0,))
    assert solve is not None
    _, many = Kronecker().prepare().refresh(objective, rows_of(4, 4, 1), None, (0,))
    torch.testing.assert_close(many["0.outputs"], one["0.outputs"])
    # Inputs are those of samples that count.
    a = torch.cat([x, torch.ones(9, 1, dtype=F64)], dim=1)[mask]
    for factors in (one, many):
        torch.testing.assert_close(factors["0.inputs"], a.T @ a / 4)


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
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, msg=name)


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
    one, parts = (Kronecker().prepare().refresh(objective, rows_of(*s), None, (3,))[1] for s in ((12,), (3, 3, 3, 3)))
    for name, factor in one.items():
        torch.testing.assert_close(parts[name], factor, msg=name)
    # Nor does a step in which an expert has no sample.
    prepared = Kronecker().prepare()
    _, factors = prepared.refresh(objective, rows_of(12), None, (3,))
    x[:, 0] = -1.0
    _, later = prepared.refresh(objective, rows_of(12), factors, (4,))
    assert torch.equal(later["2.inputs"], factors["2.inputs"])


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

    objective, prepared = objective_of(layers, closure), Kronecker().prepare()
    factors: Factors | None = None
    for n in range(1, 31):
        late[0] = n > 20
        scale.fill_(float(n))
        _, factors = prepared.refresh(objective, WHOLE, factors, (n,))
    assert factors is not None
    mean = sum(float(n) ** 2 for n in range(21, 31)) / 10
    torch.testing.assert_close(factors["2.inputs"][:4, :4], mean * x.T @ x / 40)
    assert float(factors["2.begun"]) == 21


@pytest.mark.parametrize("coupled", [False, True])
def test_a_note_says_where_gradients_stand_for_curvature(coupled: bool) -> None:
    model = network(nn.Linear(4, 70))
    x, _ = data(20)

    def closure(rows: Any) -> tuple[Tensor, Tensor]:
        z = model(x)
        return (1 + z.square().sum(1)).sqrt().mean() if coupled else z.square().mean(), z

    prepared = Kronecker().prepare()
    factors: Factors | None = None
    said = []
    for n in range(4):
        _, factors = prepared.refresh(objective_of(model, closure), WHOLE, factors, (n,))
        said.append("empirical Fisher" in prepared.note)
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


def kinds(objective: Objective) -> dict[int, str]:
    """The parameters' roles, after some refreshes that must stay finite."""
    prepared, factors = Kronecker().prepare(), None
    for k in range(3):
        solve, factors = prepared.refresh(objective, WHOLE, factors, (k,))
        assert solve is not None
        assert bool(solve(torch.ones(objective.parameters.numel, dtype=objective.parameters.dtype)).isfinite().all())
    assert factors is not None
    found = {int(n.split(".")[0]): n.split(".")[1] for n in factors if n.endswith((".inputs", ".diagonal", ".pulled"))}
    return found | {int(x): "with its weight" for n, x in factors.items() if n.endswith(".bias")}


def test_which_parameters_have_factors() -> None:
    x, y = data()
    layer, alone, diagonal, bias = "inputs", "pulled", "diagonal", "with its weight"

    def of(model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> dict[int, str]:
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
    assert found == {0: "pulled", 1: "diagonal", 2: "pulled", 3: "diagonal", 4: "diagonal", 5: "diagonal"}


def test_large_matrices_outside_of_layers_have_a_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker_factors, "LARGE", 5)
    model, closure = pinn()
    assert set(kinds(objective_of(model, lambda _: closure())).values()) == {"diagonal"}


def test_a_weight_that_begins_to_act_elsewhere_is_found_out() -> None:
    model, elsewhere = mlp(), False
    x, y = data()

    def closure(_: Any) -> tuple[Tensor, Tensor]:
        z = model(x) + ((x @ weight_of(model, 0).T)[:, :3] if elsewhere else 0)
        return F.cross_entropy(z, y), z

    objective = objective_of(model, closure)
    prepared, factors = Kronecker().prepare(), None
    for k in range(4):
        elsewhere = k > 0
        _, factors = prepared.refresh(objective, WHOLE, factors, (k,))
        assert factors is not None
        assert ("0.pulled" in factors) == ("1.diagonal" in factors) == (k == 3)
        assert ("0.bias" in factors) == (k < 3)


def test_float32_with_a_dead_input_and_inputs_that_are_all_but_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Sigmoid(), nn.Linear(20, 10))
    x = torch.rand(12, 1).expand(12, 30) + 1e-6 * torch.randn(12, 30)  # fewer samples than inputs, too
    x[:, 3] = 0
    objective = objective_of(model, supervised(model, F.mse_loss, 1e3 * x, torch.zeros(12, 10)))
    for damping in (1e-2, 1e-12):
        solve, factors = refreshed(objective, damping=damping)
        w = torch.randn(objective.parameters.numel)
        assert bool(solve(w).isfinite().all())
        assert float(w @ solve(w)) > 0
        exact = {name: f.double() for name, f in factors.items()}
        lam = float(factors["damping"])
        A, G = exact["0.inputs"], exact["0.outputs"]
        pi = math.sqrt(float(A.trace()) / len(A) / (float(G.trace()) / len(G)))
        inverse = torch.linalg.inv(A + math.sqrt(lam) * pi * torch.eye(len(A), dtype=F64))
        assert (inverse - exact["0.inputs_inverse"]).norm() < 1e-2 * inverse.norm()


def test_layers_without_influence_and_losses_without_curvature() -> None:
    model = mlp()
    x, y = data()
    nn.init.zeros_(weight_of(model, 2))  # nothing reaches the first layer
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    solve, factors = refreshed(objective)
    w = torch.randn(objective.parameters.numel, dtype=F64)
    torch.testing.assert_close(solve(w)[:25], w[:25] / factors["damping"])
    linear = objective_of(model, lambda _: ((z := model(x)).mean(), z))
    solve, _ = refreshed(linear)
    assert solve is None  # and the report says so


def test_what_is_not_finite_is_not_taken_in() -> None:
    model = mlp()
    x, y = data()
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    prepared = Kronecker().prepare()
    solve, factors = prepared.refresh(objective, WHOLE, None, (0,))
    x[0, 0] = math.nan
    later, same = prepared.refresh(objective, WHOLE, factors, (1,))
    w = torch.randn(objective.parameters.numel, dtype=F64)
    assert solve is not None
    assert later is not None
    assert torch.equal(later(w), solve(w))
    assert all(torch.equal(x, same[name]) for name, x in factors.items())
    first, nothing = prepared.refresh(objective, WHOLE, None, (1,))
    assert first is None
    assert nothing == {}


def test_factors_of_other_parameters_are_dropped() -> None:
    x, y = data()
    wide = network(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    _, others = refreshed(objective_of(wide, supervised(wide, F.cross_entropy, x, y)))
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, x, y))
    _, fresh = refreshed(objective)
    wrong = {**fresh, "2.inputs_inverse": others["2.inputs_inverse"]}
    for given in (others, wrong):
        _, factors = Kronecker().prepare().refresh(objective, WHOLE, given, (0,))
        assert all(torch.equal(x, factors[name]) for name, x in fresh.items())


def test_an_empty_set_and_masked_sets() -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, *data()))
    with pytest.raises(ValueError, match="every term is masked"):
        Kronecker().prepare().refresh(objective, [], None, (0,))


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
    solve, factors = refreshed(objective)
    assert factors["0.inputs"].dtype == torch.float32
    w = torch.randn(objective.parameters.numel)
    assert bool(solve(w).isfinite().all())


def test_options_are_checked_and_copies_work() -> None:
    with pytest.raises(ValueError, match="damping=0"):
        Kronecker(damping=0)
    with pytest.raises(ValueError, match=r"memory=1\.0"):
        Kronecker(memory=1.0)
    assert isinstance(copy.deepcopy(Kronecker().prepare()), KroneckerPreconditioner)


def test_what_it_costs_is_counted() -> None:
    model = mlp()
    objective = objective_of(model, supervised(model, F.cross_entropy, *data(11)))
    Kronecker().prepare().refresh(objective, rows_of(4, 4, 3), None, (0,))
    assert objective.sample_gradients == 11
