# rayq in a container, as a user that is not root: the demo, the `rayq` command, and what
# deploy/kuberay.yaml runs. docs/docker.md tells how to use it.
#
#     docker build -t rayq:0.1.0 .
#     docker run --rm -t --shm-size=1g rayq:0.1.0                  # the demo
#     docker build -t rayq:0.1.0-spark --target spark .            # also with Spark and Java

# --- what rayq needs, in the versions of the lock: changes seldom ---------------------------------

FROM debian:bookworm-slim AS packages
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml requirements.lock ./
ENV UV_LINK_MODE=copy UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
RUN python3 -m venv /opt/rayq \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --quiet --no-cache-dir --constraint requirements.lock uv
RUN /opt/uv/bin/uv pip install --quiet --python /opt/rayq/bin/python \
    --constraint requirements.lock --requirements pyproject.toml \
    --extra cli --extra data --extra demo --extra metrics --extra registry --extra remote

FROM packages AS packages-spark
RUN /opt/uv/bin/uv pip install --quiet --python /opt/rayq/bin/python \
    --constraint requirements.lock --requirements pyproject.toml --extra spark

# --- rayq itself: changes often -------------------------------------------------------------------

FROM packages AS wheel
COPY README.md LICENSE ./
COPY rayq rayq
RUN /opt/uv/bin/uv build --quiet --wheel --build-constraints requirements.lock

# --- what runs ------------------------------------------------------------------------------------

# Debian 12 is the last one with Java 17, which Spark 3.5 needs; its Python is 3.11.
FROM debian:bookworm-slim AS system
# tini: the first process of a container gets no signal that it does not handle, and has to bury
# what others leave behind. wget: with it KubeRay asks Ray whether a pod is well.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 tini wget \
    && rm -rf /var/lib/apt/lists/*
# A new volume on /data belongs to the user of the directory here.
RUN useradd --uid 1000 --user-group --create-home rayq \
    && install --directory --owner rayq --group rayq --mode 0700 /data
# KubeRay's commands are run by a login shell, which makes a PATH of its own.
ENV PATH=/opt/rayq/bin:$PATH RAY_USAGE_STATS_ENABLED=0
RUN echo 'PATH=/opt/rayq/bin:$PATH' > /etc/profile.d/rayq.sh
WORKDIR /home/rayq
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "rayq.demo"]

FROM system AS spark
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages-spark /opt/rayq /opt/rayq
RUN --mount=from=wheel,source=/build/dist,target=/dist \
    pip install --quiet --no-cache-dir --no-deps /dist/*.whl
# By number: Kubernetes can tell that it is not root.
USER 1000:1000

FROM system AS rayq
COPY --from=packages /opt/rayq /opt/rayq
RUN --mount=from=wheel,source=/build/dist,target=/dist \
    pip install --quiet --no-cache-dir --no-deps /dist/*.whl
USER 1000:1000
