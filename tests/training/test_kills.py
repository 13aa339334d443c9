"""A training with checkpoints loses nothing that was saved when its process is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import killed_training as program
import numpy as np
import pytest

import mhfast as mh


def written(path):
    """Which file is there: each checkpoint is a new one."""
    return path.exists() and (path.stat().st_ino, path.stat().st_mtime_ns)


def killed_and_resumed(path, kills, last):
    """Kill a training at random moments, also while it writes, and look at what is on disk."""
    rng = np.random.default_rng(0)
    whole = program.begin(last)
    command = [sys.executable, program.__file__, str(path), str(last)]
    step = 0
    for k in range(kills):
        before = written(path)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            while k % 3 != 2 and written(path) == before and process.poll() is None:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
        saved = mh.Run.load(path)
        assert saved.step >= step + 3 * (k % 3 != 2)  # nothing lost
        assert np.array_equal(saved.history["loss"], whole.history["loss"][: saved.step])
        step = saved.step
    assert step < last  # else the last kills would have met a training that was over
    assert program.resume(mh.Run.load(path), last) == whole


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="SIGKILL is for POSIX")
def test_nothing_is_lost_when_the_process_is_killed(tmp_path):
    killed_and_resumed(tmp_path / "run.npz", kills=3, last=1000)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="SIGKILL is for POSIX")
def test_nothing_is_lost_in_a_hundred_kills(tmp_path):
    killed_and_resumed(tmp_path / "run.npz", kills=100, last=10_000)
