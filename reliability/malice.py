"""Checkpoints that somebody crafted: pickles that run what they say, paths that lead elsewhere, numbers that are none.

Each function changes a checkpoint in a directory. What it plants would make the file ``fired`` if it were run.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from krylov_descent.distributed.directory import pointer_to
from krylov_descent.distributed.manifest import MANIFEST, crc32_of


class Bomb:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, fired: Path, how: str) -> None:
        self._fired, self._how = str(fired), how

    def __reduce__(self) -> tuple[Any, ...]:
        ways: dict[str, tuple[Any, ...]] = {
            "path": (Path.touch, (Path(self._fired),)),
            "system": (os.system, (f"touch '{self._fired}'",)),
            "mkdir": (os.mkdir, (self._fired,)),
            "exec": (exec, (f"import os; os.mkdir({self._fired!r})",)),
            "eval": (eval, (f"__import__('os').mkdir({self._fired!r})",)),
            "subprocess": (subprocess.call, (["touch", self._fired],)),
        }
        return ways[self._how]


WAYS = ("path", "system", "mkdir", "exec", "eval", "subprocess")


def document_in(root: Path) -> tuple[Path, dict[str, Any]]:
    """The manifest of the newest checkpoint in a directory."""
    path = sorted(root.glob("step-*"))[-1] / MANIFEST
    document: dict[str, Any] = json.loads(path.read_text())
    return path, document


def write_document(path: Path, document: dict[str, Any]) -> None:
    """A manifest with the checksum that it should have."""
    document.pop("crc32", None)
    path.write_text(json.dumps({**document, "crc32": crc32_of(document)}))


def torch_file(root: Path, fired: Path, randomly: random.Random) -> str:
    """A bomb in a file of torch.save: alone, among the values, as the archive's pickle, or as no archive at all."""
    path = next(path for name in ("optimizer.pt", "checkpoint.pt") if (path := root / name).exists())
    bomb = Bomb(fired, randomly.choice(WAYS))
    way = randomly.choice(["alone", "a value", "a state", "the archive's pickle", "a bare pickle", "the old format"])
    kept = torch.load(path, weights_only=True)
    if way == "alone":
        torch.save(bomb, path)
    elif way == "a value":
        torch.save({**kept, "steps": bomb, "more": bomb}, path)
    elif way == "a state":
        state = kept.get("optimizer", kept)["state"]
        state[0]["iteration"] = bomb
        torch.save(kept, path)
    elif way == "the archive's pickle":
        _replace_pickle(path, pickle.dumps(bomb, protocol=2))
    elif way == "a bare pickle":
        path.write_bytes(pickle.dumps(bomb, protocol=randomly.choice([0, 2, 4])))
    else:
        torch.save({"state": {0: bomb}, "param_groups": []}, path, _use_new_zipfile_serialization=False)
    return way


def _replace_pickle(path: Path, data: bytes) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
    path.write_bytes(made.getvalue())


def metadata(root: Path, fired: Path, randomly: random.Random) -> str:
    """The pickles that torch.distributed.checkpoint would load, with our manifest beside them or without."""
    path, _ = document_in(root)
    for name in (".metadata", "__0.metadata", "__0_0.metadata"):
        for place in (root, path.parent):
            (place / name).write_bytes(pickle.dumps(Bomb(fired, randomly.choice(WAYS))))
    if randomly.random() < 0.5:
        return "beside the manifest"
    for manifest in root.glob(f"step-*/{MANIFEST}"):
        manifest.unlink()
    return "in place of the manifest"


def data_file(root: Path, fired: Path, randomly: random.Random) -> str:
    """A block of a tensor that is a pickle, with the right sizes and checksums."""
    path, document = document_in(root)
    bomb = Bomb(fired, randomly.choice(WAYS))
    made = io.BytesIO()
    torch.save(bomb, made)
    data = randomly.choice([pickle.dumps(bomb), made.getvalue()]) + bytes(2000)
    (path.parent / "evil").write_bytes(data)
    document["files"]["evil"] = len(data)
    name: str = randomly.choice(sorted(document["tensors"]))
    block = document["tensors"][name]["blocks"][0]
    block.update(file="evil", start=0, length=len(data), crc32=zlib.crc32(data))
    write_document(path, document)
    return name


