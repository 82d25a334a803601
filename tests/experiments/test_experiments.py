"""The loop, its methods and the command line, on small slices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.__main__ import main
from experiments.common.budget import Budget
from experiments.paper.commands import Run, Study
from experiments.supervised.losses import class_entropy, misclassified
from experiments.supervised.methods import KINDS, settings_of
from experiments.supervised.problems import Problem
from experiments.supervised.run import RunConfig, evaluate, run
from experiments.supervised.study import Where
from torch import nn

ROOT = Path(__file__).parents[2]


def small_problem(n: int = 240, weight_decay: float = 1e-3) -> Problem:
    """Two classes in the plane, told apart by a circle."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n + 60, 2, generator=generator)
    y = (x.square().sum(1) > 1.4).long()

    def make_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    return Problem(
        name="circle",
        train=(x[:n], y[:n]),
        held_out=(x[n:], y[n:]),
        make_model=make_model,
        loss=class_entropy,
        error=misclassified,
        error_name="classification error, %",
        batch_size=100,
        weight_decay=weight_decay,
    )


def config(method: str, budget: str = "30g", **changes: Any) -> RunConfig:
    rates = {"sgd": 0.1, "nesterov": 0.1, "adam": 0.01, "adamw": 0.01, "muon": 0.01, "soap": 0.01}
    defaults: dict[str, Any] = {"lr": rates[method], "batch": 20} if method in rates else {}
    if method.startswith("hf"):
        defaults = {"damping": 0.03, "fraction": 0.5}
    if method == "deep":
        defaults = {"start": 60}
    elif method.startswith("ksd"):
        defaults = {"fraction": 0.25}  # a twentieth of 240 samples would be 12
    if method == "ksd-raised":
        defaults |= {"krylov_dim": 5, "raised": 10, "after": 4}
    return RunConfig(method, settings_of(method, {**defaults, **changes}), Budget.parse(budget))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        line.pop("seconds", None)
        if line.get("report"):
            line["report"].pop("seconds")
    return lines


@pytest.mark.parametrize("method", KINDS)
def test_every_method_lowers_the_loss_and_counts_its_cost(method: str, tmp_path: Path) -> None:
    lines = lines_of(run(small_problem(), config(method, "60g"), tmp_path))
    header, *points, end = lines
    assert header["kind"] == "run"
    assert header["method"] == method
    assert end == {"kind": "end", "reason": "budget"}
    assert points[0]["step"] == 0
    assert points[-1]["gradients"] >= 60
    assert points[-1]["sample_gradients"] == pytest.approx(240 * points[-1]["gradients"], rel=1e-4)
    assert points[-1]["loss"] < 0.75 * points[0]["loss"]
    assert points[-1]["held_out_error"] < points[0]["held_out_error"]
    costs = [point["sample_gradients"] for point in points]
    assert costs == sorted(costs)
    if points[-1]["report"] is not None:
        assert points[-1]["report"]["sample_gradients"] > 0


def test_a_raised_k_begins_after_its_steps_on_sets_of_the_same_size() -> None:
    problem = small_problem()
    settings = settings_of("ksd-paper", {"krylov_dim": 5, "fraction": 0.25})
    raised = KINDS["ksd-raised"].make(problem, problem.make_model(0), 0, **config("ksd-raised", "1g").settings)
    plain = KINDS["ksd-paper"].make(problem, problem.make_model(0), 0, **settings)
    reports = [raised.advance(0.0).report for _ in range(6)]
    assert [report.krylov_dim for report in reports] == [5, 5, 5, 5, 10, 10]
    assert {tuple(report.set_sizes.values()) for report in reports} == {(240, 60, 60)}
    assert [report.loss for report in reports[:5]] == [plain.advance(0.0).report.loss for _ in range(5)]
    assert len(reports[4].coefficients) == 11  # the previous step is kept


