"""Checkpoints: any number of ranks to any other, and whole after a kill at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from krylov_descent import KSD, checkpoint
from krylov_descent.distributed.launch import init_process_group
from krylov_descent.safety import tensor_file
from tests.distributed.checkpoint_worker import EXTRA, R, build, pretend, require, saved

ROOT = Path(__file__).parents[2]
WORKER = "tests.distributed.checkpoint_worker"


def test_any_number_of_ranks_to_any_other(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", WORKER, "all"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(R)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 9, 0, 0], "\n".join(said)
    for name, iteration, extra in (("large", 3, EXTRA), ("large-2", 4, {}), ("large-3", 4, {})):
        model, optimizer = build()
        assert checkpoint.load(tmp_path / name, model, optimizer) == extra
        require(model, optimizer, iteration)
    for name, iteration in (("small", 3), ("small-2", 4), ("small-3", 4)):
        model, optimizer = build(small=True)
        checkpoint.load(tmp_path / name, model, optimizer)
        require(model, optimizer, iteration)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # nothing is left of a save


@pytest.mark.nightly
def test_restarts_join_and_go_on(tmp_path: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", WORKER]
    done = subprocess.run(
        [sys.executable, "-m", *command, "restarts", "0", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    model, optimizer = build()
    assert checkpoint.load(tmp_path / "run.safetensors", model, optimizer) == {"attempt": 1}
    require(model, optimizer, 1)


def test_no_process_group_in_a_single_process() -> None:
    assert init_process_group() is None


# Every call by which ``save`` changes the file system, but for writing.
CALLS = ("open", "fsync", "replace", "unlink")


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """Do something in a process that dies before its nth change of the file system; whether it did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads in the parent
        child = os.fork()
    if child == 0:
        left = [moment]

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return call(*args, **kwargs)

            return wrapped

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def writing_half(head: Callable[..., bytes]) -> Callable[..., bytes]:
    """A file's head that is cut off, with the process dead before it can write more."""

    def cut(*args: Any) -> bytes:
        written = head(*args)
        (Path(os.environ["CUT_IN"]) / ".run.safetensors.tmp").write_bytes(written[: len(written) // 2])
        os._exit(9)

    return cut


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    found = []
    moment = 0
    while True:
        path = tmp_path / str(moment) / "run.safetensors"
        saved(path, 11)
        model, optimizer = build()
        pretend(model, optimizer, 12)
        extra = {"new": True}
        killed = killed_at(moment, partial(checkpoint.save, path, model, optimizer, extra=extra))
        model, optimizer = build()
        new = checkpoint.load(path, model, optimizer) == extra
        require(model, optimizer, 12 if new else 11)
        found.append(new)
        saved(path, 13)  # and the next save cleans up
        assert os.listdir(path.parent) == [path.name]
        if not killed:
            break
        moment += 1
    assert found == sorted(found)
    assert found[-1]
    assert not found[0]
    assert moment >= 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_while_it_writes_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = saved(path, 11)
    pretend(model, optimizer, 12)
    monkeypatch.setenv("CUT_IN", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(tensor_file, "_head", writing_half(tensor_file._head))
        assert killed_at(1000, partial(checkpoint.save, path, model, optimizer))
    assert sorted(os.listdir(tmp_path)) == [".run.safetensors.tmp", "run.safetensors"]
    checkpoint.load(path, model, optimizer)
    require(model, optimizer, 11)
    saved(path, 13)
    assert os.listdir(tmp_path) == ["run.safetensors"]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = saved(path, 3)
    other = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with pytest.raises(ValueError, match=r"run.safetensors: .* another model: only there are \['1\.bias'"):
        checkpoint.load(path, other, KSD(other.parameters()))
    model.float()
    with pytest.raises(ValueError, match=r"0\.weight is \[3, 5\] of torch.float64 there and \[3, 5\] of torch.float32"):
        checkpoint.load(path, model, optimizer)
    model.double()
    with pytest.raises(ValueError, match="has 2 parameter groups, the optimizer 1"):
        checkpoint.load(path, model, KSD(model.parameters()))
    for p in model.parameters():
        p.requires_grad_(True)
    with pytest.raises(ValueError, match="other parameter groups: group 1"):
        checkpoint.load(path, model, optimizer)
    with pytest.raises(ValueError, match="is not the model's"):
        checkpoint.save(path, model[0], optimizer)  # type: ignore[index]
    unfit: list[tuple[Any, str]] = [
        ({1: 2}, "would not come back"),
        ({"a": (1,)}, "would not"),
        ({"a": torch.ones(1)}, "JSON"),
        ({"a": float("nan")}, "JSON"),
        ({"a": "x" * 2_000_000}, "2,00.,... characters as JSON, and a checkpoint has room for 1,048,576"),
    ]
    for extra, message in unfit:
        with pytest.raises(ValueError, match=message):
            checkpoint.save(path, model, optimizer, extra=extra)


def test_what_is_no_plain_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    model = Odd(2, 1)
    with pytest.raises(
        ValueError, match=r"_extra_state = \{'a': 1\} cannot be saved: a checkpoint holds plain tensors"
    ):
        checkpoint.save(tmp_path / "run", model, KSD(model.parameters()))
    wide = nn.Linear(2, 1)
    wide.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match="model/phase"):
        checkpoint.save(tmp_path / "run", wide, KSD(wide.parameters()))
    assert not [*tmp_path.iterdir()]


def test_other_readers_of_safetensors_open_it_and_shared_weights_stay_shared(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.register_buffer("none", torch.zeros(0, 2, dtype=torch.bool))
            self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))

    model = Tied()
    path = checkpoint.save(tmp_path / "folder" / "run.safetensors", model, KSD(model.parameters()))
    found = load_file(path)
    assert {name: x.dtype for name, x in found.items()} == {
        f"model/{name}": x.dtype for name, x in model.state_dict().items()
    }
    assert all(torch.equal(found[f"model/{name}"], x) for name, x in model.state_dict().items())
    other = Tied()
    assert checkpoint.load(path, other, KSD(other.parameters())) == {}
    assert other.a.weight is other.b.weight
    assert torch.equal(other.a.weight, model.a.weight)


def test_without_safetensors_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['safetensors'] = None; import krylov_descent.checkpoint"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: Checkpoints need safetensors: pip install 'krylov-descent[checkpoint]'." in done.stderr
