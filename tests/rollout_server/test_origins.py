"""What a browser sends for another site's page is refused; what people and tools send is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_server.settings import settings_from_args
from tests.rollout_server.fakes import ask, error_of, idle_app, tokens_file

CHANGES = [
    ("POST", "/policies/default/reset"),
    ("POST", "/pause"),
    ("POST", "/sleep"),
    ("POST", "/rollout"),
    ("POST", "/v1/completions"),
    ("DELETE", "/policies/other"),
]
SECRETS = [("GET", "/viewer/groups"), ("GET", "/info")]
FOREIGN_PAGES = {
    "another site": {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
    "another site, without an origin": {"sec-fetch-site": "cross-site"},
    "another port of this machine": {"sec-fetch-site": "same-site"},
    "an old browser": {"origin": "https://evil.example"},
    "another port, an old browser": {"origin": "http://localhost:3000"},
    "a sandbox": {"origin": "null"},
    "no origin at all": {"origin": ""},
    "a link to what is secret": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
}
OWN = {
    "a tool": {},
    "the page": {"sec-fetch-site": "same-origin"},
    "the page, behind a proxy that changes Host": {
        "sec-fetch-site": "same-origin",
        "origin": "https://rollouts.example",
    },
    "an address typed in": {"sec-fetch-site": "none"},
    "the page in an old browser": {"origin": "http://localhost"},
}


@pytest.mark.parametrize("page", FOREIGN_PAGES)
@pytest.mark.parametrize(
    ("method", "path"), [*CHANGES, ("GET", "/viewer/groups"), ("GET", "/info")]
)
def test_what_a_foreign_page_asks_for_is_refused(method: str, path: str, page: str) -> None:
    answer = ask(idle_app(host="0.0.0.0"), method, path, headers=FOREIGN_PAGES[page])
    assert answer.status_code == 403
    assert error_of(answer)["code"] == "forbidden"
    assert "web page" in error_of(answer)["message"]


@pytest.mark.parametrize("who", OWN)
@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_everybody_else_is_not(method: str, path: str, who: str) -> None:
    answer = ask(idle_app(host="0.0.0.0"), method, path, headers=OWN[who])
    assert answer.status_code != 403


def test_a_token_does_not_excuse_a_foreign_page(tmp_path: Path) -> None:
    # A browser sends the password of ``http://any:TOKEN@host`` along with what any page asks for.
    token = "token-0123456789"
    app = idle_app(tokens_file=tokens_file(tmp_path, ("a", token, ["publish:*"])), host="0.0.0.0")
    headers = FOREIGN_PAGES["another site"]
    assert ask(app, "POST", "/pause", token=token).status_code == 503
    assert ask(app, "POST", "/pause", token=token, headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/", "/viewer/page/app.js", "/healthz", "/openapi.json"])
def test_a_link_from_elsewhere_leads_to_what_is_open(path: str) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask(idle_app(), "GET", path, headers=headers).status_code == 200


LOOPBACK = ["127.0.0.1", "LOCALHOST", "::1", "127.0.0.2", "::ffff:127.0.0.1"]
REBOUND = ["evil.example", "evil.example:8300", "localhost.evil.example", "127.0.0.1.evil.example",
           "rollouts.example.evil", "[::1", "localhost:80:80", ""]  # fmt: skip
KNOWN = ["localhost", "LOCALHOST:9000", "localhost.:9000", "127.0.0.1",
         "127.0.0.1:8300", "[::1]:1", "10.1.2.3:8300"]  # fmt: skip


@pytest.mark.parametrize("bound", LOOPBACK)
@pytest.mark.parametrize("host", REBOUND)
def test_a_name_that_leads_to_loopback_is_refused_there(bound: str, host: str) -> None:
    app = idle_app(host=bound, allowed_hosts=["rollouts.example"])
    for method, path in [*CHANGES, *SECRETS]:
        answer = ask(app, method, path, headers={"host": host})
        assert answer.status_code == 403, path
        assert "--allowed-hosts" in error_of(answer)["message"]


@pytest.mark.parametrize("host", [*KNOWN, "rollouts.example", "Rollouts.Example:443"])
def test_names_of_loopback_addresses_and_what_is_allowed_are_not(host: str) -> None:
    app = idle_app(allowed_hosts=["rollouts.example"])
    assert ask(app, "GET", "/viewer/groups", headers={"host": host}).status_code == 503


@pytest.mark.parametrize("host", ["rollout-server:8300", "evil.example", "10.1.2.3:8300"])
def test_a_server_that_others_reach_takes_any_name(host: str) -> None:
    app = idle_app(host="0.0.0.0")
    assert ask(app, "GET", "/viewer/groups", headers={"host": host}).status_code == 503


def test_unless_it_is_told_its_names() -> None:
    app = idle_app(host="0.0.0.0", allowed_hosts=["rollouts.example", "rollout-server:8300"])
    for host, status in [("rollout-server:8300", 503), ("evil.example", 403), ("10.1.2.3", 503)]:
        assert ask(app, "GET", "/viewer/groups", headers={"host": host}).status_code == status


def test_names_are_given_as_flags() -> None:
    flags = ["--allowed-hosts", "a.example", "--allowed-hosts", "b"]
    assert settings_from_args(["--model", "x", *flags]).allowed_hosts == ["a.example", "b"]
