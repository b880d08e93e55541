"""Look at a server's health again and again, on one connection, until stdin ends.

Prints an empty line when it has begun, and the seconds of each look as a JSON list at the end.
"""

from __future__ import annotations

import json
import select
import sys
import time

import httpx

_PAUSE_S = 0.02


def main(url: str) -> None:
    """Probe."""
    times = []
    with httpx.Client(timeout=60) as client:
        client.get(url)
        print(flush=True)
        while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
            start = time.perf_counter()
            client.get(url).raise_for_status()
            times.append(time.perf_counter() - start)
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1])
