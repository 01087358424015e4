"""Thousands of requests with hostile ``kv_transfer_params`` through vLLM's own scheduler: all of them get an answer."""

import json
from random import Random

import pytest

from tests.faults.fuzz_inputs import Params
from tests.faults.fuzzing import watched_log

pytestmark = pytest.mark.vllm

NUM_INPUTS = 3000
BATCH = 12
"""Requests that are in the engine at a time."""


@pytest.fixture
def lab(tmp_path):
    # Importing vLLM takes a quarter of a minute, also where this module is only collected.
    from tests.adapter.geometry import SINGLE, Settings, write_model
    from tests.adapter.harness import Lab

    extra = {"handshake_seconds": 0.05, "backoff_seconds": 0.05, "rejection_seconds": 0.05}
    made = Lab(Settings(model=write_model(tmp_path / "model"), layers=SINGLE, extra=extra, max_requests=BATCH))
    yield made
    made.close()


def test_every_request_is_answered_and_right(lab):
    from tests.adapter.fake_model import continuation, prompt_of

    random, prompt = Random(1), prompt_of(20)
    prefill, decode = lab.engine("p"), lab.engine("d")
    lab.introduce(prefill, decode)
    # Another address of the loopback is allowed, and nobody listens there.
    inputs = Params(random, ("127.0.0.2", "10.1.2.3", "localhost"))
    num_answers = {"loaded or computed": 0, "handed off": 0, "aborted": 0}
    with watched_log(lambda: b"no such secret") as log:
        for first in range(0, NUM_INPUTS, BATCH):
            good = lab.hand_off(prefill, prompt, f"good {first}")
            ids = [f"r{first + number}" for number in range(BATCH)]
            for request_id in ids:
                decode.add(request_id, prompt, inputs.take(good, (b"forger" * 6,)), max_tokens=2)
            aborted = random.sample(ids, 2)
            for request_id in aborted:
                decode.abort(request_id)
            lab.finish(decode, *(request_id for request_id in ids if request_id not in aborted))
            for request_id in ids:
                num_answers[judge(decode.results.pop(request_id), request_id in aborted, prompt, continuation)] += 1
            for engine in (prefill, decode):
                engine.end_leases()
    assert min(num_answers.values()) > 0, num_answers
    assert log.num_lines > 0
    expect_a_transfer(lab, prefill, decode, prompt_of(30), continuation)


def judge(result, is_aborted, prompt, continuation):
    """How a request was answered; an answer is the model's own, or there is none because the client had gone."""
    if result.params is not None:
        assert result.tokens == continuation(prompt[:-1], 1)
        assert json.dumps(result.params)
        return "handed off"
    if is_aborted and result.finish_reason is None:
        return "aborted"
    assert result.tokens == continuation(prompt, 2)
    return "loaded or computed"


def expect_a_transfer(lab, prefill, decode, prompt, continuation):
    """An honest request is still loaded, not computed."""
    lab.settle()
    decode.outcomes.clear()
    result = lab.decode(decode, prompt, lab.hand_off(prefill, prompt, "last"), "last", max_tokens=3)
    assert result.tokens == continuation(prompt, 3)
    lab.settle()
    assert decode.outcomes == {"receive_verified": 1}