@pytest.mark.parametrize("method", ["ksd", "hf"])
def test_a_fraction_of_one_is_the_full_batch(method: str, tmp_path: Path) -> None:
    """Every step lowers the loss over everything, which steps on a quarter of it need not."""
    lines = lines_of(run(small_problem(), config(method, "300g", fraction=1.0), tmp_path))
    points = [line for line in lines if line["kind"] == "point"]
    assert len(points) > 5
    assert all(b["loss"] <= a["loss"] for a, b in itertools.pairwise(points))
    for a, b in itertools.pairwise(points):
        if b["step"] == a["step"] + 1:
            assert b["report"]["search_loss_before"] == pytest.approx(a["loss"], rel=1e-4)
            assert b["report"]["search_loss_after"] == pytest.approx(b["loss"], rel=1e-4)


def test_one_mini_batch_costs_its_samples(tmp_path: Path) -> None:
    lines = lines_of(run(small_problem(), config("adam", "1g"), tmp_path))
    assert lines[-2]["step"] == 12  # 240 / 20
    assert lines[-2]["sample_gradients"] == 240


def test_ksd_reports_the_loss_that_the_loop_evaluates(tmp_path: Path) -> None:
    lines = lines_of(run(small_problem(), config("ksd", "20g"), tmp_path))
    steps = {line["step"]: line for line in lines if line["kind"] == "point"}
    compared = 0
    for step, point in steps.items():
        if step + 1 in steps and steps[step + 1]["report"]["accepted"]:
            assert steps[step + 1]["report"]["loss"] == pytest.approx(point["loss"], rel=1e-5)
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("method", KINDS)
def test_every_method_minimises_the_weight_decay_too(method: str, tmp_path: Path) -> None:
    """With so much of it the minimum is near θ = 0, where the loss is ln 2; without, weights would stay or grow."""
    lines = lines_of(run(small_problem(weight_decay=10.0), config(method, "100g"), tmp_path))
    first, last = lines[1], lines[-2]
    assert first["loss"] > 20
    assert last["loss"] < 1.0


def test_a_step_of_sgd_is_one_along_the_gradient_of_the_objective() -> None:
    problem = small_problem(weight_decay=0.3)
    model = problem.make_model(0)
    before = [p.detach().clone() for p in model.parameters()]
    settings = settings_of("sgd", {"lr": 1e-2, "momentum": 0.9, "batch": 240})
    KINDS["sgd"].make(problem, model, 0, **settings).advance(progress=0.0)
    twin = problem.make_model(0)
    x, y = problem.train
    decay = sum(p.square().sum() for p in twin.parameters())
    gradient = torch.autograd.grad(problem.loss(twin(x), y) + 0.15 * decay, list(twin.parameters()))
    for p, b, g in zip(model.parameters(), before, gradient, strict=True):
        torch.testing.assert_close(b - p, 1e-2 * 1.9 * g, rtol=1e-4, atol=1e-7)  # Nesterov's first step: 1 + momentum


def test_points_are_evaluated_on_the_first_samples(tmp_path: Path) -> None:
    problem = dataclasses.replace(small_problem(), evaluated=50)
    header, point = lines_of(run(problem, config("adam", "1g"), tmp_path))[:2]
    loss, error = evaluate(problem, problem.make_model(0), tuple(x[:50] for x in problem.train))
    assert header["evaluated_samples"] == 50
    assert (point["loss"], point["error"]) == pytest.approx((loss, error), rel=1e-5)
    held_out = evaluate(problem, problem.make_model(0), problem.held_out)
    assert (point["held_out_loss"], point["held_out_error"]) == pytest.approx(held_out, rel=1e-5)


@pytest.mark.parametrize("method", KINDS)
def test_a_run_cut_off_continues_bit_for_bit(method: str, tmp_path: Path) -> None:
    problem = small_problem()
    whole = run(problem, config(method, "80g"), tmp_path / "whole")
    expected = without_times(lines_of(whole))

    class CutError(Exception):
        pass

    seen = 0

    def cut(point: dict[str, Any] | None, share: float) -> None:
        nonlocal seen
        seen += point is not None
        if seen == 3:
            raise CutError

    with pytest.raises(CutError):
        run(problem, config(method, "80g"), tmp_path / "cut", cut)
    path = tmp_path / "cut" / "circle" / whole.name
    with path.open("a") as file:  # what was written after the checkpoint is written again
        file.write('{"kind":"point","half a li')
    run(problem, config(method, "80g"), tmp_path / "cut")
    assert without_times(lines_of(path)) == expected
    model = torch.load(path.with_suffix(".pt"), weights_only=True)["model"]
    for name, tensor in torch.load(whole.with_suffix(".pt"), weights_only=True)["model"].items():
        assert torch.equal(tensor, model[name])


