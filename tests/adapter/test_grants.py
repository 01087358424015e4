"""Grants that are not for this request, not genuine, or not in time: the prompt is computed here, and is right."""

import base64
import time

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from pd_transfer.core.messages import Release
from pd_transfer.core.params import parse_grant, prompt_digest, seal_grant
from pd_transfer.vllm.prompts import digest_of
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.harness import resealed

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


@pytest.fixture
def pair(lab):
    """Two engines that know each other. Decode would fail a request whose read fails: here none may begin."""
    prefill, decode = lab.engine("p"), lab.engine("d", policy="fail")
    lab.introduce(prefill, decode)
    yield prefill, decode
    prefill.end_leases()


def expect_computed_here(lab, decode, prompt, params, outcome, request_id="r", **fields):
    assert lab.decode(decode, prompt, params, request_id, **fields).tokens == continuation(prompt, 4)
    assert decode.outcomes[outcome] == 1
    assert decode.outcomes.total() == 1
    assert not decode.quantities


def flipped(params, at):
    raw = bytearray(base64.urlsafe_b64decode(params["grant"]))
    raw[at] ^= 1
    return {**params, "grant": base64.urlsafe_b64encode(bytes(raw)).decode()}


def test_another_key_sealed_it(lab, pair, log):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT)
    forged = {**params, "grant": seal_grant(parse_grant(params["grant"]).claimed, b"guess" * 6)}
    expect_computed_here(lab, decode, PROMPT, forged, "grant_forged")
    assert "r: grant_forged: its seal is not the peer's" in log.text


@pytest.mark.parametrize("at", [3, 20, -1, -5, -30])
def test_somebody_changed_a_bit(lab, pair, at):
    prefill, decode = pair
    params = flipped(lab.hand_off(prefill, PROMPT), at)
    assert lab.decode(decode, PROMPT, params).tokens == continuation(PROMPT, 4)
    refusals = ("grant_forged", "grant_malformed", "grant_other_prompt", "grant_other_boot", "grant_other_layout")
    assert sum(decode.outcomes[refusal] for refusal in refusals) == decode.outcomes.total() == 1


@pytest.mark.parametrize("grant", ["x", "AAAA", "AQ==", "é", "A" * 1001, "!" * 100])
def test_it_is_no_grant(lab, pair, grant):
    prefill, decode = pair
    params = {**lab.hand_off(prefill, PROMPT), "grant": grant}
    expect_computed_here(lab, decode, PROMPT, params, "grant_malformed")


@pytest.mark.parametrize(
    "other", [[*PROMPT[:50], 511, *PROMPT[51:]], PROMPT[:-2], [*PROMPT, 5], [*PROMPT[:98], 511, 3]], ids=range(4)
)
def test_it_is_for_another_prompt(lab, pair, other, log):
    prefill, decode = pair
    expect_computed_here(lab, decode, other, lab.hand_off(prefill, PROMPT), "grant_other_prompt")
    assert "the grant is for another prompt" in log.text


def test_only_the_last_token_may_differ(lab, pair):
    prefill, decode = pair
    other = [*PROMPT[:-1], 511]
    assert lab.decode(decode, other, lab.hand_off(prefill, PROMPT)).tokens == continuation(other, 4)
    assert decode.outcomes == {"receive_verified": 1}


A, B = {"cache_salt": "a"}, {"cache_salt": "b"}
LORA, OTHER_LORA = ({"lora_request": LoRARequest(name, 1, "nowhere")} for name in ("a", "b"))


@pytest.mark.parametrize(("there", "here"), [({}, A), (A, {}), (A, B), ({}, LORA), (LORA, {}), (LORA, OTHER_LORA)])
def test_another_cache_salt_or_adapter_is_another_prompt(lab, pair, there, here):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT, **there)
    expect_computed_here(lab, decode, PROMPT, params, "grant_other_prompt", **here)


@pytest.mark.parametrize("fields", [A, LORA])
def test_the_same_cache_salt_or_adapter_is_the_same_prompt(lab, pair, fields):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT, **fields)
    assert lab.decode(decode, PROMPT, params, **fields).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


