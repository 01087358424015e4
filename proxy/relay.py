"""From a client's request to its two legs, as pure functions over bodies.

What becomes of each field is said in ``fields``. A body is a JSON object of which only the top level is parsed:
everything nested stays the bytes that the client sent, so tool schemas, token ids and images are neither changed nor
paid for.

    client body -> prefill body: one token, no stream, and a request for a hand-off
    prefill reply -> the hand-off params, opaque
    client body + params -> decode body
"""

from typing import NamedTuple

import msgspec

from proxy.errors import ProxyError
from proxy.fields import STRIPPED, TRANSFER_PARAMS, Body, Rules

HANDOFF_REQUEST = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""Asks a prefill engine for a hand-off. Every router sends these six keys, so connectors rely on them."""


# Where else vLLM takes transfer params from: these objects end up in the request's extra arguments.
_NESTED_EXTRA_ARGUMENTS = (("vllm_xargs",), ("sampling_params", "extra_args"))


_decode_body = msgspec.json.Decoder(Body).decode


def parse_body(data: bytes) -> Body:
    """The top level of a client's JSON object. Raises a 400 ``ProxyError`` for anything else.

    Nested values are checked to be JSON but not decoded. Of repeated keys the last counts, as in Python's parser, so
    nothing can hide behind a second key of the same name.
    """
    try:
        return _decode_body(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProxyError(400, f"The request body is not a JSON object: {error}") from error


def strip_transfer_params(body: Body) -> Body:
    """The body without transfer params, wherever vLLM would look for them; the same object if there were none."""
    stripped = body
    if not STRIPPED.keys().isdisjoint(body):
        stripped = {name: value for name, value in body.items() if name not in STRIPPED}
    for path in _NESTED_EXTRA_ARGUMENTS:
        if path[0] in stripped:
            stripped = _strip_at(stripped, path)
    return stripped


def _strip_at(body: Body, path: tuple[str, ...]) -> Body:
    """The body without the stripped fields of the object at ``path``; what is no object is the engine's to refuse."""
    if not path:
        kept = {name: value for name, value in body.items() if name not in STRIPPED}
        return body if len(kept) == len(body) else kept
    try:
        inner = _decode_body(body[path[0]])
    except (KeyError, msgspec.DecodeError):
        return body
    stripped = _strip_at(inner, path[1:])
    return body if stripped is inner else {**body, path[0]: msgspec.Raw(msgspec.json.encode(stripped))}


def prefill_body(body: Body, rules: Rules) -> bytes:
    """The request that makes prefill compute the prompt and keep its KV for a decode engine."""
    return msgspec.json.encode({**rules.prefill_leg(body), TRANSFER_PARAMS: HANDOFF_REQUEST})


class Prefilled(NamedTuple):
    """What prefill's reply says."""

    params: msgspec.Raw | None
    """To be handed to decode untouched; None if prefill offers no hand-off."""
    request_id: str
    """Prefill's own id of the request, for logs; may be empty."""
    prompt_tokens: int
    """As prefill counted them; 0 if it does not say."""
    handoff_tokens: int
    """Of these, the ones whose KV it offers; 0 if it does not say."""
    handoff_bytes: int
    """The KV that it offers; 0 if it does not say."""


def read_prefill_reply(reply: bytes) -> Prefilled:
    """Read what prefill answered. Raises ``ValueError`` if that is no JSON object."""
    try:
        top = _decode_body(reply)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    usage = object_field(top, "usage")
    tokens = _count_field(usage, "prompt_tokens") or _count_field(usage, "input_tokens")
    # A null, an empty object or anything that is no object offers nothing.
    offered = object_field(top, TRANSFER_PARAMS)
    params = top[TRANSFER_PARAMS] if offered else None
    handoff = _count_field(offered, "remote_num_tokens"), _count_field(offered, "remote_num_bytes")
    return Prefilled(params, text_field(top, "id"), tokens, *handoff)


def decode_body(body: Body, params: msgspec.Raw | None) -> bytes:
    """The request that decode answers: the client's own, with the params of its prefill if there are any."""
    return msgspec.json.encode(body if params is None else {**body, TRANSFER_PARAMS: params})


def release_body(params: msgspec.Raw) -> bytes:
    """A request that makes a decode engine let go of ``params`` without computing anything.

    It names a model that no engine serves. vLLM refuses it, and for every request that it refuses with such params it
    tells its connector, which releases the KV on the prefill side. The refusal (404) is the acknowledgement.
    """
    return msgspec.json.encode(
        {"model": "pd-proxy/released", "prompt": "released", "max_tokens": 1, TRANSFER_PARAMS: params}
    )


def object_field(body: Body, name: str) -> Body:
    """An object of the body; empty if it is absent or no object."""
    # Most fields are absent, and an exception costs more than the look.
    if name not in body:
        return {}
    try:
        return _decode_body(body[name])
    except msgspec.DecodeError:
        return {}


def text_field(body: Body, name: str) -> str:
    """A text of the body; empty if it is absent or no text."""
    if name not in body:
        return ""
    try:
        return msgspec.json.decode(body[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def int_field(body: Body, name: str, default: int) -> int:
    """An integer of the body as vLLM would read it; ``default`` if it is absent, null or no integer."""
    if name not in body:
        return default
    try:
        return msgspec.json.decode(body[name], type=int, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return default


_LARGEST_COUNT = 1 << 53


def _count_field(body: Body, name: str) -> int:
    """A count that an engine tells; 0 if it tells none. Bounded, because it is added up and written down."""
    return max(0, min(int_field(body, name, 0), _LARGEST_COUNT))


_BYTES_PER_TOKEN = 4
_OUTPUT_TOKENS_GUESS = 256
_MOST_OUTPUT_TOKENS = 1 << 20
_MOST_CHOICES = 1024

PROMPT_FIELDS = ("system", "instructions", "prompt", "messages", "input", "token_ids")
"""Where the endpoints have their prompts."""


def estimated_prompt_tokens(body: Body) -> int:
    """About how many tokens the prompt has; good enough to compare loads, and costs no tokenizer."""
    return max(1, sum(_estimated_tokens(memoryview(body[name])) for name in PROMPT_FIELDS if name in body))


def _estimated_tokens(text: memoryview) -> int:
    begin = bytes(text[:64])
    if begin.startswith(b"[") and b'"' not in begin:
        return bytes(text).count(b",") + 1
    return len(text) // _BYTES_PER_TOKEN + 1


def estimated_output_tokens(body: Body) -> int:
    """About how many tokens decode will make: the client's limit, or a guess without one.

    Bounded, because a number without end in one request must not outweigh, or overflow, the loads of all others.
    """
    fields = {**object_field(body, "sampling_params"), **body}
    limit = int_field(fields, "max_tokens", _OUTPUT_TOKENS_GUESS)
    for name in ("max_completion_tokens", "max_output_tokens"):
        limit = int_field(fields, name, limit)
    return max(1, min(limit, _MOST_OUTPUT_TOKENS)) * max(1, min(int_field(fields, "n", 1), _MOST_CHOICES))
