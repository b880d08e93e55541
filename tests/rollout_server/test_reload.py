"""New weights in a real engine: what is accepted, what is refused, and which tokens they made."""

from __future__ import annotations

import asyncio
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import safetensors.torch
import torch

from shared.client import AsyncRolloutClient, RolloutClient
from shared.errors import Forbidden, InvalidRequest, MalformedBody, TitoError, WeightsRejected
from shared.protocol import DIGEST_HEADER, DIGEST_TRAILER, SAFETENSORS, ReloadResult, Sample
from shared.weights import TRAILER_BYTES
from tests.rollout_server.support import (
    BF16_MEAN_NATS,
    EMBEDDING,
    HEAD,
    Tensors,
    Weights,
    assert_agree,
    distance,
    eventually,
    lazy,
    make_live,
    post,
    upload_of,
)

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 4
NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def greedy(client: RolloutClient, prompt: list[int] = PROMPT, length: int = 10) -> list[int]:
    rollout = client.rollout(
        [prompt], group_size=1, max_tokens=length, temperature=0, purpose="eval", ignore_eos=True
    )
    return [int(token) for token in rollout.samples[0].completion_ids]


def send(url: str, raw: Any, digest: str | None = DIGEST_TRAILER, **headers: str) -> httpx.Response:
    """An upload of any bytes at all."""
    announced = {} if digest is None else {DIGEST_HEADER: digest}
    return post(
        url, raw=raw, path="/reload", content_type=SAFETENSORS, headers={**announced, **headers}
    )


@pytest.fixture
def unchanged(client: RolloutClient, live: Weights) -> Iterator[None]:
    """The test must leave version, digest and greedy answers as they were."""
    info, answer = client.info(), greedy(client)
    yield
    assert client.info() == info
    assert greedy(client) == answer == live.greedy(PROMPT, 10)


@pytest.mark.usefixtures("live")
def test_a_stream_becomes_the_next_version(client: RolloutClient, second: Weights) -> None:
    version = client.info().version
    result = client.reload(lazy(second.tensors))
    assert isinstance(result, ReloadResult)
    assert (result.version, result.digest) == (version + 1, second.digest)
    assert set(result.timings) >= {"upload", "verify", "pause", "load", "resume"}
    assert all(0 <= seconds < 30 for seconds in result.timings.values())
    info = client.info()
    assert (info.version, info.digest) == (version + 1, second.digest)


def test_the_same_prompt_gets_the_new_weights_answer(
    client: RolloutClient, first: Weights, second: Weights
) -> None:
    # One prompt throughout: a prefix cache that outlived its weights would be hit here.
    make_live(client, second)
    for weights in (first, second, first):
        client.reload(lazy(weights.tensors))
        assert [greedy(client) for _ in range(2)] == [weights.greedy(PROMPT, 10)] * 2
    assert first.greedy(PROMPT, 10) != second.greedy(PROMPT, 10)


def test_a_long_shared_prefix_is_computed_anew(
    client: RolloutClient, first: Weights, second: Weights
) -> None:
    prompt = [int(token) for token in np.random.default_rng(0).integers(1, 250, 600)]
    for weights in (first, second):
        make_live(client, weights)
        for _ in range(2):
            sample = client.rollout([prompt], group_size=1, max_tokens=20).samples[0]
            expected = weights.logprobs(prompt, sample.completion_ids.tolist())
            assert_agree(sample.logprobs, expected)


def test_every_tensor_is_replaced(client: RolloutClient, first: Weights, second: Weights) -> None:
    make_live(client, first)
    make_live(client, second)
    rollout = client.rollout(
        [PROMPT, [1], [200] * 50], group_size=2, max_tokens=40, ignore_eos=True
    )
    for sample in rollout.samples:
        ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
        assert_agree(sample.logprobs, second.logprobs(*ids))
        assert distance(sample.logprobs, first.logprobs(*ids)) > 10 * BF16_MEAN_NATS


