"""Names and addresses, the ``kv_transfer_params`` that travel through routers, and the sealed grant in them.

Clients and routers carry both as opaque data, so everything that is read here may be forged, stale, rewritten or
junk. Parsing never raises: it answers with a frozen type or with a reason.
"""

import base64
import binascii
import hashlib
import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NewType

import msgspec

from pd_transfer.core.layout import RUN_BYTES, BlockRuns

EngineId = NewType("EngineId", str)
RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
PeerKey = NewType("PeerKey", str)
"""Our own name of one handshake with a remote engine: after a restart or a lost connection there is another."""
Transfer = NewType("Transfer", int)
"""Name of one submitted read; never used twice in the life of a pull transport."""

_TEXT_FIELDS = {"remote_engine_id": 1024, "remote_host": 255, "grant": 1 << 20}
"""The strings of params that are read, and the most characters that each may have."""
_GRANT_VERSION = 2
_SEAL_BYTES = 16


class Address(NamedTuple):
    """Where an engine's side channel listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class OfferedKv(NamedTuple):
    """How much KV a grant offers: the tokens it holds, and the bytes in all layers and ranks that a decode engine reads
    which has none of it."""

    num_tokens: int
    num_bytes: int


class RemoteDecode(msgspec.Struct, frozen=True):
    """The request's KV will be pulled by a decode engine: keep it under a lease and answer with a grant."""


class RemotePrefill(msgspec.Struct, frozen=True):
    """A prefill engine holds this request's KV: pull it from ``address`` with the (still sealed) grant."""

    engine_id: EngineId
    address: Address
    grant: str


class InvalidParams(msgspec.Struct, frozen=True):
    """The params ask for a transfer but cannot be used; ``reason`` says why."""

    reason: str


ParsedParams = RemoteDecode | RemotePrefill | InvalidParams | None


def parse_params(raw: object) -> ParsedParams:
    """Read a request's ``kv_transfer_params``; None when they ask for no transfer.

    Unknown keys are ignored, and integral floats are taken for ints, because routers written in Go rewrite numbers.
    """
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        return InvalidParams(f"kv_transfer_params is a {type(raw).__name__}, not an object")
    if raw.get("do_remote_decode") is True:
        return RemoteDecode()
    if raw.get("do_remote_prefill") is not True:
        return None
    return _parse_remote_prefill(raw)


def _parse_remote_prefill(raw: Mapping[Any, Any]) -> RemotePrefill | InvalidParams:
    texts: dict[str, str] = {}
    for key, max_chars in _TEXT_FIELDS.items():
        value = raw.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= max_chars:
            return InvalidParams(f"{key} is missing, not a string, or longer than {max_chars} characters")
        texts[key] = value
    port = _integer(raw.get("remote_port"))
    if port is None or not 0 < port < 65536:
        return InvalidParams("remote_port is missing or not a port number")
    return RemotePrefill(EngineId(texts["remote_engine_id"]), Address(texts["remote_host"], port), texts["grant"])


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def hand_off_params(
    engine_id: EngineId, request_id: RequestId, address: Address, num_ranks: int, size: OfferedKv, grant: str
) -> dict[str, Any]:
    """What prefill's answer carries to the router.

    The names are the built-in connector's, because routers and vLLM read them; ``remote_block_ids`` is a placeholder
    that only has to be non-empty.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address.host,
        "remote_port": address.port,
        "remote_block_ids": [[1]],
        "tp_size": num_ranks,
        "remote_num_tokens": size.num_tokens,
        "remote_num_bytes": size.num_bytes,
        "transfer_mode": "pull",
        "grant": grant,
    }


_ShortText = Annotated[str, msgspec.Meta(max_length=64)]
_ShortLeaseId = Annotated[LeaseId, msgspec.Meta(max_length=64)]
"""What a client claims is remembered for a while, so it has to be short."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """What a decode engine may read, for which prompt, and how it proves that the read was in time.

    ``groups[i]`` lists the blocks of the i-th group of the layout named by ``layout_digest`` (the Welcome carries it).
    ``slot`` and ``generation`` name the lease word and the value it has while the lease is held. ``engine_boot`` names
    one life of the prefill engine.
    """

    engine_boot: _ShortText
    lease_id: _ShortLeaseId
    slot: int
    generation: int
    num_tokens: int
    prompt_digest: bytes
    layout_digest: str
    groups: tuple[BlockRuns, ...]

    def __post_init__(self) -> None:
        if any(len(runs) % RUN_BYTES for runs in self.groups):
            raise ValueError("runs that are cut off")


class SealedGrant(NamedTuple):
    """A grant as it arrived. ``claimed`` is what it says; only ``is_genuine`` makes that true."""

    payload: bytes
    seal: bytes
    claimed: Grant

    def is_genuine(self, key: bytes) -> bool:
        """Whether the holder of ``key`` sealed exactly this grant."""
        return hmac.compare_digest(_seal(self.payload, key), self.seal)


def seal_grant(grant: Grant, key: bytes) -> str:
    """URL-safe text: version, HMAC-SHA256 cut to 16 bytes, msgpack."""
    payload = msgspec.msgpack.encode(grant)
    return base64.urlsafe_b64encode(bytes([_GRANT_VERSION]) + _seal(payload, key) + payload).decode("ascii")


def parse_grant(text: str) -> SealedGrant | str:
    """The grant in a text, its seal not yet checked; a reason when it is not one."""
    try:
        raw = base64.urlsafe_b64decode(text.encode("ascii"))
    except (ValueError, binascii.Error):
        return "the grant is not base64"
    if not raw or raw[0] != _GRANT_VERSION:
        return f"the grant has version {raw[0] if raw else 'none'}, this engine reads version {_GRANT_VERSION}"
    seal, payload = raw[1 : 1 + _SEAL_BYTES], raw[1 + _SEAL_BYTES :]
    try:
        return SealedGrant(payload, seal, msgspec.msgpack.decode(payload, type=Grant))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "the grant's content is malformed"


def _seal(payload: bytes, key: bytes) -> bytes:
    return hmac.digest(key, payload, "sha256")[:_SEAL_BYTES]


class MultimodalSpan(NamedTuple):
    """One multimodal input of a prompt: its content hash and the positions that it covers."""

    content_hash: str
    offset: int
    length: int


def prompt_digest(
    token_ids: Sequence[int], lora_name: str | None, cache_salt: str | None, multimodal: Sequence[MultimodalSpan]
) -> bytes:
    """32 bytes that name everything that KV depends on besides the model: equal digests, equal KV."""
    # JSON ends where it ends, so that no text can pass for token ids; and it takes text that is not valid Unicode.
    digest = hashlib.sha256(json.dumps((lora_name, cache_salt, tuple(multimodal))).encode())
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return digest.digest()
