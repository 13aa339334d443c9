"""A training to be killed, for `test_kills`: python killed_training.py CHECKPOINT LAST."""

from __future__ import annotations

import os
import sys
import time

import mhfast as mh


def begin(last, **rest):
    data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    start = mh.Classifier.gaussian(heads=3, tokens=5, dim=9, std=0.3, seed=1)
    return mh.train(start, data, until=last, optimizer=mh.Adam(0.05), record=RECORD, **rest)


def resume(run, last, **rest):
    data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    return mh.train(run, data, until=last, record=RECORD, **rest)


RECORD = {"loss": 1, "grad_norm": 7}

if __name__ == "__main__":
    path, last = sys.argv[1], int(sys.argv[2])
    keep = {"checkpoint": (path, 3), "callback": lambda *_: time.sleep(0.001)}
    saved = mh.Run.load(path) if os.path.exists(path) else None
    print("ready", flush=True)
    if saved is None:
        begin(last, **keep)
    else:
        resume(saved, last, **keep)
