"""Nearest points of balls in norms of entries and of singular values, in the Frobenius norm."""

from __future__ import annotations

import numpy as np

from .model import Array

HALVINGS = 64
"""Number of times an interval is halved: more than float64 has bits."""


def projected_in(norm: str | float, x: Array, radius: float, *, sphere: bool = False) -> Array:
    """Return the nearest point of norm at most `radius`; for the sphere x scaled to norm `radius`.

    Parameters
    ----------
    norm : "nuclear", "spectral" (of one matrix) or the p of a norm of all entries
    x : array
    radius : float
    sphere : bool
    """
    if isinstance(norm, str):
        U, s, Vt = np.linalg.svd(x, full_matrices=False)
        p = 1.0 if norm == "nuclear" else np.inf
        return np.asarray((U * projected_in(p, s, radius, sphere=sphere)) @ Vt)
    size = np.abs(x)
    largest = size.max(initial=0.0)
    length = 0.0 if largest == 0.0 else largest * _power_norm(size / largest, norm)
    if length == 0.0 or (length <= radius and not sphere):
        return x
    if sphere or norm == 2.0:
        return np.asarray(x * (radius / length))
    if norm == np.inf:
        return np.clip(x, -radius, radius)
    if norm == 1.0:
        falling = np.sort(size, axis=None)[::-1]
        means = (np.cumsum(falling) - radius) / np.arange(1, size.size + 1)
        return np.asarray(np.sign(x) * np.maximum(size - means[falling > means][-1], 0.0))
    low, high = 1e-12, 1.0  # the multiplier, in units of the radius
    while _power_norm(_shrunk(size / radius, high, norm), norm) > 1.0:
        high *= 2.0
    for _ in range(HALVINGS + 40):  # the interval may be that many powers of 2 wide
        middle = (low + high) / 2.0
        outside = _power_norm(_shrunk(size / radius, middle, norm), norm) > 1.0
        low, high = (middle, high) if outside else (low, middle)
    return np.asarray(np.sign(x) * radius * _shrunk(size / radius, high, norm))


def _power_norm(x: Array, p: float) -> float:
    return float(x.max() if p == np.inf else (x**p).sum() ** (1.0 / p))


def _shrunk(size: Array, multiplier: float, p: float) -> Array:
    """Return the z in [0, size] with z + multiplier z^(p-1) = size."""
    low, high = np.zeros_like(size), size
    for _ in range(HALVINGS):
        z = (low + high) / 2.0
        above = z + multiplier * z ** (p - 1.0) > size
        low, high = np.where(above, low, z), np.where(above, z, high)
    return (low + high) / 2.0
