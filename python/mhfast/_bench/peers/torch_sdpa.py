"""PyTorch's fused attention: scaled_dot_product_attention forward, autograd backward.

W is folded into the queries, tokens are keys and values: A X = attention(X W_h, X, X) with scale 1.
Nothing of size T x T is stored.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..problem import BenchProblem
from . import Formulation
from . import torch_formulas as formulas
from .torch_formulas import Tensor


def heads_as_batch(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Loss, attention called on (n, H, T, d); keys and values are the same for all heads."""
    n, T, d = X.shape
    H = len(W)
    queries = formulas.folded(X, W).view(n, T, H, d).transpose(1, 2)
    tokens = X[:, None].expand(n, H, T, d)
    AX = functional.scaled_dot_product_attention(queries, tokens, tokens, scale=1.0)
    AX = AX.transpose(1, 2).reshape(n, T * H * d)
    return formulas.logistic(torch.mv(AX, formulas.rows_first(U).view(-1)) / H**0.5, y)


def heads_as_queries(W: Tensor, U: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Loss, attention called on (n, 1, T H, d): the rows of all heads as one head's queries."""
    tokens = X[:, None]
    queries = formulas.folded(X, W)[:, None]
    AX = functional.scaled_dot_product_attention(queries, tokens, tokens, scale=1.0).reshape(
        len(X), -1
    )
    return formulas.logistic(torch.mv(AX, formulas.rows_first(U).view(-1)) / len(W) ** 0.5, y)


def gradients(problem: BenchProblem, threads: int) -> list[Formulation]:
    """Both ways of passing the heads."""
    torch.set_num_threads(threads)
    return [
        formulas.call(name, formulas.differentiated(loss), problem)
        for name, loss in (
            ("heads as queries", heads_as_queries),
            ("heads as batch", heads_as_batch),
        )
    ]
