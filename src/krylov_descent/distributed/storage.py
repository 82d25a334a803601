"""How torch.distributed.checkpoint writes and reads our checkpoints: tensors in its data files, a manifest beside them.

The data files hold tensors only, and are read with ``weights_only=True``; numbers and names are in the manifest.
Nothing here opens torch's ``.metadata``, which is a pickle, and no path leads to ``weights_only=False``.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from krylov_descent.distributed.manifest import MANIFEST, Manifest, Slice, read_manifest, short, write_manifest

_BLOCK = 1 << 20  # bytes that are read back at a time


@dataclass(frozen=True)
class Part:
    """Rows [start, start + n) of a tensor of which other ranks hold the others; by default, a tensor that all hold.

    Example:
        >>> part = Part(torch.ones(3), start=2, rows=7)
        >>> part.shape, part.offset
        (torch.Size([7]), torch.Size([2]))
    """

    tensor: Tensor
    start: int = 0
    rows: int | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.tensor.shape if self.rows is None else torch.Size([self.rows, *self.tensor.shape[1:]])

    @property
    def offset(self) -> torch.Size:
        """Where the part begins."""
        return torch.Size([self.start, *[0] * (self.tensor.ndim - 1)] if self.tensor.ndim else [])

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """What this rank has of the tensor: one block, or none."""
        if self.rows and not self.tensor.numel():
            return []
        return [ChunkStorageMetadata(offsets=self.offset, sizes=self.tensor.shape)]


class PartSavePlanner(DefaultSavePlanner):
    """Saves a dict of names to ``Part``: each block once, by one of the ranks that hold it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """All blocks of this rank; the coordinator drops duplicates."""
        items = [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=part.tensor.dtype), part.shape),
            )
            for name, part in self.state_dict.items()
            for chunk in part.chunks
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor of a block."""
        part: Part = self.state_dict[index.fqn]
        return part.tensor


class PartLoadPlanner(LoadPlanner):
    """Loads into the tensors of a dict of names to ``Part``, however the checkpoint was split."""

    def set_up_planner(
        self, state_dict: Mapping[str, Part], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep both."""
        assert metadata is not None
        self._parts, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        """What overlaps with the parts of this rank."""
        items: list[ReadItem] = []
        for name, part in self._parts.items():
            saved = self._metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, part.chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As it is: every rank reads what it needs."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        """Refuse: torch's planners would unpickle them."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor; a checkpoint holds tensors only.")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the block goes."""
        return _block(self._parts[read_item.dest_index.fqn].tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was written in place."""


class ManifestWriter(FileSystemWriter):
    """Writes tensors as torch's FileSystemWriter does, and a manifest in place of its pickle.

    Args:
        path: a new directory.
        values: what is to be kept beside the tensors, of JSON types.
    """

    def __init__(self, path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._values = dict(values)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks, and read them back for their checksums: they are in the page cache still."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise ValueError(f"{item.index.fqn} is no tensor; a checkpoint holds tensors only.")
        results = []
        for result in super().write_data(plan, planner).wait():
            info = result.storage_data
            with open(Path(self.path) / info.relative_path, "rb") as file:
                file.seek(info.offset)
                left, crc = info.length, 0
                while left and (block := file.read(min(left, _BLOCK))):
                    left, crc = left - len(block), zlib.crc32(block, crc)
            results.append(replace(result, storage_data=Slice(info.relative_path, info.offset, info.length, crc)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, when all ranks have written their data."""
        slices: dict[MetadataIndex, Slice] = {r.index: r.storage_data for rank in results for r in rank}
        write_manifest(Path(self.path), metadata, slices, self._values)


class ManifestReader(StorageReader):
    """Reads what ``ManifestWriter`` wrote.

    Not torch's FileSystemReader, whose ``read_metadata`` unpickles and whose ``read_data`` takes bytes for objects.
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self._path = Path(path)
        self._manifest = read_manifest(path) if manifest is None else manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint, if one is given."""
        if checkpoint_id is not None:
            self.__init__(checkpoint_id)  # type: ignore[misc]

    def read_metadata(self) -> Metadata:  # with **kwargs torch would try a file per rank, too
        """What the manifest says."""
        return self._manifest.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read blocks, check them, and copy them to where they belong."""
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise ValueError(f"{item.dest_index.fqn} is no tensor; a checkpoint holds tensors only.")
            tensor = self._load(item.storage_index)
            target = planner.resolve_tensor(item).detach()
            target.copy_(_block(tensor, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load(self, index: MetadataIndex) -> Tensor:
        saved = self._manifest.metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        where: Slice = self._manifest.metadata.storage_data[index]
        with open(self._path / where.file, "rb") as file:
            file.seek(where.start)
            data = file.read(where.length)
        if len(data) != where.length or zlib.crc32(data) != where.crc32:
            raise ValueError(
                f"{self._path / where.file} is damaged: the {where.length} bytes from {where.start} on, of "
                f"{index.fqn}, do not have the checksum {where.crc32} of the manifest. Load another checkpoint."
            )
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch's own message would advise weights_only=False
            raise ValueError(
                f"{self._path / where.file} does not hold a tensor at {where.start}, where {index.fqn} should be "
                f"({type(error).__name__}); it was not written by krylov_descent, and nothing of it was run."
            ) from None
        sizes = next(c.sizes for c in saved.chunks if c.offsets == index.offset)
        if type(tensor) is not Tensor or (tensor.dtype, tensor.shape) != (saved.properties.dtype, sizes):
            raise ValueError(
                f"{self._path / where.file} holds {short(tensor)} at {where.start}, where {index.fqn} should have a "
                f"block of {tuple(sizes)} numbers of {saved.properties.dtype}. Load another checkpoint."
            )
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a manifest."""
        return (Path(checkpoint_id) / MANIFEST).is_file()


def _block(tensor: Tensor, offset: torch.Size, shape: torch.Size) -> Tensor:
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]
