"""Hessian-vector products and tangent kernels, written out; one text for all libraries.

All rows of queries and heads of a sample are one matrix: weights are (n, q H, T), as in the form
"queries first" of `written`.  Factors are multiplied first.  A dot is the derivative along the
direction:

    Ṡ = (Ż W + Z Ẇ) Xᵀ,   Ȧ = A∘(Ṡ - rowsum(A∘Ṡ)),   Ḋ = Ȧ∘(C - c) + A∘(Ċ - ċ),   c = rowsum(A∘C).
"""

from __future__ import annotations

from dataclasses import dataclass

from .natural import Data, Library, Tensor, Theta, queries


@dataclass(frozen=True)
class _Sides:
    """Z (n or 1,q,d), W (H,d,d) or None for an identity, and the readout, of one head then.

    `factors`: the readout is the product of A and B.
    """

    Z: Tensor
    W: Tensor
    readout: Tensor
    heads: int
    factors: bool


def _sides(theta: Theta, data: Data) -> _Sides:
    if "A" in theta:
        readout = theta["A"] @ theta["B"]
    else:
        readout = theta["U"] if "U" in theta else theta["V"]
    heads = readout.shape[-3]
    W = None
    if "W" in theta:
        W = theta["W"]
    elif "Q" in theta:
        W = theta["Q"] @ theta.get("K", theta["Q"]).swapaxes(-1, -2)
    else:
        readout = readout.sum(-3)[..., None, :, :]
    return _Sides(queries(theta, data), W, readout, heads, "A" in theta)


def _across(Z: Tensor, W: Tensor) -> Tensor:
    """Return Z W_h of all heads (n, q H, d)."""
    lead = Z.shape[:-3]
    n, q, d = Z.shape[-3:]
    H = W.shape[-3]
    side_by_side = W.swapaxes(-3, -2).reshape(*lead, d, H * d)
    return (Z.reshape(*lead, n * q, d) @ side_by_side).reshape(*lead, n, q * H, d)


def _onto(Z: Tensor, products: Tensor) -> Tensor:
    """Return Σ Zᵀ products_h (H,d,k) of products (n,q,H,k)."""
    lead, k = Z.shape[:-3], products.shape[-1]
    if Z.shape[-3] == 1 and products.shape[-4] > 1:
        products = products.sum(-4)[..., None, :, :, :]
    flat = Z.reshape(*lead, -1, Z.shape[-1]).swapaxes(-1, -2)
    found = flat @ products.reshape(*lead, flat.shape[-1], -1)
    return found.reshape(*lead, Z.shape[-1], -1, k).swapaxes(-3, -2)


def _back(products: Tensor, W: Tensor) -> Tensor:
    """Return Σ_ih products_ih W_hᵀ (q,d) of products (n,q,H,d)."""
    lead, (q, H, d) = products.shape[:-4], products.shape[-3:]
    stacked = W.swapaxes(-2, -1).reshape(*lead, H * d, d)
    return products.sum(-4).reshape(*lead, q, H * d) @ stacked


