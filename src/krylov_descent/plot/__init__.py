"""Pictures of runs: the loss, the time by phase, and the curvature that was seen.

Needs matplotlib, which is imported when something is drawn: ``pip install 'krylov-descent[plot]'``. Each function takes
``reports``, ``StepReport``s or dicts as of ``read``, and raises a ValueError if there are none. It draws into the axes
``ax``, or into a new figure of pyplot's, and neither shows nor saves anything:
``overview(reports).savefig("overview.png", dpi=150)``. In a notebook end the line with a semicolon, or the figure of
``overview`` appears twice.
"""

from krylov_descent.plot.pictures import coefficients, convergence, overview, phases, ritz
from krylov_descent.plot.records import read

__all__ = ["coefficients", "convergence", "overview", "phases", "read", "ritz"]
