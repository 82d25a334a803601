"""Gauss–Newton, Hessian and Fisher products against dense matrices and against other libraries."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from krylov_descent import KSD
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.storage import BasisStorage
from tests import problems, reference
from tests.problems import Problem


def objective_of(problem: Problem, weight_decay: float = 0.0) -> Objective:
    groups = [{"params": list(problem.model.parameters()), "weight_decay": weight_decay}]
    return Objective(problem.closure, ParameterVector(groups), SingleProcess())


def batches_of(data: tuple[Tensor, ...], *sizes: int) -> list[Microbatch]:
    parts = zip(*(torch.split(t, list(sizes)) for t in data), strict=True)
    return [Microbatch(part, n) for part, n in zip(parts, sizes, strict=True)]


def matrix(product: CurvatureProduct, P: int) -> Tensor:
    return torch.stack([product(e) for e in torch.eye(P, dtype=torch.float64)])


def dense(kind: str, problem: Problem) -> Tensor:
    return dense_of(kind, problem.closure, problem.data, problem.params)


def dense_of(kind: str, closure: Any, data: tuple[Tensor, ...], params: Sequence[Tensor]) -> Tensor:
    loss, outputs = closure(data)
    if kind == "ggn":
        return reference.dense_ggn(loss, outputs, params)
    if kind == "hessian":
        return reference.dense_hessian(loss, params)
    g = reference.per_sample_gradients(closure, data, params)
    return g.T @ g / len(g)


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher"])
@pytest.mark.parametrize("name", problems.ALL)
def test_product_equals_dense_matrix(name: str, kind: str) -> None:
    problem = problems.ALL[name]()
    n = len(problem.data[0])
    objective = objective_of(problem)
    product = CurvatureProduct(CURVATURES[kind], objective, batches_of(problem.data, 2, n - 3, 1))
    # The oracle uses the plain attention kernel too: the fused one has no second derivative.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = dense(kind, problem)
    assert relative(matrix(product, len(expected)), expected) < 1e-9


@pytest.mark.parametrize("name", problems.ALL)
def test_curvature_within_rows_equals_dense_matrix(name: str) -> None:
    problem = problems.ALL[name]()
    n = len(problem.data[0])
    product = CurvatureProduct(CURVATURES["ggn"], objective_of(problem, 0.3), batches_of(problem.data, 2, n - 3, 1))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = dense("ggn", problem)
    V = torch.linalg.qr(torch.randn(len(expected), 2, dtype=torch.float64))[0].T.contiguous()
    assert relative(product.within(BasisStorage.of(V)), V @ expected @ V.T + 0.3 * torch.eye(2, dtype=V.dtype)) < 1e-9


@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.3, 0.3), (0.3, 0.0), (0.1, 0.7)])
def test_curvature_within_rows_has_the_decay_of_each_group(decays: tuple[float, float]) -> None:
    problem = problems.ALL[next(iter(problems.ALL))]()
    first, *others = problem.params
    groups = [{"params": [first], "weight_decay": decays[0]}, {"params": others, "weight_decay": decays[1]}]
    objective = Objective(problem.closure, ParameterVector(groups), SingleProcess())
    product = CurvatureProduct(CURVATURES["ggn"], objective, batches_of(problem.data, len(problem.data[0])))
    H = dense("ggn", problem)
    c = [torch.full((p.numel(),), decays[i > 0], dtype=H.dtype) for i, p in enumerate(problem.params)]
    H += torch.diag(torch.cat(c))
    V = torch.linalg.qr(torch.randn(len(H), 3, dtype=torch.float64))[0].T.contiguous()
    assert relative(product.within(BasisStorage.of(V)), V @ H @ V.T) < 1e-9


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher"])
def test_budget_rebuilds_graphs_and_changes_nothing(kind: str) -> None:
    problem = problems.mlp(12)
    batches = batches_of(problem.data, 5, 4, 3)
    v = torch.randn(reference.len_of(problem.params), dtype=torch.float64)
    kept = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches)
    rebuilt = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches, memory_budget=0)
    one = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches, memory_budget=10**9)
    some = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches, memory_budget=one.kept_bytes // 2)
    assert (kept.rebuilds, rebuilt.rebuilds, one.rebuilds) == (0, 3, 0)
    assert 0 < some.rebuilds < 3
    assert some.kept_bytes <= one.kept_bytes // 2
    for product in (rebuilt, one, some):
        torch.testing.assert_close(product(v), kept(v), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher"])
def test_weight_decay_adds_its_coefficient(kind: str) -> None:
    problem = problems.mlp()
    batches = batches_of(problem.data, 7)
    v = torch.randn(reference.len_of(problem.params), dtype=torch.float64)
    plain = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches)(v)
    decayed = CurvatureProduct(CURVATURES[kind], objective_of(problem, 0.3), batches)(v)
    torch.testing.assert_close(decayed, plain + 0.3 * v)


def test_softmax_cross_entropy_has_the_papers_output_hessian() -> None:
    """diag(p) − p pᵀ, equation (6), with the logits themselves as parameters."""
    z = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    y = torch.tensor([0, 3, 1])
    objective = Objective(lambda _: (F.cross_entropy(z, y), z), parameters(z), SingleProcess())
    G = matrix(CurvatureProduct(CURVATURES["ggn"], objective, [Microbatch(None, 3)]), 12)
    p = torch.softmax(z.detach(), 1)
    expected = (
        torch.block_diag(  # type: ignore[no-untyped-call]
            *[torch.diag(row) - torch.outer(row, row) for row in p]
        )
        / 3
    )
    assert relative(G, expected) < 1e-12


def test_half_squared_error_has_the_unit_matrix() -> None:
    z = nn.Parameter(torch.randn(5, dtype=torch.float64))
    objective = Objective(lambda _: (0.5 * z.square().sum(), z), parameters(z), SingleProcess())
    G = matrix(CurvatureProduct(CURVATURES["ggn"], objective, [Microbatch(None, 5)]), 5)
    torch.testing.assert_close(G, torch.eye(5, dtype=torch.float64))


def parameters(*tensors: Tensor) -> ParameterVector:
    return ParameterVector([{"params": list(tensors), "weight_decay": 0.0}])


def test_masked_batches_are_weighted_by_what_the_closure_says() -> None:
    problem = problems.mlp(9)
    x, y = problem.data
    y = torch.where(torch.arange(9) % 3 == 0, -100, y)

    def closure(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits = problem.model(batch[0])
        return F.cross_entropy(logits, batch[1], ignore_index=-100), logits, (batch[1] != -100).sum()

    objective = Objective(closure, ParameterVector([{"params": problem.params, "weight_decay": 0.0}]), SingleProcess())
    v = torch.randn(reference.len_of(problem.params), dtype=torch.float64)
    for kind in CURVATURES.values():
        # The first micro-batch is masked whole.
        split = CurvatureProduct(kind, objective, batches_of((x, y), 1, 5, 3))(v)
        whole = CurvatureProduct(kind, objective, batches_of((x, y), 9))(v)
        torch.testing.assert_close(split, whole)
    loss, _ = objective.value_and_gradient(batches_of((x, y), 1, 5, 3))
    assert loss.mean == pytest.approx(closure((x, y))[0].item())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by curvlinops' own imports
@pytest.mark.parametrize("name", ["mlp", "conv", "lstm"])
def test_agrees_with_curvlinops(name: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    problem = problems.ALL[name]()
    x, y = problem.data
    v = torch.randn(reference.len_of(problem.params), dtype=torch.float64)
    for kind, operator in (("ggn", curvlinops.GGNLinearOperator), ("hessian", curvlinops.HessianLinearOperator)):
        theirs = operator(
            problem.model, nn.CrossEntropyLoss(), list(problem.model.parameters()), [(x, y)], check_deterministic=False
        )
        ours = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches_of(problem.data, len(x)))(v)
        assert relative(ours, theirs @ v) < 1e-9


def test_weight_norm_is_refused_by_the_hessian_and_right_for_gauss_newton() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 3)).double()
    source = problems.mlp()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    problem = Problem(model, source.data, closure)
    batches = batches_of(problem.data, 7)
    expected = dense("ggn", problem)
    G = matrix(CurvatureProduct(CURVATURES["ggn"], objective_of(problem), batches), len(expected))
    assert relative(G, expected) < 1e-9
    with pytest.raises(ValueError, match=r"weight_norm.*curvature='ggn'"):
        CurvatureProduct(CURVATURES["hessian"], objective_of(problem), batches)


def test_unused_and_frozen_parameters() -> None:
    torch.manual_seed(0)
    used, unused, frozen = nn.Linear(4, 3), nn.Linear(2, 2), nn.Linear(3, 3)
    frozen.requires_grad_(False)
    model = nn.ModuleList([used, unused, frozen]).double()
    source = problems.mlp()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = frozen(torch.tanh(used(batch[0])))
        return F.cross_entropy(logits, batch[1]), logits

    problem = Problem(model, source.data, closure)
    for kind in CURVATURES:
        H = matrix(CurvatureProduct(CURVATURES[kind], objective_of(problem), batches_of(problem.data, 7)), 21)
        assert relative(H, dense(kind, problem)) < 1e-9
        assert not H[15:].any()


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher"])
def test_kept_graphs_hold_no_vectors_of_all_parameters(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)).double()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return z.square().sum(1).mean(), z

    problem = Problem(model, (torch.randn(8, 300, dtype=torch.float64),), closure)
    gc.collect()
    before = {id(o) for o in gc.get_objects() if issubclass(type(o), Tensor)}
    product = CurvatureProduct(CURVATURES[kind], objective_of(problem), batches_of(problem.data, *[1] * 8))
    gc.collect()
    new = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and id(o) not in before]
    assert not [o.shape for o in new if o.numel() >= 300 * 300]
    assert product(torch.ones(reference.len_of(problem.params), dtype=torch.float64)).shape == (90902,)


def test_checkpointed_attention() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)

    def attend(h: Tensor) -> Tensor:
        out: Tensor = attention(h, h, h, need_weights=False)[0]
        return out

    def plain(batch: Any) -> tuple[Tensor, Tensor]:
        z = attend(batch[0]).mean(1)
        return z.square().sum(1).mean(), z

    def checkpointed(batch: Any) -> tuple[Tensor, Tensor]:
        h = checkpoint(attend, batch[0], use_reentrant=False)
        assert isinstance(h, Tensor)
        z = h.mean(1)
        return z.square().sum(1).mean(), z

    v = torch.randn(sum(p.numel() for p in attention.parameters()), dtype=torch.float64)
    products = [
        CurvatureProduct(CURVATURES["ggn"], objective_of(Problem(attention, (x,), closure)), batches_of((x,), 5))(v)
        for closure in (plain, checkpointed)
    ]
    torch.testing.assert_close(*products)


def test_operation_without_second_derivative_is_explained() -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(5, 3, mode="sum").double()
    x = torch.randint(0, 5, (4, 2))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = bag(batch[0])
        return z.square().mean(), z

    objective = Objective(closure, parameters(*bag.parameters()), SingleProcess())
    with pytest.raises(ValueError, match=r"cannot be differentiated twice.*EmbeddingBag"):
        CurvatureProduct(CURVATURES["ggn"], objective, [Microbatch((x,), 4)])(torch.ones(15, dtype=torch.float64))


def conv_closure(model: nn.Module, penalty: bool) -> Any:
    def closure(batch: Any) -> tuple[Tensor, Any]:
        x = batch[0].detach().requires_grad_(penalty)
        z = model(x).flatten(1)
        if penalty:  # the network's own derivative is what the loss is of
            (z,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return z.square().flatten(1).sum(1).mean(), z

    return closure


@pytest.mark.parametrize("kind", ["ggn", "fisher"])
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("trained", ["all", "weights", "biases", "last bias"])
def test_convolutions(kind: str, penalty: bool, trained: str) -> None:
    """Their lean derivative, where parts are frozen, and where the closure differentiates and it must not be used."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 4, (2, 1), dilation=(1, 2), groups=2)
    ).double()
    x = torch.randn(4, 2, 5, 4, dtype=torch.float64)
    params = [
        p
        for name, p in model.named_parameters()
        if trained == "all" or (trained == "weights") == ("weight" in name) or name == "2.bias"
        if trained != "last bias" or name == "2.bias"
    ]
    for frozen in (True, False):  # by requires_grad, or merely not given to the optimizer
        for p in model.parameters():
            p.requires_grad_(not frozen or any(p is q for q in params))
        closure = conv_closure(model, penalty)
        vector = ParameterVector([{"params": params, "weight_decay": 0.0}])
        if penalty and trained == "last bias":
            continue  # no derivative with respect to the input contains it
        product = CurvatureProduct(CURVATURES[kind], Objective(closure, vector, SingleProcess()), [Microbatch((x,), 4)])
        expected = dense_of(kind, closure, (x,), params)
        v = torch.randn(vector.numel, dtype=torch.float64)
        assert relative(product(v), expected @ v) < 1e-9


