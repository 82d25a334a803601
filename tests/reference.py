"""Slow, plain oracles: dense matrices by one gradient per sample or output, and the paper's algorithms as printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.krylov.bfgs import bfgs

Closure = Callable[[Any], Any]


def flat(tensors: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=p.dtype) if t is None else t.detach().reshape(-1)
            for t, p in zip(tensors, params, strict=True)
        ]
    )


def gradient(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    return flat(torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True), params)


def _outputs(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, dict) else list(outputs)


def dense_ggn(loss: Tensor, outputs: Any, params: Sequence[Tensor]) -> Tensor:
    """Jᵀ H_L J with J and H_L written out row by row."""
    zs = _outputs(outputs)
    J = torch.stack([gradient(e, params) for z in zs for e in z.reshape(-1)])
    dL = torch.autograd.grad(loss, zs, create_graph=True)
    H = torch.stack(
        [
            flat(torch.autograd.grad(e, zs, retain_graph=True, allow_unused=True), zs)
            if e.requires_grad
            else torch.zeros(len(J), dtype=J.dtype)
            for d in dL
            for e in d.reshape(-1)
        ]
    )
    return J.T @ H @ J


def dense_hessian(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    g = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    rows = []
    for d, p in zip(g, params, strict=True):
        for k in range(p.numel()):
            e = None if d is None else d.reshape(-1)[k]
            rows.append(gradient(e, params) if e is not None and e.requires_grad else torch.zeros(len_of(params)).to(p))
    return torch.stack(rows)


def len_of(params: Sequence[Tensor]) -> int:
    return sum(p.numel() for p in params)


def per_sample_gradients(closure: Closure, data: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """[N, P]: the closure on one sample at a time, as the definition has it."""
    n = len(data[0])
    return torch.stack([gradient(closure(tuple(t[i : i + 1] for t in data))[0], params) for i in range(n)])


def algorithm_2(H: Tensor, D: Tensor, g: Tensor, d_prev: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """As printed, with dense H and modified Gram–Schmidt. V has columns v_1 … v_{K+1}."""
    P = len(g)
    v = [torch.empty(0)] * (K + 2)  # 1-based, as in the paper
    h = torch.zeros(K + 2, K + 2, dtype=g.dtype)
    v[1] = g / D
    v[1] = v[1] / torch.sqrt(v[1] @ v[1])
    for k in range(1, K + 2):
        w = H @ v[k]
        u = torch.zeros(P, dtype=g.dtype)
        if k < K:
            u = w / D
        elif k == K:
            u = d_prev
        for j in range(1, k + 1):
            h[k, j] = w @ v[j]
            u = u - (u @ v[j]) * v[j]
        if k <= K:
            v[k + 1] = u / torch.sqrt(u @ u)
    lower = torch.tril(h[1:, 1:])
    return torch.stack(v[1:], dim=1), lower + torch.tril(lower, -1).T


def algorithm_3(
    f_and_g: Callable[[Tensor, Any], tuple[float, Tensor]],
    fisher_diagonal: Callable[[Tensor, Any], Tensor],
    curvature: Callable[[Tensor, Any], Tensor],
    theta: Tensor,
    sets: Sequence[tuple[Any, Any, Any]],
    K: int,
    eps_D: float,
    eps_H: float,
    tolerance: float,
    noise: float,
    iterations: int,
    evaluations: int,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """As printed; returns θ, and V and H̄ of each step."""
    d_prev = torch.zeros_like(theta)
    d_prev[0] = 1.0
    bases, reduced = [], []
    for A, B, C_set in sets:
        g = f_and_g(theta, A)[1]
        D = fisher_diagonal(theta, A)
        D = torch.maximum(D, eps_D * D.max())
        V, H_bar = algorithm_2(curvature(theta, B), D, g, d_prev, K)
        lam, Q = torch.linalg.eigh(H_bar)
        H_hat = Q @ torch.diag(torch.maximum(lam, eps_H * lam.abs().max())) @ Q.T
        C = torch.linalg.cholesky(H_hat)
        V_bar = V @ torch.linalg.inv(C).T
        at = theta

        def fun(a: Tensor, at: Tensor = at, V_bar: Tensor = V_bar, batch: Any = C_set) -> tuple[float, Tensor]:
            f, grad = f_and_g(at + V_bar @ a, batch)
            return f, V_bar.T @ grad

        a = bfgs(
            fun,
            torch.zeros(K + 1, dtype=torch.float64),
            max_iterations=iterations,
            max_evaluations=evaluations,
            tolerance=tolerance,
            noise=noise,
        ).x
        d_prev = V_bar @ a
        theta = theta + d_prev
        bases.append(V)
        reduced.append(H_bar)
    return theta, bases, reduced
