"""Rollouts of several turns: ids that only grow, and a tool whose tokens bear no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_server.settings import ServerSettings
from shared.client import RolloutClient
from tests.trainer.fake_servers import fake_servers
from trainer.batch import collate
from trainer.episodes import Episode, chat_turn, play

PROMPTS = [[{"role": "user", "content": "12+7=?"}], [{"role": "user", "content": "3+4=?"}]]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def test_a_message_is_rendered_as_the_template_would(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "12+7=?"},
        {"role": "assistant", "content": "18"},
        {"role": "user", "content": "no, try again"},
    ]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    first = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    turn, wrap = tokenizer.encode("18", add_special_tokens=False), chat_turn(tokenizer)
    stopped = [*turn, tokenizer.eos_token_id]
    assert [*first, *stopped, *wrap(stopped, "no, try again")] == whole
    # A turn that a stop string ended lacks the stop token, and the next must not see that.
    assert [*first, *turn, *wrap(turn, "no, try again")] == whole


def test_a_template_to_which_nothing_can_be_appended() -> None:
    class Rewriting:
        eos_token = "<|im_end|>"

        def apply_chat_template(self, chat: list[Any], **_: Any) -> str:
            return f"{len(chat)} turns: y<|im_end|>"

    with pytest.raises(ValueError, match="cannot be appended"):
        chat_turn(Rewriting())([5], "no")


def test_every_turn_stands_on_the_ids_before_it(
    client: RolloutClient, tokenizer: Any, tiny_model: Path
) -> None:
    wrap, asked = chat_turn(tokenizer), list[Episode]()

    def tool(episode: Episode) -> str | None:
        asked.append(episode)
        return "no, try again" if len(episode.turns) < 3 else None

    groups = play(
        client,
        PROMPTS,
        tool,
        wrap=wrap,
        turns=4,
        group_size=3,
        max_tokens=30,
        # The tiny policy rarely stops by itself; any byte of a digit will do for this test.
        stop_token_ids=tokenizer.encode("0123456789", add_special_tokens=False),
    )
    assert [group.group_id for group in groups] == [0, 1]
    samples = [sample for group in groups for sample in group.samples]
    episodes = [sample for sample in samples if isinstance(sample, Episode)]
    assert len(episodes) == len(samples) == 6
    assert max(len(episode.turns) for episode in episodes) == 3, "no episode had three turns"
    between = wrap([tokenizer.eos_token_id], "no, try again")
    for episode in episodes:
        check_parts(episode, between, tokenizer.eos_token_id)
        check_batch(episode, tiny_model)
    # What the tool saw is what the episode became: nothing before it was changed.
    for seen in asked:
        assert any(episode.ids[: len(seen.ids)] == seen.ids for episode in episodes)


def test_an_episode_that_outgrows_the_context_ends_and_the_others_go_on(
    tokenizer: Any, tiny_model: Path, tmp_path: Path
) -> None:
    longest = ServerSettings(model="m").max_model_len

    def tool(episode: Episode) -> str:
        return "no " * (longest if episode.group_id == 0 else 1)

    wrap, settings = chat_turn(tokenizer), {"turns": 3, "group_size": 2, "max_tokens": 8}
    with (
        fake_servers(tiny_model, tmp_path, 1) as (server,),
        RolloutClient(server.url) as client,
    ):
        client.reset()  # the fake engine's tokens are of version 1
        grown, others = play(client, PROMPTS, tool, wrap=wrap, **settings)
    for episode in grown.samples:
        assert isinstance(episode, Episode)
        assert (len(episode.turns), episode.finish_reason) == (1, "length")
        assert episode.sampled.all(), "an answer that nobody took up is no part of it"
    for episode in others.samples:
        assert isinstance(episode, Episode)
        assert (len(episode.turns), episode.finish_reason) == (3, "stop")


def check_parts(episode: Any, between: list[int], stop: int) -> None:
    """The policy's turns and the tool's answers alternate, and are masked and labelled so."""
    ids, sampled = episode.completion_ids, episode.sampled
    assert len(ids) == len(sampled) == len(episode.logprobs)
    assert not sampled[-1] or len(episode.turns) >= 1
    edges = np.flatnonzero(np.diff(sampled.astype(int))) + 1
    parts = np.split(np.arange(len(ids)), edges)
    answers = [part for part in parts if not sampled[part[0]]]
    assert len(answers) == len(episode.turns) - 1
    for part in answers:
        ended = ids[part[0] - 1] == stop
        assert ids[part].tolist() == (between if ended else [stop, *between])
        assert not episode.logprobs[part].any()
    covered = np.zeros(len(ids), bool)
    for span in episode.spans:
        covered[span.start : span.end] = True
    assert (covered == sampled).all()


def check_batch(episode: Any, model_dir: Path) -> None:
    """The trainer scores what was sampled, in the context in which it was, and nothing else."""
    batch = collate([episode], pad_id=0)
    prompt = len(episode.prompt_ids)
    assert batch.completion_mask[0].tolist() == [False] * prompt + episode.sampled.tolist()
    assert batch.input_ids[0].tolist() == episode.ids
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(batch.input_ids).logits[0, :-1], -1)
    own = logprobs.gather(1, batch.input_ids[0, 1:, None])[:, 0]
    mask = batch.completion_mask[0, 1:]
    off = (own[mask] - batch.sampler_logprobs[0, 1:][mask]).abs()
    assert off.max() < 0.3
    assert off.mean() < 0.05
