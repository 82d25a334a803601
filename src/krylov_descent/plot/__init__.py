"""Pictures of runs: what the loss did, where the time went, and what curvature was seen.

Needs matplotlib, which is imported when something is drawn: ``pip install 'krylov-descent[plot]'``. Functions draw into
the ``Axes`` they are given or into a new figure of pyplot's, and neither show nor save anything. In a notebook end the
line with a semicolon, or the figure of ``overview`` appears twice.
"""

from krylov_descent.plot.curves import convergence, phases, ritz
from krylov_descent.plot.heat import coefficients
from krylov_descent.plot.panels import overview
from krylov_descent.plot.records import read

__all__ = ["coefficients", "convergence", "overview", "phases", "read", "ritz"]