def test_a_finished_run_is_left_alone_and_a_longer_budget_continues(tmp_path: Path) -> None:
    problem = small_problem()
    path = run(problem, config("ksd", "15g"), tmp_path)
    before = path.read_bytes()
    assert run(problem, config("ksd", "15g"), tmp_path).read_bytes() == before
    longer = lines_of(run(problem, config("ksd", "30g"), tmp_path))
    assert longer[-2]["gradients"] >= 30
    assert len(longer) > len(before.splitlines())
    assert longer[0]["budget"] == "30g"
    assert [line["kind"] for line in longer].count("end") == 1
    assert (
        run(problem, config("ksd", "30g"), tmp_path).read_bytes()
        == run(problem, config("ksd", "9g"), tmp_path).read_bytes()
    )


def test_settings_of_many_digits_continue(tmp_path: Path) -> None:
    odd = config("adam", "2g", lr=0.00123456789)
    assert run(small_problem(), odd, tmp_path) == run(small_problem(), odd, tmp_path)


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    def again(point: dict[str, Any] | None, share: float) -> None:
        if share > 0:
            run(small_problem(), config("adam", "5g"), tmp_path)

    with pytest.raises(ValueError, match="being written by another"):
        run(small_problem(), config("adam", "5g"), tmp_path, again)


def test_a_file_deleted_takes_its_checkpoint_along(tmp_path: Path) -> None:
    path = run(small_problem(), config("adam", "2g"), tmp_path)
    first = path.read_text()
    path.unlink()
    assert without_times(lines_of(run(small_problem(), config("adam", "2g"), tmp_path))) == without_times(
        [json.loads(line) for line in first.splitlines()]
    )


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    problem = small_problem()
    run(problem, config("ksd", "15g"), tmp_path)
    with pytest.raises(ValueError, match=r"other settings: .*krylov_dim.*--label"):
        run(problem, config("ksd", "15g", krylov_dim=5), tmp_path)
    run(problem, config("adam", "15g"), tmp_path)
    with pytest.raises(ValueError, match="other budget"):  # its schedule follows the budget
        run(problem, config("adam", "30g"), tmp_path)


def test_early_stop_and_divergence(tmp_path: Path) -> None:
    problem = small_problem()
    patient = RunConfig("adam", settings_of("adam", {"lr": 1e-9}), Budget.parse("50g"), patience=3)
    assert lines_of(run(problem, patient, tmp_path))[-1]["reason"] == "early stop"
    wild = RunConfig("sgd", settings_of("sgd", {"lr": 1e30, "batch": 20}), Budget.parse("50g"))
    lines = lines_of(run(problem, wild, tmp_path))
    assert lines[-1]["reason"] == "diverged"
    assert lines[-2]["loss"] is None


def test_a_stuck_lbfgs_ends(tmp_path: Path) -> None:
    problem = small_problem(weight_decay=0.5)
    lines = lines_of(run(problem, config("lbfgs", "5000g"), tmp_path))
    assert lines[-1]["reason"] == "finished"
    assert lines[-2]["gradients"] < 5000


