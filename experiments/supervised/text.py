"""Text that every Python installation has: the docstrings of its standard library, as sequences of characters.

The recipe: all docstrings of the modules that lie directly in the library's folder and begin with a small letter,
module by module in the order of names, classes and functions breadth first; cut into paragraphs at blank lines, of
which none is taken twice; joined by a blank line. Characters are the newline and the 95 that ASCII prints; any other
becomes "?". Another version of Python has another text: runs record its length and sha256.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_ORDER = 0  # seed of the order of sequences
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.lru_cache
def corpus(library: Path | None = None) -> str:
    """The text of a folder of modules; of the standard library unless given."""
    folder = library if library is not None else Path(sysconfig.get_paths()["stdlib"])
    paragraphs: dict[str, None] = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            paragraphs.update(dict.fromkeys((text or "").split("\n\n")))
    joined = "\n\n".join(part for part in paragraphs if part.strip())
    return "".join(c if c in ALPHABET else "?" for c in joined)


def facts() -> dict[str, str | int]:
    """What tells one text from another."""
    text = corpus()
    return {"characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def characters(sizes: tuple[int, int], length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """[n, T] characters and [n, T] those that follow them, as numbers of ``ALPHABET``: training and held-out set.

    Sequences do not overlap but for one character, and are shuffled, the same way every time. The held-out ones are
    taken from the end, so that smaller sets are the first of larger ones.

    Raises:
        ValueError: the text is too short.
    """
    text = corpus()
    numbers = torch.tensor([ALPHABET.index(c) for c in text])
    count = (len(numbers) - 1) // length
    if count < sum(sizes):
        raise ValueError(
            f"the docstrings of this Python's standard library make {count:,} sequences of {length} characters, and "
            f"{sum(sizes):,} are wanted: use a Python whose installation has its library as source files"
        )
    windows = numbers.unfold(0, length + 1, length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_ORDER))
    train, held_out = windows[order[: sizes[0]]], windows[order.flip(0)[: sizes[1]]]
    return (train[:, :-1].clone(), train[:, 1:].clone()), (held_out[:, :-1].clone(), held_out[:, 1:].clone())
