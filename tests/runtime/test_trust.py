"""Who gets a descriptor, over real sockets and from real key files: listed engines, and nobody else."""

import logging
import resource
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from pd_transfer.config import PdConfig
from pd_transfer.core.messages import Hello, Release, Renew, Welcome, decode, encode
from pd_transfer.core.outcomes import Level, Outcome
from pd_transfer.core.params import Address, LeaseId
from pd_transfer.errors import ConfigError, SideChannelError
from pd_transfer.sidechannel.base import ReplyReceived
from tests.contracts.sidechannel_beds import receive
from tests.runtime.builders import engine, eventually, hybrid_layout
from tests.runtime.engine_bed import LEASED, NUM_TOKENS, Engine, make_decode_side, make_prefill_side

pytest.importorskip("zmq")

from pd_transfer.cli.main import main
from pd_transfer.sidechannel.curve import new_client_keys, read_keys, write_keys
from pd_transfer.sidechannel.dealers import num_places
from pd_transfer.vllm.parts import real_parts

LOCAL = "127.0.0.1"
LAYOUT = hybrid_layout(16)
HELLO = encode(Hello(engine(LAYOUT, "decode", "boot-d")))
METADATA = b"metadata"  # what a rank's NIXL descriptor carries in this bed


class Deployment:
    """Engines with the key files of one folder; everything is closed at the end."""

    def __init__(self, folder):
        self.folder = folder
        self._open = ExitStack()

    def endpoint(self, key_file="", serves=False):
        config = PdConfig(key_file=str(self.folder / key_file) if key_file else "")
        endpoint = real_parts(config).open_side_channel(Address(LOCAL, 0) if serves else None)
        self._open.callback(endpoint.close)
        return endpoint

    def prefill(self, key_file="prefill.key"):
        endpoint = self.endpoint(key_file, serves=True)
        address = Address(LOCAL, endpoint.bound_port)
        return self._running(make_prefill_side(engine(LAYOUT), address), None, endpoint), address

    def decode(self, key_file="decode.key"):
        return self._running(None, make_decode_side(engine(LAYOUT, "decode", "boot-d")), self.endpoint(key_file))

    def close(self):
        self._open.close()

    def _running(self, prefill, decode_side, endpoint):
        running = Engine(prefill, decode_side, endpoint, time.monotonic)
        self._open.callback(running.runtime.close)
        return running


@pytest.fixture
def deployment(tmp_path, capsys):
    assert main(["keys", "new", str(tmp_path / "keys")]) == 0
    assert main(["keys", "new", str(tmp_path / "others")]) == 0
    unlisted = new_client_keys(read_keys(tmp_path / "keys" / "prefill.key"))
    write_keys(tmp_path / "keys" / "unlisted.key", unlisted)
    opened = Deployment(tmp_path / "keys")
    yield opened
    opened.close()


STRANGERS = {"no keys": "", "another deployment's": "../others/decode.key", "not listed": "unlisted.key"}


def refused(prefill):
    prefill.collect()
    return prefill.outcomes[Outcome.HANDSHAKE_REFUSED]


def held_lease(prefill):
    with prefill.runtime.prefill() as (half, now):
        return half.leases.open(LeaseId("lease"), LEASED, now).lease_id


def test_a_listed_engine_gets_a_descriptor_and_reads(deployment):
    (prefill, address), decoder = deployment.prefill(), deployment.decode()
    decoder.arrive("a", prefill.hand_off())
    assert decoder.found("a") == NUM_TOKENS
    (connect,) = decoder.take_orders().connects
    assert connect.welcome.ranks[0].memory.agent_metadata == METADATA
    assert refused(prefill) == 0
    assert prefill.outcomes[Outcome.HELLO_WELCOMED] == 1
    assert address.host == LOCAL


