# Two images from one file:
#   docker build --target slim -t memreclaim:slim .      the embedded engine on a CPU, for a look at everything
#   docker build --target sglang -t memreclaim:sglang --build-arg SGLANG_IMAGE=lmsysorg/sglang:v0.5.23 .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
RUN pip install --no-cache-dir build==1.6.1
COPY pyproject.toml README.md LICENSE ./
COPY memreclaim memreclaim
COPY kernels kernels
RUN python -m build --wheel --outdir /wheels

FROM ${PYTHON_IMAGE} AS slim
# The package index of torch's CPU builds; without it the image gets the CUDA build, 3 GB more.
ARG TORCH_INDEX=""
ARG TORCH_VERSION=2.13.0
RUN PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir "torch==${TORCH_VERSION}"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[server]" && rm -rf /wheels \
    && useradd --uid 10001 --create-home --home-dir /home/memreclaim memreclaim
USER 10001
WORKDIR /home/memreclaim
ENV PYTHONUNBUFFERED=1 MEMRECLAIM_HTTP=127.0.0.1:9411
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9411/readyz', timeout=4)"]
ENTRYPOINT ["memreclaim"]
CMD ["serve", "--engine", "reference"]

FROM ${SGLANG_IMAGE} AS sglang
# torch, triton, Starlette and uvicorn are the engine's own and must not move.
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl \
    && pip install --no-cache-dir "structlog>=24.1" "prometheus_client>=0.20" "rich>=13.7" && rm -rf /wheels \
    && useradd --uid 10001 --create-home --home-dir /home/memreclaim memreclaim
USER 10001
WORKDIR /home/memreclaim
ENV MEMRECLAIM=on MEMRECLAIM_HTTP=127.0.0.1:9411
HEALTHCHECK --interval=30s --timeout=5s --start-period=900s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9411/readyz', timeout=4)"]
ENTRYPOINT ["python3", "-m", "sglang.launch_server"]
