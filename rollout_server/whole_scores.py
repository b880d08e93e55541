"""In the server's process: log-probabilities of many tokens at once, as they come from the engine.

vLLM's front end takes them token by token, since its engine sends them so. Samples that leave the
engine whole bring hundreds each, and a thousand samples that end together would keep the server
busy for seconds.
"""

from __future__ import annotations

from typing import Any


def take_scores_whole() -> None:
    """Teach vLLM's front end to take one log-probability for each of many tokens in one go."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    plain = LogprobsProcessor._update_sample_logprobs
    if plain.__module__ == __name__:
        return

    def update(self: Any, sampled: Any) -> None:
        is_single = sampled.logprobs.shape[1] == 1
        if is_single and self.tokenizer is None and isinstance(self.logprobs, FlatLogprobs):
            self.cumulative_logprob += _extend(self.logprobs, sampled)
        else:
            plain(self, sampled)

    LogprobsProcessor._update_sample_logprobs = update


def _extend(flat: Any, sampled: Any) -> float:
    """Append as ``FlatLogprobs`` would, one position for each token; returns the sum."""
    logprobs: list[float] = sampled.logprobs[:, 0].tolist()
    first, last = len(flat.logprobs), len(flat.logprobs) + len(logprobs)
    flat.start_indices += range(first, last)
    flat.end_indices += range(first + 1, last + 1)
    flat.token_ids += sampled.logprob_token_ids[:, 0].tolist()
    flat.logprobs += logprobs
    flat.ranks += sampled.sampled_token_ranks.tolist()
    flat.decoded_tokens += [None] * len(logprobs)
    return sum(logprobs)
