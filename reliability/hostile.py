"""Small files and states that would take gigabytes, hang, or end in an error that tells nothing.

``ATTACKS[name](folder, run)`` plants what it needs in an empty folder, and returns the call by which it comes in: a
``load_state_dict``, ``checkpoint.load``, ``plot.read`` or the command line. ``METHODS[name]()`` makes the run. ::

    for record in measured(ATTACKS, METHODS):     # in a process of its own
        record["attack"], record["method"], record["outcome"], record["peak"], record["lost"]

The outcome is "refused", or "loaded" if what came in is harmless and two more steps are well. It is lost if the call
raised anything but a ValueError with a remedy, changed model or optimizer though it refused, took more than 50 MiB
above what the process had, or if a step after it fails otherwise than by a ValueError. ``peak`` is in MiB.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, PAPER, GaussNewtonFlow, Growing, Subsets, checkpoint, plot
from krylov_descent.base import CurvatureOptimizer
from krylov_descent.cli.commands import run as command_line
from krylov_descent.safety.checksum import KEY
from krylov_descent.state import Parts
from reliability.malice import contents, rewrite, with_checksum
from reliability.snapshot import Snapshot

#: The most MiB that a refusal may take.
MOST = 50
_ROOM = 4 << 30  # bytes after which an allocation fails: a bomb must not take the machine
_FILE = "run.safetensors"
_SECONDS = 10  # of the processor, in which an attack is refused


class Run:
    """A small network after three steps of a method."""

    def __init__(self, make: Callable[[nn.Module], CurvatureOptimizer], sets: Callable[[Any], Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(120, 3, generator=generator, dtype=torch.float64)
        self._data = (x, torch.sin(x.sum(1, keepdim=True)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.optimizer = make(self.model)
        self._sets = sets(self._data)
        self.steps(3)

    def steps(self, count: int) -> None:
        """Take some."""
        for _ in range(count):
            if self._sets is None:
                self.optimizer.step(lambda: self._closure(self._data))
            else:
                self.optimizer.step(self._closure, self._sets)

    def _closure(self, batch: Any) -> tuple[Tensor, Tensor]:
        r = self.model(batch[0]) - batch[1]
        return r.square().mean(), r


def _subsets(data: Any) -> Subsets:
    return Subsets(data, batch_size=40, seed=0)


METHODS: dict[str, Callable[[], Run]] = {
    "paper": lambda: Run(lambda m: KSD(m.parameters(), **{**PAPER, "krylov_dim": 4}), _subsets),
    "default": lambda: Run(lambda m: KSD(m.parameters(), krylov_dim=4), _subsets),
    "deep": lambda: Run(
        lambda m: KSD(m.parameters(), **DEEP), lambda data: Growing(data, batch_size=40, start=30, seed=0)
    ),
    "flow": lambda: Run(lambda m: GaussNewtonFlow(m.parameters(), rows=20), lambda _: None),
}

Call = Callable[[], object]
Attack = Callable[[Path, Run], Call]
ATTACKS: dict[str, Attack] = {}


# ---------------------------------------------------------------------------------------------------- state_dict


def _vast(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """One number that claims to be many."""
    return torch.zeros(1, dtype=dtype).expand(*size)


def _laughs(depth: int = 30) -> list[Any]:
    """A list of 10**depth items, in ``depth`` lists."""
    inside: list[Any] = ["ha"]
    for _ in range(depth):
        inside = [inside] * 10
    return inside


def _deep(depth: int = 100_000) -> list[Any]:
    inside: list[Any] = []
    for _ in range(depth):
        inside = [inside]
    return inside


def _endless() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def _shared(state: dict[str, Any]) -> None:
    """One vector of 8 MB under a thousand names."""
    one = torch.zeros(1_000_000, dtype=torch.float64)
    for i, entry in state["state"].items():
        entry.update({f"subspace.earlier.{k}": one for k in range(1000)} if i == 0 else {})


def _sparse(*size: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.zeros(len(size), 1, dtype=torch.int64), torch.ones(1), size)


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: _vast(300_000_000),
    "expanded beyond memory": lambda x: _vast(10**13),
    "expanded, of the right shape": lambda x: _vast(*x.shape),
    "overlapping": lambda x: torch.zeros(40_000).as_strided((20_000, 20_000), (1, 1)),
    "empty and vast": lambda x: torch.empty(0, 1 << 40),
    "sparse and vast": lambda x: _sparse(1 << 30, 1 << 30),
    "sparse, of the right shape": lambda x: _sparse(*x.shape),
    "on no device": lambda x: torch.empty(1 << 40, device="meta"),
    "on no device, of the right shape": lambda x: torch.empty(x.shape, device="meta"),
    "quantised": lambda x: torch.quantize_per_tensor(torch.zeros(x.shape), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "complex": lambda x: torch.zeros(x.shape, dtype=torch.complex128).conj(),
    "of no numbers": lambda x: torch.zeros(x.shape, dtype=torch.bool),
    "NaN": lambda x: torch.full_like(x, float("nan")),
    "infinite": lambda x: torch.full_like(x, -float("inf")),
    "of another shape": lambda x: torch.zeros(*x.shape, 2),
}
_VALUES: dict[str, Any] = {
    "a number of 5,000 digits": 10**5000,
    "a negative number": -1,
    "a long word": "x" * 20_000_000,
    "a list of lists of lists": _laughs(),
    "lists in lists, 100,000 deep": _deep(),
    "a list in itself": _endless(),
    "None": None,
    "an expanded tensor": _vast(300_000_000),
    "NaN in place of a count": float("nan"),
    "a dictionary": {"a": 1},
    "bytes": b"x",
}


def _of_vector(make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"][0]["last_step"] = make(state["state"][0]["last_step"])

    return change


def _of_tensor(make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    """Among a strategy's own tensors, in place of one if there is one."""

    def change(state: dict[str, Any]) -> None:
        tensors = state["state"][0]["tensors"]
        name = next(iter(tensors), "preconditioner.blocks.0.inputs")
        tensors[name] = make(tensors.get(name, torch.zeros(4, 4)))

    return change


