"""Layers, examples and perfect knowledge of them that the tests of the learner share."""

from functools import cache

import numpy as np

import mhfast as mh
from mhfast.learner import Body, Examples, Facts, SumEstimate, as_examples, with_support


@cache
def data(n, tokens, dim, heads, **settings):
    """A data set of a random layer, which is `.truth["layer"]`; never written to."""
    return mh.data.boolean_layer(n, tokens, dim, heads, seed=0, **settings)


def examples_of(source):
    return as_examples(source.X, source.y)


def true_sum(examples: Examples, layer: mh.Layer, support: int | None = None) -> SumEstimate:
    """The sum of the value matrices itself, judged as an estimate."""
    return with_support(examples, SumEstimate(layer.V.sum(axis=0), np.inf, 0.0, 0), support)


def true_body(layer: mh.Layer) -> Body:
    """The affine hull of the key-query matrices themselves."""
    H, d, _ = layer.W.shape
    span = np.linalg.qr((layer.W[1:] - layer.W[0]).reshape(H - 1, d * d).T)[0]
    first = layer.W[0].ravel()
    point = first - span @ (span.T @ first)
    return Body(point.reshape(d, d), span.T.reshape(H - 1, d, d), np.ones(0), np.inf, 0.0)


def coordinates(body: Body, W):
    """The coordinates (H, H - 1) of matrices (H, d, d) of the hull."""
    k, d, _ = body.directions.shape
    return (W - body.point).reshape(-1, d * d) @ body.directions.reshape(k, d * d).T


def true_facts(layer: mh.Layer, count: int, *, seed: int = 1) -> Facts:
    """Facts without error: queries at right angles to what the heads say of two tokens apart."""
    d = layer.dim
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 3, d))
    seen = layer.W @ (X[:, 1] - X[:, 2]).T  # (H, d, count)
    apart = (seen[1:] - seen[0]).transpose(2, 1, 0)
    basis = np.linalg.qr(apart)[0]
    X[:, 0] -= np.einsum("kfi,kgi,kg->kf", basis, basis, X[:, 0])
    return Facts(
        X=X,
        rows=3 * np.arange(count),
        first=np.full(count, 1),
        second=np.full(count, 2),
        value=np.einsum("kf,fk->k", X[:, 0], seen[0]),
        tolerance=np.full(count, 1e-9),
        background=2.0 * np.eye(d * d),  # the second moment of normal tokens
        residual_quantiles=np.zeros(101),
        seen=count,
    )


def stretches(W, facts: Facts):
    """By how much matrices (H, d, d) overstep the tolerance of each fact (H, k)."""
    return np.abs(facts.of(W) - facts.value) / facts.tolerance


def distance(a, b) -> float:
    """‖a - b‖ / ‖b‖."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def same_result(a, b) -> bool:
    """Whether two results of `learn_layer` agree to the last bit."""
    return (
        np.array_equal(a.layer.W, b.layer.W)
        and np.array_equal(a.layer.V, b.layer.V)
        and [p.numbers for p in a.phases] == [p.numbers for p in b.phases]
        and a.verdict == b.verdict
    )
