from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from shared.client import RolloutClient
from shared.protocol import Rollout, Sample
from trainer.peek import peek, print_answers


def printed(rollout: Rollout, *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        soft_wrap=True,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    print_answers(console, "2+2?", rollout)
    return out.getvalue()


def test_shows_every_answer_with_its_facts(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    samples = [make_sample(text="four"), make_sample(text="five", finish_reason="length")]
    lines = printed(make_rollout([samples])).splitlines()
    assert lines == [
        "question  2+2?",
        " 1  2 tokens  stop  mean logprob -0.500  v4",
        "    four",
        " 2  2 tokens  length  mean logprob -0.500  v4",
        "    five",
        "2 different answers of 2",
    ]


def test_equal_answers_share_a_colour(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    texts = ["a", "b", "a"]
    shown = printed(make_rollout([[make_sample(text=t) for t in texts]]), terminal=True)
    answers = [line for line in shown.splitlines() if line.split("m", 1)[-1].startswith("    ")]
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert answers[0].replace("a", "b") != answers[1]


def test_model_text_is_neither_markup_nor_terminal_control(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    shown = printed(make_rollout([[make_sample(text="[red]x[/red] [/] \x1b[2J\x07 \u202e")]]))
    assert "[red]x[/red] [/] \\x1b[2J\\x07 \\u202e" in shown
    assert "\x1b" not in shown


def test_empty_completions_and_missing_text(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    shown = printed(make_rollout([[make_sample(completion=(), text=None)]]))
    assert "0 tokens  stop  mean logprob none" in shown
    assert "(no text)" in shown


def test_peek_at_a_real_server(server_url: str) -> None:
    out = io.StringIO()
    with RolloutClient(server_url) as client:
        rollout = peek(client, Console(file=out), "3+4=?", max_tokens=8)
    assert len(rollout.samples) == 8
    assert out.getvalue().count("mean logprob") == 8
