"""What the tests of the server share: weights to publish, a reference model, an engine that fails.

The reference is transformers in float32 on the same weights, one sequence at a time, without
padding or caches: slow, obvious, and no relation of vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import safetensors.torch
import torch
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from uvicorn.config import LoopFactoryType

from rollout_server.connections import KEEP_ALIVE_S, Connection
from rollout_server.engine import Completion, Scored, VersionSpan
from shared.client import RolloutClient
from shared.protocol import MSGPACK
from shared.requests import SamplingSettings
from shared.tensor_hash import tensor_hash
from shared.weights import LazyTensor, TensorSpec, checkpoint_digest, stream_checkpoint

Tensors = dict[str, torch.Tensor]

SAFETENSORS_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BF16_MEAN_NATS, BF16_MAX_NATS = 0.05, 0.3
"""How far bfloat16 log-probabilities of the tiny policy may lie from float32 ones."""


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's little-endian bytes."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a checkpoint header says of the tensor."""
    return TensorSpec(name, SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape))


def lazy(tensors: Tensors) -> list[LazyTensor]:
    """Tensors in the form that the client publishes."""
    return [
        LazyTensor(spec_of(name, tensor), functools.partial(tensor_bytes, tensor))
        for name, tensor in tensors.items()
    ]


def upload_of(tensors: Tensors) -> bytes:
    """The whole body of a reload, digest trailer included."""
    return b"".join(bytes(piece) for piece in stream_checkpoint(lazy(tensors)))


def digest_of(tensors: Tensors) -> str:
    """Digest by the definition in ``shared.weights``."""
    return checkpoint_digest(
        (spec_of(name, tensor), tensor_hash(tensor_bytes(tensor)))
        for name, tensor in tensors.items()
    )


@dataclass(frozen=True, eq=False)
class Weights:
    """A complete set of weights for the tiny policy, and what they should compute."""

    model_dir: Path
    tensors: Tensors

    @functools.cached_property
    def digest(self) -> str:
        return digest_of(self.tensors)

    @functools.cached_property
    def model(self) -> Any:
        """The model in float32, on exactly these values."""
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        wide = {name: tensor.float() for name, tensor in self.tensors.items()}
        missing, unknown = model.load_state_dict(wide, strict=False)
        assert not unknown
        assert set(missing) <= {HEAD}
        return model.eval()

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Log-probability of each completion token, in float32."""
        ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1] / temperature
        chosen = ids[0, len(prompt) :, None]
        scored = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
        return np.asarray(scored.numpy(), np.float32)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], length: int) -> list[int]:
        """The likeliest continuation, without a cache."""
        ids = [int(token) for token in prompt]
        for _ in range(length):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    @torch.no_grad()
    def margin(self, prompt: Sequence[int], completion: Sequence[int]) -> float:
        """By how much the likeliest token leads along a greedy completion, at its closest."""
        ids = torch.tensor([[*map(int, prompt), *map(int, completion)]])
        best = self.model(ids).logits[0, len(prompt) - 1 : -1].topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def distance(logprobs: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Mean absolute difference in nats."""
    return float(np.abs(logprobs - expected).mean())


