"""Prefill: which requests are split before their last token, and what a split request looks like to vLLM."""

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from pd_transfer.core.layout import unpack_runs
from pd_transfer.core.params import Grant, parse_grant
from pd_transfer.vllm.prompts import why_not_split
from tests.adapter.fake_model import continuation, next_token, prompt_of
from tests.adapter.geometry import HYBRID, MIXED_BLOCKS, SINGLE
from tests.adapter.oracle import needed_positions

pytestmark = pytest.mark.vllm

DECODE_LATER = {"do_remote_decode": True}


def grant_of(params) -> Grant:
    return parse_grant(params["grant"]).claimed


@pytest.mark.parametrize("num_tokens", [2, 3, 16, 17, 31, 64, 65, 78, 79, 80, 81, 300])
def test_all_tokens_but_the_last_are_computed(lab, num_tokens):
    prefill = lab.engine("p")
    prompt = prompt_of(num_tokens)
    request = prefill.add("r", prompt, DECODE_LATER, max_tokens=1)
    assert len(request.block_hashes) == (num_tokens - 1) // 16
    lab.finish(prefill, "r")

    assert request.num_prompt_tokens == request.num_computed_tokens == num_tokens - 1
    assert request.prompt_token_ids == prompt[:-1]
    # What prefill samples is of use to nobody, and the router's list is its own.
    assert list(request.all_token_ids) == [*prompt[:-1], next_token(prompt[:-1])]
    assert prompt == prompt_of(num_tokens)
    assert prefill.results["r"].finish_reason == "length"
    assert prefill.outcomes == {"lease_opened": 1}
    prefill.end_leases()


@pytest.mark.parametrize(("layers", "window"), [(HYBRID, 64), (SINGLE, None), (MIXED_BLOCKS, 64)])
@pytest.mark.parametrize("num_tokens", [20, 65, 79, 80, 81, 145, 300])
def test_the_grant_names_every_block_that_the_last_token_looks_at(lab, layers, window, num_tokens):
    prefill = lab.engine("p", layers=layers)
    grant = grant_of(lab.hand_off(prefill, prompt_of(num_tokens)))

    assert grant.num_tokens == num_tokens - 1
    for group, (spec, runs) in enumerate(zip(prefill.kv_cache_config.kv_cache_groups, grant.groups, strict=True)):
        (its_window,) = {layers[name].window for name in spec.layer_names}
        assert its_window in (None, window)
        size = spec.kv_cache_spec.block_size
        rows = unpack_runs(runs).tolist()
        named = {index + step: block_id + step for index, block_id, count in rows for step in range(count)}
        assert set(named) == {position // size for position in needed_positions(num_tokens, its_window)}
        assert named == {index: prefill.tables["prefill"][group][index] for index in named}
        assert 0 not in named.values()
    prefill.end_leases()


def test_params_have_the_names_that_routers_and_vllm_read(lab):
    prefill = lab.engine("p")
    params = lab.hand_off(prefill, prompt_of(100))
    host, port = prefill.address
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "prefill",
        "remote_host": host,
        "remote_port": port,
        "remote_block_ids": [[1]],
        "tp_size": 1,
        "remote_num_tokens": 99,
        "remote_num_bytes": params["remote_num_bytes"],
        "remote_prefill_cached_tokens": 0,
        "transfer_mode": "pull",
        "grant": params["grant"],
    }
    prefill.end_leases()


@pytest.mark.parametrize("num_tokens", [16, 17, 32, 33, 34])
def test_prefixes_that_a_split_request_left_are_found_again(lab, num_tokens):
    prefill = lab.engine("p")
    prompt = prompt_of(num_tokens)
    lab.hand_off(prefill, prompt)
    params = lab.hand_off(prefill, [*prompt[:-1], 501, 502, 503], "longer")
    # vLLM keeps a sliding window's prefix where the same prompt would hit it: one token before its (split) end.
    assert params["remote_prefill_cached_tokens"] == (num_tokens - 2) // 16 * 16
    prefill.end_leases()


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([5], {}),
        (prompt_of(50), {"prompt_logprobs": 1}),
        (prompt_of(40), {"prompt_is_token_ids": [True] * 40}),
        ((), {"prompt_embeds": torch.zeros(40, 64)}),
    ],
    ids=["one token", "prompt logprobs", "mixed", "embeddings"],
)
def test_what_cannot_be_split_is_computed_whole_and_not_handed_off(lab, prompt, fields):
    prefill = lab.engine("p")
    request = prefill.add("r", prompt, DECODE_LATER, max_tokens=2, **fields)
    lab.finish(prefill, "r")

    assert request.num_prompt_tokens == (len(prompt) or 40)
    assert prefill.results["r"].params is None
    assert len(prefill.results["r"].tokens) == 2
    assert prefill.outcomes == {"hand_off_impossible": 1}