def _of_number(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["state"][0]["numbers"][name] = value

    return change


def _put(path: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    """Another value at a place of the state_dict."""

    def change(state: dict[str, Any]) -> None:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def _without(path: tuple[Any, ...]) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        place: Any = state
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


def _samples(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        numbers = state["state"][0]["numbers"]
        names = [name for name in numbers if name.startswith("samples.")]
        numbers[names[0] if names else "samples.search_growth"] = value

    return change


_GROUP = ("param_groups", 0)
_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    **{f"a vector, {how}": _of_vector(make) for how, make in _KINDS.items()},
    **{f"a factor, {how}": _of_tensor(make) for how, make in _KINDS.items() if "shape" not in how},
    **{f"{how} for the iteration": _of_number("iteration", x) for how, x in _VALUES.items()},
    **{
        f"{how} in a group": _put((*_GROUP, "mine"), x)
        for how, x in _VALUES.items()
        if how.startswith(("a list", "li"))
    },
    **{f"{how} beside the state": _put(("mine",), x) for how, x in _VALUES.items() if "list" in how or "exp" in how},
    **{f"{how} for the weight decay": _put((*_GROUP, "weight_decay"), x) for how, x in _VALUES.items()},
    **{f"{how} for a parameter": _put((*_GROUP, "params"), [x, 1, 2, 3]) for how, x in _VALUES.items()},
    **{
        f"{how} for a number's name": _put(("state", 0, "numbers", x), 1)
        for how, x in _VALUES.items()
        if how[-1] == "d"
    },
    **{f"{how} for a state": _put(("state", 1), x) for how, x in _VALUES.items()},
    **{f"{how} for all numbers": _put(("state", 0, "numbers"), x) for how, x in _VALUES.items()},
    **{f"{how} for the checksum": _put((KEY, "crc32"), x) for how, x in _VALUES.items()},
    **{f"{how} for the version": _put((KEY, "version"), x) for how, x in _VALUES.items()},
    **{f"{how} for the owner": _put((KEY, "optimizer"), x) for how, x in _VALUES.items()},
    "one vector under a thousand names": _shared,
    "a name of a million dots": _of_number("samples" + ".a" * 1_000_000, 1),
    "a name of a million dots, known": _of_number("preconditioner.blocks" + ".a" * 1_000_000, 1),
    "a million numbers": lambda state: state["state"][0]["numbers"].update({f"n{i}": 0 for i in range(1_000_000)}),
    "a state of no parameter": _put(("state", 99), {"x": torch.zeros(3)}),
    "the same parameter twice": _put((*_GROUP, "params"), [0, 0, 1, 2]),
    "fewer parameters": _put((*_GROUP, "params"), [0]),
    "no groups": _put(("param_groups",), []),
    "no weight decay": _without((*_GROUP, "weight_decay")),
    "an infinite weight decay": _put((*_GROUP, "weight_decay"), float("inf")),
    "sample state of another kind": _samples(0.5),
    "sample state of a word": _samples("two"),
    "vast rows": _of_number("adaptation.rows", 1 << 40),
    "no damping": _of_number("adaptation.flow_damping", 0.0),
    "NaN for a damping": _of_number("adaptation.flow_damping", float("nan")),
    "a vast iteration": _of_number("iteration", (1 << 64) - 1),
    "NaN for the loss": _of_number("acceptance.loss", float("nan")),
    "vast growth": _samples(1 << 40),
}


def _state_dict(change: Callable[[dict[str, Any]], None], *, sealed: bool) -> Attack:
    def plant(folder: Path, run: Run) -> Call:
        state = copy.deepcopy(run.optimizer.state_dict())
        if not sealed:
            del state[KEY]
        change(state)
        return lambda: run.optimizer.load_state_dict(state)

    return plant


for _name, _change in _CHANGES.items():
    ATTACKS[f"state_dict: {_name}"] = _state_dict(_change, sealed=True)
    if not _name.endswith(("checksum", "version", "owner")):
        ATTACKS[f"state_dict without checksum: {_name}"] = _state_dict(_change, sealed=False)


# ------------------------------------------------------------------------- the state that Lightning's ranks save


def _whole(change: Callable[[dict[str, Any]], Any]) -> Attack:
    def plant(folder: Path, run: Run) -> Call:
        state = {k: dict(part) for k, part in run.optimizer.whole_state()._asdict().items()}
        changed = change(state)
        parts = Parts(*state.values()) if changed is None else changed
        return lambda: run.optimizer.load_whole_state(parts)

    return plant


def _in_part(part: str, name: str, make: Callable[[Tensor], Tensor]) -> Attack:
    return _whole(lambda state: _set(state[part], name, make))


def _for_part(part: str, value: Any) -> Attack:
    return _whole(lambda state: state.update({part: value}))


def _for_all(value: Any) -> Attack:
    return _whole(lambda state: value)


def _set(part: dict[str, Tensor], name: str, make: Callable[[Tensor], Tensor]) -> None:
    part[name] = make(part.get(name, torch.zeros(3, dtype=torch.float64)))


ATTACKS |= {
    **{f"state of ranks: a vector, {how}": _in_part("vectors", "last_step", make) for how, make in _KINDS.items()},
    **{
        f"state of ranks: a factor, {how}": _in_part("tensors", "preconditioner.x", make)
        for how, make in _KINDS.items()
    },
    **{
        f"state of ranks: {how} for all {part}": _for_part(part, value)
        for how, value in _VALUES.items()
        for part in ("vectors", "numbers", "tensors")
    },
    **{f"state of ranks: {how} for all": _for_all(value) for how, value in _VALUES.items() if value is not None},
}


# ---------------------------------------------------------------------------------------------- checkpoint files


def _file(change: Callable[[Path, Run], None]) -> Attack:
    def plant(folder: Path, run: Run) -> Call:
        path = checkpoint.save(folder / _FILE, run.model, run.optimizer)
        change(path, run)
        return lambda: checkpoint.load(path, run.model, run.optimizer)

    return plant


def _rewritten(change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Attack:
    """With a checksum that fits."""

    def write(path: Path, run: Run) -> None:
        tensors, document = contents(path)
        change(tensors, document)
        rewrite(path, tensors, document)

    return _file(write)


def _headed(path: Path, entries: dict[str, Any], size: int) -> None:
    """A file whose header has these tensors beside the metadata, and a hole of ``size`` bytes after it."""
    tensors, document = contents(path)
    head = {"__metadata__": {KEY: with_checksum(tensors, document)}, **entries}
    coded = json.dumps(head).encode()
    coded += b" " * (-len(coded) % 8)
    with open(path, "wb") as file:
        file.write(len(coded).to_bytes(8, "little") + coded)
        file.truncate(8 + len(coded) + size)


def _holes(name: str) -> Callable[[Path, Run], None]:
    """The file as it was, with one tensor more, of 64 GiB and no bytes on the disk."""

    def change(path: Path, run: Run) -> None:
        size = 1 << 36
        tensors, _ = contents(path)
        entries, end = {}, size
        entries[name] = {"dtype": "F64", "shape": [size // 8], "data_offsets": [0, size]}
        for other, x in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            if other != name:
                code = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}[x.dtype]
                entries[other] = {"dtype": code, "shape": [*x.shape], "data_offsets": [end, end + x.nbytes]}
                end += x.nbytes
        _headed(path, entries, end)

    return change


def _many_tensors(path: Path, run: Run) -> None:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    _headed(path, {f"{i}": empty for i in range(50_000)}, 0)


def _long_header(path: Path, run: Run) -> None:
    with open(path, "wb") as file:
        file.write((99_000_000).to_bytes(8, "little") + b'{"a":"')
        file.truncate(8 + 99_000_000)


def _spaces(path: Path, run: Run) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    with open(path, "wb") as file:
        file.write((length + 99_000_000).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 99_000_000)
        file.write(data[8 + length :])


def _zip_bomb(path: Path, run: Run) -> None:
    """A file of torch.save, deflated: 200 MB in 200 kB."""
    saved = BytesIO()
    torch.save(torch.zeros(4), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if name.endswith("/data/0"):
                with new.open(name, "w") as entry:
                    for _ in range(200):
                        entry.write(bytes(1_000_000))
            else:
                new.writestr(name, old.read(name))


def _instead(make: Callable[[Path], object]) -> Attack:
    def change(path: Path, run: Run) -> None:
        path.unlink()
        make(path)

    return _file(change)


def _numbers(change: Callable[[dict[str, Any]], object]) -> Attack:
    return _rewritten(lambda tensors, document: change(document["numbers"]))


_TEXTS: dict[str, Callable[[str], str]] = {
    "lists in lists": lambda text: text.replace('"extra": {}', '"extra": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "half a million lists": lambda text: text.replace('"extra": {}', '"extra": {"x": [' + "[]," * 300_000 + "0]}"),
    "half a million dictionaries": lambda text: text.replace(
        '"extra": {}', '"extra": {"x": [' + "{}," * 300_000 + "0]}"
    ),
    "a number of 100,000 digits": lambda text: text.replace('"iteration": ', '"iteration": 1' + "0" * 100_000, 1),
    "infinity": lambda text: text.replace('"iteration": ', '"iteration": 1e999, "x": ', 1),
    "NaN": lambda text: text.replace('"iteration": ', '"iteration": NaN, "x": ', 1),
    "the same key twice": lambda text: text.replace('"iteration": ', '"iteration": 5, "iteration": ', 1),
    "100 MB": lambda text: text + " " * 90_000_000,
}


def _texted(change: Callable[[str], str]) -> Attack:
    def write(path: Path, run: Run) -> None:
        tensors, document = contents(path)
        text = change(with_checksum(tensors, document))
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + length])
        head["__metadata__"][KEY] = text
        coded = json.dumps(head).encode()
        coded += b" " * (-len(coded) % 8)
        path.write_bytes(len(coded).to_bytes(8, "little") + coded + data[8 + length :])

    return _file(write)


def _dotted(numbers: dict[str, Any]) -> None:
    numbers.update({"samples" + ".a" * 100_000: 1, "preconditioner.blocks.0" + ".a" * 100_000: 1})


def _deeply(numbers: dict[str, Any]) -> None:
    numbers.update({f"preconditioner.blocks.{i}" + ".a" * 8: 1 for i in range(20_000)})


ATTACKS |= {
    "file: a factor of holes": _file(_holes("tensors/preconditioner.blocks.0.inputs")),
    "file: a vector of holes": _file(_holes("vectors/last_step")),
    "file: a weight of holes": _file(_holes("model/0.weight")),
    "file: a buffer of holes": _file(_holes("model/more")),
    "file: 50,000 tensors": _file(_many_tensors),
    "file: a header of 99 MB of holes": _file(_long_header),
    "file: a header with 99 MB of spaces": _file(_spaces),
    "file: a zip that grows": _file(_zip_bomb),
    "file: a pipe": _instead(os.mkfifo),
    "file: a directory": _instead(lambda path: path.mkdir()),
    "file: a device": _instead(lambda path: path.symlink_to("/dev/zero")),
    "file: nothing in it": _instead(lambda path: path.touch()),
    "file: holes": _instead(lambda path: _truncated(path, 1 << 36)),
    "file: names of 100,000 dots": _numbers(_dotted),
    "file: 20,000 names of ten levels": _numbers(_deeply),
    "file: 30,000 numbers": _numbers(lambda numbers: numbers.update({f"samples.n{i}": 0 for i in range(30_000)})),
    "file: a place of 4,000 digits": _numbers(
        lambda numbers: numbers.update({"preconditioner.places." + "1" * 4400: 0})
    ),
    "file: sample state of another kind": _numbers(lambda numbers: numbers.update({"samples.search_growth": 0.5})),
    "file: a vector that is not finite": _rewritten(
        lambda tensors, _: tensors["vectors/last_step"].fill_(float("nan"))
    ),
    **{f"file: {how} in the metadata": _texted(change) for how, change in _TEXTS.items()},
}


def _truncated(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


# ---------------------------------------------------------------------------------- logs and the command line

_PROBLEM = """
import torch
def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = torch.randn(20, 3)
    return model, lambda: ((z := model(x)).square().mean(), z)
"""
_REPORT = {
    **{"iteration": 0, "loss": 1.0, "search_loss_before": 1.0, "search_loss_after": 0.5, "grad_norm": 1.0},
    **{"krylov_dim": 2, "ritz_values": [0.5, 1.0], "coefficients": [1.0, 0.5], "accepted": True},
    **{"seconds": {"gradient": 1.0, "search": 1.0}, "sample_gradients": 3.0, "set_sizes": {"A": 5, "C": 3}},
}
_BAD: dict[str, Any] = {
    "a word": "x",
    "a list": [[]],
    "a list of words": ["x", {}],
    "a dictionary": {"A": "x", "C": []},
    "a vast number": 10**400,
    "a negative number": -(10**9),
    "a billion": 10**9,
    "True": True,
}


def _line(**values: Any) -> str:
    return json.dumps({**_REPORT, **values}) + "\n"


_LOGS: dict[str, str | bytes] = {
    "lists in lists": _line() + "[" * 100_000 + "\n" + _line(iteration=1),
    "lists in lists at the end": _line() + '{"loss": ' + "[" * 100_000,
    "a number of 100,000 digits": _line() + '{"iteration": 1' + "0" * 100_000 + ', "loss": 1}\n' + _line(iteration=2),
    "infinity": '{"iteration": 1e999, "loss": 1e999}\n',
    "NaN": '{"iteration": NaN, "loss": NaN, "krylov_dim": NaN}\n',
    "other bytes": _line().encode() + b"\xff\xfe\x00\n" + _line(iteration=1).encode(),
    "half a character in a word": _line(seconds={"\ud800": 1.0}),
    "a billion Krylov vectors": _line(krylov_dim=10**9),
    "many steps times many vectors": _line(coefficients=[1.0] * 20_000, krylov_dim=20_000)
    + "".join(_line(iteration=i) for i in range(1, 1500)),
    "a step of two million lists": '{"loss": 1, "x": [' + "[]," * 2_000_000 + "0]}\n" + _line(),
    "a thousand phases": _line(seconds={f"p{i}": 1.0 for i in range(1000)}),
    "a list for a line": "[]\n" + _line(),
    **{
        f"{how} for {key}": _line() + _line(**{key: x}) + _line(iteration=9)
        for how, x in _BAD.items()
        for key in ("loss", "iteration", "krylov_dim", "ritz_values", "coefficients", "seconds", "set_sizes")
    },
}


def _logged(log: str | bytes, *, resume: bool) -> Attack:
    def plant(folder: Path, run: Run) -> Call:
        _trained(folder)
        path = folder / "out" / "log.jsonl"
        path.write_bytes(log if isinstance(log, bytes) else log.encode("utf-8", "surrogatepass"))
        return _resume(folder) if resume else _plot(folder)

    return plant


def _log_made(make: Callable[[Path], object], *, resume: bool) -> Attack:
    def plant(folder: Path, run: Run) -> Call:
        _trained(folder)
        path = folder / "out" / "log.jsonl"
        path.unlink()
        make(path)
        return _resume(folder) if resume else _plot(folder)

    return plant


def _trained(folder: Path) -> None:
    (folder / "hostile_problem.py").write_text(_PROBLEM)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    sys.modules.pop("hostile_problem", None)
    _say(["train", "hostile_problem:make", "--out", str(folder / "out"), "--max-steps", "2", "--no-progress"])
    sys.path.remove(str(folder))


def _say(arguments: list[str]) -> None:
    """The command line; a ValueError if it complains, as a user would see it."""
    heard = StringIO()
    with redirect_stdout(heard), redirect_stderr(heard):
        status = command_line(arguments)
    if status:
        raise ValueError(heard.getvalue())


def _resume(folder: Path) -> Call:
    command = ["train", "hostile_problem:make", "--out", str(folder / "out"), "--max-steps", "3", "--no-progress"]
    return lambda: _say([*command, "--resume"])


def _plot(folder: Path) -> Call:
    return lambda: _say(["plot", str(folder / "out"), "--out", str(folder / "picture.png")])


def _read(log: str | bytes) -> Attack:
    def plant(folder: Path, run: Run) -> Call:
        path = folder / "log.jsonl"
        path.write_bytes(log if isinstance(log, bytes) else log.encode("utf-8", "surrogatepass"))
        return lambda: plot.read(path)

    return plant


def _extra(change: Callable[[dict[str, Any]], object]) -> Attack:
    """``train --resume`` of a checkpoint with other extras."""

    def plant(folder: Path, run: Run) -> Call:
        _trained(folder)
        path = folder / "out" / "checkpoint.safetensors"
        tensors, document = contents(path)
        change(document["extra"])
        rewrite(path, tensors, document)
        return _resume(folder)

    return plant


ATTACKS |= {
    **{f"log, plotted: {how}": _logged(log, resume=False) for how, log in _LOGS.items()},
    **{f"log, read: {how}": _read(log) for how, log in _LOGS.items()},
    **{f"log, resumed: {how}": _logged(log, resume=True) for how, log in _LOGS.items()},
    "log, resumed: holes": _log_made(lambda path: _truncated(path, 1 << 33), resume=True),
    "log, plotted: holes": _log_made(lambda path: _truncated(path, 1 << 33), resume=False),
    "log, resumed: a pipe": _log_made(os.mkfifo, resume=True),
    "log, plotted: a pipe": _log_made(os.mkfifo, resume=False),
    "log, resumed: a directory": _log_made(lambda path: path.mkdir(), resume=True),
    "log, resumed: a device": _log_made(lambda path: path.symlink_to("/dev/zero"), resume=True),
    "command line: a million bytes of generator": _extra(lambda extra: extra.update(generator="00" * 500_000)),
    "command line: a generator of words": _extra(lambda extra: extra.update(generator=["x"])),
    "command line: no steps": _extra(lambda extra: extra.clear()),
    "command line: a number of 4,000 digits of steps": _extra(lambda extra: extra.update(steps=10**4000)),
    "command line: negative steps": _extra(lambda extra: extra.update(steps=-5)),
    "command line: 1e308 steps": _extra(lambda extra: extra.update(steps=1e308)),
    "command line: steps of a word": _extra(lambda extra: extra.update(steps="7")),
}


# ------------------------------------------------------------------------------------------------------- the runner


def needs_method(name: str) -> bool:
    """Return whether an attack differs from method to method."""
    return not name.startswith(("log", "command line"))


def attempt(name: str, method: str) -> dict[str, Any]:
    """Try one attack in this process, as a record."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = METHODS[method]()
        call = ATTACKS[name](Path(folder), run)
        before = Snapshot(run.model, run.optimizer)
        outcome, said, wrong = "refused", "", []
        start = _reset_peak()
        try:
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
            call()
            outcome = "loaded"
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
            wrong = _told_badly(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        peak = (_peak() - start) / 1024
        if outcome == "refused":
            random = ["random state"] if name.startswith(("log", "command")) else []  # the command's own
            wrong += [f"{what} changed by a load that failed" for what in before.changed() if what not in random]
        if peak > MOST:
            wrong.append(f"{peak:.0f} MiB")
        try:
            run.steps(2)
        except ValueError as error:
            said += f" Then: {str(error)[:300]}"
            if outcome == "refused":
                wrong.append("no step after the refusal")
        except Exception as error:
            wrong.append(f"{type(error).__name__} at the next step: {str(error)[:200]}")
        if (peak := max(peak, (_peak() - start) / 1024)) > MOST and not wrong:
            wrong.append(f"{peak:.0f} MiB at the next step")
    return {
        "attack": name,
        "method": method,
        "outcome": outcome,
        "peak": round(peak, 1),
        "lost": bool(wrong),
        "said": said,
        "why": "; ".join(wrong),
    }


def _told_badly(error: Exception) -> list[str]:
    wrong = []
    if not isinstance(error, ValueError) or "Traceback" in str(error):
        wrong.append(f"a {type(error).__name__}: {str(error)[:200]}")
    remedies = ("Load ", "load ", "Build ", "Give ", "Make ", "Remove ", "Resume ", "Set ", "pass ", "Copy ")
    if not any(word in str(error) for word in remedies):
        wrong.append(f"no remedy: {str(error)[:300]}")
    if len(str(error)) > 3000:
        wrong.append(f"a message of {len(str(error)):,} characters")
    return wrong


def _peak() -> int:
    """The peak of resident memory since the last reset, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _reset_peak() -> int:
    """Set the peak to the present memory, and return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def measured(attacks: Iterable[str], methods: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Try attacks in a process of its own, and yield their records; one that kills or blocks the process is lost."""
    first, *others = methods
    wanted = [(name, first) for name in attacks]
    wanted += [(name, method) for method in others for name, _ in wanted[:] if needs_method(name)]
    while wanted:
        command = [sys.executable, "-m", "reliability.hostile", json.dumps(wanted)]
        with (
            tempfile.TemporaryFile() as heard,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=heard) as child,
        ):
            assert child.stdout is not None
            while line := _next_line(child):
                wanted.pop(0)
                yield json.loads(line)
            child.kill()
            status = child.wait()
            heard.seek(0)
            why = f"the process ended with {status}: {heard.read()[-300:].decode(errors='replace')}"
        if wanted:
            name, method = wanted.pop(0)
            yield {
                "attack": name,
                "method": method,
                "outcome": "killed",
                "peak": 0.0,
                "lost": True,
                "said": "",
                "why": why,
            }


def _next_line(child: subprocess.Popen[bytes]) -> bytes:
    """The next line, or nothing if the process ended or was killed because it gave none in time."""
    assert child.stdout is not None
    clock = threading.Timer(300, child.kill)  # the first line waits for the import
    clock.start()
    try:
        return child.stdout.readline()
    finally:
        clock.cancel()


def main() -> None:
    """Try the attacks that its argument lists."""
    torch.set_num_threads(1)
    wanted = json.loads(sys.argv[1])
    for method in {method for _, method in wanted}:
        METHODS[method]().steps(1)  # code that is loaded at its first use
    resource.setrlimit(resource.RLIMIT_DATA, (_ROOM, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _late)
    for name, method in wanted:
        sys.stdout.write(json.dumps(attempt(name, method)) + "\n")
        sys.stdout.flush()


def _late(*_: object) -> None:
    raise TimeoutError(f"no answer in {_SECONDS} seconds")


if __name__ == "__main__":
    main()
