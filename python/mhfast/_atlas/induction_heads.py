"""Two layers learn an induction head: the token that followed the last time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

import mhfast as mh

from ..figures import BLUE, GREEN, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import Array, band, label, panels

TRIGGERS, BATCH = 5, 64
ROW_OF_FIGURE = 0  # which held-out sequence is drawn


def run(quick: bool) -> Outcome:
    """Train stacks of two layers, and single layers, on the same stream of sequences."""
    words, tokens, steps, starts, held = (12, 24, 280, 1, 300) if quick else (16, 32, 600, 3, 1000)
    draw = partial(sequences, words=words, tokens=tokens)
    test = draw(held, seed=10**6)
    dim, every = words + tokens, steps // 40
    two = [two_layers(words, tokens, seed) for seed in range(starts)]
    models: dict[str, list[mh.Stack]] = {
        "two layers, one head each": two,
        "one layer, one head": [one_layer(1, dim, words, seed) for seed in range(starts)],
        "one layer, four heads": [one_layer(4, dim, words, seed) for seed in range(starts)],
    }
    runs = {
        name: [
            mh.train(
                model,
                test,
                steps=steps,
                optimizer=mh.Adam(0.03),
                stream=draw,
                batch=BATCH,
                seed=seed,
                loss="cross_entropy",
                wrt=("0.W", "1.W", "1.V") if model.depth == 2 else None,
                record={"accuracy": every},
            )
            for seed, model in enumerate(some)
        ]
        for name, some in models.items()
    }
    stacks = [one.model for one in runs["two layers, one head each"]]
    previous = min(previous_token(stack, test) for stack in stacks)
    induced = min(after_the_same(stack, test, words) for stack in stacks)
    blind = max(without_first(stack).accuracy(test, loss="cross_entropy") for stack in stacks)
    final = {
        name: [float(one.history["accuracy"][-1]) for one in some] for name, some in runs.items()
    }
    alone = max(max(values) for name, values in final.items() if name.startswith("one"))
    figure, (left, first, second) = panels(
        "Two layers learn to look up what followed the last time", columns=3, height=3.6
    )
    for name, color in zip(runs, (BLUE, ORANGE, GREEN), strict=True):
        curves = np.array([one.history["accuracy"] for one in runs[name]])
        band(left, runs[name][0].steps["accuracy"], curves, color, name)
    label(
        left, "step of Adam", "held-out accuracy", "rows whose next token is known", ylim=(0, 1.03)
    )
    maps = stacks[0].attention(test.subset([ROW_OF_FIGURE]))
    rows = np.asarray(test.weight)[ROW_OF_FIGURE] > 0
    draw_map(first, maps[0][0, 0], "layer 1: to the token before")
    draw_map(
        second,
        np.where(rows[:, None], maps[1][0, 0], np.nan),
        "layer 2: to what followed the token",
    )
    sure, most = (0.95, 0.8) if quick else (0.99, 0.9)
    return Outcome(
        ("model", "trained numbers", "least accuracy", "most"),
        [
            (name, str(numbers(runs[name][0])), min(values), max(values))
            for name, values in final.items()
        ],
        [
            Claim("two layers: least held-out accuracy over the starts",
                  min(final["two layers, one head each"]), sure),
            Claim("one layer, of one head or four: best held-out accuracy", alone, 0.5,
                  at_least=False),
            Claim("layer 1: weight of the token before, mean over rows, least over the starts",
                  previous, most),
            Claim("layer 2: weight of the tokens that followed the same token, mean over rows "
                  "that know the answer, least over the starts", induced, most),
            Claim("two layers with the weights of layer 1 made uniform: best held-out accuracy",
                  blind, 0.7, at_least=False),
        ],
        figure,
    )  # fmt: skip


def sequences(n: int, seed: int, *, words: int, tokens: int) -> mh.Dataset:
    """Draw sequences in which some tokens are followed by the same token each time.

    Each sequence has its own triggers, uniform among the words, and what follows each of them,
    uniform among the others. What follows another token is a trigger with probability 1/2, else
    uniform. The tokens X (n, T, V + T) are
    one-hot beside one-hot positions, y (n, T) is the next token, and only those rows have a weight
    that hold a trigger which was there before.
    """
    rng, row = np.random.default_rng(seed), np.arange(n)
    mixed = rng.permuted(np.tile(np.arange(words), (n, 1)), axis=1)
    triggers, others = np.split(mixed, [TRIGGERS], axis=1)
    chosen = rng.integers(0, words - TRIGGERS, (n, TRIGGERS))
    follows = np.full((n, words), -1)
    np.put_along_axis(follows, triggers, np.take_along_axis(others, chosen, axis=1), axis=1)
    x = np.empty((n, tokens + 1), int)
    x[:, 0] = rng.integers(0, words, n)
    for t in range(tokens):
        drawn = rng.integers(0, words, n)
        trigger = triggers[row, rng.integers(0, TRIGGERS, n)]
        known = follows[row, x[:, t]]
        x[:, t + 1] = np.where(known >= 0, known, np.where(rng.random(n) < 0.5, trigger, drawn))
    now = x[:, :-1]
    before = (now[:, :, None] == now[:, None, :]) & np.tri(tokens, k=-1, dtype=bool)
    determined = (follows[row[:, None], now] >= 0) & before.any(axis=-1)
    places = np.broadcast_to(np.eye(tokens), (n, tokens, tokens))
    X = np.concatenate([np.eye(words)[now], places], axis=-1)
    return mh.Dataset(X, x[:, 1:], weight=determined.astype(np.float64))


def two_layers(words: int, tokens: int, seed: int) -> mh.Stack:
    """Return the start: a first layer that copies tokens, by even weights, and one that reads."""
    dim = words + tokens
    copies = np.zeros((1, dim, words))
    copies[0, :words] = np.eye(words)
    first = mh.Layer(np.zeros((1, dim, dim)), copies, causal=True, scale=4.0)
    second = mh.Layer.gaussian(1, dim + words, words, std=0.02, seed=seed, causal=True)
    return mh.Stack([first, second], residual=("concatenate", False))


def one_layer(heads: int, dim: int, words: int, seed: int) -> mh.Stack:
    """Return a single layer that reads out."""
    layer = mh.Layer.gaussian(heads, dim, words, std=0.02, seed=seed, causal=True)
    return mh.Stack([layer], residual=False)


def without_first(stack: mh.Stack) -> mh.Stack:
    """Return the stack with even weights in its first layer."""
    first, second = stack.layers
    return stack.replace(layers=[first.replace(W=np.zeros_like(first.W)), second])


def previous_token(stack: mh.Stack, data: mh.Dataset) -> float:
    """Return the weight that the first layer gives to the token before.

    A mean over rows but for the first, which has none before, and the last, which no other reads.
    """
    weights = stack.attention(data)[0][:, 0, :-1]
    return float(np.diagonal(weights, offset=-1, axis1=1, axis2=2).mean())


def after_the_same(stack: mh.Stack, data: mh.Dataset, words: int) -> float:
    """Return the weight that the second layer gives to what followed the token of the row."""
    word = data.X[..., :words].argmax(axis=-1)
    followed = np.zeros((data.n, data.tokens, data.tokens), bool)
    followed[:, :, 1:] = word[:, :, None] == word[:, None, :-1]
    rows = (stack.attention(data)[1][:, 0] * followed).sum(axis=-1)
    return float(rows[np.asarray(data.weight) > 0].mean())


def numbers(run: mh.Run[mh.Stack]) -> int:
    """Count the numbers that were trained."""
    return sum(run.model.parameters[name].size for name in run.wrt)


def draw_map(ax: Axes, weights: Array, title: str) -> None:
    """Draw the attention weights of a sequence; rows without any are gray."""
    ax.set_facecolor("0.92")
    shown: npt.NDArray[Any] = np.ma.masked_invalid(weights)
    ax.imshow(shown, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    label(ax, "token", "row", title)


EXPERIMENT = Experiment(
    title="Two layers learn an induction head, one does not",
    paper="Bietti, Cabannes, Bouchacourt, Jegou, Bottou, Birth of a Transformer: A Memory "
    "Viewpoint, NeurIPS 2023; for one layer: Sanford, Hsu, Telgarsky, One-layer transformers fail "
    "to solve the induction heads task, 2024; for rows that are put beside the tokens: Nichani, "
    "Damian, Lee, How Transformers Learn Causal Structure with Gradient Descent, ICML 2024",
    says="On sequences in which trigger tokens are followed by a token that is drawn anew for each "
    "sequence, transformers of two layers learn an induction head: the first layer attends to the "
    "token before, the second to the token that followed an earlier occurrence of the current one. "
    "One layer would need a size that grows exponentially. Recalled from the abstracts.",
    setting="Each sequence of 32 tokens out of 16 has five triggers of its own, each followed by "
    "one of the other tokens; those are followed by a trigger with probability 1/2, else "
    "by any token, where the first paper has the bigrams of a text. Tokens are one-hot "
    "vectors beside one-hot positions, and a row of the second layer sees these and the "
    "first layer's output beside them. As in the first and third paper some matrices are "
    "fixed: the first layer copies tokens (V is the identity on them), and its W starts "
    "at 0. Trained are W of both layers and V of the second, by Adam (.03) on cross "
    "entropy with 64 new sequences a step. The loss counts only rows whose answer is "
    "determined: a trigger that was there before. The factor 4 of the logits of the first "
    "layer is ours, too: it makes its weights sharp in as few steps as those of the "
    "second. Single layers are trained whole on the same sequences. 1000 held-out "
    "sequences, three starts. Maps: one of them; gray rows have no answer.",
    run=run,
)
