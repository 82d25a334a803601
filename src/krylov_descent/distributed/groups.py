"""Parameter groups in a checkpoint: what is kept of them, and whether those that are there fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from krylov_descent.distributed.manifest import short


def groups_of(model: torch.nn.Module, param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups: names, whether they are trained, and the settings that are numbers.

    Raises:
        ValueError: a parameter is not the model's.
    """
    names = {id(p): name for name, p in reversed([*model.named_parameters(remove_duplicate=False)])}
    groups = []
    for i, group in enumerate(param_groups):
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


def require_groups(path: Path, values: dict[str, Any], current: list[dict[str, Any]]) -> None:
    """The values of a manifest must be those of such parameter groups.

    Raises:
        ValueError: they are not; says how.
    """
    saved = values.get("groups")
    if not isinstance(saved, list) or not all(
        isinstance(g, dict) and isinstance(g.get("settings"), dict) for g in saved
    ):
        raise ValueError(f"{path}: groups is {short(saved)}, no list of parameter groups. Load another checkpoint.")
    for key in ("extra", "numbers"):
        if not isinstance(values.get(key), dict):
            raise ValueError(f"{path}: {key} is {short(values.get(key))}, no object. Load another checkpoint.")
    if len(saved) != len(current):
        raise ValueError(
            f"{path} has {len(saved)} parameter groups, the optimizer {len(current)}. Build it as it was when saved."
        )
    for i, (there, here) in enumerate(zip(saved, current, strict=True)):
        if there.get("parameters") != here["parameters"]:
            raise ValueError(
                f"{path} is a checkpoint of other parameter groups: group {i} has [name, trained] = "
                f"{short(there.get('parameters'))} there, and {short(here['parameters'])} here. Give the optimizer the "
                "same parameters in the same order, and freeze the same ones."
            )
        for key, x in there["settings"].items():
            if key == "params" or type(x) not in (int, float, bool) or (key == "weight_decay" and x < 0):
                raise ValueError(f"{path}: {key} of group {i} is {short(x)}, no such setting. Load another checkpoint.")
