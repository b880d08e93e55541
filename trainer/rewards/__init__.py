"""Scores for samples: built-in rewards by name, functions of the user's own, or a service.

A reward is one function in a file, named in the configuration as ``path/to/file.py:function`` and
called once for each sample::

    def reward(*, prompt, text, reference, sample) -> float: ...

``prompt`` is what was asked (text or chat messages), ``text`` the decoded completion, ``reference``
the data's answer as a string or None, ``sample`` the whole :class:`shared.protocol.Sample`; options
of the configuration follow. With ``async def`` the samples of a chunk are awaited at once.

Functions run in worker processes with a deadline and a memory limit, so that one that hangs,
crashes or eats memory costs its sample and nothing else. Parts: ``outcome`` says what can come of
a sample, ``functions`` and ``code`` are built in, ``load`` finds functions, ``service`` asks over
HTTP, ``pool`` and ``worker`` are the two ends of a worker, ``program`` and :mod:`trainer.jail`
those of a program under test.
"""

from trainer.rewards.outcome import Failed, Outcome, Score, TimedOut
from trainer.rewards.scoring import Reward, open_reward, refuse_no_verdict, score_rollout

__all__ = [
    "Failed",
    "Outcome",
    "Reward",
    "Score",
    "TimedOut",
    "open_reward",
    "refuse_no_verdict",
    "score_rollout",
]
