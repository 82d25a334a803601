"""Curvature products v → Hv on the set B: Algorithm 1 and its siblings, one file each."""

from krylov_descent.curvature.fisher import FisherGraph
from krylov_descent.curvature.gauss_newton import GaussNewtonGraph
from krylov_descent.curvature.hessian import HessianGraph
from krylov_descent.curvature.interface import MicrobatchGraph
from krylov_descent.curvature.product import CurvatureProduct

#: The names that ``KSD(curvature=...)`` takes.
CURVATURES: dict[str, type[MicrobatchGraph]] = {
    "ggn": GaussNewtonGraph,
    "hessian": HessianGraph,
    "fisher": FisherGraph,
}

__all__ = ["CURVATURES", "CurvatureProduct", "FisherGraph", "GaussNewtonGraph", "HessianGraph", "MicrobatchGraph"]