@pytest.mark.parametrize(("offset", "is_split"), [(20, True), (34, True), (35, False), (39, False)])
def test_a_prompt_that_ends_in_a_multimodal_input_is_not_split(lab, offset, is_split):
    prefill = lab.engine("p")
    request = prefill.add("r", prompt_of(40), max_tokens=1)
    span = PlaceholderRange(offset=offset, length=min(5, 40 - offset))
    request.mm_features = [MultiModalFeatureSpec(data=None, modality="image", identifier="x", mm_position=span)]
    assert (why_not_split(request) is None) == is_split
    request.mm_features = []
    lab.finish(prefill, "r")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": "yes"}])
def test_requests_that_do_not_ask_are_left_alone(lab, params):
    prefill = lab.engine("p")
    assert lab.decode(prefill, prompt_of(50), params, max_tokens=3).tokens == continuation(prompt_of(50), 3)
    assert prefill.results["r"].params is None
    assert not prefill.outcomes


def test_many_tokens_are_asked_for_and_one_is_made(lab):
    prefill = lab.engine("p")
    lab.hand_off(prefill, prompt_of(50), max_tokens=30, min_tokens=4)
    assert len(prefill.results["prefill"].tokens) == 1
    prefill.end_leases()


def test_a_prompt_whose_sampled_token_ends_it_is_handed_off_all_the_same(lab):
    prefill = lab.engine("p")
    prompt = prompt_of(50)
    assert lab.hand_off(prefill, prompt, stop_token_ids=[next_token(prompt[:-1])])
    assert prefill.results["prefill"].finish_reason == "stop"
    prefill.end_leases()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("max_step_tokens", [32, 100])
def test_chunked_prefill_hands_off_the_same(lab, max_step_tokens, pipelined):
    prefill = lab.engine("p", max_step_tokens=max_step_tokens, pipelined=pipelined)
    decode = lab.engine("d", pipelined=pipelined)
    prompt = prompt_of(300)
    params = lab.hand_off(prefill, prompt)
    assert grant_of(params).num_tokens == 299
    assert lab.decode(decode, prompt, params, max_tokens=5).tokens == continuation(prompt, 5)
    assert decode.outcomes == {"receive_verified": 1}


def test_an_aborted_request_is_not_handed_off(lab):
    prefill = lab.engine("p", max_step_tokens=64)
    prefill.add("r", prompt_of(200), DECODE_LATER)
    prefill.step()
    prefill.abort("r")
    prefill.add("waiting", prompt_of(20), DECODE_LATER)
    prefill.abort("waiting")
    lab.settle()
    assert not prefill.outcomes


def test_a_request_that_is_aborted_in_its_last_step_is_not_handed_off(lab):
    prefill = lab.engine("p")
    request = prefill.add("r", prompt_of(100), DECODE_LATER)
    output = prefill.scheduler.schedule()
    assert request.num_computed_tokens == request.num_prompt_tokens
    prefill.abort("r")
    # Everything is computed, but nobody is left to whom the params could go.
    assert prefill.num_free_blocks == prefill.num_free_at_start
    prefill._take(output, prefill._execute(output))
    lab.settle()
    assert not prefill.outcomes


def test_a_preempted_request_is_handed_off_after_it_has_been_computed_again(lab):
    prefill = lab.engine("p", max_step_tokens=64)
    prompt = prompt_of(200)
    request = prefill.add("r", prompt, DECODE_LATER)
    prefill.step()
    prefill.step()
    prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_computed_tokens == 0
    lab.finish(prefill, "r")
    assert request.num_preemptions == 1
    decode = lab.engine("d")
    assert lab.decode(decode, prompt, prefill.results["r"].params).tokens == continuation(prompt, 4)
    assert decode.outcomes == {"receive_verified": 1}
