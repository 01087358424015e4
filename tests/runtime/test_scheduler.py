"""Scheduler processes that talk: hand-off, renewal, release, and what hostile or dead peers cannot do to them."""

import threading
import time
from collections import Counter
from random import Random

import pytest

from pd_transfer.core.layout import block_runs, pack_runs
from pd_transfer.core.messages import (
    MAX_LEASES_PER_MESSAGE,
    Hello,
    Malformed,
    Refused,
    Release,
    Renew,
    Renewed,
    Welcome,
    decode,
    encode,
)
from pd_transfer.core.outcomes import Level, Outcome, Quantity
from pd_transfer.core.params import Address, LeaseId, PeerKey, RequestId, parse_grant
from pd_transfer.runtime.orders import ReceiveResult, WorkerReport
from pd_transfer.runtime.prefill import FinishedPrompt
from pd_transfer.runtime.scheduler import SchedulerRuntime
from pd_transfer.sidechannel.base import ReplyReceived, RequestReceived
from tests.runtime.builders import DEADLINE_SECONDS, engine, eventually
from tests.runtime.engine_bed import (
    BACKOFF_SECONDS,
    HANDSHAKE_SECONDS,
    LEASED,
    MAX_SECONDS,
    NUM_TOKENS,
    REJECTION_SECONDS,
    RENEWAL_SECONDS,
    RENEWED_SECONDS,
    TABLES,
    UNCLAIMED_SECONDS,
    Engines,
    described_ranks,
    make_decode_side,
    make_prefill_side,
    remote_prefill,
)

NEEDED = (block_runs((1, 2, 6, 7)), block_runs((0, 0, 4, 5)))
ELSEWHERE = Address("elsewhere", 1)
PROMPT = FinishedPrompt(RequestId("p"), NUM_TOKENS, b"d" * 32, TABLES)


@pytest.fixture
def engines():
    engines = Engines()
    yield engines
    engines.close()


def verified(request_id, num_tokens=NUM_TOKENS):
    quantities = Counter({Quantity.TOKENS_VERIFIED: num_tokens, Quantity.BYTES_VERIFIED: 100})
    return ReceiveResult(RequestId(request_id), Outcome.RECEIVE_VERIFIED, "", (4, 2), quantities)


def failed(request_id, outcome=Outcome.RECEIVE_FAILED):
    return ReceiveResult(RequestId(request_id), outcome, "the cable")


def loading(decode_engine, request_id, params):
    """Take a request to where its workers read; the orders of that step."""
    decode_engine.arrive(request_id, params)
    assert decode_engine.found(request_id) == NUM_TOKENS
    decode_engine.allocated(request_id, NUM_TOKENS, NEEDED)
    return decode_engine.take_orders()


# One request, end to end


def test_a_request_from_hello_to_release(engines):
    (prefill, address), decoder = engines.prefill(), engines.decode()
    params = prefill.hand_off()
    assert prefill.levels() == {Level.LEASES: 1, Level.LEASED_BLOCKS: len(LEASED)}
    decoder.arrive("a", params)
    assert decoder.found("a", num_local_tokens=4) == NUM_TOKENS - 4
    assert decoder.ask("a", num_local_tokens=0) == NUM_TOKENS, "vLLM may ask again"
    assert decoder.levels() == {Level.ADMISSIONS: 1, Level.BORROWED_LEASES: 1}
    decoder.allocated("a", NUM_TOKENS, NEEDED)
    orders = decoder.take_orders()
    (connect,), (receive,) = orders.connects, orders.receives
    assert connect.welcome.engine.engine_boot == "boot-1"
    assert (receive.peer, receive.needed, receive.num_tokens) == (connect.key, NEEDED, NUM_TOKENS)
    assert receive.grant.groups == tuple(block_runs(table) for table in TABLES)
    decoder.apply([verified("a")], ended=["a"])
    eventually("the release", lambda: prefill.levels() == {Level.LEASES: 1} and is_retiring(prefill))
    assert tuple(prefill.retire_leases()) == LEASED
    assert not prefill.levels()
    assert not decoder.levels()
    assert +prefill.outcomes == {Outcome.HELLO_WELCOMED: 1, Outcome.LEASE_OPENED: 1, Outcome.LEASE_RELEASED: 1}
    assert +decoder.outcomes == {Outcome.RECEIVE_VERIFIED: 1}
    assert decoder.quantities[Quantity.TOKENS_VERIFIED] == NUM_TOKENS
    assert address == Address(params["remote_host"], params["remote_port"])


