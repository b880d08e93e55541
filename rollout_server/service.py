"""Everything that a running server consists of, and how it comes up."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_server.checkpoints import (
    SERVED_DTYPES,
    Checkpoint,
    Manifest,
    checkpoint_files,
    digest_of,
)
from rollout_server.engine import Engine
from rollout_server.metrics import Metrics
from rollout_server.policies import Policy
from rollout_server.prompts import PromptEncoder
from rollout_server.publishing import Publisher
from rollout_server.rollouts import RolloutService
from rollout_server.settings import ServerSettings
from shared.errors import EngineUnavailable
from shared.protocol import (
    MAX_GROUP_SIZE,
    MAX_PROMPTS,
    PROTOCOL_VERSION,
    SamplingSettings,
    ServerInfo,
)
from shared.weights import TensorSpec

log = logging.getLogger("tito.server")

DEFAULT_POLICY = "default"
UNKNOWN_DIGEST = "0" * 32
"""Digest of weights that never were a checkpoint (``load_format="dummy"``)."""
_STARTING_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that requests are served by, once the engine is up."""

    settings: ServerSettings
    engine: Engine
    encoder: PromptEncoder
    policy: Policy
    publisher: Publisher
    rollouts: RolloutService
    scratch: tempfile.TemporaryDirectory[str]

    def check_ready(self) -> None:
        """Raise EngineUnavailable, with the reason, unless samples can be generated."""
        if reason := self.publisher.closed or self.engine.failure:
            raise EngineUnavailable(reason)

    def info(self) -> ServerInfo:
        """What ``/info`` answers."""
        settings = self.settings
        return ServerInfo(
            protocol=PROTOCOL_VERSION,
            model=settings.model,
            tokenizer=self.encoder.fingerprint,
            vocab_size=self.engine.vocab_size,
            dtype=settings.dtype,
            policy=self.policy.name,
            version=self.policy.version,
            digest=self.policy.digest,
            limits={
                "max_model_len": settings.max_model_len,
                "max_prompts": MAX_PROMPTS,
                "max_group_size": MAX_GROUP_SIZE,
                "max_samples": settings.max_samples,
                "max_body_bytes": settings.max_body_bytes,
                "max_upload_bytes": settings.max_upload_bytes,
            },
        )

    def close(self) -> None:
        """Stop the engine and remove what was staged."""
        self.engine.shutdown()
        self.scratch.cleanup()


class Startup:
    """The service while it may not be there yet.

    Args:
        settings: of the server.
        build_engine: constructs the engine; called in a thread, since it takes a while.
        metrics: told when the service is ready.
    """

    def __init__(
        self,
        settings: ServerSettings,
        build_engine: Callable[[ServerSettings], Engine],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._build_engine = build_engine
        self._metrics = metrics
        self._service: Service | None = None

    async def run(self) -> None:
        """Bring the service up; it counts as ready once the engine has generated a token."""
        service = await asyncio.to_thread(self._build)
        await service.engine.pause()
        await service.engine.stamp(service.policy.version)
        await service.engine.resume()
        await service.engine.generate([0], SamplingSettings(max_tokens=1), 1)
        self._service = service
        self._metrics.observe_version(service.policy.name, service.policy.version)
        log.info("ready: %s, digest %s", self._settings.model, service.policy.digest)

    @property
    def service(self) -> Service:
        """The running service.

        Raises:
            EngineUnavailable: it is not up yet.
        """
        if self._service is None:
            raise EngineUnavailable("the engine is starting", retry_after=_STARTING_RETRY_S)
        return self._service

    def close(self) -> None:
        """Stop the service if it came up."""
        if self._service is not None:
            self._service.close()

    def _build(self) -> Service:
        settings = self._settings
        engine = self._build_engine(settings)
        folder, config, tokenizer = _model_parts(settings.model)
        encoder = PromptEncoder(
            tokenizer, vocab_size=engine.vocab_size, max_model_len=settings.max_model_len
        )
        manifest, policy = _base_policy(folder, config, settings)
        settings.staging_dir.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=settings.staging_dir)
        publisher = Publisher(
            engine,
            policy,
            manifest,
            staging_dir=Path(scratch.name),
            allowed_dirs=settings.reload_dirs,
            max_bytes=settings.max_upload_bytes,
        )
        rollouts = RolloutService(
            engine,
            encoder,
            policy,
            model=settings.model,
            max_model_len=settings.max_model_len,
            max_samples=settings.max_samples,
        )
        return Service(settings, engine, encoder, policy, publisher, rollouts, scratch)


def _model_parts(model: str) -> tuple[Path, Any, Any]:
    """Folder, config and tokenizer of a model that the engine has loaded, so they are local."""
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, local_files_only=True))
    return folder, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def _base_policy(folder: Path, config: Any, settings: ServerSettings) -> tuple[Manifest, Policy]:
    """Manifest of the model, and version 0 of its policy."""
    dtype = SERVED_DTYPES[settings.dtype]
    tied = bool(config.get_text_config().tie_word_embeddings)
    files = checkpoint_files(folder) if settings.load_format == "auto" else []
    if not files:
        manifest = Manifest.of_checkpoint(_specs_of_config(config), dtype=dtype, tied=tied)
        return manifest, Policy(DEFAULT_POLICY, 0, (), {0: UNKNOWN_DIGEST})
    with Checkpoint(files) as checkpoint:
        manifest = Manifest.of_checkpoint(checkpoint.specs.values(), dtype=dtype, tied=tied)
        digest = digest_of(checkpoint, manifest)
    return manifest, Policy(DEFAULT_POLICY, 0, tuple(files), {0: digest})


def _specs_of_config(config: Any) -> list[TensorSpec]:
    """Tensors of a model that has no checkpoint, from its architecture."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return [TensorSpec(n, "F32", tuple(p.shape)) for n, p in model.named_parameters()]
