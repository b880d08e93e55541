"""Streamed answers: each group as soon as it is finished, and a sign of life while none is.

What a slow reader has not taken yet stays in its job; nothing is encoded ahead of it, and nobody
else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from rollout_server.http import ClientGone, while_connected
from rollout_server.job import Job
from shared.errors import TitoError
from shared.frames import encode_frame, end_frame, error_frame, group_frame, keepalive_frame
from shared.protocol import Group, StreamEnd, Totals

_BATCH_TOKENS = 1 << 18
"""Groups are encoded together, in one thread, up to about this many tokens."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one connection gets a job's groups.

    Attributes:
        media_type: of the stream.
        packed: arrays as bytes.
        have: group ids that the caller has already.
        keepalive_s: after how many seconds without a frame an empty one is sent.
    """

    media_type: str
    packed: bool
    have: frozenset[int]
    keepalive_s: float


async def frames(job: Job, delivery: Delivery) -> AsyncGenerator[bytes, None]:
    """The bytes of a job's stream, in pieces of one or more frames."""
    try:
        totals = Totals()
        taken = 0
        while True:
            news = job.news
            batch = _batch(job.groups, taken)
            taken += len(batch)
            lacked = [group for group in batch if group.group_id not in delivery.have]
            if lacked:
                yield await asyncio.to_thread(_encode_groups, lacked, delivery)
                for group in lacked:
                    totals = totals.with_group(group)
            elif job.ended and not batch:
                yield encode_frame(_last(job, totals), delivery.media_type)
                return
            elif not batch and not await _happens(news, delivery.keepalive_s):
                yield encode_frame(keepalive_frame(), delivery.media_type)
    except TitoError as error:  # the status is long sent, so the stream itself has to say it
        yield encode_frame(error_frame(error), delivery.media_type)


def _batch(groups: Sequence[Group], start: int) -> list[Group]:
    """The next finished groups, at least one if there is one, up to about a batch of tokens."""
    batch: list[Group] = []
    tokens = 0
    while start + len(batch) < len(groups) and tokens < _BATCH_TOKENS:
        group = groups[start + len(batch)]
        tokens += sum(len(sample.completion_ids) for sample in group.samples)
        batch.append(group)
    return batch


def _encode_groups(groups: Iterable[Group], delivery: Delivery) -> bytes:
    documents = (group_frame(group, packed=delivery.packed) for group in groups)
    return b"".join(encode_frame(document, delivery.media_type) for document in documents)


def _last(job: Job, totals: Totals) -> dict[str, object]:
    """The closing frame of a job that has ended, one way or the other."""
    if job.failure is not None:
        return error_frame(job.failure)
    heading = job.heading
    assert heading is not None
    return end_frame(
        StreamEnd(
            model=heading.model,
            tokenizer=heading.tokenizer,
            policy=heading.policy,
            sampling=heading.sampling,
            totals=totals,
            missing=job.missing,
        )
    )


async def _happens(news: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()
    return news.is_set()


class StreamAnswer(Response):
    """Sends pieces as they come, until they end or the caller hangs up; then lets go.

    Args:
        pieces: of the body.
        leave: closed in the end, however that comes.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], leave: contextlib.ExitStack, media_type: str
    ) -> None:
        self._pieces = pieces
        self._leave = leave
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        # Proxies that would collect the whole answer first are asked not to.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._leave, contextlib.suppress(ClientGone):
            await while_connected(Request(scope, receive), self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async with contextlib.aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
