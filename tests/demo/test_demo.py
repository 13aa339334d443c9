"""The demo and the console script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mhfast as mh
from mhfast import _demo as demo
from mhfast import cli
from mhfast._demo.experiments import (
    Digits,
    Heads,
    Saturation,
    run_digits,
    run_heads,
    run_saturation,
)


def nothing(steps: int) -> None:
    """Progress that nobody watches."""


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_a_small_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    path = tmp_path / "figure.png"
    demo.run_demo(
        path,
        Digits(splits=2, heads=3, steps=10),
        Heads(heads=(1, 2), trials=2, n_train=9, n_test=11, steps=5),
        Saturation(instances=3, steps=7),
    )
    width, height = png_size(path)
    assert width == 1600
    assert height > 1000
    out = capsys.readouterr().out
    assert "3 heads, 2 random splits, 10 steps" in out
    assert out.rstrip().endswith(str(path))
    assert "H is the number of heads" in out
    shown = out[out.index("What this shows") :]
    assert "loss with 2 heads is" in shown
    assert "It changes W by" in shown
    demo.run_demo(
        path,
        Digits(splits=2, heads=3, steps=10),
        Heads(heads=(1, 2), trials=2, n_train=9, n_test=11, steps=5),
        Saturation(instances=3, steps=7),
        as_json=True,
    )
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["figure"] == str(path)
    assert len(numbers["digits"]["test_accuracy"]) == 2
    rows = {(row["start"], row["step_size"], row["heads"]) for row in numbers["heads"]}
    assert rows == {(s, c, H) for s in ("zero", "random step") for c in ("constant", "sqrt(H)")
                    for H in (1, 2)}  # fmt: skip
    mean = 100 * np.mean(numbers["digits"]["test_accuracy"])
    assert f"test accuracy {mean:.1f} % on average" in out


def test_digits_are_learnt() -> None:
    pytest.importorskip("sklearn")
    done: list[int] = []
    settings = Digits(splits=1, steps=400)
    result = run_digits(settings, done.append)
    assert sum(done) == settings.total
    assert result.steps[-1] == 400
    # The first split reaches 99 %, one image in 107 wrong; three are allowed here.
    assert result.test_error[0, -1] < 0.03
    assert result.attention_before.shape == result.attention_after.shape == (4, 8, 8)
    rows = result.attention_after.sum(axis=-1)
    np.testing.assert_allclose(rows, 1.0, rtol=1e-5)  # float32 weights, mean of 107 samples
    assert result.attention_after.max() > 2 * result.attention_before.max()


def test_more_heads_from_zero_are_slower_or_faster_by_convention() -> None:
    settings = Heads(heads=(1, 16), trials=2, steps=60)
    done: list[int] = []
    result = run_heads(settings, done.append)
    assert sum(done) == settings.total
    final = {setting: curves[:, -1].mean() for setting, curves in result.train_loss.items()}
    assert final["zero", "constant", 16] > 2 * final["zero", "constant", 1]
    assert final["zero", "sqrt(H)", 16] < 1.2 * final["zero", "sqrt(H)", 1]
    # One head takes the same steps in both conventions.
    assert final["zero", "constant", 1] == final["zero", "sqrt(H)", 1]
    assert result.test_steps[-1] == result.steps[-1] == 60


def test_saturation_moves_the_textbook_only() -> None:
    settings = Saturation(instances=6)
    done: list[int] = []
    result = run_saturation(settings, done.append)
    assert sum(done) == settings.total
    assert result.mhfast.shape == result.textbook.shape == (6, 500)
    # The promise is 1e-12; textbook float64 loses half its digits or more in the median.
    assert result.mhfast.max() < 1e-12
    assert np.median(result.textbook[:, -1]) > 1e-8


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    command = [sys.executable, "-c", "import mhfast.cli as c; raise SystemExit(c.main(['demo']))"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test accuracy ([\d.]+) % on average", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 98.0
    assert png_size(tmp_path / "mhfast_demo.png")[0] == 1600
    assert "training" in done.stderr  # the progress bar


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "find_spec", {}.get)
    assert cli.main(["demo", "--output", str(tmp_path / "figure.png")]) == 1
    message = capsys.readouterr().err
    assert message == (
        "mhfast demo: the demo needs matplotlib and scikit-learn: "
        "pip install matplotlib scikit-learn\n"
    )


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out.startswith("mhfast ")


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(mh.show_config("dict")))
    assert shown["mhfast"] == mh.__version__


def test_help_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for command in ("demo", "reproduce", "bench", "info", "completion"):
        assert re.search(rf"^    {command}\s+\w", text, re.M)  # a line of the list of commands
    assert "exit status: 0" in text
    for line in re.findall(r"^  (mhfast .*?)  ", text, re.M):  # the examples are calls that exist
        parsed, rest = cli._parser().parse_known_args(line.split()[1:])
        assert parsed.command in ("demo", "reproduce", "bench", "info", "completion")
        assert not rest or parsed.command in ("reproduce", "bench")
    assert cli.main([]) == 2
    assert (
        "expected a command: demo, reproduce, bench, info or completion" in capsys.readouterr().err
    )


def completions(script: Path, words: list[str]) -> set[str]:
    """What bash offers for the last of the words."""
    typed = " ".join(f"'{word}'" for word in words)
    lines = [
        f"source {script}",
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_mhfast",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    command = ["bash", "--norc", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="pip install shtab")
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "mhfast.bash"
    script.write_text(capsys.readouterr().out, "utf-8")
    everything = {"demo", "reproduce", "bench", "info", "completion"}
    assert completions(script, ["mhfast", ""]) >= everything
    assert completions(script, ["mhfast", "re"]) == {"reproduce"}
    assert completions(script, ["mhfast", "reproduce", "rank"]) == {"rank_growth"}
    assert completions(script, ["mhfast", "bench", "--iso"]) == {"--isolate"}
    assert completions(script, ["mhfast", "info", "--"]) >= {"--json", "--help"}


@pytest.mark.parametrize("shell", cli.SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="pip install shtab")
    assert cli.main(["completion", shell]) == 0
    assert "softmax_regression_in_context" in capsys.readouterr().out


def test_completion_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    message = "mhfast completion: completion needs shtab: pip install shtab\n"
    assert capsys.readouterr().err == message


def test_no_command_waits_for_shtab() -> None:
    code = "import sys, mhfast.cli as c; c.main(['info']); assert 'shtab' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_ctrl_c_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", interrupted)
    assert cli.main(["demo"]) == 130


def test_output_that_nobody_reads_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mhfast", "info", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


def test_the_package_is_a_command_with_a_version() -> None:
    command = [sys.executable, "-m", "mhfast", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == f"mhfast {mh.__version__}\n"


def test_the_package_lists_what_it_offers() -> None:
    assert dir(mh) == sorted(mh.__all__)


def test_bench_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def bench(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr("mhfast._bench.main", bench)
    assert cli.main(["bench", "--help", "--shapes", "2"]) == 7
    assert seen == [["--help", "--shapes", "2"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["infos"], "invalid choice: 'infos'"),
        (["info", "--fast"], "unrecognized arguments: --fast"),
        (["demo", "--output", "no/such/figure.png"], "--output: expected a file in an existing"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
