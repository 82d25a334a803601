"""Loads batches of samples by index: straight from tensors, or from any map-style dataset by a DataLoader."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

Device: TypeAlias = torch.device | str | int | None
Indices: TypeAlias = range | Tensor
PartsOf: TypeAlias = Callable[[int], Sequence[Indices]]  # chunk ↦ its indices, and the indices of its parts


def source_of(
    data: Any, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int, device: Device, seed: int
) -> tuple[Source, int]:
    """Return a loader of batches of the data, and the number of samples.

    Raises:
        ValueError: the data cannot be indexed by sample.
    """
    tensors = _tensors_of(data)
    size = _length_of(data, tensors)
    if tensors is not None and collate_fn is None:
        return TensorSource(tensors, isinstance(data, Tensor), device), size
    dataset = TensorDataset(*tensors) if tensors and isinstance(data, tuple | list) else data
    return DatasetSource(_Batches(dataset, collate_fn or default_collate), num_workers, device, seed), size


class TensorSource:
    """Makes batches by indexing tensors: views for ranges, copies for other indices."""

    def __init__(self, tensors: Sequence[Tensor], single: bool, device: Device) -> None:
        self._tensors, self._single, self._device = tensors, single, device

    def load(self, parts_of: PartsOf, chunks: range) -> Iterator[list[Any]]:
        """Yield, for each chunk, the batch of each of its parts."""
        for chunk in chunks:
            yield [self._batch(indices) for indices in parts_of(chunk)]

    def fingerprint(self) -> int:
        """Return a number that depends on every entry and on its place."""
        return sum((i + 1) * tensor_bits(tensor) for i, tensor in enumerate(self._tensors)) % _MODULUS

    def restart(self) -> None:
        """Do nothing: there are no workers."""

    def _batch(self, indices: Indices) -> Any:
        if isinstance(indices, range):
            batch = tuple(tensor[indices.start : indices.stop] for tensor in self._tensors)
        else:
            at = {t.device: indices.to(t.device, non_blocking=t.device.type != "mps") for t in self._tensors}
            batch = tuple(tensor[at[tensor.device]] for tensor in self._tensors)
        return _placed(batch[0] if self._single else batch, self._device)


class DatasetSource:
    """Makes batches by one DataLoader, whose workers serve every set of every step, until one of them fails."""

    def __init__(self, batches: _Batches, num_workers: int, device: Device, seed: int) -> None:
        # A tensor from a worker lies in shared memory and holds a file descriptor; keeping B and C would exhaust them.
        self._placed = functools.partial(_placed, device=device, unshare=num_workers > 0)
        self._pending = _Pending()
        self._turn = 0
        self._workers = num_workers
        # The loader draws a seed at each iteration; with its own generator the global one stays untouched.
        generator = torch.Generator("cpu").manual_seed(seed % 2**63)
        self._new_loader = functools.partial(
            DataLoader[list[Any]],
            cast(Dataset[list[Any]], batches),
            batch_size=None,  # one item of _Batches is collated already
            sampler=self._pending,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=generator,
        )
        self._loader = self._new_loader()

    def load(self, parts_of: PartsOf, chunks: range) -> Iterator[list[Any]]:
        """Yield, for each chunk, the batch of each of its parts."""
        turn = 0
        for done in range(len(chunks)):
            if turn == 0 or turn != self._turn:
                # Workers serve one iteration at a time, and starting another discards their prefetched batches:
                # an interrupted iteration restarts at its own next chunk.
                self._turn += 1
                turn = self._turn
                self._pending.restart = functools.partial(map, lambda i: _lists(parts_of(i)), chunks[done:])
                loaded = self._begun()
            yield [self._placed(batch) for batch in self._next(loaded)]

    def fingerprint(self) -> int:
        """Return 0: samples are not loaded for it."""
        return 0

    def restart(self) -> None:
        """Use new workers from now on: Ctrl-C ends workers, and one that is cut short leaves answers behind."""
        self._turn += 1
        self._loader = self._new_loader()

    def _begun(self) -> Iterator[list[Any]]:
        try:
            with torch.device("cpu"):  # where the generator is, whatever the default device
                return iter(self._loader)
        except BaseException:
            self.restart()
            raise

    def _next(self, loaded: Iterator[list[Any]]) -> list[Any]:
        try:
            return next(loaded)
        except BaseException as error:
            if isinstance(error, Exception) and "Caught" in str(error):  # an error of the data set: workers go on
                raise
            self.restart()
            if self._workers and isinstance(error, (ConnectionError, EOFError)):
                raise RuntimeError(
                    f"A worker process that loads samples was lost ({type(error).__name__}: {error}). The next step "
                    "starts new ones; if they are lost again, num_workers=0 shows why."
                ) from error
            raise


class _Pending:
    """The sampler of the DataLoader: the requests of the iteration that starts next."""

    restart: Callable[[], Iterator[list[list[int]]]]

    def __iter__(self) -> Iterator[list[list[int]]]:
        return self.restart()


class _Batches:
    """The dataset of the DataLoader: an item is a batch, and batches of parts of the same samples."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn

    def __getitem__(self, parts: list[list[int]]) -> list[Any]:
        whole = parts[0]
        if callable(getattr(self._dataset, "__getitems__", None)):
            samples = self._dataset.__getitems__(whole)
        else:
            samples = [self._dataset[index] for index in whole]
        sample_of = dict(zip(whole, samples, strict=True))
        return [self._collate_fn([sample_of[index] for index in part]) for part in parts]


