"""From how many heads on training is guaranteed, by two theorems; prints a table.

Columns: N of the common ball with a comparator of loss 1/k and the bound that it has there; N for a
comparator of loss .06; the smallest even H for which the theorem with radii of single heads proves
a mean training loss below log 2, and the mean loss of a run with so many heads. No such model is
trained: with balanced signs H heads are two kinds of equal heads, so two heads with U sqrt(H/2)
times as large, and a scale of sqrt(2/H) to shorten the steps on W, compute the same.
"""

import argparse
import math

import mhfast as mh

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--n", type=int, default=100, help="samples")
arguments = parser.parse_args()

USUAL = {"tokens": 10, "dim": 20}  # of tokenized_mixture; one fifth of the tokens is relevant
HALF = {"tokens": 4, "dim": 5, "relevant_fraction": 0.5, "contexts": 1}


def trained(data, heads, lr):
    """Return the mean loss of the steps of a run with so many heads of balanced signs."""
    two = mh.Classifier.random_step(data, 2, seed=0, balanced=True)
    more = math.sqrt(heads / 2)
    start = mh.Classifier(two.W, more * two.U, scale=1 / more)
    step = mh.GradientDescent(lr)
    run = mh.train(start, data, steps=arguments.steps, optimizer=step, record="loss")
    return run.history["loss"][1:].mean()


print(f"{arguments.steps} steps, {arguments.n} samples; log 2 = {math.log(2):.3f}")
print(" T  S     ζ    N(loss 1/k)   bound   N(loss .06)     H < log 2   bound   measured")
for mixture, norm in ((USUAL, 1.0), (USUAL, 4.0), (HALF, 5.0), (HALF, 10.0), (HALF, 40.0)):
    data = mh.data.tokenized_mixture(arguments.n, norm=norm, seed=0, **mixture)
    ball = mh.theory.needed_heads(data, arguments.steps)
    other = mh.theory.needed_heads(data, arguments.steps, epsilon=0.06)
    least = mh.theory.least_heads_below(data, arguments.steps)
    print(
        f"{data.tokens:2d} {norm:2.0f} {data.truth['relevant_fraction']:5.1f} {ball.heads:14.3g} "
        f"{ball.training.bound:7.4g} {other.heads:13.3g} {least.heads:13d} {least.bound:7.3f} "
        f"{trained(data, least.heads, least.lr):10.3f}"
    )
