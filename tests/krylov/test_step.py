"""The method: Algorithm 3 against its naive transcription, and what theory promises on quadratics and saddles."""

from __future__ import annotations

import gc
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import krylov_descent
from krylov_descent import KSD, Fisher, Search, StopReason, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.subspace import BasisBuffer
from krylov_descent.objective.objective import Objective, relative_noise
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from tests import problems, reference

F64 = torch.float64


def quadratic(n: int, seed: int = 0, condition: float = 1e3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=F64, generator=generator))[0]
    H = (Q * torch.logspace(0, torch.tensor(condition).log10().item(), n, dtype=F64)) @ Q.T
    return (H + H.T) / 2, torch.randn(n, dtype=F64, generator=generator)


def test_three_steps_equal_the_naive_transcription() -> None:
    problem = problems.mlp(40)
    K, steps = 5, 3
    vector = ParameterVector([{"params": problem.params, "weight_decay": 0.0}])
    theta0 = vector.read()
    sets = Subsets(problem.data, batch_size=7, seed=3, fraction=0.25)
    search = Search(tolerance=1e-9, floor=1e-4)

    def gathered(microbatches: Any) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts) for parts in zip(*(m.data for m in microbatches), strict=True))

    drawn = [sets.draw(i, krylov_dim=K) for i in range(steps)]
    samples = [(gathered(d.a), gathered(d.b), gathered(d.c)) for d in drawn]

    def f_and_g(theta: Tensor, batch: Any) -> tuple[float, Tensor]:
        vector.write(theta)
        loss = problem.closure(batch)[0]
        return loss.item(), reference.gradient(loss, problem.params)

    def fisher_diagonal(theta: Tensor, batch: Any) -> Tensor:
        vector.write(theta)
        return reference.per_sample_gradients(problem.closure, batch, problem.params).square().mean(0)

    def ggn(theta: Tensor, batch: Any) -> Tensor:
        vector.write(theta)
        loss, outputs = problem.closure(batch)
        return reference.dense_ggn(loss, outputs, problem.params)

    noise = relative_noise(F64)
    expected, bases, reduced = reference.algorithm_3(
        f_and_g,
        fisher_diagonal,
        ggn,
        theta0,
        samples,
        K,
        1e-4,
        1e-4,
        1e-9,
        noise,
        30,
        120,
    )
    vector.write(theta0)
    optimizer = KSD(problem.params, **{**krylov_descent.PAPER, "krylov_dim": K, "search": search})
    previous = torch.zeros_like(theta0)
    previous[0] = 1.0
    for i in range(steps):
        before = vector.read()
        report = optimizer.step(problem.closure, sets)
        V = optimizer._workspace.of(BasisBuffer).V
        assert V is not None
        assert report.krylov_dim == K
        naive = bases[i]
        # The same vectors, the previous step in their span, and the same reduced Hessian.
        torch.testing.assert_close(V.tensor(), naive.T, rtol=0, atol=1e-8)
        assert report.inner_evaluations < search.evaluations  # no cap was met
        assert float((previous - V.combine(V.dots(previous))).norm() / previous.norm()) < 1e-8
        torch.testing.assert_close(
            torch.tensor(report.ritz_values, dtype=F64), torch.linalg.eigvalsh(reduced[i]), rtol=1e-8, atol=1e-10
        )
        previous = vector.read() - before
    assert float((vector.read() - expected).norm() / expected.norm()) < 1e-8


def test_one_krylov_vector_is_conjugate_gradients() -> None:
    H, b = quadratic(12)
    w = nn.Parameter(torch.zeros(12, dtype=F64))
    optimizer = KSD([w], krylov_dim=1, curvature="hessian", preconditioner=None)
    x, r = torch.zeros(12, dtype=F64), b.clone()
    p = r.clone()
    for _ in range(8):
        alpha = (r @ r) / (p @ H @ p)
        x = x + alpha * p
        new = r - alpha * (H @ p)
        p = new + (new @ new) / (r @ r) * p
        r = new
        optimizer.step(lambda: 0.5 * w @ H @ w - b @ w)
        assert float((w.detach() - x).norm() / x.norm()) < 1e-6


