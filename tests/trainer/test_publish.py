from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, load_file
from transformers import LlamaConfig, LlamaForCausalLM

from shared.client import RolloutClient
from shared.protocol import FENCE_HEADER
from shared.weights import TRAILER_BYTES, LazyTensor, stream_checkpoint
from trainer.lora import Merged
from trainer.publish import checkpoint_tensors, lazy_tensors, publish


def tiny_model(*, tied: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def as_file(tensors: list[LazyTensor]) -> bytes:
    return b"".join(bytes(piece) for piece in stream_checkpoint(tensors))[:-TRAILER_BYTES]


@pytest.mark.parametrize("tied", [True, False])
def test_same_names_and_shapes_as_a_saved_checkpoint(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tied=tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = load(as_file(checkpoint_tensors(model, torch.float32)))
    assert sent.keys() == saved.keys()
    assert ("lm_head.weight" in sent) is not tied
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


def test_cast_to_bfloat16_rounds_as_torch_does() -> None:
    model = tiny_model(tied=True)
    sent = load(as_file(checkpoint_tensors(model, torch.bfloat16)))
    for name, parameter in model.named_parameters():
        assert torch.equal(sent[name], parameter.detach().bfloat16())


def test_values_are_read_when_sent_not_when_listed() -> None:
    model = tiny_model(tied=True)
    tensors = checkpoint_tensors(model, torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert load(as_file(tensors))["model.norm.weight"].eq(3.0).all()


def test_nothing_of_a_model_on_the_cpu_is_read_ahead() -> None:
    model = tiny_model(tied=True)
    first, second, *_ = checkpoint_tensors(model, torch.float32)
    first.load()
    with torch.no_grad():
        model.get_parameter(second.spec.name).fill_(3.0)
    assert torch.frombuffer(bytearray(second.load()), dtype=torch.float32).eq(3.0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_a_gpu_one_tensor_is_copied_while_another_is_sent() -> None:
    tensors = {str(i): torch.randn(1000 + i, device="cuda") for i in range(4)}
    kept = {name: tensor.bfloat16().cpu() for name, tensor in tensors.items()}
    named = [(name, Merged(tensor, None)) for name, tensor in tensors.items()]
    for _ in range(2):  # the memory is used again
        sent = lazy_tensors(named, torch.bfloat16)
        sent[1].begin()
        held = [sent[0].load()]
        tensors["1"].zero_()
        held += [tensor.load() for tensor in sent[1:]]
        for data, tensor in zip(held, kept.values(), strict=True):
            there = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
            assert torch.equal(there, tensor)
        tensors["1"].copy_(kept["1"])


def test_integer_buffers_keep_their_type_and_strided_tensors_are_packed() -> None:
    module = torch.nn.Module()
    module.register_buffer("count", torch.arange(3))
    module.register_buffer("hidden", torch.zeros(2), persistent=False)
    module.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    module.scalar = torch.nn.Parameter(torch.tensor(2.0))
    sent = load(as_file(checkpoint_tensors(module, torch.bfloat16)))
    assert sent.keys() == {"count", "weight", "scalar"}
    assert sent["count"].dtype == torch.int64
    assert torch.equal(sent["weight"], module.weight.detach().bfloat16())
    assert sent["scalar"].shape == ()


def test_one_tensor_is_held_at_a_time() -> None:
    tensors = checkpoint_tensors(tiny_model(tied=True), torch.bfloat16)
    first, second = tensors[0].load(), tensors[0].load()
    assert bytes(first) == bytes(second)
    # Nothing is kept behind the caller's back: the two are separate copies.
    assert memoryview(first).obj is not memoryview(second).obj


def test_publish_streams_to_reload() -> None:
    received: dict[str, Any] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        received.update(path=request.url.path, body=request.read(), headers=request.headers)
        answer = {"version": 9, "digest": "d", "timings": {}}
        return httpx.Response(200, json=answer)

    model = tiny_model(tied=True)
    with RolloutClient("http://t", transport=httpx.MockTransport(handler)) as client:
        assert publish(client, model, torch.bfloat16, fence=7).version == 9
    assert received["path"] == "/reload"
    assert received["headers"][FENCE_HEADER] == "7"
    tensors = load(received["body"][:-TRAILER_BYTES])
    assert len(tensors) == len(list(model.parameters()))
