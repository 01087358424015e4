"""``scripts/bench NAME``: run one benchmark. Each leaves NAME.json and NAME.md in a folder (--out, default logs/bench).

A benchmark is a module with ``main(arguments) -> exit status``; it makes its report with ``benchmarks.report`` and has
its line in BENCHMARKS.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "plan": ("benchmarks.plan.bench", "bytes, descriptors and planning time for the geometries of real models"),
    "transfer": ("benchmarks.transfer.bench", "pulls over real NIXL against one large READ, memcpy and built-in"),
    "handoff": ("benchmarks.handoff.bench", "from prefill's answer to decode's first token, beside the built-in one"),
    "serve": ("benchmarks.serve.bench", "vllm bench serve: a single engine, the built-in connector, ours"),
    "idle": ("benchmarks.idle_cost", "CPU of an idle pair of engines, and with 100 leases waiting"),
    "proxy": ("benchmarks.proxy.bench", "CPU, time and memory of the proxy, next to other proxies, with mock engines"),
    "scale": ("benchmarks.scale.bench", "1,000 x 1,000 engines, simulated from unit costs that are measured here"),
    "faults": ("benchmarks.faults.bench", "the same faults against the built-in connector and ours; starts engines"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that is named first; what follows is its own."""
    names = "\n".join(f"  {name:10}{what}" for name, (_, what) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=f"Run one benchmark:\n{names}\n`scripts/bench NAME --help` tells its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    parsed = parser.parse_args(arguments)
    # Engines that were started are stopped on the way out, also of a run that is killed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    module, _ = BENCHMARKS[parsed.name]
    status: int = importlib.import_module(module).main(parsed.arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
