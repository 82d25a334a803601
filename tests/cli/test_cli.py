"""The command line as a user has it: exit statuses, files, and a run that was interrupted and resumed."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import krylov_descent
from krylov_descent import KSD, checkpoint
from krylov_descent.cli import main
from krylov_descent.cli.target import load

PROBLEM = """
import torch
from torch import nn
import torch.nn.functional as F
from krylov_descent import Subsets


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 2))
    x = torch.randn(400, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def closure(batch):
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z

    return model, closure, Subsets((x, y), batch_size=100, fraction=0.2, seed=0)


def full_batch():
    model, closure, _ = small()
    x = torch.randn(50, 6)
    y = (x[:, 0] > 0).long()
    return model, lambda: closure((x, y))


def planned():
    model = nn.Linear(4000, 4000, device="meta")
    return model, lambda batch: model(batch).sum()


def solution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    x = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None].requires_grad_()

    def closure():
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        r = torch.cat([slope - u, 3 * (u[:1] - 1)])
        return r.square().mean(), r

    return model, closure


def dropout():
    model, _, sets = small()
    model[2] = nn.Dropout(0.5)

    def closure(batch):
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z

    return model, closure, sets


def broken():
    return undefined_name


def wrong():
    return 3


def later():
    model, closure, sets = small()
    calls = []

    def failing(batch):
        calls.append(1)
        if len(calls) > 40:
            raise OSError("the disk is gone")
        return closure(batch)

    return model, failing, sets
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "unimportable.py").write_text("x = 1\nimport no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("problem", "unimportable"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    source = str(Path(krylov_descent.__file__).parent.parent)
    environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    line = [sys.executable, "-m", "krylov_descent", *arguments]
    return subprocess.Popen(line, text=True, env=environment, preexec_fn=_heed_interrupts, **options)


def _heed_interrupts() -> None:
    """Tests that a shell runs in the background are started with interrupts ignored, and so is what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_check_in_a_process_of_its_own(directory: Path) -> None:
    with command("check", "problem:dropout", "--json", stdout=subprocess.PIPE) as process:
        text, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    report = json.loads(text)
    assert [f["name"] for f in report["findings"] if f["status"] == "fail"] == ["deterministic"]
    assert "Dropout at 2" in text


def test_check_shows_a_table(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["check", "problem:small", "--krylov-dim", "5"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "exact: 0, 3; probe: 1" in text
    assert "optimizer = KSD(model.parameters(), krylov_dim=5)" in text
    assert main(["check", "problem:full_batch", "--curvature", "hessian"]) == 0
    assert "curvature='hessian'" in capsys.readouterr().out


def test_check_tells_the_memory_on_ranks(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model without memory; V and the sketch shrink, the parameters are there twice."""
    taken = {}
    for R in ("1", "8"):
        assert main(["check", "problem:planned", "--ranks", R, "--krylov-dim", "7", "--json"]) == 0
        taken[R] = json.loads(capsys.readouterr().out)
    P = 4000 * 4001
    assert taken["1"]["KSD"]["bytes"]["basis"] == 8 * taken["8"]["KSD"]["bytes"]["basis"] == 4 * 8 * P
    assert taken["8"]["KSD"]["bytes"]["parameters"] == 8 * P
    sketches = [taken[R]["GaussNewtonFlow"]["bytes"]["sketch"] for R in taken]
    assert sketches[0] == 8 * sketches[1]
    assert main(["check", "problem:planned", "--ranks", "8"]) == 0
    text = capsys.readouterr().out
    assert text.count("on each of 8 ranks") == 3
    assert "KSD(**DEEP): " in text
    assert main(["check", "problem:planned", "--ranks", "0"]) == 2
    assert "ranks=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "what", "remedy"),
    [
        ("nowhere:f", "no module 'nowhere'", "nowhere.py"),
        ("problem:nothing", "no function 'nothing'", "full_batch"),
        ("problem", "not module:function", "problem:make_problem"),
        ("problem.py:small", "not module:function", "problem:small"),
        ("problem:wrong", "returned int", "return model, closure"),
        ("problem:broken", "undefined_name' is not defined (problem.py:", "by itself in Python"),
        ("unimportable:f", "no_such_package' (unimportable.py:2", "by itself in Python"),
    ],
)
def test_wrong_targets(
    directory: Path, capsys: pytest.CaptureFixture[str], target: str, what: str, remedy: str
) -> None:
    assert main(["check", target]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert remedy in told.partition("→")[2]


def test_usage_and_version(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"krylov-descent {krylov_descent.__version__}\n"
    assert main(["check"]) == 2
    assert main(["check", "problem:small", "--curvature", "newton"]) == 2
    assert main(["--help"]) == 0
    capsys.readouterr()
    assert main(["check", "problem:small", "--krylov-dim", "0"]) == 2
    assert "krylov_dim=0" in capsys.readouterr().err
    assert main(["train", "problem:small", "--patience", "0"]) == 2
    assert "patience=0" in capsys.readouterr().err
    assert main(["plot", "nothing.jsonl"]) == 2
    assert "no log" in capsys.readouterr().err


def steps_in(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        steps: int = json.loads(file.metadata()["krylov_descent"])["extra"]["steps"]
    return steps


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_interrupted_and_resumed_is_the_run_that_was_not(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in a terminal with a bar, then --resume; bit for bit."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # of no size, it shows nothing
    try:
        with command(
            "train", "problem:small", "--out", "cut", "--patience", "100000", stderr=theirs, stdout=subprocess.PIPE
        ) as process:
            os.close(theirs)
            log = directory / "cut" / "log.jsonl"
            end = time.monotonic() + 100
            shown = b""
            os.set_blocking(ours, False)
            while not (log.exists() and len(log.read_text().splitlines()) >= 4):
                assert process.poll() is None
                assert time.monotonic() < end
                shown += _read(ours)
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            try:
                told, _ = process.communicate(timeout=60)
            finally:
                process.kill()
    finally:
        os.close(ours)
    assert process.returncode == 130
    assert "add --resume to the same command" in told
    assert b"step/s" in shown or b"s/step" in shown  # the bar
    kept = steps_in(directory / "cut" / "checkpoint.safetensors")
    assert 1 <= kept <= len(losses(log))  # a save waits for the disk, and steps may go by between two
    assert not (directory / "cut" / "model.pt").exists()

    total = str(kept + 3)
    assert main(["train", "problem:small", "--out", "cut", "--resume", "--max-steps", total, "--no-progress"]) == 0
    told = capsys.readouterr().out
    assert f"going on after {kept} steps" in told
    assert f"Ended after {total} steps" in told
    assert main(["train", "problem:small", "--out", "whole", "--max-steps", total]) == 0
    told = capsys.readouterr().out
    assert "step 0 | loss" in told  # lines, where there is no terminal
    assert "All steps were taken. For more: --resume" in told
    assert losses(log) == losses(directory / "whole" / "log.jsonl")
    assert len(losses(log)) == kept + 3
    one, other = (torch.load(directory / name / "model.pt", weights_only=True) for name in ("cut", "whole"))
    assert all(torch.equal(one[key], other[key]) for key in other)
    names = ["checkpoint.safetensors", "log.jsonl", "model.pt"]
    assert sorted(path.name for path in (directory / "cut").iterdir()) == names

    # Nothing left to do, and nothing overwritten by mistake.
    assert main(["train", "problem:small", "--out", "cut", "--resume", "--max-steps", total]) == 0
    assert "No step was taken" in capsys.readouterr().out
    again = torch.load(directory / "cut" / "model.pt", weights_only=True)
    assert all(torch.equal(again[key], other[key]) for key in other)
    assert main(["train", "problem:small", "--out", "cut"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert (
        main(["train", "problem:full_batch", "--out", "cut", "--resume", "--krylov-dim", "3", "--max-steps", "1"]) == 0
    )


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except (BlockingIOError, OSError):
        return b""


def test_a_run_that_fails_keeps_its_checkpoint(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "problem:later", "--krylov-dim", "2", "--max-steps", "9", "--no-progress"]) == 1
    told = capsys.readouterr().err
    assert "OSError: the disk is gone (problem.py:" in told
    assert "krylov-descent check problem:later" in told
    kept = steps_in(directory / "ksd-run" / "checkpoint.safetensors")
    assert kept == len(losses(directory / "ksd-run" / "log.jsonl")) >= 1
    assert main(["train", "problem:dropout", "--out", "other", "--max-steps", "1"]) == 1
    assert "closure is random" in capsys.readouterr().err


def test_a_checkpoint_of_another_model(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory / "ksd-run" / "checkpoint.safetensors"
    other = torch.nn.Linear(2, 1)
    checkpoint.save(path, other, KSD(other.parameters()))
    assert main(["train", "problem:small", "--resume"]) == 2
    said = capsys.readouterr().err
    assert "another model" in said
    assert "another --out" in said
    made = load("problem:small").model
    for extra in ({}, {"steps": "many", "generator": "00"}, {"steps": 3, "generator": "00"}):
        checkpoint.save(path, made, KSD(made.parameters()), extra=extra)
        assert main(["train", "problem:small", "--resume"]) == 2
        assert "another --out" in capsys.readouterr().err
    path.write_bytes(b"nothing of the kind")
    assert main(["train", "problem:small", "--resume"]) == 2
    assert "no checkpoint, or damaged" in " ".join(capsys.readouterr().err.split())


def test_full_batch_to_the_gradient_and_a_picture(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["train", "problem:full_batch", "--gtol", "1", "--weight-decay", "1e-3", "--resume"]) == 0
    told = capsys.readouterr().out
    assert "from the start" in told
    assert "Ended after 1 step at" in told
    assert "gradient. The gradient's norm is at most gtol: converged." in " ".join(told.split())
    assert main(["plot", "ksd-run", "--out", "pictures/run.png"]) == 0
    assert (directory / "pictures" / "run.png").stat().st_size > 10_000
    (directory / "empty.jsonl").write_text("")
    assert main(["plot", "empty.jsonl"]) == 2


def test_the_method_that_check_advises_can_be_trained_with(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["check", "problem:solution"]) == 0
    assert "optimizer = GaussNewtonFlow(model.parameters())" in capsys.readouterr().out
    assert main(["train", "problem:solution", "--method", "flow", "--max-steps", "3"]) == 0
    steps = [json.loads(line) for line in Path("ksd-run/log.jsonl").read_text().splitlines()]
    assert {step["stop_reason"] for step in steps} == {"candidate"}
    if importlib.util.find_spec("matplotlib"):
        assert main(["plot", "ksd-run"]) == 0  # of a method without Krylov vectors

    # It goes on as the method that it began with, and as no other.
    capsys.readouterr()
    assert main(["train", "problem:solution", "--max-steps", "4", "--resume"]) == 2
    assert "the function and the options that began the run" in capsys.readouterr().err
    assert main(["train", "problem:solution", "--method", "flow", "--max-steps", "4", "--resume"]) == 0
    assert main(["train", "problem:solution", "--method", "flow", "--max-steps", "4", "--out", "whole"]) == 0
    assert losses(directory / "ksd-run" / "log.jsonl") == losses(directory / "whole" / "log.jsonl")


def test_a_trial_and_its_picture(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert main(["check", "problem:solution", "--try", "0.05s", "--picture", "tried.png"]) == 0
    shown = capsys.readouterr()
    assert "\n→ " in shown.out
    assert "Adam → L-BFGS" in shown.out
    if importlib.util.find_spec("matplotlib"):
        assert "tried.png: the losses" in shown.err
        assert (directory / "tried.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["check", "problem:solution", "--try", "0.05", "--json"]) == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["trial"]) == 6
    assert "pip install 'krylov-descent[plot]'" in shown.err
    assert not (directory / "trial.png").exists()
    for wrong in ("soon", "0s"):
        assert main(["check", "problem:solution", "--try", wrong]) == 2
        assert wrong.removesuffix("s") in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--krylov-dim", "5"), ("--curvature", "hessian")])
def test_options_of_ksd_do_not_go_with_the_flow(
    directory: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert main(["train", "problem:solution", "--method", "flow", *option]) == 2
    assert "--method flow goes with neither" in capsys.readouterr().err
    assert not (directory / "ksd-run").exists()


def test_the_package_needs_none_of_it() -> None:
    """Importing the package brings neither the command line's packages nor the plots'."""
    code = (
        "import sys, krylov_descent; "
        "sys.exit(any(name in sys.modules for name in ('tyro', 'matplotlib', 'krylov_descent.cli')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
