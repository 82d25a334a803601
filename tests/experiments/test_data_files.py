"""Data files of the experiments: what is missing, wrong or damaged is refused, and the text says what to do."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import numpy as np
import pytest
from experiments.supervised import data
from experiments.supervised.problems import load_problem

ARRAYS: dict[str, data.Array] = {"x": np.arange(6, dtype=np.uint8).reshape(2, 3), "y": np.array([1, 0], np.int32)}
LAYOUT = {"x": ((2, 3), "uint8"), "y": ((2,), "int32")}


def written(folder: Path) -> data.Source:
    """A small file and its description."""
    np.savez(folder / "small.npz", x=ARRAYS["x"], y=ARRAYS["y"])
    sha256 = data._file_sha256(folder / "small.npz", 0)
    return data.Source("small.npz", sha256, data.digest(ARRAYS), LAYOUT, "It grows on trees.")


def test_a_known_file_is_read_by_argument_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path)
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    for arrays in (data.read(source, tmp_path), data.read(source, None)):
        assert all(np.array_equal(arrays[key], ARRAYS[key]) for key in ARRAYS)


def test_either_digest_will_do(tmp_path: Path) -> None:
    source = written(tmp_path)
    data.read(dataclasses.replace(source, sha256="0"), tmp_path)
    data.read(dataclasses.replace(source, digest="0"), tmp_path)
    with pytest.raises(ValueError, match=r"small\.npz has sha256 .*, expected 0, .*It grows on trees"):
        data.read(dataclasses.replace(source, sha256="0", digest="0"), tmp_path)


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    source = written(tmp_path)
    data.read(source, tmp_path)
    np.savez(tmp_path / "small.npz", x=ARRAYS["x"] + np.uint8(1), y=ARRAYS["y"])
    with pytest.raises(ValueError, match="it is another data set or damaged"):
        data.read(source, tmp_path)


def test_layouts_are_checked(tmp_path: Path) -> None:
    source = written(tmp_path)
    with pytest.raises(ValueError, match=r"x is uint8 of shape \(2, 3\), expected uint8 of shape \(3, 2\)"):
        data.read(dataclasses.replace(source, arrays={"x": ((3, 2), "uint8")}), tmp_path)
    with pytest.raises(ValueError, match=r"y is int32 of shape \(2,\), expected int64"):
        data.read(dataclasses.replace(source, arrays={"y": ((2,), "int64")}), tmp_path)
    with pytest.raises(ValueError, match="has no array 'z', only"):
        data.read(dataclasses.replace(source, arrays={"z": ((2,), "int64")}), tmp_path)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.npz").write_bytes(b"<html>not found</html>")
    source = data.Source("small.npz", "0", "0", LAYOUT, "It grows on trees.")
    with pytest.raises(ValueError, match=r"small\.npz cannot be read as an \.npz archive .*It grows on trees"):
        data.read(source, tmp_path)


@pytest.mark.parametrize("name", ["mnist-ae", "mnist-class", "mnist-pretrained", "spoken-digits", "starcraft"])
def test_what_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=rf"\.npz is not in {tmp_path}\. .*(npm|recordings|replay)"):
        load_problem(name, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"\.npz is needed: the data directory .*nowhere is none: give --data"):
        load_problem(name, tmp_path / "nowhere")
    monkeypatch.delenv(data.VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError, match=rf"\.npz is needed: .*environment variable {data.VARIABLE}\. "):
        load_problem(name, None)


def idx(array: data.Array) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_mnist_is_packed_from_idx_files(tmp_path: Path) -> None:
    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([7, 2], np.uint8)
    for name in ("train-images-idx3-ubyte", "t10k-images.idx3-ubyte"):  # both spellings are about
        (tmp_path / name).write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(FileNotFoundError, match=r"t10k-labels-idx1-ubyte, t10k-labels\.idx1-ubyte is in"):
        data.mnist_from_idx(tmp_path, tmp_path / "mnist.npz")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    data.mnist_from_idx(tmp_path, tmp_path / "mnist.npz")
    with np.load(tmp_path / "mnist.npz", allow_pickle=False) as archive:
        assert sorted(archive.files) == ["x_test", "x_train", "y_test", "y_train"]
        assert np.array_equal(archive["x_test"], images)
        assert np.array_equal(archive["y_train"], labels)
    with pytest.raises(ValueError, match=r"x_train is uint8 of shape \(2, 3, 4\), expected"):
        data.read(data.MNIST, tmp_path)


def test_broken_idx_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_bytes(idx(np.zeros(5, np.uint8))[:-1])
    with pytest.raises(ValueError, match="holds 4 bytes"):
        data.read_idx(path)
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match="gzipped"):
        data.read_idx(path)
