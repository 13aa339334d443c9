"""Every step rule beside torch, autograd and torch.optim where it has the rule: right, and timed.

Run: pytest benchmarks/test_optimizers.py. A group is one rule, both on one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mhfast as mh

torch = pytest.importorskip("torch", reason="pip install torch")

n, T, d, H = 64, 8, 16, 5
STEPS = 20
LR = 0.01
torch.set_num_threads(1)
# Twenty steps of order lr round a few times each; quotients of small moments amplify that.
TOLERANCE = 1e-9


def sign(g: Any) -> Any:
    return torch.sign(g)


def polar(g: Any) -> Any:
    U, _, Vh = torch.linalg.svd(g, full_matrices=False)
    return U @ Vh


class Along:
    """θ - lr D(g), for rules that torch does not have."""

    def __init__(self, parameters: Any, lr: float, D: Any) -> None:
        self.parameters, self.lr, self.D = parameters, lr, D

    def zero_grad(self) -> None:
        for theta in self.parameters:
            theta.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for theta in self.parameters:
                theta.sub_(self.D(theta.grad), alpha=self.lr)


RULES = {
    "GradientDescent": (mh.GradientDescent(LR), torch.optim.SGD, {}),
    "Momentum": (mh.Momentum(LR, 0.9), torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (mh.Adam(LR), torch.optim.Adam, {}),
    "AdamW": (mh.AdamW(LR), torch.optim.AdamW, {}),
    "AdaGrad": (mh.AdaGrad(LR), torch.optim.Adagrad, {}),
    "RMSProp": (mh.RMSProp(LR), torch.optim.RMSprop, {}),
    "SignDescent": (mh.SignDescent(LR), Along, {"D": sign}),
    "spectral": (mh.SteepestDescent(LR, "spectral"), Along, {"D": polar}),
}


def problem() -> tuple[mh.Classifier, mh.Dataset]:
    rng = np.random.default_rng(0)
    model = mh.Classifier(rng.standard_normal((H, d, d)) / 10, rng.standard_normal((H, T, d)) / 10)
    return model, mh.Dataset(rng.standard_normal((n, T, d)), rng.choice([-1.0, 1.0], n))


def by_torch(model: mh.Classifier, data: mh.Dataset, rule: Any, options: Any) -> tuple[Any, Any]:
    W, U = (torch.tensor(model.parameters[name], requires_grad=True) for name in ("W", "U"))
    X, y = torch.from_numpy(np.array(data.X)), torch.from_numpy(np.array(data.y))
    optimizer = rule([W, U], lr=LR, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scores = X[:, None] @ W @ X[:, None].mT
        outputs = (scores.softmax(-1) @ X[:, None] * U).sum((1, 2, 3)) / H**0.5
        torch.nn.functional.softplus(-y * outputs).mean().backward()
        optimizer.step()
    return W.detach().numpy(), U.detach().numpy()


@pytest.mark.parametrize("peer", ["mhfast", "torch"])
@pytest.mark.parametrize("name", RULES)
def test_step_rule(benchmark: Any, name: str, peer: str) -> None:
    benchmark.group = name
    optimizer, rule, options = RULES[name]
    model, data = problem()
    if peer == "torch":
        W, U = benchmark.pedantic(by_torch, (model, data, rule, options), rounds=5, warmup_rounds=1)
    else:
        options_of_train = {
            "steps": STEPS, "optimizer": optimizer, "record": {"loss": STEPS}, "num_threads": 1,
        }  # fmt: skip
        run = benchmark.pedantic(
            mh.train, (model, data), options_of_train, rounds=5, warmup_rounds=1
        )
        W, U = run.model.W, run.model.U
    expected = by_torch(model, data, rule, options)
    for found, theirs in zip((W, U), expected, strict=True):
        assert abs(found - theirs).max() < TOLERANCE * abs(theirs).max()
