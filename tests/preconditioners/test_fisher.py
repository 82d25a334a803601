"""The Fisher diagonal: layer rules against per-sample gradients, the probe averaged over every sign pattern."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.fisher import Fisher, FisherDiagonal, FisherTrust
from krylov_descent.samples.interface import StepKey
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from tests import problems, reference
from tests.curvature.test_curvature import batches_of, objective_of, relative
from tests.problems import Problem


class EverySign(FisherDiagonal):
    """The probe with prescribed signs instead of random ones."""

    signs: Tensor

    def _signs(self, n: int, generator: torch.Generator) -> Tensor:
        return self.signs


def diagonal(statistics: FisherDiagonal, objective: Objective, batches: list[Microbatch]) -> Tensor:
    losses, _ = objective.value_and_gradient(batches, statistics)
    return statistics.diagonal(losses.total_weight, objective.comm)


def dense_diagonal(problem: Problem) -> Tensor:
    g = reference.per_sample_gradients(problem.closure, problem.data, problem.params)
    return g.square().mean(0)


def acting_twice() -> Problem:
    """The first weight acts in its layer and beside it."""
    problem = problems.in_place()
    first, second = (m for m in problem.model.modules() if isinstance(m, nn.Linear))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = second(torch.sigmoid(first(batch[0]) + batch[0] @ first.weight.T))
        return nn.functional.cross_entropy(z, batch[1]), z

    return Problem(problem.model, problem.data, closure)


def patterns(n: int) -> Iterator[Tensor]:
    for signs in itertools.product((-1, 1), repeat=n):
        yield torch.tensor(signs)


@pytest.mark.parametrize("name", ["mlp", "sequence_mlp", "conv", "conv1d3d", "two_terms", "in_place"])
def test_layer_rules_are_exact(name: str) -> None:
    problem = problems.ALL[name]()
    objective = objective_of(problem)
    n = len(problem.data[0])
    statistics = FisherDiagonal(objective.parameters, 1e-2, 1, (0,))
    D = diagonal(statistics, objective, batches_of(problem.data, n - 2, 2))
    assert relative(D, dense_diagonal(problem)) < 1e-9
    assert statistics.trust.trusted == set(range(len(problem.params)))


@pytest.mark.parametrize("probes", [1, 2])
@pytest.mark.parametrize("name", ["rnn", "lstm", "gru", "transformer", "tied", "pinn"])
def test_probe_averages_to_the_diagonal(name: str, probes: int) -> None:
    problem = problems.ALL[name]()
    objective = objective_of(problem)
    n = len(problem.data[0])
    total = torch.zeros(objective.parameters.numel, dtype=torch.float64)
    for signs in patterns(n):
        statistics = EverySign(objective.parameters, 1e-2, probes, (0,))
        statistics.signs = signs
        total += diagonal(statistics, objective, batches_of(problem.data, n))
    assert relative(total / 2**n, dense_diagonal(problem)) < 1e-9


@pytest.mark.parametrize(("name", "probed"), [("pinn", {0, 2}), ("tied", {1})])
def test_rules_that_would_be_wrong_give_way_to_the_probe(name: str, probed: set[int]) -> None:
    # A PINN's biases keep theirs: derivatives of the network do not contain them, and the check finds it so.
    problem = problems.ALL[name]()
    objective = objective_of(problem)
    statistics = FisherDiagonal(objective.parameters, 1e-2, 1, (0,))
    diagonal(statistics, objective, batches_of(problem.data, len(problem.data[0])))
    assert not probed & statistics.trust.trusted


def test_module_called_twice_and_time_first_layers_take_the_probe() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4).double()
    x = torch.randn(4, 4, 4, dtype=torch.float64)

    def twice(batch: Any) -> tuple[Tensor, Tensor]:
        z = shared(torch.tanh(shared(batch[0][:, 0])))
        return z.square().sum(1).mean(), z

    def time_first(batch: Any) -> tuple[Tensor, Tensor]:
        z = torch.tanh(shared(batch[0].transpose(0, 1))).sum(0)
        return z.square().sum(1).mean(), z

    for closure in (twice, time_first):
        problem = Problem(shared, (x,), closure)
        objective = objective_of(problem)
        statistics = FisherDiagonal(objective.parameters, 1e-2, 1, (0,))
        diagonal(statistics, objective, batches_of(problem.data, 4))
        assert 0 not in statistics.trust.trusted, closure.__name__
        total = torch.zeros(20, dtype=torch.float64)
        for signs in patterns(4):
            every = EverySign(objective.parameters, 1e-2, 1, (0,))
            every.signs = signs
            total += diagonal(every, objective, batches_of(problem.data, 4))
        assert relative(total / 16, dense_diagonal(problem)) < 1e-9


def test_without_sets_every_row_is_a_sample() -> None:
    """Two outputs of different length, as a PINN's interior and boundary: rows are samples of their own."""
    problem = problems.pinn()
    interior, boundary = problem.data[0], torch.tensor([[-1.0], [1.0]], dtype=torch.float64)

    def closure(_: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        r = problem.closure((interior,))[1]
        b = problem.model(boundary)
        return r.square().mean() + b.square().mean(), (r, b)

    objective = Objective(closure, ParameterVector([{"params": problem.params, "weight_decay": 0.0}]), SingleProcess())
    rows = []
    for term, scale in ((closure(None)[1][0], 1 / 7), (closure(None)[1][1], 1 / 2)):
        rows += [9 * scale * reference.gradient(e.square(), problem.params) for e in term.reshape(-1)]
    expected = torch.stack(rows).square().mean(0)

    class Alternating(FisherDiagonal):
        queue: list[Tensor]

        def _signs(self, n: int, generator: torch.Generator) -> Tensor:
            return self.queue.pop(0)

    total = torch.zeros_like(expected)
    for signs in patterns(9):
        statistics = Alternating(objective.parameters, 1e-2, 1, (0,))
        statistics.queue = [signs[:7], signs[7:]]
        total += diagonal(statistics, objective, [Microbatch(None, None)])
    assert relative(total / 2**9, expected) < 1e-9


def test_floor_and_zero_diagonal() -> None:
    problem = problems.mlp()
    objective = objective_of(problem)
    statistics = FisherDiagonal(objective.parameters, 0.5, 1, (0,))
    objective.value_and_gradient(batches_of(problem.data, 7), statistics)
    solve = statistics.solver(objective.comm)
    assert solve is not None
    exact = dense_diagonal(problem)
    D = 1 / solve(torch.ones_like(exact))
    torch.testing.assert_close(D, (exact / exact.max()).clamp(min=0.5))
    w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    zero = Objective(
        lambda _: (w.square().mean(), w), ParameterVector([{"params": [w], "weight_decay": 0.0}]), SingleProcess()
    )
    nothing = FisherDiagonal(zero.parameters, 1e-2, 1, (0,))
    zero.value_and_gradient([Microbatch(None, 3)], nothing)
    solve = nothing.solver(zero.comm)
    assert solve is not None
    assert solve(torch.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e18])
