"""What does a gigabyte to S3 and back cost? Good enough is: over TLS, up and down together, at most 1.25 times the CPU
of the cheapest other client.

Sends one object from shared memory and fills shared memory from one, over plain HTTP and over TLS, with S3Store and
with what else there is, each in a process of its own, one after the other in every round, so that all have the same
weather. CPU is user and system time of the client's process. The server (s3_sink.py) is a process of its own, which
drops its bytes and makes them up; it shares the cores, so GB/s here is no network's. Before it is measured every client
moves 64 MB each way. A client that is not installed is a row that says so.

    python benchmarks/bench_s3.py [--mb 512] [--rounds 5] [--quick] [--check] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from circumstances import Row, at_most, circumstances, environment, show, spread
from processes import own_mb
from s3_peers import PEERS, REGION, Endpoint, NotPossible
from s3_sink import content, write_certificates

BAR = 1.25
WARM_UP_BYTES = 64 * 10**6
TRANSPORTS = ("http", "TLS")
WAYS = ("put", "get")
LIBRARIES = ("boto3", "awscrt", "obstore", "s3torchconnector")


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    size = (64 if options.quick else options.mb) * 10**6
    if options.peer is not None:
        print(json.dumps(measure(options.peer, Endpoint(options.url, options.authority), size)))
        return 0
    results: dict[tuple[str, str], list[Result]] = {(name, how): [] for how in TRANSPORTS for name in PEERS}
    with servers() as endpoints:
        for _round in range(1 if options.quick else options.rounds):
            for how, endpoint in endpoints.items():
                for name in PEERS:
                    results[name, how].append(run(name, endpoint, size))
    around = circumstances(LIBRARIES)
    rows = [row(name, how, found) for (name, how), found in results.items()]
    ours, *others = (cost(results[name, "TLS"]) for name in PEERS)
    question = "CPU of a GB to S3 and back over TLS, ours / the cheapest other"
    verdict = at_most(question, BAR, ours / min(others))
    show(around, rows, [verdict], as_json=options.json)
    return 1 if options.check and not verdict.met else 0


@dataclass(frozen=True)
class Result:
    """What one process found; `why_not` where it could not even begin.

    Attributes:
        gb_per_s: each way.
        cpu_s_per_gb: each way.
        own_mb: more memory of its own than before it knew the client.
    """

    why_not: str = ""
    gb_per_s: tuple[float, ...] = ()
    cpu_s_per_gb: tuple[float, ...] = ()
    own_mb: float = 0.0


def row(name: str, how: str, found: list[Result]) -> Row:
    first, ways = found[0], range(len(WAYS))
    empty = dict.fromkeys(("up, CPU s/GB", "down, CPU s/GB", "up, GB/s", "down, GB/s"), "")
    if first.why_not:
        return {"": how, "client": name, **empty, "own MB": first.why_not}
    costs = [spread([result.cpu_s_per_gb[way] for result in found]) for way in ways]
    rates = [f"{statistics.median(result.gb_per_s[way] for result in found):.2f}" for way in ways]
    own = f"{statistics.median(result.own_mb for result in found):.0f}"
    return {"": how, "client": name, **dict(zip(empty, [*costs, *rates], strict=True)), "own MB": own}


def cost(found: list[Result]) -> float:
    """CPU seconds for a gigabyte up and down."""
    return statistics.median(sum(result.cpu_s_per_gb) if not result.why_not else float("inf") for result in found)


def measure(name: str, endpoint: Endpoint, size: int) -> dict[str, object]:
    """In a process of its own: what `Result` holds."""
    memory, warm = shared_memory(size), shared_memory(WARM_UP_BYTES)
    before_mb = own_mb(os.getpid())
    try:
        peer = PEERS[name](endpoint)
    except ImportError:
        return {"why_not": "not installed"}
    except NotPossible as err:
        return {"why_not": str(err)}
    peer.put(warm)
    peer.get(warm)
    figures = [timed(lambda: peer.put(memory), size), timed(lambda: peer.get(memory), size)]
    for at in (0, size // 2, size - 64):
        if memory[at : at + 64] != content(at, 64):
            raise AssertionError(f"{name}: wrong bytes at {at}")
    rates, costs = zip(*figures, strict=True)
    return {"gb_per_s": rates, "cpu_s_per_gb": costs, "own_mb": own_mb(os.getpid()) - before_mb}


def timed(call: Callable[[], None], size: int) -> tuple[float, float]:
    """GB/s, and CPU seconds of this process per GB."""
    cpu, began = cpu_s(), time.monotonic()
    call()
    return size / 1e9 / (time.monotonic() - began), (cpu_s() - cpu) * 1e9 / size


def run(name: str, endpoint: Endpoint, size: int) -> Result:
    child = subprocess.run(
        [
            *(sys.executable, __file__, "--peer", name, "--url", endpoint.url, "--mb", str(size // 10**6)),
            *(("--authority", endpoint.authority) if endpoint.authority else ()),
        ],
        env=environment(
            AWS_ACCESS_KEY_ID="key",
            AWS_SECRET_ACCESS_KEY="secret",
            AWS_DEFAULT_REGION=REGION,
            AWS_EC2_METADATA_DISABLED="true",
            **({"AWS_CA_BUNDLE": endpoint.authority} if endpoint.authority else {}),
        ),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    return Result(**json.loads(child.stdout))


@contextlib.contextmanager
def servers() -> Iterator[dict[str, Endpoint]]:
    """A plain server and one with TLS, while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, contextlib.ExitStack() as stack:
        authority, certificate, key = write_certificates(Path(name))
        plain = stack.enter_context(server())
        secret = stack.enter_context(server(str(certificate), str(key)))
        yield {
            "http": Endpoint(f"http://localhost:{plain}", None),
            "TLS": Endpoint(f"https://localhost:{secret}", str(authority)),
        }


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Its port."""
    command = [sys.executable, str(Path(__file__).with_name("s3_sink.py")), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        # Leaving closes its stdin, on which it ends.


def shared_memory(size: int) -> memoryview:
    """As of a slot: memory with a descriptor, every page of it there."""
    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, size)
    view = memoryview(mmap.mmap(descriptor, size))
    os.close(descriptor)
    for at in range(0, size, 1 << 20):
        view[at : at + (1 << 20)] = b"\x5a" * min(1 << 20, size - at)
    return view


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of 64 MB: does it run at all")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--authority", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