@pytest.mark.parametrize("n", [1, 2, 7, 20])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_small_quadratic_is_solved_in_one_step(n: int, curvature: Any) -> None:
    H, b = quadratic(n, condition=100)
    L = torch.linalg.cholesky(H)
    x = torch.linalg.solve(H, b)
    w = nn.Parameter(torch.zeros(n, dtype=F64))

    def closure() -> tuple[Tensor, Tensor]:
        r = L.T @ (w - x)
        return 0.5 * r.square().sum(), r

    KSD([w], krylov_dim=20, curvature=curvature, preconditioner=None).step(closure)
    assert float((w.detach() - x).norm() / x.norm()) < 1e-10


def test_more_vectors_than_rank_break_down_cleanly() -> None:
    torch.manual_seed(0)
    A, y = torch.randn(5, 30, dtype=F64), torch.randn(5, dtype=F64)
    w = nn.Parameter(torch.zeros(30, dtype=F64))

    def closure() -> tuple[Tensor, Tensor]:
        r = A @ w - y
        return r.square().mean(), r

    optimizer = KSD([w], krylov_dim=25, preconditioner=None)
    report = optimizer.step(closure)
    assert report.krylov_dim == 5
    assert report.search_loss_after < 1e-12
    optimizer.step(closure)
    assert bool(w.isfinite().all())


def test_outputs_of_another_forward_pass_are_refused_by_the_product() -> None:
    w = nn.Parameter(torch.ones(4, dtype=F64))
    with pytest.raises(ValueError, match="not computed from the outputs"):
        KSD([w]).step(lambda: (w.square().mean(), 2 * w))


def test_saddle_is_left_in_five_steps() -> None:
    """f = Σ λᵢxᵢ²/2 + ‖x‖⁴/4 with ten negative λ: minima have f ≤ -¼ for the most negative, λ = -1."""
    n = 50
    lam = torch.cat([torch.linspace(-1, -0.1, 10, dtype=F64), torch.linspace(0.1, 10, 40, dtype=F64)])
    torch.manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=F64))[0]
    start = torch.randn(n, dtype=F64)
    for negative in ("floor", "absolute"):
        w = nn.Parameter(1e-6 * start / start.norm())

        def closure(w: nn.Parameter = w) -> Tensor:
            x = Q.T @ w
            f: Tensor = (lam * x.square()).sum() / 2 + x.square().sum().square() / 4
            return f

        optimizer = KSD([w], curvature="hessian", search=Search(negative=negative))
        for _ in range(5):
            report = optimizer.step(closure)
        assert report.search_loss_after < -0.2
        assert report.preconditioner == "none"


def test_zero_gradient_ends_with_a_report() -> None:
    w = nn.Parameter(torch.zeros(3))
    report = KSD([w]).step(lambda: (w.square().mean(), w))
    assert report.stop_reason is StopReason.ZERO_GRADIENT
    assert w.tolist() == [0, 0, 0]
    unused = nn.Parameter(torch.ones(2))
    c = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        KSD([unused]).step(lambda: (torch.ones(()), c))


def test_one_parameter_and_one_sample() -> None:
    w = nn.Parameter(torch.tensor(3.0, dtype=F64))
    sets = Subsets((torch.ones(1, 1, dtype=F64),), batch_size=8, seed=0)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = batch[0] * w - 2
        return r.square().mean(), r

    optimizer = KSD([w])
    for _ in range(3):
        optimizer.step(closure, sets)
    assert abs(w.item() - 2) < 1e-12


