"""A keyed permutation of the sample indices, computed one index at a time."""

from __future__ import annotations

import hashlib
import math
import struct

import torch
from torch import Tensor

_LARGEST = 2**62  # beyond it the squared side a² leaves int64
_MINIMUM_ROUNDS = 8


def permute(positions: Tensor, n: int, *key: int) -> Tensor:
    """Map positions of {0, …, n−1} through the bijection of that set chosen by ``key``.

    Nothing of length n is ever stored: cost and memory depend on ``positions`` alone. The result depends on
    nothing but the arguments, so it is the same on every device, process and platform.

    The bijection is the generalised Feistel cipher of Black & Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002. Symbols:

    - n: the number of elements; a = ⌈√n⌉: the side of the square Z_a × Z_a that covers them.
    - (L, R): the digits of a value x = a·L + R, both in Z_a.
    - F_j: the function of round j, a hash of R and of a 64-bit round key derived from ``key``.
    - One round: (L, R) ← (R, (L + F_j(R)) mod a), which is invertible whatever F_j is.
    - Cycle-walking: the cipher permutes {0, …, a²−1}; it is applied again to a value ≥ n until the value is
      below n. Fewer than 2a of the a² values need it.

    Args:
        positions: integers in [0, n), any shape and device.
        n: the size of the set, at most 2⁶².
        key: any number of integers of any size and sign; each tuple of them chooses its own bijection.

    Returns:
        An int64 tensor in the shape and on the device of ``positions``.

    Raises:
        ValueError: if ``n`` or a position is out of range, or ``positions`` does not hold integers.

    Example:
        >>> import torch

        >>> seed, iteration = 0, 7
        >>> sorted(permute(torch.arange(10), 10, seed, iteration).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> bool((permute(torch.arange(5), 10**12, seed, iteration) < 10**12).all())
        True
    """
    if not 1 <= n <= _LARGEST:
        raise ValueError(f"n is {n}, but a permutation needs 1 <= n <= 2**62; pass the number of samples.")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ValueError(f"positions are {positions.dtype}, not integers; pass for example torch.arange(n).")
    values = positions.to(torch.int64)
    if values.numel():
        lowest, highest = int(values.min()), int(values.max())
        if lowest < 0 or highest >= n:
            raise ValueError(f"positions span {lowest} to {highest}, but must lie in [0, {n}); pass only such.")
    if n == 1:
        return torch.zeros_like(values)

    a = math.isqrt(n - 1) + 1
    round_keys = _round_keys(_number_of_rounds(a), key)
    values = _encipher(values, a, round_keys)
    while bool((walking := values >= n).any()):
        values = values.masked_scatter(walking, _encipher(values[walking], a, round_keys))
    return values


def _number_of_rounds(a: int) -> int:
    # The distance of a pair of values from a uniform pair falls as a^(−rounds/2): this keeps it below 2⁻²⁰.
    bits = a.bit_length() - 1  # ⌊log₂ a⌋, in integers so that no platform rounds it differently
    return max(_MINIMUM_ROUNDS, -(-40 // bits))


def _round_keys(rounds: int, key: tuple[int, ...]) -> tuple[int, ...]:
    # Hexadecimal, because Python limits the digits of an integer's decimal form.
    text = ",".join(f"{int(part):x}" for part in key)
    return struct.unpack(f"<{rounds}q", hashlib.shake_128(text.encode()).digest(8 * rounds))


def _encipher(values: Tensor, a: int, round_keys: tuple[int, ...]) -> Tensor:
    left, right = values // a, values % a
    for round_key in round_keys:
        left, right = right, (left + _hash(right, round_key)) % a
    return left * a + right


def _hash(digits: Tensor, round_key: int) -> Tensor:
    """Mix by the finaliser of SplitMix64; 62 bits are kept, so that adding a digit cannot overflow."""
    mixed = digits + round_key
    mixed = (mixed ^ _shift_right(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(0x94D049BB133111EB)
    return _shift_right(mixed ^ _shift_right(mixed, 31), 2)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    # >> of a signed tensor copies the sign bit downwards; the mask makes the shift logical.
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    # The int64 with the same bits as this unsigned word: products of tensors wrap modulo 2⁶⁴.
    return word - (1 << 64) if word >= 1 << 63 else word