Source: TypeAlias = TensorSource | DatasetSource


_MODULUS = 2**52 - 1  # whole numbers below it are exact in float64
_AT_ONCE = 2**20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_bits(tensor: Tensor) -> int:
    """Return Σ (i + 1)·bits of entry i, in words of 32 bits; sums wrap around, alike on all ranks."""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return 0
    rows, total, start = max(1, _AT_ONCE * len(tensor) // tensor.numel()), 0, 0
    for first in range(0, len(tensor), rows):
        part = tensor[first : first + rows].detach().resolve_conj().resolve_neg()
        part = (torch.view_as_real(part) if part.is_complex() else part).reshape(-1)
        words = part.view(_WORDS[part.element_size()]).to(torch.int64)
        words = words ^ (words >> 32)  # else sign and exponent of float64 would be lost
        total += start * int(words.sum()) + int((words * torch.arange(1, len(words) + 1, device=words.device)).sum())
        start += len(words)
    return total % _MODULUS


def _lists(parts: Sequence[Indices]) -> list[list[int]]:
    return [list(part) if isinstance(part, range) else part.tolist() for part in parts]


def _unchanged(batches: list[Any]) -> list[Any]:
    return batches  # a function of the module, so that workers can be spawned with it


def _placed(batch: Any, device: Device, unshare: bool = False) -> Any:
    """Return the batch with its tensors on the device, and out of shared memory if ``unshare``."""
    if device is None and not unshare:
        return batch
    if isinstance(batch, PackedSequence):  # a named tuple that moves only some of its tensors
        return batch if device is None else cast(Any, batch).to(device)
    if isinstance(batch, Tensor):
        tensor: Any = batch if device is None else batch.to(device)
        return tensor.clone() if unshare and tensor.device.type == "cpu" and tensor.is_shared() else tensor
    if isinstance(batch, MutableMapping):
        placed = copy.copy(batch)  # keeps the class and its attributes
        placed.update({name: _placed(value, device, unshare) for name, value in batch.items()})
        return placed
    if isinstance(batch, tuple | list):
        values = [_placed(value, device, unshare) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def select_samples(batch: Any, samples: Tensor, n: int) -> Any:
    """Return some samples of a batch of n: rows of its tensors, also inside tuples, lists and mappings.

    Raises:
        ValueError: the batch has a tensor without a row for each sample, or an object that is no container of tensors.

    Example:
        >>> select_samples({"x": torch.arange(4), "scale": 0.5}, torch.tensor([0, 3]), 4)
        {'x': tensor([0, 3]), 'scale': 0.5}
    """
    if isinstance(batch, Tensor) and batch.ndim and len(batch) == n and batch.layout == torch.strided:
        return batch[samples.to(batch.device)]
    if isinstance(batch, int | float | str | None):
        return batch
    if isinstance(batch, MutableMapping):
        part = copy.copy(batch)  # keeps the class and its attributes
        part.update({name: select_samples(value, samples, n) for name, value in batch.items()})
        return part
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        values = [select_samples(value, samples, n) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    raise ValueError(f"A batch of {n} samples has a {type(batch).__name__} that is not one row for each.")


def same_values(a: Any, b: Any) -> bool:
    """Return whether two batches hold the same numbers, in tensors, numbers and containers of them.

    Example:
        >>> same_values({"x": torch.ones(2), "name": "a"}, {"x": torch.ones(2), "name": "b"})
        True
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.layout != torch.strided or a.is_quantized:
            return a.shape == b.shape
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_values, a, b))
    return not isinstance(a, int | float) or a == b or a != a


def _tensors_of(data: Any) -> tuple[Tensor, ...] | None:
    """Return the tensors to be indexed directly, or None for a dataset."""
    if isinstance(data, Tensor):
        return (data,)
    if type(data) is TensorDataset:  # a subclass may redefine its samples
        return data.tensors
    # A list without any tensor may be a list of samples; a tuple stands for the columns of the data.
    if isinstance(data, tuple) or (isinstance(data, list) and any(isinstance(column, Tensor) for column in data)):
        foreign = sorted({type(column).__name__ for column in data if not isinstance(column, Tensor)})
        if foreign:
            raise ValueError(
                f"data is a {type(data).__name__} that holds {', '.join(foreign)} where tensors are needed. "
                "Convert with torch.as_tensor, or pass a Dataset whose items are samples."
            )
        return tuple(data)
    return None


def _length_of(data: Any, tensors: tuple[Tensor, ...] | None) -> int:
    if tensors:
        lengths = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
        if None in lengths or len(set(lengths)) > 1:
            raise ValueError(
                f"The tensors have shapes {[tuple(tensor.shape) for tensor in tensors]}, but the first "
                "dimension, which counts the samples, must be the same. Reshape them, or pass a Dataset."
            )
    elif isinstance(data, IterableDataset):
        raise ValueError(
            f"data is an IterableDataset ({type(data).__name__}): its samples cannot be looked up by index. "
            "Pass a map-style Dataset with __len__ and __getitem__, for example a list of its samples."
        )
    elif isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ValueError(
            f"data is a {type(data).__name__}, which cannot be indexed by 0, …, len(data)−1. Pass tensors or "
            "a map-style Dataset: for a DataLoader its dataset, for a mapping one whose items are mappings."
        )
    length = len(tensors[0]) if tensors else len(data)
    if length < 1:
        raise ValueError(f"data holds {length} samples. Pass at least one.")
    return length
