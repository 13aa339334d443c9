"""The console script `mhfast`: demo, bench, info."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from . import config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments behind the program's name, by default those of the process.

    Returns
    -------
    int
        The exit status: 0; 1 when a package is missing; 130 after Ctrl-C.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command == "demo":
            return _demo(arguments.output, parser)
        if arguments.command == "bench":
            return _bench(rest)
        config.show_config()
        return 0
    except ImportError as error:
        print(f"mhfast {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mhfast", description="Multi-head attention models of attention theory on CPUs."
    )
    parser.add_argument("--version", action="version", version=f"mhfast {version('mhfast')}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train on digits and on the tokenized mixture, print a table, write a figure",
        description="Train on real and synthetic data, in under a minute on two cores.",
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("mhfast_demo.png"),
        metavar="FILE",
        help="the figure (default: %(default)s in the current directory)",
    )
    commands.add_parser(
        "bench", help="compare with NumPy, torch and jax where installed", add_help=False
    )
    commands.add_parser("info", help="print version, compiler, instruction sets, threads")
    return parser


def _demo(path: Path, parser: argparse.ArgumentParser) -> int:
    from ._demo import run_demo

    if not path.parent.is_dir():
        parser.error(f"--output: expected a file in an existing directory, got {path}")
    run_demo(path)
    return 0


def _bench(arguments: list[str]) -> int:
    from ._bench import main as bench

    return bench(arguments)
