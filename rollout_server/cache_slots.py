"""Inside the engine's process: where the next token's keys and values go.

Mostly into a block that the request has. It needs a new one at every sixteenth token or so, and
only then has a full one to be shared. vLLM looks for both at every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def has_one_plain_cache(scheduler: Any) -> bool:
    """The model has one kind of cache, which keeps every token of a request until its end."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    coordinator = scheduler.kv_cache_manager.coordinator
    kinds = coordinator.single_type_managers
    return (
        len(kinds) == 1
        and type(kinds[0]) is FullAttentionManager
        and kinds[0].block_size == scheduler.hash_block_size
        and coordinator.num_reprefillable_tokens == 0
        and scheduler.num_lookahead_tokens == 0
    )


class QuickSlots:
    """vLLM's cache manager, asked only at the borders of blocks.

    Attributes:
        block_size: tokens in a block.
    """

    def __init__(self, scheduler: Any) -> None:
        self._manager = scheduler.kv_cache_manager
        self._allocate = self._manager.allocate_slots
        self._context: int = scheduler.max_model_len
        (kind,) = self._manager.coordinator.single_type_managers
        self._blocks, self._partial_hits = kind.req_to_blocks, kind._partial_hit_reqs
        self.block_size: int = kind.block_size
        # Also for steps that vLLM schedules itself.
        self._manager.allocate_slots = self.allocate

    def allocate(self, request: Any, new: int, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's ``allocate_slots``; None if there is no room."""
        if new == 1 and not args and not kwargs.get("new_computed_blocks") and self._fits(request):
            return self._manager.empty_kv_cache_blocks
        return self._allocate(request, new, *args, **kwargs)

    def _fits(self, request: Any) -> bool:
        """One more token goes into a block that there is, and leaves no full one to be shared."""
        total: int = request.num_computed_tokens + 1
        room: int = len(self._blocks.get(request.request_id, ())) * self.block_size
        leaves_full: bool = min(total, len(request._all_token_ids)) % self.block_size == 0
        inside = total <= min(room, self._context)
        return inside and not leaves_full and not self._partial_hits

    def suffice(self, going: Sequence[Any]) -> bool:
        """There is a block for each request that needs one for its next token."""
        needed: int = sum(
            request.num_computed_tokens >= len(self._blocks[request.request_id]) * self.block_size
            for request in going
        )
        free: int = self._manager.block_pool.get_num_free_blocks()
        return needed <= free

    def take(self, request: Any) -> tuple[list[int], ...] | None:
        """Ids of the blocks that a request gets for its next token, by kind; None if none."""
        if self._fits(request):
            return None
        taken = self._allocate(request, 1)
        assert taken is not None, "blocks were counted before"
        ids: tuple[list[int], ...] | None = taken.get_block_ids(allow_none=True)
        return ids

    def computed(self, request: Any, tokens: int) -> None:
        """So many tokens of a request are in the cache: full blocks may be shared from now on."""
        if tokens % self.block_size == 0:
            self._manager.cache_blocks(request, tokens)
