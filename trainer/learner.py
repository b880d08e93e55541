"""What learns: model, optimizer and schedule, built from a configuration or from a checkpoint."""

from __future__ import annotations

import random
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shared.tokens import tokenizer_fingerprint
from trainer.checkpoint import restore_trainer
from trainer.config import Config, OptimizerConfig
from trainer.errors import ConfigError
from trainer.fusing import choose_fused_layers
from trainer.kernels import checkpoint_layers, choose_liger, compile_layers
from trainer.lora import add_lora
from trainer.masters import Finer, finer_values, keep_masters, master_of, round_masters
from trainer.objective import Objective
from trainer.packing import use_packing
from trainer.policy import load_policy, load_reference
from trainer.ranks import ALONE, Ranks
from trainer.schedule import build_scheduler, continue_schedule
from trainer.sharding import shard

_OTHER_MODEL = "set model.path to a checkpoint's directory, or to the name of one on the hub"


@dataclass(frozen=True)
class Learner:
    """The trained model and everything that changes with it.

    Attributes:
        scaler: of the loss where the model computes in float16, else disabled: it then does
            nothing and waits for nothing.
        reference: the frozen model that the KL is measured against; None when beta is 0, and when
            there is an adapter, without which the model is its own reference.
        fingerprint: of the tokenizer, to be compared with the server's.
        pad_id: fills the batch; nothing depends on which id it is.
        unpacked: why sequences are padded, not packed; empty when they are packed.
        unfused: why decoder layers run as the model's own modules; empty when they are fused.
        ranks: the processes over which the model is spread.
    """

    model: PreTrainedModel
    reference: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: GradScaler
    objective: Objective
    device: torch.device
    fingerprint: str
    pad_id: int
    unpacked: str = ""
    unfused: str = ""
    ranks: Ranks = ALONE


