"""The page in a real browser: it shows, follows, filters, escapes, and works without a mouse."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from shared.protocol import Group
from tests.rollout_server.browser import chromium
from tests.rollout_server.engines import Running
from tests.rollout_server.fakes import tokens_file
from tests.rollout_server.support import base_weights, lazy, sharpened
from tests.rollout_server.viewer_support import HOSTILE, ScriptedEngine, scripted, untrained

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

PATIENCE_MS = 30_000
WIDTHS = (390, 900, 1600)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("models") / "untrained")


@pytest.fixture(scope="module")
def whole_server(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, ScriptedEngine]]:
    with scripted(
        model, tmp_path_factory.mktemp("server"), lambda _: [], viewer_groups=5000
    ) as found:
        yield found


@pytest.fixture
def server(whole_server: tuple[Running, ScriptedEngine]) -> Running:
    running, engine = whole_server
    engine.script = lambda _: ["7", "8"]
    return running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may not complain."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.extend(_complaints(said)))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    yield page
    assert page.evaluate("window.stolen") is None
    assert not complaints
    context.close()


def _complaints(said: ConsoleMessage) -> list[str]:
    # The browser itself reports what the page deals with: refusals, and a server that is away.
    refused = re.search(r"status of 40[13]|ERR_INTERNET_DISCONNECTED", said.text)
    # What is no page of ours has no icon.
    expected = refused or said.location["url"].endswith("/favicon.ico")
    return [said.text] if said.type in ("error", "warning") and not expected else []


def roll(server: Running, prompts: int = 1, **settings: Any) -> tuple[Group, ...]:
    settings = {"group_size": 4, "max_tokens": 400} | settings
    return server.client.rollout([f"{i}+7=" for i in range(prompts)], **settings).groups


def post_rewards(server: Running, group: Group, rewards: list[float]) -> None:
    report = {"groups": [{"id": group.id, "rewards": rewards}]}
    assert httpx.post(f"{server.url}/rewards", json=report).status_code == 200


def row(group: Group) -> str:
    return f'.row[data-id="{group.id}"]'


def shown_ids(page: Page) -> list[str]:
    ids: list[str] = page.eval_on_selector_all(
        "[role=option]", "rows => rows.map(row => row.dataset.id)"
    )
    return ids


def test_it_shows_checks_curves_groups_and_policies(
    server: Running, page: Page, model: Path
) -> None:
    (group,) = roll(server)
    post_rewards(server, group, [1, 0, 1, 0])
    live = server.client.reload(lazy(sharpened(base_weights(model), 1).tensors))
    page.goto(server.url)
    page.wait_for_selector(row(group))
    page.wait_for_selector('.light[data-light="records"].passed')
    assert page.locator(".light").count() == 3
    assert page.locator(".chart").count() == 7
    page.wait_for_selector('.chart[data-chart="reward"] .plot path', state="attached")
    reward = page.get_attribute('.chart[data-chart="reward"]', "aria-label")
    assert reward is not None
    assert "0.500 now" in reward
    page.wait_for_selector(f'[data-policy="default"] code:has-text("{live.digest}")')
    assert page.locator('[data-policy="default"] tbody tr.live td').first.inner_text() == (
        f"v{live.version}"
    )
    page.click(row(group))
    page.wait_for_selector(".sample")
    texts = page.locator(".sample .text").all_inner_texts()
    assert texts == [sample.text for sample in group.samples]
    assert page.locator(".sample .reward.better").count() == 2


def test_it_follows_what_happens(server: Running, page: Page) -> None:
    (first,) = roll(server)
    page.goto(server.url)
    page.click(row(first))
    page.wait_for_selector(".sample")
    assert page.locator(".sample .reward").count() == 0
    (second,) = roll(server)
    page.wait_for_selector(row(second))
    assert shown_ids(page)[:2] == [second.id, first.id]
    post_rewards(server, first, [1, 1, 1, 0])
    page.wait_for_selector(".sample .reward.worse")
    assert page.locator(".sample .reward.better").count() == 3


def test_a_paused_page_stands_still_until_it_goes_on(server: Running, page: Page) -> None:
    (first,) = roll(server)
    page.goto(server.url)
    page.wait_for_selector(row(first))
    page.click("#pause")
    (second,) = roll(server)
    page.wait_for_timeout(2500)  # more than one turn
    assert page.locator(row(second)).count() == 0
    page.click("#pause")
    page.wait_for_selector(row(second))


def test_running_rollouts_show_their_progress(
    server: Running, whole_server: tuple[Running, ScriptedEngine], page: Page
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    engine = whole_server[1]
    engine.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        try:
            under_way = pool.submit(roll, server, 3)
            page.goto(server.url)
            page.wait_for_selector('[role="progressbar"][aria-valuemax="3"]')
        finally:
            engine.gate.set()
        groups = under_way.result(30)
    page.wait_for_selector(row(groups[2]))
    page.wait_for_selector('[role="progressbar"]', state="detached")


def test_filters_leave_what_matches(
    server: Running, whole_server: tuple[Running, ScriptedEngine], page: Page
) -> None:
    engine = whole_server[1]
    answers = {"0+7=": ["7", "8"], "1+7=": ["9"], "2+7=": ["0123456789" * 5, "3"]}
    engine.script = answers.__getitem__
    varied, equal, cut = roll(server, 3, max_tokens=20)
    post_rewards(server, varied, [1, 0, 1, 0])
    page.goto(server.url)
    page.wait_for_selector(row(cut))

    def only(name: str, value: str, match: Group, *others: Group) -> None:
        page.select_option(f'#filters select[name="{name}"]', value)
        for other in others:
            page.wait_for_selector(row(other), state="detached")
        page.wait_for_selector(row(match))
        page.wait_for_selector("#announcer:has-text('found')", state="attached")
        page.click("#filters button[type=reset]")
        for group in (varied, equal, cut):
            page.wait_for_selector(row(group))

    only("truncated", "true", cut, varied, equal)
    only("equal", "true", equal, varied, cut)
    only("rewards", "mixed", varied, equal, cut)
    page.fill('#filters input[name="version"]', "999999")
    page.wait_for_selector("#empty:visible")
    assert shown_ids(page) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_text_is_only_text(
    server: Running,
    whole_server: tuple[Running, ScriptedEngine],
    page: Page,
    width: int,
) -> None:
    whole_server[1].script = lambda _: [HOSTILE, "4"]
    long = "x" * 2000
    (group,) = server.client.rollout(
        [HOSTILE[:200] + long[:300]], group_size=4, max_tokens=400
    ).groups
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(server.url)
    page.click(row(group))
    page.wait_for_selector(".sample")
    text = page.locator(".sample .text").first.inner_text()
    assert "<script>window.stolen = 1</script>" in text
    assert "onerror='window.stolen = 2'" in text
    assert "&amp;" in text
    for unseen in ("U+001B", "U+202E", "U+202C", "U+200B", "U+E0041", "U+0007"):
        assert unseen in text
    assert not {"\x1b", "\u202e", "\u200b", "\x07"} & set(page.inner_text("body"))
    page.click("#colour")
    page.wait_for_selector(".sample .token")
    assert page.locator("main script, main img, main b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_tokens_are_shaded_and_told_one_by_one(server: Running, page: Page) -> None:
    (group,) = roll(server)
    page.goto(server.url)
    page.click(row(group))
    page.click("#colour")
    card = page.locator(".sample").first
    card.locator(".token").first.wait_for()
    sample = group.samples[0]
    assert card.locator(".token").count() == len(sample.completion_ids)
    card.locator(".text").focus()
    page.keyboard.press("End")
    told = page.inner_text("#readout")
    assert f"id {sample.completion_ids[-1]}," in told
    assert f"{abs(float(sample.logprobs[-1])):.3f}" in told
    page.click("#colour")
    page.wait_for_selector(".sample .token", state="detached")


def test_it_can_be_used_with_the_keyboard_alone(server: Running, page: Page) -> None:
    groups = [roll(server)[0] for _ in range(3)]
    page.goto(server.url)
    page.wait_for_selector(row(groups[2]))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to groups"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "option":
            break
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(f'{row(groups[1])}[aria-selected="true"]')
    page.wait_for_selector(".sample")
    assert page.evaluate("document.activeElement.dataset.id") == groups[1].id
    page.keyboard.press("Home")
    page.wait_for_selector(f'{row(groups[2])}[aria-selected="true"]')
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "detail"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the keyboard is must be seen"


def test_everything_has_a_name_and_the_page_has_landmarks(server: Running, page: Page) -> None:
    (group,) = roll(server)
    page.goto(server.url)
    page.click(row(group))
    page.wait_for_selector(".sample")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, [role=img], svg[role]")]
            .filter(e => e.checkVisibility())
            .filter(e => !e.labels?.length && !e.textContent.trim() && !e.closest("label"))
            .filter(e => !e.getAttribute("aria-label"))
            .map(e => e.outerHTML)"""
    )
    assert nameless == []
    for landmark in ("header.bar", "main", "nav[aria-label]", "[role=status][aria-live=polite]"):
        assert page.locator(landmark).count() == 1
    sections = page.locator("#content > section[aria-labelledby]")
    assert sections.count() == 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(server: Running, page: Page, scheme: Any) -> None:
    (group,) = roll(server)
    post_rewards(server, group, [1, 0, 1, 0])
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    page.click(row(group))
    page.click("#colour")
    page.wait_for_selector(".sample .token")
    faint = page.evaluate(CONTRAST)
    assert faint == []


