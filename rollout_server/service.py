"""Everything that a running server consists of, and how it comes up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollout_server.adapters import AdapterPublisher
from rollout_server.admission import Admission
from rollout_server.checkpoints import (
    SERVED_DTYPES,
    Checkpoint,
    Manifest,
    Verified,
    checkpoint_files,
    content_digest,
    digest_of,
)
from rollout_server.engine import Engine
from rollout_server.jobs import Jobs, Retention
from rollout_server.metrics import Metrics
from rollout_server.parted_uploads import MAX_PARTS, PartedUploads
from rollout_server.policies import Policies, Policy
from rollout_server.prompts import PromptEncoder
from rollout_server.publishing import Publisher
from rollout_server.recent import RecentGroups
from rollout_server.rollouts import RolloutService
from rollout_server.scores import ScoreService
from rollout_server.settings import ServerSettings
from rollout_server.spool import Spool, open_spool
from rollout_server.staging import UploadLimits, UploadSlots
from rollout_server.supervisor import Supervisor
from rollout_server.vllm_control import max_sleep_level
from shared.errors import EngineUnavailable, TitoError
from shared.protocol import (
    DEFAULT_POLICY,
    MAX_GROUP_SIZE,
    MAX_PROMPTS,
    PROTOCOL_VERSION,
    ServerInfo,
)
from shared.requests import SamplingSettings
from shared.weights import TensorSpec

log = logging.getLogger("tito.server")

UNKNOWN_DIGEST = "0" * 32
"""Digest of weights that never were a checkpoint (``load_format="dummy"``)."""
_STARTING_RETRY_S = 2.0
_COPY_S = 60.0
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that requests are served by, once the engine is up."""

    settings: ServerSettings
    supervisor: Supervisor
    encoder: PromptEncoder
    policies: Policies
    publisher: Publisher
    uploads: PartedUploads
    adapters: AdapterPublisher
    admission: Admission
    rollouts: RolloutService
    jobs: Jobs
    scores: ScoreService
    max_sleep_level: int

    def check_ready(self) -> None:
        """Raise EngineUnavailable, with the reason, unless samples can be generated."""
        self.supervisor.current()

    def info(self) -> ServerInfo:
        """What ``/info`` answers."""
        settings, policy = self.settings, self.policies.default
        return ServerInfo(
            protocol=PROTOCOL_VERSION,
            model=settings.model,
            tokenizer=self.encoder.fingerprint,
            vocab_size=self.supervisor.vocab_size,
            dtype=settings.dtype,
            policy=policy.name,
            version=policy.version,
            digest=policy.digest,
            limits={
                "max_model_len": settings.max_model_len,
                "max_prompts": MAX_PROMPTS,
                "max_group_size": MAX_GROUP_SIZE,
                "max_samples": settings.max_samples,
                "max_queued_samples": settings.max_queued_samples,
                "max_queued_tokens": settings.max_queued_tokens,
                "max_body_bytes": settings.max_body_bytes,
                "max_upload_bytes": settings.max_upload_bytes,
                "max_upload_parts": MAX_PARTS,
                "max_sleep_level": self.max_sleep_level,
            },
        )


