"""Decode: KV arrives where vLLM wants it, nowhere else, and nothing is read that is not needed."""

import random

import numpy as np
import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from pd_transfer.core.layout import unpack_runs
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import HYBRID, MIXED_BLOCKS, PADDED, SINGLE, UNEQUAL_HEADS, Layer, layered
from tests.adapter.oracle import memory_after, num_bytes, pages_to_read

pytestmark = pytest.mark.vllm


def hand_over(lab, prefill, decode, prompt, name="0", max_tokens=3, **fields):
    """One request through both engines. Its KV is compared byte by byte at the moment that vLLM would use it."""
    ids = (f"p{name}", f"r{name}")
    params = lab.hand_off(prefill, prompt, ids[0], **fields)
    request = decode.add(ids[1], prompt, params, max_tokens=max_tokens, **fields)
    bytes_before = decode.quantities["bytes_verified"]
    memories = [worker.memory.copy() for worker in decode.workers]
    lab.run(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    num_local = request.prefill_stats.num_local_cached_tokens
    pages = pages_to_read(prefill, decode, ids, len(prompt), num_local)
    lab.run(lambda: decode.quantities["bytes_verified"] > bytes_before)
    for rank, memory in enumerate(memories):
        expected = memory_after(memory, prefill, decode, pages, rank)
        assert np.array_equal(decode.workers[rank].memory, expected), f"rank {rank} has other bytes"
    assert decode.quantities["bytes_verified"] - bytes_before == num_bytes(decode, pages)
    assert num_bytes(decode, pages) <= params["remote_num_bytes"]
    assert num_local or num_bytes(decode, pages) == params["remote_num_bytes"]
    lab.finish(decode, ids[1])
    assert decode.results[ids[1]].tokens == continuation(prompt, max_tokens)
    return pages


def test_the_happy_path_step_by_step(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    prompt = prompt_of(100)
    params = lab.hand_off(prefill, prompt)
    lab.fabric.hold_new = True
    num_free = decode.num_free_blocks

    request = decode.add("r", prompt, params, max_tokens=2)
    lab.run(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert request.num_computed_tokens == 99
    # Five sliding groups look back 64 tokens, so blocks 0 and 1 are the null block; the full group has all seven.
    tables = decode.tables["r"]
    assert [table[:2] for table in tables[:5]] == [[0, 0]] * 5
    assert [len(table) for table in tables] == [7] * 6
    assert all(block for table in tables for block in table[2:])
    assert num_free - decode.num_free_blocks == 5 * 5 + 7
    assert decode.results["r"].tokens == []

    lab.run(lambda: decode.levels["receives"] == decode.levels["transfers"] == 1)
    assert decode.levels["admissions"] == decode.levels["borrowed_leases"] == 1
    for _ in range(5):
        assert not decode.step().num_scheduled_tokens
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert decode.tables["r"] == tables

    lab.fabric.let_go()
    lab.run(lambda: decode.outcomes["receive_verified"])
    assert decode.levels["admissions"] == decode.levels["borrowed_leases"] == 0
    output = decode.step()
    # Exactly the last prompt token is computed here.
    assert output.num_scheduled_tokens == {"r": 1}
    assert request.num_computed_tokens == 100
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(prompt, 2)
    assert decode.quantities["tokens_verified"] == 99
    lab.settle()
    assert prefill.outcomes == {"lease_opened": 1, "lease_released": 1}


def test_every_residue_and_both_sides_of_the_window(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lengths = [2, 3, *range(15, 19), *range(31, 34), *range(60, 100), 128, *range(143, 148), 300, 311]
    for num_tokens in lengths:
        hand_over(lab, prefill, decode, prompt_of(num_tokens, seed=num_tokens), str(num_tokens))
    assert decode.outcomes == {"receive_verified": len(lengths)}
    assert decode.quantities["tokens_verified"] == sum(lengths) - len(lengths)


@pytest.mark.parametrize("num_tokens", [79, 80, 100])
def test_decoding_goes_on_for_more_than_two_windows(lab, num_tokens):
    hand_over(lab, lab.engine("p"), lab.engine("d"), prompt_of(num_tokens), max_tokens=140)


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": SINGLE},
        {"layers": HYBRID, "hybrid_manager": False},
        {"layers": MIXED_BLOCKS},
        {"layers": UNEQUAL_HEADS},
        {"layers": PADDED},
        {"layers": layered([Layer(40)] * 3)},
        {"layout": "BLHNC"},
        {"layout": "LBNHC", "layers": MIXED_BLOCKS},
        {"layout": "BLNHC", "layers": UNEQUAL_HEADS},
        {"prefix_caching": False},
        {"pipelined": True},
        {"aggregated": False},
        {"layers": MIXED_BLOCKS, "pipelined": True, "max_step_tokens": 64},
    ],
    ids=lambda settings: " ".join(f"{key}" for key in settings),
)
def test_other_geometries_and_engines(lab, settings):
    prefill, decode = lab.engine("p", **settings), lab.engine("d", **settings)
    several = {id(HYBRID): 6, id(MIXED_BLOCKS): 3, id(PADDED): 2} if settings.get("hybrid_manager", True) else {}
    assert len(decode.kv_cache_config.kv_cache_groups) == several.get(id(settings.get("layers", HYBRID)), 1)
    lengths = [2, 16, 17, 33, 64, 65, 78, 79, 80, 81, 95, 96, 97, 111, 112, 113, 150]
    for num_tokens in lengths:
        hand_over(lab, prefill, decode, prompt_of(num_tokens, seed=num_tokens), str(num_tokens))
    assert decode.outcomes == {"receive_verified": len(lengths)}
    if settings.get("prefix_caching", True):
        # What a shorter prompt finds of a longer one's prefix has to be right too.
        shorter = [*prompt_of(150, seed=150)[:70], 501, 502]
        assert lab.decode(decode, shorter, None, "shorter").tokens == continuation(shorter, 4)


def test_block_sizes_differ_by_group_in_that_geometry(lab):
    prefill = lab.engine("p", layers=MIXED_BLOCKS)
    sizes = {
        type(g.kv_cache_spec).__name__: g.kv_cache_spec.block_size for g in prefill.kv_cache_config.kv_cache_groups
    }
    assert sizes == {"SlidingWindowSpec": 16, "FullAttentionSpec": 32}


@pytest.mark.parametrize("seed", range(12))
def test_random_geometries_read_exactly_what_the_oracle_says(lab, seed):
    rng = random.Random(seed)
    block = rng.choice([8, 16, 32])
    windows = rng.sample([None, 24, 33, 64, 100], k=rng.randint(1, 3))
    heads = rng.choice([(1,), (1, 2)])
    kinds = [Layer(window, block, rng.choice(heads)) for window in windows]
    layers = layered([rng.choice(kinds) for _ in range(rng.randint(2, 9))])
    prefill = lab.engine("p", layers=layers, num_blocks=1500)
    decode = lab.engine(
        "d", layers=layers, num_blocks=1500, pipelined=rng.random() < 0.5, retention=rng.choice([0, None])
    )
    history: list[int] = []
    for turn in range(8):
        # Some prompts continue earlier ones, so that decode has a part of them already.
        kept = history[: rng.randint(0, len(history))] if rng.random() < 0.6 else []
        prompt = kept + prompt_of(rng.randint(2, 150), seed=100 * seed + turn)
        pages = hand_over(lab, prefill, decode, prompt, str(turn))
        assert pages
        history = prompt


@pytest.mark.parametrize(("cached", "num_tokens"), [(48, 100), (64, 100), (150, 300), (290, 300), (16, 200)])
def test_a_local_prefix_is_not_read_and_not_written(lab, cached, num_tokens):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(num_tokens)
    lab.decode(decode, [*prompt[:cached], 501], None, "earlier", max_tokens=1)
    pool = decode.scheduler.kv_cache_manager.block_pool
    hashed = {block.block_id for block in pool.blocks if block.block_hash is not None}
    assert hashed

    params = lab.hand_off(prefill, prompt)
    request = decode.add("r", prompt, params, max_tokens=3)
    lab.run(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    num_local = request.prefill_stats.num_local_cached_tokens
    assert num_local == cached // 16 * 16
    pages = pages_to_read(prefill, decode, ("prefill", "r"), num_tokens, num_local)
    assert not hashed & {block for _, _, block in pages}
    before = decode.workers[0].memory.copy()
    lab.run(lambda: decode.outcomes["receive_verified"])
    assert np.array_equal(decode.workers[0].memory, memory_after(before, prefill, decode, pages))
    assert decode.quantities["bytes_verified"] == num_bytes(decode, pages)
    assert decode.quantities["tokens_verified"] == num_tokens - 1 - num_local
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(prompt, 3)


def test_a_hashed_block_is_not_written_wherever_it_is(lab):
    """vLLM 0.32 makes no such table for the groups that are supported; its documentation allows it."""
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    prompt, connector = prompt_of(100), decode.connector
    request = decode.add("r", prompt, lab.hand_off(prefill, prompt))
    assert connector.get_num_new_matched_tokens(request, 0) == (99, True)
    tables = [[KVCacheBlock(100 * group + index + 1) for index in range(7)] for group in range(6)]
    tables[2][4]._block_hash = b"shared"
    connector.update_state_after_alloc(request, KVCacheBlocks(tuple(tables)), 99)
    metadata = connector.build_connector_meta(SchedulerOutput.make_empty())
    (receive,) = metadata.orders.receives
    runs = [[tuple(run) for run in unpack_runs(group).tolist()] for group in receive.needed]
    # Without vLLM's null blocks every position is asked for, and the grant does not offer all: the request recovers.
    assert runs == [[(0, 1, 7)], [(0, 101, 7)], [(0, 201, 4), (5, 206, 2)], [(0, 301, 7)], [(0, 401, 7)], [(0, 501, 7)]]
    worker = decode.workers[0].connector
    worker.bind_connector_metadata(metadata)
    ended = KVConnectorOutput(finished_recving={"r"})
    lab.wait(lambda: worker.get_transfer_results(set()).finished_recving)
    ended.kv_connector_worker_meta = worker.build_connector_worker_meta()
    connector.update_connector_output(ended)
    lab.finish(decode, "r")
    assert decode.outcomes == {"receive_uncovered": 1}


@pytest.mark.parametrize("num_tokens", [33, 65, 97])
def test_a_full_local_hit_reads_nothing_and_releases_the_lease(lab, num_tokens):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(num_tokens)
    lab.decode(decode, prompt, None, "earlier", max_tokens=1)
    params = lab.hand_off(prefill, prompt)
    assert lab.decode(decode, prompt, params, max_tokens=3).tokens == continuation(prompt, 3)
    assert decode.outcomes == {"nothing_to_read": 1}
    lab.settle()
    assert prefill.outcomes["lease_released"] == 1
    assert not decode.quantities


def test_what_was_read_is_a_prefix_for_later_requests(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    prompt = prompt_of(100)
    lab.decode(decode, prompt, lab.hand_off(prefill, prompt), max_tokens=1)
    decode.add("later", [*prompt[:98], 501, 502])
    output = decode.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 96
    lab.finish(decode, "later")
    assert decode.results["later"].tokens == continuation([*prompt[:98], 501, 502], 4)


def test_positive_control_a_damaged_block_is_noticed(lab):
    prefill = lab.engine("p")
    decode = lab.engine("d", extra={"debug_damage": [2, -1]})
    prompt = prompt_of(100)
    with pytest.raises(AssertionError, match=r"r, tokens 99\.\.99: model\.layers\.2 would attend to wrong KV at"):
        lab.decode(decode, prompt, lab.hand_off(prefill, prompt))
    decode.abort("r")


def test_positive_control_the_comparison_of_bytes_can_fail(lab):
    prefill = lab.engine("p")
    decode = lab.engine("d", extra={"debug_damage": [5, 0]})
    with pytest.raises(AssertionError, match="rank 0 has other bytes"):
        hand_over(lab, prefill, decode, prompt_of(100))
    decode.abort("r0")
