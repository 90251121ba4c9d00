# dmuond in containers, CPU default, made by the same ./dev commands as everything else.
#
#   docker build --target daemon  -t dmuond .          the three programs, not root
#   docker build --target trainer -t dmuond-trainer .  Python, torch and the client, for the demo's pod
#
# --build-arg TORCH_INDEX=URL takes torch from an index with smaller, CPU-only builds.

FROM debian:12-slim AS packages
WORKDIR /src
COPY dev ./
COPY tools/dev tools/dev
RUN ./dev setup --system

FROM packages AS programs
COPY . .
RUN ./dev install /opt/dmuond \
 && tools/dev/runtime-packages.sh /opt/dmuond/bin/* > /opt/dmuond/packages.txt

FROM debian:12-slim AS daemon
COPY --from=programs /opt/dmuond /opt/dmuond
RUN apt-get update \
 && xargs apt-get install -y --no-install-recommends < /opt/dmuond/packages.txt \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin dmuond \
 && install -d -o dmuond -g dmuond -m 0750 /run/dmuond
ENV PATH=/opt/dmuond/bin:$PATH
USER 10001:10001
ENTRYPOINT ["/opt/dmuond/bin/dmuond"]
CMD ["--devices=cpu:1", "--socket=/run/dmuond/job/dmuond.sock"]

FROM packages AS client
ARG TORCH_INDEX=
COPY client/python client/python
COPY proto proto
RUN DMUOND_TORCH_INDEX=$TORCH_INDEX ./dev setup

FROM debian:12-slim AS trainer
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin dmuond
# The environment and the package installed in place know their own paths.
COPY --from=client /src/.venv /src/.venv
COPY --from=client /src/client/python /src/client/python
ENV PATH=/src/.venv/bin:$PATH
USER 10001:10001
WORKDIR /tmp
CMD ["python", "-m", "dmuond.demo.trainer", "--help"]
