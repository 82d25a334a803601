"""``check`` names what is wrong, with the remedy; finds nothing where nothing is; and leaves everything as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from krylov_descent import KSD, CheckReport, Finding, Subsets, check
from tests import problems
from tests.objective.test_consistency import cross_entropy, network

N = 120


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(N, 4, generator=generator(0))
Y = torch.randint(0, 3, (N,), generator=generator(1))
IDS = torch.randint(0, 10, (N, 6), generator=generator(2))


def sets(*data: Tensor) -> Subsets:
    return Subsets(data or (X, Y), batch_size=40, seed=0)


def finding(report: CheckReport, name: str) -> Finding:
    found = [f for f in report.findings if f.name == name]
    assert found, str(report)
    return max(found, key=lambda f: ("ok", "warn", "fail").index(f.status))


def failed(report: CheckReport) -> set[str]:
    return {f.name for f in report.findings if f.status == "fail"}


def warned(report: CheckReport) -> set[str]:
    return {f.name for f in report.findings if f.status == "warn"}


# ------------------------------------------------------------------ operations that do not differentiate twice


class Encoder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"bag": layer})
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.encoder["bag"](ids)
        z: Tensor = self.head(h.mean(1) if h.ndim == 3 else h)
        return z


def test_embedding_bag_is_named_and_its_remedy_works() -> None:
    model = Encoder(nn.EmbeddingBag(10, 4))
    report = check(cross_entropy(model), model, sets(IDS, Y))
    assert failed(report) == {"twice"}
    found = finding(report, "twice")
    assert "EmbeddingBag at encoder.bag" in found.detail
    assert "_embedding_bag_backward" in found.detail
    assert "nn.Embedding(...) and .mean(1)" in found.remedy
    replaced = Encoder(nn.Embedding(10, 4))
    assert not failed(check(cross_entropy(replaced), replaced, sets(IDS, Y)))


def ctc_problem() -> tuple[nn.Module, Callable[[Any], Any], Subsets]:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    frames = torch.randn(60, 7, 4, generator=generator(3))
    labels = torch.randint(1, 5, (60, 2), generator=generator(4))

    def closure(batch: Any) -> Any:
        z = model(batch[0])
        n = len(z)
        lengths = torch.full((n,), 7), torch.full((n,), 2)
        return F.ctc_loss(z.transpose(0, 1).log_softmax(-1), batch[1], *lengths), z

    return model, closure, Subsets((frames, labels), batch_size=60, fraction=0.5, seed=0)


def test_ctc_loss_is_named_by_its_line_and_fisher_is_a_remedy_that_trains() -> None:
    model, closure, of_ctc = ctc_problem()
    report = check(closure, model, of_ctc)
    found = finding(report, "twice")
    assert found.status == "fail"
    assert "ctc_loss cannot be differentiated twice" in found.detail
    assert "test_check.py:" in found.detail
    assert "KSD(curvature='fisher') was tried and works here" in found.remedy
    assert report.line.endswith("KSD(model.parameters(), curvature='fisher')")
    assert check(closure, model, of_ctc, curvature="fisher").ok
    optimizer = KSD(model.parameters(), krylov_dim=5, curvature="fisher")
    losses = [optimizer.step(closure, of_ctc).loss for _ in range(5)]
    assert losses[-1] < 0.7 * losses[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.inner, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        z: Tensor = self.last(torch.tanh(h))
        return z


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_reentrant_checkpoint_is_named_and_the_other_kind_is_right(curvature: Any) -> None:
    model = Checkpointed(reentrant=True)
    report = check(cross_entropy(model), model, sets(), curvature=curvature)
    found = finding(report, "twice")
    assert found.status == "fail"
    assert "reentrant checkpoint" in found.detail
    assert "Checkpointed" in found.detail
    assert "use_reentrant=False" in found.remedy
    model = Checkpointed(reentrant=False)
    assert finding(check(cross_entropy(model), model, sets(), curvature=curvature), "twice").status == "ok"


@pytest.mark.parametrize(("dim", "right"), [(0, False), (1, False), (None, True)])
def test_weight_norm_with_the_hessian(dim: int | None, right: bool) -> None:
    model = network()
    nn.utils.parametrizations.weight_norm(model[0], dim=dim)  # type: ignore[arg-type]
    report = check(cross_entropy(model), model, sets(), curvature="hessian")
    assert report.ok == right
    if not right:
        found = finding(report, "twice")
        assert "_WeightNorm at 0.weight" in found.detail
        assert "silently wrong" in found.detail
        assert "KSD(curvature='ggn') was tried and works here" in found.remedy
        assert "dim=None" in found.remedy
    assert check(cross_entropy(model), model, sets()).ok


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos()


class Activation(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x)  # type: ignore[no-untyped-call]


def test_functions_of_ones_own() -> None:
    model = network(Activation(Once))
    found = finding(check(cross_entropy(model), model, sets()), "twice")
    assert found.status == "fail"
    assert "Activation at 1: Once cannot be differentiated twice" in found.detail
    assert "once_differentiable" in found.remedy


# --------------------------------------------------------------------------- closures and samples


def test_dropout_is_named() -> None:
    model = network(nn.Dropout(0.3))
    report = check(cross_entropy(model), model, sets())
    assert failed(report) == {"deterministic"}
    assert "Dropout at 1" in finding(report, "deterministic").detail
    assert "model.eval()" in finding(report, "deterministic").detail
    assert "not checked" in finding(report, "mean").detail
    # Its masks are held fixed for the other checks.
    assert finding(report, "twice").status == "ok"
    assert not failed(check(cross_entropy(model.eval()), model, sets()))


def test_batch_norm_in_train_mode_is_named() -> None:
    model = network(nn.BatchNorm1d(8))
    report = check(cross_entropy(model), model, sets())
    assert {"buffers"} <= failed(report) <= {"buffers", "mean"}
    assert "BatchNorm1d.running_mean at 1" in finding(report, "buffers").detail
    assert "model.eval()" in finding(report, "buffers").remedy
    assert "BatchNorm1d at 1 is in train mode" in finding(report, "rows").detail
    assert not failed(check(cross_entropy(model.eval()), model, sets()))


def test_sum_and_rows() -> None:
    model = network()
    report = check(cross_entropy(model, reduction="sum"), model, sets())
    assert failed(report) == {"mean"}
    assert "reduction='mean'" in finding(report, "mean").remedy

    def shuffled(batch: Any) -> Any:
        z = model(batch[0]).flip(0)
        return F.cross_entropy(z, batch[1].flip(0)), z

    report = check(shuffled, model, sets())
    assert report.ok
    assert warned(report) == {"rows"}
    assert failed(check(shuffled, model, sets(), curvature="fisher")) == {"rows"}


def test_unused_and_frozen_parameters_are_named() -> None:
    model = network()
    model.add_module("spare", nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    closure = cross_entropy(model[:3])
    report = check(closure, model, sets())
    assert report.ok
    assert warned(report) == {"unused"}
    assert "spare.weight, spare.bias" in finding(report, "unused").detail
    assert "0.bias" in finding(report, "frozen").detail
    by_position = check(closure, model.parameters(), sets())
    assert "parameter 4, parameter 5" in finding(by_position, "unused").detail
    assert by_position.line.endswith("KSD(params)")


def test_integer_inputs() -> None:
    model = network()
    report = check(cross_entropy(model), model, sets(IDS[:, :4], Y))
    found = finding(report, "closure")
    assert found.status == "fail"
    assert "Linear at 0 got integers (int64)" in found.detail
    assert "x.float()" in found.remedy
    found = finding(check(cross_entropy(model), model, sets(X.double(), Y)), "closure")
    assert "Linear at 0 got float64 for parameters of float32" in found.detail
    assert "model.to(torch.float64)" in found.remedy
    words = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(24, 3))
    report = check(cross_entropy(words), words, sets(IDS, Y))
    assert report.ok
    assert finding(report, "fisher").detail == "exact: 2; probe: 0"
    found = finding(check(cross_entropy(words), words, sets(IDS.float(), Y)), "closure")
    assert "Embedding at 0 got float32 indices" in found.detail
    assert "y.long()" in finding(check(cross_entropy(model), model, sets(X, Y.int())), "closure").remedy


def test_closures_that_return_something_else() -> None:
    model = network()
    report = check(lambda batch: cross_entropy(model)(batch)[0], model, sets())
    assert report.ok
    assert "outputs (40, 3) found from the loss" in finding(report, "closure").detail
    assert check(lambda batch: cross_entropy(model)(batch)[0], model, sets(), curvature="hessian").ok

    def with_backward(batch: Any) -> Any:
        loss, _ = cross_entropy(model)(batch)
        loss.backward()
        return loss

    assert check(model, with_backward, sets()).ok  # in either order

    def regularised(batch: Any) -> Any:
        return cross_entropy(model)(batch)[0] + sum(p.square().sum() for p in model.parameters())

    assert "outputs behind it were not found" in finding(check(regularised, model, sets()), "closure").detail

    def other_pass(batch: Any) -> Any:
        return cross_entropy(model)(batch)[0], model(batch[0])

    assert "not computed from the outputs" in finding(check(other_pass, model, sets()), "outputs").detail

    def broken(batch: Any) -> Any:
        return vars(model)["missing"]

    found = finding(check(broken, model, sets()), "closure")
    assert "KeyError: 'missing'" in found.detail
    assert 'in broken: return vars(model)["missing"]' in found.detail
    for nonsense in (lambda batch: 1.0, lambda: 1.0, None, lambda batch: (torch.full((), torch.nan), X)):
        assert failed(check(nonsense, model, sets())) == {"closure"}  # type: ignore[arg-type]
    assert failed(check(cross_entropy(network()), model, sets())) == {"parameters"}
    assert failed(check(cross_entropy(model), [p.detach() for p in model.parameters()], sets())) == {"parameters"}


def test_sparse_gradients_and_broken_data_sets_are_one_finding() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    report = check(cross_entropy(model), model, sets(IDS, Y))
    assert failed(report) == {"parameters"}
    assert "0.weight is sparse" in finding(report, "parameters").detail

    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, i: int) -> Any:
            raise OSError("no such file: 7.png")

    report = check(cross_entropy(model), model, Subsets(Broken(), batch_size=10, seed=0))
    assert failed(report) == {"data"}
    assert "OSError: no such file: 7.png" in finding(report, "data").detail


def test_a_term_beside_the_outputs_is_told_and_does_not_spoil_the_comparison() -> None:
    model = network()

    def closure(batch: Any) -> Any:
        loss, z = cross_entropy(model)(batch)
        return loss + 0.1 * sum(p.square().sum() for p in model.parameters()), z

    report = check(closure, model, sets())
    assert report.ok
    assert warned(report) == {"outputs"}
    assert "weight_decay" in finding(report, "outputs").remedy


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_wrapped_model_is_told() -> None:
    model = nn.parallel.DistributedDataParallel(network())
    report = check(cross_entropy(model), model, sets())
    assert failed(report) == {"wrapper"}
    assert "model.module" in finding(report, "wrapper").remedy


# The warning is torch's, of global hooks and compiled modules.
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_is_told() -> None:
    model: Any = torch.compile(network(), backend="aot_eager")
    report = check(cross_entropy(model), model, sets())
    assert not report.ok
    assert "compiled" in finding(report, "closure").detail


# ---------------------------------------------------------------------------- nothing where nothing is


class Masked(nn.Module):
    """A sequence model whose loss leaves padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(10, 3), nn.GRU(3, 5, batch_first=True), nn.Linear(5, 10)

    def forward(self, ids: Tensor) -> Tensor:
        z: Tensor = self.head(self.rnn(self.embed(ids))[0])
        return z


