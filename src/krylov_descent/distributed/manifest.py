"""The JSON manifest of a checkpoint: which tensors there are, and where their bytes lie. It cannot run code.

It stands in for the ``.metadata`` of torch.distributed.checkpoint, which is a pickle, so that loading one runs what it
says. All that a manifest says is checked when it is read, before anything is made of it: it may come from anywhere.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

MANIFEST = "manifest.json"
#: Version 1 had no checksum of its own.
FORMAT, VERSION, READS = "krylov-descent checkpoint", 2, (1, 2)

#: The dtypes a checkpoint may hold, by name.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.complex128, torch.complex64, torch.bool),
    )
}

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Slice:
    """Where the bytes of one block of a tensor lie."""

    file: str
    start: int
    length: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        metadata: of the tensors, as torch.distributed.checkpoint wants it; its ``storage_data`` are slices.
        values: what is kept beside them, of JSON types, unchecked.
    """

    metadata: Metadata
    values: dict[str, Any]

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The tensors by name."""
        found = self.metadata.state_dict_metadata.items()
        return {name: saved for name, saved in found if isinstance(saved, TensorStorageMetadata)}


def write_manifest(
    directory: Path, metadata: Metadata, slices: Mapping[MetadataIndex, Slice], values: Mapping[str, Any]
) -> None:
    """Write the manifest of data files that are complete, to the disk itself."""
    tensors = {}
    for name, saved in Manifest(metadata, {}).tensors().items():
        blocks = [
            {"offset": [*c.offsets], "shape": [*c.sizes], **asdict(slices[MetadataIndex(name, c.offsets)])}
            for c in sorted(saved.chunks, key=lambda c: tuple(c.offsets))
        ]
        tensors[name] = {"dtype": _name(saved.properties.dtype), "shape": [*saved.size], "blocks": blocks}
    files = {name: (directory / name).stat().st_size for name in sorted({s.file for s in slices.values()})}
    document = {"format": FORMAT, "version": VERSION, "values": values, "files": files, "tensors": tensors}
    with open(directory / MANIFEST, "w", encoding="utf-8") as file:
        file.write(json.dumps({**document, "crc32": crc32_of(document)}, allow_nan=False))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest in a directory, and check it and the sizes of the data files.

    Raises:
        FileNotFoundError: there is none, or a data file is missing.
        ValueError: it is damaged, of another format, or says what no manifest says.

    Example:
        >>> import tempfile
        >>> read_manifest(tempfile.mkdtemp())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        FileNotFoundError: ...manifest.json is missing: the directory holds no complete checkpoint...
    """
    path = Path(directory) / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: the directory holds no complete checkpoint of krylov_descent. Load another one."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): the checkpoint is damaged. Load another one.") from None
    return _Check(path).manifest(document)


