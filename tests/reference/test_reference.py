"""The NumPy specification against definitions in torch, finite differences and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from instances import problem, relative
from lists import LOSSES, kind_of_targets, targets

import mhfast as mh
from mhfast import reference
from mhfast.reference import Model


class Case(NamedTuple):
    """What `value_and_grad` is called with: model, X (6,3,5), y and options."""

    model: Model
    X: Any
    y: Any
    options: dict[str, Any]

    def moved(self, name: str, step: Any) -> Case:
        """Add `step` to the parameter, X or query of that name."""
        if name == "X":
            return self._replace(X=self.X + step)
        if name == "query":
            return self._replace(options=self.options | {name: self.options[name] + step})
        return self._replace(model=replace(self.model, **{name: getattr(self.model, name) + step}))

    def value_and_grad(self, **options: Any) -> Any:
        return reference.value_and_grad(self.model, self.X, self.y, **self.options, **options)

    def names(self) -> list[str]:
        return [*self.model.parameters(), "X", *(["query"] if "query" in self.options else [])]


HEADS, TOKENS, DIM, OUTPUTS, RANK = 7, 3, 5, 4, 2
RNG = np.random.default_rng(5)
EXTERNAL = RNG.standard_normal((6, 2, DIM))
WEIGHT = np.array([1.0, 0.0, 2.5, 0.5, 3.0, 1.0])
LENGTHS = np.array([3, 1, 0, 2, 3, 2])
Q, K = RNG.standard_normal((2, HEADS, DIM, RANK)) / 2.5
FACTORS = {"low rank": {"Q": Q, "K": K}, "tied": {"Q": Q}}


def case(kind: str, rows: int = TOKENS, loss: str = "", factors: str = "", **given: Any) -> Case:
    """A classifier or layer with `rows` query rows; `given` are fields of Model and options."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((6, TOKENS, DIM))
    fields = {name: given.pop(name) for name in ("prompt", "scale", "causal") if name in given}
    if isinstance(given.get("query"), int):
        fields["query"] = given.pop("query")
    fields |= FACTORS[factors] if factors else {"W": rng.standard_normal((HEADS, DIM, DIM)) / DIM}
    if kind == "classifier":
        fields["U"] = rng.standard_normal((HEADS, rows, DIM))
        shape: tuple[int, ...] = (6,)
    else:
        fields["V"] = rng.standard_normal((HEADS, DIM, OUTPUTS)) / 4
        shape = (6, rows, OUTPUTS)
    loss = loss or ("logistic" if kind == "classifier" else "squared")
    y: Any = np.where(rng.random(shape) < 0.5, 1.0, -1.0)
    if loss == "squared":
        y = y + rng.standard_normal(shape)
    if loss == "cross_entropy":
        y = rng.integers(0, OUTPUTS, (6, rows))
    return Case(Model(**fields), X, y, given | {"loss": loss})


