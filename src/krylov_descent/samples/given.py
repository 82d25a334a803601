"""The argument ``sets``: a sample policy, or a DataLoader, from whose data set ``Subsets`` are drawn."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from krylov_descent.samples.interface import FullBatch, SamplePolicy
from krylov_descent.samples.subsets import Subsets

_OF_LOADER: WeakKeyDictionary[DataLoader[Any], Subsets] = WeakKeyDictionary()


def policy_of(sets: Any) -> SamplePolicy:
    """Return the sample policy; that of a DataLoader is the same at every call, with its worker processes.

    Raises:
        ValueError: it is neither, or a DataLoader whose samples cannot be drawn by index.

    Example:
        >>> import torch
        >>> loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(100, 3)), batch_size=32, shuffle=True)
        >>> policy_of(loader)
        Subsets(100 samples, batch_size=32, fraction=None, gradient_fraction=1.0, seed=0)
        >>> policy_of(loader) is policy_of(loader)
        True
    """
    if sets is None:
        return FullBatch()
    if isinstance(sets, SamplePolicy):
        return sets
    if not isinstance(sets, DataLoader):
        raise ValueError(f"sets is a {type(sets).__name__}; pass a DataLoader, or Subsets(train_set).")
    if sets not in _OF_LOADER:
        _OF_LOADER[sets] = _subsets(sets)
    return _OF_LOADER[sets]


def _subsets(loader: DataLoader[Any]) -> Subsets:
    data, sampler = loader.dataset, loader.sampler
    ordinary = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not isinstance(data, IterableDataset):  # which Subsets refuses in words
        for name, own in (
            ("sampler", None if ordinary else sampler),
            ("batch_sampler", None if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler or loader),
            ("worker_init_fn", loader.worker_init_fn),
        ):
            if own is not None:
                raise ValueError(
                    f"The DataLoader has a {name} of its own ({type(own).__name__}), which sets of random samples do "
                    "not use. Pass Subsets(train_set), with the samples to train on in the data set "
                    "(torch.utils.data.Subset(train_set, indices))."
                )
    collate_fn = None if loader.collate_fn is default_collate else loader.collate_fn
    size = loader.batch_size or 1
    return Subsets(data, batch_size=size, collate_fn=collate_fn, num_workers=loader.num_workers)
