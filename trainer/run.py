"""A training run's surroundings: its files, its server, and how it begins and is kept."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console

from shared.client import RolloutClient
from trainer import evaluate
from trainer.batches import forget_later_batches
from trainer.checkpoint import (
    RunState,
    checkpoints,
    latest_checkpoint,
    read_queue,
    read_state,
    save_checkpoint,
)
from trainer.config import Config
from trainer.config_file import to_toml
from trainer.errors import ConfigError
from trainer.files import replace_text
from trainer.learner import Learner, build_learner
from trainer.progress import LOSS_NOTE, ProgressLog
from trainer.prompts import Task, held_out_tasks, training_prompts
from trainer.published import Published
from trainer.ranks import ALONE, BEGIN, Ranks
from trainer.rewards import Reward, open_reward
from trainer.sampler import Sampler
from trainer.server import Server
from trainer.servers import ServerPool
from trainer.trackers import open_trackers, refuse_missing
from trainer.transports import Say, transport_to

_PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Run:
    """What every step works with.

    Attributes:
        output: directory of everything that is kept.
        servers: who samples. The leases on them keep a second trainer from writing there.
        sampler: asks them for groups.
        began: how far an earlier run had come when this one took over; all 0 without one.
        resumed: whether there was one.
    """

    config: Config
    output: Path
    servers: ServerPool
    sampler: Sampler
    learner: Learner
    held_out: Sequence[Task]
    reward: Reward
    log: ProgressLog
    began: RunState
    resumed: bool

    def borrow_memory(self) -> None:
        """Let a server that shares this GPU sleep while the trainer steps, if it is to."""
        if self.config.server.sleep:
            with self.log.phase("putting the server to sleep"):
                self.servers.sleep()
            self.log.problem("sleep", self.servers.troubles())

    def return_memory(self) -> None:
        """Let go of what torch keeps for later, for a server that is about to wake up."""
        if self.config.server.sleep and self.learner.device.type == "cuda":
            torch.cuda.empty_cache()

    def publish(self, step: int) -> None:
        """Make the servers sample from the model as it is, which is that after ``step``."""
        with self.log.phase("publishing"):
            self.servers.publish(step)
        self.log.problem("servers", self.servers.troubles())

    def evaluate(self, step: int) -> None:
        """Measure the served policy on the held-out problems, if there are any."""
        if not self.held_out:
            return
        with self.log.phase("evaluating"):
            ask = partial(evaluate.of_policy, self.servers, step)
            found = evaluate.evaluate(ask, self.config, self.held_out, self.reward, step=step)
        self.log.evaluation(found)

    def save(self, step: int) -> None:
        """Write a checkpoint from which the run can go on after ``step``."""
        latest, published = self.servers.latest, self.servers.published
        save_checkpoint(
            self.output / "checkpoints",
            RunState(
                step,
                self.sampler.position,
                latest.version,
                latest.digest,
                published.of(self.sampler.waiting()),
            ),
            model=self.learner.model,
            tokenizer=self.learner.tokenizer,
            optimizer=self.learner.optimizer,
            scheduler=self.learner.scheduler,
            scaler=self.learner.scaler,
            keep=self.config.train.keep_checkpoints,
            queue=self.sampler.queued(),
        )


def connect(config: Config, url: str | None = None, timeout: float | None = None) -> RolloutClient:
    """A client as the configuration says, with the token from the environment.

    Args:
        url: by default the first server's.
        timeout: by default the configuration's.
    """
    return RolloutClient(
        url or config.server.every_url()[0],
        token=os.environ.get(config.server.token_env),
        timeout=timeout or config.server.timeout,
    )


@contextmanager
def open_run(
    config: Config, *, resume: bool, console: Console | None, ranks: Ranks = ALONE
) -> Iterator[Run]:
    """Everything a run needs, from its beginning or from its newest checkpoint.

    Raises:
        TitoError: something that a person must fix before the run can start.
    """
    output = Path(config.train.output)
    checkpoint = _starting_point(output / "checkpoints", resume=resume)
    began = read_state(checkpoint) if checkpoint else RunState()
    # What can be wrong with files is found before minutes go into loading a model.
    reward, prompts = open_reward(config.reward), training_prompts(config)
    held_out = held_out_tasks(config)
    refuse_missing(config)
    # Bars of other libraries would tear the lines that this one prints.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    ranks.tell_all(BEGIN, checkpoint=str(checkpoint) if checkpoint else None)
    learner = build_learner(config, checkpoint, ranks)
    resumed_step = began.step if checkpoint else -1
    _write_beginning(output, config, learner, resumed_step)
    with ExitStack() as stack:
        stack.enter_context(reward)
        log = stack.enter_context(_progress_log(output, config, resumed_step, console))
        _announce(log, config, learner, began)
        servers = stack.enter_context(_servers(config, learner, began, log.say))
        if reason := servers.awaited():
            log.say(f"waiting up to {config.server.ready_timeout:g} s for a server: {reason}")
        sampler = Sampler(
            servers,
            prompts,
            config,
            fingerprint=learner.fingerprint,
            step=began.step,
            position=began.position,
            queued=read_queue(checkpoint) if checkpoint else [],
        )
        yield Run(
            config=config,
            output=output,
            servers=servers,
            sampler=sampler,
            learner=learner,
            held_out=held_out,
            reward=reward,
            log=log,
            began=began,
            resumed=checkpoint is not None,
        )


def _write_beginning(output: Path, config: Config, learner: Learner, resumed_step: int) -> None:
    """What says how the run was begun, or goes on; batches of steps that come again are dropped."""
    output.mkdir(parents=True, exist_ok=True)
    replace_text(output / "config.toml", to_toml(config))
    (output / "objective.txt").write_text(learner.objective.formula() + "\n", encoding="utf-8")
    forget_later_batches(output / "batches", resumed_step)


@contextmanager
def _progress_log(
    output: Path, config: Config, resumed_step: int, console: Console | None
) -> Iterator[ProgressLog]:
    with (
        open_trackers(config, resumed_step) as trackers,
        ProgressLog(
            output,
            config.train.steps,
            resumed_step=resumed_step,
            console=console,
            trackers=trackers,
        ) as log,
    ):
        yield log


@contextmanager
def _servers(config: Config, learner: Learner, began: RunState, say: Say) -> Iterator[ServerPool]:
    servers = [
        Server(url, connect(config, url), probe=connect(config, url, _PROBE_TIMEOUT_S))
        for url in config.server.every_url()
    ]
    ways = {
        server.client: transport_to(server.client, learner.model, config.server, say)
        for server in servers
    }
    with ServerPool(
        servers,
        lambda client, fence: ways[client].publish(fence),
        Published(began.published),
        holder=_holder(Path(config.train.output)),
        fingerprint=learner.fingerprint,
        patience=config.server.ready_timeout,
        sleep_level=config.server.sleep,
    ) as pool:
        try:
            yield pool
        finally:
            for way in ways.values():
                way.close()


def how_to_resume(output: Path, ranks: int = 1) -> str:
    """The command that continues a run, with as many processes."""
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python"
    return f"{launcher} -m trainer train {shlex.quote(str(output / 'config.toml'))} --resume"


def _holder(output: Path) -> str:
    """Who publishes: the run, not the process, so that resuming takes a dead one's lease over."""
    return f"{socket.gethostname()}:{output.absolute()}"[-128:]


def _starting_point(root: Path, *, resume: bool) -> Path | None:
    if resume:
        return latest_checkpoint(root)
    if checkpoints(root):
        raise ConfigError(
            f"{root} holds those of another run",
            advice="--resume continues it, another train.output starts a new one",
        )
    return None


def _announce(log: ProgressLog, config: Config, learner: Learner, began: RunState) -> None:
    log.say(to_toml(config), "dim")
    log.say(learner.objective.formula())
    if learner.ranks.size > 1:
        log.say(f"the model is spread over {learner.ranks.size} ranks")
    if config.model.keeps_masters():
        log.say(f"weights are {config.model.dtype}, rounded from float32 masters")
    log.say(f"sequences are {'padded: ' + learner.unpacked if learner.unpacked else 'packed'}")
    log.say(f"decoder layers are {'not fused: ' + learner.unfused if learner.unfused else 'fused'}")
    log.say(LOSS_NOTE, "dim")
    if began.step:
        log.say(f"going on after step {began.step}")
