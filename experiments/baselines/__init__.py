"""The methods that KSD is measured against, on the same closures, sets and curvature products."""

from experiments.baselines.hessian_free import HessianFree, HessianFreeReport
from experiments.baselines.nonlinear_cg import NonlinearCG

__all__ = ["HessianFree", "HessianFreeReport", "NonlinearCG"]
