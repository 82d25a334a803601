"""The memory of a step of GaussNewtonFlow, by phase and owner."""

from __future__ import annotations

from krylov_descent.curvature.product import forward_bytes
from krylov_descent.flow.sketch import expected_bytes
from krylov_descent.flow.step import FlowSettings
from krylov_descent.objective.objective import Objective
from krylov_descent.safety.peak import Phases, Vectors
from krylov_descent.samples.interface import Microbatch


def flow_phases(objective: Objective, settings: FlowSettings, batch: Microbatch | None) -> Phases:
    """Return the bytes of a rank by phase and owner, for the first number of rows, the graph of ``batch`` included.

    J and its QR are shared by the ranks; the triangle [m, m] of each rank is sent to all.
    """
    parameters, comm = objective.parameters, objective.comm
    vectors, rows, several = Vectors(parameters, comm), settings.rows, comm.ranks > 1
    triangles = 8 * rows**2 * (2 * comm.ranks if several else 1)
    sketch = {
        **vectors.always,
        "sketch": expected_bytes(rows, parameters.numel, parameters.dtype) // comm.ranks,
        "triangles": triangles,
        "gradient and directions": vectors.parts(3) + vectors.whole(1),
        "graphs": forward_bytes(objective, batch),
    }
    return {"sketch": sketch}
