"""The soak: thousands of transfers, aborts at any moment, prefill killed and restarted. Is everything clean afterwards?

``scripts/soak`` runs it and prints one table; exit status 0 when every line of it is good.
"""

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pd_transfer.core.outcomes import Level, Outcome, Outcomes
from pd_transfer.core.params import RequestId
from pd_transfer.core.receives import ReceiveRequest
from tests.faults.soak_bed import STEP_SECONDS, AbortAt, DecodeEngine, Held, PrefillProcess, Request, Usage
from tests.runtime.builders import DEADLINE_SECONDS

MAX_GROWTH_BYTES = 8 * 2**20
"""How much of a process's memory may be gained after its warm-up, along a straight line through the samples. The
allocators of Python, UCX and ZeroMQ scatter by some MiB. In 2,000 transfers this is 5.5 KiB for each: a third of a page
of KV. Smaller leaks show in longer runs, for the bound stays the same."""
WARM_UP = 0.25
"""The first part of a run, and of each life of prefill, in which memory may grow as it likes."""
NUM_SAMPLES, _MIN_SAMPLES = 200, 10
MAX_REQUESTS = 8
MAX_PROMPT_BLOCKS = 12
ABORT_SHARE = 0.3
"""Of the requests that reach decode."""
LOST_SHARE = 0.03
"""Of the prompts: they never reach decode, so that their leases expire."""
RESET_SHARE = 0.01
"""Of the turns in which prefill ends all of its leases at once."""
LASTING_LEVELS = (Level.LEASES, Level.LEASED_BLOCKS, Level.ADMISSIONS, Level.BORROWED_LEASES)
WAYS = {"cma": {}, "tcp": {"engine_config": "TLS=tcp"}}


@dataclass(frozen=True)
class Plan:
    """How much of what. Restarts are spread evenly."""

    num_transfers: int
    num_restarts: int
    backend_params: dict[str, str] = field(default_factory=dict)
    seed: int = 1


@dataclass(frozen=True)
class Sample:
    """Both processes at one moment; ``life`` counts prefill's."""

    num_transfers: int
    life: int
    decode: Usage
    prefill: Usage


@dataclass
class Record:
    """What was seen. ``rests`` are the moments at which nothing was under way: after each warm-up, and at the end.

    ``decode`` and ``prefill`` are what was held at the end, ``busiest`` the most that was ever seen of each.
    """

    plan: Plan
    num_transfers: int = 0
    num_restarts: int = 0
    num_wrong: int = 0
    outcomes: Outcomes = field(default_factory=Counter)
    aborts: Counter[AbortAt] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    rests: list[Sample] = field(default_factory=list)
    decode: Held = field(default_factory=lambda: Held(Counter(), 0))
    prefill: Held = field(default_factory=lambda: Held(Counter(), 0))
    busiest: Counter[Level] = field(default_factory=Counter)


