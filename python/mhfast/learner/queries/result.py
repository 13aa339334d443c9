"""What `learn_layer_by_queries` returns: a layer, the queries made, and whether to trust it."""

from __future__ import annotations

from dataclasses import dataclass

from ...models import Layer
from ..result import Certificate


@dataclass(frozen=True, eq=False, repr=False)
class QueryLearning:
    """The result of `mhfast.learn_layer_by_queries`.

    Attributes
    ----------
    layer : Layer or None
        The layer that was found, learnt or not; with biases, of tokens (x, 1) of dimension d + 1.
        None if none was found.
    learnt : bool
        Whether all decisive certificates hold and nothing is missing.
    heads : int
        The number of heads of `layer`, or as requested if there is none.
    held_out : float or None
        ‖F(X) - Y‖ / ‖Y‖ over inputs of T different tokens that nothing was learnt from.
    certificates : tuple of Certificate
    queries : int
        Inputs (T, d) that the oracle was asked, those of certificates included.
    asked : dict
        The same by part.
    noise : float
        Standard deviation of the noise of an output, as given, or as measured by asking again.
    standard_error : float or None
        Where there is noise: the expected ‖error‖ / ‖parameters‖ over all W and V together.
    size : float
        Norm of the typical tokens that were asked.
    method : str or None
        How the heads were found: gradients, second derivatives, or random starts.
    seconds : float
    missing : str or None
        Why nothing more could be learnt.

    Examples
    --------
    >>> import mhfast as mh
    >>> secret = mh.Layer.gaussian(2, 5, 4, std=0.3, seed=0)
    >>> result = mh.learn_layer_by_queries(secret, d=5, T=2, heads=2)
    >>> result.verdict.partition(",")[0]
    'learnt'
    >>> sum(result.asked.values()) == result.queries, result.held_out < 1e-8
    (True, True)
    """

    layer: Layer | None
    learnt: bool
    heads: int
    held_out: float | None
    certificates: tuple[Certificate, ...]
    queries: int
    asked: dict[str, int]
    noise: float
    standard_error: float | None
    size: float
    method: str | None
    seconds: float
    missing: str | None

    @property
    def verdict(self) -> str:
        """*Learnt* with what certifies it, or *not learnt* with what is missing."""
        if self.learnt:
            text = ", ".join(f"{c.name} {c.value:.2g}" for c in self.certificates if c.decisive)
            heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
            return f"learnt, {heads}, {self.queries} queries: {text}"
        if self.missing is not None:
            return f"not learnt: {self.missing}"
        return "not learnt: " + "; ".join(
            str(c) for c in self.certificates if c.decisive and not c.holds
        )

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.standard_error is not None:
            lines.append(f"noise {self.noise:.2g}, standard error {self.standard_error:.2g}")
        lines += [f"{part:10s} {count:8d} queries" for part, count in self.asked.items()]
        lines += [str(certificate) for certificate in self.certificates]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<QueryLearning: {self.verdict}>"
