"""Closures for torch.optim.LBFGS, unchanged: the steps of the explicit form, or a refusal in words."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from krylov_descent import KSD, GaussNewtonFlow, Subsets

Loss = Callable[[Any], Tensor]
X = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X.sum(1, keepdim=True))
LABELS = torch.arange(64) % 3


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


class Squares(nn.Module):
    """Features beside their squares."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x**2], 1)


class OwnNorm(nn.Module):
    """A hand-written LayerNorm, with a square inside."""

    def forward(self, x: Tensor) -> Tensor:
        r = x - x.mean(-1, keepdim=True)
        return r / (r.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def with_inside(part: nn.Module, width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), part, nn.Linear(width, 1)).double()


class Returned:
    """Collects the outputs of a loss, for its explicit form."""

    def __init__(self, loss: Callable[[Any, Callable[[Tensor], Tensor]], Tensor]) -> None:
        self._loss = loss

    def alone(self, model: Any) -> Tensor:
        return self._loss(model, lambda z: z)

    def explicit(self, model: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs: list[Tensor] = []

        def out(z: Tensor) -> Tensor:
            outputs.append(z)
            return z

        return self._loss(model, out), tuple(outputs)


def laplacian(model: Any) -> Any:
    def u(x: Tensor) -> Any:
        return model(x).squeeze()

    return torch.func.vmap(lambda x: torch.func.hessian(u)(x).diagonal().sum())(X)


def derivative(model: Any) -> tuple[Tensor, Tensor]:
    x = X.clone().requires_grad_()
    u = model(x)
    return u, torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def heat(model: Any, out: Any) -> Any:
    u, du = derivative(model)
    boundary = torch.cat([u[:4], u[-4:]])
    return F.mse_loss(out(du[:, :1] - du[:, 1:2] * u), Y) + 10 * (out(boundary - 1) ** 2).mean()


def vae(model: Any, out: Any) -> Any:
    z = out(model(X))
    return F.mse_loss(z[:, :1], Y) + 0.5 * (z[:, 1:2] ** 2 + z[:, 2:].exp() - z[:, 2:] - 1).mean()


def weighted(model: Any, out: Any) -> Any:
    r = out(model(X) - Y)
    return (r.detach().abs() * r**2).mean()


def adaptive(model: Any, out: Any) -> Any:
    r = out(model(X) - Y)
    return (torch.softmax(r.abs(), 0) * r**2).sum()


RUNS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mse": (net, lambda m, out: F.mse_loss(out(m(X)), Y)),
    "MSELoss": (net, lambda m, out: nn.MSELoss()(out(m(X)), Y)),
    "mse by keyword": (net, lambda m, out: F.mse_loss(input=out(m(X)), target=Y)),
    "mse swapped": (net, lambda m, out: F.mse_loss(Y, out(m(X)))),
    "power": (net, lambda m, out: (out(m(X) - Y) ** 2).mean()),
    "power by keyword": (net, lambda m, out: out(m(X) - Y).pow(exponent=2).mean()),
    "square": (net, lambda m, out: out(m(X) - Y).square().mean()),
    "product with itself": (net, lambda m, out: (lambda r: (r * r).mean())(out(m(X) - Y))),
    "product of two calls": (net, lambda m, out: ((out(m(X)) - Y) * (out(m(X)) - Y)).mean()),
    "inner product": (net, lambda m, out: (lambda r: r @ r)(out((m(X) - Y).squeeze(1)))),
    "transposed product": (net, lambda m, out: (lambda r: (r.T @ r).squeeze())(out(m(X)) - Y)),
    "squared norm": (net, lambda m, out: torch.linalg.norm(out(m(X) - Y)) ** 2),
    "root of mse": (net, lambda m, out: F.mse_loss(out(m(X)), Y).sqrt()),
    "exp of mse": (net, lambda m, out: F.mse_loss(out(m(X)), Y).exp()),
    "log of mse": (net, lambda m, out: F.mse_loss(out(m(X)), Y).log()),
    "two terms": (
        net,
        lambda m, out: (
            F.mse_loss(out(m(X[:9])), Y[:9], reduction="none").mean() + 10 * F.mse_loss(out(m(X[9:])), Y[9:])
        ),
    ),
    "variance": (net, lambda m, out: (out(m(X)) - Y).var()),
    "absolute": (net, lambda m, out: F.l1_loss(out(m(X)), Y)),
    "Huber": (net, lambda m, out: F.huber_loss(out(m(X)), Y)),
    "log cosh": (net, lambda m, out: (out(m(X)) - Y).cosh().log().mean()),
    "Cauchy": (net, lambda m, out: torch.log1p(out(m(X) - Y) ** 2).mean()),
    "weighted by itself": (net, weighted),
    "adaptive weights": (net, adaptive),
    "squared features": (lambda: with_inside(Squares(), 16), lambda m, out: F.mse_loss(out(m(X)), Y)),
    "squared features, absolute": (lambda: with_inside(Squares(), 16), lambda m, out: F.l1_loss(out(m(X)), Y)),
    "own LayerNorm": (lambda: with_inside(OwnNorm(), 8), lambda m, out: F.mse_loss(out(m(X)), Y)),
    "own LayerNorm, absolute": (lambda: with_inside(OwnNorm(), 8), lambda m, out: F.l1_loss(out(m(X)), Y)),
    "cross-entropy": (lambda: net(3), lambda m, out: F.cross_entropy(out(m(X)), LABELS)),
    "CrossEntropyLoss": (lambda: net(3), lambda m, out: nn.CrossEntropyLoss()(out(m(X)), LABELS)),
    "log_softmax": (lambda: net(3), lambda m, out: F.nll_loss(F.log_softmax(out(m(X)), 1), LABELS)),
    "log of softmax": (lambda: net(3), lambda m, out: F.nll_loss(F.softmax(out(m(X)), 1).log(), LABELS)),
    "two classes": (net, lambda m, out: F.binary_cross_entropy_with_logits(out(m(X)), (Y > 0).double())),
    "two classes by probability": (
        net,
        lambda m, out: F.binary_cross_entropy(out(torch.sigmoid(m(X))), (Y > 0).double()),
    ),
    "negative square": (
        lambda: net(3),
        lambda m, out: F.cross_entropy(out(m(X)), LABELS) - 0.1 * (out(m(X)) ** 2).mean(),
    ),
    "product of squares": (
        lambda: net(3),
        lambda m, out: (lambda z: (out(z[:, 0]) ** 2 * out(z[:, 1]) ** 2).mean())(m(X)),
    ),
    "variational": (lambda: net(3), vae),
    "compiled model": (
        lambda: cast(nn.Module, torch.compile(net(), backend="eager")),
        lambda m, out: F.mse_loss(out(m(X)), Y),
    ),
    "initial value": (net, lambda m, out: (out(m(X) - Y) ** 2).mean() + (out(m(X[:1]).squeeze()) - 1) ** 2),
    "norm of each sample": (lambda: net(3), lambda m, out: (out(m(X) - X[:, :3]).norm(dim=1) ** 2).mean()),
    "distances": (lambda: net(3), lambda m, out: F.pairwise_distance(out(m(X)), X[:, :3]).pow(2).mean()),
    "einsum": (lambda: net(3), lambda m, out: (lambda r: torch.einsum("ni,ni->n", r, r).mean())(out(m(X)) - X[:, :3])),
    "trace": (lambda: net(3), lambda m, out: (lambda r: torch.trace(r.T @ r))(out(m(X)) - X[:, :3])),
    "weights by a product": (net, lambda m, out: (X.T @ (out(m(X)) - Y).cosh().log()).sum().square()),
    "one row": (net, lambda m, out: torch.linalg.norm(out((m(X) - Y)[None])) ** 2),
    "square of mse": (net, lambda m, out: F.mse_loss(out(m(X)), Y) ** 2),
    "square of the root": (net, lambda m, out: out(m(X) - Y).square().mean().sqrt() ** 2),
    "PINN": (net, heat),
    "PINN by torch.func": (
        net,
        lambda m, out: (out(laplacian(m) - 1) ** 2).mean() + 10 * F.mse_loss(out(m(X)), Y),
    ),
}