def is_retiring(prefill):
    with prefill.runtime.prefill() as (half, _):
        return half.leases.is_retiring


def test_the_second_request_needs_no_round_trip(engines):
    (prefill, address), decoder = engines.prefill(), engines.decode()
    decoder.greet(address)
    eventually("the welcome", lambda: decoder.take_orders().connects)
    engines.network.hold()
    decoder.arrive("a", prefill.hand_off())
    assert decoder.ask("a") == NUM_TOKENS
    engines.network.release()


def test_a_lease_is_renewed_as_long_as_its_request_waits(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    decoder.arrive("a", prefill.hand_off())
    while engines.clock.now < 1000 + MAX_SECONDS - RENEWED_SECONDS:
        engines.pass_time(RENEWAL_SECONDS)
        eventually("a renewal", lambda: prefill.lease_deadline() > engines.clock.now + RENEWED_SECONDS - 1)
    assert decoder.found("a") == NUM_TOKENS
    prefill.collect()
    assert prefill.outcomes[Outcome.LEASE_EXPIRED] == 0


def test_a_lease_that_nobody_claims_expires(engines):
    prefill, _ = engines.prefill()
    prefill.hand_off()
    engines.pass_time(UNCLAIMED_SECONDS)
    eventually("expiry", lambda: is_retiring(prefill))
    assert tuple(prefill.retire_leases()) == LEASED


def test_decode_learns_that_a_lease_is_gone(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    params = prefill.hand_off()
    engines.pass_time(UNCLAIMED_SECONDS)
    decoder.arrive("a", params)
    eventually("the news", lambda: decoder.ask("a") == 0)
    decoder.collect()
    assert decoder.outcomes[Outcome.GRANT_EXPIRED] == 1
    assert not decoder.levels()


def test_a_request_that_ends_early_gives_its_lease_back(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    decoder.arrive("a", prefill.hand_off())
    decoder.end("a")
    eventually("the release", lambda: is_retiring(prefill))
    assert not decoder.levels()


def test_a_request_that_is_turned_away_gives_its_lease_back(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    with decoder.runtime.decode() as (half, now):
        half.turn_away(remote_prefill(prefill.hand_off()), now)
    eventually("the release", lambda: is_retiring(prefill))


def test_an_abort_during_the_read_releases_after_the_report(engines, caplog):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    loading(decoder, "a", prefill.hand_off())
    decoder.end("a")
    assert [order.request_id for order in decoder.take_orders().aborts] == ["a"]
    assert decoder.levels() == {Level.ADMISSIONS: 1, Level.BORROWED_LEASES: 1}
    decoder.apply([failed("a", Outcome.RECEIVE_ABORTED)], ended=["a"])
    eventually("the release", lambda: is_retiring(prefill))
    assert not decoder.levels()
    assert not caplog.messages, "a client that leaves is nobody's trouble"


def test_an_engine_that_serves_and_pulls_at_once(engines):
    (one, _), (other, _) = engines.both(), engines.both()
    for here, there in ((one, other), (other, one)):
        loading(here, "a", there.hand_off())
        here.apply([verified("a")], ended=["a"])
        eventually("the release", lambda there=there: is_retiring(there))
        there.retire_leases()
    assert not one.levels()
    assert not other.levels()


def test_prefill_only(engines):
    prefill, address = engines.prefill()
    with prefill.runtime.decode() as (half, _):
        assert half is None
    asker = engines.endpoint()
    asker.send_request(address, encode(Hello(engine(engines.layout, "stranger"))))
    assert isinstance(reply_to(asker), Welcome)


def test_decode_only(engines):
    decoder = engines.decode()
    with decoder.runtime.prefill() as (half, _):
        assert half is None
    assert decoder.side_channel.bound_port is None
    assert not decoder.levels()


# Ranks


def test_one_ranks_loss_is_the_requests_loss_and_is_counted_once(engines):
    (prefill, _), decoder = engines.prefill(num_ranks=2), engines.decode(num_ranks=2)
    loading(decoder, "a", prefill.hand_off())
    decoder.apply([verified("a")])
    assert not decoder.collect().outcomes.total()
    decoder.apply([failed("a", Outcome.RECEIVE_STALE)], ended=["a"])
    decoder.collect()
    assert +decoder.outcomes == {Outcome.RECEIVE_STALE: 1}
    assert not +decoder.quantities


def test_ranks_move_bytes_each_and_tokens_together(engines):
    (prefill, _), decoder = engines.prefill(num_ranks=2), engines.decode(num_ranks=2)
    loading(decoder, "a", prefill.hand_off())
    decoder.apply([verified("a"), verified("a")], ended=["a"])
    decoder.collect()
    assert decoder.outcomes[Outcome.RECEIVE_VERIFIED] == 1
    assert decoder.quantities == {Quantity.TOKENS_VERIFIED: NUM_TOKENS, Quantity.BYTES_VERIFIED: 200}


def test_a_lease_of_two_ranks_waits_for_both_confirmations(engines):
    prefill, _ = engines.prefill(num_ranks=2)
    prefill.hand_off()
    with prefill.runtime.prefill() as (half, now):
        half.leases.reset(now)
        batch = half.leases.take_word_changes()
        assert half.leases.confirm(batch.batch_id, 1, now) == []
        assert tuple(half.leases.confirm(batch.batch_id, 1, now)) == LEASED


def test_the_end_of_a_request_that_was_not_ours_is_ignored(engines):
    decoder = engines.decode()
    decoder.apply([], ended=["another connector's"])
    assert not decoder.collect().outcomes.total()


# Bytes that are no messages


def hostile_payloads():
    """Bytes of every kind: empty, other versions, junk, cut short, bent, too deep, valid at the wrong time."""
    description = engine(Engines().layout)
    valid = [
        encode(Hello(description)),
        encode(Renew((LeaseId("x"),))),
        encode(Release((LeaseId("x"),))),
        encode(Welcome(description, (), b"key")),
        encode(Refused("no")),
        encode(Renewed(())),
    ]
    random = Random(7)
    yield from (
        b"",
        b"\x00",
        b"\x01",
        b"\xc1",
        b"\x01\xc1",
        b"\x02" + valid[0][1:],
        b"\xff" * 50,
        random.randbytes(500),
    )
    yield from (b"\x01" + random.randbytes(random.randrange(60)) for _ in range(50))
    yield b"\x01\x82\xa4type\xa5Renew\xa1x" + b"\x91" * 100_000
    yield b"\x01\x82\xa4type\xa5Renew\xa9lease_ids\xdd\xff\xff\xff\xff"
    yield encode(Renew((LeaseId("x"),) * (MAX_LEASES_PER_MESSAGE + 1)))
    for message in valid:
        yield message
        yield from (message[: len(message) * cut // 7] for cut in range(1, 7))
        for _ in range(20):
            bent = bytearray(message)
            bent[random.randrange(len(bent))] ^= 1 << random.randrange(8)
            yield bytes(bent)


def reply_to(asker):
    """The next reply."""
    received = []
    eventually("a reply", lambda: received.extend(asker.poll(0.0)) or received)
    assert len(received) == 1
    assert isinstance(received[0], ReplyReceived)
    return decode(received[0].payload)


def test_every_request_is_answered_or_counted(engines):
    prefill, address = engines.prefill()
    asker, barrier = engines.endpoint(), Renew((LeaseId("barrier"),))
    for payload in hostile_payloads():
        asker.send_request(address, payload)
        asker.send_request(address, encode(barrier))
        replies = []
        eventually(
            "the barrier's reply",
            lambda replies=replies: (
                replies.extend(asker.poll(0.0))
                or (replies and decode(replies[-1].payload) == Renewed(barrier.lease_ids))
            ),
        )
        assert len(replies) == 2 or prefill.collect().outcomes[Outcome.MESSAGE_MALFORMED], payload
    assert not prefill.levels()
    assert prefill.outcomes[Outcome.INTERNAL_ERROR] == 0


def test_a_hostile_reply_ends_in_a_rejection_for_a_while(engines):
    server, decoder = engines.endpoint(Address("hostile", 9)), engines.decode()
    prefill, _ = engines.prefill()
    address = Address("hostile", 9)
    params = prefill.hand_off() | {"remote_host": "hostile", "remote_port": 9}
    decoder.arrive("a", params)
    origin = origin_of(server)
    payloads = [*hostile_payloads(), b"the last one"]
    for payload in payloads:
        server.send_reply(origin, payload)
    assert decoder.found("a") == 0
    num_malformed = sum(isinstance(decode(payload), Malformed) for payload in payloads)
    eventually(
        "the last one", lambda: decoder.collect() and decoder.outcomes[Outcome.MESSAGE_MALFORMED] == num_malformed
    )
    assert decoder.outcomes[Outcome.PEER_REFUSED] == 1
    assert decoder.outcomes[Outcome.INTERNAL_ERROR] == 0
    assert not decoder.take_orders().connects
    engines.pass_time(REJECTION_SECONDS)
    decoder.greet(address)
    drain(server)
    server.send_reply(origin, encode(Welcome(engine(engines.layout), described_ranks(engine(engines.layout)), b"key")))
    eventually("the welcome", lambda: decoder.take_orders().connects)


def origin_of(server):
    """Who asked first."""
    received = drain(server)
    assert isinstance(received[0], RequestReceived)
    return received[0].origin


def drain(server):
    """What has come, at least one message."""
    received = []
    eventually("a request", lambda: received.extend(server.poll(0.0)) or received)
    return received


def test_a_reply_from_an_address_that_nobody_asked_is_ignored(engines):
    scripted = ScriptedSideChannel()
    decoder = engines.decode(scripted)
    welcome = Welcome(engine(engines.layout), described_ranks(engine(engines.layout)), b"key")
    for message in (welcome, Refused("no"), Renewed((LeaseId("x"),)), Hello(engine(engines.layout))):
        scripted.arrive(ReplyReceived(ELSEWHERE, encode(message)))
    scripted.arrive(ReplyReceived(ELSEWHERE, b"junk"))
    eventually("the last one", lambda: decoder.collect() and decoder.outcomes[Outcome.MESSAGE_MALFORMED])
    assert +decoder.outcomes == {Outcome.MESSAGE_MALFORMED: 1}
    assert not decoder.take_orders().connects
    with decoder.runtime.decode() as (half, _):
        assert half.next_deadline() is None


def test_a_second_welcome_changes_nothing(engines):
    server, decoder = engines.endpoint(ELSEWHERE), engines.decode()
    decoder.greet(ELSEWHERE)
    origin = origin_of(server)
    for key in (b"first", b"second"):
        server.send_reply(origin, encode(Welcome(engine(engines.layout), described_ranks(engine(engines.layout)), key)))
    server.send_reply(origin, b"barrier")
    eventually("the barrier", lambda: decoder.collect() and decoder.outcomes[Outcome.MESSAGE_MALFORMED])
    assert [connect.welcome.grant_key for connect in decoder.take_orders().connects] == [b"first"]


@pytest.mark.parametrize(
    ("difference", "reason"),
    [({"num_ranks": 2}, "tensor parallel"), ({"weights": "v"}, "weights differ")],
    ids=["ranks", "weights"],
)
def test_another_model_is_refused_by_both_values(engines, difference, reason):
    (prefill, _), decoder = engines.prefill(**difference), engines.decode()
    decoder.arrive("a", prefill.hand_off())
    assert decoder.found("a") == 0
    decoder.collect()
    assert +decoder.outcomes == {Outcome.PEER_REFUSED: 1}
    prefill.collect()
    assert prefill.outcomes[Outcome.HELLO_REFUSED] == 1


def test_only_allowed_peers_are_asked(engines):
    (prefill, _), side = engines.prefill(), make_decode_side(engine(engines.layout), lambda address: False)
    side.arrive(RequestId("a"), remote_prefill(prefill.hand_off()), b"d" * 32, NUM_TOKENS, 0.0)
    side.turn_away(remote_prefill(prefill.hand_off(tables=((10,), (11,)))), 0.0)
    assert not side.outbox
    assert side.take_outcomes() == {Outcome.PEER_NOT_ALLOWED: 1}


def test_the_prompt_is_what_the_grant_is_for(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    decoder.arrive("a", prefill.hand_off(), digest=b"e" * 32)
    assert decoder.ask("a") == 0
    decoder.collect()
    assert +decoder.outcomes == {Outcome.GRANT_OTHER_PROMPT: 1}


# Connections that break, engines that restart


def test_a_lost_connection_is_greeted_anew(engines):
    (prefill, address), decoder = engines.prefill(), engines.decode()
    (first,) = loading(decoder, "a", prefill.hand_off()).connects
    engines.network.cut(address)
    decoder.apply([verified("a")], ended=["a"])
    assert retired_by(decoder) == [first.key]
    (second,) = loading(decoder, "b", prefill.hand_off(tables=((10,), (11,)))).connects
    assert second.key != first.key


def greet_until_welcomed(decoder, address, prefill, num_times):
    """A peer is greeted anew once its loss has been noticed."""

    def is_welcomed():
        decoder.greet(address)
        prefill.collect()
        return prefill.outcomes[Outcome.HELLO_WELCOMED] == num_times

    eventually("another hello", is_welcomed)


def retired_by(decoder):
    """The peers that the workers shall forget, once there are any."""
    keys = []
    eventually("a retirement", lambda: keys.extend(order.key for order in decoder.take_orders().retires) or keys)
    return keys


def test_a_peer_that_is_still_drained_is_connected_anew_later(engines):
    """A transport knows an agent once; until the last read over the old connection ends, prompts are computed here."""
    (prefill, address), decoder = engines.prefill(), engines.decode()
    (first,) = loading(decoder, "a", prefill.hand_off()).connects
    engines.network.cut(address)
    greet_until_welcomed(decoder, address, prefill, num_times=2)
    decoder.arrive("b", prefill.hand_off(tables=((10,), (11,))))
    assert decoder.found("b") == 0
    decoder.apply([verified("a")], ended=["a"])
    assert retired_by(decoder) == [first.key]
    engines.pass_time(BACKOFF_SECONDS)
    (second,) = loading(decoder, "c", prefill.hand_off(tables=((10,), ()))).connects
    assert second.key != first.key


def test_a_handshake_whose_connection_breaks_is_repeated(engines):
    (prefill, address), decoder = engines.prefill(), engines.decode()
    engines.network.hold(address)
    decoder.arrive("a", prefill.hand_off())
    eventually("the hello", lambda: engines.network.held)
    engines.network.cut(address)

    def is_repeated():
        engines.pass_time(0.001)
        return any(isinstance(decode(message.payload), Hello) for message in engines.network.held)

    eventually("another hello", is_repeated)
    engines.network.release()
    assert decoder.found("a") == NUM_TOKENS


def test_a_peer_that_no_worker_has_heard_of_is_neither_connected_nor_retired(engines):
    side = make_decode_side(engine(engines.layout))
    welcome = Welcome(engine(engines.layout), described_ranks(engine(engines.layout)), b"key")
    for _ in range(3):
        side.greet([ELSEWHERE], 0.0)
        side.receive(ELSEWHERE, welcome, 0.0)
        side.connection_lost(ELSEWHERE, 0.0)
    side.greet([ELSEWHERE], 0.0)
    side.receive(ELSEWHERE, welcome, 0.0)
    orders = side.take_orders()
    assert len(orders.connects) == 1
    assert not orders.retires
    side.connection_lost(ELSEWHERE, 0.0)
    assert [order.key for order in side.take_orders().retires] == [orders.connects[0].key]


def test_a_restarted_engine_is_another_peer(engines):
    (old, address), decoder = engines.prefill(boot="boot-1"), engines.decode()
    orders = loading(decoder, "a", old.hand_off())
    stale_params = old.hand_off(tables=((10,), (11,)))
    old.runtime.close()
    fresh, _ = engines.prefill(address, boot="boot-2")
    greet_until_welcomed(decoder, address, fresh, num_times=1)
    decoder.arrive("b", stale_params)
    assert decoder.found("b") == 0
    decoder.collect()
    assert decoder.outcomes[Outcome.GRANT_OTHER_BOOT] == 1
    after = loading(decoder, "c", fresh.hand_off())
    assert after.connects[0].welcome.engine.engine_boot == "boot-2"
    assert after.receives[0].peer == after.connects[0].key != orders.connects[0].key
    decoder.apply([failed("a")], ended=["a"], troubled_peers=[orders.connects[0].key])
    assert [order.key for order in decoder.take_orders().retires] == [orders.connects[0].key]
    assert decoder.levels() == {Level.ADMISSIONS: 1, Level.BORROWED_LEASES: 1}


def test_a_restart_that_nobody_noticed_is_found_by_the_grant(engines):
    """Something in between kept the connection. The request that shows it is computed here; the next one is not."""
    server, decoder = engines.endpoint(ELSEWHERE), engines.decode()
    old = make_prefill_side(engine(engines.layout, boot="boot-1"), ELSEWHERE)
    new = make_prefill_side(engine(engines.layout, boot="boot-2"), ELSEWHERE)
    decoder.greet(ELSEWHERE)
    answer(server, old)
    eventually("the welcome", lambda: decoder.take_orders().connects)
    engines.pass_time(BACKOFF_SECONDS)
    decoder.arrive("a", new.hand_off(PROMPT, engines.clock()))
    assert decoder.ask("a") == 0
    answer(server, new)
    eventually("the welcome", lambda: decoder.take_orders().connects)
    decoder.arrive("b", new.hand_off(PROMPT, engines.clock()))
    assert decoder.found("b") == NUM_TOKENS


def answer(server, side):
    """Be a prefill engine until it has been greeted."""
    is_greeted = False
    while not is_greeted:
        for received in drain(server):
            message = decode(received.payload)
            is_greeted = is_greeted or isinstance(message, Hello)
            server.send_reply(received.origin, encode(side.answer(message, 0.0)))


def test_trouble_that_a_worker_reports_retires_the_peer(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    (connect,) = loading(decoder, "a", prefill.hand_off()).connects
    decoder.apply([failed("a")], ended=["a"], troubled_peers=[connect.key, PeerKey("unknown")])
    assert [order.key for order in decoder.take_orders().retires] == [connect.key]
    decoder.arrive("b", prefill.hand_off(tables=((10,), (11,))))
    assert decoder.ask("b") == 0, "it is left alone for a while"
    engines.pass_time(BACKOFF_SECONDS)
    (fresh,) = loading(decoder, "c", prefill.hand_off(tables=((10,), (11,)))).connects
    assert fresh.key != connect.key


def test_connections_that_are_nobodys_are_closed(engines):
    (prefill, address), decoder = engines.prefill(), engines.decode(scripted := ScriptedSideChannel())
    params = prefill.hand_off()
    with decoder.runtime.decode() as (half, now):
        half.turn_away(remote_prefill(params), now)
    eventually("the release", lambda: scripted.sent)
    assert not scripted.disconnected
    engines.pass_time(60.0)
    scripted.wake()
    eventually("the connection to close", lambda: scripted.disconnected == [address])


def test_a_dead_peer_delays_nobody_else(engines):
    """The clock stands still, so nothing can have been waited for."""
    (prefill, _), decoder = engines.prefill(), engines.decode()
    silent = Address("silent", 2)
    engines.endpoint(silent)
    dead_params, silent_params = (
        prefill.hand_off(tables=((block,), ())) | {"remote_host": host, "remote_port": port}
        for block, (host, port) in ((10, ELSEWHERE), (11, silent))
    )
    decoder.arrive("dead", dead_params)
    decoder.arrive("silent", silent_params)
    decoder.arrive("alive", prefill.hand_off())
    assert decoder.found("alive") == NUM_TOKENS
    assert decoder.ask("dead") is None
    assert decoder.ask("silent") is None
    engines.pass_time(HANDSHAKE_SECONDS)
    assert decoder.found("dead") == 0
    assert decoder.found("silent") == 0
    eventually(
        "two silent peers, and a request for each",
        lambda: (
            decoder.collect()
            and decoder.outcomes[Outcome.HANDSHAKE_TIMED_OUT] == decoder.outcomes[Outcome.PEER_UNREACHABLE] == 2
        ),
    )
    decoder.arrive("again", prefill.hand_off(tables=((10,), ())) | {"remote_host": "silent", "remote_port": 2})
    assert decoder.ask("again") == 0, "it is left alone for a while"


# The thread


class ScriptedSideChannel:
    """Receives what a test says, remembers what was sent, and raises where it is told to."""

    bound_port = None
    num_dropped = 0
    num_refused = 0

    def __init__(self):
        self.sent = []
        self.replies = []
        self.disconnected = []
        self.num_polls_to_raise = 0
        self.num_sends_to_raise = 0
        self.num_woken = 0
        self.is_sending = threading.Event()
        self.may_send = threading.Event()
        self.may_send.set()
        self._changed = threading.Condition()
        self._inbox = []
        self._is_woken = False

    def arrive(self, *received):
        with self._changed:
            self._inbox += received
            self._changed.notify()

    def poll(self, timeout_seconds):
        with self._changed:
            if self.num_polls_to_raise:
                self.num_polls_to_raise -= 1
                raise RuntimeError("planted in poll")
            self._changed.wait_for(lambda: self._inbox or self._is_woken, timeout_seconds)
            self._is_woken = False
            received, self._inbox = self._inbox, []
        return received

    def send_request(self, address, payload):
        self.is_sending.set()
        assert self.may_send.wait(DEADLINE_SECONDS)
        if self.num_sends_to_raise:
            self.num_sends_to_raise -= 1
            raise RuntimeError("planted in send_request")
        self.sent.append((address, decode(payload)))

    def send_reply(self, origin, payload):
        if origin == b"bad":
            raise RuntimeError("planted in send_reply")
        self.replies.append((origin, decode(payload)))

    def disconnect(self, address):
        self.disconnected.append(address)

    def wake(self):
        with self._changed:
            self._is_woken = True
            self.num_woken += 1
            self._changed.notify()

    def close(self):
        pass


def test_the_thread_survives_a_side_channel_that_raises(engines):
    scripted = ScriptedSideChannel()
    scripted.num_polls_to_raise = 2
    decoder = engines.decode(scripted)
    eventually("both errors", lambda: decoder.collect() and decoder.outcomes[Outcome.INTERNAL_ERROR] == 2)
    decoder.greet(ELSEWHERE)
    eventually("the hello", lambda: scripted.sent)


def test_an_internal_error_over_one_message_does_not_lose_the_others(engines):
    scripted = ScriptedSideChannel()
    runtime = SchedulerRuntime(make_prefill_side(engine(engines.layout), ELSEWHERE), None, scripted, engines.clock)
    renew = encode(Renew((LeaseId("x"),)))
    scripted.arrive(*(RequestReceived(origin, renew) for origin in (b"one", b"bad", b"two")))
    runtime.start()
    eventually("both replies", lambda: len(scripted.replies) == 2)
    runtime.close()
    assert [origin for origin, _ in scripted.replies] == [b"one", b"two"]
    assert runtime.collect().outcomes[Outcome.INTERNAL_ERROR] == 1


def test_an_internal_error_over_one_letter_does_not_lose_the_others(engines):
    scripted = ScriptedSideChannel()
    scripted.num_sends_to_raise = 1
    decoder = engines.decode(scripted)
    decoder.greet(Address("one", 1), Address("two", 2))
    eventually("the other hello", lambda: scripted.sent)
    assert [address for address, _ in scripted.sent] == [Address("two", 2)]
    decoder.collect()
    assert decoder.outcomes[Outcome.INTERNAL_ERROR] == 1


def lease_params(params, number):
    """Params that differ only in their address, so that each makes one letter."""
    return params | {"remote_host": "mailbox", "remote_port": number + 1}


def test_no_mail_is_lost_whoever_posts_it_and_when(engines):
    scripted = ScriptedSideChannel()
    decoder = engines.decode(scripted)
    params = make_prefill_side(engine(engines.layout), ELSEWHERE).hand_off(PROMPT, 0.0)
    num_posters, num_letters = 4, 100

    def post_all(poster):
        for number in range(num_letters):
            remote = remote_prefill(lease_params(params, poster * num_letters + number))
            with decoder.runtime.decode() as (half, now):
                half.turn_away(remote, now)
            if number % 10 == 0:
                time.sleep(0.001)  # lets the side channel's thread fall asleep

    posters = [threading.Thread(target=post_all, args=(poster,)) for poster in range(num_posters)]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join()
    eventually("every letter", lambda: len(scripted.sent) >= num_posters * num_letters)
    ports = [address.port for address, _ in scripted.sent]
    assert sorted(ports) == list(range(1, num_posters * num_letters + 1)), "lost or sent twice"
    for poster in range(num_posters):
        mine = [port for port in ports if (port - 1) // num_letters == poster]
        assert mine == sorted(mine), "one poster's letters keep their order"


def test_mail_that_was_posted_before_close_is_sent(engines):
    scripted = ScriptedSideChannel()
    scripted.may_send.clear()
    decoder = engines.decode(scripted)
    decoder.greet(Address("one", 1))
    assert scripted.is_sending.wait(DEADLINE_SECONDS)
    decoder.greet(Address("two", 2))
    closer = threading.Thread(target=decoder.runtime.close)
    closer.start()
    eventually("two letters and the close", lambda: scripted.num_woken == 3)
    scripted.may_send.set()
    closer.join()
    assert [address.port for address, _ in scripted.sent] == [1, 2]


def test_close_is_prompt_and_ends_every_lease(engines):
    (prefill, _), decoder = engines.prefill(), engines.decode()
    prefill.hand_off()
    begin = time.monotonic()
    prefill.runtime.close()
    prefill.runtime.close()
    decoder.runtime.close()
    assert time.monotonic() - begin < DEADLINE_SECONDS / 10
    assert is_retiring(prefill)


def test_a_runtime_that_was_never_started_can_be_closed(engines):
    side_channel = engines.endpoint()
    SchedulerRuntime(None, None, side_channel, engines.clock).close()
    assert side_channel.poll(None) == []


def test_what_is_counted_is_handed_out_once(engines):
    prefill, _ = engines.prefill()
    prefill.hand_off()
    assert prefill.collect().outcomes[Outcome.LEASE_OPENED] == 1
    assert prefill.collect().outcomes.total() == 0


def test_the_workers_levels_are_passed_on(engines):
    decoder = engines.decode()
    with decoder.runtime.decode() as (half, now):
        half.apply(WorkerReport(levels=Counter({Level.RECEIVES: 2, Level.QUARANTINED_BLOCKS: 3})), [], now)
    assert decoder.levels() == {Level.RECEIVES: 2, Level.QUARANTINED_BLOCKS: 3}


def test_the_pool_is_not_leased_beyond_its_share(engines):
    prefill, _ = engines.prefill()
    assert prefill.hand_off() is not None
    assert prefill.hand_off(tables=((10, 11, 12), (13,))) is None
    prefill.collect()
    assert prefill.outcomes[Outcome.HAND_OFF_OVER_LIMIT] == 1


def test_a_grant_names_its_blocks_and_nothing_else(engines):
    prefill, _ = engines.prefill()
    sealed = parse_grant(prefill.hand_off()["grant"])
    assert sealed.claimed.groups == (
        pack_runs([0, 3, 3, 3, 9, 1]),
        pack_runs([2, 7, 2]),
    )
