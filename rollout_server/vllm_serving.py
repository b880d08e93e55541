"""vLLM's own OpenAI-compatible handlers over the engine that runs here.

What answers is vLLM's code: its request models, its serving classes, its routers, put together for
an ``AsyncLLM`` that is already there. Only the handlers are taken. Who may call them, how much, and
under which policy is decided before a request comes here (``routes/openai.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from rollout_server.engine import Adapter, Engine
from rollout_server.vllm_engine import VLLMEngine
from shared.errors import EngineUnavailable, NotFound
from shared.protocol import DEFAULT_POLICY

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

RESTART_RETRY_S = 10
_KEEP_ALIVE_S = 15.0

_ADAPTERS: ContextVar[Mapping[str, Adapter]] = ContextVar("adapters")
"""LoRA policies that the request in this context may name, each at one version."""


@contextmanager
def offering(adapters: Mapping[str, Adapter]) -> Iterator[None]:
    """Let vLLM find these adapters, and no others, by the names of their policies."""
    token = _ADAPTERS.set(adapters)
    try:
        yield
    finally:
        _ADAPTERS.reset(token)


class OpenAIServing:
    """The handlers for whichever engine runs; another engine gets others.

    Args:
        model: name under which the default policy is offered, beside ``default``.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = asyncio.Lock()
        self._engine: Engine | None = None
        self._app: ASGIApp | None = None

    async def app_for(self, engine: Engine) -> ASGIApp:
        """An ASGI application that answers vLLM's paths from this engine.

        Raises:
            NotFound: the engine is not vLLM.
        """
        async with self._lock:
            if self._app is None or self._engine is not engine:
                if not isinstance(engine, VLLMEngine):
                    raise NotFound("this engine has no OpenAI-compatible routes")
                # Imports and chat templates take a while.
                self._app = await asyncio.to_thread(_openai_app, engine.llm, self._model)
                self._engine = engine
            return self._app


def _openai_app(llm: AsyncLLM, model: str) -> FastAPI:
    from vllm.entrypoints.openai.chat_completion import api_router as chat
    from vllm.entrypoints.openai.completion import api_router as completion
    from vllm.entrypoints.openai.models import api_router as models
    from vllm.entrypoints.scale_out.token_in_token_out import api_router as tokens
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.entrypoints.serve.tokenize import api_router as tokenize
    from vllm.v1.engine.exceptions import EngineDeadError

    app = FastAPI(openapi_url=None)
    for module in (models, completion, chat, tokenize, tokens):
        app.include_router(module.router)
    init_exception_handler(app)
    # vLLM's handler would stop the server; here another engine comes up.
    app.exception_handler(EngineDeadError)(_engine_died)
    _fill(app.state, llm, model)
    return app


def _fill(state: Any, llm: AsyncLLM, model: str) -> None:
    """What vLLM's routers look for, each with the defaults of ``vllm serve``."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
    from vllm.renderers.online_renderer import OnlineRenderer

    template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
    quiet: dict[str, Any] = {"request_logger": None}
    renderer = OnlineRenderer(llm.model_config, llm.renderer, **template, **quiet)
    models = _models(llm, model)
    shared: dict[str, Any] = {"online_renderer": renderer, **quiet}
    state.engine_client = llm
    state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=_KEEP_ALIVE_S)
    state.openai_serving_models = models
    state.openai_serving_completion = OpenAIServingCompletion(llm, models, **shared)
    state.openai_serving_chat = OpenAIServingChat(llm, models, "assistant", **template, **shared)
    state.serving_tokenization = ServingTokenization(models, renderer, **template, **quiet)
    state.serving_tokens = ServingTokens(llm, models, **shared)


def _models(llm: AsyncLLM, model: str) -> Any:
    """vLLM's registry of models, with our policies in place of adapters loaded through HTTP."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
    from vllm.lora.request import LoRARequest

    class Policies(OpenAIServingModels):  # type: ignore[misc, unused-ignore]
        @property
        def lora_requests(self) -> dict[str, LoRARequest]:
            return {
                name: LoRARequest(adapter.name, adapter.serial, str(adapter.folder))
                for name, adapter in _ADAPTERS.get({}).items()
            }

        @lora_requests.setter
        def lora_requests(self, none: dict[str, LoRARequest]) -> None:
            """The base class begins with none."""

        def model_name(self, lora_request: LoRARequest | None = None) -> str:
            if lora_request is None:
                return model
            # An adapter is named POLICY@VERSION.SERIAL in the engine.
            return str(lora_request.lora_name).partition("@")[0]

        async def show_available_models(self) -> ModelList:
            listed = await self.registry.show_available_models()
            listed.data += [
                ModelCard(id=name, root=adapter.name, parent=model, permission=[ModelPermission()])
                for name, adapter in _ADAPTERS.get({}).items()
            ]
            return listed

    names = [BaseModelPath(name=name, model_path=model) for name in (model, DEFAULT_POLICY)]
    return Policies(llm, names)


async def _engine_died(_: Request, __: Exception) -> Response:
    error = EngineUnavailable(
        "the engine died under this request and is being replaced", retry_after=RESTART_RETRY_S
    )
    headers = {"retry-after": str(RESTART_RETRY_S)}
    return JSONResponse(openai_error(error), error.status, headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def openai_error(error: Any) -> dict[str, Any]:
    """An error of ours in OpenAI's shape: what ours has, and the fields that its clients read."""
    document: dict[str, Any] = error.to_wire()
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    where = error.problems[0].where if error.problems else None
    document["error"] |= {"message": str(error), "type": kind, "param": where}
    return document
