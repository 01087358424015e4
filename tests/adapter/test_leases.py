"""Prefill's leases: blocks stay as long as a decode engine may read them, and not a step longer than the next one."""

import time

import pytest

from pd_transfer.core.messages import Release
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import SINGLE

pytestmark = pytest.mark.vllm

BLOCKS_OF_100 = 5 * 5 + 7
"""Five sliding groups keep five blocks each of a prompt of 100 tokens, the full group keeps all seven."""


def held(engine) -> int:
    return engine.num_free_at_start - engine.num_free_blocks


def test_blocks_are_held_by_reference_until_release_and_the_next_step(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(100)
    params = lab.hand_off(prefill, prompt)
    # vLLM has forgotten the request, so that an idle engine does not step.
    lab.run(lambda: not prefill.is_awake())
    assert held(prefill) == BLOCKS_OF_100
    assert not prefill.connector.has_pending_block_frees()

    lab.decode(decode, prompt, params)
    lab.run(prefill.connector.has_pending_block_frees)
    assert not prefill.is_awake()
    assert held(prefill) == BLOCKS_OF_100

    prefill.step()
    assert held(prefill) == 0
    assert not prefill.connector.has_pending_block_frees()
    assert prefill.outcomes == {"lease_opened": 1, "hello_welcomed": 1, "lease_released": 1}
    # The blocks are free, not forgotten: the same prompt hits them.
    assert lab.hand_off(prefill, prompt, "again")["remote_prefill_cached_tokens"] == 96
    prefill.end_leases()


def test_a_reset_of_an_idle_engine_changes_the_words_without_waiting_for_a_request(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(100)
    params = lab.hand_off(prefill, prompt)
    lab.run(lambda: not prefill.is_awake())
    prefill.connector.reset_cache()
    prefill.wake()
    lab.run(lambda: held(prefill) == 0)
    assert lab.decode(decode, prompt, params).tokens == continuation(prompt, 4)
    assert "receive_verified" not in decode.outcomes


def test_a_lease_that_nobody_claims_expires(lab):
    prefill = lab.engine("p", extra={"lease_unclaimed_seconds": 0.1})
    lab.hand_off(prefill, prompt_of(100))
    deadline = time.monotonic() + 0.1
    assert held(prefill) == BLOCKS_OF_100
    lab.run(lambda: time.monotonic() > deadline)
    # Nothing happens while the engine is idle; one step ends the lease and frees its blocks.
    prefill.step()
    assert held(prefill) == 0
    assert prefill.outcomes == {"lease_opened": 1, "lease_expired": 1}


@pytest.mark.parametrize("state", ["waiting for the peer", "reading"])
def test_a_lease_is_renewed_for_as_long_as_decode_wants_it(lab, state):
    times = {"lease_unclaimed_seconds": 0.4, "lease_renewal_seconds": 0.4, "handshake_seconds": 30}
    prefill, decode = lab.engine("p", extra=times), lab.engine("d", extra=times)
    prompt = prompt_of(100)
    if state == "reading":
        lab.introduce(prefill, decode)
        lab.fabric.hold_new = True
    else:
        # The first message is the Hello, the second the first Renew; later ones pass.
        lab.network.hold()
    decode.add("r", prompt, lab.hand_off(prefill, prompt))
    if state != "reading":
        lab.run(lambda: len(lab.network.held) == 2)
        hello = lab.network.held[0]
        lab.network.drop(0)
        lab.network.release()
        assert hello.address == prefill.address
    end = time.monotonic() + 1.2
    lab.run(lambda: time.monotonic() > end)
    assert held(prefill) == BLOCKS_OF_100
    assert not decode.results["r"].finish_reason
    if state == "reading":
        lab.fabric.let_go()
        lab.finish(decode, "r")
        assert decode.outcomes == {"receive_verified": 1}
    else:
        decode.abort("r")


def test_a_lease_is_not_renewed_for_ever(lab):
    times = {"lease_unclaimed_seconds": 0.2, "lease_renewal_seconds": 0.2, "lease_max_seconds": 0.5}
    prefill, decode = lab.engine("p", extra=times), lab.engine("d")
    lab.introduce(prefill, decode)
    prompt = prompt_of(100)
    lab.fabric.hold_new = True
    decode.add("r", prompt, lab.hand_off(prefill, prompt))
    lab.run(prefill.connector.has_pending_block_frees)
    prefill.step()
    assert held(prefill) == 0
    lab.fabric.let_go()
    lab.finish(decode, "r")
    assert decode.outcomes == {"receive_stale": 1}
    assert decode.results["r"].tokens == continuation(prompt, 4)


def test_beyond_the_limit_there_is_no_hand_off_and_decode_computes(lab):
    prefill, decode = lab.engine("p", extra={"lease_max_pool_fraction": 0.06}), lab.engine("d")
    first, second = prompt_of(100), prompt_of(100, seed=1)
    params = lab.hand_off(prefill, first)
    assert lab.hand_off(prefill, second, "too much") is None
    assert prefill.outcomes["hand_off_over_limit"] == 1
    assert prefill.results["too much"].finish_reason == "length"
    assert held(prefill) == BLOCKS_OF_100
    assert lab.decode(decode, second, None, "local").tokens == continuation(second, 4)

    lab.decode(decode, first, params)
    lab.settle()
    assert lab.hand_off(prefill, second, "now") is not None
    prefill.end_leases()


def test_two_leases_share_the_blocks_of_a_common_prefix(lab):
    prefill, decode = lab.engine("p", layers=SINGLE), lab.engine("d", layers=SINGLE)
    long = prompt_of(100)
    first = lab.hand_off(prefill, long, "first")
    second = lab.hand_off(prefill, [*long[:90], 501, 502], "second")
    assert held(prefill) == 7 + 1
    lab.decode(decode, long, first, "first")
    lab.run(prefill.connector.has_pending_block_frees)
    prefill.step()
    assert held(prefill) == 6
    answer = lab.decode(decode, [*long[:90], 501, 502], second, "second")
    assert answer.tokens == continuation([*long[:90], 501, 502], 4)


def test_a_reset_ends_every_lease_and_succeeds_once_the_words_are_changed(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(100)
    params = lab.hand_off(prefill, prompt)
    lab.run(lambda: not prefill.is_awake())
    assert not prefill.scheduler.reset_prefix_cache(reset_connector=True)
    assert prefill.connector.has_pending_block_frees()
    prefill.step()
    assert prefill.scheduler.reset_prefix_cache(reset_connector=True)
    assert prefill.outcomes == {"lease_opened": 1, "lease_reset": 1}

    assert lab.decode(decode, prompt, params).tokens == continuation(prompt, 4)
    assert decode.outcomes["grant_expired"] + decode.outcomes["receive_stale"] == 1
    assert decode.outcomes.total() == 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_running_request_waits_for_leases_that_are_ending_instead_of_being_preempted(lab, ends):
    prefill = lab.engine("p", layers=SINGLE, num_blocks=34, extra={"lease_max_pool_fraction": 1.0})
    lab.hand_off(prefill, prompt_of(321))
    running = prefill.add("running", prompt_of(200, seed=1), max_tokens=20)
    lab.run(lambda: len(prefill.results["running"].tokens) == 9)
    assert held(prefill) == 33
    # Its next token needs a block, and there is none.
    if ends:
        prefill.end_leases()
    assert not prefill.step().num_scheduled_tokens
    assert running.num_preemptions == (0 if ends else 1)
    prefill.end_leases()
    lab.finish(prefill, "running")
    assert prefill.results["running"].tokens == continuation(prompt_of(200, seed=1), 20)


def test_a_lease_is_released_once_by_the_last_of_several_users(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    prompt = prompt_of(100)
    params = lab.hand_off(prefill, prompt)
    lab.fabric.hold_new = True
    for name in ("0", "1", "2"):
        decode.add(name, prompt, params, max_tokens=3)
    lab.run(lambda: len(lab.fabric.reads) == 3)
    assert decode.levels["borrowed_leases"] == 1
    reads = lab.fabric.reads
    lab.fabric.hold_new = False
    reads[1].let_go()
    lab.finish(decode, "1")
    assert held(prefill) == BLOCKS_OF_100
    assert not any(isinstance(message, Release) for message in decode.outside.side_channels[0].asked)
    lab.fabric.let_go()
    lab.finish(decode, "0", "2")
    lab.settle()
    releases = [message for message in decode.outside.side_channels[0].asked if isinstance(message, Release)]
    assert len(releases) == 1
    assert decode.outcomes == {"receive_verified": 3}
    assert all(decode.results[name].tokens == continuation(prompt, 3) for name in ("0", "1", "2"))


def test_a_sibling_that_comes_after_the_release_is_computed_or_found_locally(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(100)
    params = lab.hand_off(prefill, prompt)
    lab.decode(decode, prompt, params, "first")
    assert lab.decode(decode, prompt, params, "second").tokens == continuation(prompt, 4)
    assert decode.outcomes == {"receive_verified": 1, "grant_used": 1}
