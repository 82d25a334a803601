"""Guards of speed and memory: matrix products are counted, which is exact; times are compared with slack for noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import flow, growth, hand, pictures, step
from benchmarks.problems import Problem, autoencoder, classifier, convolutional
from benchmarks.timing import interleaved, ratio
from torch.utils.flop_counter import FlopCounterMode

from krylov_descent import KSD, Fisher, Subsets
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.flow.sketch import Sketcher
from krylov_descent.samples.interface import StepKey

SMALL = (784, 200, 100, 20, 100, 200, 784)


def flops(run: Callable[[], object]) -> int:
    # The counter does not know the in-place form.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm}) as counter:
        run()
    return int(counter.get_total_flops())


def _addmm(total: Any, a: Any, b: Any, **_: Any) -> int:
    return 2 * int(a[0]) * int(a[1]) * int(b[1])


def dense(kind: str, n: int) -> Problem:
    torch.manual_seed(0)
    return autoencoder("MNIST autoencoder", SMALL, n) if kind == "autoencoder" else classifier(n)


@pytest.mark.parametrize("kind", ["autoencoder", "classifier"])
def test_a_product_takes_the_matrix_products_of_the_hand_written_one(kind: str) -> None:
    problem = dense(kind, 50)
    objective = problem.objective()
    v = torch.randn(objective.parameters.numel)
    ours = CurvatureProduct(CURVATURES["ggn"], objective, [problem.microbatch])
    theirs = hand.HandWritten(problem).cache(problem.x)
    assert float((ours(v) - theirs(v)).norm() / theirs(v).norm()) < 1e-5
    assert flops(lambda: ours(v)) == flops(lambda: theirs(v))


@pytest.mark.parametrize("kind", ["autoencoder", "classifier"])
def test_the_fisher_diagonal_takes_one_matrix_product_per_layer(kind: str) -> None:
    problem = dense(kind, 50)
    objective = problem.objective()
    net = hand.HandWritten(problem)
    batches = problem.microbatches(5)
    passes = [Fisher().gather(objective, StepKey(0, 0)) for _ in range(2)]
    objective.value_and_gradient(batches, passes[0])  # judges the rules
    ours = flops(lambda: objective.value_and_gradient(batches, passes[1]))
    squares = objective.parameters.zeros()
    theirs = flops(lambda: [net.gradient(x, y, squares) for x, y in (batch.data for batch in batches)])
    # Beside it, matrix-vector products of a check on micro-batches 1 and 4.
    assert theirs <= ours < 1.02 * theirs
    expected = squares / squares.max()
    solve = passes[1].solver(objective.comm)
    assert solve is not None
    torch.testing.assert_close(1 / solve(torch.ones_like(squares)), expected.clamp(min=1e-2), rtol=1e-3, atol=1e-6)


def test_a_convolutional_product_has_no_needless_convolutions() -> None:
    """A gradient is three convolutions per layer and a product four, but none back to the images."""
    torch.manual_seed(0)
    problem = convolutional(8)
    objective = problem.objective()
    v = torch.randn(objective.parameters.numel)
    product = CurvatureProduct(CURVATURES["ggn"], objective, [problem.microbatch])
    assert flops(lambda: product(v)) < 1.4 * flops(lambda: objective.value_and_gradient([problem.microbatch]))


def test_a_step_takes_the_passes_it_reports_and_no_more() -> None:
    problem = dense("autoencoder", 400)
    optimizer = KSD(problem.model.parameters(), krylov_dim=5)
    sets = Subsets((problem.x, problem.y), batch_size=100, seed=0)
    optimizer.step(problem.closure, sets)
    reports = []
    ours = flops(lambda: reports.append(optimizer.step(problem.closure, sets)))
    (report,) = reports
    net = hand.HandWritten(problem)
    bare = flops(lambda: step.bare_passes(net, sets.draw(report.iteration, krylov_dim=5), report))
    # The graphs of B are built by a backward pass; V and H̄ take products of their own.
    assert bare < ours < 1.15 * bare


@pytest.mark.nightly
def test_times() -> None:
    """Twice the hand-written time would be a loop in Python, a graph rebuilt, a check that runs every time."""
    problem = dense("autoencoder", 1000)
    objective = problem.objective()
    v = torch.randn(objective.parameters.numel)
    ours = CurvatureProduct(CURVATURES["ggn"], objective, [problem.microbatch])
    net = hand.HandWritten(problem)
    theirs = net.cache(problem.x)
    squares = objective.parameters.zeros()
    seconds = interleaved(
        {
            "product": lambda: ours(v),
            "bare product": lambda: theirs(v),
            "pass": lambda: objective.value_and_gradient(
                [problem.microbatch], Fisher().gather(objective, StepKey(0, 0))
            ),
            "bare pass": lambda: net.gradient(problem.x, problem.y, squares),
        },
        rounds=15,
    )
    assert ratio(seconds["product"], seconds["bare product"]).median < 1.8
    assert ratio(seconds["pass"], seconds["bare pass"]).median < 1.8


@pytest.mark.nightly
def test_memory_is_V_and_about_eight_vectors() -> None:
    points = [growth.point(P=P, K=5, N=20, batch_size=2, steps=3, for_memory=True) for P in (1_000_000, 4_000_000)]
    assert 7 < growth.vectors(points) - 5 < 8.5


@pytest.mark.nightly
def test_a_step_of_the_flow_takes_a_few_times_the_memory_of_its_sketch() -> None:
    found = flow.point(n=8_000, rows=600, points=700)
    assert found["m"] >= 600
    assert 1 < found["bytes"] / (8 * found["mn"]) < 6


def test_the_parts_of_a_step_of_the_flow_are_all_of_it() -> None:
    draw = Sketcher.draw
    points = [flow.one(n, rows, points=60, steps=1) for n, rows in ((200, 10), (400, 30))]
    assert Sketcher.draw is draw
    for found in points:
        assert all(found[part] > 0 for part in flow.PARTS)
        assert sum(found[part] for part in (*flow.PARTS, "other")) == pytest.approx(found["seconds"])
        assert found["other"] < 0.5 * found["seconds"]
    memory = [{"mn": 1e5, "bytes": 3e6}, {"mn": 1e6, "bytes": 3e7}]
    assert flow.copies(memory) == pytest.approx(3.75)


def test_the_pictures_are_drawn_from_the_recorded_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded = json.loads((Path(__file__).parents[1] / "results" / "benchmarks.json").read_text())
    drawn = [path.name for path in pictures.draw(recorded, tmp_path)]
    assert drawn == ["speed.png", "speed-dark.png", "scale.png", "scale-dark.png"]


@pytest.mark.filterwarnings("ignore")  # of the other libraries
def test_the_benchmarks_run() -> None:
    """Each compares results before it compares times."""
    from benchmarks import fisher, memory, products  # they import the other libraries, which warn

    problem = classifier(24)
    found = products.measure(problem, rounds=1)
    assert {"hand-written", "curvlinops", "BackPACK", "torch.func jvp + vjp"} <= set(found)
    assert not any(isinstance(value, str) for value in found.values())
    assert set(fisher.measure(problem, rounds=1)) >= {"gradient + D", "BackPACK", "hand-written"}
    small = autoencoder("", (20, 10, 5, 10, 20), 200)
    assert set(memory.measure(small, batch_size=100, rounds=1)) == {"graphs rebuilt", "bfloat16 basis"}
    assert "step ÷ bare passes" in step.measure(small, batch_size=100, krylov_dim=3, rounds=1)