PROMPT = RNG.standard_normal((2, DIM))
ROW_WEIGHT = RNG.random((6, TOKENS)) * (RNG.random((6, TOKENS)) < 0.8)
CASES = {
    f"{kind}, {name}": case(kind, **options)
    for kind, variants in {
        "classifier": {
            "exponential": {"loss": "exponential"},
            "linear": {"loss": "linear"},
        },
        "layer": {
            "logistic, row weights": {"loss": "logistic", "weight": ROW_WEIGHT},
            "cross entropy": {"loss": "cross_entropy"},
            "cross entropy, weighted": {"loss": "cross_entropy", "weight": WEIGHT},
            "cross entropy, row weights": {"loss": "cross_entropy", "weight": ROW_WEIGHT},
            "cross entropy, lengths": {"loss": "cross_entropy", "lengths": LENGTHS},
            "cross entropy, lengths, weighted": {
                "loss": "cross_entropy", "lengths": LENGTHS, "weight": WEIGHT,
            },
            "lengths, row weights": {"lengths": LENGTHS, "weight": ROW_WEIGHT},
        },
    }.items()
    for name, options in {
        "plain": {},
        "squared": {"loss": "squared"},
        "logistic": {"loss": "logistic"},
        "weighted": {"weight": WEIGHT},
        "first token": {"rows": 1, "query": 0},
        "last token, scaled": {"rows": 1, "query": -1, "scale": 0.7},
        "last token, lengths": {"rows": 1, "query": -1, "lengths": LENGTHS},
        "last but one, lengths": {"rows": 1, "query": -2, "lengths": LENGTHS},
        "second token, lengths": {"rows": 1, "query": 1, "lengths": LENGTHS},
        "second token, causal": {"rows": 1, "query": 1, "causal": True},
        "last token, causal, lengths": {
            "rows": 1, "query": -1, "causal": True, "lengths": LENGTHS,
        },
        "external": {"rows": 2, "query": EXTERNAL},
        "external, causal, lengths": {
            "rows": 2, "query": EXTERNAL, "causal": True, "lengths": LENGTHS,
        },
        "prompt": {"rows": 2, "prompt": PROMPT},
        "prompt, tied, lengths": {
            "rows": 2, "prompt": PROMPT, "factors": "tied", "lengths": LENGTHS,
        },
        "low rank": {"factors": "low rank", "scale": 0.7},
        "tied": {"factors": "tied"},
        "causal": {"causal": True},
        "lengths, weighted": {"lengths": LENGTHS, "weight": WEIGHT},
        "causal, lengths, low rank": {
            "causal": True, "lengths": LENGTHS, "factors": "low rank",
        },
        **variants,
    }.items()
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_gradients_match_finite_differences(name: str) -> None:
    the = CASES[name]
    rng = np.random.default_rng(1)
    _, gradient = the.value_and_grad(wrt=the.names())
    assert list(gradient) == the.names()
    for part, array in gradient.items():
        direction = rng.standard_normal(array.shape)
        up, down = (the.moved(part, h * direction).value_and_grad()[0] for h in (1e-5, -1e-5))
        # Truncation h² and rounding 1e-16 / h both stay below 1e-10 of values of order ten.
        assert math.isclose(
            (up - down) / 2e-5, (array * direction).sum(), rel_tol=1e-7, abs_tol=1e-8
        )


@every_case
def test_hessian_matches_differences_of_the_gradient(name: str) -> None:
    the = CASES[name]
    rng = np.random.default_rng(2)
    names = list(the.model.parameters())
    tangent, other = (
        {n: rng.standard_normal(a.shape) for n, a in the.model.parameters().items()} for _ in "ab"
    )
    up, down = the, the
    for part in names:
        up, down = up.moved(part, 1e-5 * tangent[part]), down.moved(part, -1e-5 * tangent[part])
    high, low = up.value_and_grad()[1], down.value_and_grad()[1]
    product = reference.hvp(the.model, the.X, the.y, tangent, **the.options)
    assert list(product) == names
    for part in names:
        # Truncation h² times a third derivative of up to a thousand; rounding 1e-16 / h.
        assert relative(product[part], (high[part] - low[part]) / 2e-5) < 1e-6
    # A Hessian is symmetric: sums of some hundred products of order ten.
    transposed = reference.hvp(the.model, the.X, the.y, other, **the.options)
    assert math.isclose(
        sum((other[n] * product[n]).sum() for n in names),
        sum((tangent[n] * transposed[n]).sum() for n in names),
        rel_tol=1e-10,
        abs_tol=1e-10,
    )
    only = {names[-1]: tangent[names[-1]]}
    rest = {n: t for n, t in tangent.items() if n != names[-1]}
    parts = [
        reference.hvp(the.model, the.X, the.y, t, wrt=names[0], **the.options) for t in (only, rest)
    ]
    assert relative(parts[0][names[0]] + parts[1][names[0]], product[names[0]]) < 1e-12


def torch_outputs(torch: Any, the: Case, tensors: dict[str, Any]) -> Any:
    """Outputs sample by sample: padding is cut off, not masked."""
    model, X = the.model, tensors["X"]
    if model.Q is None:
        W = tensors["W"]
    else:
        W = tensors["Q"] @ tensors["K" if model.K is not None else "Q"].mT
    lengths = the.options.get("lengths", [TOKENS] * 6)
    found = []
    for i, length in enumerate(lengths):
        x = X[i, :length]
        place = torch.arange(length)
        if "prompt" in tensors:
            z = tensors["prompt"]
        elif "query" in tensors:
            z = tensors["query"][i]
            place = torch.arange(len(z))
        elif model.query is not None:
            j = model.query if model.query >= 0 else length + model.query
            z = x[j : j + 1] if 0 <= j < length else torch.zeros(1, DIM, dtype=x.dtype)
            place = torch.tensor([j])
        else:
            z = x
        S = model.scale * z @ W @ x.T
        if model.causal:
            S = S.masked_fill(torch.arange(length) > place[:, None], -math.inf)
        AX = torch.softmax(S, dim=-1) @ x
        if model.U is not None:
            found.append((tensors["U"][:, : len(z)] * AX).sum() / math.sqrt(HEADS))
        else:
            F = (AX @ tensors["V"]).sum(dim=0)
            padding = torch.zeros(the.y.shape[1] - len(z), OUTPUTS, dtype=F.dtype)
            found.append(torch.cat([F, padding]))
    return torch.stack(found)


def torch_loss(torch: Any, the: Case, F: Any) -> Any:
    y, options = torch.tensor(the.y), the.options
    rows = F.shape[1] if F.ndim == 3 else 1
    if options["loss"] == "cross_entropy":
        terms = torch.nn.functional.cross_entropy(F.movedim(2, 1), y, reduction="none")
    else:
        terms = {
            "logistic": lambda: torch.nn.functional.softplus(-y * F),
            "exponential": lambda: torch.exp(-y * F),
            "linear": lambda: -y * F,
            "squared": lambda: (F - y) ** 2,
        }[options["loss"]]()
        terms = terms.reshape(6, rows, -1).sum(dim=2)
    weight = torch.tensor(options.get("weight", np.ones(6)))
    of_rows = (weight if weight.ndim == 2 else weight[:, None]).expand(6, rows)
    ragged = "lengths" in options and the.model.query is the.model.prompt is None
    if F.ndim == 3 and ragged and "query" not in options:
        of_rows = of_rows * (torch.arange(rows) < torch.tensor(options["lengths"])[:, None])
    mean = weight.ndim == 2 or options["loss"] == "cross_entropy"
    return (of_rows * terms).sum() / (of_rows if mean else weight).sum()


@pytest.mark.peers
@every_case
def test_everything_matches_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    the = CASES[name]
    arrays = the.model.parameters() | {"X": the.X}
    if "query" in the.options:
        arrays["query"] = the.options["query"]
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in arrays.items()}
    seen = {n: the.options[n] for n in ("query", "lengths") if n in the.options}
    F = torch_outputs(torch, the, tensors)
    outputs = reference.outputs(the.model, the.X, **seen)
    # Sums of about a hundred products of order one, rounded in another order; so below.
    assert relative(outputs, F.detach().numpy()) < 1e-13

    loss = torch_loss(torch, the, F)
    value, gradient = the.value_and_grad(wrt=the.names())
    assert math.isclose(value, loss.item(), rel_tol=1e-13, abs_tol=1e-13)
    expected = torch.autograd.grad(loss, list(tensors.values()), create_graph=True)
    for part, tensor in zip(tensors, expected, strict=True):
        assert relative(gradient[part], tensor.detach().numpy()) < 1e-12, part

    rng = np.random.default_rng(3)
    cotangent = rng.standard_normal(outputs.shape)
    gradient = reference.backward(the.model, the.X, cotangent, wrt=the.names(), **seen)
    pulled = torch.autograd.grad(F, list(tensors.values()), torch.tensor(cotangent), True)
    for part, tensor in zip(tensors, pulled, strict=True):
        assert relative(gradient[part], tensor.numpy()) < 1e-12, part


