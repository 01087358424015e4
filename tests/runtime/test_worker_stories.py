"""Random lives of a pull loop: whatever happens, what is reported is right, reported once, and out of reach.

The actions play the scheduler (which follows the loop's reports as the real one does), the network, and our own bugs.
They are weighted, so that most receives get somewhere before something breaks; a seed names a story.
"""

from collections import Counter
from random import Random

import numpy as np
import pytest

from pd_transfer.core.admissions import AbortReceive
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import PeerKey, RequestId
from pd_transfer.core.peers import ConnectPeer, RetirePeer
from tests.runtime.builders import PrefillWorker
from tests.runtime.pull_bed import DRAIN_SECONDS, READ_SECONDS, Bed

NUM_STEPS = 120
BUGS = ("add_peer", "remove_peer", "submit_read", "submit_word_read", "poll", "take_word")
GRANTED = ((3, 4, 9), (7, 8, 11))


class Asked:
    """A receive that was ordered: from whom, where to, and what the bytes there must be if it is reported good."""

    def __init__(self, key, needed, pages):
        self.key = key
        self.needed = needed
        self.pages = pages


class Story:
    """One life. Every public method is something that may happen."""

    def __init__(self, seed):
        self._random = Random(seed)
        self._bed = bed = Bed()
        self._engines = [bed.prefill, bed.other_prefill]
        self._keys = [None, None]
        self._lost = set()
        self._orders = []
        self._asked = {}
        self._free = list(range(1, bed.layout.num_blocks))
        self._touched = np.zeros(bed.local.bytes.shape, dtype=bool)
        self._generation = 0
        self._num_names = 0
        self.outcomes = Counter()

    def _name(self, what):
        self._num_names += 1
        return f"{what}{self._num_names}"

    def _engine(self):
        return self._random.randrange(2)

    # The scheduler

    def start(self):
        engine = self._engine()
        if self._keys[engine] is None:
            self._keys[engine] = self._name(f"engine{engine}#")
            self._orders.append(self._bed.connect_order(self._keys[engine], self._engines[engine]))
        counts = self._random.randrange(4), self._random.randrange(4)
        if sum(counts) > len(self._free):
            return
        chosen = self._random.sample(self._free, sum(counts))
        needed = (tuple(chosen[: counts[0]]), tuple(chosen[counts[0] :]))
        key, request_id = self._keys[engine], self._name("request")
        self._orders.append(self._bed.receive(request_id, key, needed, GRANTED, generation=self._generation))
        self._free = [block for block in self._free if block not in chosen]
        self._asked[request_id] = Asked(key, needed, self._pages(self._engines[engine].memory, needed))

    def _pages(self, remote, needed):
        """(local page, what it must become) for every layer and position."""
        pages, local = [], self._bed.local
        groups = zip(remote.layout.groups, local.layout.groups, GRANTED, needed, strict=True)
        for remote_group, local_group, sources, destinations in groups:
            for there, here in zip(remote_group.layers, local_group.layers, strict=True):
                for source, destination in zip(sources, destinations, strict=False):
                    local.page(here, destination, self._touched)[:] = True
                    pages.append((local.page(here, destination), remote.page(there, source).copy()))
        return pages

    def abort(self):
        if self._asked:
            self._orders.append(AbortReceive(RequestId(self._random.choice(sorted(self._asked)))))

    def lose(self, engine=None):
        engine = self._engine() if engine is None else engine
        if self._keys[engine] is not None:
            self._lost.add(self._keys[engine])
            self._keys[engine] = None

    def turn(self, after=0.0):
        in_use = {asked.key for asked in self._asked.values()}
        retired = sorted(self._lost - in_use)
        self._lost -= set(retired)
        # A peer that no worker has heard of is neither connected nor retired.
        unsent = {order.key for order in self._orders if isinstance(order, ConnectPeer)} & set(retired)
        retires = [RetirePeer(PeerKey(key)) for key in retired if key not in unsent]
        others = [order for order in self._orders if getattr(order, "key", None) not in unsent]
        orders, self._orders = [*retires, *others], []
        report = self._bed.turn(*orders, after=after)
        self.outcomes.update(report.outcomes)
        for result in report.results:
            self._check(result)
        for engine, key in enumerate(self._keys):
            if key in report.troubled_peers:
                self.lose(engine)

    def _check(self, result):
        self.outcomes[result.outcome] += 1
        asked = self._asked.pop(result.request_id)  # KeyError: reported twice, or never asked for
        self._free += [block for table in asked.needed for block in table]
        if result.outcome is Outcome.RECEIVE_VERIFIED:
            for found, expected in asked.pages:
                np.testing.assert_array_equal(found, expected)

    def wait(self):
        self.turn(after=self._random.choice([0.1, READ_SECONDS, DRAIN_SECONDS]))

    # The network and the peers

    def change_weather(self):
        fabric = self._bed.fabric
        fabric.hold_new = self._random.random() < 0.5
        fabric.fail_new = "bad weather" if self._random.random() < 0.2 else None
        fabric.latency_polls = self._random.randrange(3)

    def disturb(self):
        if reads := self._bed.fabric.reads:
            read = self._random.choice(reads)
            what = self._random.choice(["let_go", "let_go", "hold", "copy_half", "fail"])
            read.fail("disturbed") if what == "fail" else getattr(read, what)()

    def reuse_blocks(self):
        """Every lease ends, and other KV takes its place: what is read from now on must not be reported good."""
        self._generation += 1
        for worker in self._engines:
            worker.change_word(0, self._generation)
            content = worker.memory.bytes
            content[:] = np.frombuffer(self._random.randbytes(content.nbytes), dtype=np.uint8)

    def restart(self):
        engine = self._engine()
        self._engines[engine].transport.close()
        self._engines[engine] = PrefillWorker.in_memory(self._bed.fabric, self._bed.remote_layout, self._num_names)
        self._engines[engine].change_word(0, self._generation)
        self.lose(engine)

    def plant_bug(self):
        self._bed.transport.plant(self._random.choice(BUGS))

    # What must hold

    def check(self):
        """No read can write to blocks that were reported, and nothing else was ever written to."""
        bed, local = self._bed, self._bed.local
        pages = {page.ctypes.data for asked in self._asked.values() for page, _ in asked.pages}
        for read in bed.fabric.reads:
            assert read.landing is not None or {copy.destination for copy in read.copies} <= pages
        np.testing.assert_array_equal(local.bytes[~self._touched], bed.before[~self._touched])

    def end(self):
        """Good weather, and enough time: then every receive was reported, and nothing is held."""
        fabric = self._bed.fabric
        fabric.fail_new, fabric.latency_polls = None, 0
        self._bed.transport.planted.clear()
        fabric.let_go()
        for engine in (0, 1):
            self.lose(engine)
        for _ in range(4):
            self.turn(DRAIN_SECONDS)
        assert not self._asked
        assert not self._lost
        assert self.outcomes[Outcome.INTERNAL_ERROR] == self._bed.transport.num_raised
        self._bed.assert_at_rest()

    def works_again(self):
        """Both engines can be read from, so nothing of an earlier peer was left behind."""
        for engine in (0, 1):
            self._engines[engine].change_word(0, 0)
            key, request_id = self._name("engine"), self._name("request")
            self._bed.finish(self._bed.connect_order(key, self._engines[engine]))
            report = self._bed.finish(self._bed.receive(request_id, key, ((1, 2, 3), ()), GRANTED))
            assert [result.outcome for result in report.results] == [Outcome.RECEIVE_VERIFIED]


WEIGHTS = {
    Story.turn: 30,
    Story.start: 20,
    Story.disturb: 20,
    Story.change_weather: 4,
    Story.wait: 3,
    Story.abort: 3,
    Story.reuse_blocks: 3,
    Story.lose: 2,
    Story.restart: 1,
    Story.plant_bug: 1,
}


def live(seed):
    story, chance = Story(seed), Random(-seed)
    for action in chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_STEPS):
        action(story)
        story.check()
    story.end()
    story.works_again()
    return story.outcomes


@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in range(1, 76, 25)], ids=str)
def test_every_story_ends_well(seeds):
    outcomes = sum((live(seed) for seed in seeds), Counter())
    expected = {
        Outcome.RECEIVE_VERIFIED,
        Outcome.RECEIVE_STALE,
        Outcome.RECEIVE_FAILED,
        Outcome.RECEIVE_TIMED_OUT,
        Outcome.RECEIVE_ABORTED,
        Outcome.AGENT_REBUILT,
        Outcome.INTERNAL_ERROR,
    }
    assert expected <= set(outcomes), "the stories are not what they should be"
    assert outcomes[Outcome.RECEIVE_VERIFIED] > len(seeds)
