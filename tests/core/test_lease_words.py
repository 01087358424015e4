"""The table of lease words: values, order of stores, fences and confirmations."""

import numpy as np
import pytest

from pd_transfer.core.lease_words import WORD_BYTES, LeaseWords, word_value
from pd_transfer.core.leases import WordBatch, WordChange

BOOT = 0xCAFE


class Rig:
    """A table whose fence writes down what readers could see by then, and what was confirmed by then."""

    def __init__(self) -> None:
        self.table = np.zeros(4, dtype=np.uint64)
        self.fences: list[tuple[list[int], tuple[int, ...]]] = []
        self.words = LeaseWords(self.table, BOOT, self.fence)

    def fence(self) -> None:
        self.fences.append(([int(word) for word in self.table], self.words.take_confirmed()))


def batch(batch_id: int, *changes: tuple[int, int]) -> WordBatch:
    return WordBatch(batch_id, tuple(WordChange(*change) for change in changes))


FRESH = word_value(BOOT, 0)


@pytest.mark.parametrize(
    ("boot_word", "generation", "value"),
    [
        (0, 0, 0),
        (BOOT, 0, 0xCAFE_0000_0000),
        (BOOT, 5, 0xCAFE_0000_0005),
        (0xFFFF_FFFF, 0xFFFF_FFFF, 2**64 - 1),
        (BOOT, 2**32, 0xCAFE_0000_0000),  # generations wrap, and the boot word stays
        (BOOT, 2**32 + 1, 0xCAFE_0000_0001),
    ],
)
def test_word_value(boot_word, generation, value):
    assert word_value(boot_word, generation) == value
    assert np.uint64(value).nbytes == WORD_BYTES


def test_a_new_table_holds_generation_zero_of_its_boot():
    assert Rig().table.tolist() == [FRESH] * 4


def test_another_boot_has_other_words():
    assert word_value(BOOT, 0) != word_value(BOOT + 1, 0)


def test_stores_then_fence_then_confirmation():
    rig = Rig()
    rig.words.store([batch(1, (0, 1), (3, 7)), batch(2, (1, 1))])
    stored = [word_value(BOOT, generation) for generation in (1, 1, 0, 7)]
    assert rig.fences == [(stored, ())]  # all is stored and nothing confirmed when the only fence passes
    assert rig.words.take_confirmed() == (1, 2)


def test_confirmations_collect_and_are_handed_out_once():
    words = LeaseWords(np.zeros(4, dtype=np.uint64), BOOT, fence=lambda: None)
    words.store([batch(1, (0, 1))])
    words.store([batch(2, (0, 2))])
    assert words.take_confirmed() == (1, 2)
    assert words.take_confirmed() == ()


def test_without_batches_there_is_nothing_to_fence():
    rig = Rig()
    rig.words.store([])
    assert rig.fences == []
    assert rig.words.take_confirmed() == ()


def test_an_empty_batch_is_confirmed_too():
    rig = Rig()
    rig.words.store([batch(1)])
    assert rig.words.take_confirmed() == (1,)


def test_generations_wrap():
    rig = Rig()
    rig.words.store([batch(1, (0, 2**32 - 1))])
    before = rig.table[0]
    rig.words.store([batch(2, (0, 2**32))])
    assert rig.table[0] == FRESH != before


def test_revoked_words_equal_no_grant():
    rig = Rig()
    rig.words.store([batch(1, (0, 1), (1, 2**32 - 1))])
    rig.words.revoke_all()
    assert rig.fences[-1] == ([int(word) for word in rig.table], (1,))
    assert all(int(word) >> 32 != BOOT for word in rig.table)
