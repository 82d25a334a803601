"""One checkpoint file of a run, which loads on any number of ranks: ``save`` and ``load``.

It has the safetensors layout, so that loading it runs no code, and any reader of safetensors opens it. Tensors are
named ``model/…``, ``optimizer/…`` (vectors of all parameters) and ``factors/…`` (the preconditioner's, inverses
included: made anew they would be fresher than those of a run that was not interrupted). All else is one JSON text of at
most 1 MiB in the file's metadata: format, version, the optimizer's numbers, its parameter groups, ``extra``, and a
CRC-32 of all of it, tensors included.

Torch's random generators are not saved. The optimizer draws from none of them (its samples follow from seed and
iteration), and those of R ranks have no meaning for another R. A program that does use them puts into ``extra`` what it
needs, for example ``torch.get_rng_state().tolist()``.
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

from krylov_descent.distributed.comm import together
from krylov_descent.distributed.process_group import gather
from krylov_descent.optimizer import KSD
from krylov_descent.safety.checksum import checksum
from krylov_descent.safety.tensor_file import ANEW, CODES, LIMIT, reading, write
from krylov_descent.state import WholeState
from krylov_descent.vectors.ranks import require_plain

_FORMAT, _VERSION = "krylov-descent checkpoint", 1
_AS_IT_WAS = "Build model and optimizer as they were when it was saved."


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: KSD, *, extra: Mapping[str, Any] | None = None
) -> Path:
    """Save a run to one file; every rank calls it, and rank 0 writes.

    The file has its name only once it is complete: killed at any moment, a run finds the old one or the new one.

    Args:
        path: of the file, such as ``run.safetensors``; an older one is replaced.
        model: its parameters and buffers are saved.
        optimizer: its state is gathered on rank 0, and saved with the settings of its groups.
        extra: anything else, of JSON types; that of rank 0 is kept.

    Returns:
        The path.

    Raises:
        ValueError: something cannot be saved; says what.
        OSError: the file cannot be written. What was saved before is still there.
        RankError: another rank failed; says which.

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
    tensors, text = together(comm, lambda: _contents(model, optimizer, state, {} if extra is None else dict(extra)))
    together(comm, lambda: write(path, tensors, text) if comm.rank == 0 else None)
    return path


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: KSD) -> dict[str, Any] | None:
    """Go on from a checkpoint, whatever the number of ranks that saved it; every rank calls it, and reads the file.

    Names, shapes and dtypes are compared before any tensor is read. Model and optimizer are left alone if the file is
    refused.

    Args:
        path: as given to ``save``, on a file system that all ranks see.
        model: one of the same names, shapes and dtypes; whatever it holds is replaced.
        optimizer: one of the same parameter groups; their settings are replaced, too.

    Returns:
        ``extra`` as given to ``save``, {} if nothing was; None if there is no file.

    Raises:
        ValueError: the file is damaged or of another model, or ranks see different files; says how.
        RankError: another rank could not load; says which.
    """
    require_plain(optimizer.trained())
    path, comm = Path(path), optimizer.comm
    if not any(gather(comm, path.exists())):
        return None
    document, tensors = together(comm, lambda: _read(path, model, optimizer))
    if len(set(gather(comm, document["crc32"]))) > 1:
        raise ValueError(f"The ranks see different files as {path}. Put it on a file system that all of them share.")

    def commit() -> None:
        optimizer.load_whole_state(_state_in(tensors, document))
        model.load_state_dict(_within(tensors, "model/"))
        for group, saved in zip(optimizer.param_groups, document["groups"], strict=True):
            group.update(saved["settings"])

    together(comm, commit)
    return dict(document["extra"])


def _contents(
    model: nn.Module, optimizer: KSD, state: WholeState, extra: dict[str, Any]
) -> tuple[dict[str, Tensor], str]:
    """All tensors by name, and the JSON text."""
    vectors, numbers, factors = state
    tensors = {}
    for prefix, group in (("model/", model.state_dict()), ("optimizer/", vectors), ("factors/", factors)):
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
        "numbers": {key: x if math.isfinite(x) else str(float(x)) for key, x in numbers.items()},
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


def _groups_of(model: nn.Module, optimizer: KSD) -> list[dict[str, Any]]:
    """The parameter groups: names, whether they are trained, and the settings that are numbers."""
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


def _read(path: Path, model: nn.Module, optimizer: KSD) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON document and the tensors of a file, if they are sound and fit."""
    with reading(path) as file:
        document = _document(file.text)
        _require_model(file.declared, model)
        _require_groups(document["groups"], _groups_of(model, optimizer))
        optimizer.check_whole_state(_state_in(file.declared, document))
        tensors = file.tensors()
        said = {key: value for key, value in document.items() if key != "crc32"}
        if checksum([_canonical(said), tensors]) != document["crc32"]:
            raise ValueError(f"The contents do not have their checksum {_short(document['crc32'])}. {ANEW}")
        optimizer.check_whole_state(_state_in(tensors, document))
        return document, tensors


def _document(text: str) -> dict[str, Any]:
    """The JSON text of a file as an object, if ``save`` may have written it."""
    try:
        document: dict[str, Any] = json.loads(text)
        canonical = _canonical(document) == text  # no key twice, no NaN
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
    """The tensors of a file must be those of this model and of an optimizer."""
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
    others = [name for name in declared if not name.startswith(("model/", "optimizer/", "factors/"))]
    if others:
        raise ValueError(f"No checkpoint has {_short(others)}. {ANEW}")


def _require_groups(there: list[Any], here: list[dict[str, Any]]) -> None:
    """Saved parameter groups must be those of the optimizer, with settings that are numbers."""
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


def _state_in(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> WholeState:
    """The optimizer's state among the contents of a file."""
    numbers = {key: float(x) if x in ("inf", "-inf", "nan") else x for key, x in document["numbers"].items()}
    return _within(tensors, "optimizer/"), numbers, _within(tensors, "factors/")


def _within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _canonical(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, allow_nan=False)


def _short(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
