"""A checkpoint from anywhere: it runs no code, and what is damaged or crafted is refused with nothing touched."""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.distributed import checkpoint
from krylov_descent.distributed.manifest import MANIFEST, crc32_of
from tests.distributed.checkpoint_worker import pretend, require, saved


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def craft(path: Path, document: dict[str, Any]) -> None:
    """Write a manifest with the checksum that it should have."""
    document.pop("crc32", None)
    path.write_text(json.dumps({**document, "crc32": crc32_of(document)}))


def test_pickles_are_not_run(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 3)
    fired, step = tmp_path / "fired", tmp_path / "step-00000003"
    for name in (".metadata", "__0.metadata"):
        (step / name).write_bytes(pickle.dumps(Bomb(fired)))
    assert checkpoint.load(tmp_path, model, optimizer) == {}
    # Without the manifest, torch's own is not asked.
    manifest = (step / MANIFEST).read_text()
    (step / MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="not there or not complete"):
        checkpoint.load(tmp_path, model, optimizer)
    # A data file of pickles, with the right sizes and checksums.
    document = json.loads(manifest)
    data = pickle.dumps(Bomb(fired)) + bytes(1000)
    (step / "evil").write_bytes(data)
    document["files"]["evil"] = len(data)
    block = document["tensors"]["model/0.weight"]["blocks"][0]
    block.update(file="evil", start=0, length=len(data), crc32=zlib.crc32(data))
    craft(step / MANIFEST, document)
    with pytest.raises(ValueError, match=r"does not hold a tensor at 0, where model/0\.weight should be"):
        checkpoint.load(tmp_path, model, optimizer)
    assert not fired.exists()
    require(model, optimizer, 3)


def at(document: Any, *keys: Any, value: Any) -> None:
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = value


WEIGHT = ("tensors", "model/0.weight")
BLOCK = (*WEIGHT, "blocks", 0)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["format"], "other", "format is 'other'"),
        (["version"], 3, r"version is 3; this krylov_descent reads versions \(1, 2\)"),
        (["files"], {"../../etc/passwd": 3}, "plain name of a file"),
        (["files"], {"/etc/passwd": 3}, "plain name of a file"),
        (["files"], {"gone": 3}, "gone is missing"),
        (["files", "__0_0.distcp"], -1, "number of bytes"),
        ([*WEIGHT, "dtype"], "object", "dtype of model/0.weight is 'object'"),
        ([*WEIGHT, "shape"], [3, -5], "list of sizes"),
        ([*WEIGHT, "shape"], [3, True], "list of sizes"),
        ([*WEIGHT, "shape"], [4, 5], "should be 4 rows together"),
        ([*WEIGHT, "blocks"], [], "a list of blocks"),
        ([*BLOCK, "offset"], [1, 0], "begins where the last one ended"),
        ([*BLOCK, "file"], "/etc/passwd", "one of those under files"),
        ([*BLOCK, "start"], 10**9, "inside of the file"),
        ([*BLOCK, "length"], 1, "one that 1 bytes hold"),
        ([*BLOCK, "crc32"], 1, "do not have the checksum 1"),
        (["values", "numbers", "iteration"], "1", "iteration is '1', no number"),
        (["values", "numbers", "accepted_loss"], "__import__('os')", "no number"),
        (["values", "groups", 0, "settings", "weight_decay"], -1, "no such setting"),
        (["values", "groups", 0, "settings", "params"], 1, "no such setting"),
        (["values", "groups"], 3, "no list of parameter groups"),
        (["values", "extra"], None, "no object"),
        (["values"], [], "values is"),
        (["tensors", "optimizer/d_prev", "dtype"], "int64", "of torch.int64"),
    ],
    ids=lambda value: None,
)
def test_a_crafted_manifest_is_refused(tmp_path: Path, keys: list[Any], value: Any, message: str) -> None:
    model, optimizer = saved(tmp_path, 3)
    path = tmp_path / "step-00000003" / MANIFEST
    document = json.loads(path.read_text())
    at(document, *keys, value=value)
    craft(path, document)
    pretend(model, optimizer, 4)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        checkpoint.load(tmp_path, model, optimizer)
    require(model, optimizer, 4)  # left alone


def test_damage_is_noticed(tmp_path: Path) -> None:
    model, optimizer = saved(tmp_path, 3)
    pretend(model, optimizer, 4)
    step = tmp_path / "step-00000003"
    path = step / "__0_0.distcp"
    whole = path.read_bytes()
    text = (step / MANIFEST).read_text()
    weights = json.loads(text)["tensors"]["model/0.weight"]["blocks"][0]
    middle = weights["start"] + weights["length"] // 2
    for damaged, message in (
        (whole[:-100], "has .* bytes, and had"),
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "is damaged: .* of model/0.weight"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            checkpoint.load(tmp_path, model, optimizer)
    path.write_bytes(whole)
    for broken in (text[:-5], "[" * 100_000, text.replace("5.0", "NaN", 1) + "x", "7"):
        (step / MANIFEST).write_text(broken)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            checkpoint.load(tmp_path, model, optimizer)
    require(model, optimizer, 4)
