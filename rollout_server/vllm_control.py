"""What vLLM's RL routes ask of an engine, beyond what rollouts and publishes do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollout_server.engine import Engine
from rollout_server.vllm_engine import PAUSE_MODES, VLLMEngine
from shared.errors import Conflict
from shared.protocol import PauseMode

UpdateInfo = dict[str, Any] | list[dict[str, Any]]


@runtime_checkable
class Control(Protocol):
    """Every method may raise EngineDied, or EngineFailure with what the workers said."""

    @property
    def hands_memory_back(self) -> bool:
        """Whether sleep frees any."""
        ...

    def world_size(self, *, include_dp: bool) -> int:
        """How many workers there are."""
        ...

    async def describe(self, *, as_json: bool) -> Any:
        """vLLM's resolved configuration."""
        ...

    async def reset_prefix_cache(self, *, running: bool, external: bool) -> bool:
        """Forget cached keys and values; False while some are in use."""
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and hand memory back: caches, and weights to the host (1) or to nobody (2)."""
        ...

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take memory again; generation goes on once all of it is there. Whether it is."""
        ...

    async def init_transfer(self, info: dict[str, Any]) -> None:
        """Connect the workers with a trainer."""
        ...

    async def begin_receiving(self, path: Path, header_bytes: int, max_bytes: int) -> None:
        """Write what arrives from now on to a safetensors file; the live weights stay."""
        ...

    async def receive(self, info: UpdateInfo) -> None:
        """Receive some tensors, as vLLM's ``update_weights`` would."""
        ...

    async def end_receiving(self) -> None:
        """Complete the file."""
        ...

    async def abandon_receiving(self) -> None:
        """Forget what has arrived."""
        ...


def max_sleep_level(engine: Engine) -> int:
    """The deepest sleep at which an engine hands memory back; 0 if at none."""
    try:
        return 2 if control_of(engine).hands_memory_back else 0
    except Conflict:
        return 0


def control_of(engine: Engine) -> Control:
    """The controls of an engine.

    Raises:
        Conflict: it has none.
    """
    if isinstance(engine, VLLMEngine):
        return VLLMControl(engine)
    if isinstance(engine, Control):
        return engine
    raise Conflict("this engine has none of vLLM's controls")


class VLLMControl:
    """The controls of vLLM's AsyncLLM."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._llm = engine.llm

    @property
    def hands_memory_back(self) -> bool:
        return bool(self._llm.model_config.enable_sleep_mode)

    def world_size(self, *, include_dp: bool) -> int:
        parallel = self._llm.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if include_dp else parallel.world_size)

    async def describe(self, *, as_json: bool) -> Any:
        return await asyncio.to_thread(_described, self._llm.vllm_config, as_json)

    async def reset_prefix_cache(self, *, running: bool, external: bool) -> bool:
        call = self._llm.reset_prefix_cache(running, external)
        return bool(await self._engine.while_alive(call))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self._engine.while_alive(self._llm.sleep(level, PAUSE_MODES[mode]))

    async def wake_up(self, tags: Sequence[str]) -> bool:
        return bool(await self._engine.while_alive(self._llm.wake_up(list(tags))))

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self._engine.call_workers("init_weight_transfer_engine", init_info=info)

    async def begin_receiving(self, path: Path, header_bytes: int, max_bytes: int) -> None:
        await self._engine.call_workers(
            "tito_receive_begin", path=str(path), header_bytes=header_bytes, max_bytes=max_bytes
        )

    async def receive(self, info: UpdateInfo) -> None:
        await self._engine.call_workers("tito_receive", update_info=info)

    async def end_receiving(self) -> None:
        await self._engine.call_workers("tito_receive_end")

    async def abandon_receiving(self) -> None:
        await self._engine.call_workers("tito_receive_abandon")


def _described(config: Any, as_json: bool) -> Any:
    from vllm.entrypoints.serve.dev.server_info.api_router import PydanticVllmConfig

    if not as_json:
        return str(config)
    return PydanticVllmConfig.dump_python(config, mode="json", fallback=str)
