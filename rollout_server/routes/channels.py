"""``/policies/default/channel``: ways into the workers' memory, for weights that skip HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from ipaddress import ip_address
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from rollout_server.attempts import PublishOptions
from rollout_server.auth import Caller, caller_with, publish_scope
from rollout_server.http import answer, read_model, read_query, while_connected, whole_number
from rollout_server.routes import documents
from rollout_server.routes.state import channels_of, startup_of
from shared.channel_requests import ChannelQuery, ChannelRequest, ReloadFromChannel
from shared.errors import Forbidden
from shared.protocol import DEFAULT_POLICY, FENCE_HEADER, ReloadResult

router = APIRouter(prefix=f"/policies/{DEFAULT_POLICY}/channel")

_MAX_BODY_BYTES = 16 << 20

Writer = Annotated[Caller, Depends(caller_with(publish_scope(DEFAULT_POLICY)))]


@router.post(
    "",
    summary="Open a way into the workers' memory",
    openapi_extra={
        **documents.body(ChannelRequest),
        "parameters": [documents.FENCE],
    },
)
async def open_channel(request: Request, caller: Writer) -> Response:
    """Ends the caller's earlier channel. Nothing is published yet."""
    asked = await read_model(request, ChannelRequest, _MAX_BODY_BYTES)
    if asked.kind == "ipc" and not _is_local(request):
        raise Forbidden("ipc is for processes of this server's host; nccl reaches further")
    fence = whole_number(FENCE_HEADER, request.headers.get(FENCE_HEADER))
    specs = [tensor.spec() for tensor in asked.tensors]
    interface = (request.scope.get("server") or ("127.0.0.1",))[0]
    opened = await channels_of(request).open(caller, fence, asked.kind, specs, interface=interface)
    return answer(request, asdict(opened))


@router.get(
    "/{id}",
    summary="Whether a channel's buffer may be written",
    openapi_extra={"parameters": documents.query(ChannelQuery)},
)
async def look(request: Request, id: str, caller: Writer) -> Response:
    """Waits for that, if asked to. 409 with the reason once the channel has ended."""
    query, channels = read_query(request, ChannelQuery), channels_of(request)
    await while_connected(request, channels.writable(channels.find(id, caller), query.wait_seconds))
    found, policy = channels.find(id, caller), startup_of(request).service.policies.default
    document = {"id": id, "kind": found.links.kind, "state": found.state}
    return answer(request, {**document, "durable_version": policy.durable_version})


@router.delete("/{id}", summary="Give a channel's memory back")
async def close(request: Request, id: str, caller: Writer) -> Response:
    """A transfer in flight is given up; what is being loaded becomes live, and keeps its copy."""
    channels = channels_of(request)
    channels.give_up(channels.find(id, caller))
    return answer(request, {"closed": id})


async def publish(
    request: Request, caller: Caller, asked: ReloadFromChannel, options: PublishOptions
) -> ReloadResult:
    """``POST /reload`` with the name of a channel."""
    channels, publisher = channels_of(request), startup_of(request).service.publisher
    channel = channels.find(asked.channel, caller)
    if channel.joining is not None and not channel.joining.done():
        await while_connected(request, asyncio.wait({channel.joining}))
        channel = channels.find(asked.channel, caller)  # it may have ended, with a reason

    async def receive() -> None:
        if channel.links.kind == "ipc":
            return  # it is there already
        try:
            # A trainer that dies in the middle breaks the connection; nothing else would tell.
            await while_connected(request, channel.links.receive(channels.seconds))
        except BaseException as error:
            channels.end(channel, f"a transfer broke off: {error or type(error).__name__}")
            raise

    commit = options.commit
    options = replace(options, commit=lambda: channel.loading(commit()))
    with channels.used(channel):
        return await publisher.by_channel.publish(
            channel, receive, seconds=channels.seconds, durable=asked.durable, options=options
        )


def _is_local(request: Request) -> bool:
    """Whether the caller runs on this host; a Unix socket has no addresses."""
    client, server = request.client, request.scope.get("server")
    if client is None or server is None:
        return True
    try:
        return ip_address(client.host).is_loopback or client.host == server[0]
    except ValueError:  # a name, which only a test's transport gives
        return False
