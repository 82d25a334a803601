"""Errors with a remedy for operations without a second derivative."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_NOT_TWICE = re.compile(
    r"derivative for .* is not implemented|once_differentiable|double backward|differentiated twice",
    re.IGNORECASE,
)


@contextmanager
def explain_missing_second_derivative() -> Iterator[None]:
    """Turn PyTorch's refusals to differentiate twice into an error with a remedy.

    Raises:
        ValueError: an operation of the model has no second derivative.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _NOT_TWICE.search(str(error)):
            raise
        raise ValueError(
            f"An operation of the model cannot be differentiated twice, which curvature products need: {error} "
            "Known cases: nn.EmbeddingBag (use nn.Embedding and a sum), CTC loss, compiled modules (pass the "
            "uncompiled one), nn.LSTM, GRU and RNN on CUDA (step inside torch.backends.cudnn.flags(enabled=False))."
        ) from error
