"""Asking for the answers of each step, ahead of training where staleness is allowed.

Step k trains the prompts that follow those of step k - 1, in the data's order, whatever finishes
first. With ``max_staleness`` s they may be asked for as soon as step k - 1 - s is published, so no
token of theirs can be more than s steps old when they are trained. That bound is one of admission:
nothing finished is thrown away for being late, which would train on short answers alone.

A step is asked for in portions, so that several servers share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import xxhash

from shared.codec import rollout_from_wire, rollout_to_wire
from shared.protocol import Group, Rollout, Sample
from trainer.agreement import refuse_other_sampling, refuse_other_tokenizer
from trainer.background import in_background, wait_for
from trainer.checks import check_records
from trainer.config import Config
from trainer.errors import CheckpointError, MismatchError
from trainer.prompts import PromptSource, Task
from trainer.servers import ServerPool

_PORTIONS_PER_SERVER = 4


@dataclass(frozen=True, eq=False)
class Portion:
    """Some prompts that are asked together.

    Attributes:
        position, tasks: where in the data, and what.
        answer: their groups, as soon as they are there.
    """

    position: int
    tasks: list[Task]
    answer: Future[Rollout]


@dataclass(frozen=True, eq=False)
class Order:
    """Everything that was asked for one step."""

    step: int
    portions: list[Portion]


class Sampler:
    """Asks the servers; used by the thread that trains.

    Args:
        pool: the servers.
        prompts: the data.
        config: of the run.
        fingerprint: of the trainer's tokenizer.
        step: finished steps.
        position: where in the data to go on.
        queued: what ``queued`` gave when the run stopped.
    """

    def __init__(
        self,
        pool: ServerPool,
        prompts: PromptSource,
        config: Config,
        *,
        fingerprint: str,
        step: int,
        position: int,
        queued: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.position = position
        self._pool = pool
        self._prompts = prompts
        self._config = config
        self._fingerprint = fingerprint
        self._step = step
        self._restoring = queued
        self._orders: deque[Order] = deque()

    def admit(self, finished: int) -> None:
        """Ask for every step that may be asked for now that step ``finished`` is published."""
        while self._restoring:
            order, *self._restoring = self._restoring
            self._orders.append(self._restore(order))
            self._step += 1
        last = min(finished + 1 + self._config.train.max_staleness, self._config.train.steps)
        while self._step < last:
            self._step += 1
            portions = self._ask_next(self._config.rollout.prompts_per_step)
            self._orders.append(Order(self._step, portions))

    def take(self, step: int) -> tuple[list[Task], Rollout]:
        """The prompts of a step and their groups, in the data's order. Waits for them.

        Raises:
            MismatchError: an answer must not be trained on.
            TitoError: no server could answer.
        """
        order = self._orders.popleft()
        assert order.step == step, f"step {step} is trained, {order.step} was asked for"
        return self._collect(order.portions)

    def more(self, prompts: int) -> tuple[list[Task], Rollout]:
        """The next prompts of the data that nobody has asked for yet, and their groups, now.

        Raises:
            As ``take``.
        """
        return self._collect(self._ask_next(prompts))

    def queued(self) -> list[dict[str, Any]]:
        """What was asked for and is not trained yet, with the answers there are, as plain data."""
        return [
            {"step": order.step, "portions": [_to_plain(portion) for portion in order.portions]}
            for order in self._orders
        ]

    def waiting(self) -> list[Sample]:
        """Samples that have come and are not trained yet."""
        portions = [portion for order in self._orders for portion in order.portions]
        return [
            s for portion in portions if _is_there(portion) for s in portion.answer.result().samples
        ]

    @property
    def _most_portions(self) -> int:
        # A single server shares with nobody, and one request costs it less than several.
        return self._pool.size * _PORTIONS_PER_SERVER if self._pool.size > 1 else 1

    def _ask_next(self, count: int) -> list[Portion]:
        tasks = self._prompts.take(self.position, count)
        portions = []
        for start, part in _parts(tasks, self._most_portions):
            portions.append(self._ask(self.position + start, part))
        self.position += count
        return portions

    def _ask(self, position: int, tasks: list[Task]) -> Portion:
        work = partial(self._request, position, tasks)
        return Portion(position, tasks, in_background(work, "tito-rollout"))

    def _request(self, position: int, tasks: list[Task]) -> Rollout:
        options = self._config.rollout
        seed = {}
        if options.seeded:
            seed = {"seed": _seed_base(self._config.train.seed) + position}
        rollout = self._pool.rollout(
            [task.prompt for task in tasks],
            group_size=options.group_size,
            purpose="train",
            **options.sampling(),
            **seed,
        )
        self._check(rollout, len(tasks))
        return rollout

    def _check(self, rollout: Rollout, prompts: int) -> None:
        """Refuse what must not be trained on."""
        options = self._config.rollout
        records = check_records(
            rollout,
            prompts=prompts,
            group_size=options.group_size,
            vocab_size=self._pool.vocab_size,
        )
        if not records.passed:
            raise MismatchError(f"the rollout is damaged: {records.found}. {records.advice}")
        refuse_other_tokenizer(rollout.tokenizer, self._fingerprint)
        refuse_other_sampling(rollout.sampling, temperature=options.temperature)

    def _collect(self, portions: list[Portion]) -> tuple[list[Task], Rollout]:
        wait_for((portion.answer for portion in portions), meanwhile=self._pool.ensure)
        tasks = [task for portion in portions for task in portion.tasks]
        return tasks, joined([portion.answer.result() for portion in portions])

    def _restore(self, order: dict[str, Any]) -> Order:
        try:
            portions = [self._restore_portion(portion) for portion in order["portions"]]
            return Order(order["step"], portions)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's queue is damaged: {error!r}") from error

    def _restore_portion(self, saved: dict[str, Any]) -> Portion:
        tasks = self._prompts.take(saved["position"], saved["count"])
        if saved["answer"] is None:
            return self._ask(saved["position"], tasks)
        rollout = rollout_from_wire(saved["answer"])
        try:
            self._check(rollout, len(tasks))
        except MismatchError:  # the configuration has changed since
            return self._ask(saved["position"], tasks)
        answer: Future[Rollout] = Future()
        answer.set_result(rollout)
        return Portion(saved["position"], tasks, answer)


def joined(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts as one, its groups counted from 0 again."""
    groups = [group for rollout in rollouts for group in rollout.groups]
    return replace(rollouts[0], groups=tuple(map(_renumbered, range(len(groups)), groups)))


def _renumbered(group_id: int, group: Group) -> Group:
    samples = tuple(replace(sample, group_id=group_id) for sample in group.samples)
    return replace(group, group_id=group_id, samples=samples)


def _parts(tasks: list[Task], most: int) -> Iterator[tuple[int, list[Task]]]:
    """At most ``most`` parts of like size, each with where it starts."""
    size = -(-len(tasks) // most)
    for start in range(0, len(tasks), size):
        yield start, tasks[start : start + size]


def _seed_base(seed: int) -> int:
    """Far from those of other runs; the position in the data is added to it."""
    return xxhash.xxh3_64_intdigest(b"%d" % seed) >> 16


def _is_there(portion: Portion) -> bool:
    return portion.answer.done() and portion.answer.exception() is None


def _to_plain(portion: Portion) -> dict[str, Any]:
    answer = rollout_to_wire(portion.answer.result(), packed=True) if _is_there(portion) else None
    return {"position": portion.position, "count": len(portion.tasks), "answer": answer}
