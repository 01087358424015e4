"""Leases that end while a read is held, and grants that are used twice, too late, forged or by another request."""

import base64
from typing import Any

import msgspec

from pd_transfer.core.layout import pack_runs
from pd_transfer.core.messages import Renew
from pd_transfer.core.params import Grant
from tests.faults.forwarder import Deed, Fault
from tests.faults.run import Book, Run
from tests.faults.stages import Stage

BOOK = Book()
NO_RENEWAL = Fault(Deed.DROP, (Renew,))
JUDGED_BY_ITS_WORD = {
    Stage.BEFORE_READ: ["receive_stale"],
    Stage.DURING_READ: ["receive_stale"],
    Stage.BEFORE_WORD: ["receive_stale"],
    Stage.AFTER_WORD: ["receive_verified"],
}


@BOOK.at_stages(JUDGED_BY_ITS_WORD, prefill={"lease_expired": 1})
def lease_expires(run: Run, stage: Stage) -> None:
    """No renewal arrives while a read is held: the lease ends, and its blocks go to other prompts."""
    question = run.bed.question(seed=30)
    since = run.bed.prefill.metrics()
    forwarder = run.forwarder(NO_RENEWAL)
    with run.held(stage, question, forwarder.redirect(run.bed.hand_off(question))):
        run.wait_counted(run.bed.prefill, "lease_expired", since)
        run.bed.churn()
    run.must(forwarder.num_done > 0, "no renewal came by")


@BOOK.at_stages(JUDGED_BY_ITS_WORD, prefill={"lease_reset": 1})
def cache_reset(run: Run, stage: Stage) -> None:
    """An operator resets prefill's caches while a read is held, and its blocks go to other prompts."""
    question = run.bed.question(seed=31)
    with run.held(stage, question, run.bed.hand_off(question)):
        run.bed.reset_prefill_cache()
        run.bed.churn()


@BOOK.case("receive_verified", "receive_stale", prefill={"lease_expired": 1})
def one_of_two_sharers_is_stale(run: Run) -> None:
    """Two requests for one prompt read side by side; the lease of one of them ends, and its blocks are reused."""
    question = run.bed.question(seed=32)
    since = run.bed.prefill.metrics()
    forwarder = run.forwarder(NO_RENEWAL)
    with run.bed.stages.holding(Stage.DURING_READ):
        run.ask(question, run.bed.hand_off(question))
        run.ask(question, forwarder.redirect(run.bed.hand_off(question)))
        run.wait(Stage.DURING_READ, count=2)
        run.wait_counted(run.bed.prefill, "lease_expired", since)
        run.bed.churn()
    run.settle(alone=False)


@BOOK.case("receive_verified", "grant_used")
def grant_used_again(run: Run) -> None:
    """A request comes again with the params of its first time; meanwhile prefill has reused the blocks."""
    question = run.bed.question(seed=34)
    params = run.bed.hand_off(question)
    run.ask(question, params)
    run.settle()
    run.bed.churn()
    # Decode has the prompt in its prefix cache now: the history differs, and bits with it.
    run.ask(question, params)
    run.settle(alone=False)


@BOOK.case("grant_expired", "receive_stale", prefill={"lease_expired": 1})
def grant_expired(run: Run) -> None:
    """The request comes when its lease is over."""
    question = run.bed.question(seed=35)
    since = run.bed.prefill.metrics()
    params = run.bed.hand_off(question)
    run.wait_counted(run.bed.prefill, "lease_expired", since)
    run.ask(question, params)


@BOOK.case("grant_expired", "receive_stale", prefill={"lease_expired": 1})
def grant_for_blocks_of_others(run: Run) -> None:
    """The request comes when its lease is over and other prompts have its blocks."""
    question = run.bed.question(seed=36)
    since = run.bed.prefill.metrics()
    params = run.bed.hand_off(question)
    run.wait_counted(run.bed.prefill, "lease_expired", since)
    run.bed.churn()
    run.ask(question, params)


@BOOK.case("grant_other_prompt")
def grants_swapped(run: Run) -> None:
    """Two requests come with each other's params."""
    questions = [run.bed.question(seed=37), run.bed.question(seed=38)]
    params = [run.bed.hand_off(question) for question in questions]
    for question, other in zip(questions, reversed(params), strict=True):
        run.ask(question, other)
        run.settle()


@BOOK.case("grant_other_prompt")
def grant_of_another_salt(run: Run) -> None:
    """The same prompt comes with another salt: a tenant with another tenant's params."""
    mine, others = run.bed.question(seed=39), run.bed.question(seed=39)
    run.ask(mine, run.bed.hand_off(others))


@BOOK.case("grant_forged")
def seal_forged(run: Run) -> None:
    """One bit of the seal is another."""
    _ask_changed(run, lambda raw: raw[:1] + bytes([raw[1] ^ 1]) + raw[2:])


@BOOK.case("grant_forged")
def blocks_out_of_range_in_the_grant(run: Run) -> None:
    """The grant names blocks that prefill does not have: only its seal could make them count."""

    def change(raw: bytes) -> bytes:
        header, payload = raw[:_HEADER_BYTES], raw[_HEADER_BYTES:]
        grant = msgspec.msgpack.decode(payload, type=Grant)
        groups = (pack_runs([0, 1_000_000, 7]),) * len(grant.groups)
        return header + msgspec.msgpack.encode(msgspec.structs.replace(grant, groups=groups))

    _ask_changed(run, change)


@BOOK.case("grant_malformed")
def grant_cut_short(run: Run) -> None:
    """The second half of the grant is missing."""
    _ask_changed(run, lambda raw: raw[: len(raw) // 2])


_HEADER_BYTES = 17
"""A grant's version and seal."""


def _ask_changed(run: Run, change: Any) -> None:
    question = run.bed.question(seed=40)
    params = run.bed.hand_off(question)
    raw = change(base64.urlsafe_b64decode(params["grant"]))
    run.ask(question, params | {"grant": base64.urlsafe_b64encode(raw).decode()})


@BOOK.case("receive_verified")
def blocks_out_of_range_in_the_params(run: Run) -> None:
    """The router's placeholder for block ids names blocks that prefill does not have: nobody reads them."""
    question = run.bed.question(seed=41)
    run.ask(question, run.bed.hand_off(question) | {"remote_block_ids": [[1_000_000, -3]] * 6})


@BOOK.case("receive_verified")
def unknown_request_id(run: Run) -> None:
    """The params name a request that prefill never had: the lease, not the request, names the KV."""
    question = run.bed.question(seed=42)
    run.ask(question, run.bed.hand_off(question) | {"remote_request_id": "nobody", "remote_engine_id": "nobody"})


@BOOK.case("params_invalid")
def params_without_a_grant(run: Run) -> None:
    """The params are the built-in connector's: block ids and no grant."""
    question = run.bed.question(seed=43)
    params = run.bed.hand_off(question)
    del params["grant"]
    run.ask(question, params)


@BOOK.case("peer_not_allowed", transports=("cma",))
def address_of_a_stranger(run: Run) -> None:
    """The params send decode to an address that its operator has not allowed."""
    question = run.bed.question(seed=44)
    run.ask(question, run.bed.hand_off(question) | {"remote_host": "192.0.2.1"})
