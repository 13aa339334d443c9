"""The role of the number H of heads on the tokenized mixture, in both step size conventions.

From zero, H heads stay identical and act as one head whose output is scaled by sqrt(H): at constant
step size more heads train slower, at a step size proportional to sqrt(H) they do not.
"""

import argparse

import numpy as np

import mhfast as mh

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--heads", type=int, nargs="+", default=[1, 4, 16, 64])
parser.add_argument("--start", choices=("zero", "random_step"), default="zero")
parser.add_argument("--lr", type=float, default=1.0, help="step size of one head")
parser.add_argument("--noise", type=float, default=2.0, help="norm of the noise of a context token")
parser.add_argument("--trials", type=int, default=5)
parser.add_argument("--steps", type=int, default=200)
arguments = parser.parse_args()

CONVENTIONS = {"constant": 0.0, "sqrt(H)": 0.5}  # the power of H in the step size


def final(heads, power, trial):
    """Training loss and test error after the last step."""
    train = mh.data.tokenized_mixture(100, 10, 20, noise=arguments.noise, seed=trial)
    test = train.sample(300, seed=trial)
    if arguments.start == "zero":
        start = mh.Classifier.zeros(heads, train.tokens, train.dim)
    else:
        start = mh.Classifier.random_step(train, heads, seed=trial)
    run = mh.train(
        start,
        train,
        steps=arguments.steps,
        optimizer=mh.GradientDescent(lr=arguments.lr * heads**power),
        test=test,
        record={"loss": arguments.steps, "test_accuracy": arguments.steps},
    )
    return run.history["loss"][-1], 1 - run.history["test_accuracy"][-1]


print(f"{arguments.start} start, {arguments.steps} steps, mean of {arguments.trials} trials")
print("training loss and test error where the step size is")
print("   H" + "".join(f"{name:>20}" for name in CONVENTIONS))
for heads in arguments.heads:
    row = f"{heads:4d}"
    for power in CONVENTIONS.values():
        trials = [final(heads, power, trial) for trial in range(arguments.trials)]
        loss, error = np.mean(trials, axis=0)
        row += f"{loss:>12.4f}{100 * error:>6.1f} %"
    print(row)
