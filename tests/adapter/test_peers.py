"""Prefill engines that do not answer, do not fit, or are not what they were."""

import time

import pytest

from pd_transfer.core.messages import Hello
from pd_transfer.core.params import Address
from tests.adapter.fake_model import continuation, prompt_of
from tests.adapter.geometry import HYBRID, SINGLE, hybrid, write_model

pytestmark = pytest.mark.vllm

PROMPT = prompt_of(100)


def expect_computed_here(lab, decode, prompt, params, request_id="r"):
    assert lab.decode(decode, prompt, params, request_id).tokens == continuation(prompt, 4)
    assert not decode.quantities


def num_hellos(decode) -> int:
    return sum(isinstance(message, Hello) for message in decode.outside.side_channels[0].asked)


def test_a_request_waits_for_its_peer_and_others_do_not_wait_for_it(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    params = lab.hand_off(prefill, PROMPT)
    lab.network.hold()
    decode.add("r", PROMPT, params)
    decode.add("other", prompt_of(50, seed=1))
    lab.finish(decode, "other")
    assert decode.results["r"].tokens == []
    assert decode.levels["admissions"] == 1
    assert decode.num_free_blocks == decode.num_free_at_start
    lab.network.release()
    lab.finish(decode, "r")
    assert decode.outcomes == {"receive_verified": 1}


def test_a_peer_in_the_settings_is_greeted_at_start_up(lab):
    prefill = lab.engine("p")
    decode = lab.engine("d", extra={"peers": ["{}:{}".format(*prefill.address)]})
    lab.run(lambda: decode.outside.side_channels[0].answers)
    assert num_hellos(decode) == 1
    params = lab.hand_off(prefill, PROMPT)
    decode.add("r", PROMPT, params)
    # No question is open: the read begins in the first step.
    decode.step()
    assert decode.levels["admissions"] == 1
    assert any(decode.tables["r"])
    lab.finish(decode, "r")
    assert num_hellos(decode) == 1


def test_a_dead_peer_costs_one_handshake_deadline_and_later_requests_nothing(lab, log):
    prefill = lab.engine("p")
    decode = lab.engine("d", policy="fail", extra={"handshake_seconds": 0.4, "backoff_seconds": 60})
    params = lab.hand_off(prefill, PROMPT)
    other = lab.hand_off(prefill, prompt_of(100, seed=1), "other")
    prefill.kill()
    begin = time.monotonic()
    expect_computed_here(lab, decode, PROMPT, params)
    assert 0.4 <= time.monotonic() - begin < 4
    decode.add("other", prompt_of(100, seed=1), other, max_tokens=1)
    decode.step()
    assert decode.results["other"].finish_reason == "length"
    assert "no answer from 127.0.0.1" in log.text
    assert "check that prefill is alive" in log.text
    assert num_hellos(decode) == 1
    prefill.end_leases()


def test_a_peer_that_came_late_is_greeted_anew_after_a_while(lab):
    prefill, decode = lab.engine("p"), lab.engine("d", extra={"handshake_seconds": 0.1, "backoff_seconds": 0.1})
    params = lab.hand_off(prefill, PROMPT)
    lab.network.hold()
    expect_computed_here(lab, decode, PROMPT, params)
    while lab.network.held:
        lab.network.drop()
    lab.network.release()
    end = time.monotonic() + 0.2
    lab.run(lambda: time.monotonic() > end)
    again = prompt_of(100, seed=1)
    assert lab.decode(decode, again, lab.hand_off(prefill, again, "again"), "again").tokens == continuation(again, 4)
    assert decode.outcomes["receive_verified"] == 1
    prefill.end_leases()


def test_a_broken_connection_is_made_anew(lab):
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    lab.network.cut(Address(*prefill.address))
    lab.run(lambda: True)
    assert lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT)).tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


def test_a_connection_that_breaks_during_the_read_does_not_harm_it(lab):
    prefill, decode = lab.engine("p"), lab.engine("d", policy="fail")
    lab.introduce(prefill, decode)
    lab.fabric.hold_new = True
    decode.add("r", PROMPT, lab.hand_off(prefill, PROMPT))
    lab.run(lambda: lab.fabric.reads)
    lab.network.cut(Address(*prefill.address))
    lab.fabric.let_go()
    lab.finish(decode, "r")
    assert decode.results["r"].tokens == continuation(PROMPT, 4)
    assert decode.outcomes == {"receive_verified": 1}


