"""Two ranks: one lease, two words, two reads, and exactly one report of each rank."""

from collections import Counter

import numpy as np
import pytest

from pd_transfer.core.lease_words import word_value
from pd_transfer.core.params import parse_grant
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import MIXED_BLOCKS
from tests.adapter.oracle import memory_after, num_bytes, pages_to_read

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


@pytest.fixture(params=["fail", "recompute"])
def policy(request):
    return request.param


def pair(lab, **settings):
    prefill, decode = lab.engine("p", num_ranks=2), lab.engine("d", num_ranks=2, **settings)
    lab.introduce(prefill, decode)
    for engine in (prefill, decode):
        engine.reports.clear()
    return prefill, decode


def reports_of(decode, request_id):
    """How often each rank has said that a request's receive has ended, and that it has failed."""
    ended, failed = Counter(), Counter()
    for step in decode.reports:
        for rank, output in enumerate(step):
            ended[rank] += request_id in (output.finished_recving or ())
            failed[rank] += request_id in output.failed_recving
    return dict(ended), dict(failed)


def words(prefill, rank):
    """The lease words of a rank, read from its memory as decode does it."""
    (serving,) = [each for each in prefill.outside.serving if f"rank{rank}" in each.remote_memory.agent_name]
    memory = serving.remote_memory.words
    return np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint64 * (memory.length_bytes // 8)).from_address(memory.address)
    )


@pytest.mark.parametrize("num_tokens", [16, 79, 80, 100])
@pytest.mark.parametrize("pipelined", [False, True])
def test_each_rank_reads_its_own_bytes(lab, num_tokens, pipelined):
    prefill, decode = pair(lab, pipelined=pipelined)
    prompt = prompt_of(num_tokens)
    params = lab.hand_off(prefill, prompt)
    assert params["tp_size"] == 2
    before = [worker.memory.copy() for worker in decode.workers]
    decode.add("r", prompt, params)
    lab.run(lambda: decode.outcomes["receive_verified"])
    pages = pages_to_read(prefill, decode, ("prefill", "r"), num_tokens)
    for rank, memory in enumerate(before):
        assert np.array_equal(decode.workers[rank].memory, memory_after(memory, prefill, decode, pages, rank))
    assert not np.array_equal(decode.workers[0].memory, decode.workers[1].memory)
    # Bytes add up over ranks; the tokens are the same ones.
    assert decode.quantities["bytes_verified"] == num_bytes(decode, pages) == params["remote_num_bytes"]
    assert decode.quantities["tokens_verified"] == num_tokens - 1
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(prompt, 4)
    assert reports_of(decode, "r") == ({0: 1, 1: 1}, {0: 0, 1: 0})
    assert decode.outcomes == {"receive_verified": 1}


def test_other_block_sizes_on_two_ranks(lab):
    prefill = lab.engine("p", num_ranks=2, layers=MIXED_BLOCKS)
    decode = lab.engine("d", num_ranks=2, layers=MIXED_BLOCKS)
    lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT))
    assert decode.outcomes == {"receive_verified": 1}


def test_one_lease_has_a_word_on_each_rank_and_both_change_before_the_blocks_go(lab):
    prefill, _ = pair(lab)
    grant = parse_grant(lab.hand_off(prefill, PROMPT)["grant"]).claimed
    boots = [int(words(prefill, rank)[0]) >> 32 for rank in (0, 1)]
    assert boots[0] != boots[1]
    for rank, boot in enumerate(boots):
        assert int(words(prefill, rank)[grant.slot]) == word_value(boot, grant.generation)

    held = prefill.num_free_at_start - prefill.num_free_blocks
    assert held
    prefill.end_leases()
    output = prefill.scheduler.schedule()
    # The first rank has carried the step out, the second not yet.
    first = prefill.workers[0].step(output)
    assert int(words(prefill, 0)[grant.slot]) == word_value(boots[0], grant.generation + 1)
    assert int(words(prefill, 1)[grant.slot]) == word_value(boots[1], grant.generation)
    assert prefill.num_free_at_start - prefill.num_free_blocks == held
    second = prefill.workers[1].step(output)
    metadata = first[1].kv_connector_worker_meta.aggregate(second[1].kv_connector_worker_meta)
    assert metadata.report.confirmed == {batch.batch_id: 2 for batch in output.kv_connector_metadata.orders.words}
    first[1].kv_connector_worker_meta = metadata
    prefill.connector.update_connector_output(first[1])
    assert prefill.num_free_blocks == prefill.num_free_at_start


