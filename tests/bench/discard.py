"""The least that an upload to any uvicorn server costs: an application that throws the body away.

python -m uvicorn tests.bench.discard:app --lifespan off
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Answer 204 once the whole body has come."""
    assert scope["type"] == "http", "run it with --lifespan off"
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})
