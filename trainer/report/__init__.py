"""One self-contained page about a run, made from the files in its directory.

    python -m trainer report runs/train [--out report.html]

Curves, accounts, best and worst groups, how answers to one prompt changed, and what was run. The
page needs no server and no network, runs no script, and can be sent by mail. What the run did not
keep (see ``train.keep_batches``) is left out.
"""

from __future__ import annotations

from pathlib import Path

from trainer.report.page import page
from trainer.report.record import read_run

FILE_NAME = "report.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run; by default beside its other files.

    Args:
        run: a run's ``train.output``.

    Raises:
        DataError: it is none.
    """
    target = out or run / FILE_NAME
    target.write_text(page(read_run(run)), encoding="utf-8")
    return target
