"""Look at what the policy says: one question, its group of answers.

python -m trainer peek http://127.0.0.1:8300 "What is 17 + 25?"
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from shared.client import RolloutClient
from shared.protocol import Rollout, Sample

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "white")


def peek(
    client: RolloutClient,
    console: Console,
    question: str,
    *,
    group_size: int = 8,
    max_tokens: int = 512,
    temperature: float = 1.0,
) -> Rollout:
    """Ask one question as a chat and print every answer."""
    # At temperature 0 this is no training rollout, and looking is never training anyway.
    rollout = client.rollout(
        [[{"role": "user", "content": question}]],
        group_size=group_size,
        max_tokens=max_tokens,
        temperature=temperature,
        purpose="eval",
    )
    print_answers(console, question, rollout)
    return rollout


def print_answers(console: Console, question: str, rollout: Rollout) -> None:
    """The question and its answers, equal answers in one colour."""
    console.print(Text.assemble(("question  ", "dim"), (_printable(question), "bold")))
    colours = _colour_by_answer(sample.text or "" for sample in rollout.samples)
    for number, sample in enumerate(rollout.samples, start=1):
        colour = colours[sample.text or ""]
        console.print(Text(f"{number:>2}  {_facts(sample)}", style="dim"))
        console.print(Text(f"    {_printable(sample.text or '(no text)')}", style=colour))
    console.print(Text(f"{len(colours)} different answers of {len(rollout.samples)}", style="dim"))


def _facts(sample: Sample) -> str:
    tokens = len(sample.completion_ids)
    mean = f"{sample.logprobs.mean():.3f}" if tokens else "none"
    return f"{tokens} tokens  {sample.finish_reason}  mean logprob {mean}  v{sample.version}"


def _colour_by_answer(answers: Iterable[str]) -> dict[str, str]:
    distinct = dict.fromkeys(answers)
    return {answer: _COLOURS[i % len(_COLOURS)] for i, answer in enumerate(distinct)}


def _printable(text: str) -> str:
    """Without control characters: a model must not be able to drive the terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )
