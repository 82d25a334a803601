"""Krylov Subspace Descent (Vinyals & Povey 2011) for PyTorch."""
