"""Textbook gradients against mhfast's where attention saturates; writes one figure.

Left: relative error of the gradient in W at two tokens whose logits differ by a gap, where a closed
form is exact. Right: relative change of W along normalized gradient descent when the tokens of
every sample are reversed, which in exact arithmetic changes nothing. Medians over instances.
"""

import argparse

import numpy as np
from matplotlib import rc_context

import mhfast as mh
from mhfast import figures

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--instances", type=int, default=20, help="random problems in each panel")
parser.add_argument("--steps", type=int, default=500, help="normalized steps of the right panel")
parser.add_argument("--output", default="saturation.png", help="the figure")
arguments = parser.parse_args()


def errors(gap, seed):
    """Relative errors of ∂L/∂W, linear loss: textbook, mhfast in float64, mhfast in float32."""
    rng = np.random.default_rng(seed)
    X = np.ones((1, 2, 5), np.float32)  # float32 numbers, so that both types see the same problem
    X[0, :, 1:] = rng.standard_normal((2, 4))
    X[0, :, 1] = [1, 0]  # Z W Xᵀ = gap · X[:, 1]: the first token wins by the gap
    W, U = np.zeros((1, 5, 5)), np.float32(rng.standard_normal((1, 1, 5)))
    W[0, 0, 1] = gap
    apart = X[0, 0].astype(float) - X[0, 1]
    exact = np.outer(X[0, 1], -apart) * (U[0, 0] @ apart) / (2 + 2 * np.cosh(gap))
    models = [mh.Classifier(W.astype(t), U.astype(t), query=-1) for t in (np.float64, np.float32)]
    found = [mh.reference.textbook_value_and_grad(models[0], X, [1], loss="linear")[1]["W"]]
    for model in models:
        found.append(mh.value_and_grad(model, X.astype(model.dtype), [1], loss="linear")[1].W)
    return [np.abs(g[0] - exact).max() / np.abs(exact).max() for g in found]


def textbook_path(data, U, lr=0.1):
    """Return W of normalized gradient descent by textbook gradients, after every step."""
    W = np.zeros((arguments.steps + 1, 10, 10))
    for k in range(arguments.steps):
        model = mh.Classifier(W[k : k + 1], U, query=data.query)
        _, gradients = mh.reference.textbook_value_and_grad(model, data.X, data.y, wrt="W")
        W[k + 1] = W[k] - lr * gradients["W"][0] / np.linalg.norm(gradients["W"])
    return W[1:]


def mhfast_path(data, U, lr=0.1):
    """Return the same by mhfast."""
    start = mh.Classifier(np.zeros((1, 10, 10)), U, query=data.query)
    step = mh.NormalizedGradientDescent(lr)
    run = mh.train(start, data, steps=arguments.steps, optimizer=step, wrt="W", record="W")
    return run.history["W"][1:, 0]


def changes(seed):
    """Relative change of W at every step when the tokens are reversed: textbook, mhfast."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((6, 8, 10))
    y = np.where(rng.random(6) < 0.5, -1.0, 1.0)
    U = rng.standard_normal((1, 1, 10)) / np.sqrt(10)
    orders = [mh.Dataset(tokens, y, query=X[:, :1]) for tokens in (X, X[:, ::-1])]
    found = []
    for path in (textbook_path, mhfast_path):
        W, of_reversed = (path(data, U) for data in orders)
        change = np.linalg.norm(W - of_reversed, axis=(1, 2))
        found.append(change / np.linalg.norm(W, axis=(1, 2)))
    return found


gaps = np.arange(1, 81)  # as far as the gradient is a normal number of float32
seeds = range(arguments.instances)
table = np.array([[errors(gap, seed) for gap in gaps] for seed in seeds])
textbook, double, single = np.median(table, axis=0).T
of_textbook, of_mhfast = np.median([changes(seed) for seed in seeds], axis=0)
steps = np.arange(1, arguments.steps + 1)
lost = gaps[textbook > 0.5][0]
with rc_context(figures.STYLE):
    figure = figures.titled(
        f"Where logits differ by {lost} or more, textbook gradients have no right digit, mhfast's "
        f"have all:\nreversed tokens change a training by {of_textbook[-1]:.0e} with the former, "
        f"by {of_mhfast[-1]:.0e} with the latter",
        3.2,
    )
    left, right = figure.subplots(
        1, 2, subplot_kw={"yscale": "log", "ylim": (1e-17, 10)}, sharey=True
    )
    left.plot(gaps, textbook, color=figures.ORANGE, label="textbook\nfloat64")
    left.plot(gaps, single, "--", color=figures.BLUE, label="mhfast\nfloat32")
    left.plot(gaps, double, color=figures.BLUE, label="mhfast\nfloat64")
    left.set(title="relative error of the gradient ∂L/∂W", xlabel="gap of the logits")
    right.plot(steps, of_textbook, color=figures.ORANGE, label="textbook\nfloat64")
    right.plot(steps, of_mhfast, color=figures.BLUE, label="mhfast\nfloat64")
    right.set(title="relative change of W, tokens reversed", xlabel="normalized step")
    for ax, last in ((left, gaps[-1]), (right, arguments.steps)):
        ax.set_xlim(0, last)
        ax.grid(axis="y", color="0.92")
        figures.name_lines(ax)
    figure.savefig(arguments.output)
