"""Every parallel pass, on more threads than are good for it: for a build with the thread sanitizer.

Not a test by itself: what is looked for are the sanitizer's reports (docs/development.md).
"""

import os

import numpy as np

import mhfast as mh
from mhfast import _core

THREADS = 3
PLANS = ("samples", "hybrid", "rows", "tiles", "auto")


def classifier(dtype: type, n: int, T: int, d: int, H: int, size: float) -> None:
    """Outputs, attention, gradients of parameters and inputs, curvature, training."""
    model = mh.Classifier.gaussian(H, T, d, std=size, seed=0, dtype=dtype)
    data = mh.data.planted_attention(n, T, d, 2, seed=1, dtype=dtype)
    model(data)
    model.attention(data)
    mh.value_and_grad(model, data)
    mh.value_and_grad(model, data, wrt=("W", "X"))
    mh.hvp(model, data, tangent=model)
    for optimizer in (mh.GradientDescent(0.1), mh.NormalizedGradientDescent(0.1)):
        record = ("loss", "accuracy", "margin", "grad_norm", "distance")
        mh.train(model, data, test=data, steps=4, optimizer=optimizer, record=record)


def layer(dtype: type, n: int, T: int, d: int, H: int, size: float) -> None:
    model = mh.Layer.gaussian(H, d, 4, std=size, seed=0, dtype=dtype)
    rng = np.random.default_rng(1)
    X, Y = rng.standard_normal((n, T, d)).astype(dtype), rng.standard_normal((n, T, 4))
    data = mh.Dataset(X, Y.astype(dtype))
    model(data)
    mh.value_and_grad(model, data, loss="squared")
    mh.value_and_grad(model, data, loss="squared", wrt=("V", "X"))
    mh.hvp(model, data, tangent=model, loss="squared")
    mh.train(model, data, loss="squared", steps=4, optimizer=mh.Adam(0.01))


def runs(dtype: type) -> None:
    """Blocks of runs on threads of their own, and runs whose own passes are shared."""
    for n, count in ((12, 17), (600, 2)):
        models = [mh.Classifier.gaussian(4, 8, 10, std=0.3, seed=i, dtype=dtype) for i in range(3)]
        data = mh.data.planted_attention(n, 8, 10, 2, seed=1, dtype=dtype)
        stack = mh.stack([models[i % 3] for i in range(count)])
        mh.value_and_grad(stack, data)
        mh.train(stack, data, steps=4, optimizer=mh.NormalizedGradientDescent(0.1))


def learner() -> None:
    data = mh.data.boolean_layer(4000, 3, 8, 2, seed=1)
    mh.learn_layer(data.X, data.y, 2)


def main() -> None:
    mh.set_num_threads(THREADS)
    for plan in PLANS:
        _core.force_plan(plan)
        for dtype in (np.float32, np.float64):
            for size in (0.3, 60.0):  # the large ones so that gradients must be scaled
                classifier(dtype, 150, 12, 11, 6, size)
            if plan == "tiles":  # heads enough for several slabs
                classifier(dtype, 13, 12, 21, 601, 0.3)
            layer(dtype, 150, 12, 11, 6, 0.3)
        print(plan, "done", flush=True)
    for dtype in (np.float32, np.float64):
        runs(dtype)
    learner()


if __name__ == "__main__":
    assert "libtsan" in os.environ.get("LD_PRELOAD", ""), (
        "without the sanitizer nothing is looked for"
    )
    main()
