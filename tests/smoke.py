"""What an installed wheel must do, away from the source tree."""

import numpy as np

import mhfast as mh

data = mh.data.tokenized_mixture(30, 5, 12, seed=0)
model = mh.Classifier.gaussian(4, 5, 12, std=0.3, seed=1)
value, gradients = mh.value_and_grad(model, data)
expected, exact = mh.reference.value_and_grad(model, data.X, data.y)
assert abs(value - expected) < 1e-12
for name, true in exact.items():
    assert np.abs(getattr(gradients, name) - true).max() < 1e-12 * np.abs(true).max()

run = mh.train(model, data, steps=200, optimizer=mh.GradientDescent(lr=0.5))
assert run.history["loss"][-1] < run.history["loss"][0]
print("smoke test passed:", mh.__version__)