def test_region_of_nan_is_avoided() -> None:
    w = nn.Parameter(torch.tensor([5.0, 0.5], dtype=F64))

    def closure() -> tuple[Tensor, Tensor]:
        return (w - torch.log(w)).sum(), w  # NaN for w < 0, minimum at 1

    optimizer = KSD([w], curvature="hessian", preconditioner=None)
    for _ in range(6):
        report = optimizer.step(closure)
    assert bool(w.isfinite().all())
    assert abs(report.search_loss_after - 2) < 1e-9


def test_loss_that_is_not_finite_is_an_error_and_leaves_parameters() -> None:
    for bad in (torch.nan, torch.inf):
        w = nn.Parameter(torch.ones(3))
        with pytest.raises(ValueError, match=rf"loss on A is {bad}.*NaN or inf in the data"):
            KSD([w]).step(lambda w=w, bad=bad: (w.square().mean() * bad, w))
        assert w.tolist() == [1, 1, 1]


def test_everything_else_is_nan() -> None:
    """Finite only at the start: the search finds nothing and says so."""
    w = nn.Parameter(torch.ones(3))
    start = w.detach().clone()

    def closure() -> tuple[Tensor, Tensor]:
        z = w * (1.0 if torch.equal(w.detach(), start) else torch.nan)
        return z.square().mean(), z

    report = KSD([w]).step(closure)
    # Steps too short to change a float32 are finite again: there it ends as noise.
    assert report.stop_reason in (StopReason.NON_FINITE, StopReason.NOISE)
    assert torch.equal(w.detach(), start)
    assert report.search_loss_after == report.search_loss_before


def test_gradient_of_uneven_micro_batches_equals_one_batch() -> None:
    torch.manual_seed(0)
    n = 10_007
    x, y = torch.randn(n, 6, dtype=F64), torch.randn(n, dtype=F64)
    norms = []
    for batch_size in (n, 997):
        w = nn.Parameter(torch.ones(6, dtype=F64))

        def closure(batch: Any, w: nn.Parameter = w) -> tuple[Tensor, Tensor]:
            r = torch.tanh(batch[0] @ w) - batch[1]
            return r.square().mean(), r

        sets = Subsets((x, y), batch_size=batch_size, seed=0)
        report = KSD([w], krylov_dim=4).step(closure, sets)
        norms.append((report.grad_norm, report.loss))
        draw = sets.draw(0, krylov_dim=4)
        b, c = (torch.cat([m.data[0] for m in part]) for part in (draw.b, draw.c))
        assert len(b) == len(c) == 2502
        assert len(torch.unique(torch.cat([b, c]), dim=0)) == 5004
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)


def test_weight_decay_per_group_is_in_value_gradient_and_step() -> None:
    """Ridge regression with its closed form; the bias is not decayed."""
    torch.manual_seed(0)
    X, y = torch.randn(50, 4, dtype=F64), torch.randn(50, dtype=F64)
    w, b = nn.Parameter(torch.zeros(4, dtype=F64)), nn.Parameter(torch.zeros(1, dtype=F64))

    def closure() -> tuple[Tensor, Tensor]:
        r = X @ w + b - y
        return r.square().mean(), r

    groups: list[dict[str, Any]] = [{"params": [w], "weight_decay": 0.7}, {"params": [b]}]
    optimizer = KSD(groups)
    for _ in range(2):
        report = optimizer.step(closure)
    Z = torch.cat([X, torch.ones(50, 1, dtype=F64)], 1)
    ridge = 2 / 50 * Z.T @ Z + torch.diag(torch.tensor([0.7] * 4 + [0], dtype=F64))
    expected = torch.linalg.solve(ridge, 2 / 50 * Z.T @ y)
    torch.testing.assert_close(torch.cat([w, b]).detach(), expected, rtol=1e-8, atol=1e-8)
    value = (Z @ expected - y).square().mean() + 0.35 * expected[:4].square().sum()
    assert report.search_loss_after == pytest.approx(float(value))


