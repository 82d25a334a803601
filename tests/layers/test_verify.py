"""When rules are compared, and what is believed afterwards."""

from __future__ import annotations

import torch

from krylov_descent.layers.verify import Found, Trust, compared, due


def test_rules_are_compared_less_and_less_often_but_never_never() -> None:
    assert [n for n in range(1, 260) if due(n)] == [1, 4, 16, 64, 128, 192, 256]


def test_what_was_refuted_once_stays_so() -> None:
    trust = Trust()
    assert not trust.judged([0])
    trust.learn(Found({0, 1}, set()))
    trust.learn(Found({1, 2}, {0}))
    trust.learn(Found({0}, set()))
    assert (trust.trusted, trust.refuted) == ({1, 2}, {0})
    assert trust.judged([0, 1, 2])
    assert not trust.judged([1, 3])


def test_zeros_and_overflows_tell_nothing() -> None:
    errors = {0: (1e-6, 1.0), 1: (1e-2, 1.0), 2: (0.0, 0.0), 3: (float("nan"), 1.0), 4: (1.0, float("inf"))}
    found = compared(((i, torch.tensor(e), torch.tensor(size)) for i, (e, size) in errors.items()), 1e-3)
    assert found == ({0}, {1})
