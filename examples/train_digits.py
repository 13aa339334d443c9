"""Train on handwritten digits, row by row: test accuracy, and how a head's attention changes."""

import argparse

import numpy as np

import mhfast as mh

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--classes", type=int, nargs=2, default=(3, 8), help="two digits to tell apart")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--splits", type=int, default=5, help="random splits into training and test")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--save", metavar="FILE", help="write the last run, with its curves (.npz)")
parser.add_argument("--plot", metavar="FILE", help="draw the curves of the last run")
arguments = parser.parse_args()

accuracies = []
for split in range(arguments.splits):
    # A sample is an image: 8 tokens, its rows of 8 pixels, each with its position as a one-hot.
    train, test = mh.data.digits(arguments.classes, seed=split)
    start = mh.Classifier.gaussian(arguments.heads, train.tokens, train.dim, std=0.1, seed=split)
    run = mh.train(
        start,
        train,
        steps=arguments.steps,
        optimizer=mh.GradientDescent(lr=1.0),
        test=test,
        record={"loss": 1, "test_loss": 10, "test_accuracy": 10, "attention_max": 10},
        stop={"loss": 0.01},
    )
    accuracies.append(run.history["test_accuracy"][-1])
    print(
        f"split {split}: {train.n} training, {test.n} test images, {run.step} steps, "
        f"training loss {run.history['loss'][-1]:.4f}, test accuracy {accuracies[-1]:.3f}"
    )
print(f"mean test accuracy {np.mean(accuracies):.3f}")

before, after = run.history["attention_max"][[0, -1]]
print(f"largest weight of a row, mean by head: {before.round(2)} before, {after.round(2)} after")
print("where head 0 looks, mean over the last test set (row: query, column: key):")
print(run.model.attention(test)[:, 0].mean(axis=0).round(2))

if arguments.save:
    run.save(arguments.save)
if arguments.plot:
    run.plot().savefig(arguments.plot)
