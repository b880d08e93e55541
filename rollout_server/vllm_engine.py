"""vLLM's AsyncLLM as the engine, embedded in this process.

Outside this module, only what vLLM loads into its own processes and what hands its own routes on
(``vllm_serving.py``, ``vllm_control.py``) import vllm.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_server.engine import Adapter, Completion, EngineDied, Scored, VersionSpan
from rollout_server.heap import freeze_heap
from rollout_server.sampled_scores import UNRANKED
from rollout_server.settings import ServerSettings
from rollout_server.start_failure import reason_told
from rollout_server.switching import SWITCH
from rollout_server.whole_scores import take_scores_whole
from rollout_server.worker_plugin import PARENT_VARIABLE, QUICK_VARIABLE
from shared import tracing
from shared.errors import EngineFailure
from shared.protocol import FinishReason, PauseMode
from shared.requests import SamplingSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


log = logging.getLogger("tito.engine")

_DEATH_POLL_S = 0.1
_DEATH_POLLS = 20
_GRAPHS_BY_DEFAULT = 512
PAUSE_MODES = {PauseMode.KEEP: "keep", PauseMode.DRAIN: "wait", PauseMode.ABORT: "abort"}

T = TypeVar("T")


class VLLMEngine:
    """vLLM's AsyncLLM, embedded. Construction loads the model and takes tens of seconds."""

    worker_extension = "rollout_server.worker_plugin.WeightLoader"

    def __init__(self, settings: ServerSettings) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self.held = False
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        os.environ[QUICK_VARIABLE] = str(int(settings.quick_steps))
        # On GPUs vLLM would fork, and a forked process does not load plugins again: it would go on
        # without a server, and without what else the worker plugin does for it.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        take_scores_whole()
        with reason_told(settings):
            self._llm: AsyncLLM = AsyncLLM.from_engine_args(
                _engine_args(settings, self.worker_extension)
            )
        self._ids = itertools.count()
        freeze_heap()

    @property
    def llm(self) -> AsyncLLM:
        """For handlers that are vLLM's own."""
        return self._llm

    @property
    def vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    @property
    def failure(self) -> str | None:
        return str(self._llm.dead_error) if self._llm.errored else None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        n: int,
        adapter: Adapter | None = None,
    ) -> list[Completion]:
        # vLLM refuses several greedy samples of one prompt, which would be equal anyway.
        different = n if sampling.temperature > 0 else 1
        output = await self._output(prompt_ids, _params(sampling, different), adapter)
        return [_completion(completion) for completion in output.outputs] * (n // different)

    async def score(self, ids: Sequence[int], adapter: Adapter | None = None) -> Scored:
        output = await self._output(ids, _scoring_params(), adapter)
        # The weights of the one token that is sampled: a load in between starts the prompt anew.
        versions = output.outputs[0].weight_versions or ()
        version = int(versions[-1].version) if versions else None
        return Scored(output.prompt_logprobs.logprobs, version)

    async def _output(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: Adapter | None
    ) -> Any:
        """The whole answer to one prompt."""
        from vllm import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = TokensPrompt(prompt_token_ids=list(prompt_ids))
        request_id = f"group-{next(self._ids)}"
        lora = _lora_request(adapter) if adapter else None
        try:
            outputs = self._llm.generate(
                prompt,
                params,
                request_id,
                lora_request=lora,
                trace_headers=tracing.headers() or None,
            )
            async for output in outputs:
                return output
        except EngineDeadError as error:
            raise EngineDied(str(error)) from error
        except EngineGenerateError as error:
            raise EngineFailure(f"the engine failed on a prompt: {error.__cause__}") from error
        raise EngineFailure("the engine ended a request without an answer")

    async def pause(self, mode: PauseMode) -> None:
        # What pause_generation does, but for its 20 ms of sleep at the end, so that outputs come
        # before it returns: they may come later, each says by which weights it was made.
        await self._forget_inputs()
        # Without clear_cache, keys and values of the old weights would serve the new ones.
        pause = self._llm.engine_core.pause_scheduler_async(
            mode=PAUSE_MODES[mode], clear_cache=True
        )
        await self.while_alive(pause)

    async def _forget_inputs(self) -> None:
        """Empty a cache of processed images, if there is one: a pause empties its counterpart."""
        if self._llm.model_config.is_multimodal_model:
            await self._llm.renderer.clear_mm_cache_async()

    async def resume(self) -> None:
        if self.held:
            return
        await self.while_alive(self._llm.resume_generation())

    async def switch(self, mode: PauseMode, buffer: str, version: int) -> dict[str, float]:
        await self._forget_inputs()
        call = self._llm.engine_core.call_utility_async(
            SWITCH, PAUSE_MODES[mode], buffer, version, not self.held
        )
        return dict(await self.while_alive(call))

    async def load(self, paths: Sequence[Path]) -> None:
        names = [str(path) for path in paths]
        reports = await self.call_workers("tito_load_weights", paths=names)
        for rank, report in enumerate(reports):
            if unchecked := report["parameters"] - report["checked"]:
                log.warning("worker %d: %d parameters could not be checked", rank, unchecked)

    async def stamp(self, version: int) -> None:
        await self.while_alive(self._llm.update_weight_version(str(version)))

    async def add_adapter(self, adapter: Adapter) -> None:
        if not await self.while_alive(self._llm.add_lora(_lora_request(adapter))):
            raise EngineFailure(f"the engine would not take adapter {adapter.name}")

    async def remove_adapter(self, adapter: Adapter) -> None:
        await self.while_alive(self._llm.remove_lora(adapter.serial))

    def shutdown(self) -> None:
        self._llm.shutdown()

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker by its name.

        Raises:
            EngineFailure: one of them raised.
        """
        call = self._llm.collective_rpc(method, kwargs=arguments)
        return list(await self.while_alive(call))

    async def while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call to the engine's processes, which never answer if they die meanwhile."""
        task = asyncio.create_task(call)
        try:
            while not (await asyncio.wait({task}, timeout=_DEATH_POLL_S))[0]:
                if self._llm.errored:
                    break
            else:
                return task.result()
        except Exception as error:
            if not await self._dies():
                raise EngineFailure(f"the engine's workers refused: {error}") from error
        finally:
            task.cancel()
        raise EngineDied(str(self.failure))

    async def _dies(self) -> bool:
        """Whether a call failed because the engine is dying; calls fail before that shows."""
        for _ in range(_DEATH_POLLS):
            if self._llm.errored:
                return True
            await asyncio.sleep(_DEATH_POLL_S)
        return False


def _engine_args(settings: ServerSettings, worker_extension: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    most = 1 if settings.deterministic else settings.max_num_seqs
    eager = on_cpu if settings.eager is None else settings.eager
    if on_cpu and eager:
        # The sampler has compiled functions all the same, for which a C++ compiler would be needed.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    kv_cache_gib = settings.kv_cache_gib or (1.0 if on_cpu else None)
    return AsyncEngineArgs(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        load_format=settings.load_format,
        gpu_memory_utilization=settings.memory_share,
        kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * (1 << 30)),
        # Sums over a batch are rounded by its shape, and its shape is a matter of timing.
        max_num_seqs=most,
        enable_prefix_caching=False if settings.deterministic else None,
        tensor_parallel_size=settings.tensor_parallel,
        enforce_eager=eager,
        attention_backend=None if settings.attention == "auto" else settings.attention,
        compilation_config=_graphs(most),
        enable_sleep_mode=settings.sleep_mode and not on_cpu,
        weight_transfer_config=_weight_transfer(settings),
        max_logprobs=settings.max_logprobs,
        enable_lora=settings.max_loras > 0,
        max_loras=max(settings.max_loras, 1),
        max_cpu_loras=max(settings.max_loras, 1) * 2,
        max_lora_rank=settings.max_lora_rank,
        seed=settings.seed,
        # Law 3: what is returned is the log-probability under the distribution sampled from.
        logprobs_mode="processed_logprobs",
        worker_extension_cls=worker_extension,
        # Its spans are made of them.
        disable_log_stats=tracing.endpoint() is None,
        otlp_traces_endpoint=tracing.endpoint(),
    )


def _graphs(most_sequences: int) -> dict[str, Any]:
    """Graphs for batches of every size: without being told, vLLM captures none above 512."""
    if most_sequences <= _GRAPHS_BY_DEFAULT:
        return {}
    return {"max_cudagraph_capture_size": most_sequences}


def _weight_transfer(settings: ServerSettings) -> Any:
    from vllm.config import WeightTransferConfig

    backend = settings.weight_transfer
    return None if backend is None else WeightTransferConfig(backend=backend)


def _lora_request(adapter: Adapter) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.serial, str(adapter.folder))


def _params(sampling: SamplingSettings, n: int) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=0,
        flat_logprobs=True,
        # Text is decoded once, by us; the engine needs it only to look for stop strings.
        detokenize=bool(sampling.stop),
        # A special token may be what stops.
        skip_special_tokens=not sampling.stop,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={UNRANKED: True},
    )


def _scoring_params() -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: CompletionOutput) -> Completion:
    from vllm.logprobs import FlatLogprobs

    # With logprobs=0 vLLM gives the sampled token alone, so the flat list is one per token.
    assert isinstance(output.logprobs, FlatLogprobs)
    assert len(output.logprobs.logprobs) == len(output.token_ids)
    reason: FinishReason = {"stop": "stop", "length": "length"}.get(  # type: ignore[assignment]
        output.finish_reason or "", "abort"
    )
    spans = tuple(
        VersionSpan(int(span.version), span.start, span.end)
        for span in output.weight_versions or ()
    )
    return Completion(output.token_ids, output.logprobs.logprobs, reason, spans)
