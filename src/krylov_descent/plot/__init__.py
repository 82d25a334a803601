"""Plots of runs: the loss, the time by phase, and the curvature; and of the trial of a check.

They need matplotlib, which is imported on first use: ``pip install 'krylov-descent[plot]'``. Each function takes
``reports``, ``StepReport``s or the dicts of ``read``, and raises a ValueError if there are none. It draws into the axes
``ax``, or into a new pyplot figure, and neither shows nor saves it: ``overview(reports).savefig("overview.png")``. In a
notebook end the line with a semicolon, or the figure of ``overview`` appears twice.
"""

from krylov_descent.plot.pictures import coefficients, convergence, overview, phases, ritz, trial
from krylov_descent.plot.records import read

__all__ = ["coefficients", "convergence", "overview", "phases", "read", "ritz", "trial"]
