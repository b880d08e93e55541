"""Which step of the run a set of weights belongs to.

Version numbers are a server's own: two servers, or one that was restarted, count differently. What
names weights everywhere is the digest of their content, so that is what staleness is counted by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.protocol import Sample
from trainer.errors import MismatchError


class Published:
    """What this run has published.

    Args:
        steps: digest to step, of an earlier process of the run.
    """

    def __init__(self, steps: Mapping[str, int] | None = None) -> None:
        self._steps = dict(steps or {})

    def note(self, digest: str, step: int) -> None:
        """These weights are the policy after ``step``. The same weights may be that of several."""
        self._steps[digest] = step

    def of(self, samples: Iterable[Sample]) -> dict[str, int]:
        """The steps of all weights that had a part in some samples, by digest."""
        digests = {span.digest for sample in samples for span in sample.spans}
        return {digest: self._steps[digest] for digest in digests if digest in self._steps}

    def knows(self, digest: str) -> bool:
        """Whether this run has published these weights."""
        return digest in self._steps

    def staleness(self, sample: Sample, step: int) -> int:
        """Steps between the oldest weights in a sample and those that ``step`` starts from.

        Raises:
            MismatchError: some token was sampled from what this run never published.
        """
        oldest = step - 1
        for span in sample.spans:
            if span.digest not in self._steps:
                raise MismatchError(
                    f"the server sampled from version {span.version} ({span.digest}), which this "
                    f"run did not publish: does another run publish to it, or has it restarted?",
                    advice="end the other run; --resume publishes the last checkpoint again",
                )
            oldest = min(oldest, self._steps[span.digest])
        return step - 1 - oldest