def test_a_word_that_one_rank_has_not_confirmed_keeps_the_blocks(lab):
    prefill, _ = pair(lab)
    lab.hand_off(prefill, PROMPT)
    prefill.end_leases()
    output = prefill.scheduler.schedule()
    answers = [worker.step(output)[1] for worker in prefill.workers]
    held = prefill.num_free_at_start - prefill.num_free_blocks
    prefill.connector.update_connector_output(answers[0])
    assert prefill.num_free_at_start - prefill.num_free_blocks == held > 0
    assert prefill.connector.has_pending_block_frees()
    prefill.connector.update_connector_output(answers[1])
    assert prefill.num_free_blocks == prefill.num_free_at_start


@pytest.mark.parametrize("failing", [0, 1])
def test_one_failing_rank_fails_the_request_once_both_have_ended(lab, policy, failing):
    prefill, decode = pair(lab, policy=policy)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: len(lab.fabric.reads) == 2)
    reads = {("rank1" in read.agent_name): read for read in lab.fabric.reads}
    lab.fabric.fail_new = "the cable is still out"
    reads[bool(failing)].fail("somebody pulled a cable")
    lab.run(lambda: reports_of(decode, "r")[1][failing])
    lab.fabric.fail_new = None
    # The other rank still reads: the request waits, and keeps its blocks.
    for _ in range(3):
        decode.step()
    assert not decode.results["r"].finish_reason
    assert decode.num_free_at_start - decode.num_free_blocks == 32
    lab.fabric.let_go()
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == ([] if policy == "fail" else continuation(PROMPT, 4))
    assert reports_of(decode, "r") == ({0: 1, 1: 1}, {failing: 1, 1 - failing: 0})
    assert decode.outcomes == {"receive_retried": 1, "receive_failed": 1}
    lab.settle()
    assert prefill.outcomes["lease_released"] == 1


def test_the_word_of_one_rank_is_enough_to_refuse(lab, policy):
    prefill, decode = pair(lab, policy=policy)
    params = lab.hand_off(prefill, PROMPT)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, params)
    lab.run(lambda: len(lab.fabric.reads) == 2)
    slot = parse_grant(params["grant"]).claimed.slot
    words(prefill, 1)[slot] += np.uint64(1)
    lab.fabric.let_go()
    lab.finish(decode, "r")
    assert decode.outcomes == {"receive_stale": 1}
    assert reports_of(decode, "r") == ({0: 1, 1: 1}, {0: 0, 1: 1})
    words(prefill, 1)[slot] -= np.uint64(1)


def test_abort_while_one_rank_is_done_and_the_other_reads(lab, policy):
    prefill, decode = pair(lab, policy=policy)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: len(lab.fabric.reads) == 2)
    lab.fabric.hold_new = False
    lab.fabric.reads[0].let_go()
    lab.run(lambda: sum(reports_of(decode, "r")[0].values()) == 1)
    decode.abort("r")
    for _ in range(3):
        decode.step()
    assert decode.num_free_blocks < decode.num_free_at_start
    lab.fabric.let_go()
    lab.settle()
    assert reports_of(decode, "r") == ({0: 1, 1: 1}, {0: 0, 1: 0})
    assert decode.outcomes == {"receive_aborted": 1}


def test_many_requests_and_one_lost_rank_agent(lab):
    prefill, decode = pair(lab)
    prompts = {f"r{seed}": prompt_of(30 + 11 * seed, seed) for seed in range(8)}
    params = {name: lab.hand_off(prefill, prompt, f"p{name}") for name, prompt in prompts.items()}
    lab.fabric.hold_new = True
    for name, prompt in prompts.items():
        decode.add(name, prompt, params[name])
    lab.run(lambda: len(lab.fabric.reads) == 16)
    for read in [read for read in lab.fabric.reads if "rank1" in read.agent_name][:3]:
        read.fail("somebody pulled a cable")
    lab.fabric.let_go()
    lab.finish(decode, *prompts)
    for name, prompt in prompts.items():
        assert decode.results[name].tokens == continuation(prompt, 4)
        assert reports_of(decode, name)[0] == {0: 1, 1: 1}
    assert decode.outcomes == {"receive_retried": 3, "receive_verified": 8}
