"""List prompts of completions: split into single-prompt requests, and their answers merged back into one.

A hand-off belongs to one prompt, so every prompt of a list travels alone. The merged answer is the one that a single
engine would give: choice ``j`` of prompt ``i`` has index ``i * n + j``, and the usage covers all prompts.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.errors import EngineFailedError, FailureKind, ProxyError
from proxy.fields import Body
from proxy.relay import int_field

_LIST_OF_PROMPTS = re.compile(rb'\s*\[\s*["\[]')
_END_MARK = b"[DONE]"
_FIELD_PREFIX = b"data:"

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode

Usage = dict[str, Any]


def split_prompts(body: Body, max_prompts: int) -> list[Body]:
    """One body for every prompt, in order; just the body if it holds one prompt.

    A list of token ids is one prompt. A list of one prompt is unwrapped. What is neither is left for the engine to
    refuse. More than ``max_prompts`` prompts are refused here with a 400 ``ProxyError``.
    """
    prompt = body.get("prompt")
    if prompt is None or not _LIST_OF_PROMPTS.match(memoryview(prompt)):
        return [body]
    prompts = _decode_list(prompt)
    if len(prompts) > max_prompts:
        raise ProxyError(400, f"prompt has {len(prompts)} entries, more than the {max_prompts} allowed here", "prompt")
    return [{**body, "prompt": single} for single in prompts]


def choices_per_prompt(body: Body) -> int:
    """How many choices an engine will number for each prompt."""
    return max(1, int_field(body, "n", 1))


def merge_replies(replies: Sequence[bytes], per_prompt: int) -> bytes:
    """One completion object from the completion objects of the prompts, in order.

    Raises ``EngineFailedError`` (BROKEN) if one of them is no completion.
    """
    try:
        parsed = [_decode_object(reply) for reply in replies]
        choices = [
            {**choice, "index": _index(choice, number, per_prompt)}
            for number, reply in enumerate(parsed)
            for choice in _decode_objects(reply["choices"])
        ]
        merged = parsed[0] | {"choices": _raw(choices)}
        usages = [_usage(reply["usage"]) for reply in parsed if _is_set(reply.get("usage"))]
    except (msgspec.DecodeError, KeyError, RecursionError) as error:
        raise _no_completion(error) from error
    if usages:
        merged["usage"] = _raw(_total(usages))
    if "metrics" in merged:
        # They time one request; vLLM leaves them out for several prompts, too.
        merged["metrics"] = msgspec.Raw(b"null")
    return msgspec.json.encode(merged)


class EventSplitter:
    """Cuts a byte stream into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that ``chunk`` completes, without their blank lines."""
        *events, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        return events


class EngineErrorEvent(Exception):  # noqa: N818 - it is an event, and errors are what it reports
    """An engine reported an error inside its stream. ``event`` is what it said, ready to be sent on."""

    def __init__(self, event: bytes) -> None:
        super().__init__("an engine reported an error in its stream")
        self.event = event


class StreamMerger:
    """Turns the event streams of the prompts of one request into a single stream.

    Events are passed on in the order in which they come, as an engine does for a list of prompts. Usage summaries are
    held back and added up; the end mark is sent once, by ``finish``.
    """

    def __init__(self, num_prompts: int, per_prompt: int) -> None:
        self._per_prompt = per_prompt
        self._unfinished = set(range(num_prompts))
        self._usages: list[Usage] = []
        self._summary: Body = {}

    def merge(self, number: int, events: Sequence[bytes]) -> bytes:
        """The bytes to send on for ``events`` of prompt ``number``.

        Raises ``EngineErrorEvent`` if the engine reports an error, and ``EngineFailedError`` for what is no completion.
        """
        return b"".join(self._merge_event(number, event) for event in events)

    def ended(self, number: int) -> bool:
        """Whether prompt ``number`` has sent its end mark."""
        return number not in self._unfinished

    def finish(self) -> bytes:
        """The end of the merged stream: the summed usage if the client asked for it, and the end mark."""
        summary = b""
        if self._usages:
            self._summary["usage"] = _raw(_total(self._usages))
            self._summary.pop("metrics", None)
            summary = _event(msgspec.json.encode(self._summary))
        return summary + _event(_END_MARK)

    def _merge_event(self, number: int, event: bytes) -> bytes:
        if not event.startswith(_FIELD_PREFIX):
            # A comment, such as a keep-alive.
            return event + b"\n\n"
        payload = event[len(_FIELD_PREFIX) :].strip()
        if payload == _END_MARK:
            self._unfinished.discard(number)
            return b""
        try:
            return self._merge_chunk(number, payload)
        except (msgspec.DecodeError, KeyError, RecursionError) as error:
            raise _no_completion(error) from error

    def _merge_chunk(self, number: int, payload: bytes) -> bytes:
        chunk = _decode_object(payload)
        if "error" in chunk:
            raise EngineErrorEvent(_event(payload))
        choices = _decode_objects(chunk["choices"])
        if not choices and _is_set(chunk.get("usage")):
            self._usages.append(_usage(chunk["usage"]))
            self._summary = self._summary or chunk
            return b""
        for choice in choices:
            choice["index"] = _index(choice, number, self._per_prompt)
        return _event(msgspec.json.encode(chunk | {"choices": _raw(choices)}))


def _index(choice: Body, number: int, per_prompt: int) -> msgspec.Raw:
    return _raw(number * per_prompt + msgspec.json.decode(choice["index"], type=int))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _is_set(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value) != b"null"


def _usage(raw: msgspec.Raw) -> Usage:
    return msgspec.json.decode(raw, type=Usage)


def _total(usages: Sequence[Usage]) -> Usage:
    """The sum, field by field, of usages with nested details; what only some report is summed over those."""
    total: Usage = {}
    for usage in usages:
        for name, value in usage.items():
            known = total.get(name)
            if known is None:
                total[name] = value
            elif isinstance(value, dict) and isinstance(known, dict):
                total[name] = _total([known, value])
            elif isinstance(value, int | float) and isinstance(known, int | float):
                total[name] = known + value
    return total


def _no_completion(error: Exception) -> EngineFailedError:
    return EngineFailedError(FailureKind.BROKEN, f"An engine's answer is no completion: {error}")
