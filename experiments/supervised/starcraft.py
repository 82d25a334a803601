"""Which opening a Protoss player follows against Terran, from what was built in the first five minutes.

Replay tables of Weber & Mateas (2009). The paper's own, 1,000 games of 5,077 features and 8 classes, is not public.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.supervised.data import STARCRAFT, Array, read

HORIZON = 7200  # frames: five minutes at 24 a second; what is built later counts as never built
HELD_OUT = 0.1  # of the games


def starcraft(data: Path | None, sizes: tuple[int, int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """[n, 992] features and [n] openings, 0 to 6, the last of them 'Unknown'.

    Games that are in the table twice are dropped before it is split, so that no held-out game is a training game.
    """
    arrays = read(STARCRAFT, data)
    table = np.column_stack([arrays["PvT_Protoss_X"], arrays["PvT_Protoss_y"]])
    table = table[np.sort(np.unique(table, axis=0, return_index=True)[1])]
    games = torch.randperm(len(table), generator=torch.Generator().manual_seed(0)).numpy()
    parts = np.split(table[games], [round((1 - HELD_OUT) * len(games))])
    built = ((table[:, :-1] > 0) & (table[:, :-1] <= HORIZON)).any(0)  # 31 types; of others every column is constant
    train, held_out = (
        (torch.from_numpy(features(part[:n, :-1][:, built])), torch.from_numpy(part[:n, -1].astype(np.int64)))
        for part, n in zip(parts, sizes, strict=True)
    )
    return train, held_out


def features(frames: Array) -> Array:
    """Of k types: k times in [0, 1], k times whether built, and for each of k(k−1) ordered pairs which came first.

    The time of what is never built is 0; what is built comes before what is not.
    """
    built = (frames > 0) & (frames <= HORIZON)
    times = np.where(built, frames / HORIZON, 0)
    moment = np.where(built, frames, HORIZON + 1)
    before = moment[:, :, None] < moment[:, None, :]
    pairs = before[:, ~np.eye(frames.shape[1], dtype=bool)]
    return np.concatenate([times, built, pairs], 1).astype(np.float32)
