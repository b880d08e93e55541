"""The least that the bytes of a publish could cost, for ``bench_publish.py``."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from shared.exchange import PIECES
from shared.uploads import Uploads
from shared.weights import stream_checkpoint, stream_length
from tests.bench.checkpoints import Tensors, lazy
from tests.bench.servers import started

_CHUNK = 4 << 20


def memory_copy(weights: Tensors, into: np.ndarray[Any, Any]) -> None:
    """Every byte once, into memory that is there already."""
    offset = 0
    for tensor in weights.values():
        data = np.frombuffer(_content(tensor), np.uint8)
        np.copyto(into[offset : offset + data.size], data)
        offset += data.size


def socket_copy(weights: Tensors, into: memoryview) -> None:
    """Every byte through one loopback connection, into memory that is there already."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=_receive, args=(listener, into))
        receiver.start()
        with socket.create_connection(listener.getsockname()) as connection:
            for tensor in weights.values():
                connection.sendall(_content(tensor))
        receiver.join()


def _receive(listener: socket.socket, into: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        while into:
            count = connection.recv_into(into, min(len(into), _CHUNK))
            if not count:
                raise ConnectionError("the sender ended early")
            into = into[count:]


def _content(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, not copied."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def bare_uvicorn(log: Path) -> Iterator[httpx.Client]:
    """A web server that throws away what it is sent, in a process of its own."""
    command = [sys.executable, "-m", "uvicorn", "tests.bench.discard:app", "--lifespan", "off"]
    with (
        started([*command, "--log-level", "warning"], log) as server,
        httpx.Client(
            base_url=server.url, transport=Uploads(httpx.HTTPTransport()), timeout=600
        ) as client,
    ):
        server.wait_ready("/")
        client.post("/", content=b"").raise_for_status()
        yield client


def http_copy(weights: Tensors, client: httpx.Client) -> None:
    """Every byte as our client sends it, to a web server that has no use for it."""
    tensors = lazy(weights)
    headers = {"content-length": str(stream_length(tensors))}
    pieces: Any = stream_checkpoint(tensors)
    extensions = {PIECES: pieces}
    client.post("/", content=pieces, headers=headers, extensions=extensions).raise_for_status()
