"""The experiments: which variants take turns on which bed."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.transfer.bed import PEER, Bed, Cores, PullReader, RowsOf, Way, copier
from benchmarks.transfer.receives import Receive, Receiver
from benchmarks.transfer.sampling import Read, Watch, interleave, wait
from benchmarks.transfer.subject import Reading, Subject, region_rows
from pd_transfer.cli.transfers import NUMBERINGS
from pd_transfer.core.layout import DescriptorRow, descriptor_rows

OURS, BUILT_IN = "ours", "built-in"
LARGE, LARGE_PLAIN, MEMCPY = "one READ, same agent", "one READ, plain agent", "memcpy"
PULL, PULL_AND_WORD, WORD = "pull", "pull and word", "word"
BUILT_IN_PARAMS = {"num_threads": "4"}
"""As vLLM's connector makes its agent, which carries out reads of 1,024 descriptors or more on these threads."""
OUR_SPLIT = 2
SPLITS = (OUR_SPLIT, 1)
"""The connector's ``split_batch_size``, and one with which a lease word goes to the worker thread, too."""


class Pace(NamedTuple):
    """Seconds for each experiment, and the fewest rounds. One cell is one size on one bed."""

    cma_cell: float
    tcp_cell: float
    words: float
    behind: float
    receives: float
    least: int

    def cell(self, way: Way) -> float:
        """Reads over TCP take longer."""
        return self.tcp_cell if way.engine_config else self.cma_cell


FULL = Pace(cma_cell=5.0, tcp_cell=14.0, words=6.0, behind=5.0, receives=8.0, least=11)
QUICK = Pace(cma_cell=0.4, tcp_cell=0.8, words=1.0, behind=0.8, receives=1.0, least=3)

Variant = Callable[[], Read]

Cells = dict[int, dict[str, list[Read]]]
"""Size asked for -> variant -> samples."""


class Behind(NamedTuple):
    """A lease word that is asked for while a large read is under way; seconds from its submission.

    ``is_behind``: 1.0 when the large read was done before the word was there, else 0.0.
    """

    word_seconds: float
    word_post_seconds: float
    read_seconds: float
    is_behind: float


def rows_of(subject: Subject) -> RowsOf:
    """Our descriptors."""
    return partial(descriptor_rows, subject.layout)


def key(who: str, numbering: str) -> str:
    """The name of a variant that depends on how blocks are numbered."""
    return f"{who}, {numbering}"


def run_pulls(way: Way, cores: Cores, subject: Subject, pace: Pace) -> Cells:
    """Every size and numbering, ours and the built-in worker's descriptors, beside the three measures."""
    sizes = list(dict.fromkeys(reading.size_mib for reading in subject.readings))
    lengths = [subject.reading(size, next(iter(NUMBERINGS))).plan.num_bytes for size in sizes]

    def whole(address: int) -> list[DescriptorRow]:
        return [DescriptorRow(address, length, length, 1) for length in lengths]

    cells: Cells = {}
    with Bed.opened(way, cores, max(subject.layout.region_bytes, *lengths)) as bed:
        ours, large_plain = bed.ours(rows_of(subject)), bed.plain(whole)
        # One descriptor would not go to the worker thread, as a pull does.
        large = bed.ours(whole, {"split_batch_size": "1"})
        built_in = bed.plain(partial(region_rows, subject.layout), BUILT_IN_PARAMS)
        for number, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
            index = np.array([number], dtype=np.int32)
            checked: dict[str, tuple[Variant, int]] = {
                LARGE: (partial(large.read, index, index), length),
                LARGE_PLAIN: (partial(large_plain.read, index, index), length),
            }
            for name in NUMBERINGS:
                reading = subject.reading(size, name)
                plan, regions = reading.plan, reading.built_in
                checked[key(OURS, name)] = (partial(ours.read, plan.local, plan.remote), plan.num_bytes)
                checked[key(BUILT_IN, name)] = (partial(built_in.read, regions, regions), reading.num_built_in_bytes)
            for name, (read, num_bytes) in checked.items():
                bed.check(f"{way.name}, {subject.name}, {size} MiB, {name}", read, num_bytes)
            variants = {name: read for name, (read, _) in checked.items()}
            cells[size] = interleave(variants | {MEMCPY: copier(bed, length)}, pace.cell(way), pace.least)
    return cells


def run_words(way: Way, cores: Cores, reading: Reading, subject: Subject, pace: Pace) -> dict[str, list[Read]]:
    """One pull without and with the lease word after it, and the word alone, by ``split_batch_size``."""
    plan = reading.plan
    with Bed.opened(way, cores, subject.layout.region_bytes) as bed:
        variants: dict[str, Variant] = {}
        for split in SPLITS:
            reader = _split_reader(bed, subject, split)
            variants[split_key(PULL, split)] = partial(reader.read, plan.local, plan.remote)
            variants[split_key(PULL_AND_WORD, split)] = partial(reader.read_and_word, plan.local, plan.remote)
            variants[split_key(WORD, split)] = reader.read_word
        return interleave(variants, pace.words, pace.least)


def run_behind(
    way: Way, cores: Cores, readings: list[Reading], subject: Subject, pace: Pace
) -> dict[str, list[Behind]]:
    """A lease word that is asked for right after a large read has been submitted, by ``split_batch_size``."""
    with Bed.opened(way, cores, subject.layout.region_bytes) as bed:
        readers = {split: _split_reader(bed, subject, split) for split in SPLITS}
        variants = {
            split_key(reading.numbering, split): partial(_read_word_behind, reader, reading, way)
            for reading in readings
            for split, reader in readers.items()
        }
        return interleave(variants, pace.behind, pace.least)


def run_receives(way: Way, cores: Cores, subject: Subject, pace: Pace) -> dict[tuple[int, str], list[Receive]]:
    """What every reading costs the threads of a decode worker."""
    with Bed.opened(way, cores, subject.layout.region_bytes) as bed, closing(Receiver(bed, subject)) as receiver:
        found = interleave(
            {f"{reading.size_mib} {reading.numbering}": receiver.variant(reading) for reading in subject.readings},
            pace.receives,
            pace.least,
        )
    samples = iter(found.values())
    return {(reading.size_mib, reading.numbering): next(samples) for reading in subject.readings}


def split_key(what: str, split: int) -> str:
    """The name of a variant that depends on ``split_batch_size``."""
    return f"{what}, {split}"


def _split_reader(bed: Bed, subject: Subject, split: int) -> PullReader:
    """With its connections made: the read of a word and that of blocks may go by different ones."""
    reader = bed.ours(rows_of(subject), {"split_batch_size": str(split)})
    reader.read_word()
    return reader


def _read_word_behind(reader: PullReader, reading: Reading, way: Way) -> Behind:
    watch, transport = Watch(), reader.transport
    transfer = transport.submit_read(PEER, reading.plan.local, reading.plan.remote)
    word = reader.read_word()
    is_behind = transport.poll(transfer)
    wait(lambda: transport.poll(transfer), way.pauses)
    transport.release(transfer)
    return Behind(word.seconds, word.post_seconds, watch.read()[0], float(is_behind))
