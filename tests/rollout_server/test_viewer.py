"""What the page is told, over HTTP: groups, rewards, checks, figures, and to whom it is told."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_server.prompts import PromptEncoder
from rollout_server.recent import RecentGroups
from rollout_server.viewer.facts import FactBook
from rollout_server.viewer.history import MAX_INTERVALS, History
from rollout_server.viewer.lights import lights
from rollout_server.viewer.tokens import pieces
from shared.errors import InvalidRequest
from shared.feedback import RewardReport
from shared.protocol import Group, Purpose, Rollout, Sample, Span
from shared.requests import RolloutRequest
from tests.rollout_server.engines import Running
from tests.rollout_server.fakes import ask, error_of, idle_app, tokens_file
from tests.rollout_server.support import base_weights, eventually, lazy, sharpened
from tests.rollout_server.viewer_support import HOSTILE, ScriptedEngine, scripted, untrained

ANSWERS = {
    "0+7=": ["7", "8", "seven", "7"],
    "1+7=": ["8"],
    "2+7=": ["a long answer that is cut off", "9"],
    "3+7=": ["caf\u00e9 \U0001f600 \u65e5\u672c", "10"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("models") / "untrained")


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[tuple[Running, ScriptedEngine]]:
    with scripted(model, tmp_path, lambda prompt: ANSWERS.get(prompt, ["7"])) as found:
        yield found


def get(server: Running, path: str, token: str | None = None, **query: Any) -> Any:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    answer = httpx.get(f"{server.url}{path}", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def roll(server: Running, prompts: int = 4, **settings: Any) -> Rollout:
    settings = {"group_size": 4, "max_tokens": 20} | settings
    return server.client.rollout([f"{i}+7=" for i in range(prompts)], **settings)


def post_rewards(server: Running, groups: list[dict[str, Any]], **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/rewards", json={"groups": groups}, **options)


def listed(server: Running, **query: Any) -> list[int]:
    """Indices of the prompts of the groups that match, in order."""
    return sorted(group["group_id"] for group in get(server, "/viewer/groups", **query)["groups"])


# The page itself.


def test_the_page_holds_nothing_inline_and_nothing_from_elsewhere(
    server: tuple[Running, ScriptedEngine],
) -> None:
    url = server[0].url
    page = httpx.get(url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    parts = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
    assert "viewer/page/app.js" in parts
    for part in parts:
        answer = httpx.get(f"{url}/{part}")
        assert answer.status_code == 200, part
        assert answer.headers["content-security-policy"] == policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|//", page.text)


def test_scripts_never_make_markup_of_text(server: tuple[Running, ScriptedEngine]) -> None:
    folder = Path(__file__).parents[2] / "rollout_server" / "viewer" / "page"
    scripts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.js")}
    assert len(scripts) >= 5
    for name, text in scripts.items():
        assert httpx.get(f"{server[0].url}/viewer/page/{name}").text == text
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


@pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e/history.py"])
def test_only_the_pages_own_parts_are_served(
    server: tuple[Running, ScriptedEngine], name: str
) -> None:
    assert httpx.get(f"{server[0].url}/viewer/page/{name}").status_code == 404


# Groups.


def test_groups_appear_as_they_were_answered(server: tuple[Running, ScriptedEngine]) -> None:
    running, _ = server
    rollout = roll(running)
    found = get(running, "/viewer/groups")
    assert found["matching"] == 4
    assert {group["id"] for group in found["groups"]} == {group.id for group in rollout.groups}
    assert [group["seq"] for group in found["groups"]] == [4, 3, 2, 1]
    for group in rollout.groups:
        shown = get(running, f"/viewer/groups/{group.id}")
        assert shown["prompt"] == f"{group.group_id}+7="
        assert [s["text"] for s in shown["samples"]] == [s.text for s in group.samples]
        assert [s["length"] for s in shown["samples"]] == [
            len(s.completion_ids) for s in group.samples
        ]
        means = [float(s.logprobs.mean()) for s in group.samples]
        assert [s["mean_logprob"] for s in shown["samples"]] == pytest.approx(means, abs=1e-6)
        assert shown["distinct"] == len({s.completion_ids.tobytes() for s in group.samples})
        assert shown["truncated"] == sum(s.finish_reason == "length" for s in group.samples)
        assert shown["versions"] == [0, 0]


def test_text_that_nobody_asked_for_is_decoded_when_somebody_looks(
    server: tuple[Running, ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, _ = server
    calls: list[object] = []
    decode = PromptEncoder.decode

    def counted(self: PromptEncoder, completions: Sequence[Sequence[int]]) -> list[str]:
        calls.append(completions)
        return decode(self, completions)

    monkeypatch.setattr(PromptEncoder, "decode", counted)
    rollout = roll(running, text=False)
    assert not calls
    first = rollout.groups[0]
    texts = [s["text"] for s in get(running, f"/viewer/groups/{first.id}")["samples"]]
    assert texts == ANSWERS["0+7="]
    assert calls


def test_tokens_have_text_ids_and_logprobs(server: tuple[Running, ScriptedEngine]) -> None:
    running, engine = server
    rollout = roll(running, max_tokens=64)
    for group in rollout.groups:
        for index, sample in enumerate(group.samples):
            path = f"/viewer/groups/{group.id}/samples/{index}/tokens"
            shown = get(running, path)
            assert shown["next"] is None
            ids = [i for token in shown["tokens"] for i in token["ids"]]
            assert ids == sample.completion_ids.tolist()
            text = "".join(token["text"] for token in shown["tokens"])
            assert text == engine.tokenizer.decode(sample.completion_ids)
            total = sum(token["logprob"] for token in shown["tokens"])
            assert total == pytest.approx(float(sample.logprobs.sum()), rel=1e-5)
            half = get(running, path, start=1)
            assert half["tokens"][0]["at"] == 1
    wide = get(running, f"/viewer/groups/{rollout.groups[3].id}/samples/0/tokens")["tokens"]
    assert {"\u00e9", "\U0001f600", "\u65e5"} <= {token["text"] for token in wide}


def test_a_character_of_many_tokens_is_one_piece_and_broken_ones_end() -> None:
    raw = "a\u65e5b".encode() + b"\xff" * 9

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    found = pieces(list(raw), decode)
    assert [piece.text for piece in found[:3]] == ["a", "\u65e5", "b"]
    assert [(piece.start, piece.end) for piece in found[:3]] == [(0, 1), (1, 4), (4, 5)]
    assert [piece.end for piece in found[3:]] == [13, 14]


def test_filters(server: tuple[Running, ScriptedEngine]) -> None:
    running, _ = server
    rollout = roll(running)
    by_prompt = {group.group_id: group for group in rollout.groups}
    assert listed(running, truncated=True) == [2]
    assert listed(running, truncated=False) == [0, 1, 3]
    assert listed(running, equal=True) == [1]
    assert listed(running, equal=True, truncated=True) == []
    post_rewards(running, [
        {"id": by_prompt[0].id, "rewards": [1, 0, 1, 0]},
        {"id": by_prompt[1].id, "rewards": [1, 1, 1, None]},
    ])  # fmt: skip
    assert listed(running, rewards="mixed") == [0]
    assert listed(running, rewards="flat") == [1]
    assert listed(running, rewards="none") == [2, 3]
    assert listed(running, version=0) == [0, 1, 2, 3]
    assert listed(running, version=1) == []
    assert listed(running, policy="default") == [0, 1, 2, 3]
    assert listed(running, policy="other") == []
    assert listed(running, purpose="eval") == []
    page = get(running, "/viewer/groups", limit=2)
    assert [group["seq"] for group in page["groups"]] == [4, 3]
    assert page["matching"] == 4
    older = get(running, "/viewer/groups", limit=2, before=3)
    assert [group["seq"] for group in older["groups"]] == [2, 1]


@pytest.mark.parametrize(
    ("query", "where"),
    [({"limit": 0}, "limit"), ({"rewards": "good"}, "rewards"), ({"colour": 1}, "colour")],
)
def test_a_query_that_means_nothing_is_refused(
    server: tuple[Running, ScriptedEngine], query: dict[str, Any], where: str
) -> None:
    answer = httpx.get(f"{server[0].url}/viewer/groups", params=query)
    assert answer.status_code == 422
    assert error_of(answer)["problems"][0]["where"] == where


def test_what_is_not_there_is_not_found(server: tuple[Running, ScriptedEngine]) -> None:
    running, _ = server
    known = roll(running, 1).groups[0].id
    for path in ("0" * 16, f"{'0' * 16}/samples/0/tokens", f"{known}/samples/4/tokens"):
        assert httpx.get(f"{running.url}/viewer/groups/{path}").status_code == 404
    bad = httpx.get(f"{running.url}/viewer/groups/{known}/samples/-1/tokens")
    assert bad.status_code == 422


def test_hostile_text_comes_as_data(server: tuple[Running, ScriptedEngine]) -> None:
    running, engine = server
    engine.script = lambda _: [HOSTILE]
    group = roll(running, 1, max_tokens=400).groups[0]
    answer = httpx.get(f"{running.url}/viewer/groups/{group.id}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["samples"][0]["text"] == HOSTILE


# Rewards.


def test_rewards_are_shown_beside_their_samples(server: tuple[Running, ScriptedEngine]) -> None:
    running, _ = server
    group = roll(running, 1).groups[0]
    parts = [{"format": 1.0, "answer": float(i % 2)} for i in range(4)]
    told = {"id": group.id, "rewards": [1.0, 0.0, None, 0.5], "components": parts}
    answer = post_rewards(running, [told, {"id": "0" * 16, "rewards": [1.0]}])
    assert answer.json() == {"noted": 1, "forgotten": 1}
    shown = get(running, f"/viewer/groups/{group.id}")
    assert [s["reward"] for s in shown["samples"]] == [1.0, 0.0, None, 0.5]
    assert [s["components"] for s in shown["samples"]] == parts
    spread = float(np.std([1.0, 0.0, 0.5]))
    assert shown["rewards"] == pytest.approx(
        {"mean": 0.5, "spread": spread, "lowest": 0.0, "highest": 1.0}
    )
    post_rewards(running, [{"id": group.id, "rewards": [0.0] * 4}])
    assert get(running, f"/viewer/groups/{group.id}")["rewards"]["mean"] == 0.0
    points = get(running, "/viewer/history")["points"]
    rewards = [point["reward"] for point in points if point["reward"] is not None]
    assert rewards == [0.5], "a second verdict counted in the curve"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"rewards": [1.0]}, "groups[0].rewards"),
        ({"rewards": [1.0, 0.0, "x", 1.0]}, "groups[0].rewards[2]"),
        ({"components": [{}]}, "groups[0].components"),
        ({"colour": "red"}, "groups[0].colour"),
    ],
)
def test_rewards_that_do_not_fit_are_refused_whole(
    server: tuple[Running, ScriptedEngine], changes: dict[str, Any], where: str
) -> None:
    running, _ = server
    first, second = roll(running, 2).groups
    told = {"id": first.id, "rewards": [1.0, 0.0, 1.0, 1.0]} | changes
    answer = post_rewards(running, [told, {"id": second.id, "rewards": [1.0] * 4}])
    assert answer.status_code == 422
    assert error_of(answer)["problems"][0]["where"] == where
    assert get(running, f"/viewer/groups/{second.id}")["rewards"] is None


# Bounds.


def sample(ids: Sequence[int] = (5, 6), **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "group_id": 0,
        "prompt_ids": np.array([1], np.int32),
        "completion_ids": np.array(ids, np.int32),
        "logprobs": np.full(len(ids), -0.5, np.float32),
        "finish_reason": "stop",
        "version": 0,
        "digest": "d" * 32,
        "spans": (Span(0, "d" * 32, 0, len(ids)),),
    }
    return Sample(**(fields | changes))


def kept(recent: RecentGroups, *groups: Sequence[Sample], version: int = 0, **asked: Any) -> None:
    """Finish groups as one rollout."""
    prompts = [[1]] * len(groups)
    request = RolloutRequest(prompts=prompts, group_size=len(groups[0]), **asked)
    with recent.rollout("me", request, prompts, lambda: version) as rollout:
        for index, samples in enumerate(groups):
            name = f"{recent.seq:016x}"
            rollout.finished(Group(index, samples[0].prompt_ids, tuple(samples), name))


def test_the_oldest_groups_go_when_there_are_too_many() -> None:
    recent = RecentGroups(max_groups=3, max_bytes=1 << 20)
    kept(recent, *[[sample([i, i])] for i in range(5)])
    assert [group.group.samples[0].completion_ids[0] for group in recent.newest_first()] == [
        4,
        3,
        2,
    ]
    assert recent.size == sum(group.size for group in recent.newest_first())
    assert recent.get(f"{0:016x}") is None


def test_memory_is_bounded_whatever_comes() -> None:
    recent = RecentGroups(max_groups=1000, max_bytes=100_000)
    for length in (10, 1000, 5000, 3, 20_000, 100):
        kept(recent, *[[sample([1] * length, text="x" * length)] for _ in range(9)])
        assert recent.size <= 100_000
        assert recent.size == sum(group.size for group in recent.newest_first())
    assert len(recent) >= 9, "what is small again fits again"
    parts = [{f"part {i}": 1.0 for i in range(16)}]
    rewards = [
        {"id": group.group.id, "rewards": [1.0], "components": parts}
        for group in recent.newest_first()
    ]
    before = recent.size
    recent.note_rewards(RewardReport.model_validate({"groups": rewards}), None)
    assert before < recent.size <= 100_000


def test_a_group_larger_than_all_memory_is_not_kept() -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1000)
    kept(recent, [sample([1] * 1000)])
    assert (len(recent), recent.size, recent.seq) == (0, 0, 1)


def test_rewards_of_another_number_of_samples_change_nothing() -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    kept(recent, [sample()], [sample()])
    names = [group.group.id for group in recent.newest_first()]
    report = {"groups": [{"id": names[0], "rewards": [1.0]}, {"id": names[1], "rewards": [1, 2]}]}
    with pytest.raises(InvalidRequest, match="a reward for each sample"):
        recent.note_rewards(RewardReport.model_validate(report), None)
    assert all(group.rewards is None for group in recent.newest_first())


def test_staleness_counts_versions_published_meanwhile() -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    kept(recent, [sample(version=3), sample(version=5)], version=5)
    assert recent.newest_first()[0].staleness == 2


def test_history_grows_coarser_but_forgets_nothing() -> None:
    history = History(1000.0)
    for second in range(5000):
        history.add_group(
            1000.0 + second, [sample()], Purpose.TRAIN, staleness=second == 17, queued=second
        )
    document = history.document()
    points = document["points"]
    assert len(points) <= MAX_INTERVALS
    assert document["width"] == 32.0
    assert sum(point["groups"] for point in points) == 5000
    assert sum(p["tokens_per_second"] * document["width"] for p in points) == 10_000
    assert {point["length"] for point in points} == {2.0}
    assert points[0]["staleness"] == 1
    assert points[-1]["queued"] == 4999
    history.add_queue(900.0, 3)  # the clock was set back
    assert history.document()["points"][:-1] == points[:-1]


def test_evaluations_are_in_no_curve_of_training() -> None:
    history = History(0.0)
    history.add_group(1.0, [sample(finish_reason="length")], Purpose.EVAL, staleness=0, queued=0)
    (point,) = history.document()["points"]
    assert (point["truncated"], point["length"], point["tokens_per_second"]) == (None, None, 1.0)


# Lights.


def verdicts(recent: RecentGroups) -> dict[str, tuple[str, float | None]]:
    found = lights(recent.newest_first(), FactBook(vocab_size=100))
    return {light.name: (light.state, light.share) for light in found}


def test_lights_wait_until_there_is_training() -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    kept(recent, [sample()], purpose="eval", temperature=0.0)
    assert set(verdicts(recent).values()) == {("waiting", None)}


def test_lights_pass_on_a_good_rollout() -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    kept(recent, [sample([5]), sample([6])])
    assert verdicts(recent) == {
        "records": ("passed", 1.0), "variety": ("passed", 1.0), "room": ("passed", 0.0),
    }  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        {"logprobs": np.array([-0.5, np.nan], np.float32)},
        {"completion_ids": np.array([5, 100])},
        {"logprobs": np.array([-0.5])},
    ],
)
def test_a_damaged_record_fails_the_first_light(damage: dict[str, Any]) -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    kept(recent, [sample([5]), sample(**damage)])
    assert verdicts(recent)["records"] == ("failed", 0.5)


def test_equal_answers_fail_the_second_light() -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    kept(recent, [sample(), sample()], [sample(), sample()], [sample([5]), sample([6])])
    assert verdicts(recent)["variety"] == ("failed", 1 / 3)


@pytest.mark.parametrize(("cut", "state"), [(3, "passed"), (4, "failed")])
def test_the_third_light_turns_at_fifteen_per_cent(cut: int, state: str) -> None:
    recent = RecentGroups(max_groups=10, max_bytes=1 << 20)
    reasons = ["length"] * cut + ["stop"] * (20 - cut)
    kept(recent, [sample([5 + i], finish_reason=r) for i, r in enumerate(reasons)])
    assert verdicts(recent)["room"] == (state, cut / 20)


# State.


def test_state_tells_what_runs(server: tuple[Running, ScriptedEngine]) -> None:
    running, engine = server
    engine.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(roll, running, 3)
        eventually(lambda: get(running, "/viewer/state").get("running"))
        (shown,) = get(running, "/viewer/state")["running"]
        assert (shown["done"], shown["total"], shown["group_size"]) == (0, 3, 4)
        assert shown["prompt"] == "0+7="
        engine.gate.set()
        under_way.result(30)
    state = get(running, "/viewer/state")
    assert state["running"] == []
    assert state["engine"] == {"state": "ready", "reason": ""}
    assert (state["seq"], state["kept"]["groups"]) == (3, 3)


def test_publishes_and_leases_are_told(server: tuple[Running, ScriptedEngine], model: Path) -> None:
    running, _ = server
    with running.client.lease(holder="run-7") as lease:
        weights = sharpened(base_weights(model), 1)
        live = running.client.reload(lazy(weights.tensors), fence=lease.fence)
        (policy,) = get(running, "/viewer/state")["policies"]
        assert (policy["version"], policy["digest"]) == (live.version, live.digest)
        assert policy["lease"]["holder"] == "run-7"
    (published,) = get(running, "/viewer/history")["publishes"]
    assert (published["version"], published["state"]) == (live.version, "live")
    assert published["seconds"] == pytest.approx(sum(live.timings.values()))


def test_state_answers_while_the_engine_starts() -> None:
    answer = ask(idle_app(), "GET", "/viewer/state").json()
    assert answer["engine"]["state"] == "starting"
    assert "policies" not in answer


# Access.


def test_the_page_is_open_and_what_it_shows_is_not(model: Path, tmp_path: Path) -> None:
    callers = [
        ("reader", "reader-token-0123456789", ["rollout"]),
        ("other", "other-token-0123456789", ["rollout"]),
        ("boss", "boss-token-01234567890", ["admin"]),
        ("writer", "writer-token-0123456789", ["publish:*"]),
    ]
    tokens = {name: token for name, token, _ in callers}
    file = tokens_file(tmp_path, *callers)
    auth = {name: {"authorization": f"Bearer {token}"} for name, token in tokens.items()}
    with (
        scripted(model, tmp_path, lambda _: ["7"], token=tokens["boss"], tokens_file=file) as (
            running,
            _,
        ),
        httpx.Client(base_url=running.url, headers={"accept": "application/json"}) as http,
    ):

        def statuses(method: str, path: str, **request: Any) -> dict[str, int]:
            answers = {
                who: http.request(method, path, headers=auth[who], **request) for who in auth
            }
            return {who: answer.status_code for who, answer in answers.items()}

        assert http.get("/").status_code == http.get("/viewer/page/app.js").status_code == 200
        body = {"prompts": ["1+1="], "group_size": 2, "max_tokens": 4}
        rolled = http.post("/rollout", json=body, headers=auth["reader"])
        name = rolled.json()["groups"][0]["id"]
        group = f"/viewer/groups/{name}"
        shown = ("/viewer/state", "/viewer/history", "/viewer/groups", group)
        for path in (*shown, f"{group}/samples/0/tokens"):
            allowed = {"reader": 200, "other": 200, "boss": 200, "writer": 403}
            assert statuses("GET", path) == allowed
            assert http.get(path).status_code == 401
        report = {"groups": [{"id": name, "rewards": [1.0, 0.0]}]}
        allowed = {"reader": 200, "other": 403, "boss": 403, "writer": 403}
        assert statuses("POST", "/rewards", json=report) == allowed
        assert http.post("/rewards", json=report).status_code == 401


def test_without_the_viewer_there_is_none_of_it(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, lambda _: ["7"], viewer=False) as (running, _):
        assert roll(running, 2).groups[0].id
        for path in ("/", "/viewer/page/app.js", "/viewer/state", "/viewer/groups"):
            assert httpx.get(f"{running.url}{path}").status_code == 404
        assert post_rewards(running, [{"id": "0" * 16, "rewards": [1.0]}]).status_code == 404


# The engine itself.


def test_a_real_servers_groups_can_be_looked_at(server_url: str) -> None:
    from shared.client import RolloutClient

    with RolloutClient(server_url, timeout=120) as client:
        rollout = client.rollout(["12+7=", "3+4="], group_size=3, max_tokens=12)
        running = Running(server_url, client)
        for group in rollout.groups:
            shown = get(running, f"/viewer/groups/{group.id}")
            assert [s["text"] for s in shown["samples"]] == [s.text for s in group.samples]
            tokens = get(running, f"/viewer/groups/{group.id}/samples/2/tokens")["tokens"]
            ids = [i for token in tokens for i in token["ids"]]
            assert ids == group.samples[2].completion_ids.tolist()
            logprobs = sum(token["logprob"] for token in tokens)
            assert logprobs == pytest.approx(float(group.samples[2].logprobs.sum()), rel=1e-5)
        assert get(running, "/viewer/state")["lights"][0]["state"] == "passed"