@pytest.mark.parametrize("key_file", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_gets_no_descriptor_and_touches_no_lease(deployment, key_file):
    prefill, address = deployment.prefill()
    lease_id = held_lease(prefill)
    before = prefill.levels(), prefill.lease_deadline()
    stranger = deployment.endpoint(key_file)
    for number, message in enumerate((HELLO, encode(Renew((lease_id,))), encode(Release((lease_id,))))):
        stranger.send_request(address, message)
        eventually("the refusal", lambda refusals=number + 1: refused(prefill) >= refusals)
        assert stranger.poll(0.05) == []
        stranger.disconnect(address)
    assert (prefill.levels(), prefill.lease_deadline()) == before
    assert prefill.levels() == {Level.LEASES: 1, Level.LEASED_BLOCKS: len(LEASED)}
    assert prefill.outcomes[Outcome.HELLO_WELCOMED] == 0
    decoder = deployment.decode()
    decoder.arrive("a", prefill.hand_off())
    assert decoder.found("a") == NUM_TOKENS, "the listed engine is as well off as before"


def test_the_same_messages_from_a_listed_engine_do_it(deployment):
    """The control of the test above."""
    prefill, address = deployment.prefill()
    lease_id = held_lease(prefill)
    listed = deployment.endpoint("decode.key")
    listed.send_request(address, HELLO)
    listed.send_request(address, encode(Release((lease_id,))))
    welcome, _ = receive(listed, 2)
    assert isinstance(welcome, ReplyReceived)
    assert isinstance(decode(welcome.payload), Welcome)
    assert METADATA in welcome.payload
    eventually("the release", lambda: prefill.levels() == {Level.LEASES: 1})


@pytest.mark.parametrize(("key_file", "is_open"), [("prefill.key", False), ("", True)], ids=["keys", "no keys"])
def test_what_a_plain_zeromq_client_can_read_from_the_wire(deployment, key_file, is_open):
    """Every byte that the port says; without keys, the control, a Welcome is among them."""
    prefill, address = deployment.prefill(key_file)
    greeting = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".ljust(64, b"\0")
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    hello = b"\x02" + len(HELLO).to_bytes(8, "big") + HELLO
    said = b""
    with socket.create_connection(address, 10.0) as plain, suppress(ConnectionError):
        for sent, awaited in ((greeting + ready, b"READY"), (hello, METADATA)):
            plain.sendall(sent)
            while awaited not in said and (part := plain.recv(65536)):
                said += part
    assert (METADATA in said) == is_open
    assert (len(said) > 64) == is_open, "a greeting is all that anybody gets"
    eventually("the count", lambda: refused(prefill) == (0 if is_open else 1))


def test_an_engine_whose_keys_do_not_fit_computes_the_prompt_itself(deployment, caplog):
    (prefill, _), decoder = deployment.prefill(), deployment.decode("unlisted.key")
    decoder.arrive("a", prefill.hand_off())
    eventually("a line about it", lambda: refused(prefill) and "is not listed" in caplog.text)
    assert decoder.ask("a") is None, "until its handshake times out, like with a peer that is down"


def test_no_secret_is_shown_by_a_whole_life(deployment, caplog):
    with caplog.at_level(logging.DEBUG):
        (prefill, _), decoder = deployment.prefill(), deployment.decode()
        decoder.arrive("a", prefill.hand_off())
        assert decoder.found("a") == NUM_TOKENS
        deployment.decode("unlisted.key").arrive("b", prefill.hand_off())
        eventually("a line about it", lambda: refused(prefill) and "is not listed" in caplog.text)
        for key_file in STRANGERS.values():
            deployment.decode(key_file).arrive("b", prefill.hand_off())
        eventually("the refusals", lambda: refused(prefill) > len(STRANGERS))
        deployment.close()
    unlisted = read_keys(deployment.folder / "unlisted.key")
    assert unlisted.client_public in caplog.text, "the control: the log has what is logged"
    for key_file in ("prefill.key", "decode.key", "unlisted.key", "../others/decode.key"):
        keys = read_keys(deployment.folder / key_file)
        for secret in filter(None, (keys.client_secret, keys.server_secret)):
            assert secret not in caplog.text


def is_hung_up(connection, seconds):
    """Whether the other end closes a connection within some seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(64):
            pass
    except TimeoutError:
        return False
    return True


@pytest.fixture
def usual_file_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("is_configured", [True, False])
def test_addresses_that_clients_name_do_not_push_out_a_configured_peer(is_configured, usual_file_limit):
    """Not even one that has not answered yet; any other, the control, gives up its place."""
    with ExitStack() as stack:
        named = stack.enter_context(socket.create_server((LOCAL, 0)))
        last = stack.enter_context(socket.create_server((LOCAL, 0)))
        address = Address(*named.getsockname())
        config = PdConfig(peers=(f"{LOCAL}:{address.port}",) if is_configured else ())
        asker = real_parts(config).open_side_channel(None)
        stack.callback(asker.close)
        asker.send_request(address, HELLO)
        peer = stack.enter_context(named.accept()[0])
        for number in range(num_places(usual_file_limit)):
            asker.send_request(Address(f"127.0.1.{number + 1}", address.port), HELLO)
        asker.send_request(Address(*last.getsockname()), HELLO)
        stack.enter_context(last.accept()[0])
        assert is_hung_up(peer, 0.2 if is_configured else 30.0) != is_configured


# ------------------------------------------------------------------------------------------------------------- start-up


def opening(key_file, serves=True):
    return real_parts(PdConfig(key_file=str(key_file))).open_side_channel(Address(LOCAL, 0) if serves else None)


def test_a_key_file_that_others_may_read_stops_the_start(deployment):
    path = deployment.folder / "prefill.key"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        opening(path)


def test_a_key_file_that_is_missing_or_junk_stops_the_start(deployment):
    with pytest.raises(ConfigError, match="cannot be read"):
        opening(deployment.folder / "nothing.key")
    path = deployment.folder / "decode.key"
    path.write_text("junk")
    with pytest.raises(ConfigError, match="malformed"):
        opening(path)


def test_a_decode_engines_file_does_not_serve(deployment):
    with pytest.raises(SideChannelError, match=r"prefill\.key"):
        opening(deployment.folder / "decode.key")
    opening(deployment.folder / "decode.key", serves=False).close()
