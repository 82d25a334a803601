"""A file of named tensors and one text, in the safetensors layout: written atomically, verified when read.

    8 bytes   the length of the header, little-endian
    header    JSON: ``__metadata__`` with the text, and dtype, shape and place of each tensor; spaces up to 8 bytes
    data      the numbers of each tensor, the widest dtypes first

safetensors checks that the header fits the file. A file is read only if ``write`` would write the same header for its
contents: no duplicate key, no gap between tensors, nothing after them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from krylov_descent.safety.checksum import raw_bytes

try:
    from safetensors import SafetensorError, safe_open
except ImportError as missing:
    raise ImportError("Checkpoints need safetensors: pip install 'krylov-descent[checkpoint]'.") from missing

#: The key of the text in ``__metadata__``, and its largest length in characters.
KEY, LIMIT = "krylov_descent", 1 << 20
_LONGEST_HEADER, _MOST_TENSORS = 3 << 20, 20_000
ANEW = "Copy the file again, or load another one."

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
#: The dtypes that a file may hold, with their names in it.
CODES = {dtype: code for code, dtype in _DTYPES.items()}


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file, which replaces ``path`` once it is complete and on the disk.

    The temporary name is always the same, so that the remains of a killed process are overwritten.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file under the new name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name != "nt":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name, too
        finally:
            os.close(directory)


def write(path: Path, tensors: Mapping[str, Tensor], text: str) -> None:
    """Write contiguous CPU tensors and an ASCII text.

    safetensors' own writer leaves a temporary file of random name behind when it is killed.
    """
    head = _head(tensors, text)
    if len(head) > _LONGEST_HEADER or len(tensors) > _MOST_TENSORS:
        raise ValueError(
            f"The names of {len(tensors):,} tensors take {len(head):,} bytes, and a checkpoint has room for "
            f"{_MOST_TENSORS:,} in {_LONGEST_HEADER:,}. Save parts of the model in files of their own."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(head)
        for name in _order(tensors):
            file.write(raw_bytes(tensors[name]))


class TensorFile:
    """An open file.

    Attributes:
        declared: the tensors by name, on the device "meta": shapes and dtypes without data.
        text: the text.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self._file = file
        self.declared: dict[str, Tensor] = {}
        names = file.keys()
        if len(names) > _MOST_TENSORS:
            raise ValueError(f"The file has {len(names):,} tensors, and at most {_MOST_TENSORS:,} can be. {ANEW}")
        for name in names:
            entry = file.get_slice(name)
            self.declared[name] = torch.empty(entry.get_shape(), dtype=_DTYPES[entry.get_dtype()], device="meta")
        self.text: str = (file.metadata() or {}).get(KEY, "")
        if not 0 < len(self.text) <= LIMIT:
            raise ValueError(f"The file has {len(self.text):,} characters under {KEY!r}, not 1 to {LIMIT:,}. {ANEW}")
        head = _head(self.declared, self.text)
        with open(path, "rb") as raw:
            if raw.read(len(head)) != head:
                raise ValueError(f"The header is not one that save writes. {ANEW}")

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors, as the file may change."""
        return {name: self._file.get_tensor(name).clone() for name in self.declared}


@contextmanager
def reading(path: Path) -> Iterator[TensorFile]:
    """Open a file; any error in the file or its contents becomes a ValueError that names the file."""
    try:
        _require_header(path)
        with safe_open(path, framework="pt") as file:
            yield TensorFile(path, file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (SafetensorError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{path} is no checkpoint, or damaged ({what}). {ANEW}") from None


def _require_header(path: Path) -> None:
    """Require a regular file with a header of a length that ``write`` writes."""
    if path.exists() and not path.is_file():
        raise ValueError(f"This is no file, but a directory, a pipe or a device. {ANEW}")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > _LONGEST_HEADER:
        raise ValueError(
            f"This is no checkpoint, or damaged: its header would have {length:,} bytes, and at most "
            f"{_LONGEST_HEADER:,} can be. {ANEW}"
        )


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names with the widest dtypes first, so that all tensors are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _head(tensors: Mapping[str, Tensor], text: str) -> bytes:
    """Return the bytes before the data: the header and its length."""
    header: dict[str, Any] = {"__metadata__": {KEY: text}}
    end = 0
    for name in _order(tensors):
        x = tensors[name]
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {"dtype": CODES[x.dtype], "shape": [*x.shape], "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    return len(written).to_bytes(8, "little") + written
