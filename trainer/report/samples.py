"""Which groups to show: the best, the worst, and those whose prompt came again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.protocol import Group
from trainer.batches import SavedBatch
from trainer.ledger import Fate, fate_of
from trainer.report.charts import short
from trainer.report.markup import Html, table, tag, text
from trainer.report.record import Decode
from trainer.rewards import Failed, Outcome, Score

_SHOWN_GROUPS = 3
_SHOWN_SAMPLES = 8
_SHOWN_PROMPTS = 4
_SHOWN_TIMES = 12
_SHOWN_ANSWERS = 4
_ANSWER_CHARS = 300


@dataclass(frozen=True)
class ScoredGroup:
    """A group and what became of it."""

    step: int
    group: Group
    outcomes: Sequence[Outcome]
    fate: Fate

    @property
    def rewards(self) -> list[float]:
        """Of the samples that have one."""
        return [outcome.value for outcome in self.outcomes if isinstance(outcome, Score)]

    @property
    def mean(self) -> float:
        """Mean reward; there is one."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True)
class Appearance:
    """One prompt's answers in one step, counted."""

    step: int
    version: int
    mean: float | None
    samples: int
    answers: list[tuple[str, int, float | None]]


@dataclass(frozen=True)
class Selection:
    """What is shown of a run's samples.

    Attributes:
        best, worst: by mean reward, one group for each prompt.
        again: prompts that came in several steps, with their answers in each.
    """

    best: list[ScoredGroup]
    worst: list[ScoredGroup]
    again: list[tuple[Group, list[Appearance]]]


def select(batches: Iterable[SavedBatch]) -> Selection:
    """Go through a run's samples once; a few groups and short answers stay in memory."""
    best: dict[bytes, ScoredGroup] = {}
    worst: dict[bytes, ScoredGroup] = {}
    prompts: dict[bytes, Group] = {}
    times: defaultdict[bytes, list[Appearance]] = defaultdict(list)
    for batch in batches:
        for group, outcomes, fates in zip(
            batch.rollout.groups, batch.outcomes, batch.fates, strict=True
        ):
            scored = ScoredGroup(batch.step, group, outcomes, fate_of(fates))
            prompt = group.prompt_ids.tobytes()
            prompts.setdefault(prompt, Group(group.group_id, group.prompt_ids, ()))
            times[prompt].append(_appearance(scored))
            if scored.rewards:
                _keep(best, prompt, scored, sign=1.0)
                _keep(worst, prompt, scored, sign=-1.0)
    return Selection(_ranked(best, sign=1.0), _ranked(worst, sign=-1.0), _again(prompts, times))


def _keep(
    kept: dict[bytes, ScoredGroup], prompt: bytes, scored: ScoredGroup, *, sign: float
) -> None:
    """Let a group in if it is among the first, and whoever is last then out."""
    before = kept.get(prompt)
    if before is None or sign * scored.mean >= sign * before.mean:
        kept[prompt] = scored
    if len(kept) > _SHOWN_GROUPS:
        del kept[min(kept, key=lambda name: (sign * kept[name].mean, kept[name].step))]


def _ranked(kept: dict[bytes, ScoredGroup], *, sign: float) -> list[ScoredGroup]:
    return sorted(kept.values(), key=lambda scored: (-sign * scored.mean, -scored.step))


def _appearance(scored: ScoredGroup) -> Appearance:
    pairs = list(zip(scored.group.samples, scored.outcomes, strict=True))
    counts = Counter((sample.text or "")[:_ANSWER_CHARS] for sample, _ in pairs)
    rewards = {
        (sample.text or "")[:_ANSWER_CHARS]: outcome.value
        for sample, outcome in pairs
        if isinstance(outcome, Score)
    }
    return Appearance(
        step=scored.step,
        version=min((sample.version for sample, _ in pairs), default=0),
        mean=scored.mean if scored.rewards else None,
        samples=len(pairs),
        answers=[(t, n, rewards.get(t)) for t, n in counts.most_common(_SHOWN_ANSWERS)],
    )