class Soak:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        after_transfer: Callable[[], None] = lambda: None,
        after_read: Callable[[ReceiveRequest], None] = lambda _: None,
    ) -> None:
        """``after_transfer`` and ``after_read`` do nothing; tests plant leaks and damage there."""
        self._plan = plan
        self._after_transfer = after_transfer
        self._random = random.Random(plan.seed)
        self.decode = DecodeEngine(plan.backend_params, after_read)
        self._prefill = PrefillProcess(0, plan.backend_params)
        self._prompts = itertools.count(1)
        self._process = psutil.Process()
        self.record = Record(plan)
        self._wait_until_prefill_is_ready()

    def run(self, advance: Callable[[int], None] = lambda num_transfers: None) -> Record:
        """All lives of prefill; ``advance`` is told how far it is. Raises AssertionError when nothing moves."""
        num_lives = self._plan.num_restarts + 1
        for life in range(num_lives):
            begin, end = (self._plan.num_transfers * n // num_lives for n in (life, life + 1))
            if life:
                self._restart()
            # More verified reads than can be left over from the life before: decode is connected to this one.
            num_verified = self.decode.num_verified + MAX_REQUESTS + 1
            self._transfer_until(begin + int((end - begin) * WARM_UP), num_verified, advance)
            self._rest()
            self._transfer_until(end, 0, advance)
        self._rest()
        self.record.num_transfers, self.record.num_wrong = self.decode.num_transfers, self.decode.num_wrong
        return self.record

    def close(self) -> None:
        """End both engines."""
        self.decode.close()
        self._prefill.kill()
        self._prefill.close()

    def _transfer_until(self, num_transfers: int, num_verified: int, advance: Callable[[int], None]) -> None:
        step = max(1, self._plan.num_transfers // NUM_SAMPLES)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.decode.num_transfers < num_transfers or self.decode.num_verified < num_verified:
            assert time.monotonic() < deadline, f"no transfer has ended for {DEADLINE_SECONDS} s"
            before = self.decode.num_transfers
            self._begin_requests()
            self._take_ledgers()
            if self._random.random() < RESET_SHARE:
                self._prefill.call("end_leases")
            self._turn()
            for done in range(before + 1, self.decode.num_transfers + 1):
                self._after_transfer()
                deadline = time.monotonic() + DEADLINE_SECONDS
                if done % step == 0:
                    self.record.samples.append(self._sample())
            advance(self.decode.num_transfers)

    def _begin_requests(self) -> None:
        """As many as decode takes at a time, as long as prefill has room."""
        while self.decode.num_requests < MAX_REQUESTS:
            prompt = next(self._prompts)
            handed = self._prefill.call("hand_off", prompt, self._random.randint(1, MAX_PROMPT_BLOCKS))
            if handed is None:
                return
            if self._random.random() < LOST_SHARE:
                continue
            params, table = handed
            is_aborted = self._random.random() < ABORT_SHARE
            abort_at = self._random.choice(list(AbortAt)) if is_aborted else AbortAt.NEVER
            self.record.aborts[abort_at] += 1
            self.decode.arrive(Request(RequestId(f"d{prompt}"), prompt, table, abort_at), params)

    def _turn(self) -> None:
        before = self.decode.num_requests
        self.decode.step()
        if self.decode.num_requests == before:
            time.sleep(STEP_SECONDS)

    def _restart(self) -> None:
        """Kill prefill when some reads are under way and some are about to begin; the same engine comes back."""
        self._begin_requests()
        self.decode.step()
        self._begin_requests()
        self._prefill.kill()
        self.decode.step()
        self._prefill.close()
        self._prefill = PrefillProcess(self._prefill.port, self._plan.backend_params)
        self._wait_until_prefill_is_ready()
        self.record.num_restarts += 1

    def _wait_until_prefill_is_ready(self) -> None:
        while not self._prefill.is_ready:
            self._turn()

    def _rest(self) -> None:
        """Begin nothing more, until nothing is under way and every lease is over."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.decode.num_requests or any(self._take_ledgers()):
            if time.monotonic() > deadline:
                break
            self._turn()
        self.record.rests.append(self._sample())

    def _take_ledgers(self) -> tuple[Held, Held]:
        self.record.decode, counted = self.decode.ledger()
        self.record.prefill, counted_there = self._prefill.call("ledger")
        self.record.outcomes.update(counted + counted_there)
        self.record.busiest |= self.record.decode.levels + self.record.prefill.levels
        return self.record.decode, self.record.prefill

    def _sample(self) -> Sample:
        usage = Usage.of(self._process), self._prefill.usage()
        return Sample(self.decode.num_transfers, self.record.num_restarts, *usage)


# The verdict


@dataclass(frozen=True)
class Check:
    """One line of the table; ``bound`` is empty where the figure is only told."""

    what: str
    figure: str
    bound: str = ""
    is_good: bool = True


def verdict(record: Record) -> list[Check]:
    """What must hold of a run."""
    plan, outcomes = record.plan, record.outcomes
    num_verified, num_aborted = outcomes[Outcome.RECEIVE_VERIFIED], outcomes[Outcome.RECEIVE_ABORTED]
    num_errors = outcomes[Outcome.INTERNAL_ERROR]
    told = [Check(f"  {outcome.value}", str(count)) for outcome, count in sorted(outcomes.items()) if count]
    told += [Check(f"  at most {level.value}", str(count)) for level, count in record.busiest.items()]
    told += [Check(f"  abort: {stage.name.lower()}", str(count)) for stage, count in record.aborts.items()]
    last_life = [sample for sample in record.samples if sample.life == plan.num_restarts]
    last_rests = [rest for rest in record.rests if rest.life == plan.num_restarts]
    return [
        *told,
        _at_least("transfers", record.num_transfers, plan.num_transfers),
        _at_least("prefill killed and restarted", record.num_restarts, plan.num_restarts),
        _at_least("verified", num_verified, 1),
        _at_least("aborted while they were read", num_aborted, 1),
        _none("verified with wrong bytes", record.num_wrong),
        _none("internal errors", num_errors),
        _busiest(record.busiest),
        *_ledger("decode", record.decode),
        *_ledger("prefill", record.prefill),
        *_machine("decode", [(s.num_transfers, s.decode) for s in record.samples], [r.decode for r in record.rests]),
        *_machine("prefill", [(s.num_transfers, s.prefill) for s in last_life], [r.prefill for r in last_rests]),
    ]


def _at_least(what: str, figure: int, bound: int) -> Check:
    return Check(what, f"{figure:,}", f"at least {bound:,}", figure >= bound)


def _none(what: str, figure: int) -> Check:
    return Check(what, str(figure), "0", figure == 0)


def _busiest(levels: Counter[Level]) -> Check:
    """A ledger that is always empty says nothing at the end. Reads are too short to be seen for certain."""
    unseen = [level.value for level in LASTING_LEVELS if not levels[level]]
    return Check("seen held at some time", f"no {', '.join(unseen)}" if unseen else "all", "all", not unseen)


def _ledger(engine: str, held: Held) -> list[Check]:
    levels = ", ".join(f"{level.value} {count}" for level, count in held.levels.items() if count)
    return [
        Check(f"{engine}: held at the end", levels or "nothing", "nothing", not levels),
        _none(f"{engine}: blocks not given back", held.num_blocks),
    ]


def _machine(engine: str, samples: Sequence[tuple[int, Usage]], rests: Sequence[Usage]) -> list[Check]:
    growth = memory_growth([(x, usage.rss_bytes) for x, usage in samples])
    return [
        Check(
            f"{engine}: memory gained after warm-up",
            f"{growth / 2**20:.1f} MiB",
            f"at most {MAX_GROWTH_BYTES // 2**20} MiB",
            growth <= MAX_GROWTH_BYTES,
        ),
        _gained(f"{engine}: file descriptors gained", [usage.num_fds for usage in rests]),
        _gained(f"{engine}: threads gained", [usage.num_threads for usage in rests]),
    ]


def memory_growth(samples: Sequence[tuple[int, int]]) -> float:
    """Bytes gained from the end of the warm-up to the end, along the regression line through (transfers, bytes).

    Infinite with fewer than ten samples: then nothing was measured.
    """
    if not samples:
        return float("inf")
    begin, end = samples[0][0], samples[-1][0]
    after = [sample for sample in samples if sample[0] >= begin + WARM_UP * (end - begin)]
    if len(after) < _MIN_SAMPLES:
        return float("inf")
    xs, ys = np.asarray(after, dtype=np.float64).T
    return float(np.polyfit(xs - xs[0], ys, 1)[0] * (xs[-1] - xs[0]))


def _gained(what: str, counts: Sequence[int]) -> Check:
    return Check(what, f"{counts[0]} -> {counts[-1]}", "none", len(counts) > 1 and counts[-1] <= counts[0])


# The command


def _table(checks: Sequence[Check], title: str) -> Table:
    table = Table(title=title)
    for column in ("what", "figure", "must be", ""):
        table.add_column(column)
    for check in checks:
        mark = "" if not check.bound else "[green]ok" if check.is_good else "[bold red]RED"
        table.add_row(check.what, check.figure, check.bound, mark)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, print the table; 0 when all is good."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--num-transfers", type=int, default=2000)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--transport", choices=WAYS, default="cma")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    plan = Plan(options.num_transfers, options.restarts, WAYS[options.transport], options.seed)
    console, begin = Console(), time.monotonic()
    with closing(Soak(plan)) as soak, Progress(console=console) as progress:
        task = progress.add_task("transfers", total=plan.num_transfers)
        checks = verdict(soak.run(lambda num_transfers: progress.update(task, completed=num_transfers)))
    seconds = time.monotonic() - begin
    console.print(_table(checks, f"{plan.num_transfers:,} transfers over {options.transport}, {seconds:.0f} s"))
    return 0 if all(check.is_good for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
