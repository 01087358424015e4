"""Taking samples of several variants in turn, so that what disturbs one disturbs all; medians and p99 of them."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=NamedTuple)

_MOST_ROUNDS = 300
_PATIENCE_SECONDS = 60.0


class Read(NamedTuple):
    """One read, in seconds: until it was done, until it was posted, and CPU time of the calling thread for each."""

    seconds: float
    post_seconds: float
    cpu_seconds: float
    post_cpu_seconds: float


class Watch:
    """Wall time, and CPU time of this thread, since it was made."""

    def __init__(self) -> None:
        self._cpu = time.thread_time()
        self._begin = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Seconds, CPU seconds."""
        now = time.perf_counter()
        return now - self._begin, time.thread_time() - self._cpu


def wait(is_done: Callable[[], bool], pauses: Callable[[int], float] | None) -> None:
    """Ask until it is done, and pause after the n-th no for ``pauses(n)`` seconds. Raises TimeoutError.

    NIXL knows no time-outs: a read from a process that hangs never ends.
    """
    num_polls, deadline = 0, time.monotonic() + _PATIENCE_SECONDS
    while not is_done():
        num_polls += 1
        if pauses is not None:
            time.sleep(pauses(num_polls))
        if time.monotonic() > deadline:
            raise TimeoutError(f"a read has not ended within {_PATIENCE_SECONDS} s")


def interleave(variants: Mapping[str, Callable[[], T]], seconds: float, least: int) -> dict[str, list[T]]:
    """Call every variant once in each round, as many rounds as there is time for, but at least ``least``.

    The order rotates, so that no variant always follows the same one. The first round warms up and is not counted.
    """
    names = list(variants)
    found: dict[str, list[T]] = {name: [] for name in names}
    deadline, num_rounds = time.monotonic() + seconds, 0
    is_collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        while num_rounds <= least or (num_rounds <= _MOST_ROUNDS and time.monotonic() < deadline):
            first = num_rounds % len(names)
            for name in names[first:] + names[:first]:
                sample = variants[name]()
                if num_rounds:
                    found[name].append(sample)
            num_rounds += 1
    finally:
        if is_collecting:
            gc.enable()
    return found


def column(samples: Sequence[T], field: str) -> npt.NDArray[np.float64]:
    """One field of all samples."""
    return np.array([getattr(sample, field) for sample in samples], dtype=np.float64)


class Spread(NamedTuple):
    """Of times or ratios."""

    median: float
    p99: float


def spread(samples: Sequence[T], field: str = "seconds") -> Spread:
    """Of one variant's samples."""
    values = column(samples, field)
    return Spread(float(np.median(values)), float(np.percentile(values, 99)))


def ratio(above: Sequence[T], below: Sequence[T], field: str = "seconds") -> Spread:
    """Of two variants' samples, round by round: what disturbs a whole round falls out."""
    values = column(above, field) / column(below, field)
    return Spread(float(np.median(values)), float(np.percentile(values, 99)))
