"""Streamed rollouts as the client sees them: groups as they finish, on one connection or more.

    with client.rollout_stream(prompts, group_size=8, retries=5) as stream:
        for group in stream:
            train_on(group)
    print(stream.end.totals)

Leaving the stream before its end closes the connection, which cancels the rest of the work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Self

from shared import calls
from shared.errors import ServerUnreachable, TitoError
from shared.exchange import Exchange, Patience
from shared.incoming import Incoming
from shared.protocol import Group, StreamEnd, Totals

if TYPE_CHECKING:
    import httpx

CANCEL_S = 5.0


class Stream:
    """What both twins show."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    @property
    def totals(self) -> Totals:
        """Of the groups so far."""
        return self._incoming.totals

    @property
    def end(self) -> StreamEnd | None:
        """What the server said in the end; None until the last group has come.

        It has model, tokenizer, policy, sampling settings, totals of all groups, and the
        ``missing`` ones, if a deadline cut the rollout short.
        """
        return self._incoming.end


class RolloutStream(Stream):
    """An iterator of groups, each whole, in the order in which they finish."""

    def __init__(
        self, http: httpx.Client, exchange: Exchange, incoming: Incoming, retries: int
    ) -> None:
        super().__init__(incoming)
        self._groups = _groups(http, exchange, incoming, Patience(True, retries))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Group:
        return next(self._groups)

    def close(self) -> None:
        """Close the connection; unfinished work is cancelled."""
        self._groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Functions, not methods: a stream that is dropped half-read must not wait for the cycle collector.
def _groups(
    http: httpx.Client, exchange: Exchange, incoming: Incoming, patience: Patience
) -> Generator[Group]:
    try:
        while not incoming.has_ended():
            try:
                with _connected(http, exchange, incoming) as chunks:
                    for chunk in chunks:
                        for group in incoming.feed(chunk):
                            patience.renew()
                            yield group
                incoming.check_ended()
            except TitoError as error:
                # A line that is cut behind the closing frame has brought everything.
                if not incoming.has_ended() or not isinstance(error, ServerUnreachable):
                    time.sleep(patience.pause(error))
    except (GeneratorExit, KeyboardInterrupt):
        if incoming.key is not None:  # its work would go on for a while
            call = calls.cancel_rollout(incoming.key)
            with contextlib.suppress(ServerUnreachable), exchange.reaching():
                http.request(call.method, call.path, headers=call.headers, timeout=CANCEL_S)
        raise


@contextlib.contextmanager
def _connected(
    http: httpx.Client, exchange: Exchange, incoming: Incoming
) -> Iterator[Iterator[bytes]]:
    """The chunks of a stream; its connection is closed if they are not all read."""
    with exchange.reaching(), http.stream(**incoming.request()) as response:
        if not exchange.is_stream(response):
            response.read()
            exchange.refuse(response)
        yield response.iter_bytes()
