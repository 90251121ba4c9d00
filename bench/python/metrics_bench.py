#!/usr/bin/env python3
"""What it costs to be seen: requests for /metrics and /statusz, and steps beside them.

    metrics_bench.py --programs=build/cpu/bin

One daemon has a job of 10,000 parameters. In every other block of steps /metrics is asked for four
times a second, sixty times as often as Prometheus does by default; in the others nobody looks.
Prints the time of a request, and the median step of both kinds of blocks.
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
        (socket,) = daemons.start(1, 1, f"--metrics_address={address}")
        session = dmuond.Session(socket, rank=0, world_size=1)
        register(session)
        for _ in range(options.steps):
            session.step(scalars())
        print("#      page  p50(ms)  p99(ms)")
        for path in ("/metrics", "/statusz"):
            times = sorted(fetch_ms(address, path) for _ in range(200))
            print(f"{path:>11} {times[100]:>8.2f} {times[198]:>8.2f}")
        ended, looks = threading.Event(), threading.Event()

        def scrape() -> None:
            while not ended.wait(0.25):
                if looks.is_set():
                    fetch_ms(address, "/metrics")

        scraper = threading.Thread(target=scrape)
        scraper.start()
        steps: dict[bool, list[float]] = {False: [], True: []}
        for block in range(2 * options.blocks):
            seen = block % 2 == 1
            (looks.set if seen else looks.clear)()
            for _ in range(options.steps):
                begin = time.perf_counter()
                session.step(scalars())
                steps[seen].append(time.perf_counter() - begin)
        ended.set()
        scraper.join()
        unseen, seen = (statistics.median(steps[which]) * 1e3 for which in (False, True))
        more = 100 * (seen / unseen - 1)
        print(f"# step: {unseen:.2f} ms, beside scrapes {seen:.2f}: {more:+.2f} %")
        session.close()


if __name__ == "__main__":
    main()
