"""The trainer's commands.

    python -m trainer init [DIR]
    python -m trainer train CONFIG.toml [section.key=value ...] [--resume] [--dry-run]
    torchrun --nproc-per-node N -m trainer train CONFIG.toml ...
    python -m trainer doctor CONFIG.toml [section.key=value ...]
    python -m trainer eval CONFIG.toml [section.key=value ...] [--checkpoint base|latest|DIR ...]
    python -m trainer replay RUN --step N
    python -m trainer report RUN
    python -m trainer ledger RUN [--step N]
    python -m trainer check URL
    python -m trainer peek URL ["question"]
    python -m trainer demo
    python -m trainer tiny-policy DIR

A mistake that a person can fix is told in its own words, without a traceback; ``--traceback``
shows where it was raised. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shared.client import RolloutClient
from shared.errors import TitoError
from trainer.advice import INSTALL, advice_for, missing_package
from trainer.errors import TrainerError

TOKEN_VARIABLE = "TITO_TOKEN"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parse_arguments(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        return int(args.command(args, console))
    except TitoError as error:
        if args.traceback:
            raise
        _print_error(error)
        return 1
    except ModuleNotFoundError as error:
        if args.traceback:
            raise
        _print_error(TrainerError(missing_package(error), advice=INSTALL))
        return 1
    except OSError as error:  # a file or a disk
        if args.traceback:
            raise
        _print_error(TitoError(str(error)))
        return 1
    except KeyboardInterrupt:
        if args.traceback:
            raise
        Console(stderr=True).print("interrupted", style="red")
        return 130


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
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    _add_init(commands.add_parser("init", parents=[common], help="files to begin a task with"))
    _add_train(commands.add_parser("train", parents=[common], help="run the training loop"))
    _add_doctor(commands.add_parser("doctor", parents=[common], help="what would go wrong, first"))
    _add_eval(commands.add_parser("eval", parents=[common], help="pass@k, strict and lenient"))
    _add_replay(commands.add_parser("replay", parents=[common], help="compute a step again"))
    _add_ledger(commands.add_parser("ledger", parents=[common], help="from prompts to tokens"))
    _add_report(commands.add_parser("report", parents=[common], help="a run as one HTML file"))
    _add_check(commands.add_parser("check", parents=[common], help="check a server's rollouts"))
    _add_peek(commands.add_parser("peek", parents=[common], help="show a group of answers"))
    _add_demo(commands.add_parser("demo", parents=[common], help="server and training, from zero"))
    _add_tiny_policy(
        commands.add_parser("tiny-policy", parents=[common], help="make the model of the demo")
    )
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="replace a setting of the file"
    )


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, nargs="?", default=Path(), metavar="DIR")
    parser.add_argument("--model", help="its name or directory, for model.path")
    parser.set_defaults(command=_init)


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
    parser.set_defaults(command=_train)


def _add_eval(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="base|latest|DIR",
        help="publish this one first; may be repeated. Without it: what the server serves",
    )
    parser.set_defaults(command=_eval)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.set_defaults(command=_doctor)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory: train.output")
    parser.add_argument("--step", type=int, required=True, metavar="N")
    parser.set_defaults(command=_replay)


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory: train.output")
    parser.add_argument("--step", type=int, metavar="N", help="of one step; default: of all")
    parser.set_defaults(command=_ledger)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory: train.output")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.set_defaults(command=_report)


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
    parser.set_defaults(command=_check)


def _add_peek(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("question", nargs="?", help="without one: what the server sampled last")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T")
    parser.add_argument("--recent", type=int, default=3, metavar="N", help="how many groups of it")
    parser.add_argument("--tokens", action="store_true", help="shade tokens by probability")
    parser.set_defaults(command=_peek)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--server", metavar="URL", help="use this one, which serves --model")
    parser.add_argument("--model", type=Path, metavar="DIR", help="made by tiny-policy")
    parser.set_defaults(command=_demo)


def _add_tiny_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="left alone if it exists")
    parser.set_defaults(command=_tiny_policy)


# Each command imports its own modules: check and peek need no torch and should start at once.


def _init(args: argparse.Namespace, console: Console) -> int:
    from trainer.init import DEFAULT_MODEL, next_commands, write_project

    model = args.model or DEFAULT_MODEL
    for path in write_project(args.directory, model):
        console.print(Text(f"wrote {path}"))
    console.print(Text(f"then, with a server beside it:\n{next_commands(args.directory, model)}"))
    return 0


def _train(args: argparse.Namespace, console: Console) -> int:
    from trainer.config_file import load_config, to_toml

    config = load_config(args.config, args.overrides)
    if args.dry_run:
        console.print(Text(to_toml(config)), end="")
        return 0
    from shared import tracing
    from trainer.checkpoint import checkpoints
    from trainer.follower import follow
    from trainer.torchrun import ranks_of
    from trainer.train import train

    with ranks_of(config.model.device) as ranks, tracing.exported("tito-trainer"):
        if ranks.rank > 0:
            follow(config, ranks)
            return 0
        begun = args.resume_if_begun and checkpoints(Path(config.train.output) / "checkpoints")
        resume = args.resume or bool(begun)
        return 0 if train(config, resume=resume, console=console, ranks=ranks) else 130


def _eval(args: argparse.Namespace, console: Console) -> int:
    from trainer.config_file import load_config
    from trainer.errors import ConfigError
    from trainer.exam import examine, examine_checkpoints
    from trainer.prompts import held_out_tasks
    from trainer.rewards import open_reward
    from trainer.run import connect

    config = load_config(args.config, args.overrides)
    if not config.evaluation.prompts:
        raise ConfigError("evaluation.prompts is 0, so there is nothing to evaluate")
    tasks = held_out_tasks(config)
    with open_reward(config.reward) as reward, connect(config) as client:
        client.wait_ready(config.server.ready_timeout)
        exams = (
            examine_checkpoints(client, config, tasks, reward, checkpoints=args.checkpoint)
            if args.checkpoint
            else [examine(client, config, tasks, reward, name="served")]
        )
        for exam in exams:
            console.print(Text(str(exam)))
    return 0


def _doctor(args: argparse.Namespace, console: Console) -> int:
    from trainer.config_file import load_config
    from trainer.doctor import diagnose
    from trainer.findings import FAILURE, print_finding
    from trainer.memory import lack_told

    config, failed = load_config(args.config, args.overrides), False
    with lack_told(config):
        for finding in diagnose(config):
            print_finding(console, finding)
            failed |= finding.verdict == FAILURE
    return int(failed)


def _replay(args: argparse.Namespace, console: Console) -> int:
    from trainer.replay import print_replay, replay

    return 0 if print_replay(console, args.run, replay(args.run, args.step)) else 1


def _ledger(args: argparse.Namespace, console: Console) -> int:
    from trainer.reconcile import table

    console.print(Text(table(args.run, args.step)))
    return 0


def _client(args: argparse.Namespace) -> RolloutClient:
    return RolloutClient(args.url, token=os.environ.get(TOKEN_VARIABLE))


def _max_tokens(args: argparse.Namespace, client: RolloutClient) -> int:
    if args.max_tokens is not None:
        return int(args.max_tokens)
    return min(512, client.info().limits["max_model_len"] // 2)


def _check(args: argparse.Namespace, console: Console) -> int:
    from trainer.checks import check_server, default_questions, print_checks

    questions = args.question or default_questions(args.prompts)
    with _client(args) as client:
        checks = check_server(
            client,
            questions=questions,
            group_size=args.group_size,
            max_tokens=_max_tokens(args, client),
        )
    print_checks(console, checks)
    return 0 if all(check.passed for check in checks) else 1


def _report(args: argparse.Namespace, console: Console) -> int:
    from trainer.report import write_report

    console.print(Text(f"see {write_report(args.run, args.out)}"))
    return 0


def _peek(args: argparse.Namespace, console: Console) -> int:
    from trainer.peek import peek, peek_recent

    with _client(args) as client:
        if args.question is None:
            peek_recent(client, console, args.recent, tokens=args.tokens)
            return 0
        peek(
            client,
            console,
            args.question,
            group_size=args.group_size,
            max_tokens=_max_tokens(args, client),
            temperature=args.temperature,
            tokens=args.tokens,
        )
    return 0


def _demo(args: argparse.Namespace, console: Console) -> int:
    from trainer.demo import Served, run_demo
    from trainer.errors import ConfigError

    if (args.server is None) != (args.model is None):
        raise ConfigError("--server and --model go together: the server must serve that model")
    served = None if args.server is None else Served(args.server, args.model)
    return run_demo(args.out, console, served=served)


def _tiny_policy(args: argparse.Namespace, console: Console) -> int:
    from trainer.tiny_policy import ensure_tiny_policy_at

    console.print(Text(str(ensure_tiny_policy_at(args.directory))))
    return 0


def _print_error(error: TitoError) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # all processes of torchrun meet the same one
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"error: {error}", style="red"))
    where = Text("(--traceback shows where this was raised)", style="dim")
    advice = advice_for(error)
    console.print(Text.assemble(f"  {advice} ", where) if advice else where)


if __name__ == "__main__":
    sys.exit(main())
