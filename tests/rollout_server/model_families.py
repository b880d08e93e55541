"""Loads that are recorded, for models of several families; prints what was found as JSON lines.

A process of its own, since vLLM keeps one distributed environment for each.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Phi3Config, Qwen2Config

from rollout_server.load_plan import LoadPlan
from rollout_server.weight_check import Repacking, check_weights

SIZES: dict[str, int] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, Any] = {
    "Qwen2ForCausalLM": lambda sizes: Qwen2Config(**sizes),  # biases
    "LlamaForCausalLM": lambda sizes: LlamaConfig(**sizes),
    "Phi3ForCausalLM": lambda sizes: Phi3Config(**sizes, pad_token_id=0),  # fused in the checkpoint
    "Gemma2ForCausalLM": lambda sizes: Gemma2Config(**sizes, head_dim=32),  # a tied head
}


def tensors_of(config: Any) -> dict[str, Tensor]:
    """Random weights with the names of a checkpoint."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).bfloat16()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name not in tied or not config.tie_word_embeddings
    }


def main() -> None:
    """One line for each family."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    with tempfile.TemporaryDirectory() as scratch:
        for name, configured in FAMILIES.items():
            config = configured(SIZES)
            config.architectures = [name]
            folder = Path(scratch) / name
            config.save_pretrained(folder)
            asked = EngineArgs(
                model=str(folder), skip_tokenizer_init=True, max_model_len=64, enforce_eager=True
            )
            vllm_config = asked.create_engine_config()
            with set_current_vllm_config(vllm_config):
                if name == next(iter(FAMILIES)):
                    init_distributed_environment(1, 0, f"file://{scratch}/meet", 0, "gloo")
                    initialize_model_parallel(1, 1)
                found = examined(vllm_config, tensors_of(config))
            print(json.dumps({"family": name, **found}), flush=True)


def examined(vllm_config: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A plan on plain parameters, then the check of a reload into repacked ones."""
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config)
    plan = LoadPlan.recorded(model, tensors)
    same = plan.differing(tensors)
    others = {name: tensor + 1 for name, tensor in tensors.items()}
    unlike = plan.differing(others)
    plan.apply(others)
    after = plan.differing(others)
    process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return {
        "tensors": len(tensors),
        "same": same,
        "unlike": len(unlike),
        "after": after,
        "by names": reloaded(model, vllm_config, tensors, sharded=False),
        "by record": reloaded(model, vllm_config, tensors, sharded=True),
    }


def reloaded(
    model: nn.Module, vllm_config: Any, tensors: dict[str, Tensor], *, sharded: bool
) -> dict[str, Any]:
    """What the check says after a reload as a worker does it."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from rollout_server.worker_plugin import _repack_tied_head

    load: Any = model.load_weights
    repacking = Repacking(model, tensors.get, sharded=sharded)
    with repacking.watched():
        initialize_layerwise_reload(model)
        with repacking.recorded(tensors.items()) as handed_on:
            load(handed_on)
        finalize_layerwise_reload(model, vllm_config.model_config)
        _repack_tied_head(model)
    report = check_weights(model, repacking)
    return {
        "checked": len(report.checked),
        "unknown": report.unknown,
        "different": report.different,
    }


if __name__ == "__main__":
    main()
