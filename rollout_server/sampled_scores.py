"""Inside vLLM's worker: the log-probability of each sampled token, and no more than that.

For one log-probability a token, vLLM reads the logits of the whole vocabulary three times: for the
largest, for the sum of exponentials, and for the rank of the token, which nobody asked for. Here
one pass does for batches of rollouts, whose ranks are never read. Requests of vLLM's own routes
keep their ranks, and so does every batch in which there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

UNRANKED = "tito_unranked"
"""In a request's ``extra_args``: the ranks of its tokens are not read."""


class Unranked(int):
    """How many log-probabilities beside that of the sampled token: none, and no rank either."""


def score_sampled_tokens() -> None:
    """Make the sampler of vLLM's second model runner score batches of rollouts in one pass."""
    import vllm
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON or vllm.__version__.split("+")[0] != "0.32.0":
        return
    from vllm.v1.worker.gpu.sample import sampler

    mend_sampler(sampler)


def mend_sampler(module: Any) -> None:
    """Replace what a sampler's module scores with, for batches in which nobody reads ranks."""
    kind = module.Sampler
    plain_init, plain_add = kind.__init__, kind.add_request
    plain_dims, plain_scores = kind.get_logprobs_dims, module.compute_topk_scores

    def init(
        self: Any, vllm_config: Any, max_num_reqs: int, vocab_size: int, device: Any,
        *args: Any, **options: Any,
    ) -> None:  # fmt: skip
        plain_init(self, vllm_config, max_num_reqs, vocab_size, device, *args, **options)
        self.tito_unranked = np.zeros(max_num_reqs, dtype=bool)
        _compile(vocab_size, vllm_config.model_config.dtype, device)

    def add_request(self: Any, req_idx: int, sampling_params: Any) -> None:
        plain_add(self, req_idx, sampling_params)
        self.tito_unranked[req_idx] = UNRANKED in (sampling_params.extra_args or ())

    def get_logprobs_dims(
        self: Any, idx_mapping_np: Any, include_token_ids: bool = True
    ) -> tuple[int, int] | None:
        dims: tuple[int, int] | None = plain_dims(self, idx_mapping_np, include_token_ids)
        ranked = self.sampling_states.num_logprobs[idx_mapping_np] >= 0
        ranked &= ~self.tito_unranked[idx_mapping_np]
        return (Unranked(), 0) if dims == (0, 0) and not ranked.any() else dims

    kind.__init__, kind.add_request = init, add_request
    kind.get_logprobs_dims = get_logprobs_dims
    module.compute_topk_scores = _scores_in_one_pass(plain_scores)


def _compile(vocab_size: int, dtype: Any, device: Any) -> None:
    """Compile before the first request; logits are float32 where a temperature was applied."""
    import torch

    from rollout_server.score_kernels import token_scores

    token = torch.zeros(1, dtype=torch.int64, device=device)
    for kind in {dtype, torch.float32}:
        token_scores(torch.zeros(1, vocab_size, dtype=kind, device=device), token)


def _scores_in_one_pass(plain: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.outputs import LogprobsTensors

    from rollout_server.score_kernels import token_scores

    def compute_topk_scores(
        logits: Any, num_logprobs: int, sampled: Any, cu_num_logits: Any = None, **options: Any
    ) -> Any:
        unranked = isinstance(num_logprobs, Unranked) and not options.get("logits_mode")
        if not unranked or cu_num_logits is not None:
            return plain(logits, int(num_logprobs), sampled, cu_num_logits, **options)
        return LogprobsTensors(
            logprob_token_ids=sampled.unsqueeze(-1),
            logprobs=token_scores(logits, sampled).unsqueeze(-1),
            selected_token_ranks=sampled.new_zeros(sampled.shape[0]),
        )

    return compute_topk_scores