def test_a_reload_in_the_middle_of_long_samples(
    client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    old = client.reload(lazy(first.tensors))
    samples, new = reload_during_rollout(client, server_url, second)
    assert new.version == old.version + 1
    digests = {old.version: first.digest, new.version: second.digest}
    mixed = [sample for sample in samples if len(sample.spans) > 1]
    assert mixed, "the reload fell outside every sample"
    for sample in samples:
        assert_tiles(sample)
        assert [digests[span.version] for span in sample.spans] == [s.digest for s in sample.spans]
        assert_made_by(sample, {old.version: first, new.version: second})
    for sample in mixed:
        assert [span.version for span in sample.spans] == [old.version, new.version]
        assert (sample.version, sample.digest) == (old.version, first.digest)


def reload_during_rollout(
    client: RolloutClient, url: str, weights: Weights
) -> tuple[list[Sample], ReloadResult]:
    """Samples of a rollout, and the publish that happened while they were generated."""
    samples: list[Sample] = []

    def roll() -> None:
        with RolloutClient(url) as other:
            prompts = [[5, 6, 7], [9] * 20, [40, 41]]
            rollout = other.rollout(prompts, group_size=2, max_tokens=400, ignore_eos=True)
            samples.extend(rollout.samples)

    thread = threading.Thread(target=roll)
    thread.start()
    time.sleep(0.6)
    result = client.reload(lazy(weights.tensors))
    thread.join(120)
    assert len(samples) == 6
    return samples, result


def assert_tiles(sample: Sample) -> None:
    """Spans lie end to end, from the first token to the last, none of them empty."""
    assert sample.spans[0].start == 0
    assert sample.spans[-1].end == len(sample.completion_ids) == len(sample.logprobs)
    assert all(span.start < span.end for span in sample.spans)
    for before, after in zip(sample.spans, sample.spans[1:], strict=False):
        assert before.end == after.start
        assert before.version < after.version


def assert_made_by(sample: Sample, weights: dict[int, Weights]) -> None:
    """Each token has the log-probability that the weights named by its span give it."""
    ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
    expected = {version: item.logprobs(*ids) for version, item in weights.items()}
    for span in sample.spans:
        made = slice(span.start, span.end)
        assert_agree(sample.logprobs[made], expected[span.version][made])
        for version in set(weights) - {span.version}:
            if span.end - span.start >= 20:
                off = distance(sample.logprobs[made], expected[version][made])
                assert off > 5 * BF16_MEAN_NATS


def test_rollouts_through_several_reloads_lose_nothing(
    client: RolloutClient, server_url: str, first: Weights, second: Weights
) -> None:
    start = client.info().version
    published = {start: {client.info().digest}}

    async def publish(policy: AsyncRolloutClient, done: asyncio.Event) -> None:
        for weights in (first, second, first, second, first):
            result = await policy.reload(lazy(weights.tensors))
            published.setdefault(result.version, set()).add(weights.digest)
            await asyncio.sleep(0.1)
        done.set()

    async def collect() -> list[tuple[int, Sample]]:
        done = asyncio.Event()
        found: list[tuple[int, Sample]] = []
        async with AsyncRolloutClient(server_url, timeout=120) as policy:

            async def work(token: int) -> None:
                rounds = 0
                while not done.is_set() or not rounds:
                    rollout = await policy.rollout(
                        [[token, 5], [token, 6]], group_size=2, max_tokens=60, ignore_eos=True
                    )
                    assert [len(group.samples) for group in rollout.groups] == [2, 2]
                    found.extend((token, sample) for sample in rollout.samples)
                    rounds += 1

            await asyncio.gather(publish(policy, done), *(work(token) for token in range(12)))
        return found

    samples = asyncio.run(collect())
    assert sorted(published) == list(range(start, start + 6))
    weights = {digest: item for item in (first, second) for digest in [item.digest]}
    for token, sample in samples:
        assert sample.prompt_ids.tolist() == [token, 5 + sample.group_id]
        assert len(sample.completion_ids) == 60
        assert_tiles(sample)
        for span in sample.spans:
            assert published[span.version] == {span.digest}
    for _, sample in samples[:: max(1, len(samples) // 12)]:
        if all(span.digest in weights for span in sample.spans):
            assert_made_by_digest(sample, weights)


def assert_made_by_digest(sample: Sample, weights: dict[str, Weights]) -> None:
    ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
    for span in sample.spans:
        made = slice(span.start, span.end)
        expected = weights[span.digest].logprobs(*ids)[made]
        assert np.abs(sample.logprobs[made] - expected).max() < 10 * BF16_MEAN_NATS


def wide(tensors: Tensors) -> Tensors:
    return {name: tensor.float() for name, tensor in tensors.items()}


def with_head(tensors: Tensors) -> Tensors:
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def backwards(tensors: Tensors) -> Tensors:
    return dict(reversed(tensors.items()))


def half_wide(tensors: Tensors) -> Tensors:
    return {
        name: tensor.float() if index % 2 else tensor
        for index, (name, tensor) in enumerate(tensors.items())
    }


@pytest.mark.parametrize(
    "form",
    [
        wide,
        with_head,
        backwards,
        half_wide,
        lambda tensors: with_head(wide(tensors)),
        lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].float()},
    ],
    ids=["float32", "lm_head", "backwards", "mixed", "float32 lm_head", "wider lm_head"],
)
def test_one_policy_has_one_digest_in_whatever_form_it_comes(
    client: RolloutClient, first: Weights, second: Weights, form: Callable[[Tensors], Tensors]
) -> None:
    make_live(client, first)
    result = client.reload(lazy(form(second.tensors)))
    assert result.digest == client.info().digest == second.digest
    assert greedy(client) == second.greedy(PROMPT, 10)


def test_float32_is_rounded_to_nearest(client: RolloutClient, first: Weights) -> None:
    finer = {name: tensor.float() * 1.001 for name, tensor in first.tensors.items()}
    rounded = Weights(first.model_dir, {n: t.to(torch.bfloat16) for n, t in finer.items()})
    assert client.reload(lazy(finer)).digest == rounded.digest


def test_the_same_weights_twice_are_two_versions(client: RolloutClient, live: Weights) -> None:
    results = [client.reload(lazy(live.tensors)) for _ in range(2)]
    assert results[1].version == results[0].version + 1
    assert results[1].digest == results[0].digest == live.digest


def test_a_digest_announced_in_the_header(server_url: str, first: Weights) -> None:
    raw = upload_of(first.tensors)[:-TRAILER_BYTES]
    assert send(server_url, raw, first.digest).status_code == 200
    assert send(server_url, raw, None).status_code == 200


def test_an_upload_in_small_pieces(server_url: str, first: Weights) -> None:
    raw = upload_of(first.tensors)
    pieces = (raw[start : start + 1013] for start in range(0, len(raw), 1013))
    response = send(server_url, pieces)
    assert response.status_code == 200, response.text
    assert response.json()["digest"] == first.digest


def test_a_header_of_odd_length(server_url: str, first: Weights) -> None:
    # Nothing in the format aligns the data; such a file loads whole or is refused, but not half.
    raw = upload_of(first.tensors)[:-TRAILER_BYTES]
    length = int.from_bytes(raw[:8], "little")
    odd = (length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :]
    response = send(server_url, odd, first.digest)
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code == 200:
        assert response.json()["digest"] == first.digest


def test_metadata_in_the_header(client: RolloutClient, reload_dir: Path, first: Weights) -> None:
    path = reload_dir / "metadata.safetensors"
    safetensors.torch.save_file(first.tensors, path, metadata={"format": "pt", "step": "7"})
    assert client.reload_path(path).digest == first.digest


def saved(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint directory with the tensors dealt out over the shards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = list(tensors)
    for index in range(shards):
        part = {name: tensors[name] for name in names[index::shards]}
        safetensors.torch.save_file(
            part, folder / f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        )
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory_of_shards(
    client: RolloutClient, reload_dir: Path, first: Weights, second: Weights, shards: int
) -> None:
    make_live(client, first)
    version = client.info().version
    folder = saved(reload_dir / f"shards-{shards}", second.tensors, shards)
    (folder / "model.safetensors.index.json").write_text("{}")
    result = client.reload_path(folder, digest=second.digest)
    assert (result.version, result.digest) == (version + 1, second.digest)
    assert greedy(client) == second.greedy(PROMPT, 10)


def test_a_file_in_a_path_and_what_the_owner_does_to_it_later(
    client: RolloutClient, reload_dir: Path, first: Weights, second: Weights
) -> None:
    make_live(client, second)
    folder = saved(reload_dir / "owned", first.tensors)
    (file,) = folder.glob("*.safetensors")
    client.reload_path(file)
    file.write_bytes(b"garbage")
    shutil.rmtree(folder)
    assert greedy(client) == first.greedy(PROMPT, 10)
    assert client.info().digest == first.digest


def test_a_wide_directory_with_a_head(
    client: RolloutClient, reload_dir: Path, first: Weights
) -> None:
    folder = saved(reload_dir / "wide", with_head(wide(first.tensors)), 2)
    assert client.reload_path(str(folder)).digest == first.digest


def test_paths_may_go_through_links_that_stay_inside(
    client: RolloutClient, reload_dir: Path, first: Weights
) -> None:
    folder = saved(reload_dir / "step-1", first.tensors)
    latest = reload_dir / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
    assert client.reload_path(latest).digest == first.digest
    assert client.reload_path(reload_dir / "x" / ".." / "step-1").digest == first.digest


@pytest.mark.usefixtures("unchanged")
class TestRefused:
    """Each of these must leave the live policy as it was."""

    @pytest.mark.parametrize("name", [NORM, QUERY, EMBEDDING])
    def test_a_missing_tensor(self, client: RolloutClient, second: Weights, name: str) -> None:
        tensors = {key: value for key, value in second.tensors.items() if key != name}
        problem = rejection(client, tensors, name)
        assert "missing" in problem["got"]

    def test_no_tensors_at_all(self, client: RolloutClient) -> None:
        with pytest.raises(WeightsRejected):
            client.reload([])

    def test_an_unknown_tensor(self, client: RolloutClient, second: Weights) -> None:
        rejection(client, {**second.tensors, "model.extra": torch.zeros(2)}, "model.extra")

    def test_a_tensor_under_another_name(self, client: RolloutClient, second: Weights) -> None:
        tensors = {f"policy.{name}": tensor for name, tensor in second.tensors.items()}
        with pytest.raises(WeightsRejected) as caught:
            client.reload(lazy(tensors))
        assert len(caught.value.problems) <= 20

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_a_value_that_is_not_finite(
        self, client: RolloutClient, second: Weights, bad: float, dtype: torch.dtype
    ) -> None:
        tensor = second.tensors[QUERY].to(dtype).clone()
        tensor[3, 5] = bad
        problem = rejection(client, {**second.tensors, QUERY: tensor}, QUERY)
        assert "1 NaN" in problem["got"]

    def test_a_value_that_the_cast_makes_infinite(
        self, client: RolloutClient, second: Weights
    ) -> None:
        tensor = second.tensors[QUERY].float()
        tensor[0, 0] = torch.finfo(torch.float32).max
        rejection(client, {**second.tensors, QUERY: tensor}, QUERY)

    @pytest.mark.parametrize("shape", [(128, 128, 1), (64, 256), (127, 128), (128,), ()])
    def test_a_wrong_shape(
        self, client: RolloutClient, second: Weights, shape: tuple[int, ...]
    ) -> None:
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        problem = rejection(client, {**second.tensors, QUERY: tensor}, QUERY)
        assert "shape" in problem["got"]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
    def test_a_wrong_dtype(
        self, client: RolloutClient, second: Weights, dtype: torch.dtype
    ) -> None:
        tensor = second.tensors[QUERY].to(dtype)
        problem = rejection(client, {**second.tensors, QUERY: tensor}, QUERY)
        assert "BF16 or F32" in problem["allowed"]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_a_head_that_differs_from_what_it_is_tied_to(
        self, client: RolloutClient, second: Weights, dtype: torch.dtype
    ) -> None:
        head = second.tensors[EMBEDDING].to(dtype).clone()
        head[0, 0] += 1
        rejection(client, {**second.tensors, HEAD: head}, HEAD)

    @pytest.mark.parametrize("at", [100, 4000, -TRAILER_BYTES - 1, -1])
    def test_a_flipped_bit(self, server_url: str, second: Weights, at: int) -> None:
        raw = bytearray(upload_of(second.tensors))
        raw[at] ^= 1
        response = send(server_url, bytes(raw))
        assert response.status_code in (400, 422), response.text

    @pytest.mark.parametrize("digest", ["0" * 32, "f" * 32])
    def test_another_digest(self, server_url: str, second: Weights, digest: str) -> None:
        response = send(server_url, upload_of(second.tensors)[:-TRAILER_BYTES], digest)
        assert response.status_code == 422
        message = response.json()["error"]["message"]
        assert digest in message
        assert second.digest in message

    @pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 31, 32, 33, 500, 100_000, -33, -32, -1])
    @pytest.mark.parametrize("digest", [DIGEST_TRAILER, None])
    def test_a_truncated_upload(
        self, server_url: str, second: Weights, length: int, digest: str | None
    ) -> None:
        raw = upload_of(second.tensors)
        if digest is None:
            raw = raw[:-TRAILER_BYTES]
        response = send(server_url, raw[:length], digest)
        assert response.status_code in (400, 422), response.text

    @pytest.mark.parametrize("extra", [b"\0", b"x" * 32, b"0" * 64])
    def test_an_upload_that_is_too_long(
        self, server_url: str, second: Weights, extra: bytes
    ) -> None:
        assert send(server_url, upload_of(second.tensors) + extra).status_code in (400, 422)

    def test_garbage(self, server_url: str) -> None:
        for raw in (b"\xff" * 1000, b"\0" * 1000, b"{}" * 500, orjson.dumps({"path": "x"})):
            assert send(server_url, raw).status_code == 400

    def test_a_trailer_that_was_not_announced(self, server_url: str, second: Weights) -> None:
        assert send(server_url, upload_of(second.tensors), None).status_code == 400

    def test_a_path_with_another_digest(
        self, client: RolloutClient, reload_dir: Path, second: Weights
    ) -> None:
        folder = saved(reload_dir / "digest", second.tensors)
        with pytest.raises(WeightsRejected, match=second.digest):
            client.reload_path(folder, digest="0" * 32)

    def test_a_tensor_in_two_shards(
        self, client: RolloutClient, reload_dir: Path, second: Weights
    ) -> None:
        folder = saved(reload_dir / "twice", second.tensors, 2)
        safetensors.torch.save_file({NORM: second.tensors[NORM]}, folder / "zzz.safetensors")
        with pytest.raises(MalformedBody, match=NORM):
            client.reload_path(folder)

    def test_a_missing_shard(
        self, client: RolloutClient, reload_dir: Path, second: Weights
    ) -> None:
        folder = saved(reload_dir / "lost", second.tensors, 3)
        next(iter(folder.glob("*.safetensors"))).unlink()
        with pytest.raises(WeightsRejected, match="missing"):
            client.reload_path(folder)

    def test_a_truncated_file(
        self, client: RolloutClient, reload_dir: Path, second: Weights
    ) -> None:
        folder = saved(reload_dir / "cut", second.tensors)
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(MalformedBody):
            client.reload_path(folder)

    def test_an_empty_directory(self, client: RolloutClient, reload_dir: Path) -> None:
        (reload_dir / "empty").mkdir(exist_ok=True)
        for path in ("empty", "nothing here", "nothing.safetensors"):
            with pytest.raises(InvalidRequest, match="no checkpoint"):
                client.reload_path(reload_dir / path)

    def test_a_directory_that_is_called_like_a_file(
        self, client: RolloutClient, reload_dir: Path
    ) -> None:
        (reload_dir / "odd" / "model.safetensors").mkdir(parents=True, exist_ok=True)
        with pytest.raises(TitoError) as caught:
            client.reload_path(reload_dir / "odd")
        assert 400 <= caught.value.status < 500

    def test_a_link_to_itself(self, client: RolloutClient, reload_dir: Path) -> None:
        loop = reload_dir / "loop"
        loop.unlink(missing_ok=True)
        loop.symlink_to(loop)
        with pytest.raises(TitoError) as caught:
            client.reload_path(loop)
        assert 400 <= caught.value.status < 500

    @pytest.mark.parametrize("path", ["/", "/etc", "/etc/passwd", "..", "", "/nonexistent/x"])
    def test_a_path_outside(self, client: RolloutClient, path: str) -> None:
        with pytest.raises((Forbidden, InvalidRequest)) as caught:
            client.reload_path(path)
        assert not isinstance(caught.value, InvalidRequest) or path == ""

    def test_a_way_out_by_dots(
        self, client: RolloutClient, reload_dir: Path, tiny_model: Path
    ) -> None:
        with pytest.raises(Forbidden, match="outside"):
            client.reload_path(f"{reload_dir}/../../{tiny_model.parent.name}/{tiny_model.name}")

    def test_a_sibling_with_the_same_beginning(
        self, client: RolloutClient, reload_dir: Path, second: Weights
    ) -> None:
        sibling = saved(reload_dir.with_name(f"{reload_dir.name}-evil"), second.tensors)
        with pytest.raises(Forbidden):
            client.reload_path(sibling)

    @pytest.mark.parametrize("kind", ["directory", "file", "shard"])
    def test_a_link_that_leads_out(
        self, client: RolloutClient, reload_dir: Path, tmp_path: Path, second: Weights, kind: str
    ) -> None:
        outside = saved(tmp_path / "outside", second.tensors, 2)
        trap = reload_dir / f"trap-{kind}"
        shutil.rmtree(trap, ignore_errors=True)
        trap.unlink(missing_ok=True)
        if kind == "directory":
            trap.symlink_to(outside)
        else:
            trap.mkdir()
            for file in outside.iterdir():
                (trap / file.name).symlink_to(file)
        wanted = trap / "model-00001-of-00002.safetensors" if kind == "file" else trap
        with pytest.raises(Forbidden):
            client.reload_path(wanted)


