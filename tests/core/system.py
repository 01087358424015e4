"""A prefill and a decode engine made of the core's books, the network between them, and memory that names its owner.

Every method is one thing that can happen; ``test_system`` plays them in any order. What must never happen is asserted
here, beside what would do it; I1 to I10 are the invariants of the architecture page. Neither threads nor clocks are
needed: time is a number, a message is a letter in a list, and a transfer copies block by block when it is told to.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pd_transfer.core.admissions import AbortReceive, AdmissionAction, AdmissionBook, StartReceive, TokensFound
from pd_transfer.core.layout import block_runs, unpack_runs
from pd_transfer.core.lease_words import LeaseWords, word_value
from pd_transfer.core.leases import LeaseBook, LeasePolicy, WordBatch
from pd_transfer.core.messages import (
    Hello,
    Malformed,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Welcome,
    decode,
    encode,
    incompatibility,
)
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import Grant, LeaseId, PeerKey, RequestId, parse_grant, seal_grant
from pd_transfer.core.peers import ConnectPeer, PeerBook, PeerPolicy, PeerState, RetirePeer, SendMessage
from pd_transfer.core.plan import ReadPlan, ReadPlanner, needed_runs
from pd_transfer.core.receives import (
    AbortRequested,
    ReadCompleted,
    RebuildAgent,
    ReceiveAction,
    ReceiveBook,
    ReceivePolicy,
    ReceiveRequest,
    ReconnectPeer,
    ReportReceive,
    SubmitRead,
    SubmitWordRead,
    TransferFailed,
    WordArrived,
)
from tests.core.examples import NUM_TOKENS, PREFILL, make_engine, make_layout, make_params, make_rank

NUM_RANKS = 2
NUM_BLOCKS = 16
NUM_SLOTS = 3
BLOCK_TOKENS = 16
LAYOUT = make_layout(["full"], ["sliding"], num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_TOKENS)
NUM_NULL_BY_GROUP = (0, 1)
NUM_PROMPT_BLOCKS = -(-NUM_TOKENS // BLOCK_TOKENS)
LEASES = LeasePolicy(unclaimed_seconds=10, renewal_seconds=10, max_seconds=60, max_pool_fraction=0.8)
PEERS = PeerPolicy(handshake_seconds=5, backoff_seconds=1, rejection_seconds=10)
RECEIVES = ReceivePolicy(read_seconds=20, drain_seconds=20)
RENEWAL_SECONDS = 3
MEMORY_SECONDS = 60
SOMEBODY_ELSE = "somebody else"


class WrongReadError(AssertionError):
    """A receive was reported good, and its blocks hold something else than its prompt's KV."""


def kv(prompt: int, group: int, position: int) -> str:
    """What a block holds after prefill."""
    return f"prompt {prompt}, group {group}, position {position}"


def digest(prompt: int) -> bytes:
    return bytes([prompt]) * 32


class Pool:
    """An engine's blocks: who holds them, and what each rank's copy contains. Block 0 is never taken."""

    def __init__(self) -> None:
        self.holders: Counter[int] = Counter()
        self.contents = [[SOMEBODY_ELSE] * NUM_BLOCKS for _ in range(NUM_RANKS)]

    def take(self, prompt: int, first_positions: Iterable[int]) -> list[list[int]] | None:
        """Block tables for a prompt, a group each; None when there are not enough free blocks."""
        free = (block_id for block_id in range(1, NUM_BLOCKS) if not self.holders[block_id])
        tables = [[0] * first + [next(free, 0) for _ in range(first, NUM_PROMPT_BLOCKS)] for first in first_positions]
        taken = held(tables)
        if len(taken) != sum(NUM_PROMPT_BLOCKS - first for first in first_positions):
            return None
        self.holders.update(taken)
        for group, table in enumerate(tables):
            for position, block_id in enumerate(table):
                for contents in self.contents:
                    contents[block_id] = kv(prompt, group, position) if block_id else SOMEBODY_ELSE
        return tables

    def wrong_kv(self, prompt: int, tables: list[list[int]], rank: int) -> list[str]:
        """What is found in the tables that is not the prompt's KV."""
        return [
            f"{self.contents[rank][block_id]}, expected {kv(prompt, group, position)}"
            for group, table in enumerate(tables)
            for position, block_id in enumerate(table)
            if block_id and self.contents[rank][block_id] != kv(prompt, group, position)
        ]

    def drop(self, block_ids: Iterable[int]) -> set[int]:
        """Drop a reference of each. Free blocks are overwritten at once: nobody may rely on what they held."""
        self.holders.subtract(block_ids)
        assert min(self.holders.values(), default=0) >= 0
        freed = {block_id for block_id in block_ids if not self.holders[block_id]}
        for contents in self.contents:
            for block_id in freed:
                contents[block_id] = SOMEBODY_ELSE
        return freed


