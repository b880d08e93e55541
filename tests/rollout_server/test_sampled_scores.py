"""Log-probabilities of sampled tokens: the kernel's numbers, and for whom it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from rollout_server.sampled_scores import UNRANKED, Unranked, mend_sampler
from tests.triton_interpreter import run_interpreted

INTERPRETED = """
import torch
from rollout_server.score_kernels import BLOCK, token_scores
torch.manual_seed(0)
for rows, size, dtype in [(3, 5, torch.float32), (2, BLOCK, torch.float32), (0, 9, torch.float32),
                          (4, 3 * BLOCK + 17, torch.bfloat16), (2, 151_936, torch.bfloat16)]:
    padded = (torch.randn(rows, size + 7) * 9).to(dtype)
    logits = padded[:, :size]  # rows of a longer one, as of a vocabulary that was padded
    tokens = torch.randint(size, (rows,))
    logits[:, ::3] = float("-inf")
    logits[torch.arange(rows), tokens] = 1.5
    logits[1:, size // 2] = 300.0
    got = token_scores(logits, tokens)
    wanted = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert got.dtype == torch.float32 and got.shape == (rows,)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
"""


def test_the_kernel_agrees_with_a_softmax() -> None:
    run_interpreted("-c", INTERPRETED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu_agrees_with_vllm() -> None:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    from rollout_server.score_kernels import token_scores

    logits = (torch.randn(300, 151_936, device="cuda") * 5).to(torch.bfloat16)
    tokens = torch.randint(151_936, (300,), device="cuda")
    theirs = compute_token_logprobs(logits, tokens[:, None])[:, 0]
    torch.testing.assert_close(token_scores(logits, tokens), theirs, rtol=1e-6, atol=2e-6)


PLACES = 6


class StagedSampler:
    """What of vLLM's sampler does not need a GPU: the numbers asked for, by place in the batch."""

    def __init__(self, config: Any, places: int, vocab: int, device: Any) -> None:
        del config, vocab, device
        self.sampling_states = SimpleNamespace(num_logprobs=np.full(places, -1, np.int32))

    def add_request(self, place: int, params: SamplingParams) -> None:
        wanted = params.logprobs
        self.sampling_states.num_logprobs[place] = -1 if wanted is None else wanted

    def get_logprobs_dims(self, places: Any, _: bool = True) -> tuple[int, int] | None:
        most = int(self.sampling_states.num_logprobs[places].max())
        return None if most < 0 else (most, 0)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("rollout_server.sampled_scores._compile", lambda *_: None)
    kind = type("Sampler", (StagedSampler,), {})
    mend_sampler(SimpleNamespace(Sampler=kind, compute_topk_scores=None))
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    return kind(config, PLACES, 10, "cpu")


def dims(sampler: Any, *places: int) -> Any:
    return sampler.get_logprobs_dims(np.array(places))


def test_only_batches_of_rollouts_go_without_ranks(sampler: Any) -> None:
    ours = SamplingParams(logprobs=0, extra_args={UNRANKED: True})
    for place, params in enumerate(
        [ours, ours, SamplingParams(logprobs=0), SamplingParams(), SamplingParams(logprobs=2)]
    ):
        sampler.add_request(place, params)
    assert isinstance(dims(sampler, 0, 1)[0], Unranked)
    assert isinstance(dims(sampler, 1, 3)[0], Unranked), "who wants nothing wants no ranks"
    assert type(dims(sampler, 0, 2)[0]) is int
    assert dims(sampler, 0, 4) == (2, 0)
    assert dims(sampler, 3) is None
    sampler.add_request(0, SamplingParams(logprobs=0))  # another request in the same place
    assert type(dims(sampler, 0, 1)[0]) is int


def test_what_the_mended_sampler_counts_on_is_there() -> None:
    """vLLM's sampler has the parts that are replaced, by the names and in the order used."""
    import inspect

    from vllm.v1.worker.gpu.sample import sampler

    parts = sampler.Sampler.__init__, sampler.Sampler.get_logprobs_dims, sampler.compute_topk_scores
    first = [list(inspect.signature(part).parameters) for part in parts]
    assert first[0][1:5] == ["vllm_config", "max_num_reqs", "vocab_size", "device"]
    assert first[1] == ["self", "idx_mapping_np", "include_token_ids"]
    assert first[2][:4] == ["logits", "num_logprobs", "sampled_token_ids", "cu_num_logits"]
    assert "compute_topk_scores(" in inspect.getsource(sampler.Sampler.__call__)
