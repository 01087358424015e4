"""The lease words of one prefill worker: what readers compare to know that a lease still held.

A word is 64 bits: the worker's boot word in the high half, a generation in the low half. Readers get 8-byte aligned
reads, so a word is never torn; and if it were, the only effect would be a read refused for nothing.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from pd_transfer.core.leases import WordBatch

WORD_BYTES = 8
"""Word ``slot`` of a table is ``slot * WORD_BYTES`` after its address."""
GENERATION_BITS = 32


def word_value(boot_word: int, generation: int) -> int:
    """The value of a word: ``boot_word`` (32 bits, minted by the worker) above ``generation``."""
    return boot_word << GENERATION_BITS | generation & (1 << GENERATION_BITS) - 1


class LeaseWords:
    """The table itself. ``fence`` makes stores visible to other readers of the memory before anything that follows."""

    def __init__(self, table: npt.NDArray[np.uint64], boot_word: int, fence: Callable[[], None]) -> None:
        self._table = table
        self._boot_word = boot_word
        self._fence = fence
        self._confirmed: list[int] = []
        table[:] = word_value(boot_word, 0)

    def store(self, batches: Iterable[WordBatch]) -> None:
        """Store the changes of some batches, then fence, then count them as confirmed."""
        stored = []
        for batch in batches:
            for change in batch.changes:
                self._table[change.slot] = word_value(self._boot_word, change.generation)
            stored.append(batch.batch_id)
        if stored:
            self._fence()
            self._confirmed.extend(stored)

    def take_confirmed(self) -> tuple[int, ...]:
        """Batches stored since the last call; each is handed out once."""
        confirmed, self._confirmed = tuple(self._confirmed), []
        return confirmed

    def revoke_all(self) -> None:
        """Make every word differ from every grant: the memory behind them may be reused from now on."""
        self._table[:] = word_value(~self._boot_word & (1 << GENERATION_BITS) - 1, 0)
        self._fence()