def traversal(root: Path, fired: Path, randomly: random.Random) -> str:
    """Paths that lead out of the directory."""
    path, document = document_in(root)
    outside = root.parent / "outside"
    outside.write_bytes(pickle.dumps(Bomb(fired, randomly.choice(WAYS))))
    size = outside.stat().st_size
    where = randomly.choice(["../../outside", str(outside), "../step-00000001/../../outside", "..", "a/b", "C:\\x", ""])
    if randomly.random() < 0.3:
        name = randomly.choice(["../outside", "/", "step-00000001/..", "..", str(outside)])
        (root / "latest").write_text(randomly.choice([f"{name}\n", pointer_to(name)]))
        return f"latest: {name}"
    document["files"][where] = size
    block = randomly.choice([entry["blocks"][0] for entry in document["tensors"].values()])
    block.update(file=where, start=0, length=size, crc32=zlib.crc32(outside.read_bytes()))
    write_document(path, document)
    return where


#: What a crafted manifest says, and where.
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1 << 70, 0.5, "", "__import__('os').system('true')", [], {}, [1 << 40, 1 << 40], [[[]]]),
    *({"__reduce__": ["os.system", "true"]}, "torch.nn.Module", "object", "../../x", "\x00", "nan", 1e308),
)


def manifest(root: Path, fired: Path, randomly: random.Random) -> str:
    """A value of the wrong kind, anywhere in the manifest."""
    path, document = document_in(root)
    while True:
        place: Any = document
        keys: list[Any] = []
        while isinstance(place, (dict, list)) and place and (not keys or randomly.random() < 0.8):
            key = randomly.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            keys.append(key)
            parent, place = place, place[key]
        value = randomly.choice(_VALUES)
        # A value of the same kind is not of the wrong one; what a user puts into extra is theirs.
        if keys[0] != "crc32" and "extra" not in keys[1:] and type(value) is not type(place):
            break
    if isinstance(value, dict) and fired:
        value = {**value, "fired": str(fired)}
    parent[keys[-1]] = value
    write_document(path, document)
    return f"{'/'.join(map(str, keys))} = {value!r}"


def text(root: Path, fired: Path, randomly: random.Random) -> str:
    """A manifest that is hardly JSON."""
    path, document = document_in(root)
    written = json.dumps(document)
    texts = {
        "deeply nested": "[" * 100_000,
        "deep values": written.replace('"extra": {', '"extra": {"x": ' + "[" * 900 + "]" * 900 + ", ", 1),
        "a number of 10,000 digits": written.replace('"seed": ', '"seed": 1' + "0" * 10_000, 1),
        "infinity": written.replace('"weight_decay": ', '"weight_decay": 1e999, "x": ', 1),
        "NaN": written.replace('"weight_decay": ', '"weight_decay": NaN, "x": ', 1),
        "the same key twice": written.replace('"seed": ', '"seed": 7, "seed": 8, "x": ', 1),
        "other bytes": "\x00\ufffe" + written,
        "a pickle": pickle.dumps(Bomb(fired, randomly.choice(WAYS)), protocol=0).decode(),
        "an array": f"[{written}]",
    }
    way = randomly.choice(sorted(texts))
    path.write_text(texts[way])
    return way


Craft = Callable[[Path, Path, random.Random], str]
#: By name; of a directory.
OF_DIRECTORY: dict[str, Craft] = {
    "a pickle for torch.distributed.checkpoint": metadata,
    "a pickle in a data file": data_file,
    "a path that leads elsewhere": traversal,
    "a crafted manifest": manifest,
    "a manifest that is hardly JSON": text,
}