def test_padding_has_no_influence() -> None:
    for name, the in CASES.items():
        if "lengths" not in the.options:
            continue
        padding = np.arange(TOKENS) >= LENGTHS[:, None]
        dirty = the.X.copy()
        dirty[padding] = np.nan
        y = np.array(the.y)
        if y.ndim > 1 and y.shape[1] == TOKENS:
            y[padding] = 9 if y.ndim == 2 else np.inf
        value, gradient = the.value_and_grad(wrt=the.names())
        other = the._replace(X=dirty, y=y).value_and_grad(wrt=the.names())
        assert value == other[0], name
        assert all((gradient[part] == other[1][part]).all() for part in gradient), name
        assert not gradient["X"][padding].any()
        assert not np.isnan(value)
        A = reference.attention(the.model, dirty, query=the.options.get("query"), lengths=LENGTHS)
        assert not A[2].any()  # the sample of length 0
        assert not np.swapaxes(A, 1, 3)[padding].any()


def test_losses_at_large_margins() -> None:
    y = np.array([1.0, 1.0, -1.0, -1.0])
    phi = np.array([1e3, -1e3, 700.0, -700.0])
    value, loss_derivative, log_slope = reference.loss_terms(phi, y)
    assert value.tolist() == [0.0, 1000.0, 700.0, math.exp(-700.0)]
    assert loss_derivative.tolist() == [-0.0, -1.0, 1.0, math.exp(-700.0)]
    assert log_slope.tolist() == [-1000.0, 0.0, -math.exp(-700.0), -700.0]
    assert math.copysign(1.0, loss_derivative[0]) == -1.0  # the sign outlives the underflow

    F = np.array([[700.0, 0.0, -50.0], [0.0, 1e3, 0.0]])
    value, loss_derivative, log_slope = reference.loss_terms(F, [0, 2], "cross_entropy")
    assert value.tolist() == [[math.exp(-700.0)], [1000.0]]
    tail = math.exp(-700.0)
    assert loss_derivative.tolist() == [
        [-tail, tail, math.exp(-750.0)],
        [math.exp(-1e3), 1.0, -1.0],
    ]
    assert log_slope[0].tolist() == [-700.0, -700.0, -750.0]


