"""Clients that go away, and vLLM changing its mind, in every state of a request."""

import pytest
from vllm.v1.request import RequestStatus

from pd_transfer.core.messages import Release
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import SINGLE

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


def num_releases(decode) -> int:
    return sum(isinstance(message, Release) for message in decode.outside.side_channels[0].asked)


def expect_nothing_held(lab, prefill, decode):
    """Decode has given everything back, prefill's lease included."""
    lab.settle()
    assert num_releases(decode) == 1
    assert prefill.outcomes["lease_released"] == prefill.outcomes["lease_opened"] == 1


def test_while_the_peer_is_greeted(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    params = lab.hand_off(prefill, PROMPT)
    lab.network.hold()
    decode.add("r", PROMPT, params)
    decode.step()
    assert decode.levels["admissions"] == 1
    decode.abort("r")
    lab.network.release()
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"withdrawn": 1}


def test_before_the_first_step(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    decode.abort("r")
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"withdrawn": 1}


def test_while_it_is_admitted_and_there_are_no_blocks_for_it(lab):
    prefill, decode = lab.engine("p", layers=SINGLE), lab.engine("d", layers=SINGLE, num_blocks=34)
    lab.introduce(prefill, decode)
    prompt = prompt_of(300)
    decode.add("other", prompt_of(350, seed=1), max_tokens=60)
    lab.run(lambda: decode.results["other"].tokens)
    request = decode.add("r", prompt, lab.hand_off(prefill, prompt))
    for _ in range(3):
        decode.step()
    assert request.status is RequestStatus.WAITING
    assert decode.levels["admissions"] == 1
    assert not lab.fabric.reads
    decode.abort("r")
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"withdrawn": 1}
    assert decode.results["other"].tokens == continuation(prompt_of(350, seed=1), 60)


def test_it_waits_for_blocks_and_then_reads(lab):
    prefill, decode = lab.engine("p", layers=SINGLE), lab.engine("d", layers=SINGLE, num_blocks=34)
    lab.introduce(prefill, decode)
    prompt = prompt_of(300)
    decode.add("other", prompt_of(350, seed=1), max_tokens=60)
    lab.run(lambda: decode.results["other"].tokens)
    decode.add("r", prompt, lab.hand_off(prefill, prompt))
    lab.finish(decode, "r", "other")
    assert decode.results["r"].tokens == continuation(prompt, 4)
    assert decode.outcomes == {"receive_verified": 1}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_while_it_reads(lab, policy, pipelined):
    prefill, decode = lab.engine("p"), lab.engine("d", policy=policy, pipelined=pipelined)
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: lab.fabric.reads)
    decode.abort("r")
    lab.run(lambda: decode.levels["quarantined_blocks"])
    # What cannot be aborted is drained: until then nobody gets the blocks, and prefill keeps its own.
    assert decode.num_free_at_start - decode.num_free_blocks == 32
    assert num_releases(decode) == 0
    lab.fabric.let_go()
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"receive_aborted": 1}


def test_in_the_step_that_would_have_started_the_read(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    output = decode.scheduler.schedule()
    assert output.kv_connector_metadata.orders.receives
    decode.abort("r")
    second = decode.scheduler.schedule()
    assert second.kv_connector_metadata.orders.aborts
    for each in (output, second):
        decode._take(each, decode._execute(each))
    lab.fabric.let_go()
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"receive_aborted": 1}


def test_after_its_read_has_ended_and_before_vllm_has_heard_of_it(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    decode.step()
    (pulling,) = decode.outside.pulling
    lab.wait(lambda: not pulling.num_outstanding())
    decode.abort("r")
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes.total() == 1


def test_after_vllm_has_heard_and_before_it_runs(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    request = decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: decode.outcomes["receive_verified"])
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    decode.abort("r")
    assert decode.num_free_blocks == decode.num_free_at_start
    expect_nothing_held(lab, prefill, decode)


def test_while_it_decodes(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT), max_tokens=50)
    lab.run(lambda: len(decode.results["r"].tokens) > 3)
    decode.abort("r")
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"receive_verified": 1}


def test_after_the_read_was_given_up(lab):
    prefill, decode = lab.engine("p"), lab.engine("d", extra={"read_seconds": 0.1})
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: decode.levels["quarantined_blocks"])
    decode.abort("r")
    for _ in range(3):
        decode.step()
    lab.fabric.let_go()
    expect_nothing_held(lab, prefill, decode)
    assert decode.outcomes == {"receive_timed_out": 1}


def test_one_of_two_users_of_a_lease(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    params = lab.hand_off(prefill, PROMPT)
    lab.fabric.hold_new = True
    decode.add("0", PROMPT, params)
    decode.add("1", PROMPT, params)
    lab.run(lambda: len(lab.fabric.reads) == 2)
    decode.abort("0")
    lab.fabric.reads[0].let_go()
    lab.run(lambda: decode.outcomes["receive_aborted"])
    assert num_releases(decode) == 0
    lab.fabric.let_go()
    lab.finish(decode, "1")
    assert decode.results["1"].tokens == continuation(PROMPT, 4)
    expect_nothing_held(lab, prefill, decode)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_request_that_is_preempted_after_its_read_is_computed_again(lab, pipelined):
    prefill, decode = lab.engine("p"), lab.engine("d", pipelined=pipelined)
    request = decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT), max_tokens=40)
    lab.run(lambda: len(decode.results["r"].tokens) > 5)
    decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    lab.finish(decode, "r")
    assert request.num_preemptions == 1
    assert decode.results["r"].tokens == continuation(PROMPT, 40)
    assert decode.outcomes == {"receive_verified": 1}


def test_preemption_for_want_of_blocks(lab):
    prefill, decode = lab.engine("p", layers=SINGLE), lab.engine("d", layers=SINGLE, num_blocks=34)
    prompts = {"a": prompt_of(230), "b": prompt_of(235, seed=1)}
    requests = [
        decode.add(name, prompt, lab.hand_off(prefill, prompt, f"p{name}"), max_tokens=120)
        for name, prompt in prompts.items()
    ]
    lab.finish(decode, *prompts)
    assert sum(request.num_preemptions for request in requests) > 0
    for name, prompt in prompts.items():
        assert decode.results[name].tokens == continuation(prompt, 120)


def test_many_at_once_in_a_small_pool(lab):
    prefill, decode = lab.engine("p", num_blocks=1500), lab.engine("d", num_blocks=400, max_requests=4)
    prompts = {f"r{seed}": prompt_of(40 + 17 * seed, seed) for seed in range(14)}
    params = {name: lab.hand_off(prefill, prompt, f"p{name}") for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        decode.add(name, prompt, params[name], max_tokens=6)
    for name in ("r3", "r9"):
        decode.abort(name)
    lab.finish(decode, *(prompts.keys() - {"r3", "r9"}))
    for name in prompts.keys() - {"r3", "r9"}:
        assert decode.results[name].tokens == continuation(prompts[name], 6)
    assert decode.outcomes == {"receive_verified": 12, "withdrawn": 2}