def test_scale_of_the_loss_does_not_matter(scale: float) -> None:
    """Squares of such gradients leave the range of float32."""
    problem = problems.mlp()
    exact = dense_diagonal(problem)
    model = problem.model.float()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0].float())
        return nn.functional.cross_entropy(z, batch[1]) * scale, z

    objective = objective_of(Problem(model, problem.data, closure))
    statistics = FisherDiagonal(objective.parameters, 1e-2, 1, (0,))
    objective.value_and_gradient(batches_of(problem.data, 4, 3), statistics)
    assert statistics.trust.trusted == {0, 1, 2, 3}
    solve = statistics.solver(objective.comm)
    assert solve is not None
    D = 1 / solve(torch.ones(objective.parameters.numel))
    torch.testing.assert_close(D.double(), (exact / exact.max()).clamp(min=1e-2), rtol=1e-4, atol=0)


def test_rows_that_mix_after_the_layer_take_the_probe() -> None:
    """A graph network: a row of the outputs depends on several rows of the layer, and the gradient cannot tell."""
    torch.manual_seed(0)
    n = 6
    layer, head = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
    mixing = torch.softmax(torch.randn(n, n, dtype=torch.float64), 1)
    x = torch.randn(n, 3, dtype=torch.float64)

    def closure(_: Any) -> tuple[Tensor, Tensor]:
        z = head(torch.tanh(mixing @ layer(x)))
        return z.square().sum(1).mean(), z

    params = [*layer.parameters(), *head.parameters()]
    objective = Objective(closure, ParameterVector([{"params": params, "weight_decay": 0.0}]), SingleProcess())
    z = closure(None)[1]
    expected = torch.stack([reference.gradient(row.square().sum(), params) for row in z]).square().mean(0)
    total = torch.zeros_like(expected)
    for signs in patterns(n):
        statistics = EverySign(objective.parameters, 1e-2, 1, (0,))
        statistics.signs = signs
        total += diagonal(statistics, objective, [Microbatch(None, None)])
        assert statistics.trust.trusted == {2, 3}
    assert relative(total / 2**n, expected) < 1e-9


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_rules_see_through_subclasses_and_functional_use() -> None:
    class SamePadding(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    class Widened(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x.square()], 1))

    torch.manual_seed(0)
    conv, wide = SamePadding(1, 2, 3), Widened(100, 4)
    model = nn.ModuleList([conv, wide, nn.ParameterList([torch.randn(2, 2, 2, 3), torch.randn(3)])]).double()
    kernel, bias = list(model.parameters())[4:]
    x, frozen = torch.randn(5, 1, 5, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        h = torch.tanh(conv(batch[0]))
        h = torch.tanh(nn.functional.conv2d(h, kernel, padding="same", dilation=(1, 2)))
        z = nn.functional.linear(torch.tanh(wide(h.flatten(1))), frozen, bias=bias)
        return z.square().sum(1).mean(), z

    problem = Problem(model, (x,), closure)
    objective = objective_of(problem)
    statistics = FisherDiagonal(objective.parameters, 1e-2, 1, (0,))
    D = diagonal(statistics, objective, batches_of(problem.data, 5))
    assert statistics.trust.trusted == set(range(6))
    assert relative(D, dense_diagonal(problem)) < 1e-9


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_agrees_with_backpack() -> None:
    backpack = pytest.importorskip("backpack")
    extensions = pytest.importorskip("backpack.extensions")
    torch.manual_seed(0)
    # Its convolution rules know neither dilation with circular padding nor ELU's second derivative.
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(27, 3)
    ).double()
    x = torch.randn(6, 2, 5, 6, dtype=torch.float64)
    y = torch.randint(0, 3, (6,))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    objective = objective_of(Problem(model, (x, y), closure))
    ours = diagonal(FisherDiagonal(objective.parameters, 1e-2, 1, (0,)), objective, batches_of((x, y), 6))
    extended = backpack.extend(model)
    loss = backpack.extend(nn.CrossEntropyLoss())(extended(x), y)
    with backpack.backpack(extensions.SumGradSquared()):
        loss.backward()
    squares: list[Any] = [getattr(p, "sum_grad_squared") for p in model.parameters()]  # noqa: B009
    theirs = 6 * torch.cat([x.reshape(-1) for x in squares])
    assert relative(ours, theirs) < 1e-9


