"""vLLM's OpenAI-compatible routes, behind the same tokens and limits as ``/rollout``.

Each path below is passed on to vLLM's own handler; no other path of vLLM's is reachable. Answers
carry the version and digest of the policy that was live when the request began, and of the one
that was live in the end if another has come meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from rollout_server.auth import ROLLOUT, Caller, caller_with
from rollout_server.http import error_answer, read_body, while_connected
from rollout_server.policies import Policy
from rollout_server.quotas import Cost
from rollout_server.routes.state import openai_of, startup_of
from rollout_server.service import Service
from rollout_server.vllm_serving import RESTART_RETRY_S, OpenAIServing, offering, openai_error
from shared.errors import Forbidden, InvalidRequest, MalformedBody, Problem, TitoError
from shared.protocol import DIGEST_HEADER

log = logging.getLogger("tito.openai")

VERSION_HEADER = "x-tito-version"
END_VERSION_HEADER = "x-tito-end-version"
END_DIGEST_HEADER = "x-tito-end-digest"

COMPLETIONS = "/v1/completions"

_COMPLETION_TOKENS = 16
"""New tokens when a completion names no number."""
_PICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_DONE = b"data: [DONE]"
_SCOPE_KEYS = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class _OpenAIRoute(APIRoute):
    """A route whose errors have OpenAI's shape, those of its dependencies too."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except TitoError as error:
                return _error(request, error)

        return handler


router = APIRouter(route_class=_OpenAIRoute)


@dataclass(frozen=True, slots=True)
class Asked:
    """What must be known of a request before vLLM reads it.

    Attributes:
        model: the policy or model that it names.
        samples: how many completions it wants.
        tokens: that these may take at most, each with its prompt.
    """

    model: str | None = None
    samples: int = 1
    tokens: int = 0


