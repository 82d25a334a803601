"""Krylov Subspace Descent, the paper's Algorithms 2 and 3: step, subspace, search."""
