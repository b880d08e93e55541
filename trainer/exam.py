"""What a policy can do, and how much of it is form: the table of ``python -m trainer eval``.

Every answer is judged in three ways:

- lenient: the run's own reward says that it is right, wherever in the text the answer stands;
- strict: the answer stands where ``evaluation.answer_pattern`` wants it, bare, and is right;
- form only: something stands there, bare, right or wrong. It is the control: training that lifts
  strict and form alike, but lenient little, has taught a format.

Greedy answers have one try for each problem; pass@k is estimated from ``evaluation.samples`` tries
at the training temperature. The same table is made for every policy, so base and trained model
can be laid side by side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from shared.client import RolloutClient
from shared.protocol import Group, Rollout
from trainer.config import Config
from trainer.evaluate import ask, patient
from trainer.prompts import Task
from trainer.rewards import Failed, Outcome, Reward, score_rollout
from trainer.statistics import Estimate, mean_over_problems, pass_at_k, wilson

WAYS = ("lenient", "strict", "form only")


@dataclass(frozen=True)
class Exam:
    """One policy's results.

    Attributes:
        version: the oldest policy that answered.
        table: by way of judging and column, such as ``greedy`` and ``pass@4``.
        errors: answers on which the reward failed; lenient leaves them out.
        truncated: share of the greedy answers that hit max_tokens.
    """

    name: str
    version: int
    problems: int
    samples: int
    table: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    errors: int = 0
    truncated: float = 0.0

    def __str__(self) -> str:
        columns = list(self.table[WAYS[0]])
        heading = f"{self.name} (v{self.version}): {self.problems} problems"
        heading += f", {self.samples} samples each" if self.samples else ""
        heading += f"; {self.truncated:.0%} of greedy answers cut off"
        heading += f"; {self.errors} reward errors" if self.errors else ""
        lines = [heading, " " * 10 + "".join(f"{column:>22}" for column in columns)]
        for way in WAYS:
            row = "".join(f"{self.table[way][column]!s:>22}" for column in columns)
            lines.append(f"{way:<10}{row}")
        return "\n".join(lines)


def examine(
    client: RolloutClient, config: Config, tasks: Sequence[Task], reward: Reward, *, name: str
) -> Exam:
    """Ask the served policy all problems and judge the answers.

    Raises:
        Overloaded: the server was too busy with others for ``server.ready_timeout``.
    """
    count = config.evaluation.samples
    answers = patient(client.rollout, config.server.ready_timeout)
    greedy = ask(answers, config, tasks, group_size=1, temperature=0.0)
    rollouts = {"greedy": greedy}
    if count:
        rollouts["sampled"] = ask(
            answers,
            config,
            tasks,
            group_size=count,
            temperature=config.rollout.temperature,
        )
    errors, table = 0, {way: dict[str, Estimate]() for way in WAYS}
    for kind, rollout in rollouts.items():
        outcomes = score_rollout(reward, tasks, rollout)
        errors += sum(isinstance(outcome, Failed) for group in outcomes for outcome in group)
        for way, marks in judge(config, tasks, rollout, outcomes).items():
            table[way] |= estimates(marks, greedy=kind == "greedy")
    return Exam(
        name=name,
        version=min(sample.version for r in rollouts.values() for sample in r.samples),
        problems=len(tasks),
        samples=count,
        table=table,
        errors=errors,
        truncated=sum(s.finish_reason == "length" for s in greedy.samples) / len(greedy.samples),
    )


def judge(
    config: Config,
    tasks: Sequence[Task],
    rollout: Rollout,
    outcomes: Sequence[Sequence[Outcome]],
) -> dict[str, list[list[bool]]]:
    """By way of judging, for each problem which answers pass."""
    options = config.evaluation
    strict, form = strict_judge(options.answer_pattern), form_judge(options.answer_pattern)
    return {
        "lenient": [
            [o.value >= options.right_at for o in group if not isinstance(o, Failed)]
            for group in outcomes
        ],
        "strict": _by_text(strict, tasks, rollout.groups),
        "form only": _by_text(form, tasks, rollout.groups),
    }


def _by_text(
    judged: Callable[[str, str], bool], tasks: Sequence[Task], groups: Sequence[Group]
) -> list[list[bool]]:
    return [
        [judged(sample.text or "", task.reference or "") for sample in group.samples]
        for task, group in zip(tasks, groups, strict=True)
    ]


def estimates(marks: Sequence[Sequence[bool]], *, greedy: bool) -> dict[str, Estimate]:
    """The columns that one rollout fills."""
    if greedy:
        single = [mark for group in marks for mark in group]
        return {"greedy": wilson(sum(single), len(single))}
    most = max((len(group) for group in marks), default=0)
    found = {}
    for k in _powers_of_two(most):
        # A problem whose reward failed too often for k tries says nothing about k tries.
        enough = [group for group in marks if len(group) >= k]
        found[f"pass@{k}"] = mean_over_problems(
            [pass_at_k(len(group), sum(group), k) for group in enough]
        )
    return found


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself, but no more than five of them."""
    powers = sorted(
        {*(2**i for i in range(most.bit_length()) if 2**i <= most), *([most] * (most > 0))}
    )
    return powers if len(powers) <= 5 else [powers[0], *powers[-4:]]


def strict_judge(pattern: str) -> Callable[[str, str], bool]:
    """Whether a text's answer, where it should stand and bare, is the reference's."""

    def judged(text: str, reference: str) -> bool:
        found = _captured(pattern, text)
        expected = _captured(pattern, reference)
        if expected is None:
            expected = reference.strip()
        if not found:
            return False
        numbers = _number(found), _number(expected)
        return found == expected or (None not in numbers and numbers[0] == numbers[1])

    return judged


def form_judge(pattern: str) -> Callable[[str, str], bool]:
    """Whether an answer stands where it should, and is a bare number if the reference is one."""

    def judged(text: str, reference: str) -> bool:
        found = _captured(pattern, text)
        expected = _captured(pattern, reference) or reference.strip()
        return bool(found) and (_number(expected) is None or _number(found or "") is not None)

    return judged


def _captured(pattern: str, text: str) -> str | None:
    """The last place where an answer stands, stripped; None when there is no such place."""
    if not pattern:
        return text.strip()
    found = re.findall(pattern, text)
    return found[-1].strip() if found else None


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))
    except InvalidOperation:
        return None
