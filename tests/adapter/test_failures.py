"""A read that fails: the request is failed or recomputed, as vLLM's policy says, and every block comes back."""

import time

import pytest
from vllm.v1.request import RequestStatus

from pd_transfer.core.layout import RUN_BYTES, pack_runs
from pd_transfer.core.params import parse_grant
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import SINGLE
from tests.adapter.harness import resealed

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


@pytest.fixture(params=["fail", "recompute"])
def policy(request):
    return request.param


def expect_failure(lab, decode, policy, request_id="r", prompt=PROMPT):
    """The request ends as the policy says, and decode holds nothing any more."""
    lab.finish(decode, request_id)
    result = decode.results[request_id]
    if policy == "fail":
        assert result.finish_reason == "error"
        assert result.tokens == []
    else:
        assert result.finish_reason == "length"
        assert result.tokens == continuation(prompt, 4)
    lab.run(lambda: decode.is_settled() or not decode.scheduler.has_requests())
    decode.step()
    assert decode.num_free_blocks == decode.num_free_at_start
    assert decode.scheduler.requests == {}


def test_the_lease_was_over_and_the_blocks_were_used_again(lab, policy):
    prefill, decode = lab.engine("p", num_blocks=400), lab.engine("d", policy=policy)
    lab.introduce(prefill, decode)
    params = lab.hand_off(prefill, PROMPT)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, params)
    lab.run(lambda: lab.fabric.reads)
    prefill.end_leases()
    prefill.step()
    assert prefill.num_free_blocks == prefill.num_free_at_start
    # Prefill goes on, and overwrites what decode is about to read.
    for seed in range(1, 4):
        prefill.add(f"next{seed}", prompt_of(300, seed), max_tokens=1)
    lab.finish(prefill, "next1", "next2", "next3")
    lab.fabric.let_go()
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_stale": 1}
    assert "tokens_verified" not in decode.quantities


def wait_until_the_peer_may_be_greeted(lab, backoff_seconds):
    over = time.monotonic() + backoff_seconds
    lab.wait(lambda: time.monotonic() > over)


@pytest.mark.parametrize("aggregated", [True, False])
@pytest.mark.parametrize("layers", ["hybrid", "single"])
def test_a_transfer_fails_and_the_next_one_does_not(lab, policy, aggregated, layers):
    settings = {"layers": SINGLE} if layers == "single" else {}
    times = {"backoff_seconds": 0.05}
    prefill = lab.engine("p", **settings)
    decode = lab.engine("d", policy=policy, aggregated=aggregated, extra=times, **settings)
    lab.introduce(prefill, decode)
    lab.fabric.fail_new = "somebody pulled the cable"
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_retried": 1, "receive_failed": 1}
    lab.settle()
    assert prefill.outcomes["lease_released"] == 1

    lab.fabric.fail_new = None
    wait_until_the_peer_may_be_greeted(lab, times["backoff_seconds"])
    again = prompt_of(100, seed=1)
    assert lab.decode(decode, again, lab.hand_off(prefill, again, "again"), "again").tokens == continuation(again, 4)
    assert decode.outcomes["receive_verified"] == 1


def test_the_read_of_the_word_fails(lab, policy):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy)
    lab.introduce(prefill, decode)
    lab.fabric.latency_polls = 1
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: lab.fabric.reads)
    (read,) = lab.fabric.reads
    read.let_go()
    lab.run(lambda: [r for r in lab.fabric.reads if r.landing is not None])
    (word,) = lab.fabric.reads
    lab.fabric.hold_new, lab.fabric.fail_new = False, "somebody pulled the cable"
    word.fail("somebody pulled the cable")
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_retried": 1, "receive_failed": 1}


def test_a_connection_that_breaks_costs_nobody_an_answer(lab, policy):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy)
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: lab.fabric.reads)
    lab.fabric.hold_new = False
    lab.fabric.reads[0].fail("somebody pulled the cable and put it back")
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_retried": 1, "receive_verified": 1}
    lab.settle()
    assert prefill.outcomes["lease_released"] == 1


