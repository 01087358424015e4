"""How the figures stand to the targets."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.report import Cell, Table
from benchmarks.transfer.runs import LARGE, LARGE_PLAIN, OUR_SPLIT, OURS, PULL, PULL_AND_WORD, key, split_key
from benchmarks.transfer.sampling import ratio, spread
from benchmarks.transfer.subject import Reading
from benchmarks.transfer.tables import Pulls, Receives, Words

LEAST_GOODPUT = {LARGE: 0.9, LARGE_PLAIN: 0.8}
MOST_THREAD_MICROSECONDS = 150.0
MOST_WORD_PERCENT = 3.0


class Verdict(NamedTuple):
    """One target on one bed: its limit, and the medians that it holds for, by what they were measured on."""

    what: str
    limit: float
    is_least: bool
    figures: dict[str, float]

    def row(self) -> tuple[Cell, ...]:
        """With the figure that is worst, and where the target was missed."""
        pick = min if self.is_least else max
        missed = [name for name, figure in self.figures.items() if not self._keeps(figure)]
        verdict = "kept" if not missed else "missed" if len(missed) == len(self.figures) else "missed at "
        named = ", ".join(missed) if verdict == "missed at " else ""
        target = f"at {'least' if self.is_least else 'most'} {self.limit:g}"
        return (
            self.what,
            target,
            pick(self.figures.values()),
            pick(self.figures, key=self.figures.__getitem__),
            verdict + named,
        )

    def _keeps(self, figure: float) -> bool:
        return figure >= self.limit if self.is_least else figure <= self.limit


def verdicts_table(pulls: Sequence[Pulls], receives: Sequence[Receives], words: Sequence[Words]) -> Table:
    """All targets of this benchmark."""
    found = [*_goodput(pulls), *_threads(receives), *_words(words)]
    columns = ("what", "target", "worst median", "at", "verdict")
    return Table("Targets", columns, tuple(verdict.row() for verdict in found))


def _goodput(pulls: Iterable[Pulls]) -> Iterable[Verdict]:
    for way, subject, cells in pulls:
        for other, least in LEAST_GOODPUT.items():
            figures = {
                _size(reading): ratio(
                    cells[reading.size_mib][other], cells[reading.size_mib][key(OURS, reading.numbering)]
                ).median
                for reading in subject.readings
                if reading.numbering == "contiguous"
            }
            yield Verdict(f"goodput over {other}, contiguous blocks; {way.name}, {subject.name}", least, True, figures)


def _threads(receives: Iterable[Receives]) -> Iterable[Verdict]:
    """vLLM's thread alone: ours may take as long as it takes."""
    for way, subject, samples in receives:
        figures = {
            f"{_size(reading)} {reading.numbering}": 1e6
            * spread(samples[reading.size_mib, reading.numbering], "engine_seconds").median
            for reading in subject.readings
        }
        what = f"CPU time of a receive, vLLM's worker thread, µs; {way.name}, {subject.name}"
        yield Verdict(what, MOST_THREAD_MICROSECONDS, False, figures)


def _words(words: Iterable[Words]) -> Iterable[Verdict]:
    for way, samples in words:
        both, pull = (samples[split_key(what, OUR_SPLIT)] for what in (PULL_AND_WORD, PULL))
        percent = (ratio(both, pull).median - 1) * 100
        yield Verdict(f"lease word, % of a pull; {way.name}", MOST_WORD_PERCENT, False, {"4 MiB": percent})


def _size(reading: Reading) -> str:
    return f"{reading.plan.num_bytes / 2**20:.3g} MiB"