def held(tables: Iterable[Iterable[int]]) -> list[int]:
    """The blocks of some tables without the null block."""
    return [block_id for table in tables for block_id in table if block_id]


class Prefill:
    """One life of the prefill engine."""

    def __init__(self, number: int) -> None:
        self.engine = make_engine(boot=f"boot-{number}", layout=LAYOUT, num_ranks=NUM_RANKS)
        self.key = f"key {number}".encode()
        boot_words = [100 * number + rank for rank in range(NUM_RANKS)]
        ranks = tuple(make_rank(rank, boot_word, LAYOUT) for rank, boot_word in enumerate(boot_words))
        self.welcome = Welcome(self.engine, ranks, self.key)
        self.leases = LeaseBook(LEASES, NUM_BLOCKS, NUM_SLOTS, NUM_RANKS)
        self.tables = [np.zeros(NUM_SLOTS, dtype=np.uint64) for _ in range(NUM_RANKS)]
        self.words = [LeaseWords(*pair, fence=lambda: None) for pair in zip(self.tables, boot_words, strict=True)]
        self.pool = Pool()
        self.cached: dict[int, list[list[int]]] = {}
        self.grants: list[Grant] = []
        self.unstored: list[deque[WordBatch]] = [deque() for _ in range(NUM_RANKS)]
        self.is_serving = True
        self.is_shut_down = False

    def hand_off(self, prompt: int, now: float) -> str | None:
        """Prefill a prompt (or find it in the prefix cache, while its blocks are held) and put it under a lease."""
        tables = self.cached.get(prompt)
        if tables and not self.pool.wrong_kv(prompt, tables, rank=0):
            self.pool.holders.update(held(tables))
        else:
            tables = self.pool.take(prompt, NUM_NULL_BY_GROUP)
        if tables is None:
            return None
        self.cached[prompt] = tables
        lease_id = LeaseId(f"{self.engine.engine_boot}, lease {len(self.grants)}")
        lease = self.leases.open(lease_id, held(tables), now)
        if lease is not None:
            self.pool.holders.update(lease.block_ids)
        self.free(held(tables))  # vLLM forgets the request
        if lease is None:
            return None
        grant = Grant(
            self.engine.engine_boot,
            lease_id,
            lease.slot,
            lease.generation,
            NUM_TOKENS,
            digest(prompt),
            LAYOUT.digest(),
            tuple(block_runs(table) for table in tables),
        )
        self.grants.append(grant)
        return seal_grant(grant, self.key)

    def answer(self, message: Message | Malformed, now: float) -> Reply | None:
        match message:
            case Hello(engine):
                reason = incompatibility(self.engine, engine)
                return self.welcome if reason is None else Refused(reason)
            case Renew(lease_ids):
                return Renewed(self.leases.renew(lease_ids, now))
            case Release(lease_ids):
                self.leases.release(lease_ids, now)
                return Released(lease_ids)
            case Malformed(reason):
                return Refused(reason)
        return None

    def step(self, now: float) -> None:
        """The scheduler builds a step; the ranks have not seen it yet."""
        self.leases.expire(now)
        batch = self.leases.take_word_changes()
        if batch is not None:
            for unstored in self.unstored:
                unstored.append(batch)

    def store(self, rank: int, now: float) -> None:
        """A rank stores the oldest changes that it has not seen, and confirms."""
        if self.unstored[rank]:
            self.words[rank].store([self.unstored[rank].popleft()])
            for batch_id in self.words[rank].take_confirmed():
                self.free(self.leases.confirm(batch_id, 1, now))

    def free(self, block_ids: list[int]) -> None:
        """I10: no granted word is left of any block that comes free."""
        freed = self.pool.drop(block_ids)
        for grant in self.grants:
            runs = unpack_runs(b"".join(grant.groups)).tolist()
            if freed & {block_id + step for _, block_id, count in runs for step in range(count)}:
                assert not any(self.has_word(rank, grant) for rank in range(NUM_RANKS)), "I10"

    def has_word(self, rank: int, grant: Grant) -> bool:
        return self.word(rank, grant.slot) == word_value(self.welcome.ranks[rank].boot_word, grant.generation)

    def word(self, rank: int, slot: int) -> int:
        return int(self.tables[rank][slot])

    def shut_down(self, now: float) -> None:
        """Words first, then the memory is anybody's; reads are served for a little while yet."""
        self.is_shut_down = True
        self.leases.reset(now)
        for words in self.words:
            words.revoke_all()
        for contents in self.pool.contents:
            contents[:] = [SOMEBODY_ELSE] * NUM_BLOCKS