class Startup:
    """The service while it may not be there yet.

    Args:
        settings: of the server.
        build_engine: constructs the engine; called in a thread, since it takes a while.
        metrics: told what the service does.
        recent: where groups are kept to be looked at, if they are.
    """

    def __init__(
        self,
        settings: ServerSettings,
        build_engine: Callable[[ServerSettings], Engine],
        metrics: Metrics,
        recent: RecentGroups | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._recent = recent
        self._supervisor = Supervisor(
            partial(build_engine, settings), recovery_seconds=settings.recovery_seconds
        )
        self._spool: Spool | None = None
        self._service: Service | None = None

    async def run(self) -> None:
        """Bring the service up; it counts as ready once the engine has generated a token."""
        settings = self._settings
        self._spool = open_spool(settings.spool_dir, settings.staging_dir, keep=settings.spool_keep)
        await self._supervisor.start()
        service = await asyncio.to_thread(self._assemble, self._spool)
        self._supervisor.restore = service.publisher.restore
        await service.publisher.restore(self._supervisor.current())
        await self._supervisor.generate([0], SamplingSettings(max_tokens=1), 1)
        self._service = service
        for policy in service.policies:
            self._metrics.observe_version(policy.name, policy.version)
            log.info("ready: %s at version %d, %s", policy.name, policy.version, policy.digest)

    @property
    def is_up(self) -> bool:
        """Whether the service came up."""
        return self._service is not None

    @property
    def service(self) -> Service:
        """The running service.

        Raises:
            EngineUnavailable: it is not up yet.
        """
        if self._service is None:
            raise EngineUnavailable("the engine is starting", retry_after=_STARTING_RETRY_S)
        return self._service

    async def close(self) -> None:
        """Stop the engine and let go of the spool."""
        if self._service is not None:
            self._service.jobs.close()
            await self._service.uploads.close()
            await self._service.publisher.turns.settled(_COPY_S)
        await self._supervisor.close()
        if self._spool is not None:
            self._spool.close()

    def _assemble(self, spool: Spool) -> Service:
        settings, supervisor = self._settings, self._supervisor
        folder, config, tokenizer = _model_parts(settings.model)
        manifest, base = _base(folder, config, settings)
        policies = Policies(_committed(spool, base))
        publisher, adapters = self._publishers(spool, policies, manifest, base)
        adapters.restore(policies.default.digest)
        encoder = PromptEncoder(
            tokenizer, vocab_size=supervisor.vocab_size, max_model_len=settings.max_model_len
        )
        admission = self._admission()
        rollouts = RolloutService(
            supervisor,
            encoder,
            adapters,
            admission,
            model=settings.model,
            max_model_len=settings.max_model_len,
            max_samples=settings.max_samples,
        )
        scores = ScoreService(supervisor, adapters, admission, max_model_len=settings.max_model_len)
        return Service(
            settings=settings,
            supervisor=supervisor,
            encoder=encoder,
            policies=policies,
            publisher=publisher,
            uploads=PartedUploads(publisher, min(settings.body_silence, _IDLE_S)),
            adapters=adapters,
            admission=admission,
            rollouts=rollouts,
            jobs=self._jobs(rollouts, policies),
            scores=scores,
            max_sleep_level=max_sleep_level(supervisor.current()) if settings.rl_routes else 0,
        )

    def _publishers(
        self, spool: Spool, policies: Policies, manifest: Manifest, base: Verified
    ) -> tuple[Publisher, AdapterPublisher]:
        """Of full weights and of adapters, which share their limits and load one at a time."""
        settings, ended = self._settings, self._metrics.observe_publish
        limits = UploadLimits(settings.reload_dirs, settings.max_upload_bytes, settings.max_uploads)
        slots, applying = UploadSlots(settings.max_uploads), asyncio.Lock()
        publisher = Publisher(
            self._supervisor,
            policies,
            manifest,
            spool,
            base=base,
            limits=limits,
            slots=slots,
            applying=applying,
            ended=ended,
        )
        adapters = AdapterPublisher(
            self._supervisor,
            policies,
            manifest,
            spool,
            max_rank=settings.max_lora_rank if settings.max_loras else 0,
            limits=limits,
            slots=slots,
            applying=applying,
            ended=ended,
        )
        return publisher, adapters

    def _admission(self) -> Admission:
        admission = Admission(self._settings.bounds, refused=self._metrics.observe_refusal)
        if self._recent is not None:
            self._recent.queued = lambda: admission.queued.samples
        return admission

    def _jobs(self, rollouts: RolloutService, policies: Policies) -> Jobs:
        settings, observe = self._settings, self._metrics.observe_group
        retention = Retention(
            settings.grace_seconds, settings.kept_seconds, settings.kept_mib << 20
        )
        return Jobs(rollouts, policies, retention=retention, observe=observe, recent=self._recent)


def _model_parts(model: str) -> tuple[Path, Any, Any]:
    """Folder, config and tokenizer of a model that the engine has loaded, so they are local."""
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(model)
    if not folder.is_dir():
        folder = Path(snapshot_download(model, local_files_only=True))
    return folder, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def _base(folder: Path, config: Any, settings: ServerSettings) -> tuple[Manifest, Verified]:
    """Manifest of the model, and the checkpoint that the engine starts from."""
    dtype = SERVED_DTYPES[settings.dtype]
    tied = bool(config.get_text_config().tie_word_embeddings)
    files = checkpoint_files(folder) if settings.load_format == "auto" else []
    if not files:
        manifest = Manifest.of_checkpoint(_specs_of_config(config), dtype=dtype, tied=tied)
        return manifest, Verified((), UNKNOWN_DIGEST)
    with Checkpoint(files) as checkpoint:
        manifest = Manifest.of_checkpoint(checkpoint.specs.values(), dtype=dtype, tied=tied)
        return manifest, Verified(tuple(files), digest_of(checkpoint, manifest))


def _committed(spool: Spool, base: Verified) -> Policy:
    """The full policy at the newest committed version that is intact, or at the base."""
    for record, folder in spool.versions(DEFAULT_POLICY, base.digest):
        files = checkpoint_files(folder)
        try:
            with Checkpoint(files) as checkpoint:
                digest = content_digest(checkpoint)
        except (TitoError, OSError) as error:
            digest = str(error)
        if digest == record.digest:
            return Policy(DEFAULT_POLICY, record.version, digest, tuple(files))
        log.error("%s is damaged and passed over: digest %s", folder, digest)
    return Policy(DEFAULT_POLICY, 0, base.digest, base.files)


def _specs_of_config(config: Any) -> list[TensorSpec]:
    """Tensors of a model that has no checkpoint, from its architecture."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return [TensorSpec(n, "F32", tuple(p.shape)) for n, p in model.named_parameters()]
