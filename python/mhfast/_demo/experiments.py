"""The three experiments of the demo: settings, a function that runs them, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import data, reference
from ..dataset.dataset import Dataset
from ..models import Classifier
from ..optimizers import GradientDescent, NormalizedGradientDescent
from ..training.run import Run
from ..training.train import train

Array: TypeAlias = NDArray[np.floating[Any]]
Advance: TypeAlias = Callable[[int], None]
"""Called with the steps taken since the last call, a step of H heads counted H times."""


@dataclass(frozen=True)
class Digits:
    """Handwritten 3 against 8, read row by row: H heads, Gaussian start, gradient descent."""

    splits: int = 5
    heads: int = 4
    std: float = 0.1
    lr: float = 1.0
    steps: int = 1000

    @property
    def total(self) -> int:
        """Steps of the whole experiment, a step of H heads counted H times."""
        return self.splits * self.heads * self.steps


@dataclass(frozen=True)
class DigitsResult:
    """Curves (splits, K) at `steps` (K,), attention (H,8,8) averaged over the first test set."""

    settings: Digits
    steps: NDArray[np.int64]
    train_loss: Array
    test_loss: Array
    test_error: Array
    attention_before: Array
    attention_after: Array


def run_digits(settings: Digits, advance: Advance) -> DigitsResult:
    """Train on 250 images, test on the other 107, once for each split."""
    runs = []
    attention = []
    for split in range(settings.splits):
        train_set, test_set = data.digits((3, 8), seed=split, dtype=np.float32)
        start = Classifier.gaussian(
            settings.heads,
            train_set.tokens,
            train_set.dim,
            std=settings.std,
            seed=split,
            dtype=np.float32,
        )
        run = train(
            start,
            train_set,
            steps=settings.steps,
            optimizer=GradientDescent(settings.lr),
            test=test_set,
            record=dict.fromkeys(("loss", "test_loss", "test_accuracy"), 5),
        )
        runs.append(run)
        if split == 0:
            attention = [model.attention(test_set).mean(axis=0) for model in (start, run.model)]
        advance(settings.heads * settings.steps)
    return DigitsResult(
        settings,
        runs[0].steps["loss"],
        _curves(runs, "loss"),
        _curves(runs, "test_loss"),
        1.0 - _curves(runs, "test_accuracy"),
        *attention,
    )


STARTS = ("zero", "random step")
CONVENTIONS = ("constant", "sqrt(H)")


@dataclass(frozen=True)
class Heads:
    """The role of H on the tokenized mixture: two starts, two conventions of the step size."""

    heads: tuple[int, ...] = (1, 4, 16, 64)
    trials: int = 5
    n_train: int = 100
    n_test: int = 300
    tokens: int = 10
    dim: int = 20
    noise: float = 2.0
    lr: float = 1.0
    steps: int = 150

    @property
    def total(self) -> int:
        """Steps of the whole experiment, a step of H heads counted H times."""
        return len(STARTS) * len(CONVENTIONS) * sum(self.heads) * self.trials * self.steps


Setting: TypeAlias = tuple[str, str, int]
"""Start, convention of the step size, number of heads H."""


@dataclass(frozen=True)
class HeadsResult:
    """Curves (trials, K) for each `Setting`, at `steps` and `test_steps` (K,)."""

    settings: Heads
    steps: NDArray[np.int64]
    test_steps: NDArray[np.int64]
    train_loss: dict[Setting, Array]
    test_error: dict[Setting, Array]


def run_heads(settings: Heads, advance: Advance) -> HeadsResult:
    """Train with every start, convention and number of heads on the same data sets.

    "constant" takes steps of size lr, "sqrt(H)" of size lr · sqrt(H).  From zero, H heads act as
    one head with output scale sqrt(H), so that the two conventions lead to different conclusions.
    """
    runs: dict[Setting, list[Run]] = {}
    for trial in range(settings.trials):
        train_set = data.tokenized_mixture(
            settings.n_train,
            settings.tokens,
            settings.dim,
            noise=settings.noise,
            seed=trial,
            dtype=np.float32,
        )
        test_set = train_set.sample(settings.n_test, seed=trial)
        for setting in product(STARTS, CONVENTIONS, settings.heads):
            start, convention, heads = setting
            run = train(
                _start(start, train_set, heads, trial),
                train_set,
                steps=settings.steps,
                optimizer=GradientDescent(
                    settings.lr * (math.sqrt(heads) if convention == "sqrt(H)" else 1.0)
                ),
                test=test_set,
                record={"loss": 1, "test_accuracy": 5},
            )
            runs.setdefault(setting, []).append(run)
            advance(heads * settings.steps)
    steps = run.steps  # the same for all
    return HeadsResult(
        settings,
        steps["loss"],
        steps["test_accuracy"],
        {setting: _curves(group, "loss") for setting, group in runs.items()},
        {setting: 1.0 - _curves(group, "test_accuracy") for setting, group in runs.items()},
    )


def _curves(runs: Sequence[Run], name: str) -> Array:
    """One record of several runs, (runs, K)."""
    return np.array([run.history[name] for run in runs])


def _start(name: str, train_set: Dataset, heads: int, seed: int) -> Classifier:
    if name == "random step":
        return Classifier.random_step(train_set, heads, seed=seed)
    return Classifier.zeros(heads, train_set.tokens, train_set.dim, dtype=train_set.dtype)


@dataclass(frozen=True)
class Saturation:
    """Normalized gradient descent on W, one head, one query: the instance of implicit bias."""

    instances: int = 20
    n: int = 6
    tokens: int = 8
    dim: int = 10
    lr: float = 0.1
    steps: int = 500

    @property
    def total(self) -> int:
        """Steps of the whole experiment: two token orders, two kinds of gradients, one head."""
        return 4 * self.instances * self.steps


@dataclass(frozen=True)
class SaturationResult:
    """Relative change of W after steps 1 .. K when the tokens are reversed, (instances, K)."""

    settings: Saturation
    textbook: Array
    mhfast: Array


def run_saturation(settings: Saturation, advance: Advance) -> SaturationResult:
    """Train twice, on the same samples with their tokens in the opposite order.

    In exact arithmetic nothing changes.  Textbook gradients A∘(C - rowsum(A∘C)) lose their digits
    as attention saturates, and a step of fixed length turns that noise into motion.
    """
    changes: dict[str, list[Array]] = {"textbook": [], "mhfast": []}
    for instance in range(settings.instances):
        rng = np.random.default_rng(instance)
        X = rng.standard_normal((settings.n, settings.tokens, settings.dim))
        y = np.where(rng.random(settings.n) < 0.5, -1.0, 1.0)
        U = rng.standard_normal((1, 1, settings.dim)) / math.sqrt(settings.dim)
        orders = [Dataset(tokens, y, query=X[:, :1]) for tokens in (X, X[:, ::-1])]
        for name, path in (("textbook", _textbook_path), ("mhfast", _mhfast_path)):
            W, reversed_W = (path(part, U, settings) for part in orders)
            advance(2 * settings.steps)
            length = np.linalg.norm(W, axis=(1, 2))
            change = np.linalg.norm(W - reversed_W, axis=(1, 2))
            changes[name].append(change[1:] / length[1:])
    return SaturationResult(settings, np.array(changes["textbook"]), np.array(changes["mhfast"]))


def _mhfast_path(samples: Dataset, U: Array, settings: Saturation) -> Array:
    """W of the one head at every step, (steps + 1, d, d)."""
    start = Classifier(np.zeros((1, settings.dim, settings.dim)), U, query=samples.query)
    optimizer = NormalizedGradientDescent(settings.lr)
    run = train(start, samples, steps=settings.steps, optimizer=optimizer, wrt="W", record="W")
    return run.history["W"][:, 0]


def _textbook_path(samples: Dataset, U: Array, settings: Saturation) -> Array:
    """As `_mhfast_path`, by the textbook formula in float64 NumPy."""
    W = np.zeros((settings.steps + 1, settings.dim, settings.dim))
    for k in range(settings.steps):
        model = Classifier(W[k : k + 1], U, query=samples.query)
        _, g = reference.textbook_value_and_grad(model, samples.X, samples.y, wrt="W")
        W[k + 1] = W[k] - settings.lr * g["W"][0] / np.linalg.norm(g["W"])
    return W