@dataclass
class Request:
    """A request at decode. ``tables`` are its blocks once it has some; ``hashed`` came from decode's prefix cache.

    ``is_lost`` when decode died before it had ended: its client got an error.
    """

    prompt: int
    is_waiting: bool = True
    num_local_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    hashed: frozenset[int] = frozenset()
    is_reading: bool = False
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def is_under_way(self) -> bool:
        return self.is_waiting or self.is_reading


@dataclass
class Transfer:
    """One read under way: which blocks it still has to copy (local, remote), or the word that it brings."""

    request: ReceiveRequest
    prefill: Prefill
    copies: list[tuple[int, int]]
    is_word: bool
    has_begun: bool = False
    is_stuck: bool = False
    word: int | None = None

    @property
    def moment(self) -> str:
        """How far it is."""
        if self.is_word:
            return "before the word is read" if self.word is None else "after the word is read"
        if not self.copies:
            return "after the last byte"
        return "between bytes" if self.has_begun else "before the first byte"


class Worker:
    """One decode rank: its receives, and a transport whose reads take as long as they please."""

    def __init__(self, rank: int, system: "System") -> None:
        self.rank = rank
        self.system = system
        self.book = system.make_book(RECEIVES)
        self.orders: deque[ConnectPeer | StartReceive | AbortReceive | RetirePeer] = deque()
        self.peers: dict[PeerKey, Welcome] = {}
        self.broken: set[PeerKey] = set()
        self.reconnecting: set[PeerKey] = set()
        self.transfers: dict[RequestId, Transfer] = {}
        self.troubled: set[PeerKey] = set()

    def carry_out(self) -> None:
        """Begin what the oldest order asks for."""
        now, order = self.system.now, self.orders.popleft()
        match order:
            case ConnectPeer(key, welcome):
                boots = {known.engine.engine_boot for known in self.peers.values()}
                assert welcome.engine.engine_boot not in boots, "a transport connects to an agent once"
                self.peers[key] = welcome
                if not self.system.engines[welcome.engine.engine_boot].is_serving:
                    self.break_connection(key)
            case StartReceive():
                self.act(self.book.start(self.plan(order), now, waits=order.peer in self.reconnecting))
            case AbortReceive(request_id):
                self.act(self.book.handle(AbortRequested(request_id), now))
            case RetirePeer(key):
                assert not self.book.uses(key), "I4"
                del self.peers[key]
                self.broken.discard(key)
        self.mend()

    def break_connection(self, key: PeerKey) -> None:
        self.broken.add(key)
        self.troubled.add(key)

    def plan(self, order: StartReceive) -> ReceiveRequest:
        welcome, grant = self.peers[order.peer], order.grant  # I3: a KeyError would be a peer that is gone
        plan = ReadPlanner(LAYOUT, welcome.engine.layout).plan(order.needed, grant.groups)
        assert isinstance(plan, ReadPlan)
        request = self.system.requests[order.request_id]
        local = {int(index) % NUM_BLOCKS for index in plan.local}
        assert local <= set(held(request.tables)) - request.hashed, "I7"
        assert all(int(index) % NUM_BLOCKS for index in plan.remote), "I7"
        expected = word_value(welcome.ranks[self.rank].boot_word, grant.generation)
        return ReceiveRequest(order.request_id, order.peer, plan, grant.slot, expected, order.num_tokens)

    def act(self, actions: Iterable[ReceiveAction]) -> None:
        for action in actions:
            match action:
                case SubmitRead(request, plan):
                    pairs = zip(plan.local.tolist(), plan.remote.tolist(), strict=True)
                    self.submit(request, [(to % NUM_BLOCKS, of % NUM_BLOCKS) for to, of in pairs], is_word=False)
                case SubmitWordRead(request):
                    self.submit(request, [], is_word=True)
                case ReconnectPeer(peer):
                    self.reconnecting.add(peer)
                case ReportReceive():
                    self.report(action)
                case RebuildAgent(peers):
                    for key in peers:
                        self.break_connection(key)
                    self.rebuild()

    def submit(self, request: ReceiveRequest, copies: list[tuple[int, int]], is_word: bool) -> None:
        assert request.request_id not in self.transfers, "one transfer at a time"
        if request.peer in self.broken:
            self.act(self.book.handle(TransferFailed(request.request_id, "not connected"), self.system.now))
            return
        prefill = self.system.engines[self.peers[request.peer].engine.engine_boot]
        self.transfers[request.request_id] = Transfer(request, prefill, copies, is_word)

    def progress(self, request_id: RequestId, num_copies: int) -> None:
        """A transfer gets on: blocks are copied as they are now; once nothing is left, its end is noticed."""
        transfer = self.transfers[request_id]
        if transfer.is_stuck:
            return
        if not transfer.prefill.is_serving:
            self.fail(request_id)
        elif transfer.copies:
            copied, transfer.copies = transfer.copies[:num_copies], transfer.copies[num_copies:]
            transfer.has_begun = True
            for to, of in copied:
                self.system.check_owner(request_id, to)
                contents = transfer.prefill.pool.contents[self.rank]
                self.system.pool.contents[self.rank][to] = contents[of]
        elif transfer.is_word and transfer.word is None:
            transfer.word = transfer.prefill.word(self.rank, transfer.request.slot)
        else:
            del self.transfers[request_id]
            self.act(self.book.handle(self.end(transfer), self.system.now))
            self.mend()

    def end(self, transfer: Transfer) -> ReadCompleted | WordArrived:
        request = transfer.request
        if transfer.word is None:
            return ReadCompleted(request.request_id)
        return WordArrived(request.request_id, transfer.word)

    def fail(self, request_id: RequestId) -> None:
        del self.transfers[request_id]
        self.act(self.book.handle(TransferFailed(request_id, "reset"), self.system.now))
        self.mend()

    def mend(self) -> None:
        """Connect peers anew whose reads have failed, and from which nothing is being read."""
        read = {transfer.request.peer for transfer in self.transfers.values()}
        for key in self.reconnecting - read:
            self.reconnecting.discard(key)
            if key not in self.peers:
                continue
            if key not in self.broken and self.system.engines[self.peers[key].engine.engine_boot].is_serving:
                self.act(self.book.reconnected(key, self.system.now))
            else:
                self.break_connection(key)
                self.act(self.book.not_reconnected(key, "refused", self.system.now))

    def rebuild(self) -> None:
        """Nothing can write any more; what was not stuck begins anew."""
        self.transfers.clear()
        self.act(self.book.agent_destroyed("rebuilt", self.system.now))
        self.reconnecting.update(self.peers)
        self.mend()

    def report(self, action: ReportReceive) -> None:
        request_id = action.request.request_id
        request = self.system.requests[request_id]
        assert self.rank not in request.outcomes, "I2"
        request.outcomes[self.rank] = action.outcome
        if action.outcome is Outcome.RECEIVE_VERIFIED:
            self.system.check_contents(request, self.rank)
        elif action.outcome in (Outcome.RECEIVE_FAILED, Outcome.RECEIVE_TIMED_OUT):
            self.troubled.add(action.request.peer)


