"""Writers, against the real TensorBoard and the real wandb in offline mode."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from krylov_descent import KSD, StepReport
from krylov_descent.writers import JSONLWriter, TensorBoardWriter, scalars


@pytest.fixture
def reports() -> list[StepReport]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    x = torch.randn(30, 2, dtype=torch.float64)

    def closure() -> tuple[torch.Tensor, torch.Tensor]:
        r = model(x) - x.prod(1, keepdim=True)
        return r.square().mean(), r

    return list(KSD(model.parameters(), krylov_dim=4).run(closure, max_steps=3))


def test_jsonl_is_what_the_reports_say_and_goes_on(tmp_path: Path, reports: list[StepReport]) -> None:
    path = tmp_path / "new" / "log.jsonl"
    with JSONLWriter(path) as write:
        write(reports[0])
        assert json.loads(path.read_text()) == reports[0].as_dict()  # at once, not at the end
    with JSONLWriter(path) as write:
        write(reports[1])
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0, 1]


def test_jsonl_is_json_where_numbers_are_not_finite(tmp_path: Path, reports: list[StepReport]) -> None:
    with JSONLWriter(tmp_path / "log.jsonl") as write:
        write(dataclasses.replace(reports[0], search_loss_after=math.nan, ritz_values=(1.0, math.inf)))
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line["search_loss_after"] is None
    assert line["ritz_values"] == [1.0, None]


def test_numbers_of_the_method_are_scalars(reports: list[StepReport]) -> None:
    with_more = scalars(dataclasses.replace(reports[0], details={"rows": 20.0}))
    assert with_more == {**scalars(reports[0]), "ksd/details/rows": 20.0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's protobuf
def test_tensorboard_reads_back_what_was_written(tmp_path: Path, reports: list[StepReport]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardWriter(tmp_path) as write:
        for report in reports:
            write(report)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    losses = events.Scalars("ksd/loss")
    assert [event.step for event in losses] == [0, 1, 2]
    assert [event.value for event in losses] == pytest.approx([report.loss for report in reports], rel=1e-6)
    assert {"ksd/seconds/basis", "ksd/grad_norm", "ksd/accepted"} <= set(events.Tags()["scalars"])
    histogram = events.Histograms("ksd/ritz_values")[0].histogram_value
    assert histogram.num == len(reports[0].ritz_values)
    assert histogram.max == pytest.approx(max(reports[0].ritz_values))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_summary_writer_of_ones_own_stays_open(tmp_path: Path, reports: list[StepReport]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as own:
        with TensorBoardWriter(own) as write:
            write(reports[0])
        own.add_scalar("mine", 1.0, 0)


_WANDB = """
import torch
from krylov_descent import KSD
from krylov_descent.writers import WandbWriter

w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
with WandbWriter(project="ksd", mode="offline", dir=".") as write:
    for report in KSD([w], krylov_dim=1).run(lambda: ((w**4).mean(), w), max_steps=3):
        write(report)
        print(repr(report.loss))
"""


def test_wandb_offline_holds_every_row(tmp_path: Path) -> None:
    """In a process of its own: the file is whole when wandb's service, which ends with the process, has written it."""
    command = [sys.executable, "-c", _WANDB]
    environment = {**os.environ, "WANDB_SILENT": "true"}
    process = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    rows = _history(next(tmp_path.rglob("*.wandb")))
    assert [row["ksd/iteration"] for row in rows] == [0, 1, 2]
    assert [row["ksd/loss"] for row in rows] == pytest.approx([float(line) for line in process.stdout.split()])
    assert rows[0]["ksd/ritz_values._type"] == "histogram"


def _history(path: Path) -> list[dict[str, object]]:
    """The rows in wandb's file, whose records are wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    rows = []
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows


def _records(log: bytes) -> Iterator[bytes]:
    """A log of LevelDB's format: blocks of 2^15 bytes, chunks with checksum, length and kind (2, 3, 4: in parts)."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
        length, kind = struct.unpack_from("<HB", log, at + 4)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
