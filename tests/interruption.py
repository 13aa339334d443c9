"""Ctrl-C in a child process."""

import signal
import subprocess
import sys
import time


def interrupted(code: str, after: float) -> tuple[float, str]:
    """Run code that prints "ready", is interrupted and then prints the time and one word.

    Returns the seconds from SIGINT to that time, and the word.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        time.sleep(after)
        sent = time.time()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, err
    caught, word = out.split()
    return float(caught) - sent, word
