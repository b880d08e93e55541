"""A training run's surroundings: its files, its server, and how it begins and is kept."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console

from shared.client import RolloutClient
from shared.lease import Lease
from shared.protocol import ReloadResult
from trainer import evaluate, publish
from trainer.agreement import refuse_other_tokenizer
from trainer.checkpoint import RunState, latest_checkpoint, read_state, save_checkpoint
from trainer.config import Config
from trainer.config_file import to_toml
from trainer.errors import ConfigError
from trainer.learner import Learner, build_learner
from trainer.progress import LOSS_NOTE, ProgressLog
from trainer.prompts import PromptSource, Task, held_out_tasks, training_prompts
from trainer.rewards import Reward, load_reward

LEASE_TTL_S = 60.0


@dataclass(frozen=True)
class Run:
    """What every step works with.

    Attributes:
        output: directory of everything that is kept.
        lease: the right to publish, which keeps a second trainer from writing to the server.
        began: how far an earlier run had come when this one took over; all 0 without one.
        vocab_size: the server's; ids at or above it are damaged.
    """

    config: Config
    output: Path
    client: RolloutClient
    lease: Lease
    learner: Learner
    prompts: PromptSource
    held_out: Sequence[Task]
    reward: Reward
    log: ProgressLog
    began: RunState
    vocab_size: int

    def publish(self) -> ReloadResult:
        """Make the server sample from the model as it is now."""
        with self.log.phase("publishing"):
            dtype = getattr(torch, self.config.server.publish_dtype)
            fence = self.lease.fence
            return publish.publish(self.client, self.learner.model, dtype, fence=fence)

    def evaluate(self, step: int) -> None:
        """Measure the served policy on the held-out problems, if there are any."""
        if not self.held_out:
            return
        with self.log.phase("evaluating"):
            found = evaluate.evaluate(
                self.client, self.config, self.held_out, self.reward, step=step
            )
        self.log.evaluation(found)

    def save(self, step: int, live: ReloadResult) -> None:
        """Write a checkpoint from which the run can go on after ``step``."""
        save_checkpoint(
            self.output / "checkpoints",
            RunState(step, self.position(step + 1), live.version, live.digest),
            model=self.learner.model,
            tokenizer=self.learner.tokenizer,
            optimizer=self.learner.optimizer,
            scheduler=self.learner.scheduler,
            keep=self.config.train.keep_checkpoints,
        )

    def position(self, step: int) -> int:
        """Where in the data the prompts of ``step`` begin."""
        steps_made = step - 1 - self.began.step
        return self.began.position + steps_made * self.config.rollout.prompts_per_step


def connect(config: Config) -> RolloutClient:
    """A client as the configuration says, with the token from the environment."""
    token = os.environ.get(config.server.token_env)
    return RolloutClient(config.server.url, token=token, timeout=config.server.timeout)


@contextmanager
def open_run(config: Config, *, resume: bool, console: Console | None) -> Iterator[Run]:
    """Everything a run needs, from its beginning or from its newest checkpoint.

    Raises:
        TitoError: something that a person must mend before the run can start.
    """
    output = Path(config.train.output)
    checkpoint = _starting_point(output / "checkpoints", resume=resume)
    began = read_state(checkpoint) if checkpoint else RunState()
    # What can be wrong with files is found before minutes go into loading a model.
    reward, prompts = load_reward(config.reward.function), training_prompts(config)
    held_out = held_out_tasks(config)
    # Bars of other libraries would tear the lines that this one prints.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    learner = build_learner(config, checkpoint)
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.toml").write_text(to_toml(config), encoding="utf-8")
    log = ProgressLog(output, config.train.steps, resumed_step=began.step, console=console)
    with log, connect(config) as client:
        _announce(log, config, learner, began)
        with log.phase("waiting for the server"):
            info = client.wait_ready(config.server.ready_timeout)
        refuse_other_tokenizer(info.tokenizer, learner.fingerprint)
        with client.lease(holder=_holder(output), ttl=LEASE_TTL_S) as lease:
            yield Run(
                config=config,
                output=output,
                client=client,
                lease=lease,
                learner=learner,
                prompts=prompts,
                held_out=held_out,
                reward=reward,
                log=log,
                began=began,
                vocab_size=info.vocab_size,
            )


def _holder(output: Path) -> str:
    """Who publishes: the run, not the process, so that resuming takes a dead one's lease over."""
    return f"{socket.gethostname()}:{output.absolute()}"[-128:]


def _starting_point(checkpoints: Path, *, resume: bool) -> Path | None:
    if resume:
        return latest_checkpoint(checkpoints)
    if any(checkpoints.glob("step-*")):
        raise ConfigError(
            f"{checkpoints} holds those of another run: --resume goes on with it, another "
            f"train.output starts a new one"
        )
    return None


def _announce(log: ProgressLog, config: Config, learner: Learner, began: RunState) -> None:
    log.say(to_toml(config), "dim")
    log.say(learner.objective.formula())
    log.say(LOSS_NOTE, "dim")
    if began.step:
        log.say(f"going on after step {began.step}")
