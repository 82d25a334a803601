"""One checkpoint file of a run, which loads on any number of ranks: ``save`` and ``load``.

The file has the safetensors layout: loading it runs no code, and any reader of safetensors opens it. Tensors are named
``model/…``, ``vectors/…`` (the optimizer's vectors of all parameters) and ``tensors/…`` (its strategies' own, such as
Kronecker factors and their inverses: recomputed ones would be fresher than those of an uninterrupted run). One JSON
text of at most 1 MiB in the file's metadata has the rest: format, version, the optimizer's numbers, its parameter
groups, ``extra``, and a CRC-32 of everything, tensors included.

Torch's random generators are not saved. The optimizer does not use them (seed and iteration determine its samples), and
the generators of R ranks have no meaning for another R. A program that uses them puts their states into ``extra``, for
example ``torch.get_rng_state().tolist()``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.base import CurvatureOptimizer
from krylov_descent.distributed.comm import run_on_all
from krylov_descent.distributed.process_group import gather
from krylov_descent.safety.checksum import checksum
from krylov_descent.safety.tensor_file import ANEW, CODES, LIMIT, reading, write
from krylov_descent.state import Parts
from krylov_descent.vectors.ranks import require_plain

_FORMAT, _VERSION = "krylov-descent checkpoint", 1
_AS_IT_WAS = "Build model and optimizer as they were when it was saved."


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: CurvatureOptimizer,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a run to one file; every rank calls it, and rank 0 writes.

    The file is replaced atomically: a run that is killed at any moment finds the old one or the new one.

    Args:
        path: the path of the file, such as ``run.safetensors``; an older one is replaced.
        model: the model, whose parameters and buffers are saved.
        optimizer: the optimizer, whose state is saved with the settings of its groups.
        extra: anything else, of JSON types; rank 0's is saved.

    Returns:
        The path.

    Raises:
        ValueError: something, named in the message, cannot be saved.
        OSError: the file cannot be written; the older one is unchanged.
        RankError: another rank, named in the message, failed.

    Example:
        >>> import tempfile, torch
        >>> from krylov_descent import KSD
        >>> from krylov_descent import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = KSD(model.parameters())
        >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/run.safetensors", model, optimizer, extra={"epoch": 3})
        >>> checkpoint.load(path, model, optimizer)
        {'epoch': 3}
    """
    path, comm = Path(path), optimizer.comm
    state = optimizer.whole_state()
    tensors, text = run_on_all(comm, lambda: _contents(model, optimizer, state, {} if extra is None else dict(extra)))
    run_on_all(comm, lambda: write(path, tensors, text) if comm.rank == 0 else None)
    return path


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: CurvatureOptimizer) -> dict[str, Any] | None:
    """Load a checkpoint that any number of ranks saved; every rank calls it, and reads the file.

    Names, shapes and dtypes are compared before any tensor is read. A refused file changes neither model nor optimizer.

    Args:
        path: the path given to ``save``, on a file system that all ranks see.
        model: a model with the same names, shapes and dtypes; its contents are replaced.
        optimizer: an optimizer with the same parameter groups; their settings are replaced, too.

    Returns:
        ``extra`` as given to ``save``, {} without one; None if there is no file.

    Raises:
        ValueError: the file is damaged or of another model, or ranks see different files.
        RankError: another rank, named in the message, could not load.
    """
    require_plain(optimizer.trained())
    path, comm = Path(path), optimizer.comm
    if not any(gather(comm, path.exists())):
        return None
    document, tensors = run_on_all(comm, lambda: _read(path, model, optimizer))
    if len(set(gather(comm, document["crc32"]))) > 1:
        raise ValueError(f"The ranks see different files as {path}. Put it on a file system that all of them share.")

    def commit() -> None:
        optimizer.load_whole_state(_state_in(tensors, document))
        model.load_state_dict(_within(tensors, "model/"))
        for group, saved in zip(optimizer.param_groups, document["groups"], strict=True):
            group.update(saved["settings"])

    run_on_all(comm, commit)
    return dict(document["extra"])


def _contents(
    model: nn.Module, optimizer: CurvatureOptimizer, state: Parts, extra: dict[str, Any]
) -> tuple[dict[str, Tensor], str]:
    """Return all tensors by name, and the JSON text."""
    tensors = {}
    for prefix, group in (("model/", model.state_dict()), ("vectors/", state.vectors), ("tensors/", state.tensors)):
        for name, x in group.items():
            if type(x) is not Tensor or x.layout != torch.strided or x.dtype not in CODES:
                raise ValueError(
                    f"{prefix}{name} = {_short(x)} cannot be saved: a checkpoint holds plain tensors. Keep it out of "
                    "model.state_dict() (persistent=False), and put what can be JSON into extra=."
                )
            tensors[prefix + name] = x.detach().cpu().contiguous()
    try:
        same = json.loads(_canonical(extra)) == extra
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"extra={_short(extra)} is not JSON: {error}. Give dicts, lists, numbers and strings."
        ) from None
    if not same:
        raise ValueError(
            f"extra={_short(extra)} would not come back the same: in JSON, keys are strings and tuples become lists."
        )
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "optimizer": optimizer._owner(),
        "numbers": {key: _plain(x) for key, x in state.numbers.items()},
        "groups": _groups_of(model, optimizer),
        "extra": extra,
    }
    text = _canonical({**document, "crc32": checksum([_canonical(document), tensors])})
    if len(text) > LIMIT:
        raise ValueError(
            f"The names of the parameters and extra= take {len(text):,} characters as JSON, and a checkpoint has room "
            f"for {LIMIT:,}. Put what is large into a buffer of the model, or into a file of its own."
        )
    return tensors, text


