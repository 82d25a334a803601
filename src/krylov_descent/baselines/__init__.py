"""The methods that KSD is measured against, on the same closures, sets and curvature products."""

from krylov_descent.baselines.hessian_free import HessianFree, HessianFreeReport
from krylov_descent.baselines.nonlinear_cg import NonlinearCG

__all__ = ["HessianFree", "HessianFreeReport", "NonlinearCG"]