def test_a_grant_that_leaves_out_a_block_that_is_needed(lab, policy):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy)
    lab.introduce(prefill, decode)
    params = lab.hand_off(prefill, PROMPT)
    groups = list(parse_grant(params["grant"]).claimed.groups)
    groups[3] = groups[3][RUN_BYTES:]
    decode.add("r", PROMPT, resealed(decode, params, groups=tuple(groups)))
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_uncovered": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": ()},
        {"groups": (pack_runs([0, 1, 2**31 - 1]),) * 6},
        {"groups": (pack_runs([-5, -5, 10**9, 0, 0, 7]),) * 6},
        {"slot": -1},
        {"slot": 2**62},
        {"generation": 2**63},
        {"generation": -1},
    ],
    ids=str,
)
def test_a_sealed_grant_of_nonsense_fails_one_request_and_nothing_else(lab, policy, changes):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy)
    lab.introduce(prefill, decode)
    params = lab.hand_off(prefill, PROMPT)
    decode.add("r", PROMPT, resealed(decode, params, **changes))
    expect_failure(lab, decode, policy)
    assert decode.outcomes.total() - decode.outcomes["receive_retried"] == 1
    assert not decode.outcomes["receive_verified"]
    again = prompt_of(100, seed=1)
    assert lab.decode(decode, again, lab.hand_off(prefill, again, "again"), "again").tokens == continuation(again, 4)


def test_prefill_dies_during_the_read(lab, policy):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy, extra={"handshake_seconds": 0.2})
    lab.introduce(prefill, decode)
    params, other = lab.hand_off(prefill, PROMPT), lab.hand_off(prefill, prompt_of(90, seed=1), "other")
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, params)
    lab.run(lambda: lab.fabric.reads)
    prefill.kill()
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_failed": 1}
    # What comes later is computed here, whatever the policy, and does not wait long.
    begin = time.monotonic()
    answer = lab.decode(decode, prompt_of(90, seed=1), other, "later")
    assert answer.tokens == continuation(prompt_of(90, seed=1), 4)
    assert decode.outcomes["peer_unreachable"] >= 1
    assert time.monotonic() - begin < 3
    prefill.end_leases()


def test_a_read_that_never_ends_holds_its_blocks_until_the_agent_is_destroyed(lab, policy):
    prefill = lab.engine("p")
    decode = lab.engine("d", policy=policy, extra={"read_seconds": 0.2, "drain_seconds": 0.6, "backoff_seconds": 0.01})
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    request = decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: decode.levels["quarantined_blocks"])
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert decode.num_free_at_start - decode.num_free_blocks == 32
    # Given up, but it may still write: half of it arrives now.
    lab.fabric.reads[0].copy_half()
    assert not decode.outcomes
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_timed_out": 1, "agent_rebuilt": 1}
    lab.fabric.let_go()

    wait_until_the_peer_may_be_greeted(lab, 0.01)
    again = prompt_of(100, seed=1)
    assert lab.decode(decode, again, lab.hand_off(prefill, again, "again"), "again").tokens == continuation(again, 4)
    assert decode.outcomes["receive_verified"] == 1


def test_a_late_read_that_ends_while_it_drains_frees_its_blocks_without_more_ado(lab, policy):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy, extra={"read_seconds": 0.2, "drain_seconds": 30})
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: decode.levels["quarantined_blocks"])
    lab.fabric.let_go()
    expect_failure(lab, decode, policy)
    assert decode.outcomes == {"receive_timed_out": 1}


def test_several_fail_at_once_and_others_do_not(lab, policy):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy)
    lab.introduce(prefill, decode)
    prompts = {str(seed): prompt_of(70 + seed, seed) for seed in range(1, 6)}
    params = {name: lab.hand_off(prefill, prompt, f"p{name}") for name, prompt in prompts.items()}
    lab.fabric.hold_new = True
    for name, prompt in prompts.items():
        decode.add(name, prompt, params[name])
    lab.run(lambda: len(lab.fabric.reads) == 5)
    for read in lab.fabric.reads[:2]:
        read.fail("somebody pulled a cable")
    lab.run(lambda: len(lab.fabric.reads) == 3)
    lab.fabric.hold_new = False
    lab.fabric.let_go()
    lab.finish(decode, *prompts)
    for name, prompt in prompts.items():
        assert decode.results[name].tokens == continuation(prompt, 4)
    assert decode.outcomes == {"receive_retried": 2, "receive_verified": 5}