CONTRAST = """() => {
  const parse = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) {
      layers.push(parse(getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (rgb) => rgb
    .map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const faint = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e instanceof SVGElement) continue;
    const below = ground(e);
    const [a, b] = [light(over(parse(getComputedStyle(e).color), below)), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${e.tagName}.${e.className}`;
    if (ratio < 4.5) faint.push(`${name}: ${ratio.toFixed(2)}, ${e.textContent.slice(0, 30)}`);
  }
  return faint;
}"""


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_screen(server: Running, page: Page, width: int) -> None:
    (group,) = roll(server)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(server.url)
    page.click(row(group))
    page.wait_for_selector(".sample")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_ten_thousand_samples(
    server: Running, whole_server: tuple[Running, ScriptedEngine], page: Page
) -> None:
    numbers = itertools.count()
    whole_server[1].script = lambda _: [f"answer {next(numbers) % 5}" for _ in range(8)]
    groups = [g for _ in range(5) for g in roll(server, 250, group_size=8, max_tokens=16)]
    wide = roll(server, 1, group_size=1000, max_tokens=8)[0]
    page.goto(server.url)
    page.wait_for_selector(row(wide))
    shown = 0
    while (count := page.locator("[role=option]").count()) > shown and groups[
        0
    ].id not in shown_ids(page):
        shown = count
        page.click("#older")
        page.wait_for_selector(f"[role=option]:nth-child({shown + 1})", state="attached")
    assert groups[0].id in shown_ids(page), "the oldest of 10 000 samples cannot be reached"
    page.click(row(wide))
    page.wait_for_selector(".samples > .older")
    assert page.locator(".sample").count() < 100
    page.click(".samples > .older")
    page.wait_for_selector(".sample:nth-child(100)", state="attached")
    page.click(row(groups[0]))
    page.wait_for_selector('.detail h3:has-text("Group")')
    (newest,) = roll(server)
    page.wait_for_selector("#newer:visible")
    page.click("#newer")
    page.wait_for_selector(row(newest))