def hessian_product(
    library: Library, theta: Theta, data: Data, direction: Theta
) -> dict[str, Tensor]:
    """Return the product of the Hessian of the loss with a direction, both of all parameters."""
    side = _sides(theta, data)
    X, XT, Z = data.X, data.X.swapaxes(-1, -2), side.Z
    lead, n, T, d = X.shape[:-3], X.shape[-3], X.shape[-2], X.shape[-1]
    q, H = Z.shape[-2], side.readout.shape[-3]
    dZ = direction["prompt"][..., None, :, :] if "prompt" in theta else None
    dW = _moving(theta, direction)
    if "A" in theta:
        dU = direction["A"] @ theta["B"] + theta["A"] @ direction["B"]
    else:
        dU = direction["U" if "U" in theta else "V"]
    if side.W is None:
        dU = dU.sum(-3)[..., None, :, :]

    def wide(S: Tensor) -> Tensor:
        return S.reshape(*S.shape[:-2], q, H, T)

    S = wide((Z if side.W is None else _across(Z, side.W)) @ XT)
    if data.hidden is not None:
        S = S + data.hidden[:, :, None]
    A = library.softmax(S, -1)
    if data.real is not None:
        A = A * data.real[:, :, None]
    moved = None if dW is None else _across(Z, dW)
    if dZ is not None:
        by_prompt = dZ if side.W is None else _across(dZ, side.W)
        moved = by_prompt if moved is None else moved + by_prompt
    dA = None if moved is None else library.softmax_derivative(A, wide(moved @ XT), -1)

    def attended(A: Tensor) -> Tensor:
        return A.reshape(*A.shape[:-3], q * H, T) @ X

    AX = attended(A)
    dAX = attended(dA) if dA is not None else 0.0 * AX
    value, found = (_classifier if "U" in theta else _layer)(library, side, dU, AX, dAX, data)
    rho, d_rho = value
    if "A" in theta:
        found = _by_value_factors(theta, direction, found["gradient"], found["V"])
    if side.W is None:
        return {name: library.repeated(array, side.heads) for name, array in found.items()}
    C, dC = wide(rho @ XT), wide(d_rho @ XT)
    centred = C - (A * C).sum(-1)[..., None]
    D = A * centred
    dD = dA * centred + A * (dC - (dA * C + A * dC).sum(-1)[..., None])
    DX = attended(D).reshape(*lead, n, q, H, d)
    dDX = attended(dD).reshape(*lead, n, q, H, d)
    if "prompt" in theta:
        found["prompt"] = _back(dDX, side.W) + (0.0 if dW is None else _back(DX, dW))
    gW = _onto(Z, dDX)
    if dZ is not None:
        gW = gW + _onto(dZ, DX)
    if "W" in theta:
        return found | {"W": gW}
    return found | _by_factors(theta, direction, _onto(Z, DX), gW)


def _moving(theta: Theta, direction: Theta) -> Tensor:
    if "W" in theta:
        return direction["W"]
    if "Q" not in theta:
        return None
    Q, dQ = theta["Q"], direction["Q"]
    K, dK = (theta["K"], direction["K"]) if "K" in theta else (Q, dQ)
    return dQ @ K.swapaxes(-1, -2) + Q @ dK.swapaxes(-1, -2)


def _by_factors(theta: Theta, direction: Theta, gW: Tensor, dgW: Tensor) -> dict[str, Tensor]:
    Q, dQ = theta["Q"], direction["Q"]
    K, dK = (theta["K"], direction["K"]) if "K" in theta else (Q, dQ)
    of_Q = dgW @ K + gW @ dK
    of_K = dgW.swapaxes(-1, -2) @ Q + gW.swapaxes(-1, -2) @ dQ
    return {"Q": of_Q, "K": of_K} if "K" in theta else {"Q": of_Q + of_K}


def _by_value_factors(theta: Theta, direction: Theta, gV: Tensor, dgV: Tensor) -> dict[str, Tensor]:
    A, dA, B, dB = theta["A"], direction["A"], theta["B"], direction["B"]
    return {
        "A": dgV @ B.swapaxes(-1, -2) + gV @ dB.swapaxes(-1, -2),
        "B": A.swapaxes(-1, -2) @ dgV + dA.swapaxes(-1, -2) @ gV,
    }


