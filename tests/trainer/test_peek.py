from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.client import RolloutClient
from shared.errors import NotFound
from shared.protocol import Rollout, Sample
from tests.rollout_server.viewer_support import HOSTILE, scripted
from trainer.peek import answers_of, peek, peek_recent, print_group


def printed(rollout: Rollout, *, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        soft_wrap=True,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    print_group(console, "2+2?", answers_of(rollout))
    return out.getvalue()


def test_shows_every_answer_with_its_facts(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    samples = [make_sample(text="four"), make_sample(text="five", finish_reason="length")]
    lines = printed(make_rollout([samples])).splitlines()
    assert lines == [
        "question  2+2?",
        " 1  2 tokens  stop  mean logprob -0.500  v4  ################",
        "    four",
        " 2  2 tokens  length  mean logprob -0.500  v4  ################",
        "    five",
        "2 different answers of 2, 2.0 tokens on average, 1 hit max_tokens!",
    ]


def test_equal_answers_share_a_letter(
    make_sample: Callable[..., Sample], make_rollout: Callable[..., Rollout]
) -> None:
    samples = [make_sample(text=text) for text in ("a", "b", "a", "c", "c", "c")]
    facts = printed(make_rollout([samples])).splitlines()[1:-1:2]
    assert [line.split("#  ")[1:] for line in facts] == [["A x2"], [], ["A x2"], *[["B x3"]] * 3]


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


def test_recent_groups_come_with_rewards_and_tokens(untrained_model: Path, tmp_path: Path) -> None:
    answers = {"3+4=": ["7", HOSTILE], "2+6=": ["8", "9"]}
    with scripted(untrained_model, tmp_path, answers.__getitem__) as (server, _):
        assert "no training groups yet" in recent(server.client)
        server.client.rollout(["3+4="], group_size=2, max_tokens=400)
        rollout = server.client.rollout(["2+6="], group_size=2, max_tokens=400)
        server.client.report_rewards([{"id": rollout.groups[0].id, "rewards": [1.0, 0.0]}])
        shown = recent(server.client, tokens=True)
        assert shown.index("3+4=") < shown.index("2+6=")
        assert "reward 1.00" in shown
        assert "mean reward 0.500" in shown
        assert "least likely: " in shown
        assert "\\x1b[31mred" in shown
        assert not {"\x1b", "\u202e", "\u200b"} & set(shown)
        assert "8<|im_end|>" in shown
        assert "3+4=" not in recent(server.client, count=1)
        coloured = recent(server.client, terminal=True, tokens=True)
        assert "\x1b[" in coloured


def recent(client: RolloutClient, *, count: int = 3, terminal: bool = False, **how: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, soft_wrap=True, highlight=False, force_terminal=terminal)
    peek_recent(client, console, count, **how)
    return out.getvalue()


def test_a_server_that_keeps_nothing_says_so(untrained_model: Path, tmp_path: Path) -> None:
    with (
        scripted(untrained_model, tmp_path, lambda _: ["7"], viewer=False) as (server, _),
        pytest.raises(NotFound),
    ):
        recent(server.client)
