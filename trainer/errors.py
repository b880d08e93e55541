"""What the trainer raises on purpose, as branches of the one exception tree.

TitoError
`-- TrainerError
    |-- ConfigError      the config is wrong; ``problems`` names each key
    |-- DataError        a prompt file cannot be used
    |-- RewardError      a reward function cannot be loaded
    |-- MismatchError    samples come from another distribution or vocabulary than the trainer's
    |-- LedgerError      the accounts of a step do not add up
    `-- CheckpointError  a checkpoint is missing or does not fit this run
"""

from __future__ import annotations

from shared.errors import TitoError


class TrainerError(TitoError):
    code = "trainer_error"


class ConfigError(TrainerError):
    code = "config_error"


class DataError(TrainerError):
    code = "data_error"


class RewardError(TrainerError):
    code = "reward_error"


class MismatchError(TrainerError):
    code = "mismatch"


class LedgerError(TrainerError):
    code = "ledger_error"


class CheckpointError(TrainerError):
    code = "checkpoint_error"