def test_multimodal_inputs_are_part_of_the_prompt(lab, pair):
    request = pair[1].add("r", PROMPT)
    digests = []
    for identifier, offset in [("cat", 10), ("dog", 10), ("cat", 12), ("cat", 95)]:
        span = PlaceholderRange(offset=offset, length=4)
        feature = MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=span)
        request.mm_features = [feature]
        digests.append(digest_of(request, 99))
    request.mm_features = []
    assert len({*digests, digest_of(request, 99)}) == 5
    # What lies behind the tokens that are compared does not matter.
    request.mm_features = [feature]
    assert digest_of(request, 95) == prompt_digest(PROMPT[:95], None, None, ())
    request.mm_features = []
    lab.finish(pair[1], "r")


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({"layout_digest": "x"}, "grant_other_layout"), ({"engine_boot": "x"}, "grant_other_boot")],
)
def test_it_is_of_another_life_or_layout_of_the_engine(lab, pair, changes, outcome):
    prefill, decode = pair
    params = resealed(decode, lab.hand_off(prefill, PROMPT), **changes)
    expect_computed_here(lab, decode, PROMPT, params, outcome)


def test_params_swapped_between_two_requests(lab, pair):
    prefill, decode = pair
    prompts = {"a": PROMPT, "b": prompt_of(100, seed=1)}
    params = {name: lab.hand_off(prefill, prompt, f"p{name}") for name, prompt in prompts.items()}
    decode.add("a", prompts["a"], params["b"])
    decode.add("b", prompts["b"], params["a"])
    lab.finish(decode, "a", "b")
    for name, prompt in prompts.items():
        assert decode.results[name].tokens == continuation(prompt, 4)
    assert decode.outcomes == {"grant_other_prompt": 2}
    # Nothing of the other prompt has become a prefix.
    for name, prompt in prompts.items():
        longer = [*prompt[:90], 511]
        assert lab.decode(decode, longer, None, f"{name} longer").tokens == continuation(longer, 4)


def test_it_was_used_and_its_lease_released(lab, pair):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT)
    lab.decode(decode, PROMPT, params, "first")
    decode.outcomes.clear()
    decode.quantities.clear()
    expect_computed_here(lab, decode, PROMPT, params, "grant_used", "second")


def test_its_lease_is_over_and_prefill_says_so_in_time(lab, pair):
    prefill, _ = pair
    decode = lab.engine("new", policy="fail")
    params = lab.hand_off(prefill, PROMPT)
    prefill.end_leases()
    lab.network.hold()
    decode.add("r", PROMPT, params)
    lab.run(lambda: len(lab.network.held) == 2)
    # The Hello and the first Renew are answered; the second answer comes first.
    lab.network.deliver()
    lab.network.deliver()
    lab.run(lambda: len(lab.network.held) == 2)
    lab.network.deliver(1)
    lab.network.release()
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"grant_expired": 1}


def test_its_lease_is_over_and_only_the_lease_word_says_so(lab, pair):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT)
    prefill.end_leases()
    prefill.step()
    lab.network.hold()
    decode.add("r", PROMPT, params)
    lab.finish(decode, "r")
    assert decode.results["r"].finish_reason == "error"
    assert decode.outcomes == {"receive_stale": 1}


def test_it_names_a_peer_that_is_not_allowed(lab, pair, log):
    prefill, decode = pair
    params = {**lab.hand_off(prefill, PROMPT), "remote_host": "192.0.2.7"}
    expect_computed_here(lab, decode, PROMPT, params, "peer_not_allowed")
    assert "192.0.2.7" in log.text
    assert "'insecure': true" in log.text
    assert not decode.outside.side_channels[0].asked


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"skip_reading_prefix_cache": True}])
@pytest.mark.parametrize("known", [True, False])
def test_a_request_that_may_not_use_loaded_tokens_releases_the_lease(lab, pair, fields, known):
    prefill, decode = pair
    if not known:
        decode = lab.engine("new")
    params = lab.hand_off(prefill, PROMPT)
    decode.add("r", PROMPT, params, max_tokens=200, **fields)
    lab.run(lambda: len(decode.results["r"].tokens) > 2)
    lab.run(lambda: prefill.connector.has_pending_block_frees())
    assert not decode.results["r"].finish_reason
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(PROMPT, 200)
    assert decode.outcomes == {"nothing_to_read": 1}


def test_the_serving_layer_turned_the_request_away(lab, pair):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT)
    decode.add("r", [0], params, abort_immediately=True)
    decode.abort("r")
    lab.run(prefill.connector.has_pending_block_frees)
    assert [type(message) for message in decode.outside.side_channels[0].asked] == [Release]
    assert not decode.outcomes


def test_a_refused_grant_costs_no_waiting(lab, pair):
    prefill, decode = pair
    params = lab.hand_off(prefill, PROMPT)
    begin = time.monotonic()
    decode.add("r", prompt_of(100, seed=2), params, max_tokens=1)
    decode.step()
    assert decode.results["r"].finish_reason == "length"
    assert time.monotonic() - begin < 5
