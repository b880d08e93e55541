"""``python -m trainer``; see :mod:`trainer.cli`."""

from __future__ import annotations

import os
import sys

from trainer.advice import INSTALL, missing_package


def main() -> int:
    """Entry point of the console script, which a client that was installed alone has too."""
    _wait_asleep()
    try:
        from trainer.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"error: {missing_package(error)}\n  {INSTALL}")
    return run()


def _wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait for each other; it is read when torch is loaded.

    Every operation ends with such a wait. Where something else runs on a core, such as a rollout
    server, the threads on the other cores would spin until their peer gets its turn.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    sys.exit(main())
