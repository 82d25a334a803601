"""Exact squares of per-sample gradients, for modules without a layer rule, against one sample at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import KSD, PAPER, Subsets
from krylov_descent.curvature.linearise import pull_back_each
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners import sample_squares
from krylov_descent.preconditioners.fisher import Fisher, FisherDiagonal
from krylov_descent.samples.interface import Microbatch, StepKey
from tests import problems, reference
from tests.curvature.test_curvature import batches_of, objective_of, relative
from tests.preconditioners.test_fisher import dense_diagonal, diagonal
from tests.problems import Problem

N = 19
F64 = torch.float64


class Doubled(torch.autograd.Function):
    """x², whose backward pass cannot be batched: it looks at a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        (g,) = gradients
        return 2 * x * g if g.abs().max().item() > 0 else torch.zeros_like(x)


class Mixed(nn.Module):
    """Layers with rules beside an embedding, norms, attention, a recurrent layer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.gru = nn.GRU(4, 3, num_layers=2, batch_first=True, bidirectional=True)
        self.shift = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.conv(self.table(tokens).transpose(1, 2))).transpose(1, 2)
        h = self.norm(h)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = self.head(Doubled.apply(self.gru(h)[0][:, -1] + self.shift))  # type: ignore[no-untyped-call]
        return out


def mixed(n: int = N) -> Problem:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens, y = torch.randint(0, 11, (n, 5), generator=generator), torch.randint(0, 3, (n,), generator=generator)
    model = Mixed().double()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z

    return Problem(model, (tokens, y), closure)


CASES: dict[str, Callable[[], Problem]] = {
    "rnn": functools.partial(problems.recurrent, nn.RNN, N),
    "lstm": functools.partial(problems.recurrent, nn.LSTM, N),
    "gru": functools.partial(problems.recurrent, nn.GRU, N),
    "transformer": functools.partial(problems.transformer, N),
    "weight used twice": functools.partial(problems.tied, N),
    "differentiated inside": functools.partial(problems.pinn, N),
    "mixed": mixed,
}


def exact(objective: Objective) -> FisherDiagonal:
    return Fisher(floor=1e-4, exact=True).gather(objective, StepKey(0, 0))


def cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))


@pytest.mark.parametrize("name", CASES)
def test_diagonal_is_that_of_per_sample_gradients(name: str) -> None:
    problem = CASES[name]()
    objective = objective_of(problem)
    D = diagonal(exact(objective), objective, batches_of(problem.data, 13, 6))
    expected = dense_diagonal(problem)
    torch.testing.assert_close(D, expected, rtol=1e-9, atol=1e-15 * float(expected.max()))
    # and D⁻¹g, with the paper's floor
    statistics = exact(objective)
    _, g = objective.value_and_gradient(batches_of(problem.data, 13, 6), statistics)
    solve = statistics.solver(objective.comm)
    assert solve is not None
    assert 1 - cosine(solve(g), g / expected.clamp(min=1e-4 * expected.max())) < 1e-10


def test_the_probe_is_not_exact() -> None:
    """Or the tests above would tell nothing."""
    problem = CASES["lstm"]()
    objective = objective_of(problem)
    D = diagonal(Fisher().gather(objective, StepKey(0, 0)), objective, batches_of(problem.data, 13, 6))
    expected = dense_diagonal(problem)
    g = objective.value_and_gradient(batches_of(problem.data, N))[1]
    floored = [x.clamp(min=1e-4 * x.max()) for x in (D, expected)]
    assert cosine(g / floored[0], g / floored[1]) < 0.95


def test_the_paper_has_the_exact_diagonal_and_layer_rules_cost_nothing() -> None:
    """Parts of 8 samples take a forward pass and 8 backward passes: 5⅔ gradients per sample."""
    assert PAPER["preconditioner"].exact
    recurrent, dense = problems.recurrent(nn.LSTM, 32), problems.mlp(32)
    costs = []
    for problem in (recurrent, dense):
        objective = objective_of(problem)
        diagonal(exact(objective), objective, batches_of(problem.data, 32))
        costs.append(objective.sample_gradients / 32)
    assert costs == pytest.approx([1 + 17 / 3, 1.0])


def weighted(problem: Problem, w: Tensor) -> Problem:
    """The mean of cross entropies with weights w, and their sum as the weight of a micro-batch."""

    def closure(batch: Any) -> Any:
        z = problem.model(batch[0])
        terms = F.cross_entropy(z, batch[1], reduction="none") * batch[2]
        return terms.sum() / batch[2].sum(), z, batch[2].sum()

    return Problem(problem.model, (*problem.data, w), closure)


@pytest.mark.parametrize("part", [2, 8, 100])
def test_weights_samples_without_weight_and_masked_micro_batches(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_squares, "_PART", part)
    w = torch.rand(N, dtype=F64, generator=torch.Generator().manual_seed(3)) + 0.1
    w[[1, 4, 7]] = 0
    w[12:15] = 0  # the whole of the second micro-batch
    problem = weighted(problems.recurrent(nn.LSTM, N), w)
    x, y, _ = problem.data
    rows = []
    for i in range(N):
        loss = F.cross_entropy(problem.model(x[i : i + 1]), y[i : i + 1])
        rows.append(reference.gradient(N * w[i] / w.sum() * loss, problem.params))
    expected = torch.stack(rows).square().mean(0)
    objective = objective_of(problem)
    D = diagonal(exact(objective), objective, batches_of(problem.data, 12, 3, 4))
    assert relative(D, expected) < 1e-10


def heads(closure_data: Callable[[Any], tuple[Tensor, Tensor]]) -> tuple[nn.Module, Callable[[Any], Any]]:
    torch.manual_seed(0)
    body, scale = nn.GRU(3, 4, batch_first=True), nn.Parameter(torch.randn(2))
    model = nn.ModuleList([body, nn.ParameterList([scale])]).double()
    scale = next(iter(model[1].parameters()))

    def closure(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x, t = closure_data(batch)
        h = body(x)[0][:, -1]
        first, second = h[:, :2] * scale, h[:, 2:].sin()
        loss = F.cross_entropy(first, t) + second.square().sum(1).mean()
        return loss, {"first": first, "second": second}

    return model, closure


def test_several_outputs_of_a_sample_are_squared_together_and_data_may_be_mappings() -> None:
    model, closure = heads(lambda batch: (batch["x"] * batch["factor"], batch["targets"][0]))
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(N, 3, 3, dtype=F64, generator=generator), torch.randint(0, 2, (N,), generator=generator)
    params = list(model.parameters())
    objective = objective_of(Problem(model, (x, t), closure))
    one = {"x": x, "factor": 2.0, "targets": [t]}
    rows = [
        reference.gradient(closure({"x": x[i : i + 1], "factor": 2.0, "targets": [t[i : i + 1]]})[0], params)
        for i in range(N)
    ]
    D = diagonal(exact(objective), objective, [Microbatch(one, N)])
    assert relative(D, torch.stack(rows).square().mean(0)) < 1e-10
    assert objective.sample_gradients < 7 * N  # by parts


@pytest.mark.parametrize("aligned", [False, True])
def test_rows_that_depend_on_each_other_keep_the_graph_of_all(aligned: bool) -> None:
    """A row of the outputs is a sample, and δ of that row alone its cotangent."""
    problem = problems.recurrent(nn.LSTM, N)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = problem.model(problem.data[0] if batch is None else batch[0])
        z = z - z.mean(0)
        return F.cross_entropy(z, problem.data[1][: len(z)]), z

    z = closure(None)[1]
    targets = problem.data[1]
    rows = [reference.gradient(F.cross_entropy(z[i : i + 1], targets[i : i + 1]), problem.params) for i in range(N)]
    objective = objective_of(Problem(problem.model, problem.data, closure))
    batch = Microbatch(problem.data, N) if aligned else Microbatch(None, None)
    D = diagonal(exact(objective), objective, [batch])
    assert relative(D, torch.stack(rows).square().mean(0)) < 1e-10
    assert objective.sample_gradients / N == pytest.approx(1 + N * 2 / 3)


def test_without_sets_every_row_of_every_output_is_a_sample() -> None:
    """An interior, a boundary of another length, and a single number."""
    problem = problems.pinn(N)
    ends = torch.tensor([[-1.0], [1.0]], dtype=F64)

    def closure(_: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        r, b = problem.closure(problem.data)[1], problem.model(ends)
        middle = problem.model(torch.zeros(1, 1, dtype=F64))[0, 0]
        return r.square().mean() + b.square().mean() + middle.square(), (r, b, middle)

    rows = []
    for z, scale in zip(closure(None)[1], (1 / N, 1 / 2, 1.0), strict=True):
        rows += [(N + 3) * scale * reference.gradient(e.square(), problem.params) for e in z.reshape(-1)]
    objective = objective_of(Problem(problem.model, problem.data, closure))
    D = diagonal(exact(objective), objective, [Microbatch(None, None)])
    assert relative(D, torch.stack(rows).square().mean(0)) < 1e-10


class Opaque:
    """A batch that is no container of tensors."""

    def __init__(self, data: Any) -> None:
        self.data = data


@pytest.mark.parametrize("why", ["object", "a tensor of all samples", "refuses parts", "packed"])
def test_batches_that_cannot_be_divided_keep_their_graph(why: str) -> None:
    problem = problems.recurrent(nn.GRU, N)
    x, y = problem.data
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((N,), 4), batch_first=True)
    batch = {
        "object": Opaque((x, y)),
        "a tensor of all samples": (x, y, torch.ones(3)),
        "refuses parts": (x, y),
        "packed": (packed, y),
    }[why]

    def closure(batch: Any) -> Any:
        x, y = (batch.data if isinstance(batch, Opaque) else batch)[:2]
        if isinstance(x, nn.utils.rnn.PackedSequence):
            x = nn.utils.rnn.pad_packed_sequence(x, batch_first=True)[0]
        if why == "refuses parts" and len(x) != N:
            raise ValueError("whole batches only")
        return problem.closure((x, y))

    objective = objective_of(Problem(problem.model, problem.data, closure))
    D = diagonal(exact(objective), objective, [Microbatch(batch, N)])
    assert relative(D, dense_diagonal(problem)) < 1e-10
    assert objective.sample_gradients / N == pytest.approx(1 + N * 2 / 3)


def test_large_models_form_few_gradients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.recurrent(nn.LSTM, N)
    objective = objective_of(problem)
    seen = []

    def counted(outputs: Any, params: Any, us: Any) -> Any:
        seen.append(len(us))
        return pull_back_each(outputs, params, us)

    monkeypatch.setattr(sample_squares, "pull_back_each", counted)
    numbers = sum(p.numel() for p in problem.params[:4])
    for chunk, most in ((1 << 22, 8), (3 * numbers, 3), (numbers - 1, 1)):
        monkeypatch.setattr(sample_squares, "_CHUNK", chunk)
        seen.clear()
        D = diagonal(exact(objective), objective, batches_of(problem.data, N))
        assert relative(D, dense_diagonal(problem)) < 1e-10
        assert max(seen) <= most
        assert sum(seen) == N


def test_operations_that_are_batched_by_a_loop_do_not_warn() -> None:
    """Flash attention is one; float32 attention uses it."""
    problem = problems.transformer(N)
    expected = dense_diagonal(problem)
    model = problem.model.float()
    objective = objective_of(Problem(model, problem.data, lambda batch: problem.closure((batch[0].float(), batch[1]))))
    D = diagonal(exact(objective), objective, batches_of(problem.data, N))
    assert relative(D.double(), expected) < 1e-4


def test_outputs_without_a_sample_dimension_are_refused() -> None:
    problem = problems.recurrent(nn.LSTM, N)

    def flattened(batch: Any) -> tuple[Tensor, Tensor]:
        z = problem.model(batch[0]).flatten()
        return z.square().mean(), z

    optimizer = KSD(problem.params, **{**PAPER, "krylov_dim": 3})
    with pytest.raises(ValueError, match="dimension 0 must be the sample"):
        optimizer.step(flattened, Subsets(problem.data, batch_size=N, fraction=0.5, seed=0))


def test_steps_do_not_depend_on_micro_batches() -> None:
    """The probe's would: its signs are drawn for each."""
    found = []
    for batch_size in (5, 40):
        problem = problems.recurrent(nn.LSTM, 40)
        optimizer = KSD(problem.params, **{**PAPER, "krylov_dim": 3})
        sets = Subsets(problem.data, batch_size=batch_size, fraction=0.5, seed=0)
        found.append([optimizer.step(problem.closure, sets).loss for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
