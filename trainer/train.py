"""The training loop: GRPO as an exchange with a rollout server.

    python -m trainer train CONFIG.toml [section.key=value ...] [--resume] [--dry-run]

Two choices differ from the GRPO paper (2402.03300). The ratio is taken against the
log-probabilities that the sampler returned, not against those of a second forward pass, unless
``objective.correction`` tells the two apart. And groups without a signal leave the batch and its
denominator, instead of diluting the others.
"""

from __future__ import annotations

import time
from functools import partial

from rich.console import Console

from shared import tracing
from shared.protocol import Rollout, Sample
from trainer import ledger
from trainer.batches import save_batch
from trainer.checks import check_room, check_variety
from trainer.config import Config
from trainer.feedback import report
from trainer.judging import Judged, judge, refilled
from trainer.ledger import StepLedger
from trainer.memory import lack_told
from trainer.metrics import measure
from trainer.prompts import Task
from trainer.ranks import ALONE, Ranks
from trainer.rewards import refuse_no_verdict, score_rollout
from trainer.run import Run, how_to_resume, open_run
from trainer.stopping import stop_on_signals
from trainer.tally import Update
from trainer.update import learn, training_set


def train(
    config: Config,
    *,
    resume: bool = False,
    console: Console | None = None,
    ranks: Ranks = ALONE,
) -> bool:
    """Run the loop, from its beginning or, with ``resume``, from the newest checkpoint.

    Of several processes that train together it is for rank 0; the others follow it.

    ``train.output`` gets its configuration, metrics, ledger, evaluations and checkpoints. On Ctrl-C
    or SIGTERM the step is finished and a checkpoint written.

    Returns:
        Whether all steps were made.

    Raises:
        TitoError: with a message for the person who started the run.
    """
    with lack_told(config), open_run(config, resume=resume, console=console, ranks=ranks) as run:
        # Whatever the servers held before, the first samples must come from this model.
        step = run.began.step
        run.publish(step)
        with stop_on_signals() as stop:
            if not run.resumed:
                run.evaluate(step)
            run.sampler.admit(step)
            while step < config.train.steps and not stop.requested:
                step += 1
                with tracing.span("step", step=step):
                    take_step(run, step)
                if _due(step, config.evaluation.every, config.train.steps):
                    run.evaluate(step)
                if _due(step, config.train.checkpoint_every, config.train.steps):
                    run.save(step)
            if stop.requested:
                run.save(step)
                again = how_to_resume(run.output, ranks.size)
                run.log.say(f"stopped after step {step}. To go on: {again}")
    return step == config.train.steps


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def take_step(run: Run, step: int) -> None:
    """One step of the algorithm: the policy after ``step - 1`` becomes that after ``step``."""
    times = [time.perf_counter()]
    run.servers.idle_seconds()  # from here on
    # 1. For each prompt, a group of answers. They may have been asked for some steps ago.
    with run.log.phase("sampling"):
        tasks, rollout = run.sampler.take(step)
    times.append(time.perf_counter())
    # 2. For each answer a score.
    judged = _scored(run, step, tasks, rollout)
    staleness = max(run.servers.published.staleness(s, step) for s in judged.rollout.samples)
    _keep(run, step, judged)
    # 3. Advantages within each group, and a step of AdamW towards the better answers.
    update = _learned(run, judged)
    times.append(time.perf_counter())
    # 4. The servers sample from the changed model from here on.
    if update.updates:
        run.publish(step)
    else:
        run.servers.keep(step)
    run.sampler.admit(step)
    times.append(time.perf_counter())
    # 5. Everything that was asked for is accounted for.
    _account(run, step, judged, update, staleness, times)


def _scored(run: Run, step: int, tasks: list[Task], rollout: Rollout) -> Judged:
    """What has no score, or no peer that differs, is set aside; more prompts may take its place."""
    judged = refilled(
        _judged(run, step, tasks, rollout),
        lambda prompts: _judged(run, step, *run.sampler.more(prompts)),
        budget=int(run.config.rollout.refill_budget * len(tasks)),
    )
    if step == run.began.step + 1:
        # Later on, a service that fails for a while may come back; the ledger counts what it cost.
        refuse_no_verdict(run.reward, judged.outcomes)
    return judged


def _keep(run: Run, step: int, judged: Judged) -> None:
    """Before it is trained on: a step that fails is the one to look at."""
    save_batch(
        run.output / "batches",
        step=step,
        rollout=judged.rollout,
        outcomes=judged.outcomes,
        fates=judged.fates,
        keep=run.config.train.keep_batches,
    )
    if run.config.server.report_rewards:
        found = report(run.servers, judged.rollout, judged.outcomes, run.reward)
        run.log.problem("rewards are not shown", found)


def _learned(run: Run, judged: Judged) -> Update:
    run.borrow_memory()
    with run.log.phase("training"):
        chosen = training_set(judged.rollout, judged.outcomes, judged.fates, run.learner)
        update = learn(run.learner, chosen, run.config)
    run.return_memory()
    return update


def _account(
    run: Run, step: int, judged: Judged, update: Update, staleness: int, times: list[float]
) -> None:
    """Write the step's ledger and figures, and say what was wrong with it."""
    fates = judged.fates
    if update.skipped and not update.updates:
        fates = ledger.without_update(fates)
    accounts = ledger.account(
        step=step,
        prompts=len(judged.tasks),
        group_size=run.config.rollout.group_size,
        rollout=judged.rollout,
        fates=fates,
        outcomes=judged.outcomes,
        loss_tokens=update.loss_tokens,
        updates=update.updates,
        masked_tokens=update.masked_tokens,
    )
    ledger.append(run.output / "ledger.jsonl", accounts)
    metrics = measure(
        judged.rollout,
        judged.outcomes,
        fates,
        accounts,
        update,
        staleness=staleness,
        version=run.servers.latest.version,
        sampler_idle_seconds=run.servers.idle_seconds(),
        times=times,
        reward_names=[part.name for part in run.reward.parts],
    )
    run.log.step(metrics)
    _tell_problems(run, judged.rollout, accounts, update)


def _judged(run: Run, step: int, tasks: list[Task], rollout: Rollout) -> Judged:
    outcomes = score_rollout(run.reward, tasks, rollout)
    is_stale = partial(_is_stale, run, step)
    return judge(run.learner.objective, tasks, rollout, outcomes, is_stale=is_stale)


def _is_stale(run: Run, step: int, sample: Sample) -> bool:
    """Whether a sample is too old to be trained. Admission leaves this to servers that lag."""
    return run.servers.published.staleness(sample, step) > run.config.train.max_staleness


def _tell_problems(run: Run, rollout: Rollout, accounts: StepLedger, update: Update) -> None:
    """Say what makes this step teach less than it could."""
    for check in (check_variety(rollout), check_room(rollout)):
        run.log.problem(check.name, None if check.passed else f"{check.found}. {check.advice}")
    found = f"{update.skipped} updates skipped, the next loss is scaled by {update.loss_scale:g}"
    run.log.problem("float16 overflowed", found if update.skipped else None)
    errors = accounts.reward_errors
    failed = f"{sum(errors.values())} samples, most often: {next(iter(errors), '')}"
    run.log.problem("reward errors", failed if errors else None)