class System:
    """Both engines and what lies between them. Controls hand in another ``make_book``.

    ``met`` counts what has happened at which moment of a request: (event, moment).
    """

    def __init__(self, make_book: Callable[[ReceivePolicy], ReceiveBook] = ReceiveBook) -> None:
        self.make_book = make_book
        self.now = 0.0
        self.prefill = Prefill(1)
        self.engines = {self.prefill.engine.engine_boot: self.prefill}
        self.to_prefill: list[bytes] = []
        self.to_decode: list[bytes] = []
        self.grants: list[tuple[int, str]] = []
        self.requests: dict[RequestId, Request] = {}
        self.outcomes: Counter[Outcome] = Counter()
        self.declined: Counter[Outcome] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()
        self.num_decode_lives = 0
        self.start_decode()

    def start_decode(self) -> None:
        """A decode engine that knows nobody."""
        self.num_decode_lives += 1
        decode_engine = make_engine("decode-a", f"boot-d{self.num_decode_lives}", layout=LAYOUT, num_ranks=NUM_RANKS)
        self.peers = PeerBook(PEERS, decode_engine)
        self.admissions = AdmissionBook(self.peers, RENEWAL_SECONDS, MEMORY_SECONDS)
        self.workers = [Worker(rank, self) for rank in range(NUM_RANKS)]
        self.pool = Pool()

    # Prefill.

    def hand_off(self, prompt: int) -> None:
        grant = None if self.prefill.is_shut_down else self.prefill.hand_off(prompt, self.now)
        if grant is not None:
            self.grants.append((prompt, grant))

    def shut_down_prefill(self) -> None:
        self.meet_all("prefill shuts down")
        self.prefill.shut_down(self.now)

    def restart_prefill(self) -> None:
        """The engine dies and another one takes its address. Nobody tells decode."""
        self.meet_all("prefill restarts")
        self.prefill.is_serving = False
        self.prefill = Prefill(len(self.engines) + 1)
        self.engines[self.prefill.engine.engine_boot] = self.prefill

    # The network.

    def deliver_to_prefill(self, at: int, keep: bool = False) -> None:
        payload = self.to_prefill[at] if keep else self.to_prefill.pop(at)
        reply = self.prefill.answer(decode(payload), self.now)
        if reply is not None:
            self.to_decode.append(encode(reply))

    def deliver_to_decode(self, at: int, keep: bool = False) -> None:
        message = decode(self.to_decode[at] if keep else self.to_decode.pop(at))
        match message:
            case Renewed(gone):
                self.admissions.leases_gone(PREFILL, gone)
            case Malformed(reason):
                self.do(self.peers.receive(PREFILL, Refused(reason), self.now))
            case _:
                self.do(self.peers.receive(PREFILL, message, self.now))

    def lose_connection(self, keeps_letters: bool = False) -> None:
        """Letters under way are lost, or arrive late."""
        self.meet_all("the connection breaks")
        if not keeps_letters:
            self.to_prefill.clear()
            self.to_decode.clear()
        self.do(self.peers.lose(PREFILL, self.now))

    # Decode's scheduler.

    def do(self, actions: Iterable[AdmissionAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(_, message):
                    self.to_prefill.append(encode(message))
                    continue
                case StartReceive(request_id, key):
                    assert key in {peer.key for peer in self.peers.peers()}, "I3"
                    self.requests[request_id].is_reading = True
            for worker in self.workers:
                worker.orders.append(action)

    def arrive(self, at: int, prompt: int | None = None, forger: bytes | None = None) -> RequestId:
        """A request brings a grant, perhaps one for another prompt; a forger writes its own prompt into it."""
        granted_prompt, text = self.grants[at]
        request_id = RequestId(f"request {len(self.requests)}")
        request = Request(granted_prompt if prompt is None else prompt)
        if forger is not None:
            grant = parse_grant(text).claimed
            text = seal_grant(msgspec.structs.replace(grant, prompt_digest=digest(request.prompt)), forger)
        self.requests[request_id] = request
        self.do(self.admissions.arrive(request_id, make_params(text), digest(request.prompt), NUM_TOKENS, self.now))
        return request_id

    def ask(self, request_id: RequestId, num_local_blocks: int = 0, has_room: bool = True) -> None:
        """vLLM's scheduler looks at a waiting request, and allocates its blocks when there is room."""
        request = self.requests[request_id]
        num_local_tokens = min(num_local_blocks * BLOCK_TOKENS, NUM_TOKENS)
        answer, actions = self.admissions.ask(request_id, num_local_tokens, self.now)
        self.do(actions)
        if not isinstance(answer, TokensFound) or not has_room:
            return
        if answer.num_tokens == 0:
            request.is_waiting = False
            self.do(self.admissions.allocated(request_id, 0, ((), ()), self.now))
            return
        tables = self.pool.take(request.prompt, NUM_NULL_BY_GROUP)
        if tables is None:
            return
        request.is_waiting = False
        request.tables, request.num_local_tokens = tables, num_local_tokens
        # The full group may have more of the prompt in its cache than all groups have in common.
        full, sliding = tables
        request.hashed = frozenset(held([full[: num_local_blocks and 2], sliding[:num_local_blocks]]))
        for contents in self.pool.contents:
            for block_id in set(held(tables)) - request.hashed:
                contents[block_id] = SOMEBODY_ELSE
        self.do(self.admissions.allocated(request_id, answer.num_tokens, self.needed(request), self.now))

    def needed(self, request: Request):
        return tuple(
            needed_runs(
                [0 if block_id in request.hashed else block_id for block_id in table],
                BLOCK_TOKENS,
                request.num_local_tokens,
                NUM_TOKENS,
            )
            for table in request.tables
        )

    def abort(self, request_id: RequestId) -> None:
        self.meet("abort", request_id)
        self.requests[request_id].is_waiting = False
        self.do(self.admissions.request_ended(request_id, self.now))

    def preempt(self, request_id: RequestId) -> None:
        """vLLM takes a running request's blocks and asks for its KV anew: it was loaded once, and is computed now."""
        answer, actions = self.admissions.ask(request_id, 0, self.now)
        assert (answer, actions) == (TokensFound(0), [])
        assert self.admissions.allocated(request_id, 0, ((), ()), self.now) == []

    def restart_decode(self) -> None:
        """The process dies, with everything that it held and read; its letters are still under way."""
        self.meet_all("decode restarts")
        for request in self.requests.values():
            if request.is_under_way:
                request.is_waiting = request.is_reading = False
                request.is_lost = True
        self.to_decode.clear()
        self.declined.update(self.admissions.outcomes)
        self.start_decode()

    def decode_step(self) -> None:
        """The scheduler hears what the workers have to say."""
        for worker in self.workers:
            for key in worker.troubled:
                self.do(self.peers.lose_key(key, self.now))
            worker.troubled.clear()
        for request_id, request in self.requests.items():
            if request.is_reading and len(request.outcomes) == NUM_RANKS:
                self.end_load(request_id, request)

    def end_load(self, request_id: RequestId, request: Request) -> None:
        if set(request.outcomes.values()) == {Outcome.RECEIVE_VERIFIED}:
            for rank in range(NUM_RANKS):
                self.check_contents(request, rank)  # nothing has written since
        self.outcomes.update(request.outcomes.values())
        request.is_reading = False
        self.do(self.admissions.load_ended(request_id, self.now))
        self.pool.drop(held(request.tables))

    # Time.

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.prefill.leases.expire(self.now)
        self.do(self.peers.pass_time(self.now))
        self.do(self.admissions.pass_time(self.now))
        for worker in self.workers:
            worker.act(worker.book.pass_time(self.now))
            worker.mend()

    # What has happened when.

    def moments(self, request_id: RequestId) -> list[str]:
        """How far a request is, on every rank where it is somewhere."""
        request = self.requests[request_id]
        if request.is_waiting:
            return ["waiting"]
        if not request.is_reading:
            return []
        return [self.moment_of_rank(request_id, request, worker) for worker in self.workers]

    def moment_of_rank(self, request_id: RequestId, request: Request, worker: Worker) -> str:
        if request_id in worker.transfers:
            return worker.transfers[request_id].moment
        if worker.rank in request.outcomes:
            return "reported by this rank"
        return "between two reads" if request_id in worker.book.request_ids else "ordered"

    def meet(self, event: str, request_id: RequestId) -> None:
        self.met.update((event, moment) for moment in self.moments(request_id))

    def meet_all(self, event: str) -> None:
        for request_id, request in self.requests.items():
            if request.is_under_way:
                self.meet(event, request_id)

    # What must hold.

    def check_owner(self, request_id: RequestId, block_id: int) -> None:
        """I1: a transfer writes to blocks that its request still holds, and not to what it shares."""
        request = self.requests[request_id]
        assert request.is_reading, "I1: a transfer writes to blocks that were given back"
        assert self.pool.holders[block_id], "I1: a transfer writes to a free block"
        assert block_id not in request.hashed, "I7"

    def check_contents(self, request: Request, rank: int) -> None:
        if wrong := self.pool.wrong_kv(request.prompt, request.tables, rank):
            raise WrongReadError(wrong[0])

    def check(self) -> None:
        """What holds at every moment."""
        assert all(peer.state is not PeerState.RETIRED for peer in self.peers.peers()), "I4"
        for worker in self.workers:
            assert set(worker.transfers) <= set(worker.book.request_ids), "I1: reported while a transfer may write"
            for request_id, transfer in worker.transfers.items():
                for to, _ in transfer.copies:
                    self.check_owner(request_id, to)

    # To the end.

    def turn(self) -> None:
        """Everything that is under way gets on; what is stuck stays so."""
        while self.to_prefill or self.to_decode:
            if self.to_prefill:
                self.deliver_to_prefill(0)
            else:
                self.deliver_to_decode(0)
        for worker in self.workers:
            while worker.orders:
                worker.carry_out()
            for request_id in list(worker.transfers):
                for _ in range(NUM_BLOCKS):
                    if request_id in worker.transfers:
                        worker.progress(request_id, 1)
        self.decode_step()
        self.prefill.step(self.now)
        for rank in range(NUM_RANKS):
            self.prefill.store(rank, self.now)

    def waiting(self) -> list[RequestId]:
        """Requests that vLLM still asks about."""
        return [request_id for request_id, request in self.requests.items() if request.is_waiting]

    def finish(self) -> None:
        """Let everything come to its end, and check that nothing is left (I2, I9)."""
        for request_id in self.waiting():
            self.abort(request_id)
        for _ in range(30):
            self.turn()
            self.pass_time(3)
            self.check()
        for request in self.requests.values():
            assert request.is_lost or len(request.outcomes) == (NUM_RANKS if request.tables else 0), "I2"
        assert (self.admissions.num_admissions, self.admissions.num_borrowed_leases) == (0, 0), "I9"
        for worker in self.workers:
            assert (worker.book.request_ids, worker.transfers, worker.book.num_quarantined_blocks) == ((), {}, 0), "I9"
            assert worker.book.next_deadline() is None, "I9"
            assert set(worker.peers) == {peer.key for peer in self.peers.peers() if peer.welcome}, "I4"
        assert not self.pool.holders.total(), "I9"
        leases = self.prefill.leases
        assert (leases.num_leases, leases.num_leased_blocks, leases.is_retiring) == (0, 0, False), "I9"
        assert not self.prefill.pool.holders.total(), "I9"
