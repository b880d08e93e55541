"""From a request's seed to those of its groups."""

from __future__ import annotations

import xxhash

from shared.requests import SamplingSettings


def seeded(sampling: SamplingSettings, group_id: int) -> SamplingSettings:
    """The settings with a seed for one group, if the request has one.

    The engine counts up from it for the samples of the group. It is hashed, so that groups of
    neighbouring seeds do not meet; two bits are left free for counting.
    """
    if sampling.seed is None:
        return sampling
    mixed = xxhash.xxh3_64_intdigest(b"%d" % (sampling.seed + group_id)) >> 2
    return sampling.model_copy(update={"seed": mixed})