def test_a_restarted_engine_is_another_peer(lab, log):
    port = 5710
    prefill = lab.engine("p", extra={"side_channel_port": port})
    decode = lab.engine("d", policy="fail", extra={"backoff_seconds": 0.05, "handshake_seconds": 0.5})
    lab.introduce(prefill, decode)
    old = lab.hand_off(prefill, PROMPT)
    prefill.kill()
    prefill.end_leases()
    again = lab.engine("p2", extra={"side_channel_port": port})
    expect_computed_here(lab, decode, PROMPT, old)
    assert decode.outcomes == {"grant_other_boot": 1}
    fresh = prompt_of(100, seed=1)
    assert lab.decode(decode, fresh, lab.hand_off(again, fresh, "fresh"), "fresh").tokens == continuation(fresh, 4)
    assert decode.outcomes["receive_verified"] == 1


MISFITS = {
    "weights": ({"model": "weights"}, "the weights differ: local "),
    "model": ({"model": "rope"}, "the model differs: local"),
    "window": ({"layers": hybrid(window=48)}, "model.layers.0 has another layout: local spec=SlidingWindowSpec"),
    "block size": ({"layers": hybrid(block_size=32)}, "block=32"),
    "heads": ({"layers": {n: type(v)(v.window, v.block_size, 2) for n, v in HYBRID.items()}}, "heads=2"),
    "layers": ({"layers": SINGLE}, "model.layers.10 does not exist"),
    "manager": ({"hybrid_manager": False}, "spec=FullAttentionSpec"),
    "ranks": ({"num_ranks": 2}, "tensor parallel size differs: local 1, peer 2"),
}


@pytest.mark.parametrize(("difference", "said"), MISFITS.values(), ids=MISFITS)
def test_an_engine_that_does_not_fit_is_refused_by_name(lab, tmp_path, log, difference, said):
    changes = dict(difference)
    if "model" in changes:
        kind = changes["model"]
        changes["model"] = write_model(
            tmp_path / "model", **({"weight": 1.0} if kind == "weights" else {"rope_theta": 7.0})
        )
    prefill, decode = lab.engine("p"), lab.engine("d", policy="fail", **changes)
    params = lab.hand_off(prefill, PROMPT)
    expect_computed_here(lab, decode, PROMPT, params)
    assert decode.outcomes == {"peer_refused": 1}
    prefill.step()
    assert prefill.outcomes["hello_refused"] == 1
    text = log.text.replace("'", "").replace('"', "")
    assert "decode engine d is refused: " in text
    assert "r: peer_refused: refused by the peer: " in text
    assert said in text
    # Both say the reason, and the second request does not ask again.
    other = prompt_of(90, seed=1)
    decode.add("other", other, lab.hand_off(prefill, other, "other"), max_tokens=1)
    decode.step()
    assert decode.results["other"].finish_reason == "length"
    assert num_hellos(decode) == 1


def test_the_same_weights_in_another_folder_fit(lab, tmp_path, model_folder):
    prefill, decode = lab.engine("p"), lab.engine("d", model=write_model(tmp_path / "elsewhere"))
    lab.decode(decode, PROMPT, lab.hand_off(prefill, PROMPT))
    assert decode.outcomes == {"receive_verified": 1}


def test_pools_of_different_sizes_fit(lab):
    prefill, decode = lab.engine("p", num_blocks=300), lab.engine("d", num_blocks=900)
    for turn in range(4):
        prompt = prompt_of(300, seed=turn)
        params = lab.hand_off(prefill, prompt, f"p{turn}")
        assert lab.decode(decode, prompt, params, f"r{turn}").tokens == continuation(prompt, 4)
        lab.settle()
    assert decode.outcomes == {"receive_verified": 4}


def test_two_prefill_engines_serve_one_decode_engine(lab):
    first, second, decode = lab.engine("p1"), lab.engine("p2"), lab.engine("d")
    for turn in range(4):
        prompt = prompt_of(80 + turn, seed=turn)
        prefill = (first, second)[turn % 2]
        decode.add(f"r{turn}", prompt, lab.hand_off(prefill, prompt, f"p{turn}"))
    lab.finish(decode, *(f"r{turn}" for turn in range(4)))
    assert decode.outcomes == {"receive_verified": 4}


def test_two_engines_of_both_roles_serve_each_other(lab):
    engines = [lab.engine("a"), lab.engine("b")]
    for turn in range(4):
        here, there = engines[turn % 2], engines[1 - turn % 2]
        prompt = prompt_of(80 + turn, seed=turn)
        params = lab.hand_off(there, prompt, f"p{turn}")
        assert lab.decode(here, prompt, params, f"r{turn}").tokens == continuation(prompt, 4)
    assert [engine.outcomes["receive_verified"] for engine in engines] == [2, 2]