def test_previous_direction_none_and_e1() -> None:
    found = {}
    for previous in ("step", "e1", None):
        torch.manual_seed(0)
        fresh = problems.mlp(30)
        optimizer = KSD(fresh.params, krylov_dim=3, previous=previous)
        rows = []
        for _ in range(2):
            report = optimizer.step(lambda fresh=fresh: fresh.closure(fresh.data))
            rows.append(len(report.ritz_values))
        found[previous] = rows
    assert found == {"step": [3, 4], "e1": [4, 4], None: [3, 3]}


def test_sample_gradients_are_counted_as_documented() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 3, dtype=F64)
    layer = nn.Linear(3, 2).double()
    scale = nn.Parameter(torch.ones(2, dtype=F64))
    sets = Subsets((x,), batch_size=30, fraction=0.2, seed=0)

    def exact(batch: Any) -> tuple[Tensor, Tensor]:
        z = torch.tanh(layer(batch[0]))
        return (z - 1).square().sum(1).mean(), z

    def probed(batch: Any) -> tuple[Tensor, Tensor]:
        z = torch.tanh(layer(batch[0])) * scale
        return (z - 1).square().sum(1).mean(), z

    # The check at the first step: 30 samples twice and in halves, and their gradient with and through the outputs.
    first = 30 * (2 / 3) + 30 / 3
    bypass = 30 * (4 / 3)
    for closure, curvature, extra, unit in (
        (exact, "ggn", 0, 4 / 3),
        (exact, "hessian", 0, 2),
        (exact, "fisher", 0, 4 / 3),
        (probed, "ggn", 2 / 3, 4 / 3),
    ):
        params = [*layer.parameters(), scale] if closure is probed else list(layer.parameters())
        optimizer = KSD(params, krylov_dim=4, curvature=curvature, previous=None)  # type: ignore[arg-type]
        report = optimizer.step(closure, sets)
        check = first + bypass * (curvature != "hessian")
        gradient = 100 * (1 + extra)
        products = 20 * (1 + report.krylov_dim * unit)
        search = 20 * (report.inner_evaluations + 1 / 3)  # and a forward pass at the point taken
        expected = check + gradient + products + search
        assert report.sample_gradients == pytest.approx(expected)
        assert report.set_sizes == {"A": 100, "B": 20, "C": 20}


@pytest.mark.nightly
def test_two_hundred_steps_leave_nothing_behind() -> None:
    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    def resident_megabytes() -> float:
        statm = Path("/proc/self/statm")
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20 if statm.exists() else 0.0

    # Half a megabyte of parameters: one vector left behind at each step would show.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8000), nn.Tanh(), nn.Linear(8000, 3)).double()
    source = problems.mlp(60)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    sets = Subsets(source.data, batch_size=16, seed=0, fraction=0.3)
    optimizer = KSD(model.parameters(), krylov_dim=2, memory_budget=4_600_000, search=Search(iterations=3))
    counts, memory = [], []
    for i in range(200):
        optimizer.step(closure, sets)
        if i in (49, 199):
            counts.append(live())
            memory.append(resident_megabytes())
    assert counts[0] == counts[1]
    assert memory[1] - memory[0] < 8, memory


def test_float32_and_half_precision_descend() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        x = torch.randn(64, 3, dtype=dtype)
        y = torch.sin(x.sum(1, keepdim=True))

        def closure(model: nn.Module = model, x: Tensor = x, y: Tensor = y) -> tuple[Tensor, Tensor]:
            r = (model(x) - y).float()
            return r.square().mean(), r

        optimizer = KSD(model.parameters(), krylov_dim=8)
        losses = [float(optimizer.step(closure)) for _ in range(8)]
        assert losses[-1] < 0.2 * losses[0]
        assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1.0, 1e18])
