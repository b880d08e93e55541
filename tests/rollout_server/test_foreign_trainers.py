"""Trainers that were written for ``vllm serve``, on our server with vLLM: vLLM's own and TRL's.

NCCL needs GPUs. In its place comes a backend for CPU that reads files; vLLM's worker creates and
calls it like any other, and neither client knows the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import safetensors.torch
from transformers import PreTrainedTokenizerFast

from rollout_server.settings import ServerSettings
from tests.rollout_server.engines import (
    LONG_PROMPT,
    PATIENCE_S,
    Running,
    assert_made_by,
    assert_tiles,
    greedy,
    in_flight,
    running,
)
from tests.rollout_server.support import (
    BF16_MEAN_NATS,
    Weights,
    assert_agree,
    lazy,
    make_live,
)


@pytest.fixture(scope="module")
def real(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with vLLM that receives weights by a backend for CPU."""
    # Here, since vLLM takes long to import, also where only other tests are run.
    from tests.rollout_server.file_transfer import BACKEND, FileEngine

    settings = ServerSettings(
        model=str(tiny_model),
        weight_transfer=BACKEND,
        staging_dir=tmp_path_factory.mktemp("staging"),
    )
    with running(settings, FileEngine) as server:
        yield server


@pytest.fixture
def sender(real: Running, tmp_path: Path, base: Weights, first: Weights) -> Any:
    """vLLM's own client for trainers, connected; files of two sets of weights lie ready."""
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    for name, weights in (("base", base), ("first", first)):
        safetensors.torch.save_file(weights.tensors, tmp_path / f"{name}.safetensors")
    client = HTTPVLLMWeightSyncClient(real.url)
    client.init_weight_transfer_engine({"folder": str(tmp_path)})
    return client


def announce(weights: Weights, name: str, part: slice = slice(None)) -> dict[str, Any]:
    return {"file": f"{name}.safetensors", "names": list(weights.tensors)[part]}


class TestVLLMsClient:
    def test_vllms_own_client_publishes(
        self, real: Running, sender: Any, base: Weights, first: Weights
    ) -> None:
        version = make_live(real.client, base)
        prompts = [[5, 6, number] for number in range(100, 104)]
        with in_flight(real.url, prompts, group_size=2, max_tokens=900, ignore_eos=True) as rolls:
            sender.start_weight_update()
            sender.update_weights(announce(first, "first", slice(4)))
            assert real.client.info().version == version
            sender.update_weights(announce(first, "first", slice(4, None)))
            sender.finish_weight_update("a trainer's name for it")
            rollouts = [roll.result(PATIENCE_S) for roll in rolls]
        info = real.client.info()
        assert (info.version, info.digest) == (version + 1, first.digest)
        assert greedy(real.client) == first.greedy(LONG_PROMPT, 10)
        made_by = {base.digest: base, first.digest: first}
        for sample in (sample for rollout in rollouts for sample in rollout.samples):
            assert_tiles(sample)
            assert_made_by(sample, made_by.__getitem__)

    def test_part_of_a_model_is_not_published(
        self, real: Running, sender: Any, base: Weights, first: Weights
    ) -> None:
        version = make_live(real.client, base)
        sender.start_weight_update()
        sender.update_weights(announce(first, "first", slice(4)))
        assert greedy(real.client) == base.greedy(LONG_PROMPT, 10)  # the live model is whole
        with pytest.raises(requests.HTTPError, match="422"):
            sender.finish_weight_update()
        assert real.client.info().version == version
        assert greedy(real.client) == base.greedy(LONG_PROMPT, 10)

    def test_what_the_workers_refuse_changes_nothing(
        self, real: Running, sender: Any, base: Weights
    ) -> None:
        version = make_live(real.client, base)
        sender.start_weight_update()
        with pytest.raises(requests.HTTPError, match="500"):
            sender.update_weights({"file": "none.safetensors", "names": ["x"]})
        assert real.client.info().version == version
        assert greedy(real.client) == base.greedy(LONG_PROMPT, 10)
        real.client.reload(lazy(base.tensors))  # the lease was given back

    def test_samples_wait_out_a_pause(self, real: Running, base: Weights) -> None:
        make_live(real.client, base)
        with in_flight(real.url, [LONG_PROMPT], group_size=2, max_tokens=900, ignore_eos=True) as (
            rolls
        ):
            assert httpx.post(f"{real.url}/pause?mode=keep", timeout=60).status_code == 200
            assert httpx.get(f"{real.url}/is_paused").json() == {"is_paused": True}
            was_done = rolls[0].done()
            threading.Event().wait(0.5)
            assert rolls[0].done() == was_done
            assert httpx.post(f"{real.url}/resume").status_code == 200
            rollout = rolls[0].result(PATIENCE_S)
        assert [len(sample.completion_ids) for sample in rollout.samples] == [900, 900]
        for sample in rollout.samples:
            assert_made_by(sample, lambda _: base)

    def test_it_sleeps_and_wakes(self, real: Running, first: Weights) -> None:
        version = make_live(real.client, first)
        for level in (0, 1, 2):
            assert httpx.post(f"{real.url}/sleep?level={level}", timeout=60).status_code == 200
            if level:
                assert httpx.get(f"{real.url}/readyz").status_code == 503
            assert httpx.post(f"{real.url}/wake_up", timeout=60).json()["status"] == "awake"
            assert greedy(real.client) == first.greedy(LONG_PROMPT, 10)
        assert real.client.info().version == version

    @pytest.mark.parametrize("level", [1, 2])
    def test_weights_are_published_between_the_two_halves_of_waking_up(
        self, real: Running, base: Weights, first: Weights, level: int
    ) -> None:
        version = make_live(real.client, base)
        with real.client.lease(holder="sleepy") as lease:
            real.client.sleep(level, fence=lease.fence)
            real.client.wake_up("weights")
            result = real.client.reload(lazy(first.tensors), fence=lease.fence)
            real.client.wake_up("kv_cache")
            assert greedy(real.client) == first.greedy(LONG_PROMPT, 10)
            assert result.version == version + 1
            real.client.sleep(level, fence=lease.fence)
        real.client.wait_ready(60)  # the lease was given back
        assert greedy(real.client) == first.greedy(LONG_PROMPT, 10)

    def test_what_trainers_look_up(self, real: Running) -> None:
        assert httpx.get(f"{real.url}/get_world_size").json() == {"world_size": 1}
        query = "config_format=json"
        info = httpx.get(f"{real.url}/server_info?{query}", timeout=60).json()["vllm_config"]
        assert info["weight_transfer_config"] == {"backend": "files"}
        assert httpx.post(f"{real.url}/reset_prefix_cache", timeout=60).json()["success"]


