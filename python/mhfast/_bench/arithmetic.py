"""How many multiply-adds an operation of the map needs at least.

Counted are the matrix products, in the order that needs the fewest of those that any implementation
here uses; softmax, sums and what is done once are not.  Over the measured peak they are a time that
no implementation of these products can be below.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cells import CellProblem


def multiply_adds(problem: CellProblem) -> float | None:
    """Return the multiply-adds of one call, or of one step of training.

    None where they are not known: tangent kernels, whose best order depends on n.
    """
    operation = problem.cell.operation
    if operation == "ntk":
        return None
    runs = max(1, problem.sizes.runs)
    products = _Products.of(problem)
    if not problem.trains:
        return runs * products.count(operation)
    if problem.kind.W == "identity":  # attended tokens are kept: outputs, and the gradient
        n = problem.X.shape[-3]
        return runs * min(2.0 * products.rows * products.dim, float(n**2))
    return runs * products.count("gradient")


@dataclass(frozen=True)
class _Products:
    """The products of all heads of a problem of one run.

    Visible `keys` and query `rows` of all samples, and `pairs` of a row and a key that it sees;
    `asked` rows are multiplied with W, fewer than `rows` where samples share a prompt.
    """

    kind: str
    readout: str
    heads: int
    keys: float
    rows: float
    asked: float
    pairs: float
    dim: int
    out: int
    rank: int
    shared: bool

    @classmethod
    def of(cls, problem: CellProblem) -> _Products:
        kind, sizes = problem.kind, problem.sizes
        n, T, d = problem.X.shape[-3:]
        seen = np.full(n, T) if problem.lengths is None else problem.lengths
        itself = sizes.q is None and problem.query is None and not kind.prompt
        q = seen if itself else np.full(n, sizes.prompt_rows if kind.prompt else sizes.q or T)
        sees_all = not kind.causal or problem.last
        pairs = sum(
            k * t if sees_all else sum(min(j + 1, k) for j in range(t))
            for t, k in zip(q.tolist(), seen.tolist(), strict=True)
        )
        keys, rows = float(seen.sum()), float(q.sum())
        return cls(
            kind=kind.W,
            readout="factors" if kind.factors else kind.readout,
            heads=1 if kind.W == "identity" else sizes.H,
            keys=keys,
            rows=rows,
            asked=float(sizes.prompt_rows) if kind.prompt else rows,
            pairs=float(pairs),
            # Steps of many dimensions can be taken in the span of the tokens.
            dim=min(d, int(keys)) if problem.trains else d,
            out=sizes.p,
            rank=sizes.r,
            shared=kind.W == "tied" and itself,
        )

    def count(self, operation: str) -> float:
        """Count all products of an operation."""
        if self.kind == "identity" and operation in ("gradient", "backward", "hvp"):
            operation = "gradient-readout"  # all parameters are U, of which outputs are linear
        forms = [self._of_factors, self._of_product]
        ways = forms if self.kind in ("low rank", "tied") else [self._of_product]
        return self.heads * min(way(operation) for way in ways)

    def _of_product(self, operation: str) -> float:
        """Count with logits Z W Xᵀ of a dense W, of multiplied factors, or of an identity."""
        by_W = 0.0 if self.kind == "identity" else min(self.asked, self.keys) * self.dim**2
        pair = self.pairs * self.dim
        logits, by_logits = by_W + pair, pair + by_W
        once = self.dim**2 * self.rank if self.kind in ("low rank", "tied") else 0.0
        match operation:
            case "hvp":
                return 3 * once + 3 * by_W + 3 * pair + self._readout(operation)
            case "gradient" | "backward" | "gradient-W":
                return 3 * once + logits + by_logits + self._readout(operation)
            case "gradient-X" | "gradient-query":
                of_rows = 0.0 if self.asked < self.rows and operation == "gradient-X" else by_logits
                of_keys = pair if operation == "gradient-X" else 0.0
                return once + logits + of_rows + of_keys + self._readout(operation)
            case "gradient-everything":
                return 3 * once + logits + by_W + by_logits + pair + self._readout(operation)
        return once + logits + self._readout(operation)

    def _of_factors(self, operation: str) -> float:
        """Count with logits (Z Q) (X K)ᵀ."""
        of_rows = self.asked * self.dim * self.rank
        of_keys = 0.0 if self.shared else self.keys * self.dim * self.rank
        pair = self.pairs * self.rank
        by_factors = (1 if self.shared else 2) * pair + of_rows + of_keys
        logits = of_rows + of_keys + pair
        match operation:
            case "hvp":
                pairs = (5 if self.shared else 7) * pair
                return 3 * (of_rows + of_keys) + pairs + self._readout(operation)
            case "gradient" | "backward" | "gradient-W" | "gradient-X":
                return logits + by_factors + self._readout(operation)
            case "gradient-query":
                return logits + pair + of_rows + self._readout(operation)
            case "gradient-everything":
                return logits + by_factors + of_rows + of_keys + self._readout(operation)
        return logits + self._readout(operation)

    def _readout(self, operation: str) -> float:
        """Count outputs, the derivative by the weights, and those by U, V and X if asked for.

        With values X V first, or attended tokens A X; through the factors of V or their product.
        """
        if operation == "attention":
            return 0.0
        pair = self.pairs * self.dim
        if self.readout == "U":
            times = {
                "gradient": 2, "backward": 2, "gradient-W": 1, "gradient-readout": 1,
                "gradient-X": 2, "gradient-query": 1, "gradient-everything": 3, "hvp": 3,
            }  # fmt: skip
            return times.get(operation, 1) * pair
        ways = [self._of_values(operation, self.out, 0.0)]
        if self.readout == "factors":
            ways.append(self._of_values(operation, self.rank, self.rank * self.out))
        return min(ways)

    def _of_values(self, operation: str, width: int, after: float) -> float:
        """Count with values of so many columns; `after` is what a row costs beyond them."""
        values, pair = self.keys * self.dim * width, self.pairs * width
        rows, wide = self.rows * (self.dim * width + after), self.pairs * self.dim
        last = self.rows * after
        # What values first and attended tokens first add for the outputs, the derivative by the
        # weights, that by V, and that by X.
        outputs = values + pair + last, wide + rows
        weights = pair + last, wide + rows
        by_V = values + pair + last, rows
        match operation:
            case "gradient":
                parts = [outputs, weights, by_V]
            case "backward":
                return min(values + weights[0] + by_V[0], wide + weights[1] + by_V[1])
            case "gradient-W" | "gradient-query":
                parts = [outputs, weights]
            case "gradient-readout":
                parts = [outputs, by_V]
            case "gradient-X":
                parts = [outputs, weights, (values + pair, wide)]
            case "gradient-everything":
                parts = [outputs, weights, by_V, (values + last, wide)]
            case "hvp":
                return min(3 * values + 8 * pair + 3 * last, 4 * wide + 8 * rows)
            case _:
                parts = [outputs]
        by_values = sum(part[0] for part in parts)
        by_tokens = sum(part[1] for part in parts)
        mixed = by_tokens - (weights[1] - weights[0]) + values if weights in parts else by_tokens
        return min(by_values, by_tokens, mixed)