def _groups_of(model: nn.Module, optimizer: CurvatureOptimizer) -> list[dict[str, Any]]:
    """Return the parameter groups: names, whether trained, and numeric settings."""
    names = {id(p): name for name, p in reversed([*model.named_parameters(remove_duplicate=False)])}
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    f"Parameter group {i} has a parameter of shape {[*p.shape]} that is not the model's. Give save and "
                    "load a module that holds all that is trained, such as a ModuleList."
                )
        parameters = [[names[id(p)], p.requires_grad] for p in group["params"]]
        settings = {k: x for k, x in group.items() if type(x) in (int, float, bool) and math.isfinite(x)}
        groups.append({"parameters": parameters, "settings": settings})
    return groups


def _read(path: Path, model: nn.Module, optimizer: CurvatureOptimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON document and the tensors of a file, verified against model and optimizer."""
    with reading(path) as file:
        document = _document(file.text)
        _require_model(file.declared, model)
        if document["optimizer"] != optimizer._owner():
            raise ValueError(
                f"The checkpoint is one of {_short(document['optimizer'])}, and the optimizer is a "
                f"{optimizer._owner()}. {_AS_IT_WAS}"
            )
        _require_groups(document["groups"], _groups_of(model, optimizer))
        optimizer.check_whole_state(_state_in(file.declared, document))
        tensors = file.tensors()
        said = {key: value for key, value in document.items() if key != "crc32"}
        if checksum([_canonical(said), tensors]) != document["crc32"]:
            raise ValueError(f"The contents do not have their checksum {_short(document['crc32'])}. {ANEW}")
        optimizer.check_whole_state(_state_in(tensors, document))
        return document, tensors


def _document(text: str) -> dict[str, Any]:
    """Return the parsed JSON text of a file, if ``save`` may have written it."""
    try:
        document: dict[str, Any] = json.loads(text)
        canonical = _canonical(document) == text  # no duplicate key, no NaN
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The metadata are not JSON ({_short(str(error))}). {ANEW}") from None
    if type(document["version"]) is not int or document["version"] != _VERSION:  # True equals 1
        raise ValueError(
            f"The checkpoint has version {_short(document['version'])}, and this krylov_descent reads {_VERSION}. Load "
            "it with the krylov_descent that wrote it."
        )
    if not canonical or document["format"] != _FORMAT or not isinstance(document["extra"], dict):
        raise ValueError(f"The metadata are not as save writes them. {ANEW}")
    return document


def _require_model(declared: Mapping[str, Tensor], model: nn.Module) -> None:
    """Require that the tensors of a file are those of this model and of an optimizer."""
    there, here = _within(declared, "model/"), model.state_dict()
    if there.keys() != here.keys():
        raise ValueError(
            f"This is a checkpoint of another model: only there are {_short(sorted(there.keys() - here.keys()))}, only "
            f"here {_short(sorted(here.keys() - there.keys()))}. {_AS_IT_WAS}"
        )
    for name, x in here.items():
        if (saved := there[name]).shape != x.shape or saved.dtype != x.dtype:
            raise ValueError(
                f"This is a checkpoint of another model: {name} is {[*saved.shape]} of {saved.dtype} there and "
                f"{[*x.shape]} of {x.dtype} here. {_AS_IT_WAS}"
            )
    others = [name for name in declared if not name.startswith(("model/", "vectors/", "tensors/"))]
    if others:
        raise ValueError(f"No checkpoint has {_short(others)}. {ANEW}")


def _require_groups(there: list[Any], here: list[dict[str, Any]]) -> None:
    """Require the optimizer's own parameter groups, with numeric settings."""
    if len(there) != len(here):
        raise ValueError(f"The checkpoint has {len(there)} parameter groups, the optimizer {len(here)}. {_AS_IT_WAS}")
    for i, (saved, now) in enumerate(zip(there, here, strict=True)):
        if saved["parameters"] != now["parameters"]:
            raise ValueError(
                f"This is a checkpoint of other parameter groups: group {i} has [name, trained] = "
                f"{_short(saved['parameters'])} there, and {_short(now['parameters'])} here. Give the optimizer the "
                "same parameters in the same order, and freeze the same ones."
            )
        for key, x in saved["settings"].items():
            number = type(x) in (int, float, bool) and math.isfinite(x)
            if key == "params" or not number or (key == "weight_decay" and x < 0):
                raise ValueError(f"{key} of parameter group {i} is {_short(x)}, which is no setting. {ANEW}")


def _state_in(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> Parts:
    """Return the optimizer's state from the contents of a file."""
    numbers = {key: float(x) if x in ("inf", "-inf", "nan") else x for key, x in document["numbers"].items()}
    return Parts(_within(tensors, "vectors/"), numbers, _within(tensors, "tensors/"))


def _plain(x: float | str) -> float | str:
    """Return a number or string as a JSON value."""
    return x if isinstance(x, str) or math.isfinite(x) else str(float(x))


def _within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, allow_nan=False)


def _short(value: Any) -> str:
    """Return a value's repr, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
