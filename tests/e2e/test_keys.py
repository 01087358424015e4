"""Engines with key files beyond the loopback, without ``insecure``: exact answers, strangers counted, secrets kept."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pd_transfer.cli.main import main
from pd_transfer.config import PdConfig, routable_address
from pd_transfer.core.messages import Hello, encode
from pd_transfer.core.outcomes import Outcome
from pd_transfer.core.params import Address
from pd_transfer.sidechannel.curve import read_keys
from pd_transfer.vllm.parts import real_parts
from tests.core.examples import DECODE_ENGINE
from tests.e2e.pair import TINY_HYBRID, TOKENS_VERIFIED, Pair, gain, outcome, running_pair, same_settings
from tests.stack.exactness import hand_off, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HOST = routable_address() or "127.0.0.1"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment") / "keys"
    assert main(["keys", "new", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def pair(keys: Path) -> Iterator[Pair]:
    arguments = ("--block-size", "32")
    decode = {"key_file": str(keys / "decode.key"), "allowed_peers": [HOST]}
    prefill, _ = same_settings(TINY_HYBRID, *arguments)
    _, decoding = same_settings(TINY_HYBRID, *arguments, extra=decode)
    serving = {"key_file": str(keys / "prefill.key"), "advertise_host": HOST}
    with running_pair("keys", replace(prefill, extra=serving), decoding) as pair:
        yield pair


def test_an_answer_over_keyed_sockets_is_the_single_engines(pair: Pair) -> None:
    prompt = random_prompt(300)
    assert hand_off(pair.prefill.url, prompt, cache_salt="where")["remote_host"] == HOST

    def ask() -> None:
        assert pair.difference_at(prompt, "keys", num_tokens=4) == 0.0

    assert gain(pair.decode, ask, {TOKENS_VERIFIED: 299})[TOKENS_VERIFIED] == 299


@pytest.mark.parametrize(
    "change", [{"remote_host": "127.0.0.1"}, {"remote_host": "localhost", "remote_port": 22}], ids=str
)
def test_decode_asks_nobody_whom_it_was_not_told_of(pair: Pair, change: dict[str, object]) -> None:
    prompt, salt = random_prompt(200, seed=3), f"elsewhere {change}"

    def ask() -> None:
        params = hand_off(pair.prefill.url, prompt, cache_salt=salt) | change
        reply = pair.decode.complete(prompt, cache_salt=salt, kv_transfer_params=params, max_tokens=4)
        assert reply["choices"][0]["text"] == pair.single(prompt, salt, max_tokens=4)["choices"][0]["text"]

    refused = outcome(Outcome.PEER_NOT_ALLOWED)
    gained = gain(pair.decode, ask, {refused: 1})
    assert gained[refused] == 1
    assert gained.get(TOKENS_VERIFIED, 0) == 0


def test_a_stranger_is_counted_and_answered_by_nobody(pair: Pair) -> None:
    params = hand_off(pair.prefill.url, random_prompt(40), cache_salt="stranger")
    address = Address(params["remote_host"], params["remote_port"])
    stranger = real_parts(PdConfig()).open_side_channel(None)
    with closing(stranger):

        def ask() -> None:
            stranger.send_request(address, encode(Hello(DECODE_ENGINE)))
            assert stranger.poll(2.0) == []
            pair.prefill.step()

        refused = outcome(Outcome.HANDSHAKE_REFUSED)
        assert gain(pair.prefill, ask, {refused: 1})[refused] >= 1


def test_no_log_has_a_secret(pair: Pair, keys: Path) -> None:
    logs = "".join(path.read_text(errors="replace") for path in pair.logs.glob("*.log"))
    assert str(keys / "prefill.key") in logs, "the control: vLLM logs the settings"
    for path in keys.glob("*.key"):
        known = read_keys(path)
        for secret in filter(None, (known.client_secret, known.server_secret)):
            assert secret not in logs
