#!/usr/bin/env bash
# Make .venv with everything that the server, the trainer and the tests need, and check it.
#
#   ./setup.sh            CPU or GPU, whichever the machine has
#   TITO_DEVICE=cpu ./setup.sh
#   PYTHON=python3.12 ./setup.sh
set -euo pipefail
cd "$(dirname "$0")"

PYTHON=${PYTHON:-python3}
TORCH=2.13.0
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

die() { printf 'setup: %s\n  %s\n' "$1" "$2" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  die "Python 3.11 or newer is needed; $PYTHON is not" "name one with PYTHON=/path/to/python3.11"

device=${TITO_DEVICE:-auto}
if [ "$device" = auto ]; then
  if nvidia-smi -L >/dev/null 2>&1; then device=gpu; else device=cpu; fi
fi

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv ||
  die "a virtual environment could not be made" "on Debian: apt-get install python3-venv"
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

case $device in
cpu)
  # The CPU build of torch is on PyTorch's own index, unless this machine's pip knows it already.
  pip install -q "torch==$TORCH+cpu" 2>/dev/null ||
    pip install -q "torch==$TORCH+cpu" --extra-index-url "$TORCH_CPU_INDEX"
  # The lock is complete, so --no-deps: vLLM also asks for torchvision, torchaudio and torchcodec,
  # which Tito never uses, and whose builds for another torch would break transformers.
  pip install -q --no-deps -r requirements-cpu.lock
  pip install -q --no-deps -e .
  ;;
gpu) pip install -q -e ".[server-gpu,trainer-gpu,dev]" ;;
*) die "TITO_DEVICE is '$device'" "allowed: auto, cpu, gpu" ;;
esac

HF_HUB_OFFLINE=1 .venv/bin/python - <<'EOF' || die "the installation does not import" "see above"
import torch
from transformers import AutoModelForCausalLM  # fails where torch and torchvision disagree
import vllm
import rollout_server.app, shared.client, trainer.train

print(f"setup: torch {torch.__version__}, vllm {vllm.__version__} are ready in .venv")
EOF