def test_signs_are_keyed_and_leave_the_global_generator_alone() -> None:
    problem = problems.lstm()
    objective = objective_of(problem)
    before = torch.get_rng_state()
    Ds = [
        diagonal(Fisher().gather(objective, StepKey(*key)), objective, batches_of(problem.data, 6))
        for key in ((0, 1, 0), (0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0))
    ]
    assert torch.equal(Ds[0], Ds[1])
    assert not any(torch.equal(Ds[0], D) for D in Ds[2:])
    assert torch.equal(before, torch.get_rng_state())


def test_a_first_micro_batch_without_gradient_decides_nothing() -> None:
    """Its zeros agree with any rule; the next micro-batch tells."""
    problem = acting_twice()
    inner = problem.closure

    def closure(batch: Any) -> Any:
        loss, z = inner(batch)
        return (loss * 0 if len(batch[0]) == 2 else loss), z

    objective = objective_of(Problem(problem.model, problem.data, closure))
    statistics = FisherDiagonal(objective.parameters, 1e-2, 1, (0,))
    objective.value_and_gradient(batches_of(problem.data, 2, 4), statistics)
    assert statistics.trust.trusted == {1, 2, 3}


@pytest.mark.parametrize("bad", [{"floor": 0.0}, {"floor": 2.0}, {"probes": 0}])
def test_options_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Fisher(**bad)


