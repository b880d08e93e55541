"""The training loop: GRPO as an exchange with a rollout server.

    python -m trainer train CONFIG.toml [section.key=value ...] [--resume] [--dry-run]

Two choices differ from the GRPO paper (2402.03300). The ratio is taken against the
log-probabilities that the sampler returned, not against those of a second forward pass. And groups
without a signal leave the batch and its denominator, instead of diluting the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from shared.protocol import ReloadResult, Rollout
from trainer import ledger
from trainer.agreement import refuse_other_policy, refuse_other_sampling, refuse_other_tokenizer
from trainer.checks import check_records, check_room, check_variety
from trainer.config import Config
from trainer.errors import MismatchError
from trainer.ledger import StepLedger, fates_of_group
from trainer.metrics import measure
from trainer.prompts import Task
from trainer.rewards import score_rollout
from trainer.run import Run, open_run
from trainer.update import learn, training_set


def train(config: Config, *, resume: bool = False, console: Console | None = None) -> None:
    """Run the loop, from its beginning or, with ``resume``, from the newest checkpoint.

    ``train.output`` gets its configuration, metrics, ledger, evaluations and checkpoints.

    Raises:
        TitoError: with a message for the person who started the run.
    """
    with open_run(config, resume=resume, console=console) as run:
        # Whatever the server held before, the first samples must come from this model.
        live = run.publish()
        if run.began.step == 0:
            run.evaluate(step=0)
        for step in range(run.began.step + 1, config.train.steps + 1):
            live = take_step(run, step, live)
            if _due(step, config.evaluation.every, config.train.steps):
                run.evaluate(step)
            if _due(step, config.train.checkpoint_every, config.train.steps):
                run.save(step, live)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def take_step(run: Run, step: int, live: ReloadResult) -> ReloadResult:
    """One step of the algorithm.

    Args:
        live: what the server serves.

    Returns:
        What it serves afterwards.
    """
    times = [time.perf_counter()]
    # 1. For each prompt, a group of answers.
    tasks = run.prompts.take(run.position(step), run.config.rollout.prompts_per_step)
    rollout = ask(run, tasks, live)
    times.append(time.perf_counter())

    # 2. For each answer a score; what has none, or no peer that differs, is set aside.
    outcomes = score_rollout(run.reward, tasks, rollout)
    fates = [
        fates_of_group(group.samples, scores)
        for group, scores in zip(rollout.groups, outcomes, strict=True)
    ]

    # 3. Advantages within each group, and a step of AdamW towards the better answers.
    with run.log.phase("training"):
        chosen = training_set(rollout, outcomes, fates, run.learner)
        update = learn(run.learner, chosen, run.config)
    times.append(time.perf_counter())

    # 4. The server samples from the changed model from here on.
    served = run.publish() if update.updates else live
    times.append(time.perf_counter())

    # 5. Everything that was asked for is accounted for.
    accounts = ledger.account(
        step=step,
        prompts=len(tasks),
        group_size=run.config.rollout.group_size,
        rollout=rollout,
        fates=fates,
        outcomes=outcomes,
        loss_tokens=update.loss_tokens,
        updates=update.updates,
    )
    ledger.append(run.output / "ledger.jsonl", accounts)
    run.log.step(
        measure(
            rollout,
            outcomes,
            accounts,
            update,
            trained_version=live.version,
            served_version=served.version,
            times=times,
        )
    )
    _tell_problems(run, rollout, accounts)
    return served


def ask(run: Run, tasks: Sequence[Task], live: ReloadResult) -> Rollout:
    """Sample a group of answers for each task, and refuse what must not be trained on.

    Raises:
        MismatchError: records are damaged, or not of the tokenizer, distribution or policy that
            this run trains.
    """
    options = run.config.rollout
    with run.log.phase("sampling"):
        rollout = run.client.rollout(
            [task.prompt for task in tasks],
            group_size=options.group_size,
            purpose="train",
            **options.sampling(),
        )
    records = check_records(
        rollout, prompts=len(tasks), group_size=options.group_size, vocab_size=run.vocab_size
    )
    if not records.passed:
        raise MismatchError(f"the rollout is damaged: {records.found}. {records.advice}")
    refuse_other_tokenizer(rollout.tokenizer, run.learner.fingerprint)
    refuse_other_sampling(rollout.sampling, temperature=options.temperature)
    refuse_other_policy(rollout, live)
    return rollout


def _tell_problems(run: Run, rollout: Rollout, accounts: StepLedger) -> None:
    """Say what makes this step teach less than it could."""
    for check in (check_variety(rollout), check_room(rollout)):
        run.log.problem(check.name, None if check.passed else f"{check.found}. {check.advice}")
    errors = accounts.reward_errors
    failed = f"{sum(errors.values())} samples, most often: {next(iter(errors), '')}"
    run.log.problem("reward errors", failed if errors else None)
