"""Models with their derivatives written out, in forms that are fast: one text for all libraries.

Forms of the attention of all heads to the tokens of a sample:

- "queries first": Z W_h of all heads is one product; queries and heads are rows of one matrix,
  and weights are held (n, q H, T);
- "keys first": the same with weights (n, T, q H), so that softmax is vectorized along the last axis
  and the readout of a classifier is one product;
- "by heads": products for each sample and head, weights (n, H, q, T): for factors, whose keys X K_h
  have r numbers, and for the values X V_h of a layer, which have p, or X A_h of factors A_h B_h,
  which have r;
- "by heads, V multiplied": the same with values X V_h, of the product of the factors.

Where W is an identity all heads have one attention, and there is one head with the sum of the
readouts.  Rows of queries may be taken in tiles whose weights stay in a cache; where attention is
causal a tile meets the keys up to its last row only.

With ρ the derivative of the loss by what is attended to, C = ρ Xᵀ and D = A∘(C - rowsum(A∘C)),

    g_W = Zᵀ D X,   g_Q = Zᵀ D X K,   g_K = Xᵀ Dᵀ Z Q,   g_Z = D X Wᵀ,   g_X = Dᵀ Z W + Aᵀ ρ;

of a classifier ρ is g_i U_h, and the derivative g_i by the output is multiplied in at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .natural import Data, Library, Tensor, Theta, queries

Found = dict[str, Tensor]
# (outputs, data) to the loss and its derivative by the outputs.
Upstream = Callable[[Tensor, Data], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Form:
    """A way of writing it: one of the four above, with `tile` query rows at a time (None: all)."""

    name: str = "queries first"
    tile: int | None = None

    def __str__(self) -> str:
        return f"{self.name}, tiles of {self.tile} queries" if self.tile else self.name


@dataclass(frozen=True)
class Passed:
    """What a pass over query rows gives.

    Outputs, loss, weights (n,H,q,T) (None in tiles), and gradients by name: those of the parameters
    and of "X" and "query", whichever were asked for.
    """

    outputs: Tensor
    loss: Tensor
    A: Tensor
    gradients: Found


def upstream_of_loss(library: Library, classifier: bool) -> Upstream:
    """Return the logistic loss of a classifier, or the squared one of a layer, with derivative."""

    def logistic(outputs: Tensor, data: Data) -> tuple[Tensor, Tensor]:
        margin = data.y * outputs
        derivative = library.sigmoid(-margin) * data.y / -data.total
        return library.softplus(-margin).sum(-1) / data.total, derivative

    def squared(outputs: Tensor, data: Data) -> tuple[Tensor, Tensor]:
        residual = outputs - data.y
        if data.real is not None:
            residual = residual * data.real
        return (residual * residual).sum((-3, -2, -1)) / data.total, residual * (2 / data.total)

    return logistic if classifier else squared


class Written:
    """A model in one form; `wrt` are the names that `passed` differentiates by."""

    def __init__(self, library: Library, form: Form, causal: bool, wrt: Sequence[str] = ()) -> None:
        self.library = library
        self.form = form
        self.causal = causal
        self.wrt = frozenset(wrt)
        self.keys_first = form.name == "keys first"
        self.by_heads = form.name.startswith("by heads")
        self.value_factors = form.name == "by heads"

    def forward(self, theta: Theta, data: Data) -> tuple[Tensor, Tensor]:
        """Return the outputs and the weights (n,H,q,T); the latter None in tiles."""
        done = _Pass(self, theta, data)
        tiles = [done.forward(tile) for tile in done.tiles()]
        return done.outputs([F for F, _ in tiles]), tiles[0][1] if len(tiles) == 1 else None

    def attention(self, theta: Theta, data: Data) -> Tensor:
        """Return the weights (n,H,q,T); of identities (n,1,q,T)."""
        done = _Pass(self, theta, data)
        (tile,) = done.tiles()
        return done.shown(done.weights(tile))

    def passed(self, theta: Theta, data: Data, upstream: Upstream) -> Passed:
        """Return outputs, loss and gradients."""
        return _Pass(self, theta, data).passed(upstream)


@dataclass(frozen=True)
class _Tile:
    """Rows `first` to `last` of the queries, with the data of these rows and the keys they see."""

    first: int
    last: int
    keys: int
    data: Data


class _Pass:
    """One evaluation: operands that all tiles share, then tile by tile."""

    def __init__(self, written: Written, theta: Theta, data: Data) -> None:
        self.written, self.library = written, written.library
        self.data, self.X = data, data.X
        self.given = theta
        self.Z = queries(theta, data)
        self.lead = tuple(self.X.shape[:-3])
        self.classifier = "U" in theta
        self.value_factors = "A" in theta and written.value_factors
        if self.value_factors:
            readout = theta["A"]
        elif "A" in theta:
            readout = theta["A"] @ theta["B"]
        else:
            readout = theta["U"] if self.classifier else theta["V"]
        self.all_heads = readout.shape[-3]
        self.d = self.X.shape[-1]
        identity = "W" not in theta and "Q" not in theta
        if identity:
            readout = readout.sum(-3)[..., None, :, :]
        self.readout, self.H = readout, readout.shape[-3]
        self.identity = identity
        self.factored = "Q" in theta and written.by_heads
        self.W: Tensor = None
        if "W" in theta:
            self.W = theta["W"]
        elif "Q" in theta and not self.factored:
            self.W = theta["Q"] @ theta.get("K", theta["Q"]).swapaxes(-1, -2)
        self._project()

    def _project(self) -> None:
        """Multiply the queries, and of factors the keys, of all heads.

        The queries are then (n,q,H,.), or by heads (n,H,q,.); the keys (n,T,d), or factored
        (n,H,T,r).
        """
        self.keys = self.X
        if self.factored:
            Q = self.given["Q"]
            self.queries = self._across(self.Z, Q).swapaxes(-3, -2)
            self.keys = self._across(self.X, self.given.get("K", Q)).swapaxes(-3, -2)
        elif self.identity:
            self.queries = self.Z[..., None, :, :] if self.by_heads else self.Z[..., None, :]
        else:
            self.queries = self._across(self.Z, self.W)
            if self.by_heads:
                self.queries = self.queries.swapaxes(-3, -2)
        self.values: Tensor = None
        if self.by_heads and not self.classifier:
            self.values = self._across(self.X, self.readout).swapaxes(-3, -2)

    @property
    def by_heads(self) -> bool:
        return self.written.by_heads

    def _across(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return rows (n,t,d) times matrices (H,d,k), in one product: (n,t,H,k)."""
        n, t, d = rows.shape[-3:]
        H, _, k = matrices.shape[-3:]
        side_by_side = matrices.swapaxes(-3, -2).reshape(*self.lead, d, H * k)
        product = rows.reshape(*rows.shape[:-3], n * t, d) @ side_by_side
        return product.reshape(*self.lead, n, t, H, k)

    def _back(self, products: Tensor, matrices: Tensor) -> Tensor:
        """Return Σ_h products_h matrices_hᵀ, (n,t,d), of products (n,t,H,k)."""
        n, t, H, k = products.shape[-4:]
        d = matrices.shape[-2]
        stacked = matrices.swapaxes(-2, -1).reshape(*self.lead, H * k, d)
        found = products.reshape(*self.lead, n * t, H * k) @ stacked
        return found.reshape(*self.lead, n, t, d)

    def _onto(self, rows: Tensor, products: Tensor) -> Tensor:
        """Return Σ rowsᵀ products for each head, (H,d,k), of rows (n,t,d), products (n,t,H,k)."""
        n, t, d = rows.shape[-3:]
        if n == 1 and products.shape[-4] > 1:  # rows that all samples share
            products = products.sum(-4)[..., None, :, :, :]
        H, k = products.shape[-2:]
        flat = rows.reshape(*rows.shape[:-3], n * t, d).swapaxes(-1, -2)
        product = flat @ products.reshape(*self.lead, n * t, H * k)
        return product.reshape(*self.lead, d, H, k).swapaxes(-3, -2)

    def tiles(self) -> Iterator[_Tile]:
        """Yield the tiles of query rows."""
        rows, data, causal = self.Z.shape[-2], self.data, self.written.causal
        size = self.written.form.tile or rows
        for first in range(0, rows, size):
            last = min(first + size, rows)
            if first == 0 and last == rows:
                yield _Tile(0, rows, self.X.shape[-2], data)
                continue
            keys = last if causal else self.X.shape[-2]
            hidden, y = data.hidden, data.y
            if hidden is not None:
                hidden = hidden[:, first:last] if hidden.shape[-2] > 1 else hidden
                hidden = hidden[..., :keys]
            if not self.classifier:
                y = y[..., first:last, :]
            real = None if data.real is None else data.real[:, first:last]
            yield _Tile(first, last, keys, replace(data, hidden=hidden, real=real, y=y))

    def weights(self, tile: _Tile) -> Tensor:
        """Return the weights: (n,q,H,T), keys first (n,T,q,H), by heads (n,H,q,T)."""
        hidden, real = tile.data.hidden, tile.data.real
        rows = slice(tile.first, tile.last)
        X = self._seen(tile)
        if self.by_heads:
            S = self._part(rows) @ self._keys(tile).swapaxes(-1, -2)
            mask = None if hidden is None else hidden[:, None]
            shown = None if real is None else real[:, None]
            axis = -1
        elif self.written.keys_first:
            S = X @ self._flat(rows).swapaxes(-1, -2)
            S = S.reshape(*S.shape[:-1], rows.stop - rows.start, self.H)
            mask = None if hidden is None else hidden.swapaxes(-1, -2)[..., None]
            shown = None if real is None else real[:, None]
            axis = -3
        else:
            S = self._flat(rows) @ X.swapaxes(-1, -2)
            S = S.reshape(*S.shape[:-2], rows.stop - rows.start, self.H, S.shape[-1])
            mask = None if hidden is None else hidden[:, :, None]
            shown = None if real is None else real[:, :, None]
            axis = -1
        if mask is not None:
            S = S + mask
        A = self.library.softmax(S, axis)
        return A if shown is None else A * shown

    def shown(self, A: Tensor) -> Tensor:
        """Return weights as (n,H,q,T)."""
        if self.by_heads:
            return A
        if self.written.keys_first:
            return A.swapaxes(-3, -1)
        return A.swapaxes(-3, -2)

    def _seen(self, tile: _Tile) -> Tensor:
        return self.X if tile.keys == self.X.shape[-2] else self.X[..., : tile.keys, :]

    def _keys(self, tile: _Tile) -> Tensor:
        """Return the keys by heads, (n,H or 1,T,.)."""
        keys = self.keys if self.factored else self.keys[..., None, :, :]
        return keys if tile.keys == keys.shape[-2] else keys[..., : tile.keys, :]

    def _part(self, rows: slice) -> Tensor:
        """Return the multiplied queries of some rows."""
        if rows.start == 0 and rows.stop == self.Z.shape[-2]:
            return self.queries
        return self.queries[..., rows, :] if self.by_heads else self.queries[..., rows, :, :]

    def _flat(self, rows: slice) -> Tensor:
        """Return the same as rows of one matrix, (n, q H, d) or by heads (n, H q, d)."""
        part = self._part(rows)
        return part.reshape(*part.shape[:-3], part.shape[-3] * part.shape[-2], part.shape[-1])

    def _matrix(self, A: Tensor) -> Tensor:
        """Return weights as matrices for each sample: (n, rows, T), keys first (n, T, rows)."""
        a, b, c = A.shape[-3:]
        if self.written.keys_first:
            return A.reshape(*A.shape[:-3], a, b * c)
        return A.reshape(*A.shape[:-3], a * b, c)

    def _times(self, A: Tensor, X: Tensor) -> Tensor:
        """Return A X with rows of A as rows."""
        return (A.swapaxes(-1, -2) if self.written.keys_first else A) @ X

    def _times_transposed(self, A: Tensor, rows: Tensor) -> Tensor:
        """Return Aᵀ rows."""
        return (A if self.written.keys_first else A.swapaxes(-1, -2)) @ rows

    def _readout_rows(self, tile: _Tile) -> Tensor:
        """Return U of a tile's rows in the order of the rows of the weights, (1, rows, d)."""
        U = self.readout[..., tile.first : tile.last, :]
        if not self.by_heads:
            U = U.swapaxes(-3, -2)
        return U.reshape(*U.shape[:-3], 1, -1, self.d) / self.all_heads**0.5

    def forward(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Return the outputs, of a classifier their part, and the weights."""
        A = self.weights(tile)
        return self._read(tile, A)[0], self.shown(A)

    def _read(self, tile: _Tile, A: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and what is attended to: A X (n, rows, d).

        Of values it is None, or where they have factors (n,q,H,r).
        """
        if self.values is not None:
            attended = A @ self.values[..., : tile.keys, :]
            if not self.value_factors:
                return attended.sum(-3), None
            attended = attended.swapaxes(-3, -2)
            return self._back(attended, self.given["B"].swapaxes(-2, -1)), attended
        attended = self._times(self._matrix(A), self._seen(tile))
        if self.classifier:
            U = self._readout_rows(tile)
            flat = attended.reshape(*attended.shape[:-2], -1)
            return (flat @ U.reshape(*U.shape[:-3], -1, 1))[..., 0], attended
        n, q = self.X.shape[-3], tile.last - tile.first
        V = self.readout.reshape(*self.lead, self.H * self.d, -1)
        F = attended.reshape(*self.lead, n * q, self.H * self.d) @ V
        return F.reshape(*self.lead, n, q, -1), attended

    def outputs(self, parts: list[Tensor]) -> Tensor:
        """Join the outputs of tiles."""
        if len(parts) == 1:
            return parts[0]
        return sum(parts) if self.classifier else self.library.concatenate(parts, -2)

    def passed(self, upstream: Upstream) -> Passed:
        """Take forward and backward pass, tile by tile."""
        parts: list[Tensor] = []
        losses: list[Tensor] = []
        pieces: list[Found] = []
        A: Tensor = None
        for tile in self.tiles():
            A = self.weights(tile)
            F, attended = self._read(tile, A)
            parts.append(F)
            dF: Tensor = None
            if not self.classifier:
                loss, dF = upstream(F, tile.data)
                losses.append(loss)
            shown = self.shown(A)
            pieces.append(self._backward(tile, A, attended, dF))
        outputs = self.outputs(parts)
        g: Tensor = None
        if self.classifier:
            loss, g = upstream(outputs, self.data)
        else:
            loss = sum(losses)
        gradients = self._gradients(self._joined(pieces), g)
        return Passed(outputs, loss, shown if len(parts) == 1 else None, gradients)

    def _wants(self, *names: str) -> bool:
        return not self.written.wrt.isdisjoint(names)

    @property
    def _moves_scores(self) -> bool:
        return self._wants("W", "Q", "K", "prompt", "X", "query")

    def _backward(self, tile: _Tile, A: Tensor, attended: Tensor, dF: Tensor) -> Found:
        """Return the pieces of a tile, of a classifier without the derivative by its output.

        "attended" (n,rows,d) or, of values, "mixed" Aᵀ dF (n,T,H,p); where they have factors,
        "mixed" Aᵀ dF Bᵀ (n,T,H,r) and "read" A X A_h (n,q,H,r); "rows" D X (n,q,H,.) or of
        factors D X K; "keys" Dᵀ Z Q (n,T,H,r) of factors; "X" (n,T,d) of keys and values; "dF".
        """
        found: Found = {}
        X = self._seen(tile)
        rho: Tensor = None
        by_values: Tensor = None
        if self.values is not None:
            by_values = dF[..., None, :, :]
            if self.value_factors:
                by_values = self._across(dF, self.given["B"].swapaxes(-2, -1)).swapaxes(-3, -2)
                found["read"], found["dF"] = attended, dF
            if self._wants("V", "A", "B", "X"):
                found["mixed"] = (A.swapaxes(-1, -2) @ by_values).swapaxes(-3, -2)
        else:
            found["attended"] = attended
            found["dF"] = dF
        if not self._moves_scores:
            return found
        C, rho = self._products(tile, X, dF if by_values is None else by_values)
        axis = -3 if self.written.keys_first else -1
        D = self.library.softmax_derivative(A, C.reshape(A.shape), axis)
        if self.factored:
            found["rows"] = (D @ self._keys(tile)).swapaxes(-3, -2)
            moved = D.swapaxes(-1, -2) @ self._part(slice(tile.first, tile.last))
            found["keys"] = moved.swapaxes(-3, -2)
        else:
            flat = self._matrix(D)
            moved = self._times(flat, X).reshape(*self._row_shape(tile))
            found["rows"] = moved.swapaxes(-3, -2) if self.by_heads else moved
        if self._wants("X"):
            parts = []
            if not self.factored:
                parts.append(self._times_transposed(flat, self._flat(slice(tile.first, tile.last))))
            if rho is not None:
                parts.append(self._times_transposed(self._matrix(A), rho))
            if parts:
                found["X"] = sum(parts)
        return found

    def _row_shape(self, tile: _Tile) -> tuple[int, ...]:
        n, q = self.X.shape[-3], tile.last - tile.first
        return (*self.lead, n, *((self.H, q) if self.by_heads else (q, self.H)), self.d)

    def _products(self, tile: _Tile, X: Tensor, dF: Tensor) -> tuple[Tensor, Tensor]:
        """Return C, and ρ (n or 1, rows, d); where there are values dF is by A of heads, ρ None."""
        if self.values is not None:
            return dF @ self.values[..., : tile.keys, :].swapaxes(-1, -2), None
        if self.classifier:
            rho = self._readout_rows(tile)
            if self.written.keys_first:  # one product for all samples
                flat = X.reshape(*self.lead, -1, self.d) @ rho[..., 0, :, :].swapaxes(-1, -2)
                return flat.reshape(*X.shape[:-1], -1), rho
        else:
            n, q = dF.shape[-3:-1]
            V = self.readout.reshape(*self.lead, self.H * self.d, -1)
            rho = dF.reshape(*self.lead, n * q, -1) @ V.swapaxes(-1, -2)
            rho = rho.reshape(*self.lead, n, q * self.H, self.d)
        if self.written.keys_first:
            return X @ rho.swapaxes(-1, -2), rho
        return rho @ X.swapaxes(-1, -2), rho

    def _joined(self, pieces: list[Found]) -> Found:
        """Join the pieces of tiles along queries, and add up those along keys."""
        if len(pieces) == 1:
            return pieces[0]
        found: Found = {}
        axes = {"attended": -2, "read": -3, "rows": -3, "dF": -2}
        for name in pieces[-1]:
            parts = [piece[name] for piece in pieces]
            if parts[0] is None:
                found[name] = None
            elif name in axes:
                found[name] = self.library.concatenate(parts, axes[name])
            else:
                found[name] = self.library.added(parts, -2 if name == "X" else -3)
        return found

    def _gradients(self, pieces: Found, g: Tensor) -> Found:
        """Return the gradients, from the pieces of all rows."""
        found: Found = {}
        wants = self._wants
        rows, keys = pieces.get("rows"), pieces.get("keys")
        if g is not None:  # derivatives by the outputs of a classifier
            of_rows = g[..., None, None, None]
            rows = None if rows is None else rows * of_rows
            keys = None if keys is None else keys * of_rows
        if wants("U"):
            found["U"] = self._by_readout(pieces["attended"], g)
        if wants("V"):
            found["V"] = self._by_values(pieces)
        if wants("A", "B"):
            found |= self._of_value_factors(pieces)
        if wants("W"):
            found["W"] = self._onto(self.Z, rows)
        if wants("Q", "K"):
            found |= self._of_factors(rows, keys)
        if wants("prompt", "query", "X"):
            own = wants("X") and self.data.query is None and "prompt" not in self.given
            needed = own or wants("prompt", "query")
            gZ: Tensor = self._by_queries(rows) if needed else None
            if wants("query"):
                found["query"] = gZ
            if wants("prompt"):
                found["prompt"] = gZ.sum(-3)
            if wants("X"):
                found["X"] = self._by_tokens(pieces, keys, g, gZ if own else None)
        return found

    def _by_readout(self, attended: Tensor, g: Tensor) -> Tensor:
        flat = attended.reshape(*attended.shape[:-2], -1)
        gU = (g[..., None, :] @ flat)[..., 0, :] / self.all_heads**0.5
        q = self.Z.shape[-2]
        if self.by_heads:
            gU = gU.reshape(*self.lead, self.H, q, self.d)
        else:
            gU = gU.reshape(*self.lead, q, self.H, self.d).swapaxes(-3, -2)
        return self.library.repeated(gU, self.all_heads) if self.identity else gU

    def _by_values(self, pieces: Found) -> Tensor:
        if "mixed" in pieces:
            gV = self._onto(self.X, pieces["mixed"])
        else:
            attended = pieces["attended"].reshape(*self.lead, -1, self.H * self.d)
            dF = pieces["dF"].reshape(*self.lead, -1, pieces["dF"].shape[-1])
            gV = (attended.swapaxes(-1, -2) @ dF).reshape(*self.lead, self.H, self.d, -1)
        return self.library.repeated(gV, self.all_heads) if self.identity else gV

    def _of_value_factors(self, pieces: Found) -> Found:
        if self.value_factors:
            by_B = self._onto(pieces["dF"], pieces["read"]).swapaxes(-1, -2)
            return {"A": self._onto(self.X, pieces["mixed"]), "B": by_B}
        gV = self._by_values(pieces)
        A, B = self.given["A"], self.given["B"]
        return {"A": gV @ B.swapaxes(-1, -2), "B": A.swapaxes(-1, -2) @ gV}

    def _of_factors(self, rows: Tensor, keys: Tensor) -> Found:
        Q = self.given["Q"]
        K = self.given.get("K", Q)
        if self.factored:
            gQ, gK = self._onto(self.Z, rows), self._onto(self.X, keys)
        else:
            gW = self._onto(self.Z, rows)
            gQ, gK = gW @ K, gW.swapaxes(-1, -2) @ Q
        return {"Q": gQ, "K": gK} if "K" in self.given else {"Q": gQ + gK}

    def _by_queries(self, rows: Tensor) -> Tensor:
        """Return the gradient by the queries Z (n,q,d)."""
        if self.identity:
            return rows[..., 0, :]
        return self._back(rows, self.given["Q"] if self.factored else self.W)

    def _by_tokens(self, pieces: Found, keys: Tensor, g: Tensor, gZ: Tensor) -> Tensor:
        parts = []
        if "X" in pieces:
            parts.append(pieces["X"] if g is None else pieces["X"] * g[..., None, None])
        if keys is not None:
            parts.append(self._back(keys, self.given.get("K", self.given["Q"])))
        if "mixed" in pieces:
            parts.append(self._back(pieces["mixed"], self.readout))
        if gZ is not None and self.data.places is None:
            parts.append(gZ)
        gX = sum(parts[1:], parts[0])
        if gZ is not None and self.data.places is not None:
            gX = self.library.add_rows(gX, self.data.places, gZ)
        return gX