def assert_agree(logprobs: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """The two differ by no more than bfloat16 does."""
    assert logprobs.shape == expected.shape
    off = np.abs(logprobs - expected)
    assert off.max() < BF16_MAX_NATS, f"token {off.argmax()} is off by {off.max()} nats"
    assert off.mean() < BF16_MEAN_NATS, f"tokens are off by {off.mean()} nats on average"


def base_weights(model_dir: Path) -> Weights:
    """The weights that the server was started with."""
    return Weights(model_dir, safetensors.torch.load_file(model_dir / "model.safetensors"))


def sharpened(base: Weights, seed: int) -> Weights:
    """Other weights: a random policy with strong opinions, so that two of them surely disagree."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in base.tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        centre = 1.0 if "norm" in name else 0.0
        tensors[name] = (centre + _spread(name) * noise).to(tensor.dtype)
    return Weights(base.model_dir, tensors)


def _spread(name: str) -> float:
    if "norm" in name:
        return 0.05
    # Layers must outweigh the embedding, or the policy only repeats its last token.
    strong = name == EMBEDDING or "o_proj" in name or "down_proj" in name
    return 0.2 if strong else 0.08


def make_live(client: RolloutClient, weights: Weights) -> int:
    """Publish the weights unless they are live already; the version that they have."""
    info = client.info()
    if info.digest == weights.digest:
        return info.version
    return client.reload(lazy(weights.tensors)).version


def counter(url: str, name: str) -> float:
    """Sum over all labels of one Prometheus counter."""
    text = httpx.get(f"{url}/metrics").text
    lines = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, lines))


def samples_run(url: str) -> float:
    """How many samples the server has returned so far."""
    return counter(url, "tito_samples_total")


def post(
    url: str,
    body: Any = None,
    *,
    raw: Any = None,
    path: str = "/rollout",
    accept: str = "application/json",
    content_type: str = MSGPACK,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
) -> httpx.Response:
    """One request on a connection of its own, with any body at all."""
    content = msgpack.packb(body) if raw is None else raw
    all_headers = {"content-type": content_type, "accept": accept, **(headers or {})}
    return httpx.post(f"{url}{path}", content=content, headers=all_headers, timeout=timeout)


@dataclass
class FakeEngine:
    """Samples the token after the last one, and does as it is told about failures.

    Attributes:
        load_errors: raised by the next loads, first come first served; None lets one succeed.
        resume_errors: the same for resumes.
        calls: names of everything that was called, in order.
        loaded: digest of each checkpoint that was loaded.
        gate: generation waits for it.
        load_gate: loads wait for it.
        poison: a prompt that starts with this id fails.
    """

    vocab_size: int = 288
    failure: str | None = None
    load_errors: list[Exception | None] = field(default_factory=list)
    resume_errors: list[Exception | None] = field(default_factory=list)
    pause_errors: list[Exception | None] = field(default_factory=list)
    generate_error: Exception | None = None
    poison: int | None = None
    calls: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    paused: bool = False
    held: bool = False
    version: int = -1
    gate: threading.Event = field(default_factory=threading.Event)
    load_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.load_gate.set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        n: int,
        *_: Any,
    ) -> list[Completion]:
        self.running += 1
        try:
            if self.poison is not None and prompt_ids[0] == self.poison:
                await asyncio.sleep(0.05)
                raise self.generate_error or RuntimeError("poisoned")
            await _until(lambda: self.gate.is_set() and not self.paused)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        ids = [(prompt_ids[-1] + 1) % self.vocab_size] * min(sampling.max_tokens, 3)
        spans = (VersionSpan(self.version, 0, len(ids)),)
        return [Completion(ids, [-1.0] * len(ids), "length", spans)] * n

    async def score(self, ids: Sequence[int], *_: Any) -> Scored:
        await _until(lambda: self.gate.is_set() and not self.paused)
        version = None if self.version < 0 else self.version
        return Scored([-float(token) for token in ids[1:]], version)

    async def pause(self, *_: Any) -> None:
        self.calls.append("pause")
        _raise_next(self.pause_errors)
        self.paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        _raise_next(self.resume_errors)
        self.paused = self.held

    async def load(self, paths: Sequence[Path]) -> None:
        self.calls.append("load")
        await _until(self.load_gate.is_set)
        assert self.paused, "loaded while running"
        tensors: Tensors = {}
        for path in paths:
            tensors |= safetensors.torch.load_file(path)
        self.loaded.append(digest_of(tensors))
        _raise_next(self.load_errors)

    async def add_adapter(self, adapter: Any) -> None:
        self.calls.append(f"add {adapter.name}")

    async def remove_adapter(self, adapter: Any) -> None:
        self.calls.append(f"remove {adapter.name}")

    async def stamp(self, version: int) -> None:
        assert self.paused, "stamped while running"
        self.calls.append(f"stamp {version}")
        self.version = version

    def shutdown(self) -> None:
        self.calls.append("shutdown")


async def _until(holds: Callable[[], bool]) -> None:
    # Tests open the gates from other threads, so there is no asyncio event to wait for.
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def _raise_next(errors: list[Exception | None]) -> None:
    if errors and (error := errors.pop(0)) is not None:
        raise error


@contextlib.contextmanager
def serving(
    app: FastAPI, *, keep_alive: int = KEEP_ALIVE_S, loop: LoopFactoryType = "auto"
) -> Iterator[str]:
    """The application on a real socket, served from a thread; yields its URL."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="error",
        access_log=False,
        http=Connection,
        ws="none",
        timeout_keep_alive=keep_alive,
        loop=loop,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


def eventually(holds: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
