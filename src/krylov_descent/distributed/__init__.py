"""How ranks talk: a small protocol, and its single-process form, the identity."""

from krylov_descent.distributed.comm import Comm, SingleProcess

__all__ = ["Comm", "SingleProcess"]