def test_convolutions_of_other_kinds_are_left_alone() -> None:
    torch.manual_seed(0)
    same = nn.Conv1d(2, 2, 3, padding="same").double()
    x = torch.randn(3, 2, 6, dtype=torch.float64)

    def unbatched(batch: Any) -> tuple[Tensor, Tensor]:
        z = torch.stack([same(row) for row in batch[0]]).flatten(1)
        return z.square().sum(1).mean(), z

    def batched(batch: Any) -> tuple[Tensor, Tensor]:
        z = same(batch[0]).flatten(1)
        return z.square().sum(1).mean(), z

    vector = ParameterVector([{"params": list(same.parameters()), "weight_decay": 0.0}])
    v = torch.randn(vector.numel, dtype=torch.float64)
    for closure in (unbatched, batched):
        product = CurvatureProduct(
            CURVATURES["ggn"], Objective(closure, vector, SingleProcess()), [Microbatch((x,), 3)]
        )
        expected = dense_of("ggn", closure, (x,), list(same.parameters()))
        assert relative(product(v), expected @ v) < 1e-9


def test_checkpointed_convolutions() -> None:
    """What is computed again runs outside the mode that replaces convolutions."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.Tanh()).double()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)

    def plain(batch: Any) -> tuple[Tensor, Tensor]:
        z = block(batch[0]).flatten(1)
        return z.square().sum(1).mean(), z

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = checkpoint(block, batch[0], use_reentrant=False).flatten(1)
        return z.square().sum(1).mean(), z

    vector = ParameterVector([{"params": list(block.parameters()), "weight_decay": 0.0}])
    v = torch.randn(vector.numel, dtype=torch.float64)
    product = CurvatureProduct(CURVATURES["ggn"], Objective(closure, vector, SingleProcess()), [Microbatch((x,), 4)])
    assert relative(product(v), dense_of("ggn", plain, (x,), list(block.parameters())) @ v) < 1e-9


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = 2 * x * g
        return out


@pytest.mark.parametrize("curvature", ["ggn", "hessian", "fisher"])
def test_a_function_that_differentiates_once_is_refused_and_not_taken_for_zero(curvature: Any) -> None:
    """Autograd cuts its graph there: a product would lack this path without a word."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(5, 3)

    def closure() -> tuple[Tensor, Tensor]:
        z = _Square.apply(model(x)) + model(x)  # type: ignore[no-untyped-call]
        return z.square().mean(), z

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"once.differentia"):
        KSD(model.parameters(), curvature=curvature).step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
