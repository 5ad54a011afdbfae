# syntax=docker/dockerfile:1

# The server in a container:
#
#     docker build --target cpu -t slipstream:cpu .
#     docker run --rm -p 127.0.0.1:8000:8000 slipstream:cpu
#
# `cuda` is the same for one NVIDIA GPU. It has never been run; the code for GPUs has. `ray-cpu` is for the pods of
# deploy/ray/kuberay.yaml, and serves replicas on one machine by itself:
#
#     docker build --target ray-cpu -t slipstream-ray:cpu .

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    SLIPSTREAM_HOST=0.0.0.0 \
    SLIPSTREAM_PORT=8000 \
    SLIPSTREAM_CACHE=/home/slipstream/.cache/slipstream \
    HF_HOME=/home/slipstream/.cache/huggingface
RUN useradd --create-home --uid 10001 slipstream \
    && install -d -o slipstream -g slipstream /home/slipstream/.cache
WORKDIR /app
EXPOSE 8000
# The start loads a model. The check reads SLIPSTREAM_PORT; it does not see --port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['SLIPSTREAM_PORT']}/health\", timeout=4)"]
# SIGTERM ends what is under way first: give `docker stop` more than --grace-period-s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["slipstream"]
CMD ["serve"]

FROM base AS wheel
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && apt-get install -y --no-install-recommends g++
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY src ./src
# With the CPU kernels compiled, for each instruction set that they know.
RUN --mount=type=cache,target=/root/.cache/pip \
    HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel --no-deps --wheel-dir /wheels .

FROM base AS cpu-torch
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch

FROM cpu-torch AS cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c constraints.txt "$(echo /wheels/*.whl)[otel]"
USER slipstream

FROM cpu-torch AS ray-cpu
# KubeRay gives pods a command of its own, and asks for their health by wget.
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean \
    && apt-get update \
    && apt-get install -y --no-install-recommends wget
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c constraints.txt "$(echo /wheels/*.whl)[deploy,otel]"
USER slipstream
CMD ["deploy", "--host", "0.0.0.0"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY constraints.txt ./
# PyTorch's default build for Linux brings CUDA's libraries; the driver is the host's.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c constraints.txt "$(echo /wheels/*.whl)[otel]"
USER slipstream
CMD ["serve", "--device", "cuda"]
