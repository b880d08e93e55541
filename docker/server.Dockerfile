# The rollout server. Targets: cpu (default in docker-compose.yml) and gpu.
#
#   docker build -f docker/server.Dockerfile --target cpu -t tito-server:cpu .
#   docker build -f docker/server.Dockerfile --target gpu -t tito-server:gpu .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# ---- Dependencies: layers that change only with the lock -----------------------------------------
FROM ${PYTHON_IMAGE} AS build
RUN python3 -m venv /opt/tito
ENV PATH=/opt/tito/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install "torch==2.13.0+cpu" --no-deps --extra-index-url ${TORCH_INDEX}
COPY docker/server-cpu.lock docker/
# The lock is complete: vLLM also asks for torchvision and its kin, which Tito never uses.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps -r docker/server-cpu.lock
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY rollout_server rollout_server
COPY trainer trainer
RUN pip install --no-deps .

FROM build AS build-gpu
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY rollout_server rollout_server
COPY trainer trainer
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install ".[server-gpu]"

# ---- What runs -----------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
# libnuma is of vLLM's CPU kernels. No package lists or compilers stay behind.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libnuma1 \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home tito \
 && install -d -o tito -g tito /models /spool /home/tito/.cache
ENV PATH=/opt/tito/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TITO_HOST=0.0.0.0 \
    TITO_SPOOL_DIR=/spool \
    HF_HOME=/models/huggingface
USER tito
WORKDIR /home/tito
EXPOSE 8300
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8300/readyz', timeout=4)"]
ENTRYPOINT ["rollout-server"]

FROM runtime AS cpu
ENV OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1
COPY --from=build-cpu /opt/tito /opt/tito

FROM runtime AS gpu
USER root
# Triton compiles small launchers when kernels first run.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER tito
COPY --from=build-gpu /opt/tito /opt/tito
