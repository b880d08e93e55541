"""Refusals: samples of another distribution or vocabulary than the trainer's.

Training on any of them would go on without an error and teach something else than the rewards say.
"""

from __future__ import annotations

from shared.protocol import ServerInfo
from trainer.errors import ConfigError, MismatchError

NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Settings that leave the model's distribution as the trainer computes it, but for temperature."""


def refuse_other_tokenizer(theirs: str, ours: str) -> None:
    """Raise unless both sides give every token id the same meaning.

    Raises:
        MismatchError: the fingerprints differ.
    """
    if theirs != ours:
        raise MismatchError(
            f"the server's tokenizer ({theirs}) is not that of model.path ({ours})",
            advice="start the server with the model that is trained: --model as in model.path",
        )


def refuse_sleepless(info: ServerInfo, level: int) -> None:
    """Raise unless a server hands memory back when it is put to sleep so deep.

    Raises:
        ConfigError: it does not.
    """
    deepest = info.limits.get("max_sleep_level", 0)
    if level > deepest:
        raise ConfigError(
            f"server.sleep is {level}, but the server hands no memory back at that level (it says "
            f"{deepest})",
            advice="set server.sleep = 0, or start the server on a GPU, with --sleep-mode and "
            "--rl-routes",
        )


def refuse_other_sampling(sampling: dict[str, object], *, temperature: float) -> None:
    """Raise unless the samples were drawn as the trainer will score them.

    Args:
        sampling: settings as the server says it applied them.

    Raises:
        MismatchError: it names every setting that differs.
    """
    wanted = NEUTRAL_SAMPLING | {"temperature": temperature}
    wrong = [
        f"{name} is {sampling.get(name)}, not {value}"
        for name, value in wanted.items()
        if sampling.get(name) != value
    ]
    if wrong:
        raise MismatchError(f"the samples have another distribution: {'; '.join(wrong)}")