def test_a_layer_before_zeros_is_judged_when_it_can_be() -> None:
    """A last layer of zeros lets no gradient through: agreeing with zero tells nothing of a rule."""
    problem = acting_twice()
    head = [m for m in problem.model.modules() if isinstance(m, nn.Linear)][-1]
    saved = head.weight.detach().clone()
    objective = objective_of(problem)
    preconditioner = Fisher()
    with torch.no_grad():
        head.weight.zero_()
    first = preconditioner.gather(objective, StepKey(0, 0))
    diagonal(first, objective, batches_of(problem.data, len(problem.data[0])))
    assert (first.trust.trusted, first.trust.refuted) == ({2, 3}, set())
    with torch.no_grad():
        head.weight.copy_(saved)
    second = preconditioner.gather(objective, StepKey(0, 1))
    diagonal(second, objective, batches_of(problem.data, len(problem.data[0])))
    assert second.trust is first.trust
    assert (second.trust.trusted, second.trust.refuted) == ({1, 2, 3}, {0})


def test_a_closure_that_takes_another_path_is_noticed() -> None:
    """The rule was right at first; then the weight acts a second time. The pass is taken again, with the probe."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    state = {"twice": False}

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = layer(batch[0])
        if state["twice"]:
            z = z + batch[0] @ layer.weight
        return z.square().sum(1).mean(), z

    optimizer = KSD(layer.parameters(), krylov_dim=2)
    sets = Subsets((x,), batch_size=4, seed=0)
    for state["twice"] in (False, False, True):
        optimizer.step(closure, sets)
    assert optimizer._workspace is not None
    trust = optimizer._workspace.of(FisherTrust)
    assert (trust.trusted, trust.refuted) == ({1}, {0})


def test_judging_is_not_counted() -> None:
    """A resumed run repeats it."""
    problem = problems.mlp()
    objective = objective_of(problem)
    for _ in range(2):
        objective.sample_gradients = 0.0
        diagonal(Fisher().gather(objective, StepKey(0, 0)), objective, batches_of(problem.data, 7))
        assert objective.sample_gradients == 7


def test_an_optimizer_judges_anew_for_another_closure_and_for_other_parameters() -> None:
    problem = problems.mlp()
    optimizer = KSD(problem.params, krylov_dim=2)
    optimizer.step(lambda: problem.closure(problem.data))
    first = optimizer._workspace.of(FisherTrust)
    assert first.trusted == {0, 1, 2, 3}
    assert copy.deepcopy(optimizer)._workspace.of(FisherTrust).trusted == set()
    optimizer.step(lambda: problem.closure(problem.data))
    assert optimizer._workspace.of(FisherTrust) is not first
    second = optimizer._workspace.of(FisherTrust)

    def closure() -> Any:
        return problem.closure(problem.data)

    for _ in range(2):
        optimizer.step(closure)
    assert optimizer._workspace.of(FisherTrust) is not second
    third = optimizer._workspace.of(FisherTrust)
    problem.params[0].requires_grad_(False)
    optimizer.step(closure)
    assert optimizer._workspace.of(FisherTrust) is not third


def test_no_hook_outlives_the_pass() -> None:
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    KSD([w]).step(lambda: (w.square().mean(), w))
    assert not w._backward_hooks


def test_a_pass_that_overflows_costs_no_rule_its_trust() -> None:
    problem = problems.mlp()
    inner, state = problem.closure, {"factor": 1.0}

    def closure(batch: Any) -> tuple[Tensor, Any]:
        loss, z = inner(batch)
        return loss * state["factor"], z

    objective = objective_of(Problem(problem.model, problem.data, closure))
    preconditioner = Fisher()
    for state["factor"] in (1.0, float("nan"), float("inf"), 1.0):
        statistics = preconditioner.gather(objective, StepKey(0, 0))
        diagonal(statistics, objective, batches_of(problem.data, 7))
    assert statistics.trust.trusted == {0, 1, 2, 3}
    assert (
        relative(
            diagonal(preconditioner.gather(objective, StepKey(0, 1)), objective, batches_of(problem.data, 7)),
            dense_diagonal(problem),
        )
        < 1e-9
    )


def test_hooks_are_gone_after_an_error_too() -> None:
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def closure() -> tuple[Tensor, Tensor]:
        return other.square().mean(), w  # the loss is not of the outputs

    with pytest.raises(ValueError, match="not computed from the outputs"):
        KSD([w, other]).step(closure)
    assert not w._backward_hooks
    assert not other._backward_hooks