@pytest.mark.parametrize("loss", LOSSES[mh.Layer])
def test_loss_derivatives(loss: Any) -> None:
    rng = np.random.default_rng(0)
    F, direction = rng.standard_normal((2, 5, 3))
    y = targets(loss, F.shape, rng, outputs=3)
    if kind_of_targets(loss) == "nonnegative":
        F = np.abs(F)
    _, loss_derivative, log_slope = reference.loss_terms(F, y, loss)
    (above, slope_above, _), (below, slope_below, _) = (
        reference.loss_terms(F + h * direction, y, loss) for h in (1e-6, -1e-6)
    )
    # Central differences: truncation 1e-12, rounding 1e-10.
    change = (loss_derivative * direction).sum()
    assert math.isclose((above - below).sum() / 2e-6, change, rel_tol=1e-8, abs_tol=1e-9)
    np.testing.assert_allclose(np.exp(log_slope), np.abs(loss_derivative), rtol=1e-14)
    np.testing.assert_allclose(
        reference.losses.derivative_tangent(F, y, direction, loss),
        (slope_above - slope_below) / 2e-6,
        rtol=1e-8,
        atol=1e-9,
    )


def test_wrong_arguments() -> None:
    listed = f"{', '.join(reference.LOSSES)}, got 'hunge'"
    with pytest.raises(ValueError, match=listed):
        reference.loss_terms(np.zeros(2), np.ones(2), "hunge")
    the = CASES["layer, low rank"]
    with pytest.raises(ValueError, match="wrt: expected names from Q, K, V, X, query, got 'W'"):
        the.value_and_grad(wrt=("Q", "W"))
    with pytest.raises(ValueError, match="wrt: expected names from Q, K, V, got 'X'"):
        reference.hvp(the.model, the.X, the.y, {"Q": Q}, loss="squared", wrt="X")
    with pytest.raises(ValueError, match="prompt: expected neither query nor causal"):
        reference.outputs(CASES["layer, prompt"].model, the.X, query=EXTERNAL)


def test_uniform_attention_at_zero_scores() -> None:
    instance = problem()
    X, U = instance["X"], instance["U"]
    model = Model(W=np.zeros((7, 5, 5)), U=U)
    assert (reference.attention(model, X) == 1 / 3).all()
    expected = np.einsum("hqd,nd->n", U, X.mean(axis=1)) / math.sqrt(7)
    # Sums of 105 products.
    np.testing.assert_allclose(reference.outputs(model, X), expected, rtol=1e-13)


def test_two_tokens_give_the_sigmoid() -> None:
    x, w, u = np.array([[1.0, 2.0], [0.5, -1.0]]), np.array([[0.3, -0.2], [0.1, 0.4]]), [2.0, -1.0]
    z = x[1]
    gap = z @ w @ (x[0] - x[1])
    sigmoid = 1 / (1 + math.exp(-gap))
    loss_derivative = sigmoid * (1 - sigmoid) * (np.array(u) @ (x[0] - x[1]))
    model = Model(W=w[None], U=np.array([[u]]), query=-1)
    _, gradient = reference.value_and_grad(model, x[None], [1.0], loss="linear")
    # Three products; only the order of rounding differs.
    np.testing.assert_allclose(
        gradient["W"][0], -loss_derivative * np.outer(z, x[0] - x[1]), rtol=1e-14
    )
    expected = -(sigmoid * x[0] + (1 - sigmoid) * x[1])
    np.testing.assert_allclose(gradient["U"][0, 0], expected, rtol=1e-14)


def test_huge_logits_and_bad_samples() -> None:
    instance = problem()
    model = Model(W=instance["W"], U=instance["U"])
    A = reference.attention(replace(model, W=1e8 * instance["W"]), instance["X"])
    assert ((A == 0) | (A == 1)).all()
    assert (A.sum(axis=-1) == 1).all()
    X = instance["X"].copy()
    X[4, 1, 2] = np.nan
    with np.errstate(invalid="ignore"):
        phi = reference.outputs(model, X)
    clean = reference.outputs(model, instance["X"])
    assert np.isnan(phi[4])
    assert (np.delete(phi, 4) == np.delete(clean, 4)).all()


