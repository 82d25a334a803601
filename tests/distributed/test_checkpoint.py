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
from torch import nn

from krylov_descent import KSD
from krylov_descent.distributed import checkpoint
from krylov_descent.distributed.launch import init_process_group
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
    model, optimizer = build()
    pretend(model, optimizer, 5)
    checkpoint.save(tmp_path / "large", model, optimizer)
    assert sorted(os.listdir(tmp_path / "large")) == ["latest", "step-00000003", "step-00000005"]


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
    assert checkpoint.load(tmp_path, model, optimizer) == {"attempt": 1}
    require(model, optimizer, 1)


def test_no_process_group_in_a_single_process() -> None:
    assert init_process_group() is None


# Every call by which ``save`` changes the file system.
CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("iteration", [12, 11], ids=["next", "same again"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, iteration: int) -> None:
    found = []
    moment = 0
    while True:
        directory = tmp_path / str(moment)
        saved(directory, 10, 11, keep=1)
        model, optimizer = build()
        pretend(model, optimizer, iteration)
        extra = {"new": True}
        killed = killed_at(moment, partial(checkpoint.save, directory, model, optimizer, extra=extra, keep=1))
        model, optimizer = build()
        new = checkpoint.load(directory, model, optimizer) == extra
        require(model, optimizer, iteration if new else 11)
        found.append(new)
        saved(directory, 13, keep=1)  # and the next run cleans up
        assert sorted(os.listdir(directory)) == ["latest", "step-00000013"]
        if not killed:
            break
        moment += 1
    assert found == sorted(found)
    assert found[-1]
    assert moment > 10


def test_latest(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 3, 20, 12, keep=3)
    checkpoint.load(tmp_path, model, optimizer)
    require(model, optimizer, 12)  # saved last, after the run was set back
    latest = tmp_path / "latest"
    latest.unlink()
    checkpoint.load(tmp_path, model, optimizer)
    require(model, optimizer, 20)
    latest.write_text("step-00000099\n")
    with pytest.warns(
        UserWarning, match="names step-00000099, which is not there or not complete; loading step-00000020"
    ):
        checkpoint.load(tmp_path, model, optimizer)
    latest.write_text("../elsewhere")
    with pytest.raises(ValueError, match="no name of a checkpoint"):
        checkpoint.load(tmp_path, model, optimizer)
    saved(tmp_path, 13, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000012", "step-00000013"]
    assert checkpoint.save(tmp_path, model, optimizer, keep=2).name == "step-00000020"
    assert checkpoint.save(tmp_path, model, optimizer, keep=2).name == "step-00000020-2"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000013", "step-00000020-2"]
    checkpoint.load(tmp_path, model, optimizer)
    require(model, optimizer, 20)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 3)
    other = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    with pytest.raises(ValueError, match=r"another model: only there are \['1\.bias'"):
        checkpoint.load(tmp_path, other, KSD(other.parameters()))
    model.float()
    with pytest.raises(ValueError, match=r"0\.weight is \[3, 5\] of torch.float64 there and \[3, 5\] of torch.float32"):
        checkpoint.load(tmp_path, model, optimizer)
    model.double()
    with pytest.raises(ValueError, match="has 2 parameter groups, the optimizer 1"):
        checkpoint.load(tmp_path, model, KSD(model.parameters()))
    for p in model.parameters():
        p.requires_grad_(True)
    with pytest.raises(ValueError, match="other parameter groups: group 1"):
        checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(ValueError, match="is not the model's"):
        checkpoint.save(tmp_path, model[0], optimizer)  # type: ignore[index]
    unfit: list[tuple[Any, str]] = [
        ({1: 2}, "would not come back"),
        ({"a": (1,)}, "would not"),
        ({"a": torch.ones(1)}, "JSON"),
    ]
    for extra, message in unfit:
        with pytest.raises(ValueError, match=message):
            checkpoint.save(tmp_path, model, optimizer, extra=extra)
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, model, optimizer, keep=0)


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    model = Odd(2, 1)
    with pytest.raises(ValueError, match=r"_extra_state = \{'a': 1\}; a checkpoint holds plain tensors only"):
        checkpoint.save(tmp_path, model, KSD(model.parameters()))
