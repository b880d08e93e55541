"""What runs inside vLLM's worker processes: staged weights into the live model, and proof of it.

vLLM mixes :class:`WeightLoader` into its worker class (``worker_extension_cls``), so ``self`` is
the worker. Methods are called by name through ``AsyncLLM.collective_rpc`` and take and return plain
data only, so nothing needs pickling.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from rollout_server.decode_steps import DecodeSteps
from rollout_server.device_staging import DeviceStaging
from rollout_server.holding import Holding, hold_outputs
from rollout_server.sampled_scores import score_sampled_tokens
from rollout_server.start_failure import keep_reason
from rollout_server.switching import allow_switch
from rollout_server.weight_check import Repacking, check_weights
from rollout_server.weight_receiver import WeightReceiver

if TYPE_CHECKING:
    import torch


PARENT_VARIABLE = "TITO_ENGINE_PARENT"
QUICK_VARIABLE = "TITO_ENGINE_QUICK"

# More than lies between two steps of an engine that has work.
_POLLING_S = 0.01


def prepare_process() -> None:
    """Ready an engine process of ours; vLLM calls this in each (``vllm.general_plugins``).

    Engine processes outlive a server that was killed with SIGKILL, and would keep the GPU's memory
    from the next one, so each ends with the server that started it, however that ended.
    """
    server = int(os.environ.get(PARENT_VARIABLE, "0"))
    if server and server != os.getpid():
        threading.Thread(target=_end_with, args=(server,), daemon=True).start()
        keep_reason()
        quick = os.environ.get(QUICK_VARIABLE) == "1"
        hold_outputs(DecodeSteps if quick else Holding)
        if quick:
            score_sampled_tokens()
        allow_switch()
        _mend_cpu_attention()
        _mend_cpu_lora()
        _mend_cpu_seeds()
        _mend_cpu_waits()


def _mend_cpu_attention() -> None:
    """Ask the kernel for the processor's tiles (AMX), which vLLM's attention uses unasked.

    Where nothing else in the process has asked before, the first step would be its end (SIGILL).
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _mend_cpu_lora() -> None:
    """Keep adapters off the rows of a batch that asked for none.

    Such a row has the index -1, which vLLM's CPU kernels take for the last adapter: the base model,
    sampled beside LoRA policies, would answer as one of them.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    plain = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        plain(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[lora_indices_tensor < 0] = 0.0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


def _mend_cpu_seeds() -> None:
    """Let requests with a seed of their own run on CPU.

    vLLM samples after every chunk of a prompt, throws away all but the last sample, and winds a
    seeded generator back by its offset. Generators on CPU have none: the engine would die. Here a
    draw follows from the seed and from how many draws were kept, whatever the chunks.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import xxhash
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    offset_of_one_draw = 4

    class CountedGenerator(torch.Generator):
        request_seed = 0
        draws = 0

        def get_offset(self) -> int:
            return offset_of_one_draw * self.draws

        def set_offset(self, offset: int) -> torch.Generator:
            self.draws = offset // offset_of_one_draw
            return self

        def prepare(self) -> None:
            mixed = xxhash.xxh3_64_intdigest(b"%d %d" % (self.request_seed, self.draws))
            self.manual_seed(mixed)
            self.draws += 1

    plain_forward, plain_init = TopKTopPSampler.forward_cpu, CachedRequestState.__post_init__

    def forward_cpu(self: Any, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        for generator in generators.values():
            if isinstance(generator, CountedGenerator):
                generator.prepare()
        return plain_forward(self, logits, generators, k, p)

    def counted(self: Any) -> None:
        plain_init(self)
        if self.generator is not None:
            seed, self.generator = self.generator.initial_seed(), CountedGenerator()
            self.generator.request_seed = seed

    TopKTopPSampler.forward_cpu = forward_cpu
    CachedRequestState.__post_init__ = counted


def _mend_cpu_waits() -> None:
    """Let an engine that waits leave its cores to others, such as the trainer on this machine.

    vLLM's processes poll for a second after each message before they sleep, which is longer than a
    small model's training step. They yield meanwhile, but Linux divides cores among groups of
    processes first (autogroups, containers): yielding helps only those of the same group.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    plain_init = SpinCondition.__init__

    def impatient(self: Any, *args: Any, **options: Any) -> None:
        plain_init(self, *args, **options)
        self.busy_loop_s = min(self.busy_loop_s, _POLLING_S)

    SpinCondition.__init__ = impatient


def _end_with(server: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(server)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


class _StagedCheckpoint:
    """Tensors of safetensors files, each read when it is asked for."""

    def __init__(self, paths: list[str], files: contextlib.ExitStack) -> None:
        opened = [files.enter_context(safe_open(path, framework="pt")) for path in paths]
        self._file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, file in self._file_of.items():
            yield name, file.get_tensor(name)

    def read(self, name: str) -> torch.Tensor | None:
        file = self._file_of.get(name)
        return None if file is None else file.get_tensor(name)


class WeightLoader(DeviceStaging, WeightReceiver):
    """Worker methods of Tito; the names are prefixed because they share the worker's namespace."""

    vllm_config: Any
    model_runner: Any

    def tito_load_weights(self, paths: list[str]) -> dict[str, int]:
        """Replace every weight of this worker's model, in place, and check what is live then.

        Args:
            paths: safetensors files that together hold a complete checkpoint.

        Returns:
            ``parameters``, how many there are, and ``checked``, how many were compared.

        Raises:
            RuntimeError: some parameters are not those of the checkpoint. The model is then
                half-written: load a complete checkpoint before any forward pass.
        """
        with contextlib.ExitStack() as files:
            return self._tito_replace(_StagedCheckpoint(paths, files))

    def _tito_replace(self, staged: Any) -> dict[str, int]:
        """Load tensors that can be iterated over and read by name, and check what is live then."""
        sharded = self.vllm_config.parallel_config.world_size > 1
        repacking = Repacking(self.model_runner.get_model(), staged.read, sharded=sharded)
        with repacking.watched():
            self._tito_load(staged, repacking)
        return self._tito_check(repacking)

    def _tito_load(self, staged: Any, repacking: Repacking) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        # With LoRA enabled, vLLM wraps layers, but loads them under their own names.
        expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                with repacking.recorded(staged) as tensors:
                    loaded = model.load_weights(tensors)
            finally:
                # Also after a failure: only a finished reload can be followed by another.
                finalize_layerwise_reload(model, self.vllm_config.model_config)
                _repack_tied_head(model)
        self.model_runner.reset_lora_state()
        # vLLM takes a partial set of tensors without a word, so completeness is checked here.
        if missing := sorted(expected - loaded):
            raise RuntimeError(f"{len(missing)} parameters were not loaded, first {missing[0]}")

    def _tito_check(self, repacking: Repacking) -> dict[str, int]:
        model = self.model_runner.get_model()
        count = sum(1 for _ in model.named_parameters())
        report = check_weights(model, repacking)
        if report.different:
            raise RuntimeError(
                f"{len(report.different)} parameters differ from the checkpoint after the load, "
                f"first {report.different[0]}"
            )
        return {"parameters": count, "checked": count - len(report.unknown)}


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Let an output head that shares the embedding's weights see their new values.

    No tensor of the checkpoint belongs to such a head, so vLLM's reload passes it by; on CPU it
    would keep computing with the old matrix, which it holds repacked.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    tables = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    heads = [m for m in tables if isinstance(m, ParallelLMHead)]
    inputs = {id(m.weight) for m in tables if m not in heads}
    for head in heads:
        if id(head.weight) in inputs:
            head.quant_method.process_weights_after_loading(head)