def style(model: Any, out: Any) -> Any:
    features = out(model(X))
    return F.mse_loss(features, Y) + F.mse_loss(features @ features.T, Y @ Y.T)


def points() -> nn.ParameterList:
    return nn.ParameterList([torch.tensor(-1.2, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)])


def rosenbrock(p: Any, out: Any) -> Any:
    return out(1 - p[0]) ** 2 + 100 * out(p[1] - p[0] ** 2) ** 2


class Recurrent(nn.Module):
    """Two LSTM cells over a sequence, each output a linear function of the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.linear = nn.LSTMCell(1, 4).double(), nn.Linear(4, 1).double()

    def forward(self, x: Any) -> Tensor:
        state, outputs = None, []
        for t in x.split(1, 1):
            state = self.cell(t, state)
            outputs.append(self.linear(state[0]))
        return torch.cat(outputs, 1)


def weak(model: Any, out: Any) -> Any:
    """Test functions against the derivative, as in variational PINNs."""
    _, du = derivative(model)
    tests = torch.sin(torch.arange(1, 7, dtype=torch.float64)[:, None] * X[:, 0])
    return out(torch.einsum("kn,n->k", tests, du[:, 0] - Y[:, 0]) / 64).square().sum()


def reprojection(model: Any, out: Any) -> Any:
    distance = torch.linalg.norm(out(model(X) - X[:, :2]), dim=-1)
    return torch.where(distance < 1, 0.5 * distance * distance, distance - 0.5).mean()


#: From public tutorials: their functions, on small data.
RUNS |= {
    "shifted parameters": (points, lambda p, out: torch.sum(out(torch.stack(list(p)) + 1) ** 2)),
    "Rosenbrock": (points, rosenbrock),
    "temperature": (
        lambda: nn.ParameterList([torch.full((1,), 1.5, dtype=torch.float64)]),
        lambda p, out: nn.CrossEntropyLoss()(out(X[:, :3] / p[0].clamp(min=0.01)), LABELS),
    ),
    "sequence": (Recurrent, lambda m, out: nn.MSELoss()(out(m(X)), X.roll(-1, 1))),
    "weak form": (net, weak),
    "style": (net, style),
    "reprojection": (lambda: net(2), reprojection),
}


def lbfgs(optimizer: Any, model: Any, loss: Loss) -> Callable[[], Any]:
    def closure() -> Any:
        optimizer.zero_grad()
        value: Any = loss(model)
        if value.requires_grad:  # as torch's documentation has it
            value.backward()
        return value

    return closure


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch.func.hessian
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # the first step watches modules by global hooks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile inside of a mode
@pytest.mark.parametrize("name", RUNS)
def test_the_closure_as_it_is_takes_the_steps_of_the_explicit_form(name: str) -> None:
    make, loss = RUNS[name]
    model, twin = make(), make()
    a, b = KSD(model.parameters(), krylov_dim=5), KSD(twin.parameters(), krylov_dim=5)
    closure, returned = lbfgs(a, model, Returned(loss).alone), Returned(loss)
    for _ in range(3):
        mine, theirs = a.step(closure), b.step(lambda: returned.explicit(twin))
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert mine.krylov_dim == theirs.krylov_dim
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    assert all(p.grad is None for p in model.parameters())


def penalty(model: nn.Module) -> Any:
    return sum(p.pow(2).sum() for p in model.parameters())


def partly(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y)
    (loss + 0.1 * penalty(model)).backward()
    return loss


def scaled(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y)
    (1024 * loss).backward()
    return loss


def clipped(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return loss


def read(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y)
    loss.backward()
    assert sum(p.grad.norm().item() for p in model.parameters()) > 0
    return loss


def summed(optimizer: Any, model: Any) -> Any:
    total = 0.0
    for part in (slice(0, 32), slice(32, 64)):
        loss: Any = F.mse_loss(model(X[part]), Y[part])
        loss.backward()
        total += loss.item()
    return total


def by_hand(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y)
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = g
    return loss


def by_function(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y)
    torch.autograd.backward(loss)
    return loss


def mapped(optimizer: Any, model: Any) -> Any:
    def one(p: Any, x: Tensor, y: Tensor) -> Any:
        return ((torch.func.functional_call(model, p, (x,)) - y) ** 2).squeeze()

    loss: Any = torch.func.vmap(one, (None, 0, 0))(dict(model.named_parameters()), X[:, None], Y[:, None]).mean()
    loss.backward()
    return loss


def regularised(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y) + 1e-2 * penalty(model)
    loss.backward()
    return loss


def sparse(optimizer: Any, model: Any) -> Any:
    loss: Any = F.mse_loss(model(X), Y) + 1e-2 * sum(p.abs().sum() for p in model.parameters())
    loss.backward()
    return loss


def quadratic(optimizer: Any, model: Any) -> Any:
    x = model[0].weight
    loss: Any = (x**2 + x * 4 + 4).sum()
    loss.backward(retain_graph=True)
    return loss


def energy(optimizer: Any, model: Any) -> Any:
    u, du = derivative(model)
    loss: Any = (0.5 * du[:, 0] ** 2 - u[:, 0] * Y[:, 0]).mean()
    loss.backward()
    return loss


def clamped(optimizer: Any, model: Any) -> Any:
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    loss: Any = F.mse_loss(model(X), Y)
    loss.backward()
    return loss


def detached(optimizer: Any, model: Any) -> Any:
    with torch.no_grad():
        return torch.tensor(F.mse_loss(model(X), Y).item())


REFUSED: dict[str, tuple[Any, str]] = {
    "a term in backward alone": (partly, "other gradients than those of the loss.*weight_decay"),
    "a scaled loss": (scaled, "other gradients than those of the loss.*GradScaler"),
    "clipping": (clipped, "reads .grad after backward.*clip_grad_norm_"),
    "the norm of .grad": (read, r"reads .grad after backward.*report.grad_norm"),
    "a number": (summed, "returned float"),
    "a gradient by hand": (by_hand, "wrote .grad"),
    "torch.autograd.backward": (by_function, "wrote .grad"),
    "vmap of the loss": (mapped, "were not found.*return loss, outputs"),
    "L2 regularisation": (regularised, "of the gradient.*weight_decay="),
    "L1 regularisation": (sparse, "of the gradient.*return loss, outputs"),
    "a function of parameters": (quadratic, "were not found.*curvature='hessian'"),
    "an energy": (energy, "of the gradient.*curvature='hessian'"),
    "parameters clamped inside": (clamped, "changes the parameters"),
    "a loss without a graph": (detached, "does not depend on the parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_as_it_is_is_refused_in_words(name: str) -> None:
    loss, words = REFUSED[name]
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = KSD(model.parameters())
    with pytest.raises(ValueError, match=words):
        optimizer.step(functools.partial(loss, optimizer, model))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_term_that_comes_later_is_noticed() -> None:
    model = net()
    optimizer = KSD(model.parameters(), krylov_dim=3)
    weight = 0.0

    def closure() -> Any:
        loss: Any = F.mse_loss(model(X), Y)
        (loss + weight * penalty(model)).backward()
        return loss

    optimizer.step(closure)
    weight = 0.1
    later = (optimizer.step(closure) for _ in range(20))
    with pytest.raises(ValueError, match="other gradients"):
        list(later)


@pytest.mark.parametrize("sets", [None, Subsets((X, Y), batch_size=24, fraction=0.4)])
def test_a_closure_that_sometimes_does_more_takes_the_same_steps(sets: Any) -> None:
    def losses(noisy: bool) -> list[float]:
        model, calls = net(), itertools.count(1)
        optimizer = KSD(model.parameters(), krylov_dim=3)

        def closure(batch: Any = (X, Y)) -> Any:
            loss: Any = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            if noisy and next(calls) % 7 == 0:
                assert torch.sqrt(((model(X[:9]) - Y[:9]) ** 2).mean()) > 0
            return loss

        return [optimizer.step(closure, sets).loss for _ in range(4)]

    assert losses(noisy=True) == pytest.approx(losses(noisy=False), rel=1e-9)


def test_a_term_that_joins_the_loss_joins_the_outputs() -> None:
    def losses(explicit: bool) -> list[float]:
        model, both = net(), False
        optimizer = KSD(model.parameters(), krylov_dim=3)

        def closure() -> Any:
            a, b = model(X[:32]), model(X[32:])
            first, second = F.mse_loss(a, Y[:32]), F.mse_loss(b, Y[32:])
            loss = first + second if both else first
            return (loss, (a, b) if both else a) if explicit else loss

        found = []
        for step in range(6):
            both = step >= 3
            found.append(optimizer.step(closure).loss)
        return found

    assert losses(explicit=False) == pytest.approx(losses(explicit=True), rel=1e-9)


def test_random_closures_are_told_so() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    optimizer = KSD(model.parameters())
    with pytest.raises(ValueError, match=r"random.*Dropout.*model.eval\(\)"):
        optimizer.step(lbfgs(optimizer, model, lambda m: F.mse_loss(m(X), Y)))


@pytest.mark.parametrize("flat", [False, True])
def test_with_sets_outputs_have_a_row_for_each_sample(flat: bool) -> None:
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, 5, (40, 6)), torch.randint(0, 5, (40, 6))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    twin = copy.deepcopy(model)
    sets = [Subsets((tokens, labels), batch_size=16, seed=0) for _ in range(2)]

    def alone(batch: Any) -> Any:
        z = model(batch[0])
        loss: Any = F.cross_entropy(z.view(-1, 5), batch[1].view(-1)) if flat else F.cross_entropy(z.mT, batch[1])
        loss.backward()
        return loss

    def explicit(batch: Any) -> tuple[Tensor, Tensor]:
        z = twin(batch[0])
        return F.cross_entropy(z.mT, batch[1]), z

    a, b = KSD(model.parameters(), krylov_dim=4), KSD(twin.parameters(), krylov_dim=4)
    for _ in range(3):
        mine, theirs = a.step(alone, sets[0]), b.step(explicit, sets[1])
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
    assert mine.loss < 1.6


def test_the_flow_and_the_hessian_take_it_too() -> None:
    for make in (GaussNewtonFlow, functools.partial(KSD, curvature="hessian")):
        model = net()
        optimizer = make(model.parameters())
        closure = lbfgs(optimizer, model, lambda m: F.mse_loss(m(X), Y))
        losses = [float(optimizer.step(closure)) for _ in range(4)]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("explicit", [True, False])
def test_only_a_closure_without_outputs_is_watched_after_its_first_call(explicit: bool) -> None:
    model = net()
    optimizer = KSD(model.parameters(), krylov_dim=3)
    modes = []

    def closure() -> Any:
        modes.append(torch._C._len_torch_function_stack())
        z = model(X)
        loss: Any = F.mse_loss(z, Y)
        return (loss, z) if explicit else loss

    optimizer.step(closure)
    assert (modes[0], modes[-1]) == (1, 0 if explicit else 1)
