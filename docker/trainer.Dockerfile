# The trainer. Targets: cpu (default in docker-compose.yml) and gpu.
#
#   docker build -f docker/trainer.Dockerfile --target cpu -t tito-trainer:cpu .
#   docker build -f docker/trainer.Dockerfile --target gpu -t tito-trainer:gpu .
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
COPY docker/trainer-cpu.lock docker/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps -r docker/trainer-cpu.lock
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
    pip install ".[trainer-gpu]"

# ---- What runs -----------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
RUN useradd --uid 10001 --create-home tito \
 && install -d -o tito -g tito /models /runs /home/tito/.cache
ENV PATH=/opt/tito/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models/huggingface
USER tito
WORKDIR /home/tito
ENTRYPOINT ["tito-trainer"]
CMD ["--help"]

FROM runtime AS cpu
ENV OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
COPY --from=build-cpu /opt/tito /opt/tito

FROM runtime AS gpu
USER root
# Triton compiles small launchers when kernels first run.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER tito
COPY --from=build-gpu /opt/tito /opt/tito
