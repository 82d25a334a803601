"""Checkpoints in both forms, brought back; and damaged, of another version or model, or crafted.

The forms are the file of ``krylov_descent.checkpoint``, and ``optimizer.state_dict()`` beside the model's in files of
``torch.save``. A damaged checkpoint is well if it is refused, by an error that names the file, with nothing touched and
nothing run; or if what it brings back has the bits that were saved: not every bit of a file of ``torch.save`` matters.
Anything else is lost: other values, another error, a state that was half loaded, a file that a crafted checkpoint was
to make.
"""

from __future__ import annotations

import functools
import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experiments.baselines import HessianFree

from krylov_descent import checkpoint
from krylov_descent.safety.checksum import KEY
from reliability import hostile, malice
from reliability.malice import NAME
from reliability.methods import KINDS, Training
from reliability.outcome import Outcome
from reliability.snapshot import Snapshot


@dataclass(frozen=True)
class Form:
    """One way to keep a run in a directory.

    Attributes:
        name: for a table.
        save: keeps a run.
        load: brings it back.
        ours: whether the whole file is read by this package, so that every refusal must name it.
    """

    name: str
    save: Callable[[Path, Training], object]
    load: Callable[[Path, Training], object]
    ours: bool = True


def _save_file(root: Path, run: Training) -> None:
    checkpoint.save(root / NAME, run.model, run.optimizer, extra={"kept": True})


def _load_file(root: Path, run: Training) -> None:
    if checkpoint.load(root / NAME, run.model, run.optimizer) != {"kept": True}:
        raise AssertionError("extra did not come back")


def _save_states(root: Path, run: Training) -> None:
    torch.save(run.optimizer.state_dict(), root / "optimizer.pt")
    torch.save(run.model.state_dict(), root / "model.pt")


def _load_states(root: Path, run: Training) -> None:
    state = torch.load(root / "optimizer.pt", weights_only=True)
    run.optimizer.load_state_dict(state)
    run.model.load_state_dict(torch.load(root / "model.pt", weights_only=True))


#: Trials in which all attacks are made.
PARTS = 4
_HOSTILE = {"PAPER": "paper", "default": "default", "DEEP + Growing": "deep", "flow": "flow"}
FILE = Form("file", _save_file, _load_file)
STATES = Form("state_dict", _save_states, _load_states, ours=False)


def damaged_file(method: str, seed: int) -> Outcome:
    """A checkpoint that was cut, flipped, overwritten, lengthened, or is of another version, model or optimizer."""
    return _trial(DAMAGED, method, seed)


def lying_file(method: str, seed: int) -> Outcome:
    """Every attack of ``hostile``, in ``PARTS``; then checkpoints that somebody crafted, with checksums that fit."""
    if seed >= PARTS:
        return _trial(CRAFTED, method, seed)
    names = [name for name in hostile.ATTACKS if method == "default" or hostile.needs_method(name)]
    records = list(hostile.measured(names[seed::PARTS], [_HOSTILE[method]]))
    lost = [f"{record['attack']}: {record['why']}" for record in records if record["lost"]]
    most = max(record["peak"] for record in records)
    return Outcome("refused, or harmless", lost, len(records), {"MiB": most})


def _trial(cases: tuple[tuple[str, Form], ...], method: str, seed: int) -> Outcome:
    name, form = cases[seed % len(cases)]
    with tempfile.TemporaryDirectory(prefix="reliability-checkpoint-") as root:
        ended, what, wrong = _TRIALS[name](name, form, _Saved(method, Path(root), form, random.Random(seed)))
    return Outcome(ended, [wrong] if wrong else [], told={"what": f"{name}, {form.name}: {what[:300]}"})


class _Saved:
    """A training after some steps, and its checkpoint in a directory.

    Attributes:
        saved: the digest of the training.
    """

    def __init__(self, method: str, root: Path, form: Form, randomly: random.Random) -> None:
        self.method, self.root, self.directory, self.randomly = method, root, root / "run", randomly
        self.seed, self.kind = randomly.randrange(100), randomly.choice(KINDS[:3])
        self.training = Training(method, self.seed, self.kind)
        self.training.trajectory(randomly.randrange(1, 4))
        self.saved = self.training.digest()
        self.directory.mkdir()
        form.save(self.directory, self.training)

    def another(self, width: int = 6) -> Training:
        """A training elsewhere, which meets the file."""
        other = Training(self.method, self.seed, self.kind, width, start=1000)
        other.trajectory(1)
        return other


Judged = tuple[str, str, str]  # outcome, what was done, what is wrong


def _round_trip(_: str, form: Form, at: _Saved) -> Judged:
    """Saved, loaded, and both go on alike."""
    one, other = at.training, at.another()
    form.load(at.directory, other)
    same = [one.digest() == other.digest(), one.trajectory(2) == other.trajectory(2)]
    return "the same bits", at.kind, "" if all(same) else f"the same after loading, after 2 more steps: {same}"


def _damaged(name: str, form: Form, at: _Saved) -> Judged:
    path = at.directory / (NAME if form is FILE else "optimizer.pt")  # a model's own file is torch's
    data = bytearray(path.read_bytes())
    what = f"{path.name}: {_DAMAGES[name](data, at.randomly)}"
    same = data == path.read_bytes()
    path.write_bytes(data)
    outcome, what, wrong = _judge(form, at.directory, at.another(), at.saved, what)
    if outcome == "loaded as saved" and form is FILE and not same:
        wrong = "a file that was damaged is loaded"
    return outcome, what, wrong


