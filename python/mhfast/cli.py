"""The console script `mhfast`: demo, reproduce, bench, info, completion."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from . import config

DESCRIPTION = """\
Multi-head attention models of attention theory on CPUs: outputs, gradients and training, exact and
fast. It is a Python library (import mhfast as mh); the commands demonstrate and measure it."""

EPILOG = """\
examples:
  mhfast demo                           train on two data sets and write mhfast_demo.png
  mhfast demo --output /tmp/demo.png    write the figure to another file
  mhfast reproduce                      list the results of attention theory that can be checked
  mhfast bench --quick                  a first look at the speed on this machine
  mhfast info --json                    what a bug report should contain, as JSON
  mhfast completion bash                a script that completes commands and options in a shell

mhfast COMMAND --help describes a command. Without the script: python -m mhfast COMMAND.

exit status: 0 on success; 1 if a package is missing, if results disagree (bench), a claim does not
hold (reproduce) or nobody reads the output to its end; 2 if the arguments are wrong; 130 after
Ctrl-C. Results go to standard output, everything else to standard error."""


COMMANDS = "demo, reproduce, bench, info or completion"
SHELLS = ("bash", "zsh", "fish", "tcsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the name of the program, by default those of the process.

    Returns
    -------
    int
        The exit status: 0; 1 when a package is missing, a claim of a result that is reproduced does
        not hold, or the output is closed before its end; 2 without a command; 130 after Ctrl-C.

    Raises
    ------
    SystemExit
        With the status 2 for invalid arguments, and 0 for ``--help`` and ``--version``.

    Examples
    --------
    >>> from mhfast.cli import main
    >>> main(["info"])  # doctest: +ELLIPSIS
    mhfast ...
    0
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command not in ("bench", "reproduce"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status = _status(arguments, rest, parser)
        sys.stdout.flush()
        return status
    except ImportError as error:
        print(f"mhfast {arguments.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as by `mhfast reproduce | head -1`; nothing is left to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _status(arguments: argparse.Namespace, rest: list[str], parser: argparse.ArgumentParser) -> int:
    """Run the command that was given, or say that there is none."""
    if arguments.command is None:
        parser.print_help(sys.stderr)
        print(f"\nmhfast: expected a command: {COMMANDS}", file=sys.stderr)
        return 2
    if arguments.command == "demo":
        return _demo(arguments.output, arguments.json, parser)
    if arguments.command == "bench":
        return _bench(rest)
    if arguments.command == "reproduce":
        return _reproduce(rest)
    if arguments.command == "completion":
        return _completion(arguments.shell, parser)
    return _info(arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mhfast",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mhfast {version('mhfast')}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train on digits and on the tokenized mixture, print a table, write a figure",
        description="Train on handwritten digits and on synthetic data in under a minute on two "
        "cores, print what was found and what it shows, and write a figure. Needs matplotlib and "
        "scikit-learn.",
    )
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("mhfast_demo.png"),
        metavar="FILE",
        help="the figure (default: %(default)s in the current directory)",
    )
    demo.add_argument("--json", action="store_true", help="print the numbers as JSON")
    commands.add_parser(
        "bench", help="compare with NumPy, torch and jax where installed", add_help=False
    )
    commands.add_parser(
        "reproduce",
        help="check a claim of attention theory: print a table, write a figure",
        add_help=False,
    )
    info = commands.add_parser(
        "info",
        help="print version, compiler, instruction sets, threads",
        description="Print the version, the compiler, the instruction sets and the number of "
        "threads that mhfast uses.",
    )
    info.add_argument("--json", action="store_true", help="print the same as JSON")
    completion = commands.add_parser(
        "completion",
        help="print a script that makes a shell complete commands and options",
        description="Print a script that makes a shell complete commands, options and names of "
        'experiments, for a start-up file, for instance eval "$(mhfast completion bash)". '
        "shtab is needed to print the script, not to use it.",
    )
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _info(as_json: bool) -> int:
    if as_json:
        print(json.dumps(config.show_config("dict"), indent=1))
    else:
        config.show_config()
    return 0


def _demo(path: Path, as_json: bool, parser: argparse.ArgumentParser) -> int:
    from ._demo import run_demo

    if not path.parent.is_dir():
        parser.error(f"--output: expected a file in an existing directory, got {path}")
    run_demo(path, as_json=as_json)
    return 0


def _completion(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the script that shtab generates for the parsers, those of commands included."""
    try:
        import shtab
    except ImportError:
        raise ImportError("completion needs shtab: pip install shtab") from None
    from ._atlas import catalogue
    from ._atlas import command as reproduce
    from ._bench import command as bench

    (commands,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    commands["bench"] = bench.command_line()
    commands["reproduce"] = reproduce.command_line()
    for each in commands.values():
        for action in each._actions:
            if action.dest == "names":
                action.choices = [*catalogue.NAMES, "all"]
            elif action.type is Path:
                kind = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
                setattr(action, "complete", kind)  # noqa: B010  (argparse does not know it)
    print(shtab.complete(parser, shell=shell))
    return 0


def _bench(arguments: list[str]) -> int:
    from ._bench import main as bench

    return bench(arguments)


def _reproduce(arguments: list[str]) -> int:
    from ._atlas import main as reproduce

    return reproduce(arguments)
