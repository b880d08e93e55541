"""The whole configuration of a training run: one typed, frozen object.

Each module here has what its name says: the sections of a file, one class each.
:mod:`trainer.config_file` reads them from TOML and the command line. Keys that do not exist and
settings that contradict each other are refused. Paths are relative to the working directory.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from trainer.config.data import ArithmeticConfig, DataConfig
from trainer.config.evaluation import EvaluationConfig
from trainer.config.model import LoraConfig, ModelConfig
from trainer.config.objective import ObjectiveConfig
from trainer.config.reward import RewardConfig, RewardFunctionConfig
from trainer.config.rollout import RolloutConfig
from trainer.config.section import Section
from trainer.config.server import ServerConfig
from trainer.config.train import OptimizerConfig, TrackingConfig, TrainConfig
from trainer.objective import Objective

__all__ = [
    "ArithmeticConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "ServerConfig",
    "TrackingConfig",
    "TrainConfig",
]


class Config(Section):
    """Everything that defines a run."""

    model: ModelConfig
    server: ServerConfig = ServerConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    def resolved_objective(self) -> Objective:
        """The loss, with all that decides it: presets, rewards, lengths."""
        rewards = tuple((part.name, part.weight) for part in self.reward.parts())
        return self.objective.resolve(self.rollout.max_tokens, rewards)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.resolved_objective()
        if self.server.sleep and self.train.max_staleness:
            raise ValueError(
                "server.sleep with train.max_staleness above 0: a server that sleeps while the "
                "trainer steps cannot sample for later steps meanwhile"
            )
        evaluation, arithmetic = self.evaluation, self.data.source == "arithmetic"
        if arithmetic and evaluation.path is not None:
            raise ValueError("evaluation.path: arithmetic has held-out problems of its own")
        if not arithmetic and evaluation.prompts and evaluation.path is None:
            raise ValueError("evaluation.path is missing; or set evaluation.prompts to 0")
        if (evaluation.every or evaluation.samples) and not evaluation.prompts:
            raise ValueError("evaluation.every and .samples need evaluation.prompts above 0")
        if evaluation.split is not None and self.data.source != "dataset":
            raise ValueError("evaluation.split: only source 'dataset' has splits")
        if self.rollout.chat_template_kwargs and not (arithmetic or self.data.chat):
            raise ValueError("rollout.chat_template_kwargs has no effect with data.chat = false")
        return self
