#!/usr/bin/env python3
"""What it costs to be seen: scrapes of /metrics and /statusz, and steps with and without them.

    metrics_bench.py --programs=build/cpu/bin

Two daemons have the same job of 10,000 parameters; one of them serves its pages, and /metrics is
asked for every second, fifteen times as often as Prometheus does by default. Blocks of steps of the
two take turns. Prints the time of a scrape, of the page, and the median step of both.
"""

from __future__ import annotations

import argparse
import http.client
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))


def fetch_ms(address: str, path: str) -> float:
    connection = http.client.HTTPConnection(address)
    begin = time.perf_counter()
    connection.request("GET", path)
    connection.getresponse().read()
    took = time.perf_counter() - begin
    connection.close()
    return took * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", required=True)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    options = parser.parse_args()
    os.environ["DMUOND_BIN_DIR"] = str(Path(options.programs).resolve())

    import dmuond
    from daemons import Daemons, free_port
    from ten_thousand import register
    from test_core_client import scalars

    address = f"127.0.0.1:{free_port()}"
    with Daemons() as daemons:
        sessions = {}
        for name, flags in (("off", []), ("on", [f"--metrics_address={address}"])):
            (socket,) = daemons.start(1, 1, *flags)
            sessions[name] = dmuond.Session(socket, rank=0, world_size=1)
            register(sessions[name])
        for session in sessions.values():
            session.step(scalars())
        print("#      page  p50(ms)  p99(ms)")
        for path in ("/metrics", "/statusz"):
            times = sorted(fetch_ms(address, path) for _ in range(200))
            print(f"{path:>11} {times[100]:>8.2f} {times[198]:>8.2f}")
        ended = threading.Event()

        def scrape() -> None:
            while not ended.wait(1.0):
                fetch_ms(address, "/metrics")

        scraper = threading.Thread(target=scrape)
        scraper.start()
        steps: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(options.blocks):
            for name, session in sessions.items():
                for _ in range(options.steps):
                    begin = time.perf_counter()
                    session.step(scalars())
                    steps[name].append(time.perf_counter() - begin)
        ended.set()
        scraper.join()
        off, on = (statistics.median(steps[name]) * 1e3 for name in ("off", "on"))
        print(f"# step: {off:.2f} ms without, {on:.2f} ms with: {100 * (on / off - 1):+.2f} %")
        for session in sessions.values():
            session.close()


if __name__ == "__main__":
    main()
