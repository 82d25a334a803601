"""Which sets a step draws, from what is remembered of growth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from krylov_descent.data import Subsets
from krylov_descent.distributed import Comm
from krylov_descent.growing import Growing
from krylov_descent.memory import Memory
from krylov_descent.sets import FullBatch, StepSets


def drawing(sets: Subsets | None, iteration: int, krylov_dim: int, comm: Comm) -> Callable[[Memory], StepSets]:
    """→ this rank's share of the sets of one iteration; without sets, what the closure evaluates is all of them."""
    source = FullBatch() if sets is None else sets
    shard, of_shards = comm.shard_of_sets
    how: dict[str, Any] = {"krylov_dim": krylov_dim}
    how |= {"shard": shard, "of_shards": of_shards} if of_shards > 1 else {}

    def draw(memory: Memory) -> StepSets:
        more: dict[str, Any] = {"search_growth": memory.search_growth}
        if isinstance(source, Growing):
            more = {"search_growth": memory.growths}
            more["model_growth"] = 0 if memory.promise is None else int(memory.promise.doublings)
        return source.draw(iteration, **how, **more)

    return draw