class TestTRL:
    """TRL's client and trainer as they are, but with files in the place of NCCL."""

    @pytest.fixture
    def trl(self, real: Running) -> Any:
        """TRL's client, which looks for the server and its model by itself."""
        client = pytest.importorskip("trl.generation.vllm_client")
        return client.VLLMClient(base_url=real.url)

    def test_it_generates(self, real: Running, trl: Any, base: Weights) -> None:
        make_live(real.client, base)
        prompts = [LONG_PROMPT, [5, 6, 7]]
        out = trl.generate(prompts, n=3, max_tokens=20, temperature=0.7, logprobs=0)
        assert out["prompt_ids"] == prompts
        assert len(out["completion_ids"]) == 6
        for index, ids in enumerate(out["completion_ids"]):
            logprobs = np.array(out["logprobs"][index], np.float32)[:, 0]
            assert out["logprob_token_ids"][index] == [[token] for token in ids]
            assert_agree(logprobs, base.logprobs(prompts[index // 3], ids, 0.7))

    def test_it_scores_sequences(self, real: Running, trl: Any, base: Weights) -> None:
        make_live(real.client, base)
        completion = base.greedy(LONG_PROMPT, 12)
        scored = trl.get_sequence_logprobs(
            [LONG_PROMPT + completion], [len(LONG_PROMPT)], top_logprobs=100
        )
        assert np.shape(scored["logprobs"]) == (1, 12, 100)
        actual = np.array(scored["actual_logprobs"][0], np.float32)[:, 0]
        assert_agree(actual, base.logprobs(LONG_PROMPT, completion))
        assert all(len(set(ids)) == 100 for ids in scored["logprob_token_ids"][0])

    def test_it_chats(self, trl: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        messages = [{"role": "user", "content": "12+7=?"}]
        out = trl.chat([messages], n=2, max_tokens=8)
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert out["prompt_ids"] == [rendered]
        assert len(out["completion_ids"]) == 2

    def test_what_it_looks_up(self, trl: Any) -> None:
        assert trl.get_world_size() == 1
        assert trl.get_server_info()["weight_transfer_config"] is not None
        trl.reset_prefix_cache()

    def test_its_trainer_trains(
        self, real: Running, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trl = pytest.importorskip("trl")
        from datasets import Dataset
        from trl.generation.vllm_client import VLLMClient

        def connect(self: Any, device: Any) -> None:  # noqa: ARG001 - TRL's signature
            assert self.get_server_info()["weight_transfer_config"] is not None
            folder = {"init_info": {"folder": str(tmp_path)}}
            self._post(f"{self.base_url}/init_weight_transfer_engine", json=folder)

        def send(self: Any, metadata: Any, named_params: Any) -> None:
            self._start_weight_update()
            tensors = {name: value.contiguous().cpu() for name, value in named_params}
            safetensors.torch.save_file(tensors, tmp_path / "trl.safetensors")
            info = {"file": "trl.safetensors", "names": [name for name, _, _ in metadata]}
            self._post(f"{self.base_url}/update_weights", json={"update_info": info})
            self._finish_weight_update()

        monkeypatch.setattr(VLLMClient, "init_communicator", connect)
        monkeypatch.setattr(VLLMClient, "update_named_params", send)
        rewarded: list[list[int]] = []

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            rewarded.extend(completion_ids)
            return [float(ids[0] % 7) for ids in completion_ids]

        version = real.client.info().version
        config = trl.GRPOConfig(
            output_dir=str(tmp_path / "out"), use_vllm=True, vllm_mode="server",
            vllm_server_base_url=real.url, max_steps=3, num_generations=4,
            per_device_train_batch_size=8, max_completion_length=12, learning_rate=1e-4,
            use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["12+7=", "3+4="] * 8}),
        )
        trainer.train()
        info = real.client.info()
        assert info.version >= version + 3
        assert len(rewarded) == 3 * 8
        history = httpx.get(f"{real.url}/policies/default").json()["history"]
        assert {publish["state"] for publish in history[:2]} <= {"live", "superseded"}
        # What TRL measures between its own log-probabilities and the server's.
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == config.max_steps
        name = "sampling/sampling_logp_difference/mean"
        assert all(entry[name] < BF16_MEAN_NATS for entry in logged)