def test_it_asks_for_a_token_and_keeps_it_out_of_the_address(
    model: Path, tmp_path: Path, page: Page
) -> None:
    callers = ("reader", "reader-token-0123456789", ["rollout"])
    writer = ("writer", "writer-token-0123456789", ["publish:*"])
    file = tokens_file(tmp_path, callers, writer)
    with scripted(model, tmp_path, lambda _: ["7"], token=callers[1], tokens_file=file) as (
        server,
        _,
    ):
        (group,) = roll(server)
        page.goto(server.url)
        page.wait_for_selector("#sign-in:visible")
        assert page.locator("#content").is_hidden()
        page.fill("#token", writer[1])
        page.click("#sign-in button")
        page.wait_for_selector("#sign-in-problem:has-text('lacks the scope')")
        page.fill("#token", callers[1])
        page.keyboard.press("Enter")
        page.wait_for_selector(row(group))
        assert callers[1] not in page.url
        assert page.input_value("#token") == ""
        page.reload()
        page.wait_for_selector(row(group))


def test_it_says_what_to_do_under_a_name_that_the_server_does_not_know(
    server: Running, page: Page
) -> None:
    page.goto(server.url.replace("127.0.0.1", "tito.localhost"))
    page.wait_for_selector("#sign-in-problem:has-text('--allowed-hosts')")


def test_a_page_of_another_site_changes_nothing(server: Running, page: Page) -> None:
    before = server.client.policy("default")
    page.goto(f"{server.url.replace('127.0.0.1', 'localhost')}/healthz")  # any page would do
    request = {"method": "POST", "mode": "no-cors", "body": "x"}
    page.evaluate(
        "([url, request]) => fetch(url, request)", [f"{server.url}/policies/default/reset", request]
    )
    assert server.client.policy("default") == before


def test_it_tells_when_the_engine_is_dead(model: Path, tmp_path: Path, page: Page) -> None:
    with scripted(model, tmp_path, lambda _: ["7"]) as (server, engine):
        (group,) = roll(server)
        page.goto(server.url)
        page.wait_for_selector(row(group))
        engine.failure = "it died"
        page.wait_for_selector("#banner:has-text('the engine')")
        page.wait_for_selector("#server .mark:not(.passed)")
        page.click(row(group))
        page.wait_for_selector(".sample")


def test_it_goes_on_when_the_server_comes_back(server: Running, page: Page) -> None:
    (first,) = roll(server)
    page.goto(server.url)
    page.wait_for_selector(row(first))
    page.context.set_offline(True)
    page.wait_for_selector("#banner:has-text('does not answer')")
    page.context.set_offline(False)
    (second,) = roll(server)
    page.wait_for_selector(row(second))
    page.wait_for_selector("#banner", state="hidden")
