"""PEFT adapters on disk: where their parts come from, and whether they fit the base model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from rollout_server import staging
from rollout_server.checkpoints import Checkpoint, Manifest, check_tensor, content_digest, reject_if
from shared.errors import InvalidRequest, MalformedBody, Problem, WeightsRejected
from shared.protocol import ADAPTER_CONFIG_KEY
from shared.weights import PREFIX_BYTES, TensorSpec, header_length, header_metadata

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TABLES = ("lm_head", "embed_tokens")
_FLOATS = ("BF16", "F16", "F32")
_UNSUPPORTED = (
    "use_dora", "bias", "lora_bias", "modules_to_save", "layer_replication", "rank_pattern",
    "alpha_pattern", "alora_invocation_tokens",
)  # fmt: skip
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")


def unpack_config(folder: Path) -> None:
    """Write the configuration that a streamed adapter carries in its metadata to its own file.

    Raises:
        MalformedBody: there is none, or it is not a JSON object.
    """
    with (folder / WEIGHTS_FILE).open("rb") as file:
        metadata = header_metadata(file.read(header_length(file.read(PREFIX_BYTES))))
    (folder / CONFIG_FILE).write_text(metadata.get(ADAPTER_CONFIG_KEY, ""))
    _read_config(folder)


def copy_adapter(path: Path, limits: staging.UploadLimits, folder: Path) -> None:
    """Copy a PEFT adapter directory into a staging folder.

    Raises:
        Forbidden: it lies outside every allowed directory, or may not be read.
        InvalidRequest: there is no adapter.
    """
    weights, *more = staging.find_checkpoint(path / WEIGHTS_FILE, limits)
    if more:
        problem = Problem(WEIGHTS_FILE, f"a directory of {1 + len(more)} files", "one file")
        raise InvalidRequest("there is no adapter", problems=[problem])
    config = staging.allowed_file(path / CONFIG_FILE, limits)
    staging.copy_file(weights, folder / WEIGHTS_FILE)
    staging.copy_file(config, folder / CONFIG_FILE)


def verify_adapter(
    folder: Path, manifest: Manifest, announced: str | None, base: str, max_rank: int
) -> str:
    """Check a staged adapter against the base model.

    Args:
        folder: holds the weights and the configuration.
        manifest: of the base model.
        announced: digest of the tensors, if the sender gave one.
        base: digest of the base weights that the adapter belongs to.
        max_rank: highest rank accepted.

    Returns:
        a digest of tensors, configuration and base: all that decides what the policy samples.

    Raises:
        WeightsRejected: it does not fit; ``problems`` says where.
    """
    config = _read_config(folder)
    with Checkpoint([folder / WEIGHTS_FILE]) as sent:
        reject_if(
            _config_problems(config, max_rank) + _tensor_problems(sent.specs, manifest, config),
            "the adapter does not fit the model",
        )
        digest = content_digest(sent)
        if announced not in (None, digest):
            raise WeightsRejected(f"the adapter's digest is {digest}, not {announced} as announced")
        # The engine rounds adapters to the dtype in which it serves the base.
        served = next(iter(manifest.required.values())).dtype
        bad = (check_tensor(sent, name, served).problem for name in sent.specs)
        reject_if([p for p in bad if p], "the adapter holds values that are not finite")
    whole = f"{digest}\n{base}\n{json.dumps(config, sort_keys=True)}\n"
    return xxhash.xxh3_128_hexdigest(whole.encode())


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise MalformedBody(
            f"the adapter has no configuration: PEFT's {CONFIG_FILE} is expected as JSON, in a "
            f"stream under {ADAPTER_CONFIG_KEY} in the safetensors metadata"
        )
    return config


def _config_problems(config: dict[str, Any], max_rank: int) -> list[Problem]:
    problems = []
    if (kind := config.get("peft_type")) != "LORA":
        problems.append(Problem("peft_type", repr(kind), "LORA"))
    rank = config.get("r")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        problems.append(Problem("r", repr(rank), f"1 to {max_rank} (see --max-lora-rank)"))
    if not isinstance(alpha := config.get("lora_alpha"), int | float) or not 0 < alpha < math.inf:
        problems.append(Problem("lora_alpha", repr(alpha), "a number above 0"))
    if not config.get("target_modules"):
        problems.append(Problem("target_modules", "nothing", "the modules that are adapted"))
    problems += [
        Problem(name, repr(config[name]), f"{name} left out: it changes more than A and B say")
        for name in _UNSUPPORTED
        if config.get(name) not in (None, False, "none", {}, [])
    ]
    if (how := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        problems.append(Problem("init_lora_weights", repr(how), "a start that leaves the base"))
    return problems


def _tensor_problems(
    sent: dict[str, TensorSpec], manifest: Manifest, config: dict[str, Any]
) -> list[Problem]:
    problems = []
    for name, spec in sent.items():
        module, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        base = manifest.required.get(f"{module}.weight")
        is_matrix = base is not None and len(base.shape) == 2 and not module.endswith(_TABLES)
        if base is None or not is_matrix or part not in ("lora_A", "lora_B"):
            allowed = f"{_PREFIX}MODULE.lora_A.weight or lora_B, for linear layers of the base"
            problems.append(Problem(name, "no such matrix to adapt", allowed))
            continue
        rank = config.get("r", 0)
        shape = (rank, base.shape[1]) if part == "lora_A" else (base.shape[0], rank)
        if spec.shape != shape or spec.dtype not in _FLOATS:
            wanted = replace(spec, shape=shape)
            problems.append(Problem(name, str(spec), f"{wanted} in {', '.join(_FLOATS)}"))
        partner = name.replace(f".{part}.", ".lora_B." if part == "lora_A" else ".lora_A.")
        if partner not in sent:
            problems.append(Problem(partner, "nothing: the tensor is missing", "both halves"))
    return problems if sent else [Problem("tensors", "none", "at least one adapted matrix")]
