"""``python -m trainer``; see :mod:`trainer.cli`."""

from __future__ import annotations

import sys

from trainer.advice import INSTALL, missing_package


def main() -> int:
    """Entry point of the console script, which a client that was installed alone has too."""
    try:
        from trainer.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"error: {missing_package(error)}\n  {INSTALL}")
    return run()


if __name__ == "__main__":
    sys.exit(main())
