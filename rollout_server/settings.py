"""All settings of the server, in one typed object.

Each field can be given as a flag (``--max-model-len 2048``), an environment variable
(``TITO_MAX_MODEL_LEN=2048``) or a line of a TOML file named by ``--config``. Flags win over the
environment, the environment over the file, the file over the defaults.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from rollout_server.quotas import Bounds


def _default_staging_dir() -> Path:
    """Shared memory where there is some: staged weights are then read at memory speed."""
    shm = Path("/dev/shm")
    return (shm if shm.is_dir() else Path(tempfile.gettempdir())) / "tito-staging"


def _setting(default: Any, group: str, help: str, **constraints: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group}, **constraints)


class ServerSettings(BaseSettings):
    """See ``python -m rollout_server --help`` for the same, grouped."""

    model_config = SettingsConfigDict(
        env_prefix="TITO_", extra="forbid", frozen=True, allow_inf_nan=False
    )
    config_file: ClassVar[Path | None] = None

    model: str = _setting(..., "Model", "Hugging Face name, or path of a model directory.")
    dtype: Literal["bfloat16", "float16", "float32"] = _setting(
        "bfloat16", "Model", "Number format of weights and activations."
    )
    max_model_len: int = _setting(1024, "Model", "Context: prompt and completion tokens.", ge=2)
    load_format: Literal["auto", "dummy"] = _setting(
        "auto", "Model", "'dummy' starts with random weights, for measurements."
    )

    memory_share: float = _setting(
        0.3, "Engine", "Share of the GPU's memory that the engine may take.", gt=0.0, le=1.0
    )
    kv_cache_gib: float | None = _setting(
        None, "Engine", "KV cache size instead of what memory-share leaves; 1 on CPU.", gt=0.0
    )
    max_num_seqs: int = _setting(256, "Engine", "Sequences the engine runs at once.", ge=1)
    sleep_mode: bool = _setting(
        True, "Engine", "Let the GPU's memory be handed back while training (not on CPU)."
    )
    eager: bool | None = _setting(
        None, "Engine", "No compilation or CUDA graphs; on by default on CPU only."
    )
    attention: Literal["auto", "FLASH_ATTN", "TRITON_ATTN"] = _setting(
        "auto", "Engine", "vLLM's attention kernels; by itself vLLM chooses them."
    )
    quick_steps: bool = _setting(
        True, "Engine", "Book what a step of the engine did in fewer operations than vLLM does."
    )
    max_loras: int = _setting(
        0, "Engine", "LoRA adapters that may run in one batch; 0 takes none.", ge=0
    )
    max_lora_rank: int = _setting(16, "Engine", "Highest rank of a LoRA adapter.", ge=1)
    recovery_seconds: float = _setting(
        180.0, "Engine", "How long requests wait while a dead engine is replaced.", ge=0.0
    )
    tensor_parallel: int = _setting(1, "Engine", "GPUs that share one copy of the model.", ge=1)
    seed: int = _setting(0, "Engine", "Seed of the engine's sampler.")
    deterministic: bool = _setting(
        False,
        "Engine",
        "One sequence at a time, uncached: a seeded rollout has the same bits again.",
    )

    host: str = _setting("127.0.0.1", "Network", "Address to listen on; 0.0.0.0 for all.")
    port: int = _setting(8300, "Network", "Port to listen on.", ge=1, le=65535)
    allowed_hosts: list[str] = _setting(
        [],
        "Network",
        "Names that people call this server by, besides localhost and addresses (repeatable), "
        "such as host.docker.internal; without any, a server on loopback takes no other, and one "
        "on more than that every name.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "Network", "Least severe messages shown."
    )
    log_format: Literal["text", "json"] = _setting(
        "text", "Network", "Lines for people, or a JSON object on each line."
    )

    tokens_file: Path | None = _setting(
        None, "Access", "TOML file of bearer tokens; without one everybody may do everything."
    )
    require_lease: bool = _setting(
        False, "Access", "Take new weights only from whoever holds the policy's lease."
    )
    lease_max_ttl: float = _setting(
        600.0, "Access", "Seconds that a lease may live without a heartbeat, at most.", gt=0.0
    )

    openai_routes: bool = _setting(
        True, "vLLM's routes", "Serve vLLM's OpenAI-compatible routes: /v1/completions and others."
    )

    keepalive_seconds: float = _setting(
        15.0, "Streams", "Send an empty frame when nothing else was sent for so long.", gt=0.0
    )
    grace_seconds: float = _setting(
        60.0, "Streams", "Go on so long with a keyed rollout whose caller has gone.", ge=0.0
    )
    kept_seconds: float = _setting(
        600.0, "Streams", "Keep the groups of a finished keyed rollout so long.", ge=0.0
    )
    kept_mib: int = _setting(256, "Streams", "Keep no more of them than this.", ge=0)
    rl_routes: bool = _setting(
        True, "vLLM's routes", "Serve vLLM's own routes for trainers: /pause, /update_weights, ..."
    )
    weight_transfer: str | None = _setting(
        None, "vLLM's routes", "vLLM backend by which /update_weights receives; nccl on GPUs."
    )
    rl_silence: float = _setting(
        300.0, "vLLM's routes", "Seconds of silence that end a pause or an update.", gt=0.0
    )
    max_logprobs: int = _setting(
        128, "vLLM's routes", "Log-probabilities that a caller may ask for at each token.", ge=1
    )

    max_body_mib: int = _setting(64, "Limits", "Largest /rollout request body.", ge=1)
    max_upload_gib: float = _setting(64.0, "Limits", "Largest checkpoint accepted.", gt=0.0)
    max_uploads: int = _setting(4, "Limits", "Checkpoints uploaded at the same time.", ge=1)
    body_silence: float = _setting(
        300.0,
        "Limits",
        "Seconds of silence, or of less than 16 KiB/s, that end a request with an unfinished body.",
        gt=0.0,
    )
    shutdown_seconds: int = _setting(
        45, "Limits", "How long running requests may take to end when the server is told to.", ge=0
    )
    max_samples: int = _setting(65536, "Limits", "Samples that one request may ask for.", ge=1)
    max_queued_samples: int = _setting(
        131072, "Limits", "Samples of all callers that may wait for the engine.", ge=1
    )
    max_queued_tokens: int = _setting(
        1 << 28, "Limits", "Tokens that these may take, each sample with its prompt.", ge=1
    )
    max_running_samples: int | None = _setting(
        None,
        "Limits",
        "Samples handed to the engine at once; twice what it runs if not given.",
        ge=1,
    )

    staging_dir: Path = _setting(
        _default_staging_dir(), "Weights", "Scratch space for checkpoints, without --spool-dir."
    )
    spool_dir: Path | None = _setting(
        None, "Weights", "Keep committed versions here, so that they survive a restart."
    )
    spool_keep: int = _setting(2, "Weights", "Committed versions kept in the spool.", ge=1)
    channel_seconds: float = _setting(
        60.0,
        "Weights",
        "How long a transfer by ipc or nccl may take, and joining and verifying it.",
        gt=0.0,
    )
    reload_dirs: list[Path] = _setting(
        [], "Weights", "Directories from which /reload may read a path (repeatable)."
    )

    viewer: bool = _setting(
        True, "Viewer", "Serve the page where people look at samples, at /, and keep some for it."
    )
    viewer_groups: int = _setting(2048, "Viewer", "Groups kept to look at, at most.", ge=1)
    viewer_mib: int = _setting(64, "Viewer", "Memory that these may take.", ge=1)

    @field_validator("weight_transfer")
    @classmethod
    def _is_safe(cls, backend: str | None) -> str | None:
        if backend == "ipc":
            raise PydanticCustomError("ipc", "another backend: ipc sends pickles over HTTP")
        if backend in ("sparse_nccl", "nccl_m2n", "sharded_rdt"):
            raise PydanticCustomError("in_place", "nccl: this one writes into the live weights")
        return backend

    @field_validator("reload_dirs")
    @classmethod
    def _resolve(cls, paths: list[Path]) -> list[Path]:
        return [path.resolve() for path in paths]

    @property
    def bounds(self) -> Bounds:
        """On what all callers together may queue and run."""
        # A group keeps its places until its longest sample ends, so many of them are empty.
        running = self.max_running_samples or 2 * self.max_num_seqs
        return Bounds(self.max_queued_samples, self.max_queued_tokens, running)

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib << 20

    @property
    def max_upload_bytes(self) -> int:
        return int(self.max_upload_gib * (1 << 30))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the library's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, cls.config_file)
        return init_settings, env_settings, toml


def settings_from_args(argv: Sequence[str]) -> ServerSettings:
    """Settings from flags, environment and file.

    Raises:
        pydantic.ValidationError: a value is missing or not allowed.
        FileNotFoundError: the file named by ``--config`` is not there.
        ValueError: it is not TOML.
    """
    given = vars(_parser().parse_args(argv))
    config = given.pop("config", None)
    if config is not None and not config.is_file():
        raise FileNotFoundError(f"--config {config}: no such file")
    source = type("ServerSettings", (ServerSettings,), {"config_file": config})
    try:
        settings: ServerSettings = source(**given)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config {config}: {error}") from None
    return settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout-server",
        description="Serve rollouts of a language model, as token ids, from an embedded vLLM.",
        epilog="Every flag can also be TITO_<FLAG> in the environment, or a line of the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, help="TOML file with any of these settings.")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in ServerSettings.model_fields.items():
        extra = field.json_schema_extra
        title = str(extra["group"]) if isinstance(extra, dict) else ""
        group = groups.setdefault(title, parser.add_argument_group(title))
        shown = "required" if field.is_required() else f"default: {field.default}"
        flag, help_text = f"--{name.replace('_', '-')}", f"{field.description} ({shown})"
        if field.annotation in (bool, bool | None):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
        elif field.annotation in (list[Path], list[str]):
            metavar = "DIR" if field.annotation == list[Path] else "VALUE"
            group.add_argument(flag, action="append", metavar=metavar, help=help_text)
        else:
            group.add_argument(flag, metavar="VALUE", help=help_text)
    return parser
