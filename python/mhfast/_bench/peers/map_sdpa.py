"""Cells of the map with PyTorch's fused attention: scaled_dot_product_attention, and autograd.

Queries Z W_h and keys X, or factors of both; values are X of a classifier, X V_h of a layer.  It
has no weights, and no second derivatives.
"""

from __future__ import annotations

from torch.nn import functional

from ..cells import CellProblem
from . import Formulation, UnavailableError, natural
from .map_torch import (
    OUT_OF_PLACE,
    Loss,
    configure,
    differentiated,
    formulation,
    without_autograd,
)
from .natural import Data, Tensor, Theta
from .operations import OF_WEIGHTS, VALUES, Extra, Found, natural_loss


def ways(problem: CellProblem, threads: int) -> list[Formulation]:
    """Return the one way of calling it.

    Raises
    ------
    UnavailableError
        The operation needs weights or second derivatives.
    """
    operation = problem.cell.operation
    if operation in ("attention", "hvp", "ntk") or problem.record in OF_WEIGHTS:
        raise UnavailableError("has no weights and no second derivatives")
    configure(threads)
    causal = problem.kind.causal and not problem.last

    def outputs(theta: Theta, data: Data) -> tuple[Tensor, Tensor]:
        Q, K = natural.projected(theta, data)
        values = natural.values(theta, data)
        batch = (*data.X.shape[:-2], max(a.shape[-3] for a in (Q, K, values)))
        Q, K, values = (a.expand(*batch, *a.shape[-2:]) for a in (Q, K, values))
        hidden = None if data.hidden is None or causal else data.hidden[:, None]
        attended = functional.scaled_dot_product_attention(
            Q, K, values, attn_mask=hidden, is_causal=causal, scale=1.0
        )
        if data.real is not None:
            attended = attended * data.real[:, None]
        return natural.read_out(theta, attended), None

    if operation in VALUES:

        def values(theta: Theta, data: Data, _extra: Extra) -> Found:
            return {"outputs": outputs(theta, data)[0]}

        function = without_autograd(values)
    else:
        loss: Loss = lambda variables, data: natural_loss(  # noqa: E731
            OUT_OF_PLACE, problem, variables, data, outputs
        )
        function = differentiated(loss, problem)
    return [formulation("autograd", function, problem, ordinary=True)]
