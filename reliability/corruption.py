"""Checkpoints in every form and under every option, brought back; and damaged, of another version or model, or crafted.

A damaged checkpoint is well if it is refused, by an error that names the file, with nothing touched and nothing run; or
if what it brings back has the bits that were saved: not every bit of a file matters. A directory may also fall back to
the older checkpoint in it, with a warning. Anything else is lost: other values, another error, a state that was half
loaded, a file that a crafted checkpoint was to make.
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

from krylov_descent.cli.target import UsageError
from krylov_descent.sealing import KEY
from reliability import malice
from reliability.forms import DIRECTORY, FILE, FORMS, STATES, Form, Options, Run
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
def _sample(form: Form, number: int) -> tuple[Options, Path, dict[str, str]]:
    """Options, a directory with a checkpoint, or two, and digests of the older and the last."""
    options = Options.drawn(random.Random(1000 + number))
    kept = Run(options)
    root = Path(tempfile.mkdtemp(prefix="reliability-sample-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    digests = {}
    for age in ("older", "last"):
        kept.steps(2)
        form.save(root, kept)
        digests[age] = digest(kept.model, kept.optimizer)
    return options, root, digests


def _copied(form: Form, root: Path, randomly: random.Random) -> tuple[Options, Path, dict[str, str]]:
    options, source, digests = _sample(form, randomly.randrange(SAMPLES))
    shutil.copytree(source, root / "run")
    return options, root / "run", digests


def _files(directory: Path) -> list[Path]:
    """Those that are read: of a directory, the last checkpoint and its pointer; a model's own file is torch's."""
    steps = sorted(directory.glob("step-*"))
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != "model.pt")
    return sorted(path for path in found if path.parent not in steps[:-1])


def _damaged(name: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, digests = _copied(form, root, randomly)
    path = randomly.choice(_files(directory))
    data = bytearray(path.read_bytes())
    what = f"{path.relative_to(directory)}: {_DAMAGES[name](data, randomly)}"
    path.write_bytes(data)
    return _judge(form, directory, Run(options, start=1), digests, what)


def _missing(_: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, digests = _copied(form, root, randomly)
    path = randomly.choice(_files(directory))
    path.unlink()
    return _judge(form, directory, Run(options, start=1), digests, f"without {path.relative_to(directory)}")


def _another_model(_: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, _digests = _copied(form, root, randomly)
    if form is STATES and randomly.random() < 0.5:
        run = Run(options)
        other = randomly.choice([HessianFree, torch.optim.Adam])(run.model.parameters())
        for p in run.model.parameters():
            other.state[p]["iteration" if isinstance(other, HessianFree) else "step"] = 3
        torch.save(other.state_dict(), directory / "optimizer.pt")
        return _judge(form, directory, run, {}, f"of {type(other).__name__}")
    return _judge(form, directory, Run(options, width=randomly.choice([1, 3, 5])), {}, "another width")


def _another_version(_: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, _digests = _copied(form, root, randomly)
    version: Any = randomly.choice([3, 99, -1, 1 << 80, "2", None, 1.5, [1]])
    if form is DIRECTORY:
        path, document = malice.document_in(directory)
        malice.write_document(path, {**document, "version": version})
        (directory / "latest").write_text(path.parent.name)
    else:
        path = directory / ("checkpoint.pt" if form is FILE else "optimizer.pt")
        kept = torch.load(path, weights_only=True)
        (kept if form is FILE else kept[KEY])["version"] = version
        torch.save(kept, path)
    return _judge(form, directory, Run(options, start=1), {}, f"version {version!r}")


def _crafted(name: str, form: Form, root: Path, randomly: random.Random) -> Judged:
    options, directory, digests = _copied(form, root, randomly)
    craft = malice.torch_file if form is not DIRECTORY else malice.OF_DIRECTORY[name]
    what = craft(directory, root / "fired", randomly)
    outcome, what, wrong = _judge(form, directory, Run(options, start=1), digests, what)
    if (root / "fired").exists():
        wrong = f"what a crafted file said was run. {wrong}"
    return outcome, what, wrong


def _judge(form: Form, directory: Path, bystander: Run, digests: dict[str, str], what: str) -> Judged:
    """Load into a run that is elsewhere; which must come through unharmed."""
    bystander.steps(1)
    before = Snapshot(bystander.model, bystander.optimizer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            form.load(directory, bystander)
        except Exception as error:
            return _judge_refusal(form, directory, before, error, what)
    found = digest(bystander.model, bystander.optimizer)
    if found == digests.get("last"):
        return "loaded as saved", what, ""
    if found == digests.get("older") and any("not there or not complete" in str(w.message) for w in warned):
        return "the older one, with a warning", what, ""
    return "", what, f"other values were loaded ({what})"


def _judge_refusal(form: Form, directory: Path, before: Snapshot, error: Exception, what: str) -> Judged:
    said = f"{error} {error.remedy}" if isinstance(error, UsageError) else str(error)
    what = f"{what} → {type(error).__name__}: {said}"
    frames = []
    at = error.__traceback__
    while at is not None:
        frames.append(at.tb_frame.f_code.co_filename)
        at = at.tb_next
    by_torch = not form.ours and "krylov_descent" not in frames[-1]
    wrong = []
    if not by_torch and not isinstance(error, (ValueError, FileNotFoundError, UsageError)):
        wrong.append(f"refused by a {type(error).__name__}")
    if form.ours and str(directory) not in said:
        wrong.append("the message does not name the file")
    # A command that cannot load ends: only what goes on must be as it was.
    changed = [] if form is FILE else before.changed()
    wrong += [f"{name} changed by a load that failed" for name in changed]
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
    "a file missing": _missing,
    "another model or optimizer": _another_model,
    "another version": _another_version,
    **dict.fromkeys([*malice.OF_DIRECTORY, "a pickle in the file"], _crafted),
}
#: Trial n is of case n modulo their number; flips, of which most say something, come twice.
CASES: tuple[tuple[str, Form], ...] = tuple(
    (name, form)
    for name in (*_TRIALS, "one bit flipped", "round trip")
    for form in FORMS
    if (name not in malice.OF_DIRECTORY and name != "a file missing") or form is DIRECTORY
    if name != "a pickle in the file" or form is not DIRECTORY
)
