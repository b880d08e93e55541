"""Look at what the policy says.

    python -m trainer peek http://127.0.0.1:8300 "What is 17 + 25?"    # ask, and show the group
    python -m trainer peek http://127.0.0.1:8300                       # what was sampled last

Equal answers share a colour and a letter. With ``--tokens`` each token is shaded by how likely it
was. The server keeps what it sampled last to be looked at, unless it was told not to; see also the
page at its address.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from shared.client import RolloutClient
from shared.lesson import MAX_TRUNCATED_SHARE
from shared.protocol import Rollout
from trainer.printable import printable

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "white")
_BAR_WIDTH = 16
_PROMPT_CHARS = 400
_UNLIKELY_SHOWN = 3
# Each shade brings its own ground and ink, so that it can be read on any terminal.
_SHADES = (
    (0.5, ""),
    (0.2, "black on color(230)"),
    (0.05, "black on color(223)"),
    (0.01, "bold black on color(216)"),
    (0.0, "bold underline black on color(203)"),
)


@dataclass(frozen=True)
class Answer:
    """One sample, as it is shown.

    Attributes:
        ends: why it ended.
        logprob: mean of its tokens, in nats; None without tokens.
        reward: what a trainer made of it, if one said so.
        tokens: texts and log-probabilities, if they are to be shown.
    """

    text: str
    length: int
    ends: str
    logprob: float | None
    version: int
    reward: float | None = None
    tokens: Sequence[tuple[str, float]] = ()


def peek(
    client: RolloutClient,
    console: Console,
    question: str,
    *,
    group_size: int = 8,
    max_tokens: int = 512,
    temperature: float = 1.0,
    tokens: bool = False,
) -> Rollout:
    """Ask one question as a chat and print every answer.

    Args:
        tokens: shade the tokens.
    """
    # At temperature 0 this is no training rollout, and looking is never training anyway.
    rollout = client.rollout(
        [[{"role": "user", "content": question}]],
        group_size=group_size,
        max_tokens=max_tokens,
        temperature=temperature,
        purpose="eval",
    )
    print_group(console, question, answers_of(rollout, client if tokens else None))
    return rollout


def peek_recent(
    client: RolloutClient, console: Console, count: int, *, tokens: bool = False
) -> None:
    """Print the newest training groups that the server keeps, the newest last.

    Raises:
        NotFound: it keeps none.
    """
    found = client.look("groups", limit=str(count), purpose="train")["groups"]
    if not found:
        console.print(Text("the server has sampled no training groups yet", style="dim"))
    for summary in reversed(found):
        group = client.look(f"groups/{summary['id']}")
        answers = [
            _recent(sample, _tokens(client, group["id"], index) if tokens else ())
            for index, sample in enumerate(group["samples"])
        ]
        print_group(console, group["prompt"], answers)


def answers_of(rollout: Rollout, client: RolloutClient | None = None) -> list[Answer]:
    """A rollout's samples.

    Args:
        client: asks for the texts of the tokens.
    """
    return [
        Answer(
            text=sample.text or "",
            length=len(sample.completion_ids),
            ends=sample.finish_reason,
            logprob=float(sample.logprobs.mean()) if len(sample.logprobs) else None,
            version=sample.version,
            tokens=_tokens(client, group.id, index) if client else (),
        )
        for group in rollout.groups
        for index, sample in enumerate(group.samples)
    ]


def _recent(sample: Mapping[str, Any], tokens: Sequence[tuple[str, float]]) -> Answer:
    return Answer(
        text=sample["text"],
        length=sample["length"],
        ends=sample["finish_reason"],
        logprob=sample["mean_logprob"],
        version=sample["version"],
        reward=sample["reward"],
        tokens=tokens,
    )


def _tokens(client: RolloutClient, group: str, index: int) -> list[tuple[str, float]]:
    found = client.look(f"groups/{group}/samples/{index}/tokens")["tokens"]
    return [(token["text"], token["logprob"]) for token in found]


def print_group(console: Console, question: str, answers: Sequence[Answer]) -> None:
    """A question and its answers, and what they have in common."""
    shown = printable(question.strip())
    cut = f" ... {len(shown) - _PROMPT_CHARS} characters more" if len(shown) > _PROMPT_CHARS else ""
    console.print(
        Text.assemble(("question  ", "dim"), (shown[:_PROMPT_CHARS], "bold"), (cut, "dim"))
    )
    counts = Counter(answer.text for answer in answers)
    styles = {text: _COLOURS[i % len(_COLOURS)] for i, text in enumerate(counts)}
    letters = _letters(counts)
    longest = max((answer.length for answer in answers), default=1)
    for number, answer in enumerate(answers, start=1):
        console.print(_facts(number, answer, letters.get(answer.text, ""), longest))
        console.print(_body(answer, styles[answer.text]))
        if unlikely := _unlikely(answer.tokens):
            console.print(Text(f"    least likely: {unlikely}", style="dim"))
    console.print(_summary(answers, len(counts)))


def _letters(counts: Counter[str]) -> dict[str, str]:
    """A letter for each answer that came more than once, so that equal ones show without colour."""
    repeated = [text for text, count in counts.items() if count > 1]
    return {
        text: f"{chr(65 + i) if i < 26 else i + 1} x{counts[text]}"
        for i, text in enumerate(repeated)
    }


def _facts(number: int, answer: Answer, letter: str, longest: int) -> Text:
    mean = "none" if answer.logprob is None else f"{answer.logprob:.3f}"
    line = Text(f"{number:>2}  ")
    if answer.reward is not None:
        line.append(f"reward {answer.reward:.2f}  ", style="bold")
    line.append(f"{answer.length} tokens  ", "dim")
    line.append(f"{answer.ends}", style="yellow" if answer.ends != "stop" else "dim")
    line.append(f"  mean logprob {mean}  v{answer.version}", "dim")
    line.append(f"  {'#' * max(1, round(answer.length / max(longest, 1) * _BAR_WIDTH))}", "dim")
    line.append(f"  {letter}" if letter else "", "dim")
    return line


def _body(answer: Answer, colour: str) -> Text:
    if not answer.tokens:
        return Text(f"    {printable(answer.text or '(no text)')}", style=colour)
    body = Text("    ")
    for text, logprob in answer.tokens:
        probability = math.exp(logprob)
        style = next(style for bound, style in _SHADES if probability >= bound)
        body.append(printable(text), style=style)
    return body


def _unlikely(tokens: Sequence[tuple[str, float]]) -> str:
    """The least likely tokens in words, for those who see no shades."""
    least = sorted(tokens, key=lambda token: token[1])[:_UNLIKELY_SHOWN]
    return ", ".join(f"{printable(text)!r} {math.exp(logprob):.2%}" for text, logprob in least)


def _summary(answers: Sequence[Answer], different: int) -> Text:
    cut = sum(answer.ends == "length" for answer in answers)
    line = Text(f"{different} different answers of {len(answers)}")
    if answers:
        line.append(
            f", {sum(answer.length for answer in answers) / len(answers):.1f} tokens on average"
        )
    if cut:
        over = cut > MAX_TRUNCATED_SHARE * len(answers)
        line.append(f", {cut} hit max_tokens{'!' if over else ''}", style="red" if over else "dim")
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    if rewards:
        line.append(f", mean reward {sum(rewards) / len(rewards):.3f}")
    return line