def _classifier(
    library: Library, side: _Sides, dU: Tensor, AX: Tensor, dAX: Tensor, data: Data
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return ρ with its derivative, (n, q H, d), and the product by U."""
    lead = AX.shape[:-3]
    n, rows, d = AX.shape[-3:]
    q = side.Z.shape[-2]

    def flat(U: Tensor) -> Tensor:
        return U.swapaxes(-3, -2).reshape(*lead, rows * d, 1) / side.heads**0.5

    U, moved = flat(side.readout), flat(dU)
    AX, dAX = AX.reshape(*lead, n, rows * d), dAX.reshape(*lead, n, rows * d)
    outputs = (AX @ U)[..., 0]
    along = (dAX @ U + AX @ moved)[..., 0]
    chance = library.sigmoid(-data.y * outputs)
    g = -chance * data.y / data.total
    dg = chance * (1.0 - chance) * along / data.total
    by_U = (dg[..., None, :] @ AX + g[..., None, :] @ dAX)[..., 0, :] / side.heads**0.5
    by_U = by_U.reshape(*lead, q, rows // q, d).swapaxes(-3, -2)
    shape = (*lead, 1, rows, d)
    U, moved = U.reshape(shape), moved.reshape(shape)
    g, dg = g[..., None, None], dg[..., None, None]
    return (g * U, dg * U + g * moved), {"U": by_U}


def _layer(
    _library: Library, side: _Sides, dV: Tensor, AX: Tensor, dAX: Tensor, data: Data
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return ρ with its derivative, (n, q H, d), and the product by V.

    Of factors the gradient by V is there too.
    """
    lead, shape = AX.shape[:-3], AX.shape
    n, q, d = AX.shape[-3], data.y.shape[-2], AX.shape[-1]
    H, p = side.readout.shape[-3], side.readout.shape[-1]
    V, moved = (a.reshape(*lead, H * d, p) for a in (side.readout, dV))
    AX, dAX = (a.reshape(*lead, n * q, H * d) for a in (AX, dAX))
    residual = (AX @ V).reshape(data.y.shape) - data.y
    along = (dAX @ V + AX @ moved).reshape(data.y.shape)
    if data.real is not None:
        residual, along = residual * data.real, along * data.real
    G, dG = (a.reshape(*lead, n * q, p) * (2.0 / data.total) for a in (residual, along))
    by_V = AX.swapaxes(-1, -2) @ dG + dAX.swapaxes(-1, -2) @ G
    VT, movedT = V.swapaxes(-1, -2), moved.swapaxes(-1, -2)
    found = {"V": by_V.reshape(*lead, H, d, p)}
    if side.factors:
        found["gradient"] = (AX.swapaxes(-1, -2) @ G).reshape(*lead, H, d, p)
    return ((G @ VT).reshape(shape), (dG @ VT + G @ movedT).reshape(shape)), found


def tangent_kernel(library: Library, theta: Theta, data: Data, *, gram: bool) -> Tensor:
    """Return the tangent kernel (n,n), of a layer (n,q,p,n,q,p).

    `gram`: products of W are sums over pairs of rows, ⟨z,z'⟩⟨m,m'⟩, in place of matrices (d,d) for
    each sample; a layer has only these.
    """
    return (_of_classifier if "U" in theta else _of_layer)(library, theta, data, gram)


def _weights(library: Library, side: _Sides, data: Data) -> Tensor:
    """Return the weights (n, q, H, T)."""
    X, Z = data.X, side.Z
    q, H = Z.shape[-2], side.readout.shape[-3]
    S = (Z if side.W is None else _across(Z, side.W)) @ X.swapaxes(-1, -2)
    S = S.reshape(*S.shape[:-2], q, H, X.shape[-2])
    if data.hidden is not None:
        S = S + data.hidden[:, :, None]
    A = library.softmax(S, -1)
    return A if data.real is None else A * data.real[:, :, None]


def _of_classifier(library: Library, theta: Theta, data: Data, gram: bool) -> Tensor:
    side = _sides(theta, data)
    X, Z = data.X, side.Z
    n, T, d = X.shape[-3:]
    A = _weights(library, side, data)
    lead, q, H = A.shape[:-4], A.shape[-3], A.shape[-2]
    rows = A.reshape(*lead, n, q * H, T)
    U = side.readout.swapaxes(-3, -2).reshape(*lead, 1, q * H, d)
    AX = (rows @ X).reshape(*lead, n, -1)
    K = _gram(AX)
    if side.W is None:  # the derivatives by all U_h are equal
        return K
    C = (U @ X.swapaxes(-1, -2)).reshape(A.shape)
    D = library.softmax_derivative(A, C, -1).reshape(rows.shape)
    DX = (D @ X).reshape(*lead, n, q, H, d)
    if "prompt" in theta:
        stacked = side.W.swapaxes(-2, -1).reshape(*lead, 1, H * d, d)
        K = K + _gram((DX.reshape(*lead, n, q, H * d) @ stacked).reshape(*lead, n, -1))
    if "W" in theta:
        pairs = gram and Z.shape[-3] == n
        K = K + (_of_pairs(Z, DX) if pairs else _gram(_features(Z, DX)))
    else:
        Q, KT = theta["Q"], theta.get("K", theta["Q"])
        ZQ = Z[..., None, :, :] @ Q[..., None, :, :, :]  # (n,H,q,r)
        by_heads = DX.swapaxes(-3, -2)  # (n,H,q,d)
        of_Q = Z[..., None, :, :].swapaxes(-1, -2) @ (by_heads @ KT[..., None, :, :, :])
        of_K = by_heads.swapaxes(-1, -2) @ ZQ
        parts = (of_Q, of_K) if "K" in theta else (of_Q + of_K,)
        for part in parts:
            K = K + _gram(part.reshape(*lead, n, -1))
    return K / side.heads


def _gram(rows: Tensor) -> Tensor:
    return rows @ rows.swapaxes(-1, -2)


def _features(Z: Tensor, DX: Tensor) -> Tensor:
    """Return Zᵀ D X of each sample as a row, (n, d H d)."""
    lead, (n, q, H, d) = DX.shape[:-4], DX.shape[-4:]
    return (Z.swapaxes(-1, -2) @ DX.reshape(*lead, n, q, H * d)).reshape(*lead, n, -1)


def _of_pairs(Z: Tensor, DX: Tensor) -> Tensor:
    """Return Σ ⟨z_it, z_js⟩ ⟨m_it, m_js⟩ over rows t, s, with m of all heads joined."""
    lead, (n, q) = DX.shape[:-4], DX.shape[-4:-2]
    alike = _gram(Z.reshape(*lead, n * q, -1)) * _gram(DX.reshape(*lead, n * q, -1))
    return alike.reshape(*lead, n, q, n, q).sum((-3, -1))


def _of_layer(library: Library, theta: Theta, data: Data, _gram_of_pairs: bool) -> Tensor:
    """Return ⟨z,z'⟩ Σ_h ⟨m,m'⟩ of W, with m = D X of an output, and Σ_h ⟨A X, A X'⟩ of V."""
    side = _sides(theta, data)
    X, Z, V = data.X, side.Z, side.readout
    n, T, d = X.shape[-3:]
    A = _weights(library, side, data)
    lead, q, H, p = A.shape[:-4], A.shape[-3], A.shape[-2], V.shape[-1]
    AX = (A.reshape(*lead, n, q * H, T) @ X).reshape(*lead, n * q, H * d)
    values = X.reshape(*lead, n * T, d) @ V.swapaxes(-3, -2).reshape(*lead, d, H * p)
    C = values.reshape(*lead, n, T, H, p).swapaxes(-3, -1)[..., None, :, :, :]  # (n,1,p,H,T)
    A = A[..., None, :, :]
    D = A * C
    D = D - A * D.sum(-1)[..., None]
    M = (D.reshape(*lead, n, q * p * H, T) @ X).reshape(*lead, n * q * p, H * d)
    size = (*lead, n * q, p, n * q, p)
    of_W = _gram(Z.reshape(*lead, n * q, d))[..., None, :, None] * _gram(M).reshape(size)
    of_V = _gram(AX)[..., None, :, None] * library.identity(p, X)[:, None, :]
    return (of_W + of_V).reshape(*lead, n, q, p, n, q, p)
