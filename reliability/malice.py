"""Checkpoints that somebody crafted: pickles that run what they say, headers that lie, numbers that are none.

Each function changes a checkpoint in a directory. What it plants would make the file ``fired`` if it were run.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from krylov_descent.safety.checksum import checksum
from krylov_descent.safety.tensor_file import KEY, LIMIT, write

NAME = "run.safetensors"


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


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the JSON document of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        document: dict[str, Any] = json.loads(file.metadata()[KEY])
    return load_file(path), document


def with_checksum(tensors: dict[str, Tensor], document: dict[str, Any]) -> str:
    """A document as JSON, with the checksum that it should have."""
    said = {key: value for key, value in document.items() if key != "crc32"}
    return json.dumps({**said, "crc32": checksum([json.dumps(said, sort_keys=True), tensors])}, sort_keys=True)


def rewrite(path: Path, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    """A checkpoint with other contents, and a checksum that says so."""
    write(path, tensors, with_checksum(tensors, document))


def torch_file(root: Path, fired: Path, randomly: random.Random) -> str:
    """A bomb in a file of torch.save: alone, among the values, as the archive's pickle, or as no archive at all."""
    path = root / "optimizer.pt"
    bomb = Bomb(fired, randomly.choice(WAYS))
    way = randomly.choice(["alone", "a value", "a state", "the archive's pickle", "a bare pickle", "the old format"])
    kept = torch.load(path, weights_only=True)
    if way == "alone":
        torch.save(bomb, path)
    elif way == "a value":
        torch.save({**kept, "more": bomb}, path)
    elif way == "a state":
        kept["state"][0]["iteration"] = bomb
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


def unpickled(root: Path, fired: Path, randomly: random.Random) -> str:
    """A pickle in place of a checkpoint, or as the numbers of a tensor, with the right checksum."""
    bomb = Bomb(fired, randomly.choice(WAYS))
    way = randomly.choice(["a bare pickle", "a file of torch.save", "the numbers of a tensor"])
    if way == "a bare pickle":
        (root / NAME).write_bytes(pickle.dumps(bomb, protocol=randomly.choice([0, 2, 4])))
    elif way == "a file of torch.save":
        torch.save(bomb, root / NAME)
    else:
        tensors, document = contents(root / NAME)
        data = torch.frombuffer(bytearray(pickle.dumps(bomb)), dtype=torch.uint8)
        rewrite(root / NAME, {**tensors, randomly.choice(sorted(tensors)): data}, document)
    return way


#: What crafted metadata say, and where.
_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 1 << 70, 10**400, 0.5, "", "__import__('os').system('true')", [], {}, [1 << 40, 1 << 40], [[[]]]),
    *({"__reduce__": ["os.system", "true"]}, "torch.nn.Module", "object", "../../x", "\x00", "NaN", 1e308),
)


def metadata(root: Path, fired: Path, randomly: random.Random) -> str:
    """A value of the wrong kind, anywhere in the metadata, with the right checksum."""
    tensors, document = contents(root / NAME)
    while True:
        place: Any = document
        keys: list[Any] = []
        while isinstance(place, (dict, list)) and place and (not keys or randomly.random() < 0.8):
            key = randomly.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            keys.append(key)
            parent, place = place, place[key]
        value = randomly.choice(_VALUES)
        # A number in place of another is one; what a user puts into extra is theirs.
        numbers = isinstance(value, (int, float)) and isinstance(place, (int, float)) and "settings" in keys
        if keys[0] not in ("crc32", "extra") and type(value) is not type(place) and not numbers:
            break
    if keys[-1] in ("lr", "acceptance.loss") or (keys[0] == "numbers" and type(value) is float):
        value = "no number"
    if keys[0] == "numbers" and keys[-1].startswith("samples."):
        value = None  # of which kind it is, the sample policy tells, at the next step
    parent[keys[-1]] = value
    rewrite(root / NAME, tensors, document)
    return f"{'/'.join(map(str, keys))} = {str(value)[:40]!r}"


