"""Write the two lock files of the images: what each needs of ``requirements-cpu.lock``.

    .venv/bin/python docker/lock.py

What others need is asked of the packages installed in ``.venv``, so run ``make setup`` first.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements-cpu.lock"
IMAGES = {"server-cpu": "tito[server-cpu]", "trainer-cpu": "tito[trainer]"}


def locked() -> dict[str, str]:
    """Lines of the whole lock by canonical name."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line for line in lines}


def needed(root: str, available: Iterable[str]) -> set[str]:
    """Names of the ``available`` packages that a requirement leads to."""
    # Tito and torch are installed apart, yet what they need belongs to the lock.
    allowed, found = {*available, "tito", "torch"}, set[str]()
    waiting = [Requirement(root)]
    while waiting:
        requirement = waiting.pop()
        for child in _children(requirement):
            name = canonicalize_name(child.name)
            # Extras lead to packages of their own, so a name is followed once for each set of them.
            key = f"{name}[{','.join(sorted(child.extras))}]"
            if name in allowed and key not in found:
                found.add(key)
                waiting.append(child)
    return {key.partition("[")[0] for key in found} & set(available)


def _children(requirement: Requirement) -> list[Requirement]:
    if requirement.name == "tito":
        return _own(requirement.extras)
    try:
        texts = requires(requirement.name) or []
    except PackageNotFoundError:
        return []
    extras = requirement.extras or {""}
    children = [Requirement(text) for text in texts]
    return [
        child
        for child in children
        if child.marker is None or any(child.marker.evaluate({"extra": e}) for e in extras)
    ]


def _own(extras: Iterable[str]) -> list[Requirement]:
    """Of the project as it is now, which may have been installed before it was changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [text for extra in extras for text in project["optional-dependencies"][extra]]
    return [Requirement(text) for text in [*project["dependencies"], *optional]]


def render(root: str) -> str:
    """The lock file of an image whose contents are one requirement."""
    lines = locked()
    names = sorted(needed(root, lines))
    head = f"# Of requirements-cpu.lock, what {root} needs; made by docker/lock.py.\n"
    return head + "".join(f"{lines[name]}\n" for name in names)


def main() -> None:
    """Write every image's lock file beside this script."""
    for image, root in IMAGES.items():
        (Path(__file__).parent / f"{image}.lock").write_text(render(root))


if __name__ == "__main__":
    main()