def test_symmetries() -> None:
    the = CASES["classifier, plain"]
    value, gradient = the.value_and_grad()
    order, tokens, heads = [3, 5, 0, 1, 4, 2], [2, 0, 1], [6, 0, 5, 1, 4, 2, 3]
    W, U = the.model.dense(), the.model.readout()
    permuted = Model(W=W[heads], U=U[heads][:, tokens])
    other = reference.value_and_grad(permuted, the.X[order][:, tokens], the.y[order])
    # The same sums in another order.
    assert math.isclose(other[0], value, rel_tol=1e-13)
    assert relative(other[1]["W"], gradient["W"][heads]) < 1e-13
    assert relative(other[1]["U"], gradient["U"][heads][:, tokens]) < 1e-13
    scaled = the._replace(model=replace(the.model, W=2.0 * W, scale=0.5)).value_and_grad()
    assert scaled[0] == value  # powers of two are exact
    assert (scaled[1]["W"] == 0.5 * gradient["W"]).all()


def test_weights_count_samples() -> None:
    for name in ("classifier, plain", "layer, cross entropy"):
        the = CASES[name]
        weight = [1, 0, 2, 1, 0, 3]
        weighted = the.value_and_grad(weight=weight)
        rows = [0, 2, 2, 3, 5, 5, 5]
        repeated = the._replace(X=the.X[rows], y=the.y[rows]).value_and_grad()
        # The same sums in another order.
        assert math.isclose(weighted[0], repeated[0], rel_tol=1e-13)
        for part, array in weighted[1].items():
            assert relative(array, repeated[1][part]) < 1e-13


def test_runs_are_single_runs() -> None:
    rng = np.random.default_rng(4)
    X, query = rng.standard_normal((2, 6, 3, 5)), rng.standard_normal((2, 6, 4, 5))
    lengths = rng.integers(0, 4, (2, 6))
    for name, W in (
        ("U", rng.standard_normal((7, 5, 5))),
        ("V", rng.standard_normal((2, 7, 5, 5))),
    ):
        readout = rng.standard_normal((2, 7, 4, 5) if name == "U" else (7, 5, 2))
        model = Model(W=W, **{name: readout}, query=query)
        weight = rng.random((2, 6)) if name == "U" else rng.random((6, 4))
        y = np.sign(rng.standard_normal((6,) if name == "U" else (2, 6, 4, 2)))
        value, gradient = reference.value_and_grad(
            model, X, y, weight=weight, lengths=lengths, wrt=("W", name, "query")
        )
        product = reference.hvp(model, X, y, {"W": W}, weight=weight, lengths=lengths)
        A = reference.attention(model, X, lengths=lengths)
        assert value.shape == (2,)
        assert A.shape == (2, 6, 7, 4, 3)
        for r in range(2):
            one = Model(**{
                n: a[r] if a.ndim == 4 else a for n, a in model.parameters().items()
            }, query=query[r])  # fmt: skip
            options = {"lengths": lengths[r], "weight": weight[r] if name == "U" else weight}
            arguments = (one, X[r], y[r] if name == "V" else y)
            single = reference.value_and_grad(*arguments, wrt=("W", name, "query"), **options)
            assert value[r] == single[0]
            assert all((gradient[n][r] == single[1][n]).all() for n in gradient)
            direction = {"W": one.dense()}
            assert (product["W"][r] == reference.hvp(*arguments, direction, **options)["W"]).all()
            assert (A[r] == reference.attention(one, X[r], lengths=lengths[r])).all()
    with pytest.raises(ValueError, match=r"runs: expected one number of runs, got \[2, 3\]"):
        reference.outputs(Model(W=rng.random((3, 7, 5, 5)), V=readout), X)


def test_gradient_bound_of_self_attention() -> None:
    for seed in range(20):
        instance = problem(seed)
        model = Model(W=instance["W"], U=instance["U"])
        value, gradient = reference.value_and_grad(model, instance["X"], instance["y"])
        radius = np.linalg.norm(instance["X"], axis=-1).max()
        u = np.linalg.norm(instance["U"], axis=(1, 2)).max()
        b1 = math.sqrt(3) * radius * (radius**2 * u + 1)
        assert reference.training.norm(gradient.values()) <= b1 * value
