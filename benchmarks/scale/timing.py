"""CPU time of what scheduler processes do for each other. Run by ``benchmarks.micro``."""

from collections.abc import Callable

from benchmarks.micro import serve
from benchmarks.scale.subject import Subject, address
from pd_transfer.core.leases import LeaseBook, LeasePolicy
from pd_transfer.core.messages import Hello, Release, Renew, Welcome, decode, encode
from pd_transfer.core.params import LeaseId
from pd_transfer.core.peers import PeerBook, PeerPolicy
from pd_transfer.runtime.prefill import PrefillSide

HELLO = "prefill answers a Hello"
WELCOME = "decode judges a Welcome"
RENEW = "prefill answers a Renew"
LEASE = "prefill opens a lease and ends it"


def functions(subject: Subject | None = None) -> dict[str, Callable[[], object]]:
    """What is timed, by name; bytes in, bytes out, without the socket."""
    subject = subject or Subject()
    engine, welcome = subject.engine(0), subject.welcome(0)
    policy = LeasePolicy(max_seconds=1e9, renewal_seconds=1e9, unclaimed_seconds=1e9, max_pool_fraction=0.5)
    prefill = PrefillSide(engine, welcome.ranks, LeaseBook(policy, subject.num_blocks, 16, 1), address(0))
    hello, renew, greeted = encode(Hello(engine)), encode(Renew((LeaseId("a" * 32),))), encode(welcome)
    block_ids = subject.block_ids()
    book = LeaseBook(policy, 4 * len(block_ids), 16, 1)

    def answer(payload: bytes) -> bytes:
        reply = prefill.answer(decode(payload), 0.0)
        assert reply is not None
        return encode(reply)

    def judge() -> object:
        peers = PeerBook(PeerPolicy(5, 1, 30), engine)
        peers.greet(address(1), 0.0)
        message = decode(greeted)
        assert isinstance(message, Welcome)
        return peers.receive(address(1), message, 0.0)

    def lease() -> object:
        opened = book.open(LeaseId("a" * 32), block_ids, 0.0)
        assert opened is not None
        book.release((opened.lease_id,), 0.0)
        batch = book.take_word_changes()
        assert batch is not None
        return book.confirm(batch.batch_id, 1, 0.0)

    return {
        HELLO: lambda: answer(hello),
        WELCOME: judge,
        RENEW: lambda: answer(renew) + answer(encode(Release((LeaseId("a" * 32),)))),
        LEASE: lease,
    }


if __name__ == "__main__":
    serve(functions())
