"""The pool against servers that are whole but for the engine, on real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.client import RolloutClient
from shared.errors import Conflict, EngineFailure, ServerUnreachable
from shared.tokens import tokenizer_fingerprint
from tests.rollout_server.support import eventually
from tests.trainer.fake_servers import MORE_THAN_A_CLIENT_TRIES, FakeServer, fake_servers
from trainer import publish
from trainer.background import in_background
from trainer.errors import MismatchError
from trainer.evaluate import of_policy
from trainer.published import Published
from trainer.server import Server
from trainer.servers import ServerPool


@pytest.fixture(scope="module")
def servers(
    untrained_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[FakeServer]]:
    with fake_servers(untrained_model, tmp_path_factory.mktemp("staging"), 2) as servers:
        yield servers


@pytest.fixture
def model(untrained_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(untrained_model)


@pytest.fixture(scope="module")
def fingerprint(untrained_model: Path) -> str:
    return tokenizer_fingerprint(AutoTokenizer.from_pretrained(untrained_model))


Pool = contextlib.AbstractContextManager[ServerPool]


@pytest.fixture
def pool_of(model: Any, fingerprint: str) -> Any:
    def build(urls: list[str], **changes: Any) -> Pool:
        options: dict[str, Any] = {
            "holder": "run",
            "fingerprint": fingerprint,
            "patience": 30.0,
        } | changes
        return ServerPool(
            [Server(url, RolloutClient(url, timeout=60), RolloutClient(url)) for url in urls],
            lambda client, fence: publish.publish(client, model, torch.bfloat16, fence=fence),
            Published(),
            **options,
        )

    return build


def change(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.add_(0.125)


def digests(servers: list[FakeServer]) -> list[str]:
    found = []
    for server in servers:
        with RolloutClient(server.url) as client:
            found.append(client.info().digest)
    return found


def runs(server: FakeServer, requests: int) -> bool:
    return server.engine.running == requests


@contextlib.contextmanager
def restarted_unseen(pool_of: Any, server: FakeServer, step: int) -> Iterator[ServerPool]:
    """A pool that does not know that its server came back, with the weights of its beginning."""
    with pool_of([server.url]) as pool:
        pool.publish(step)
        server.kill()
        server.start()
        yield pool


def join_all(pool: ServerPool) -> None:
    def all_current() -> bool:
        pool.ensure()
        return pool.troubles() is None

    eventually(all_current, 60)


def test_a_publish_reaches_all_and_a_step_is_known_by_its_digest(
    servers: list[FakeServer], pool_of: Any, model: Any
) -> None:
    with pool_of([server.url for server in servers]) as pool:
        pool.publish(3)
        assert pool.troubles() is None
        first = digests(servers)
        change(model)
        pool.publish(4)
        second = digests(servers)
        assert pool.latest.digest == second[0]
        old, new = (pool.published.of(pool.rollout([[5]], group_size=1).samples), second[0])
        assert old == {new: 4}
        pool.keep(5)
        assert pool.published.of(pool.rollout([[5]], group_size=1).samples) == {new: 5}
    assert first[0] == first[1] != second[0] == second[1]
    # The leases are free again.
    for server in servers:
        with RolloutClient(server.url) as client, client.lease(holder="somebody else"):
            pass


def test_work_goes_to_the_least_loaded(servers: list[FakeServer], pool_of: Any) -> None:
    with pool_of([server.url for server in servers]) as pool:
        pool.publish(0)
        join_all(pool)
        for server in servers:
            server.engine.asked.clear()
            server.engine.gate.clear()
        waiting = [in_background(lambda: pool.rollout([[1], [2], [3]], group_size=2), "big")]
        eventually(lambda: servers[0].engine.running == 3)
        # Six samples weigh more than two or four, whatever the number of requests.
        for expected in (1, 2):
            waiting.append(in_background(lambda: pool.rollout([[4]], group_size=2), "small"))
            eventually(partial(runs, servers[1], expected))
        for server in servers:
            server.engine.gate.set()
        assert [len(future.result(30).groups) for future in waiting] == [3, 1, 1]
        assert [len(server.engine.asked) for server in servers] == [3, 2]


def test_idle_time_is_that_without_work(servers: list[FakeServer], pool_of: Any) -> None:
    with pool_of([servers[0].url]) as pool:
        pool.publish(0)
        pool.idle_seconds()
        servers[0].engine.gate.clear()
        busy = in_background(lambda: pool.rollout([[1]], group_size=1), "busy")
        eventually(lambda: servers[0].engine.running == 1)
        pool.idle_seconds()
        assert pool.idle_seconds() == 0.0
        servers[0].engine.gate.set()
        busy.result(30)
        eventually(lambda: pool.idle_seconds() > 0)


def test_a_dead_server_is_left_out_and_rejoins_with_the_current_weights(
    servers: list[FakeServer], pool_of: Any, model: Any
) -> None:
    alive, mortal = servers
    with pool_of([mortal.url, alive.url]) as pool:
        pool.publish(0)
        join_all(pool)
        # It dies with a request under way, which the other one then answers.
        mortal.engine.gate.clear()
        answer = in_background(lambda: pool.rollout([[1]], group_size=1), "first")
        eventually(lambda: mortal.engine.running == 1)
        mortal.kill()
        assert len(answer.result(60).groups) == 1
        assert mortal.url in (pool.troubles() or "")
        change(model)
        pool.publish(1)
        assert "1 of 2 not current" in (pool.troubles() or "")
        assert [server.url for server in pool.current] == [alive.url]
        # It comes back with the weights of its beginning, and must not be asked for those.
        mortal.start()
        change(model)
        join_all(pool)
        assert digests([mortal]) == [pool.latest.digest]
        mortal.engine.asked.clear()
        samples = pool.rollout([[1]], group_size=1).samples
        assert mortal.engine.asked
        assert pool.published.staleness(samples[0], 2) == 0


def test_a_server_that_restarts_unseen_is_not_asked_for_what_it_served_before(
    servers: list[FakeServer], pool_of: Any
) -> None:
    with restarted_unseen(pool_of, servers[0], 7) as pool:
        # The request's precondition is what stops it.
        answer = in_background(lambda: pool.rollout([[1]], group_size=1), "first")

        def answered() -> bool:
            pool.ensure()
            return answer.done()

        eventually(answered, 60)
        assert pool.published.staleness(answer.result().samples[0], 8) == 0


def test_a_server_that_cannot_load_is_set_aside_and_told(
    servers: list[FakeServer], pool_of: Any, model: Any
) -> None:
    lags = servers[1]
    with pool_of([server.url for server in servers]) as pool:
        pool.publish(0)
        join_all(pool)
        change(model)
        # The load fails, and so do those that should bring it back, until it can be restored.
        lags.engine.load_errors = [EngineFailure("no room")]
        pool.publish(1)
        assert "no room" in (pool.troubles() or "")
        lags.engine.asked.clear()
        for _ in range(4):
            pool.rollout([[1]], group_size=1)
        assert not lags.engine.asked
        join_all(pool)
        assert digests(servers) == [pool.latest.digest] * 2


def test_no_server_at_all(pool_of: Any) -> None:
    with (
        pool_of(["http://127.0.0.1:9"], patience=0.5) as pool,
        pytest.raises(ServerUnreachable, match=r"no answer from http://127\.0\.0\.1:9"),
    ):
        pool.publish(0)


def test_a_server_of_somebody_elses_is_refused(servers: list[FakeServer], pool_of: Any) -> None:
    with (
        RolloutClient(servers[0].url) as client,
        client.lease(holder="the other run"),
        pool_of([servers[0].url]) as pool,
        pytest.raises(Conflict, match="the other run"),
    ):
        pool.publish(0)


def test_a_server_of_another_tokenizer_is_refused(servers: list[FakeServer], pool_of: Any) -> None:
    with (
        pool_of([servers[0].url], fingerprint="another") as pool,
        pytest.raises(MismatchError, match="tokenizer"),
    ):
        pool.publish(0)


def test_a_request_that_no_server_can_serve_is_raised(
    servers: list[FakeServer], pool_of: Any
) -> None:
    servers[0].engine.poison, servers[0].engine.generate_error = 9, EngineFailure("bad prompt")
    with pool_of([servers[0].url]) as pool:
        pool.publish(0)
        with pytest.raises(EngineFailure, match="bad prompt"):
            pool.rollout([[9]], group_size=1)
        assert pool.troubles() is None
    servers[0].engine.poison = None


def test_a_server_that_went_back_to_weights_of_nobody_gets_the_runs_again(
    servers: list[FakeServer], pool_of: Any, model: Any
) -> None:
    server = servers[0]
    with RolloutClient(server.url) as client:
        client.reload(publish.checkpoint_tensors(model, torch.bfloat16))
    change(model)
    with pool_of([server.url]) as pool:
        pool.publish(1)
        server.engine.lag = 1  # as after a death before there was a copy of what was published
        rolling = in_background(partial(pool.rollout, [[5]], group_size=1), "test")
        eventually(lambda: pool.troubles() is not None)
        assert "went back" in pool.troubles()
        server.engine.lag = 0
        join_all(pool)
        (sample,) = rolling.result(60).samples
        assert pool.published.knows(sample.digest)
        assert pool.published.staleness(sample, 2) == 0


ASKED = {"group_size": 1, "purpose": "eval"}


def test_a_server_that_dies_in_an_evaluation_is_left_out(
    servers: list[FakeServer], pool_of: Any
) -> None:
    mortal, alive = servers
    with pool_of([mortal.url, alive.url]) as pool:
        pool.publish(3)
        join_all(pool)
        mortal.engine.gate.clear()
        alive.engine.gate.clear()

        def fail() -> None:
            eventually(lambda: mortal.engine.running + alive.engine.running == 1)
            asked, other = (mortal, alive) if mortal.engine.running else (alive, mortal)
            asked.kill()
            other.engine.gate.set()
            asked.start()

        failing = in_background(fail, "test")
        (sample,) = of_policy(pool, 3, [[5]], **ASKED).samples
        failing.result(60)
        assert pool.published.staleness(sample, 4) == 0
        join_all(pool)


def test_a_server_that_restarted_is_evaluated_with_the_weights_of_the_step(
    servers: list[FakeServer], pool_of: Any
) -> None:
    with restarted_unseen(pool_of, servers[0], 3) as pool:
        (sample,) = of_policy(pool, 3, [[5]], **ASKED).samples
        assert pool.published.staleness(sample, 4) == 0


def test_an_evaluation_waits_for_room_on_a_busy_server(
    servers: list[FakeServer], pool_of: Any
) -> None:
    server = servers[0]
    with pool_of([server.url]) as pool:
        pool.publish(3)
        server.engine.busy = MORE_THAN_A_CLIENT_TRIES
        assert of_policy(pool, 3, [[5]], **ASKED).samples
        assert server.engine.busy == 0
        assert pool.troubles() is None


def test_older_weights_of_the_run_are_not_taken_for_those_of_the_step(
    servers: list[FakeServer], pool_of: Any, model: Any
) -> None:
    """The training of later steps may have them; an evaluation says that it is of this one."""
    server = servers[0]
    with pool_of([server.url]) as pool:
        pool.publish(1)
        change(model)
        pool.publish(2)
        server.engine.lag = 1
        with pytest.raises(MismatchError, match="older ones have answered"):
            of_policy(pool, 2, [[5]], **ASKED)
        server.engine.lag = 0
        assert of_policy(pool, 2, [[5]], **ASKED).samples
