# dmuond in containers, with CPU lanes. `./dev image` builds both where there is no registry and no Docker; elsewhere:
#
#   docker build --target daemon  -t dmuond .          the three programs; not root
#   docker build --target trainer -t dmuond-trainer .  Python, torch and the client; not root, no test tools
#
# Build arguments:
#   BASE         the image that all stages begin with: Debian 12, or what has its packages
#   VERSION      for the label, e.g. of `git describe`
#   REVISION     for the label, the commit
#   TORCH_INDEX  a package index to take torch from, e.g. one with smaller builds for CPUs; else the default one
#   CA           a certificate (PEM) that the package index is trusted by, beside Debian's. It is not in the images
#
# A stage copies only what it builds from, so that a changed file rebuilds what depends on it.

ARG BASE=debian:12-slim
ARG VERSION=unknown
ARG REVISION=unknown

FROM ${BASE} AS packages
WORKDIR /src
COPY tools/dev/apt-packages.txt tools/dev/packages.sh tools/dev/
RUN apt-get update \
 && tools/dev/packages.sh tools/dev/apt-packages.txt programs \
  | DEBIAN_FRONTEND=noninteractive xargs apt-get install -y --no-install-recommends \
 && rm -rf /var/lib/apt/lists/*

FROM packages AS programs
COPY CMakeLists.txt CMakePresets.json ./
COPY tools/cmake tools/cmake
COPY tools/dev/runtime-packages.sh tools/dev/
COPY base base
COPY proto proto
COPY scheduler scheduler
COPY kernels kernels
COPY client/CMakeLists.txt client/
COPY client/cpp client/cpp
COPY server server
ARG REVISION
# A program keeps the names of its functions, for backtraces; lines and types are left out.
RUN --mount=type=cache,target=/root/.cache/ccache \
    cmake --preset cpu -DDMUOND_TESTS=OFF -DDMUOND_BENCH=OFF -DDMUOND_UNITY=ON \
      "-DDMUOND_COMMIT=$(printf %.12s "${REVISION}")" \
 && cmake --build --preset cpu --target programs \
 && cmake --install build/cpu --component programs --prefix /opt/dmuond \
 && strip --strip-debug /opt/dmuond/bin/* \
 && tools/dev/runtime-packages.sh /opt/dmuond/bin/* > /opt/dmuond/packages.txt

FROM ${BASE} AS daemon
# Packages first: they change when a program needs another library, not with each change of one.
COPY --from=programs /opt/dmuond/packages.txt /opt/dmuond/packages.txt
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive xargs apt-get install -y --no-install-recommends < /opt/dmuond/packages.txt \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc/* /usr/share/man/* /var/log/* \
 && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin dmuond \
 && install -d -o dmuond -g dmuond -m 0750 /run/dmuond
COPY --from=programs /opt/dmuond/bin /opt/dmuond/bin
COPY --from=programs /opt/dmuond/share /opt/dmuond/share
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="dmuond" \
      org.opencontainers.image.description="The optimizer daemon of a node, with its lanes' program and dmuonctl" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/dmuond/bin:$PATH
USER 10001:10001
ENTRYPOINT ["/opt/dmuond/bin/dmuond"]
CMD ["--devices=cpu:1", "--socket=/run/dmuond/job/dmuond.sock"]

FROM ${BASE} AS client
ARG CA=
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3 python3-pip python3-venv \
 && if [ -n "${CA}" ]; then printf '%s\n' "${CA}" > /usr/local/share/ca-certificates/build.crt; fi \
 && update-ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv --without-pip /opt/trainer
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch first: it is most of the image, and does not change with the client.
ARG TORCH_INDEX=
RUN pip --python /opt/trainer/bin/python install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} 'torch>=2.9'
WORKDIR /src
COPY tools/dev/python_protos.py tools/dev/
COPY proto proto
COPY LICENSE ./
COPY client/python client/python
RUN pip wheel --no-deps -w /tmp/wheel client/python \
 && pip --python /opt/trainer/bin/python install /tmp/wheel/*.whl

FROM ${BASE} AS trainer
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/share/doc/* /usr/share/man/* /var/log/* \
 && useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin dmuond
COPY --from=client /opt/trainer /opt/trainer
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="dmuond-trainer" \
      org.opencontainers.image.description="Python, torch and the client of dmuond, to train with a daemon beside it" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
ENV PATH=/opt/trainer/bin:$PATH
USER 10001:10001
WORKDIR /tmp
CMD ["python", "-m", "dmuond.demo.trainer", "--help"]