def rejection(client: RolloutClient, tensors: Tensors, name: str) -> dict[str, str]:
    """The problem that an upload has with tensor ``name``."""
    with pytest.raises(WeightsRejected) as caught:
        client.reload(lazy(tensors))
    problems = {problem.where: problem for problem in caught.value.problems}
    assert name in problems
    return {"got": problems[name].got, "allowed": problems[name].allowed}


def test_staging_holds_the_live_version_alone(
    client: RolloutClient, staging_dir: Path, first: Weights, second: Weights
) -> None:
    # Every other test of this session, the refusals included, ran against the same directory.
    client.reload(lazy(first.tensors))
    with pytest.raises(WeightsRejected):
        client.reload([])
    client.reload(lazy(wide(second.tensors)))
    (spool,) = staging_dir.iterdir()
    areas = [spool / "staging", spool / "retired"]
    eventually(lambda: not any(item for area in areas for item in area.iterdir()))
    files = [path for path in spool.rglob("*") if path.is_file()]
    (weights,) = (path for path in files if path.suffix == ".safetensors")
    assert safetensors.torch.load_file(weights).keys() == second.tensors.keys()
    others = {path.name for path in files} - {weights.name}
    assert others <= {"record.json", "lock", "numbered", "spare"}


def test_metrics_tell_of_reloads(client: RolloutClient, server_url: str, first: Weights) -> None:
    result = client.reload(lazy(first.tensors))
    text = httpx.get(f"{server_url}/metrics").text
    assert f'tito_policy_version{{policy="default"}} {float(result.version)}' in text
    for stage in result.timings:
        assert f'stage="{stage}"' in text


def test_the_async_client_publishes_too(server_url: str, first: Weights) -> None:
    async def publish() -> ReloadResult:
        async with AsyncRolloutClient(server_url) as client:
            return await client.reload(lazy(first.tensors))

    assert asyncio.run(publish()).digest == first.digest