def masked() -> problems.Problem:
    torch.manual_seed(0)
    model = Masked().double()
    targets = IDS[:20].clone()
    targets[torch.rand(targets.shape, generator=generator(5)) < 0.3] = -100

    def closure(batch: Any) -> Any:
        z = model(batch[0])
        loss = F.cross_entropy(z.flatten(0, 1), batch[1].flatten())
        return loss, z, (batch[1] != -100).sum()

    return problems.Problem(model, (IDS[:20], targets), closure)


CLEAN = {
    **{name: problems.ALL[name] for name in ("mlp", "conv", "lstm", "transformer", "pinn", "tied", "two_terms")},
    "masked": masked,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm(name: str, dtype: torch.dtype) -> None:
    problem = CLEAN[name]()
    problem.model.to(dtype)
    data = tuple(x.to(dtype) if x.is_floating_point() else x for x in problem.data)
    data = tuple(torch.cat([x] * 6) for x in data)
    curvature: Any = "hessian" if name in ("conv", "pinn") else "ggn"
    # PINNs are full batch; the rest are called with batches.
    if name == "pinn":
        report = check(lambda: problem.closure(data), problem.model, curvature=curvature)
    else:
        report = check(problem.closure, problem.model, Subsets(data, batch_size=16, seed=0), curvature=curvature)
    assert {f.status for f in report.findings} == {"ok"}, str(report)
    assert {"memory", "fisher", "twice", "closure"} <= {f.name for f in report.findings}


def test_kinks_of_relu_and_pooling_are_no_alarm() -> None:
    """Differences of the gradient see them as long as steps are large enough to cross some."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU())
    model.extend([nn.Flatten(), nn.Linear(576, 3)])
    images = torch.randn(N, 1, 18, 18, generator=generator(6))
    report = check(lambda: cross_entropy(model)((images, Y)), model, curvature="hessian")
    assert {f.status for f in report.findings} == {"ok"}, str(report)


def test_lazy_and_missing_parameters() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    report = check(cross_entropy(lazy), lazy, sets())
    assert failed(report) == {"parameters"}
    assert "0.weight, 0.bias" in finding(report, "parameters").detail
    assert failed(check(lambda batch: 1.0, nn.ReLU(), sets())) == {"parameters"}
    with pytest.raises(ValueError, match="holds a str"):
        check(lambda batch: 1.0, ["weights"], sets())


# -------------------------------------------------------------------------- costs, advice, and the report


def test_fisher_rules_by_path() -> None:
    problem = problems.lstm()
    report = check(problem.closure, problem.model, Subsets(problem.data, batch_size=6, seed=0))
    assert finding(report, "fisher").detail == "exact: head; probe: rnn"


def test_memory_and_the_line_that_fits() -> None:
    model = network()  # 67 parameters
    closure = cross_entropy(model)
    report = check(closure, model, sets())
    assert (
        "basis of KSD 2.9 KiB for K = 10, 5.5 KiB for K = 20, 13.3 KiB for K = 50" in finding(report, "memory").detail
    )
    assert report.line == "from krylov_descent import KSD\n\noptimizer = KSD(model.parameters())"
    report = check(closure, model, sets(), krylov_dim=10, curvature="fisher", available_memory=4000)
    assert "memory_budget=3200" in finding(report, "memory").remedy
    assert report.line.endswith("KSD(model.parameters(), krylov_dim=10, curvature='fisher', memory_budget=3200)")
    report = check(closure, model, sets(), available_memory=5000)
    assert "Storage(dtype=torch.bfloat16)" in finding(report, "memory").remedy
    namespace: dict[str, Any] = {"model": model}
    exec(report.line, namespace)
    assert isinstance(namespace["optimizer"], KSD)
    namespace["optimizer"].step(closure, sets())  # its budget holds the basis
    assert failed(check(closure, model, sets(), available_memory=1000)) == {"memory"}


def test_advice_on_precision() -> None:
    model = network()
    report = check(lambda: cross_entropy(model)((X, Y)), model)
    assert report.ok
    assert not warned(report)
    assert "model.double()" in finding(report, "precision").remedy
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert warned(check(cross_entropy(model), model, sets())) == {"tf32"}
    finally:
        torch.set_float32_matmul_precision(before)
    model.bfloat16()
    assert warned(check(cross_entropy(model), model, sets(X.bfloat16(), Y))) == {"precision"}


def test_report_as_text_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(nn.Dropout(0.3))
    report = check(cross_entropy(model), model, sets())
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(report).splitlines()
        assert max(map(len, lines)) <= columns
        assert any(line.startswith("FAIL  deterministic The closure is random") for line in lines)
        assert sum(line.lstrip().startswith("→") for line in lines) == sum(bool(f.remedy) for f in report.findings)
    assert "1 check failed" in str(report)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["ok"] is False
    assert plain["findings"][0] == {
        "name": "data",
        "status": "ok",
        "detail": "sets of a step: A 120, B 6, C 6 samples",
        "remedy": "",
    }


def test_arguments_that_ksd_does_not_take() -> None:
    model = network()
    with pytest.raises(ValueError, match="krylov_dim=0"):
        check(cross_entropy(model), model, sets(), krylov_dim=0)
    with pytest.raises(ValueError, match="curvature='newton'"):
        check(cross_entropy(model), model, sets(), curvature="newton")  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        check(cross_entropy(model), model, sets())


# --------------------------------------------------------------------------- everything as it was


@pytest.mark.parametrize("calls_backward", [False, True])
def test_everything_is_as_it_was(calls_backward: bool) -> None:
    model = network(nn.BatchNorm1d(8), nn.Dropout(0.2))
    model[3].eval()
    model[0].bias.requires_grad_(False)
    F.cross_entropy(model(X), Y).backward()  # type: ignore[no-untyped-call]
    model[2].register_buffer("unknown", torch.tensor([torch.nan]))
    seen: list[Tensor] = []
    weight: Any = model[0].weight
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))

    def state() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return [
            [
                (id(x), x.data_ptr(), x.dtype, x.requires_grad, x.detach().reshape(-1).view(torch.uint8).tolist())
                for x in tensors
            ],
            [module.training for module in model.modules()],
            torch.get_rng_state().tolist(),
            random.getstate(),
            torch.get_default_dtype(),
            torch.is_anomaly_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ]

    def closure(batch: Any) -> Any:
        random.random()
        loss, z = cross_entropy(model)(batch)
        if calls_backward:
            loss.backward()
        return loss, z

    before = state()
    with torch.no_grad():
        check(closure, model, sets())
    assert state() == before
    # Hooks of the parameters are still in place.
    seen.clear()
    F.cross_entropy(model(X), Y).backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 2
    assert seen[0].dtype == torch.float32


def test_no_hook_is_left_behind() -> None:
    """torch.compile refuses to work beside global hooks."""
    from torch.nn.modules import module

    model = nn.Linear(3, 1)
    x = torch.randn(8, 3)
    check(lambda: (model(x).square().mean(), x), model)
    assert not module._has_any_global_hook()  # type: ignore[no-untyped-call]
