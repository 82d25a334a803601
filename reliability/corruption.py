"""Checkpoints in every form and under every option, brought back; and damaged, of another version or model, or crafted.

A damaged checkpoint is well if it is refused, by an error that names the file, with nothing touched and nothing run; or
if what it brings back has the bits that were saved: not every bit of a file of ``torch.save`` matters. Anything else is
lost: other values, another error, a state that was half loaded, a file that a crafted checkpoint was to make.
"""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from experiments.baselines import HessianFree

from krylov_descent.safety.checksum import KEY
from reliability import malice
from reliability.forms import FILE, FORMS, NAME, STATES, Form, Options, Run
from reliability.snapshot import Snapshot
from reliability.training import digest

#: Runs under different options whose checkpoints are damaged.
SAMPLES = 12


def run(count: int, seed: int, report: Callable[[dict[str, Any]], None], done: Container[int] = ()) -> None:
    """Trials of the seeds ``seed`` to ``seed + count - 1``, without those that are done."""
    for number in range(seed, seed + count):
        if number not in done:
            name, form = CASES[number % len(CASES)]
            report(trial(name, form, number))


def trial(name: str, form: Form, seed: int) -> dict[str, Any]:
    """One checkpoint, as a flat record."""
    began, randomly = time.perf_counter(), random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="reliability-checkpoint-"))
    try:
        outcome, what, wrong = _TRIALS[name](name, form, root, randomly)
    finally:
        shutil.rmtree(root)
    return {
        "kind": "checkpoint",
        "case": f"{name}, {form.name}",
        "outcome": "lost" if wrong else outcome,
        "lost": bool(wrong),
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 3),
        "what": what[:300],
        **({"why": wrong} if wrong else {}),
    }


Judged = tuple[str, str, str]  # outcome, what was done, what is wrong


def _round_trip(_: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    """Saved, loaded, and both go on alike."""
    options = Options.drawn(randomly)
    one, other = Run(options), Run(options, start=1)
    one.steps(randomly.randrange(4))
    form.save(root, one)
    other.steps(randomly.randrange(2))
    form.load(root, other)
    same = [digest(one.model, one.optimizer) == digest(other.model, other.optimizer)]
    for each in (one, other):
        each.steps(2)
    same.append(digest(one.model, one.optimizer) == digest(other.model, other.optimizer))
    return "the same bits", str(options), "" if all(same) else f"the same after loading, after 2 more steps: {same}"


@functools.cache
def _sample(form: Form, number: int) -> tuple[Options, Path, str]:
    """Options, a directory with a checkpoint, and its digest."""
    options = Options.drawn(random.Random(1000 + number))
    kept = Run(options)
    root = Path(tempfile.mkdtemp(prefix="reliability-sample-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    kept.steps(4)
    form.save(root, kept)
    return options, root, digest(kept.model, kept.optimizer)


def _copied(form: Form, root: Path, randomly: random.Random) -> tuple[Options, Path, str]:
    options, source, saved = _sample(form, randomly.randrange(SAMPLES))
    shutil.copytree(source, root / "run")
    return options, root / "run", saved


def _damaged(name: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, saved = _copied(form, root, randomly)
    path = directory / (NAME if form is FILE else "optimizer.pt")  # a model's own file is torch's
    data = bytearray(path.read_bytes())
    what = f"{path.name}: {_DAMAGES[name](data, randomly)}"
    same = data == path.read_bytes()
    path.write_bytes(data)
    outcome, what, wrong = _judge(form, directory, Run(options, start=1), saved, what)
    if outcome == "loaded as saved" and form is FILE and not same:
        wrong = "a file that was damaged is loaded"
    return outcome, what, wrong


def _another_model(_: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, _ = _copied(form, root, randomly)
    if form is STATES and randomly.random() < 0.5:
        run = Run(options)
        other = randomly.choice([HessianFree, torch.optim.Adam])(run.model.parameters())
        for p in run.model.parameters():
            other.state[p]["iteration" if isinstance(other, HessianFree) else "step"] = 3
        torch.save(other.state_dict(), directory / "optimizer.pt")
        return _judge(form, directory, run, "", f"of {type(other).__name__}")
    return _judge(form, directory, Run(options, width=randomly.choice([1, 3, 5])), "", "another width")


def _another_version(_: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, _ = _copied(form, root, randomly)
    version: Any = randomly.choice([0, 3, 99, -1, 1 << 80, "2", None, 1.5, [1]])
    if form is FILE:
        tensors, document = malice.contents(directory / NAME)
        malice.rewrite(directory / NAME, tensors, {**document, "version": version})
    else:
        path = directory / "optimizer.pt"
        kept = torch.load(path, weights_only=True)
        kept[KEY]["version"] = version or -1
        torch.save(kept, path)
    return _judge(form, directory, Run(options, start=1), "", f"version {version!r}")


def _crafted(name: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, saved = _copied(form, root, randomly)
    craft = malice.torch_file if form is STATES else malice.OF_FILE[name]
    what = craft(directory, root / "fired", randomly)
    outcome, what, wrong = _judge(form, directory, Run(options, start=1), saved, what)
    if outcome != "refused" and form is FILE:
        wrong = f"it is loaded. {wrong}"
    if (root / "fired").exists():
        wrong = f"what a crafted file said was run. {wrong}"
    return outcome, what, wrong


def _judge(form: Form, directory: Path, bystander: Run, saved: str, what: str) -> Judged:
    """Load into a run that is elsewhere; which must come through unharmed."""
    bystander.steps(1)
    before = Snapshot(bystander.model, bystander.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of pickles of other versions
        try:
            form.load(directory, bystander)
        except Exception as error:
            return _judge_refusal(form, directory, before, error, what)
    if digest(bystander.model, bystander.optimizer) == saved:
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
_TRIALS: dict[str, Callable[[str, Form, Path, random.Random], Judged]] = {
    "round trip": _round_trip,
    **dict.fromkeys(_DAMAGES, _damaged),
    "another model or optimizer": _another_model,
    "another version": _another_version,
    **dict.fromkeys(malice.OF_FILE, _crafted),
}
#: Trial n is of case n modulo their number; flips, of which most say something, come twice.
CASES: tuple[tuple[str, Form], ...] = tuple(
    (name, form)
    for name in (*_TRIALS, "one bit flipped", "round trip")
    for form in FORMS
    if form is FILE or name not in malice.OF_FILE or name == "a pickle in the file"
)
