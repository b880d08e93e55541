"""What arrives of a streamed rollout, and what is asked for when its connection is lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared import calls
from shared.calls import PromptLike
from shared.codec import group_from_wire
from shared.errors import MalformedBody, ServerUnreachable, from_wire
from shared.frames import FrameReader, end_from_wire
from shared.protocol import Group, StreamEnd, Totals


class Incoming:
    """What has arrived of one streamed rollout.

    Args:
        prompts: of the rollout.
        settings: fields of the request.
        key: names it, so that it can be asked for again; None if it will not be.

    Attributes:
        totals: of the groups that have arrived, on all connections.
        end: what the server said in the end, with these totals; None before that.
    """

    def __init__(
        self, prompts: Sequence[PromptLike], settings: Mapping[str, Any], key: str | None
    ) -> None:
        self._request = calls.rollout_document(prompts, settings)
        self._had = frozenset(self._request.get("have", ()))
        self._received: set[int] = set()
        self._connection = _Connection()
        self.key = key
        self.totals = Totals()
        self.end: StreamEnd | None = None

    def has_ended(self) -> bool:
        """Whether everything has arrived."""
        return self.end is not None

    def request(self) -> calls.StreamRequest:
        """The request for what is lacking, on a new connection."""
        self._connection = _Connection()
        return calls.rollout_stream(self._request, self._had | self._received, self.key)

    def feed(self, data: bytes) -> Iterator[Group]:
        """The groups that are complete with these bytes.

        Raises:
            TitoError: the server's own, from an error frame.
            MalformedBody: the stream is not as PROTOCOL.md has it.
        """
        for document in self._connection.reader.feed(data):
            match document["frame"]:
                case "group":
                    yield self._add(_group(document))
                case "end":
                    self._finish(end_from_wire(document))
                case "error":
                    raise from_wire(document, status=document.get("status", 500))
                # Frames of other kinds carry nothing that this client knows of.

    def check_ended(self) -> None:
        """The connection ended; was that the end?

        Raises:
            ServerUnreachable: it was not.
        """
        if not self.has_ended():
            raise ServerUnreachable(
                f"the stream broke off after {self.totals.groups} groups, before its closing frame"
            )

    def _add(self, group: Group) -> Group:
        if self.has_ended() or group.group_id in self._had | self._received:
            raise MalformedBody(f"group {group.group_id} came twice, or after the end")
        self._received.add(group.group_id)
        self._connection.totals = self._connection.totals.with_group(group)
        self.totals = self.totals.with_group(group)
        return group

    def _finish(self, end: StreamEnd) -> None:
        came = self._connection.totals
        if end.totals != came:
            raise MalformedBody(f"the stream brought {came}, and ends with {end.totals}")
        lost = set(range(len(self._request["prompts"]))).difference(
            self._had, self._received, end.missing
        )
        if lost:
            raise MalformedBody(f"the stream ended without groups {sorted(lost)[:20]}")
        self.end = replace(end, totals=self.totals)


class _Connection:
    """What belongs to one connection of a stream."""

    def __init__(self) -> None:
        self.reader = FrameReader()
        self.totals = Totals()


def _group(document: dict[str, Any]) -> Group:
    try:
        return group_from_wire(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedBody(f"not a group: {error!r}") from error


def new_key(retries: int) -> str | None:
    """A name for a rollout that may be asked for again."""
    return uuid.uuid4().hex if retries else None
