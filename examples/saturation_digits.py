"""Gradients of factored attention along training, against the same gradients in 60 digits.

One head of W = Q Kᵀ, the first token as the query, logistic loss, normalized gradient descent by
mhfast. At some steps the gradients of Q and K are computed three times at the same parameters: by
mpmath in 60 decimal digits, by mhfast in float64, and by automatic differentiation of softmax in
torch, in float64 too. Without torch the textbook formula in NumPy takes its place.
"""

import argparse
import importlib.util

import mpmath
import numpy as np

import mhfast as mh

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "--steps", type=int, nargs="+", default=[1, 100, 125, 150, 175, 190], help="when"
)
parser.add_argument("--lr", type=float, default=0.03, help="length of a step of Q, and of one of K")
parser.add_argument("--rank", type=int, default=3, help="r, the columns of Q and K")
parser.add_argument("--digits", type=int, default=60, help="decimal digits of mpmath")
parser.add_argument("--seed", type=int, default=2)
arguments = parser.parse_args()
SAMPLES, TOKENS, DIM = 6, 8, 10


def exact(Q, K, U, digits):
    """Gradients of Q and K in many digits, by the formula as it stands; rounded at the end."""
    with mpmath.workdps(digits):
        number, exp = np.vectorize(mpmath.mpf, otypes=[object]), np.vectorize(mpmath.exp)
        x, q, k, u = number(X), number(Q), number(K), number(U)
        W, gradient = q @ k.T, 0
        for tokens, label in zip(x, y, strict=True):
            z, c = tokens[0], tokens @ u
            weights = exp(tokens @ (z @ W))
            weights = weights / weights.sum()
            mean = weights @ c
            slope = -mpmath.mpf(label) / (1 + mpmath.exp(mpmath.mpf(label) * mean)) / SAMPLES
            gradient = gradient + slope * np.outer(z, tokens.T @ (weights * (c - mean)))
        return [np.array(part, float) for part in (gradient @ k, gradient.T @ q)]


def by_torch(Q, K, U):
    """Return the same by automatic differentiation in float64."""
    import torch

    tokens, labels, u = (torch.from_numpy(part) for part in (X, y, U))
    q, k = (torch.from_numpy(part).requires_grad_() for part in (Q, K))
    scores = torch.einsum("ia,ab,itb->it", tokens[:, 0], q @ k.T, tokens)
    outputs = (torch.softmax(scores, -1) * (tokens @ u)).sum(-1)
    torch.nn.functional.softplus(-labels * outputs).mean().backward()
    return [q.grad.numpy(), k.grad.numpy()]


def by_textbook(Q, K, U):
    """Return the same by A∘(C - rowsum(A∘C)), in float64 with NumPy."""
    model = mh.Classifier(mh.LowRank(Q[None], K[None]), U[None, None], query=0)
    gradients = mh.reference.textbook_value_and_grad(model, X, y)[1]
    return [gradients["Q"][0], gradients["K"][0]]


def error(found, truth):
    """Return the larger of the relative errors of both gradients."""
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, truth, strict=True))


rng = np.random.default_rng(arguments.seed)
X = rng.standard_normal((SAMPLES, TOKENS, DIM))
y = np.where(rng.random(SAMPLES) < 0.5, -1.0, 1.0)
U = rng.standard_normal((1, 1, DIM)) / np.sqrt(DIM)
Q, K = 0.1 * rng.standard_normal((2, 1, DIM, arguments.rank))
run = mh.train(
    mh.Classifier(mh.LowRank(Q, K), U, query=0),
    X,
    y,
    steps=max(arguments.steps),
    optimizer=mh.NormalizedGradientDescent(arguments.lr),
    wrt=("Q", "K"),
    record=("Q", "K"),
)
torch = importlib.util.find_spec("torch")
print(f"largest relative error of the gradients of Q and K, against {arguments.digits} digits")
print(f"step  gaps of the logits  {'torch' if torch else 'textbook':>8}   mhfast")
for step in arguments.steps:
    Q, K = (run.history[part][step, 0] for part in ("Q", "K"))
    model = mh.Classifier(mh.LowRank(Q[None], K[None]), U, query=0)
    g = mh.value_and_grad(model, X, y, wrt=("Q", "K"))[1]
    truth = exact(Q, K, U[0, 0], arguments.digits)
    if error(truth, exact(Q, K, U[0, 0], 2 * arguments.digits)) > 1e-16:
        raise SystemExit(f"step {step}: more than {arguments.digits} digits are needed (--digits)")
    scores = np.sort(np.einsum("ia,ita->it", X[:, 0] @ Q @ K.T, X), axis=1)
    gaps = scores[:, -1] - scores[:, -2]
    theirs = error((by_torch if torch else by_textbook)(Q, K, U[0, 0]), truth)
    ours = error([g.Q[0], g.K[0]], truth)
    print(
        f"{step:4d} {gaps.min():8.2g} to {gaps.max():<6.2g}  {theirs:8.1e}  {ours:.1e}", flush=True
    )
