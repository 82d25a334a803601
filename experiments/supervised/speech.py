"""Frames of spoken digits (AudioMNIST with added noise) and the state of the phone that each belongs to.

The nearest public thing to the paper's Aurora, which is licensed and has 352 inputs, 56 phones and 1.2 M frames. Labels
are automatic alignments. Speakers of the two sets differ.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experiments.supervised.data import SPOKEN_DIGITS, Array, read

STATES = 3  # of each of the 20 phones
REACH = 4  # a window is of 9 frames
FRAMES = (602_892, 144_335)  # of training and test speakers


def spoken_digits(data: Path | None, sizes: tuple[int, int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """[n, 351] windows and [n] states, 0 to 59, of frames drawn once and for all from all those of each set.

    Windows are built for the frames drawn only: all of them would be 1 GB.
    """
    arrays = read(SPOKEN_DIGITS, data)
    lengths = arrays["utt"][:, 3]
    first, last = _ends(lengths)
    features = _features(arrays["plp_noisy"] * arrays["scale_noisy"], lengths, first, last)
    held_out = np.repeat(np.isin(arrays["utt"][:, 0], arrays["test_speakers"]), lengths)
    frames = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if tuple(map(len, frames)) != FRAMES:
        raise ValueError(f"the sets have {tuple(map(len, frames))} frames, expected {FRAMES}: the data file differs")
    features -= features[frames[0]].mean(0, dtype=np.float64).astype(np.float32)
    features /= features[frames[0]].std(0, dtype=np.float64).astype(np.float32)
    label = STATES * arrays["phone"].astype(np.int64) + arrays["state"]
    generator = torch.Generator().manual_seed(0)

    def part(candidates: npt.NDArray[np.int64], n: int) -> tuple[Tensor, Tensor]:
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:n].numpy()]
        windows = [_shifted(features, chosen, k, first, last) for k in range(-REACH, REACH + 1)]
        return torch.from_numpy(np.concatenate(windows, 1)), torch.from_numpy(label[chosen])

    return part(frames[0], sizes[0]), part(frames[1], sizes[1])


def _ends(lengths: Array) -> tuple[Array, Array]:
    """Of each frame, the first and the last frame of its utterance."""
    stop = np.cumsum(lengths)
    return np.repeat(stop - lengths, lengths), np.repeat(stop - 1, lengths)


def _shifted(x: Array, frames: Array, by: int, first: Array, last: Array) -> Array:
    """Rows of x so many frames on, the ends of utterances repeated."""
    rows: Array = x[np.clip(frames + by, first[frames], last[frames])]
    return rows


def _features(plp: Array, lengths: Array, first: Array, last: Array) -> npt.NDArray[np.float32]:
    """[frames, 39]: coefficients less their mean over the utterance, their Δ and ΔΔ."""
    starts = np.cumsum(lengths) - lengths
    means = np.add.reduceat(plp, starts, 0, dtype=np.float64) / lengths[:, None]
    static = (plp - np.repeat(means, lengths, 0)).astype(np.float32)
    delta = _delta(static, first, last)
    return np.concatenate([static, delta, _delta(delta, first, last)], 1)


def _delta(x: Array, first: Array, last: Array) -> Array:
    """The slope of a straight line through five frames."""
    frames = np.arange(len(x))
    on = [_shifted(x, frames, k, first, last) - _shifted(x, frames, -k, first, last) for k in (1, 2)]
    slope: Array = (on[0] + 2 * on[1]) / np.float32(10)
    return slope
