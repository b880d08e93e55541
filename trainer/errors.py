"""What the trainer raises on purpose, as branches of the one exception tree.

TitoError
`-- TrainerError
    |-- ConfigError      the config is wrong; ``problems`` names each key
    |-- DataError        a prompt file cannot be used
    |-- RewardError      a reward function cannot be loaded
    |-- MismatchError    samples come from another distribution or vocabulary than the trainer's
    |-- LedgerError      the accounts of a step do not add up
    |-- CheckpointError  a checkpoint is missing or does not fit this run
    `-- OutOfMemory      the trainer's device has too little of it
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import Problem, TitoError


class TrainerError(TitoError):
    """Base of what the trainer raises.

    Attributes:
        advice: what to do about it, where the message does not say; shown on a line of its own.
    """

    code = "trainer_error"

    def __init__(self, message: str, *, advice: str = "", problems: Sequence[Problem] = ()) -> None:
        super().__init__(message, problems=problems)
        self.advice = advice


class ConfigError(TrainerError):
    """The configuration is wrong; ``problems`` names each key."""

    code = "config_error"


class DataError(TrainerError):
    """A file of prompts cannot be used."""

    code = "data_error"


class RewardError(TrainerError):
    """A reward function cannot be loaded."""

    code = "reward_error"


class MismatchError(TrainerError):
    """Samples come from another distribution or vocabulary than the trainer's."""

    code = "mismatch"


class LedgerError(TrainerError):
    """The accounts of a step do not add up."""

    code = "ledger_error"


class CheckpointError(TrainerError):
    """A checkpoint is missing, or does not fit this run."""

    code = "checkpoint_error"


class OutOfMemory(TrainerError):
    """The trainer's device has too little memory."""

    code = "out_of_memory"
