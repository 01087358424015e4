"""Our connector as a child of vLLM's MultiConnector."""

import pytest
from vllm.v1.request import RequestStatus

from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.siblings import Control, FlatSibling, Sibling

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


def sibling(name="Sibling"):
    return {"kv_connector": name, "kv_connector_module_path": "tests.adapter.siblings", "kv_role": "kv_both"}


@pytest.fixture
def control():
    Sibling.control = FlatSibling.control = Control()
    return Sibling.control


def pair(lab, **settings):
    prefill = lab.engine("p", siblings=(sibling(),))
    decode = lab.engine("d", siblings=(sibling(),), **settings)
    lab.introduce(prefill, decode)
    return prefill, decode


@pytest.mark.parametrize("sibling_first", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_hand_off_beside_an_idle_sibling(lab, control, sibling_first, num_ranks):
    settings = {"siblings": (sibling(),), "sibling_first": sibling_first, "num_ranks": num_ranks}
    prefill, decode = lab.engine("p", **settings), lab.engine("d", **settings)
    lab.introduce(prefill, decode)
    assert lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT)).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}
    assert len(decode.kv_cache_config.kv_cache_groups) == 6
    lab.settle()
    assert prefill.outcomes == {"lease_opened": 1, "lease_released": 1}
    # A pending retirement of ours is a pending retirement of all.
    lab.hand_off(prefill, PROMPT, "again")
    prefill.end_leases()
    assert prefill.connector.has_pending_block_frees()


def test_a_sibling_that_knows_no_groups_makes_one_group_of_all(lab, control):
    settings = {"siblings": (sibling("FlatSibling"),), "hybrid_manager": False}
    prefill, decode = lab.engine("p", **settings), lab.engine("d", **settings)
    assert len(decode.kv_cache_config.kv_cache_groups) == 1
    assert lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT)).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_read(lab, control, policy):
    prefill, decode = pair(lab, policy=policy)
    lab.fabric.fail_new = "somebody pulled the cable"
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == ([] if policy == "fail" else continuation(PROMPT, 4))
    assert decode.outcomes == {"receive_retried": 1, "receive_failed": 1}


def load_by_the_sibling(lab, decode, control, prompt, count):
    """The sibling's load: KV appears in the blocks, and its worker says so."""
    lab.run(lambda: ("r", count) in control.allocated)
    decode.workers[0].runner.fill(decode.tables["r"], prompt, count)
    control.ended.add("r")


def test_the_sibling_loads_instead_and_our_lease_is_released(lab, control):
    prefill, decode = pair(lab, sibling_first=True)
    control.offers["r"] = 99
    params = lab.hand_off(prefill, PROMPT)
    request = decode.add("r", PROMPT, params)
    load_by_the_sibling(lab, decode, control, PROMPT, 99)
    lab.run(prefill.connector.has_pending_block_frees)
    lab.finish(decode, "r")
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"nothing_to_read": 1}
    assert not decode.quantities


def test_we_load_although_the_sibling_offers_too(lab, control):
    prefill, decode = pair(lab)
    control.offers["r"] = 96
    assert lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT)).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}
    assert ("r", 0) in control.allocated
    assert ("r", 96) not in control.allocated


def test_the_sibling_does_not_know_yet(lab, control):
    prefill, decode = pair(lab)
    control.offers["r"] = None
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    for _ in range(5):
        decode.step()
    assert decode.levels["admissions"] == 1
    assert decode.num_free_blocks == decode.num_free_at_start
    control.offers["r"] = 0
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


def test_the_sibling_loads_requests_that_are_not_ours(lab, control):
    _, decode = pair(lab)
    control.offers["r"] = 99
    decode.add("r", PROMPT)
    load_by_the_sibling(lab, decode, control, PROMPT, 99)
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert not decode.outcomes


def test_params_of_both_reach_the_client(lab, control):
    prefill, decode = pair(lab)
    control.params = {"of the sibling": 1}
    params = lab.hand_off(prefill, PROMPT)
    assert params["of the sibling"] == 1
    assert params["do_remote_prefill"] is True
    control.params = None
    lab.decode(decode, PROMPT, params)
    assert decode.outcomes == {"receive_verified": 1}


def test_a_reset_reaches_us(lab, control):
    prefill, _ = pair(lab)
    lab.hand_off(prefill, PROMPT)
    prefill.scheduler.reset_prefix_cache(reset_connector=True)
    prefill.step()
    assert prefill.outcomes == {"lease_opened": 1, "lease_reset": 1}
    assert prefill.num_free_blocks == prefill.num_free_at_start