def text(root: Path, fired: Path, randomly: random.Random) -> str:
    """Metadata that are hardly JSON, or too many."""
    tensors, document = contents(root / NAME)
    written = with_checksum(tensors, document)
    texts = {
        "deeply nested": "[" * 100_000,
        "deep values": written.replace('"kept": true', '"x": ' + "[" * 100_000 + "]" * 100_000, 1),
        "a number of 10,000 digits": written.replace('"seed": ', '"seed": 1' + "0" * 10_000, 1),
        "infinity": written.replace('"weight_decay": ', '"weight_decay": 1e999, "x": ', 1),
        "NaN": written.replace('"weight_decay": ', '"weight_decay": NaN, "x": ', 1),
        "the same key twice": written.replace('"seed": ', '"seed": 7, "seed": ', 1),
        "more than may be": with_checksum(tensors, {**document, "extra": {"x": "y" * LIMIT}}),
        "other characters": "\x00\ufffe" + written,
        "a pickle": pickle.dumps(Bomb(fired, randomly.choice(WAYS)), protocol=0).decode(),
        "an array": f"[{written}]",
        "a number": "3",
        "nothing": "",
    }
    way = randomly.choice(sorted(texts))
    write(root / NAME, tensors, texts[way])
    return way


def header(root: Path, fired: Path, randomly: random.Random) -> str:
    """A header that lies about what comes after it."""
    path = root / NAME
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    told, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    one, other = randomly.sample([name for name in told if name != "__metadata__"], 2)
    way = randomly.choice(_HEADERS)
    if way == "swapped":
        told[one], told[other] = told[other], told[one]
    elif way == "the place of another":
        told[one]["data_offsets"] = told[other]["data_offsets"]
    elif way == "of terabytes":
        told[one] = {"dtype": "F64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]}
    elif way == "beyond all bounds":
        told[one]["shape"] = [(1 << 63) - 1, (1 << 63) - 1]
    elif way == "empty and vast":
        told["model/more"] = {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [len(numbers)] * 2}
    elif way == "another dtype":
        told[one]["dtype"] = randomly.choice(["I64", "F32", "F64", "C128", "object", 3])
    elif way == "another shape":
        told[one]["shape"] = [*told[one]["shape"], 1]
    elif way == "no such name":
        told[randomly.choice(["", "else", "optimizer/else", "../x"])] = told.pop(one)
    elif way == "one fewer":
        del told[one]
    written = json.dumps(told)
    if way == "the same key twice":
        written = written.replace(f'"{one}": ', f'"{one}": {json.dumps(told[one])}, "{one}": ')
    elif way == "nested":
        written = "[" * 100_000
    elif way == "spaces":
        written += " " * 80
    coded = written.encode()
    said = 1 << 62 if way == "a long length" else len(coded)
    path.write_bytes(said.to_bytes(8, "little") + coded + numbers)
    return f"{way}: {one}"


_HEADERS = (
    *("swapped", "the place of another", "of terabytes", "beyond all bounds", "empty and vast", "another dtype"),
    *("another shape", "no such name", "one fewer", "the same key twice", "nested", "spaces", "a long length"),
)


def not_finite(root: Path, fired: Path, randomly: random.Random) -> str:
    """NaN or infinity in a vector, with the right checksum."""
    tensors, document = contents(root / NAME)
    vectors = sorted(name for name in tensors if not name.startswith("model/"))
    if not vectors:
        tensors["vectors/last_step"] = torch.full((3,), math.nan)
        vectors = ["vectors/last_step"]
    name = randomly.choice(vectors)
    value = randomly.choice([math.nan, math.inf, -math.inf])
    tensors[name].view(-1)[0] = value
    rewrite(root / NAME, tensors, document)
    return f"{value} in {name}"


Craft = Callable[[Path, Path, random.Random], str]
#: By name; of the checkpoint file.
OF_FILE: dict[str, Craft] = {
    "a pickle in the file": unpickled,
    "crafted metadata": metadata,
    "metadata that are hardly JSON": text,
    "a header that lies": header,
    "a vector that is not finite": not_finite,
}
