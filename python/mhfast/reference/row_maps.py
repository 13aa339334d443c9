"""Row maps: how the logits S of a row become its attention weights A.

    softmax     exp(S) / Σ exp(S)
    softmax1    exp(S) / (1 + Σ exp(S))
    linear      S / N
    relu        max(S, 0) / N
    sigmoid     1 / (1 + exp(-S)), with `normalize` divided by N
    hardmax     1 / k on the k keys with the largest logit of the row

over the visible keys, N of them; the weight of an invisible key is 0.  N is left out where
`normalize` is false; by default it is for sigmoid alone.

Zhang, Frei, Bartlett, "Trained transformers learn linear models in-context" (JMLR 2024) and Bai,
Chen, Wang, Xiong, Mei, "Transformers as statisticians" (NeurIPS 2023) divide linear and relu
attention by the number of tokens, Wortsman, Lee, Gilmer, Kornblith, "Replacing softmax with ReLU in
vision transformers" (2023) by the sequence length.

Derivatives are products with D and moves with Ȧ, as `gradients` and `hessian` have them for
softmax.  For maps f of entries they are D = f'(S)∘C / N and Ḋ = (f''(S)∘Ṡ∘C + f'(S)∘Ċ) / N.
softmax1 is softmax with a further logit 0 of the coefficient 0, here a column in front, left out at
the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Entries(NamedTuple):
    """A map of entries: f, f' and f'', and whether the weights are divided by the tokens."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    curvature: Callable[[Array], Array]
    by_tokens: bool


def _sigmoid(S: Array) -> Array:
    t = np.exp(-np.abs(S))
    return np.where(S > 0, 1.0, t) / (1.0 + t)


def _sigmoid_derivative(S: Array) -> Array:
    t = np.exp(-np.abs(S))
    return t / (1.0 + t) ** 2


def _sigmoid_curvature(S: Array) -> Array:
    t = np.exp(-np.abs(S))
    return t * (t - 1.0) * np.sign(S) / (1.0 + t) ** 3


ENTRIES = {
    "linear": Entries(lambda S: S, np.ones_like, np.zeros_like, True),
    "relu": Entries(
        lambda S: np.maximum(S, 0.0), lambda S: (S > 0.0).astype(float), np.zeros_like, True
    ),
    "sigmoid": Entries(_sigmoid, _sigmoid_derivative, _sigmoid_curvature, False),
}
"""The maps of entries by name; the others have formulas of their own."""


def tokens_seen(name: str, normalize: bool | None, visible: NDArray[np.bool_]) -> Array:
    """N of a map of entries (n,1,q,1): the visible keys of each row, at least 1, or 1."""
    by_tokens = ENTRIES[name].by_tokens if normalize is None else normalize
    count = visible.sum(axis=-1)[:, None, :, None]
    return np.maximum(count, 1.0) if by_tokens else np.ones(count.shape)


def hardmax(S: Array, visible: NDArray[np.bool_]) -> Array:
    """All weight on the largest logit of each row, shared among equal ones."""
    seen = np.broadcast_to(visible[:, None], S.shape)
    masked = np.where(seen, S, -np.inf)
    is_largest = seen & (masked == masked.max(axis=-1, keepdims=True))
    count = is_largest.sum(axis=-1, keepdims=True)
    A: Array = is_largest / np.maximum(count, 1)
    return A


def with_zero(S: Array) -> Array:
    """S with a column of zeros in front: the logits, or coefficients, of softmax1."""
    return np.concatenate([np.zeros_like(S[..., :1]), S], axis=-1)
