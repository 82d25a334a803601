"""Preconditioners, D in Algorithm 3: the interface, the Fisher diagonal, Kronecker factors."""