def build_learner(config: Config, checkpoint: Path | None, ranks: Ranks = ALONE) -> Learner:
    """Load the model, from ``checkpoint`` if the run goes on from one, with its optimizer.

    Random states come from the checkpoint or the seed, and are set last, because loading draws.

    Raises:
        ConfigError: the model cannot be loaded.
        CheckpointError: the checkpoint does not fit.
    """
    device = _device(config, ranks)
    objective = config.resolved_objective()
    source = str(checkpoint / "model") if checkpoint else config.model.path
    model, tokenizer = _load(source, config, device)
    if config.model.lora.rank and checkpoint is None:
        _add_lora(model, config)
    finer = finer_values(model, source) if config.model.keeps_masters() else None
    reference = None
    if objective.beta > 0 and not config.model.lora.rank:
        dtype = getattr(torch, config.model.dtype)
        reference = load_reference(config.model.path, dtype=dtype, device=device)
    models = [model] if reference is None else [model, reference]
    unpacked = _choose_packing(config, models)
    unfused = _fuse(models, config, ranks)
    for each in models:
        # After the layers are fused: Liger gives MLPs another class.
        if unfused or config.model.liger is True:
            choose_liger(each, config.model)
    if config.model.compile:
        for each in models:
            compile_layers(each, config.model.activation_checkpointing)
    elif unfused:
        checkpoint_layers(model, config.model.activation_checkpointing)
    _spread(models, finer, ranks)
    optimizer = build_optimizer(model, config.optimizer)
    updates = config.train.steps * config.train.updates_per_rollout
    scheduler = build_scheduler(optimizer, config.optimizer, updates)
    scaler = GradScaler(device.type, enabled=config.model.dtype == "float16")
    if checkpoint:
        restore_trainer(checkpoint, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
        continue_schedule(scheduler)
    else:
        seed_everything(config.train.seed)
    return Learner(
        model=model,
        reference=reference,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        objective=objective,
        device=device,
        fingerprint=tokenizer_fingerprint(tokenizer),
        pad_id=tokenizer.pad_token_id or 0,
        unpacked=unpacked,
        unfused=unfused,
        ranks=ranks,
    )


def _device(config: Config, ranks: Ranks) -> torch.device:
    if ranks.size > 1 and config.model.lora.rank:
        raise ConfigError(
            "model.lora does not work with several ranks",
            advice="start one process: an adapter leaves little to spread",
        )
    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    own = ranks.size > 1 and name == "cuda"
    return torch.device(name, ranks.local_rank) if own else torch.device(name)


def _load(
    source: str, config: Config, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _refuse_no_checkpoint(source)
    try:
        model = load_policy(source, dtype=getattr(torch, config.model.dtype), device=device)
        return model, AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        # The library goes on for lines about how to log in.
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"cannot load the model {source}: {said}", advice=_OTHER_MODEL) from error


def _refuse_no_checkpoint(source: str) -> None:
    """A path is told apart from a name here; the library would ask the hub for both."""
    path = Path(source)
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or path.exists()
    whole, adapter = path / "config.json", path / "adapter_config.json"
    if looks_like_path and not (whole.is_file() or adapter.is_file()):
        what = "has no config.json" if path.is_dir() else "is not a directory"
        raise ConfigError(f"cannot load the model {source}: it {what}", advice=_OTHER_MODEL)


def _add_lora(model: PreTrainedModel, config: Config) -> None:
    seed_everything(config.train.seed)  # a fresh adapter is drawn
    try:
        add_lora(model, config.model.lora)
    except ValueError as error:
        raise ConfigError(f"model.lora: {error}") from error


def _spread(models: list[PreTrainedModel], finer: Finer | None, ranks: Ranks) -> None:
    """Give the first model its masters, if it is to have any, and every rank its part of all."""
    model, *references = models
    if ranks.size > 1:
        shard(model, ranks, finer)
        for reference in references:
            shard(reference, ranks)
    elif finer is not None:
        keep_masters(model, finer)


def _fuse(models: list[PreTrainedModel], config: Config, ranks: Ranks) -> str:
    """Fuse layers if the configuration wants it; returns why not those of all models."""
    if ranks.size > 1 and config.model.fused_layers is not False:
        if config.model.fused_layers is True:
            raise ConfigError(
                "model.fused_layers does not work with several ranks",
                advice='set model.fused_layers = "auto"',
            )
        return f"there are {ranks.size} ranks"
    for whose, model in zip(("", "the reference: "), models, strict=False):
        if reason := choose_fused_layers(model, config.model):
            return whose + reason
    return ""


def _choose_packing(config: Config, models: list[PreTrainedModel]) -> str:
    """Pack if the configuration wants it; returns why not."""
    if config.model.packing == "off":
        return "model.packing is off"
    try:
        for model in models:
            use_packing(model)
    except ValueError as error:
        if config.model.packing == "on":
            raise ConfigError(f"{error}: set model.packing to auto or off") from error
        return str(error)
    return ""


def build_optimizer(model: torch.nn.Module, options: OptimizerConfig) -> torch.optim.Optimizer:
    """The configured optimizer over all parameters that are trained, or over their masters.

    Raises:
        ConfigError: torch has no such optimizer, or it takes other options.
    """
    trained = [master_of(p) for p in model.parameters() if p.requires_grad]
    kind = getattr(torch.optim, options.name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.name: torch.optim has no {options.name}")
    arguments: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if kind is torch.optim.AdamW:
        arguments |= {"betas": (options.beta1, options.beta2), "eps": options.eps}
    chosen = {"foreach", "fused", "differentiable"} & options.options.keys()
    if not chosen and "fused" in signature(kind).parameters and all(p.is_cuda for p in trained):
        arguments["fused"] = True  # one pass over weights, gradients and moments
    try:
        optimizer = kind(trained, **(arguments | options.options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.options: {error}") from error
    optimizer.register_step_post_hook(lambda *_: round_masters(model))
    return optimizer


def seed_everything(seed: int) -> None:
    """Seed every generator that a step, or a user's reward, may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
