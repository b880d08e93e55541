"""Directories that tests begin with: a checkpoint, and a model with another tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer

from trainer.checkpoint import RunState, save_checkpoint
from trainer.learner import Learner


def save(root: Path, learner: Learner) -> Path:
    """A checkpoint of a learner after step 1."""
    return save_checkpoint(
        root,
        RunState(1),
        model=learner.model,
        tokenizer=learner.tokenizer,
        optimizer=learner.optimizer,
        scheduler=learner.scheduler,
        scaler=learner.scaler,
        keep=1,
    )


def with_another_template(model: Path, target: Path) -> Path:
    """A copy of a model whose tokenizer differs in the chat template alone."""
    shutil.copytree(model, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(target)
    return target