def test_the_scale_of_the_loss_does_not_matter_in_float32(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(64, 3)
    y = torch.sin(x.sum(1, keepdim=True))

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean() * scale, r

    optimizer = KSD(model.parameters(), krylov_dim=8)
    losses = [float(optimizer.step(closure)) for _ in range(6)]
    assert losses[-1] < 0.05 * losses[0]


def test_floor_and_options_reach_the_method() -> None:
    problem = problems.mlp(30)
    exact = KSD(problem.params, preconditioner=Fisher(floor=1.0)).step(lambda: problem.closure(problem.data))
    problem = problems.mlp(30)
    plain = KSD(problem.params, preconditioner=None).step(lambda: problem.closure(problem.data))
    # A floor of one makes D a multiple of the identity: the same subspace as without D.
    assert exact.ritz_values == pytest.approx(plain.ritz_values, rel=1e-6)
    assert exact.preconditioner == "fisher"
    assert plain.preconditioner == "none"


def test_softmax_classifier_reaches_its_optimum() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 5, dtype=F64), torch.randint(0, 3, (200,))
    layer = nn.Linear(5, 3).double()

    def closure() -> tuple[Tensor, Tensor]:
        z = layer(x)
        return F.cross_entropy(z, y), z

    optimizer = KSD(layer.parameters())
    for _ in range(4):
        report = optimizer.step(closure)
    assert report.grad_norm < 1e-6


def test_state_that_lies_in_one_piece_is_read_without_a_copy() -> None:
    problem = problems.mlp()
    vector = ParameterVector([{"params": problem.params, "weight_decay": 0.0}])
    x = torch.arange(vector.numel, dtype=torch.float64)
    parts = vector.unflatten(x)
    assert vector.joined(parts) is x
    # Not where a part was replaced, or comes from elsewhere in the same storage.
    for other in (parts[1].clone(), parts[1] + 0, vector.unflatten(x.clone())[1]):
        again = vector.joined([parts[0], other, *parts[2:]])
        assert again is not x
        assert torch.equal(again, x)
    assert torch.equal(vector.joined([p.flip(0) for p in parts]), vector.flatten([p.flip(0) for p in parts]))


def test_anomaly_detection_goes_with_trials_that_are_not_finite() -> None:
    """Their backward passes would raise."""
    t = torch.linspace(0, 1, 20, dtype=torch.float64)
    w = torch.nn.Parameter(torch.tensor([2.0, 2.0], dtype=torch.float64))

    def closure() -> tuple[Tensor, Tensor]:
        r = torch.log(w[0] + w[1] * t) + 6
        return r.square().mean(), r

    optimizer = KSD([w])
    with torch.autograd.set_detect_anomaly(True):
        losses = [optimizer.step(closure).loss for _ in range(5)]
    assert losses[-1] < 1e-10 < losses[0]


def test_a_trial_that_is_not_finite_costs_one_micro_batch() -> None:
    w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    seen = []

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(batch))
        z = batch - w
        return (1 - w.sum()).log() * 0 + z.square().sum(1).mean(), z

    vector = ParameterVector([{"params": [w], "weight_decay": 0.0}])
    objective = Objective(closure, vector, SingleProcess())
    batches = [Microbatch(part, 3) for part in torch.randn(9, 2, dtype=torch.float64).chunk(3)]
    finite, _ = objective.value_and_gradient(batches)
    assert math.isfinite(finite.mean)
    assert objective.sample_gradients == 9
    w.data += 1
    objective.sample_gradients = 0.0
    broken, _ = objective.value_and_gradient(batches)
    assert not math.isfinite(broken.mean)
    assert objective.sample_gradients == 3  # of the three samples of the first micro-batch
    assert seen == [3] * 4
    # KSD finds its way round such points.
    w.data -= 1
    sets = Subsets(torch.randn(40, 2, dtype=torch.float64) + 2, batch_size=8, seed=0)
    report = KSD([w], krylov_dim=2).step(closure, sets)
    assert report.search_loss_after < report.search_loss_before