def _again(
    prompts: dict[bytes, Group], times: dict[bytes, list[Appearance]]
) -> list[tuple[Group, list[Appearance]]]:
    """Prompts that came in the most steps; of those, where the reward moved most."""

    def rank(appearances: list[Appearance]) -> tuple[int, float]:
        means = [a.mean for a in appearances if a.mean is not None]
        return len(appearances), max(means, default=0.0) - min(means, default=0.0)

    several = [prompt for prompt, found in times.items() if len({a.step for a in found}) > 1]
    several.sort(key=lambda prompt: rank(times[prompt]), reverse=True)
    return [(prompts[prompt], times[prompt]) for prompt in several[:_SHOWN_PROMPTS]]


def group_section(scored: ScoredGroup, decode: Decode | None) -> Html:
    """A group with its prompt and its first samples."""
    rewards = scored.rewards
    facts = f"step {scored.step}, mean reward {short(scored.mean)}, {scored.fate.replace('_', ' ')}"
    if len(rewards) < len(scored.outcomes):
        facts += f", {len(scored.outcomes) - len(rewards)} without a verdict"
    samples = list(zip(scored.group.samples, scored.outcomes, strict=True))
    cards = [
        tag(
            "div",
            tag("p", _verdict(outcome), tag("span", f"{len(sample.completion_ids)} tokens"),
                tag("span", {"stop": "stopped", "length": "cut off"}.get(
                    sample.finish_reason, sample.finish_reason)),
                tag("span", f"v{sample.version}"), class_="meta"),
            tag("pre", text(sample.text if sample.text is not None else "(no text)"), dir="auto"),
            class_="sample",
        )
        for sample, outcome in samples[:_SHOWN_SAMPLES]
    ]  # fmt: skip
    left = len(samples) - len(cards)
    return tag(
        "article",
        tag("p", facts, class_="meta"),
        prompt_text(scored.group, decode),
        tag("div", cards, class_="samples"),
        tag("p", f"and {left} more samples", class_="meta") if left else None,
    )


def again_section(prompt: Group, appearances: Sequence[Appearance], decode: Decode | None) -> Html:
    """One prompt through the run."""
    shown = _spread_out(appearances, _SHOWN_TIMES)
    rows = [
        [
            f"{a.step}",
            f"v{a.version}",
            short(a.mean),
            _answers(a),
        ]
        for a in shown
    ]
    left = len(appearances) - len(shown)
    return tag(
        "article",
        prompt_text(prompt, decode),
        table(["Step", "Version", "Mean reward", "Answers, the most frequent first"], rows),
        tag("p", f"{left} steps between these are left out", class_="meta") if left else None,
    )


def _answers(appearance: Appearance) -> Html:
    return tag("div", [_counted(appearance, *a) for a in appearance.answers], class_="answers")


def _spread_out(appearances: Sequence[Appearance], most: int) -> list[Appearance]:
    if len(appearances) <= most:
        return list(appearances)
    last = len(appearances) - 1
    return [appearances[round(i * last / (most - 1))] for i in range(most)]


def _counted(appearance: Appearance, answer: str, count: int, reward: float | None) -> Html:
    how = f"{count}/{appearance.samples}" + ("" if reward is None else f", reward {short(reward)}")
    shown = answer.strip() or "(nothing)"
    return tag("div", tag("code", text(shown)), tag("span", how, class_="meta"), class_="answer")


def _verdict(outcome: Outcome) -> Html:
    if isinstance(outcome, Failed):
        return tag("b", "no verdict", title=outcome.reason)
    return tag("b", short(outcome.value))


def prompt_text(group: Group, decode: Decode | None) -> Html:
    """The prompt as the engine saw it."""
    if decode is None:
        count = len(group.prompt_ids)
        return tag("p", f"A prompt of {count} tokens, whose tokenizer is not here.", class_="meta")
    return tag("pre", text(decode(group.prompt_ids.tolist())), class_="prompt", dir="auto")
