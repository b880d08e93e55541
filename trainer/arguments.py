"""The command line of ``python -m trainer``: what can be asked for, and which command answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer import commands


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What a command line asks for; exits with a usage message if it cannot be understood."""
    parser = build_parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse gives up on positional arguments after an option, and overrides may stand anywhere.
    if any(item.startswith("-") or not hasattr(args, "overrides") for item in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def build_parser() -> argparse.ArgumentParser:
    """The command line, for help and for tests."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description="Train a model against a rollout server."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    for name, summary, add_options in (
        ("init", "files to begin a task with", _add_init),
        ("train", "run the training loop", _add_train),
        ("doctor", "what would go wrong, first", _add_doctor),
        ("eval", "pass@k, strict and lenient", _add_eval),
        ("replay", "compute a step again", _add_replay),
        ("ledger", "from prompts to tokens", _add_ledger),
        ("report", "a run as one HTML file", _add_report),
        ("check", "check a server's rollouts", _add_check),
        ("peek", "show a group of answers", _add_peek),
        ("demo", "server and training, from zero", _add_demo),
        ("tiny-policy", "make the model of the demo", _add_tiny_policy),
    ):
        add_options(subparsers.add_parser(name, parents=[common], help=summary))
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replace a setting of the file"
    )


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIR")
    parser.add_argument("--model", help="its name or directory, for model.path")
    parser.set_defaults(command=commands.init)


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    again.add_argument(
        "--resume-if-begun",
        action="store_true",
        help="the same, or begin when there is none: for what restarts by itself",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and stop"
    )
    parser.set_defaults(command=commands.train)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="base|latest|DIR",
        help="publish this one first; may be repeated. Without it: what the server serves",
    )
    parser.set_defaults(command=commands.evaluate)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.set_defaults(command=commands.doctor)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory: train.output")
    parser.add_argument("--step", type=int, required=True, metavar="N")
    parser.set_defaults(command=commands.replay)


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory: train.output")
    parser.add_argument("--step", type=int, metavar="N", help="of one step; default: of all")
    parser.set_defaults(command=commands.ledger)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory: train.output")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.set_defaults(command=commands.report)


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="e.g. http://127.0.0.1:8300")
    parser.add_argument("--group-size", type=int, default=8, metavar="N")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: 512, or half of a smaller context"
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="how many to ask")
    parser.add_argument(
        "--question", action="append", metavar="TEXT", help="ask this instead; may be repeated"
    )
    parser.set_defaults(command=commands.check)


def _add_peek(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("question", nargs="?", help="without one: what the server sampled last")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T")
    parser.add_argument("--recent", type=int, default=3, metavar="N", help="how many groups of it")
    parser.add_argument("--tokens", action="store_true", help="shade tokens by probability")
    parser.set_defaults(command=commands.peek)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--server", metavar="URL", help="use this one, which serves --model")
    parser.add_argument("--model", type=Path, metavar="DIR", help="made by tiny-policy")
    parser.set_defaults(command=commands.demo)


def _add_tiny_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="left alone if it exists")
    parser.set_defaults(command=commands.tiny_policy)