@router.get("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 once the engine can generate; open, as in vLLM."""
    startup_of(request).service.check_ready()
    return Response()


@router.get("/v1/models", summary="The model and the LoRA policies, as vLLM lists models")
async def models(request: Request, caller: Annotated[Caller, Depends(caller_with())]) -> Response:
    """By name: the model, ``default`` (the same), and every LoRA policy."""
    return await _passed_on(request, caller)


async def _generation(
    request: Request, caller: Annotated[Caller, Depends(caller_with(ROLLOUT))]
) -> Response:
    return await _passed_on(request, caller)


for _path, _summary in {
    COMPLETIONS: "vLLM's OpenAI-compatible completions",
    "/v1/chat/completions": "vLLM's OpenAI-compatible chat completions",
    "/tokenize": "vLLM's tokenizer",
    "/detokenize": "vLLM's detokenizer",
    "/inference/v1/generate": "vLLM's generation from token ids to token ids",
}.items():
    router.add_api_route(
        _path, _generation, methods=["POST"], summary=_summary, include_in_schema=False
    )


async def _passed_on(request: Request, caller: Caller) -> Response:
    service = startup_of(request).service
    service.check_ready()
    body = await read_body(request, service.settings.max_body_bytes)
    asked = await asyncio.to_thread(_look, body, request.url.path, service) if body else Asked()
    return _Forwarded(openai_of(request), service, caller, body, asked)


class _Forwarded(Response):
    """The answer of vLLM's handler, labelled, with what it needs held while it is made."""

    def __init__(
        self, vllm: OpenAIServing, service: Service, caller: Caller, body: bytes, asked: Asked
    ) -> None:
        super().__init__()
        self._vllm = vllm
        self._service = service
        self._caller = caller
        self._asked = asked
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        asked, admission = self._asked, self._service.admission
        # One group, since vLLM's handler starts all of a request's samples at once.
        groups = [Cost(asked.samples, asked.tokens)] if asked.samples else []
        try:
            with contextlib.ExitStack() as held:
                reservation = held.enter_context(admission.admit(self._caller, groups))
                for _ in groups:
                    held.enter_context(await while_connected(request, anext(reservation)))
                await self._answer(scope, receive, send)
        except TitoError as error:
            await _error(request, error)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Now that its turn has come, which may have taken longer than an engine lives.
        app = await self._vllm.app_for(self._service.supervisor.current())
        policies = self._service.policies
        policy = policies.get(self._asked.model or "") or policies.default
        adapters = {p.name: p.adapter for p in policies if p.adapter is not None}
        inner = {key: scope[key] for key in _SCOPE_KEYS if key in scope} | {"state": {}}
        label = _Label(policy, send)
        with self._service.adapters.using(policy.adapter), offering(adapters):
            try:
                await app(inner, self._replayed(receive), label.send)
            except Exception as error:
                if not label.ended:
                    raise
                log.error("vLLM's handler of %s failed", scope["path"], exc_info=error)

    def _replayed(self, receive: Receive) -> Receive:
        """The body that was read already; after it, whatever the connection says."""
        pending: list[Message] = [{"type": "http.request", "body": self._body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        return replay


class _Label:
    """Writes the policy's version into an answer as it passes.

    Attributes:
        ended: whether the answer is complete.
    """

    def __init__(self, policy: Policy, send: Send) -> None:
        self._policy = policy
        self._version = policy.version
        self._send = send
        self.ended = False

    async def send(self, message: Message) -> None:
        """Pass a message on, labelled."""
        if message["type"] == "http.response.start" and message["status"] < 400:
            label = {VERSION_HEADER: str(self._version), DIGEST_HEADER: self._digest} | self._end()
            headers = [(k.encode(), v.encode()) for k, v in label.items()]
            message = {**message, "headers": [*message["headers"], *headers]}
        elif message.get("body", b"").startswith(_DONE):
            # A stream's headers have long gone out; comments are no events to its reader.
            comments = "".join(f": {name}: {value}\n\n" for name, value in self._end().items())
            message = {**message, "body": comments.encode() + message["body"]}
        self.ended = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    @property
    def _digest(self) -> str:
        return self._policy.digests[self._version]

    def _end(self) -> dict[str, str]:
        policy = self._policy
        # The engine may have gone on with a version before this process was told.
        version = policy.version if policy.announced is None else policy.announced
        if version == self._version:
            return {}
        return {END_VERSION_HEADER: str(version), END_DIGEST_HEADER: policy.digests[version]}


def _look(body: bytes, path: str, service: Service) -> Asked:
    """What a request wants, as far as that can be told; vLLM finds what is wrong with the rest.

    Raises:
        MalformedBody: it is not JSON.
        Forbidden: it could bring code.
        InvalidRequest: it wants too many samples.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        return Asked()
    model = document.get("model")
    model = model if isinstance(model, str) else None
    if path in ("/tokenize", "/detokenize"):
        return Asked(model, 0, 0)
    if document.get("features") and os.environ.get(_PICKLES, "0") != "0":
        raise Forbidden(f"features may hold pickles, since the server's environment has {_PICKLES}")
    nested = document.get("sampling_params")
    sampling = nested if isinstance(nested, dict) else document
    n, context = _number(sampling.get("n"), 1), service.settings.max_model_len
    new = _number(
        sampling.get("max_tokens"), context if path != COMPLETIONS else _COMPLETION_TOKENS
    )
    new = _number(sampling.get("max_completion_tokens"), new)
    lengths = _prompt_lengths(document)
    most = service.settings.max_samples
    if (samples := n * len(lengths)) > most:
        got = f"{len(lengths)} prompts x {n} = {samples} samples"
        raise InvalidRequest(
            "the request cannot be run", problems=[Problem("n", got, f"{most} samples a request")]
        )
    return Asked(model, samples, n * sum(min(length + new, context) for length in lengths))


def _prompt_lengths(document: dict[str, Any]) -> list[int]:
    """Tokens of each prompt; of text, its characters, which are no fewer as a rule."""
    if "messages" in document:
        return [len(repr(document["messages"]))]
    prompt = document.get("prompt", document.get("token_ids"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [len(item) if isinstance(item, str | list) else 1 for item in prompt]
    return [len(prompt) if isinstance(prompt, str | list) else 1]


def _number(value: Any, default: int) -> int:
    """A count as vLLM would read it; what it would refuse counts as the default."""
    try:
        return default if value is None else max(int(value), 0)
    except (TypeError, ValueError, OverflowError):
        return default


def _error(request: Request, error: TitoError) -> Response:
    answer = error_answer(request, error)
    document = JSONResponse(openai_error(error), error.status)
    for name in ("www-authenticate", "retry-after"):
        if name in answer.headers:
            document.headers[name] = answer.headers[name]
    if error.status == 503:
        document.headers.setdefault("retry-after", str(RESTART_RETRY_S))
    return document