def test_evaluation_is_that_of_the_whole_set() -> None:
    problem = small_problem(weight_decay=0.5)
    model = problem.make_model(0)
    loss, error = evaluate(problem, model, problem.train)
    with torch.no_grad():
        outputs = model(problem.train[0])
    decay = 0.25 * sum(float(p.detach().square().sum()) for p in model.parameters())
    assert loss == pytest.approx(float(problem.loss(outputs, problem.train[1])) + decay, rel=1e-5)
    assert error == pytest.approx(100 * float((outputs.argmax(1) != problem.train[1]).float().mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("60s", 60, "seconds"), ("2m", 120, "seconds"), ("1h", 3600, "seconds"), ("7g", 7, "gradients")],
)
def test_budgets(text: str, amount: float, unit: str) -> None:
    assert Budget.parse(text) == Budget(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "60", "-3s", "0s", "5 parsecs"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        Budget.parse(text)


def test_settings_that_are_none() -> None:
    with pytest.raises(ValueError, match="no optimizer 'adamax'"):
        settings_of("adamax", {})
    with pytest.raises(ValueError, match="no setting 'learning_rate'; it has lr, batch"):
        settings_of("adam", {"learning_rate": "1"})
    for key, value, complaint in [
        ("lr", "fast", "not a number"),
        ("lr", "none", "not a number"),
        ("batch", "-1", "whole number, 0 or more"),
        ("batch", "1.5", "whole number, 0 or more"),
        ("lr", "-1", "number, 0 or more"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            settings_of("adam", {key: value})
    assert settings_of("adam", {"batch": "1e2"})["batch"] == 100
    assert settings_of("ksd", {"krylov-dim": "7", "floor": "1e-3", "curvature": "hessian"})["krylov_dim"] == 7


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "experiments", *arguments]


def test_the_command_line_shows_progress_is_interrupted_and_continues(tmp_path: Path) -> None:
    """As a user would: Ctrl-C in the middle, then the same command."""
    arguments = [
        "run",
        "curves",
        "--optimizer",
        "ksd",
        "--budget",
        "4s",
        "--samples",
        "300",
        "--results",
        str(tmp_path),
    ]
    arguments += ["--threads", "1", "--clock", "cpu", "--set", "krylov_dim=5"]
    path = tmp_path / "curves" / "ksd-seed0.jsonl"
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not path.exists() or len(path.read_text().splitlines()) < 4):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "the same command continues" in errors
    assert "curves, ksd, seed 0" in errors  # the bar
    lines = path.read_text().splitlines()
    assert '"end"' not in lines[-1]
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "loss" in done.stderr
    assert '"end"' in path.read_text().splitlines()[-1]
    assert path.read_text().splitlines()[: len(lines) - 1] == lines[:-1]


def test_a_run_does_not_meet_those_of_the_study() -> None:
    """The recorded runs are in every checkout: a plain ``run`` must not be refused because of them."""
    assert Run("curves").results != Study().results


def test_mistakes_end_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not understood"):
        main(["run", "curves", "--budget", "soon", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="curves5"):
        main(["run", "curvs", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="no problem 'curvs'"):
        main(["study", "curvs", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="no optimizer 'nope'"):
        main(["study", "curves", "--methods", "nope", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="--jobs 0"):
        main(["tune", "curves", "--jobs", "0", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="no images"):
        main(["pca", "order-50"])
    with pytest.raises(SystemExit, match="key=value"):
        main(["run", "curves", "--set", "floor", "--results", str(tmp_path)])


def test_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    options = ["--samples", "100", "--budget", "3g", "--optimizer", "adam", "--set", "batch=50", "--quiet"]
    main(["run", "curves", *options, "--results", str(tmp_path), "--tensorboard", str(tmp_path / "board")])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    points = [line for line in lines_of(tmp_path / "curves" / "adam-seed0.jsonl") if line["kind"] == "point"]
    assert [event.step for event in events.Scalars("loss")] == [point["step"] for point in points]
    assert events.Scalars("loss")[-1].value == pytest.approx(points[-1]["loss"], rel=1e-4)


def test_tune_study_table_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole chain on a row that needs no data files, cut down to seconds."""
    from experiments.paper import plan, study

    row = plan.Row(minutes=1 / 60, seeds=1, trial=0.2)
    monkeypatch.setattr(plan, "ROWS", {"order-50": row})
    monkeypatch.setattr(plan, "MAIN", ("ksd", "hf", "adam"))
    monkeypatch.setattr(plan, "TUNED", tmp_path / "tuned.json")
    tried = [{"lr": 0.00123, "batch": 25}, {"lr": 1e-9, "batch": 25}]
    monkeypatch.setattr(plan, "grid", lambda problem, method: tried if method == "adam" else [])
    monkeypatch.chdir(ROOT)
    study.tune(["order-50"], Where(None, tmp_path / "tuning", samples=100))
    assert not plan.TUNED.exists()  # a trial of the command itself
    trials = lines_of(tmp_path / "tuning" / "tuning-order-50.jsonl")
    assert [trial["settings"] for trial in trials] == tried
    assert trials[0]["loss"] < trials[1]["loss"]
    for file in (tmp_path / "tuning" / "order-50").iterdir():
        file.unlink()
    tried.append({"lr": 1e-4, "batch": 25})
    study.tune(["order-50"], Where(None, tmp_path / "tuning", samples=100))  # the new one alone is tried
    assert [path.name for path in (tmp_path / "tuning" / "order-50").glob("*.jsonl")] == [
        "adam-lr=0.0001-batch=25-seed0.jsonl"
    ]
    again = lines_of(tmp_path / "tuning" / "tuning-order-50.jsonl")
    assert again[:2] == trials
    assert again[2]["settings"] == tried[2]
    plan.TUNED.write_text(json.dumps({"order-50": {"adam": tried[0]}}))
    study.study(["order-50"], Where(None, tmp_path, samples=100))
    headers = {path.name: lines_of(path)[0] for path in (tmp_path / "order-50").glob("*.jsonl")}
    assert set(headers) == {"ksd-seed0.jsonl", "hf-seed0.jsonl", "adam-seed0.jsonl"}
    assert headers["adam-seed0.jsonl"]["settings"] == tried[0]
    assert all('"end"' in path.read_text().splitlines()[-1] for path in (tmp_path / "order-50").glob("*.jsonl"))
    before = (tmp_path / "order-50" / "ksd-seed0.jsonl").read_bytes()
    study.study(["order-50"], Where(None, tmp_path, samples=100))  # nothing left to do
    assert (tmp_path / "order-50" / "ksd-seed0.jsonl").read_bytes() == before
    plan.TUNED.write_text(json.dumps({"order-50": {"adam": tried[1]}}))
    with pytest.raises(SystemExit, match=r"order-50 adam seed 0: .*other settings"):
        study.study(["order-50"], Where(None, tmp_path, samples=100))
    monkeypatch.setattr(plan, "LONG", {"order-50": 1 / 60})
    study.long(["order-50"], Where(None, tmp_path, samples=100), ["ksd", "hf"])
    headers = {path.name: lines_of(path)[0] for path in (tmp_path / "order-50").glob("*-long-seed0.jsonl")}
    assert set(headers) == {"ksd-long-seed0.jsonl", "ksd-k80-long-seed0.jsonl", "hf-long-seed0.jsonl"}
    assert headers["ksd-long-seed0.jsonl"]["settings"]["floor"] == 0.01
    assert headers["ksd-k80-long-seed0.jsonl"]["settings"]["krylov_dim"] == 80
    main(["table", "--results", str(tmp_path)])
    assert "order-50" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    main(["figure", "--results", str(tmp_path), "--out", str(tmp_path / "figures")])
    assert (tmp_path / "figures" / "convergence.png").exists()


def test_a_failed_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.paper import plan, study

    monkeypatch.setattr(plan, "ROWS", {"starcraft": plan.Row(minutes=1 / 60, seeds=1)})
    monkeypatch.setattr(plan, "MAIN", ("ksd",))
    monkeypatch.setenv("KRYLOV_DESCENT_DATA", str(tmp_path / "nowhere"))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"starcraft ksd seed 0: .*nowhere"):
        study.study(["starcraft"], Where(None, tmp_path, jobs=1))
    assert os.listdir(tmp_path) == []


def test_the_best_trial_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.paper import plan, study

    monkeypatch.setattr(plan, "TUNED", tmp_path / "tuned.json")
    plan.TUNED.write_text(json.dumps({"curves": {"hf": {"damping": 1.0}}}))
    found = {"adam": [{"settings": {"lr": x}, "loss": y} for x, y in [(1, 3.0), (2, None), (3, 2.0)]]}
    found["sgd"] = [{"settings": {"lr": 1}, "loss": None}]
    study._choose("curves", found)
    assert json.loads(plan.TUNED.read_text()) == {"curves": {"hf": {"damping": 1.0}, "adam": {"lr": 3}}}


def test_a_study_that_is_ended_ends_its_runs(tmp_path: Path) -> None:
    arguments = ["study", "order-50", "--methods", "ksd", "--jobs", "1", "--samples", "100", "--results", str(tmp_path)]
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    path = tmp_path / "order-50" / "ksd-seed0.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not path.exists():
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=60)
    size = path.stat().st_size
    time.sleep(1.5)
    assert path.stat().st_size == size
