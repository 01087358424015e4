"""What scheduler processes say to each other over the side channel, and its codec.

One byte of protocol version, then a msgpack map tagged with the message's name. ``decode`` never raises: bytes that
are not a message become ``Malformed``.
"""

from typing import Any

import msgspec

from pd_transfer.core.layout import EngineLayout, RemoteMemory, invalid_layout, layout_mismatch
from pd_transfer.core.params import EngineId, LeaseId

PROTOCOL_VERSION = 1
"""History. 1: Hello, Welcome, Refused, Renew, Renewed, Release, Released."""
MAX_LEASES_PER_MESSAGE = 1024
_MAX_LOGGED_CHARS = 500


class ModelIdentity(msgspec.Struct, frozen=True):
    """Which model an engine runs: its architecture and settings, and per rank a digest of its weights."""

    name: str
    config_digest: str
    weights_digests: tuple[str, ...]


class EngineDescription(msgspec.Struct, frozen=True):
    """What both sides of a handshake say of themselves. ``engine_boot`` names one life of the engine."""

    engine_id: EngineId
    engine_boot: str
    model: ModelIdentity
    layout: EngineLayout
    num_ranks: int


class ServedRank(msgspec.Struct, frozen=True):
    """One prefill worker: its memory, and the high half of its lease words."""

    memory: RemoteMemory
    boot_word: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Decode asks to be admitted as a reader."""

    engine: EngineDescription


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Prefill admits a reader: how to read every rank, and the key that seals its grants."""

    engine: EngineDescription
    ranks: tuple[ServedRank, ...]
    grant_key: bytes

    def __repr__(self) -> str:
        """Without the grant key and the memory keys: orders and stories, which carry welcomes, end up in logs."""
        return f"Welcome({self.engine.engine_id!r}, boot {self.engine.engine_boot!r}, {len(self.ranks)} ranks)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What rich's tracebacks show of it; msgspec's own would show every field."""
        engine = self.engine
        return [("engine_id", engine.engine_id), ("boot", engine.engine_boot), ("num_ranks", len(self.ranks))]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request was understood and is refused; ``reason`` names both values that differ."""

    reason: str


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Decode still wants these leases."""

    lease_ids: tuple[LeaseId, ...]


class Renewed(msgspec.Struct, frozen=True, tag=True):
    """Which of the leases named in a Renew are held no more."""

    gone: tuple[LeaseId, ...]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Decode needs these leases no longer."""

    lease_ids: tuple[LeaseId, ...]


class Released(msgspec.Struct, frozen=True, tag=True):
    """The leases named in a Release are over, or were before."""

    lease_ids: tuple[LeaseId, ...]


class Malformed(msgspec.Struct, frozen=True):
    """Bytes that are not a message of this protocol version. Never sent."""

    reason: str


Request = Hello | Renew | Release
Reply = Welcome | Refused | Renewed | Released
Message = Request | Reply

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(message)


def decode(payload: bytes) -> Message | Malformed:
    """The message in some bytes from outside. Never raises."""
    if not payload:
        return Malformed("the message is empty")
    if payload[0] != PROTOCOL_VERSION:
        return Malformed(f"the peer speaks protocol version {payload[0]}, this engine speaks {PROTOCOL_VERSION}")
    try:
        message = _decoder.decode(payload[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Malformed(f"not a message: {error}")
    except RecursionError:
        return Malformed("not a message: nested too deeply")
    if isinstance(message, Renew | Release) and len(message.lease_ids) > MAX_LEASES_PER_MESSAGE:
        return Malformed(f"{len(message.lease_ids)} leases in one message, at most {MAX_LEASES_PER_MESSAGE}")
    return message


def printable(text: str) -> str:
    """A peer's text, fit for a log line: short, and with no line breaks of its own."""
    return repr(text[:_MAX_LOGGED_CHARS])


def one_line(sentence: str) -> str:
    """A sentence of ours that may quote a peer or a client, fit for a log line: short, and nothing but printable."""
    short = sentence[:_MAX_LOGGED_CHARS]
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in short)


def incompatibility(local: EngineDescription, remote: EngineDescription) -> str | None:
    """Why KV cannot move between two engines, naming both values; None when it can."""
    if local.num_ranks != remote.num_ranks:
        return f"tensor parallel size differs: local {local.num_ranks}, peer {remote.num_ranks}"
    if reason := invalid_layout(remote.layout):
        return f"the peer's layout is invalid: {reason}"
    if reason := layout_mismatch(local.layout, remote.layout):
        return reason
    if local.model.config_digest != remote.model.config_digest:
        return (
            f"the model differs: local {local.model.name} ({local.model.config_digest}), "
            f"peer {remote.model.name} ({remote.model.config_digest})"
        )
    if local.model.weights_digests != remote.model.weights_digests:
        return f"the weights differ: local {local.model.weights_digests}, peer {remote.model.weights_digests}"
    return None


def invalid_welcome(local: EngineDescription, welcome: Welcome) -> str | None:
    """Why a Welcome cannot be used by ``local``; None when it can."""
    if reason := incompatibility(local, welcome.engine):
        return reason
    if len(welcome.ranks) != welcome.engine.num_ranks:
        return f"{len(welcome.ranks)} ranks are served, {welcome.engine.num_ranks} are promised"
    region_bytes = welcome.engine.layout.region_bytes
    if any(rank.memory.region.length_bytes < region_bytes for rank in welcome.ranks):
        return f"a served region is shorter than the layout's {region_bytes} bytes"
    return None
