"""HTML of text that can be trusted and text that cannot.

Only what :func:`tag` made is markup; every other string is escaped when it goes in.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from trainer.printable import parts


class Html(str):
    """Markup; made here alone."""

    __slots__ = ()


Content = str | Iterable["Content"] | None


def tag(name: str, *children: Content, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
        children: other elements, or text, which is escaped.
        attributes: ``_`` stands for ``-`` in a name, and a trailing one for nothing; those that
            are None or False are left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(content: Content) -> Html:
    """Pieces one after the other, whatever is no markup escaped."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(html.escape(content))
    return Html("".join(join(piece) for piece in content))


def text(content: str) -> Html:
    """Text of a model: escaped, and with what cannot be seen named."""
    return join(
        part if seen else tag("span", f"U+{ord(part):04X}", class_="unseen")
        for part, seen in parts(content)
    )


def table(head: Iterable[Content], rows: Iterable[Iterable[Content]]) -> Html:
    """A table in a box that scrolls sideways where it must."""
    columns = tag("tr", [tag("th", name, scope="col") for name in head])
    body = [tag("tr", [tag("td", cell) for cell in row]) for row in rows]
    return tag("div", tag("table", tag("thead", columns), tag("tbody", body)), class_="table")
