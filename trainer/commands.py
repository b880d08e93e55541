"""What each command does with its arguments; each returns the exit code.

Commands import their own modules: check and peek need no torch and should start at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shared.client import RolloutClient

TOKEN_VARIABLE = "TITO_TOKEN"


def init(args: argparse.Namespace, console: Console) -> int:
    """Write the files that a task begins with."""
    from trainer.init import DEFAULT_MODEL, next_commands, write_project

    model = args.model or DEFAULT_MODEL
    for path in write_project(args.directory, model):
        console.print(Text(f"wrote {path}"))
    console.print(Text(f"then, with a server beside it:\n{next_commands(args.directory, model)}"))
    return 0


def train(args: argparse.Namespace, console: Console) -> int:
    """Run the training loop, as the main process or as one that follows it."""
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


def evaluate(args: argparse.Namespace, console: Console) -> int:
    """Print the table of each checkpoint that was named, or of what is served."""
    from trainer.config_file import load_config
    from trainer.errors import ConfigError
    from trainer.exam import examine
    from trainer.exam_checkpoints import examine_checkpoints
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


def doctor(args: argparse.Namespace, console: Console) -> int:
    """Print what would go wrong."""
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


def replay(args: argparse.Namespace, console: Console) -> int:
    """Compute a step of a run again and compare."""
    from trainer.replay import print_replay, replay

    return 0 if print_replay(console, args.run, replay(args.run, args.step)) else 1


def ledger(args: argparse.Namespace, console: Console) -> int:
    """Print a run's accounts."""
    from trainer.reconcile import table

    console.print(Text(table(args.run, args.step)))
    return 0


def _client(args: argparse.Namespace) -> RolloutClient:
    return RolloutClient(args.url, token=os.environ.get(TOKEN_VARIABLE))


def _max_tokens(args: argparse.Namespace, client: RolloutClient) -> int:
    if args.max_tokens is not None:
        return int(args.max_tokens)
    return min(512, client.info().limits["max_model_len"] // 2)


def check(args: argparse.Namespace, console: Console) -> int:
    """Check a server's rollouts."""
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


def report(args: argparse.Namespace, console: Console) -> int:
    """Write a run as one page."""
    from trainer.report import write_report

    console.print(Text(f"see {write_report(args.run, args.out)}"))
    return 0


def peek(args: argparse.Namespace, console: Console) -> int:
    """Show answers to a question, or those that the server gave last."""
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


def demo(args: argparse.Namespace, console: Console) -> int:
    """Run the demonstration."""
    from trainer.demo import Served, run_demo
    from trainer.errors import ConfigError

    if (args.server is None) != (args.model is None):
        raise ConfigError("--server and --model go together: the server must serve that model")
    served = None if args.server is None else Served(args.server, args.model)
    return run_demo(args.out, console, served=served)


def tiny_policy(args: argparse.Namespace, console: Console) -> int:
    """Make the demonstration's model."""
    from trainer.tiny_policy import ensure_tiny_policy_at

    console.print(Text(str(ensure_tiny_policy_at(args.directory))))
    return 0
