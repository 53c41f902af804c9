# vLLM and b12x of a pin with the series in them, for CUDA 13 and Blackwell. Build it with scripts/build-image, which
# resolves the base's digest and adds the labels; docs/image.md says what every argument is.
ARG BASE_NAME=nvidia/cuda:13.0.3-devel-ubuntu24.04
# No default: a digest is resolved when an image is built, and recorded in its labels.
ARG BASE_DIGEST

# The tools of the CUDA base stay: DeepGEMM, FlashInfer, Triton and b12x compile kernels at their first use.
FROM ${BASE_NAME}@${BASE_DIGEST} AS base
ARG DEBIAN_FRONTEND=noninteractive
ENV CUDA_HOME=/usr/local/cuda \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/usr/local/cuda/bin:${PATH}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates curl ffmpeg g++ libnuma-dev numactl python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY scripts/image/check-toolchain scripts/image/make-user /opt/neaptide/scripts/image/
RUN /opt/neaptide/scripts/image/check-toolchain /usr/bin/python3 \
    && /opt/neaptide/scripts/image/make-user neaptide 10001 /home/neaptide

# Packages: a layer that only another pin makes anew.
FROM base AS packages
ARG PIN=current
COPY patches/pins/*.toml /opt/neaptide/patches/pins/
COPY scripts/image/install-packages scripts/image/pinned.py /opt/neaptide/scripts/image/
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/neaptide/scripts/image/install-packages --pin "${PIN}" /opt/venv

# The bill of materials is written by a tool that is not in it.
FROM base AS sbom-tool
ARG CYCLONEDX_VERSION=7.5.0
RUN python3 -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir "cyclonedx-bom==${CYCLONEDX_VERSION}"

FROM packages AS patched
ARG PIN=current
COPY LICENSE README.md pyproject.toml /opt/neaptide/
COPY scripts /opt/neaptide/scripts
COPY patches /opt/neaptide/patches
COPY overlay /opt/neaptide/overlay
RUN /opt/venv/bin/pip install --no-cache-dir --editable /opt/neaptide \
    && /opt/neaptide/scripts/image/apply-series --pin "${PIN}"
RUN --mount=type=bind,from=sbom-tool,source=/opt/sbom,target=/opt/sbom \
    CYCLONEDX=/opt/sbom/bin/cyclonedx-py \
    /opt/neaptide/scripts/image/write-sbom /usr/share/neaptide/sbom.cdx.json /opt/venv/bin/python \
    && /opt/neaptide/scripts/image/check-image --pin "${PIN}"

FROM base AS serve
ARG BASE_NAME
ARG BASE_DIGEST
ARG PIN=current
ARG CREATED=""
ARG REVISION=""
ARG SOURCE=""
COPY --from=patched /opt/venv /opt/venv
COPY --from=patched /opt/neaptide /opt/neaptide
COPY --from=patched /usr/share/neaptide /usr/share/neaptide
# All that is compiled at run time lands in one folder, which a volume can keep.
ENV TRITON_CACHE_DIR=/home/neaptide/.cache/triton
# io.neaptide.tree.*, .patches, .lock.sha256 and the version come from the lock, by scripts/image/write-labels.
LABEL org.opencontainers.image.title="neaptide" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      io.neaptide.pin="${PIN}"
WORKDIR /opt/neaptide
USER 10001
EXPOSE 8000
# A model may load for long: until something listens, a server process that lives is well.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["/opt/neaptide/scripts/image/healthcheck"]
ENTRYPOINT ["/opt/neaptide/scripts/image/entrypoint"]
CMD ["--help"]

FROM serve AS test
ARG DEBIAN_FRONTEND=noninteractive
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*
RUN /opt/venv/bin/pip install --no-cache-dir "pytest==9.*" "pytest-xdist==3.*"
COPY . /opt/neaptide
USER 10001
HEALTHCHECK NONE
CMD ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit"]