class _Check:
    """Turns a JSON document into a manifest, or refuses it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self, document: Any) -> Manifest:
        self._need(isinstance(document, dict), "all of it", document, "an object")
        self._need(document.get("format") == FORMAT, "format", document.get("format"), repr(FORMAT))
        version, crc = document.get("version"), document.pop("crc32", None)
        if type(version) is not int or version not in READS:
            raise ValueError(
                f"{self._path}: version is {short(version)}; this krylov_descent reads versions {READS}. Load it with "
                "the krylov_descent that wrote it."
            )
        if version > 1 and (not _natural(crc) or crc != crc32_of(document)):
            raise ValueError(
                f"{self._path} is damaged: what it says does not have the checksum {short(crc)}. Load another "
                "checkpoint."
            )
        parts = []
        for key in ("values", "files", "tensors"):
            self._need(isinstance(document.get(key), dict), key, document.get(key), "an object")
            parts.append(document[key])
        values, files, tensors = parts
        for name, size in files.items():
            self._file(name, size)
        metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        slices = {}
        for name, entry in tensors.items():
            metadata[name] = tensor = self._tensor(name, entry)
            for offset, where in self._blocks(name, entry, tensor, files):
                slices[MetadataIndex(name, offset)] = where
        return Manifest(Metadata(metadata, storage_data=slices), values)

    def _file(self, name: str, size: Any) -> None:
        self._need(_FILE_NAME.fullmatch(name) is not None, "a name in files", name, "the plain name of a file")
        self._need(_natural(size), f"the size of {name}", size, "a number of bytes")
        path = self._path.parent / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, which {MANIFEST} refers to. Load another checkpoint.")
        found = path.stat().st_size
        if found != size:
            raise ValueError(
                f"{path} has {found} bytes, and had {size} when it was written: it is damaged, or its copy is not "
                "complete. Copy it again, or load another checkpoint."
            )

    def _tensor(self, name: str, entry: Any) -> TensorStorageMetadata:
        self._need(isinstance(entry, dict), f"tensor {name}", entry, "an object")
        dtype, shape = entry.get("dtype"), entry.get("shape")
        self._need(isinstance(dtype, str) and dtype in DTYPES, f"dtype of {name}", dtype, f"one of {sorted(DTYPES)}")
        self._need(_naturals(shape), f"shape of {name}", shape, "a list of sizes")
        return TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), torch.Size(shape), [])

    def _blocks(
        self, name: str, entry: dict[str, Any], tensor: TensorStorageMetadata, files: dict[str, int]
    ) -> list[tuple[torch.Size, Slice]]:
        """The blocks of a tensor, which must follow one another along its first dimension and fill it."""
        blocks = entry.get("blocks")
        self._need(isinstance(blocks, list) and len(blocks) > 0, f"blocks of {name}", blocks, "a list of blocks")
        assert isinstance(blocks, list)
        found, row = [], 0
        for block in blocks:
            self._need(isinstance(block, dict), f"a block of {name}", block, "an object")
            shape, offset = block.get("shape"), block.get("offset")
            self._need(
                _naturals(shape) and len(shape) == len(tensor.size), f"a block of {name}", shape, "a shape of it"
            )
            self._need(
                offset == [row, *[0] * (len(shape) - 1)][: len(shape)] and [*tensor.size[1:]] == shape[1:],
                f"a block of {name}",
                [offset, shape],
                f"one that begins where the last one ended, at row {row}, and is as wide as the tensor",
            )
            row += shape[0] if shape else 1
            where = self._slice(name, block, math.prod(shape) * tensor.properties.dtype.itemsize, files)
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            found.append((torch.Size(offset), where))
        rows = tensor.size[0] if tensor.size else 1
        self._need(row == rows, f"the blocks of {name}", row, f"{rows} rows together")
        self._need(len({offset for offset, _ in found}) == len(found), f"the blocks of {name}", entry, "distinct ones")
        return found

    def _slice(self, name: str, block: dict[str, Any], nbytes: int, files: dict[str, int]) -> Slice:
        file, start, length, crc = (block.get(key) for key in ("file", "start", "length", "crc32"))
        self._need(isinstance(file, str) and file in files, f"the file of {name}", file, "one of those under files")
        numbers = _naturals([start, length, crc])
        self._need(numbers, f"start, length and crc32 of {name}", [start, length, crc], "whole numbers ≥ 0")
        assert isinstance(file, str)
        assert isinstance(start, int)
        assert isinstance(length, int)
        assert isinstance(crc, int)
        self._need(start + length <= files[file], f"the end of {name} in {file}", start + length, "inside of the file")
        # Tensors are stored uncompressed: a shape cannot ask for more memory than there are bytes.
        self._need(nbytes <= length, f"the shape of {name}", block.get("shape"), f"one that {length} bytes hold")
        return Slice(file, start, length, crc)

    def _need(self, condition: bool, what: str, value: Any, wanted: str) -> None:
        if not condition:
            raise ValueError(
                f"{self._path}: {what} is {short(value)} and should be {wanted}. The checkpoint is damaged or was not "
                "written by krylov_descent: load another one."
            )


def short(value: Any) -> str:
    """A value for an error message, in at most some 80 characters.

    Example:
        >>> short(list(range(1000)))[-8:]
        '0, 21, …'
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def crc32_of(document: Mapping[str, Any]) -> int:
    """Of what a document says, however it is written; -1 if it cannot be one of ours."""
    try:
        return zlib.crc32(json.dumps(document, sort_keys=True, allow_nan=False).encode())
    except (ValueError, RecursionError):  # 1e999 is read as infinity
        return -1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # bool is an int, too


def _naturals(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(map(_natural, values))


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
