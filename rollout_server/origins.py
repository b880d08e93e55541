"""Requests that a browser sends for the web page of another site are refused.

A browser asks for whatever any page wants, also of servers that only its own machine reaches. What
changes something here needs no cookie and, on a server without tokens, nothing else either. Two
things give such requests away:

- ``Sec-Fetch-Site``, or in older browsers ``Origin``, says that the page is not the server's own.
- A page can have its own name lead to 127.0.0.1 (DNS rebinding), and is then of the server's origin
  as far as the browser knows. But ``Host`` has that name, and nobody calls loopback by it. Numbers
  are nobody's names, so an address is always taken.

Tools send neither of the first, and call the server by its own name. Routes that everybody may use
are not looked at: they change nothing and tell nothing, and links lead to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from starlette.datastructures import Headers

from shared.errors import Forbidden

_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::[0-9]*)?")
_LOCALHOST = "localhost"
_OWN_SITES = ("same-origin", "none")  # none: typed in, or a bookmark
_SHOWN_CHARS = 80


class Origins:
    """Knows by which names the server is called.

    Args:
        host: address that it listens on.
        allowed: names in ``Host`` that are its own besides ``localhost`` and addresses; if there
            are none, a server that listens on more than loopback takes any.
    """

    def __init__(self, host: str, allowed: Iterable[str]) -> None:
        names = {_name(host) for host in allowed}
        self._names = names | {_LOCALHOST} if names or is_loopback(host) else None

    def check(self, headers: Headers) -> None:
        """Go on unless a foreign web page asks.

        Raises:
            Forbidden: it does, or may.
        """
        host = headers.get("host")
        if host is not None and not self._is_own(host):
            raise Forbidden(
                f"no web page is served under the host {host[:_SHOWN_CHARS]!r}; "
                "if people call this server so, start it with --allowed-hosts"
            )
        if _is_foreign(headers):
            raise Forbidden("a web page of another origin asks for this; only the server's own may")

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        return self._names is None or name in self._names or _is_address(name)


def _is_foreign(headers: Headers) -> bool:
    """Whether a page asks that came from elsewhere, by what its browser says."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in _OWN_SITES
    if origin is None:
        return False
    return origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _name(host: str) -> str:
    """A host without its port, its last dot, and the brackets of an address."""
    parts = _HOST.fullmatch(host.lower())
    return parts[1].strip("[]").removesuffix(".") if parts else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    name = _name(host)
    if not _is_address(name):
        return name == _LOCALHOST
    address = ip_address(name)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
