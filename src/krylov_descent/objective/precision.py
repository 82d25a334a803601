"""A warning if float32 is computed with fewer than its 23 bits: rounding then hides decreases from the line search."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_PRODUCTS, _CONVOLUTIONS = "Matrix products", "Convolutions and recurrent layers"
REMEDY = "torch.set_float32_matmul_precision('highest'); torch.backends.cudnn.allow_tf32 = False."


def reduced(device: torch.device) -> Iterator[str]:
    """Yield the kinds of operations that compute float32 with reduced precision."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    if hasattr(matmul, "fp32_precision"):  # if torch has it, reading the older settings may raise
        coarse = matmul.fp32_precision in ("tf32", "bf16")
    else:
        coarse = torch.get_float32_matmul_precision() != "highest"
    if coarse:
        yield _PRODUCTS
    with contextlib.suppress(RuntimeError):  # likewise
        if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
            yield _CONVOLUTIONS


def warn_if_reduced(params: Sequence[Tensor]) -> None:
    """Warn if float32 parameters are computed with reduced precision; of convolutions (TF32 by default) if present."""
    if params[0].dtype != torch.float32:
        return
    filters = any(p.ndim > 2 for p in params)
    found = [what for what in reduced(params[0].device) if filters or what == _PRODUCTS]
    if found:
        warnings.warn(
            f"{' and '.join(found)} may round float32 to TF32 or bfloat16 inside (10 or 8 bits instead of 23): smaller "
            f"decreases of the loss are lost in rounding, and the line search stalls. {REMEDY}",
            stacklevel=4,
        )
