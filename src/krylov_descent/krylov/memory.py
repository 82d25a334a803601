"""The memory of a step of KSD, by phase and owner."""

from __future__ import annotations

from krylov_descent.curvature.product import forward_bytes
from krylov_descent.distributed import part_length
from krylov_descent.krylov.step import Strategies
from krylov_descent.objective.objective import Objective
from krylov_descent.safety.budget import Need
from krylov_descent.safety.peak import Phases, Vectors
from krylov_descent.samples.interface import Microbatch


def ksd_phases(objective: Objective, strategies: Strategies, batch: Microbatch | None) -> Phases:
    """Return the bytes of a rank by phase and owner, graphs of ``batch`` included.

    The basis has D and a product that overwrites g (beside a copy of g, where the search needs it), and whole: the
    result of autograd, and on several ranks the row to be multiplied and the product. The search has whole: origin and
    direction of the line, the gradient by autograd, and the sum of those.
    """
    parameters, comm = objective.parameters, objective.comm
    preconditioner, builder = strategies.preconditioner, strategies.builder
    vectors, several = Vectors(parameters, comm), comm.ranks > 1
    rows = min(builder.krylov_dim, parameters.count) + 1 + builder.earlier
    length = part_length(comm, parameters.numel)
    basis = Need(0, rows, length, parameters.dtype, parameters.device, builder.storage).basis
    kept = vectors.parts(strategies.search.needs_gradient)
    always = {**vectors.always, "basis": basis, "earlier steps": vectors.parts(builder.earlier)}
    held, one = preconditioner.bytes_held(objective), vectors.parts(1)
    graph, graphs = forward_bytes(objective, batch), 0 if batch is None else builder.graph_bytes(objective, batch)
    of_step = {"factors": preconditioner.bytes_in_step(objective), "gradient": one, "graphs": graph}
    products = {"products": vectors.whole(1 + 2 * several), "diagonal": one}
    of_basis = {"factors": held, "gradient": one + kept, **products, "graphs": graphs}
    of_search = {"factors": held, "gradient": kept, "lines of the search": vectors.whole(4), "graphs": graph}
    named = {"preconditioner": of_step, "basis": of_basis, "search": of_search}
    return {phase: {**always, **owners} for phase, owners in named.items()}