def _another_model(_: str, form: Form, at: _Saved) -> Judged:
    if form is STATES and at.randomly.random() < 0.5:
        run = at.another()
        other = at.randomly.choice([HessianFree, torch.optim.Adam])(run.model.parameters())
        for p in run.model.parameters():
            other.state[p]["iteration" if isinstance(other, HessianFree) else "step"] = 3
        torch.save(other.state_dict(), at.directory / "optimizer.pt")
        return _judge(form, at.directory, run, "", f"of {type(other).__name__}")
    return _judge(form, at.directory, at.another(at.randomly.choice([1, 3, 5])), "", "another width")


def _another_version(_: str, form: Form, at: _Saved) -> Judged:
    version: Any = at.randomly.choice([0, 3, 99, -1, 1 << 80, "2", None, 1.5, [1]])
    if form is FILE:
        tensors, document = malice.contents(at.directory / NAME)
        malice.rewrite(at.directory / NAME, tensors, {**document, "version": version})
    else:
        path = at.directory / "optimizer.pt"
        kept = torch.load(path, weights_only=True)
        kept[KEY]["version"] = version or -1
        torch.save(kept, path)
    return _judge(form, at.directory, at.another(), "", f"version {version!r}")


def _crafted(name: str, form: Form, at: _Saved) -> Judged:
    craft = malice.torch_file if form is STATES else malice.OF_FILE[name]
    what = craft(at.directory, at.root / "fired", at.randomly)
    outcome, what, wrong = _judge(form, at.directory, at.another(), at.saved, what)
    if outcome != "refused" and form is FILE:
        wrong = f"it is loaded. {wrong}"
    if (at.root / "fired").exists():
        wrong = f"what a crafted file said was run. {wrong}"
    return outcome, what, wrong


def _judge(form: Form, directory: Path, bystander: Training, saved: str, what: str) -> Judged:
    """Load into a run that is elsewhere; which must come through unharmed."""
    before = Snapshot(bystander.model, bystander.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pickles of other versions
        try:
            form.load(directory, bystander)
        except Exception as error:
            return _judge_refusal(form, directory, before, error, what)
    if bystander.digest() == saved:
        return "loaded as saved", what, ""
    return "", what, f"other values were loaded ({what})"


def _judge_refusal(form: Form, directory: Path, before: Snapshot, error: Exception, what: str) -> Judged:
    said = str(error)
    what = f"{what} → {type(error).__name__}: {said}"
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append(at.tb_frame.f_code.co_filename)
        at = at.tb_next
    by_torch = not form.ours and "krylov_descent" not in frames[-1]
    wrong = []
    if not by_torch and not isinstance(error, ValueError):
        wrong.append(f"refused by a {type(error).__name__}")
    if form.ours and str(directory) not in said:
        wrong.append("the message does not name the file")
    if form.ours and not any(word in said for word in ("Load ", "load ", "Build ", "Give ")):
        wrong.append("the message has no remedy")
    wrong += [f"{name} changed by a load that failed" for name in before.changed()]
    return "refused by torch.load" if by_torch else "refused", what, f"{'; '.join(wrong)} ({what})" if wrong else ""


def _truncated(data: bytearray, randomly: random.Random) -> str:
    length = randomly.randrange(max(1, len(data)))
    del data[length:]
    return f"cut at {length}"


def _flipped(data: bytearray, randomly: random.Random, most: int = 1) -> str:
    bits = [randomly.randrange(8 * len(data)) for _ in range(randomly.randint(1, most))]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    return f"bits {bits[:8]} flipped"


def _overwritten(data: bytearray, randomly: random.Random) -> str:
    start = randomly.randrange(len(data))
    end = min(len(data), start + randomly.choice([4, 64, 512, 4096]))
    data[start:end] = randomly.choice([bytes(end - start), randomly.randbytes(end - start)])
    return f"bytes {start} to {end} overwritten"


def _lengthened(data: bytearray, randomly: random.Random) -> str:
    data += randomly.choice([bytes(1), bytes(5000), randomly.randbytes(100), bytes(data)])
    return f"lengthened to {len(data)}"


_DAMAGES: dict[str, Callable[[bytearray, random.Random], str]] = {
    "truncated": _truncated,
    "one bit flipped": _flipped,
    "bits flipped": functools.partial(_flipped, most=64),
    "overwritten": _overwritten,
    "lengthened": _lengthened,
}
_TRIALS: dict[str, Callable[[str, Form, _Saved], Judged]] = {
    "round trip": _round_trip,
    **dict.fromkeys(_DAMAGES, _damaged),
    "another model or optimizer": _another_model,
    "another version": _another_version,
    **dict.fromkeys(malice.OF_FILE, _crafted),
}
#: Trial n is of case n modulo their number.
DAMAGED = tuple((name, form) for name in _TRIALS if name not in malice.OF_FILE for form in (FILE, STATES))
CRAFTED = (*((name, FILE) for name in malice.OF_FILE), ("a pickle in the file", STATES))
