"""What happens to every field of a client's body, endpoint by endpoint. This table is the whole of it.

A field without a rule goes to both legs as it is. Decode always gets what the client sent, except for STRIP.

Room for the next feature: a new field is a line in a table; a new endpoint is a ``Rules`` here and a line in
``endpoints``. A test walks the tables, so a line without its row in the test fails.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

Body = dict[str, msgspec.Raw]

TRANSFER_PARAMS = "kv_transfer_params"


class Treatment(enum.Enum):
    """What happens to one field of the client's body."""

    SET = "prefill gets our value, whether or not the client sent one"
    CAP = "prefill gets our value if the client sent one"
    DROP = "prefill does not get it"
    STRIP = "neither leg gets it from a client"
    WHOLE = "if set, one engine answers the whole request"


class FieldRule(NamedTuple):
    """How one field is treated, and why. ``unset`` lists the values that mean that a WHOLE field is not set."""

    treatment: Treatment
    reason: str
    value: msgspec.Raw = msgspec.Raw(b"null")
    unset: tuple[bytes, ...] = (b"null", b"false")


_decode_object = msgspec.json.Decoder(Body).decode


class Rules:
    """The rules for the fields of one object; ``nested`` has those for objects inside it."""

    def __init__(self, fields: Mapping[str, FieldRule], nested: Mapping[str, "Rules"] = MappingProxyType({})) -> None:
        self.fields = fields
        self.nested = nested
        by_treatment = {treatment: self._names(treatment) for treatment in Treatment}
        self._dropped = by_treatment[Treatment.DROP] | by_treatment[Treatment.STRIP]
        self._set = by_treatment[Treatment.SET]
        self._capped = by_treatment[Treatment.CAP]
        self._whole = by_treatment[Treatment.WHOLE]

    def prefill_leg(self, body: Body) -> Body:
        """The fields that prefill gets. Nested objects that are none are left for the engine to refuse."""
        leg = {name: value for name, value in body.items() if name not in self._dropped}
        for name in (*self._set, *self._capped.intersection(leg)):
            leg[name] = self.fields[name].value
        for name, rules in self.nested.items():
            if (inner := _object_at(body, name)) is not None:
                leg[name] = msgspec.Raw(msgspec.json.encode(rules.prefill_leg(inner)))
        return leg

    def needs_one_engine(self, body: Body) -> bool:
        """Whether prefill and decode cannot share this request, so that one engine must answer all of it."""
        if any(bytes(body[name]) not in self.fields[name].unset for name in self._whole.intersection(body)):
            return True
        inner = ((rules, _object_at(body, name)) for name, rules in self.nested.items())
        return any(rules.needs_one_engine(value) for rules, value in inner if value is not None)

    def _names(self, treatment: Treatment) -> frozenset[str]:
        return frozenset(name for name, rule in self.fields.items() if rule.treatment is treatment)


def _object_at(body: Body, name: str) -> Body | None:
    try:
        return _decode_object(body[name])
    except (KeyError, msgspec.DecodeError):
        return None


_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")

_ONE_TOKEN = "prefill exists for the prompt; one token is the least it can make"  # noqa: S105 - no password
_THROWN_AWAY = "prefill's token is thrown away, so are its logprobs"
_NO_PROMPT_LOGPROBS = "decode never computes the prompt; 0 asks for them too"

STRIPPED: Mapping[str, FieldRule] = {
    TRANSFER_PARAMS: FieldRule(Treatment.STRIP, "a client could name any host, or another client's KV"),
    "ec_transfer_params": FieldRule(Treatment.STRIP, "the same for encoder caches"),
}
"""Holds on every endpoint, also on those that are only forwarded."""

_STREAM: Mapping[str, FieldRule] = {
    **STRIPPED,
    "stream": FieldRule(Treatment.SET, "the params come in a plain JSON reply", _FALSE),
    "stream_options": FieldRule(Treatment.DROP, "refused without stream"),
}

COMPLETIONS = Rules(
    {
        **_STREAM,
        "max_tokens": FieldRule(Treatment.SET, _ONE_TOKEN, _ONE),
        "max_completion_tokens": FieldRule(Treatment.CAP, "wins over max_tokens on chat", _ONE),
        "stream_interval": FieldRule(Treatment.DROP, "only means something with stream"),
        "min_tokens": FieldRule(Treatment.DROP, "refused above max_tokens"),
        "min_completion_tokens": FieldRule(Treatment.DROP, "refused above max_completion_tokens"),
        "n": FieldRule(Treatment.CAP, "one prompt needs one prefill; decode's samples share its KV", _ONE),
        "best_of": FieldRule(Treatment.DROP, "refused above n"),
        "logprobs": FieldRule(Treatment.DROP, _THROWN_AWAY),
        "top_logprobs": FieldRule(Treatment.DROP, "refused without logprobs"),
        "logprob_token_ids": FieldRule(Treatment.DROP, "refused without logprobs"),
        "return_token_ids": FieldRule(Treatment.DROP, "would send the prompt back to us for nothing"),
        "return_prompt_text": FieldRule(Treatment.DROP, "would send the prompt back to us for nothing"),
        "echo": FieldRule(Treatment.WHOLE, "with logprobs it needs the prompt's, which decode never computes"),
        "prompt_logprobs": FieldRule(Treatment.WHOLE, _NO_PROMPT_LOGPROBS, unset=(b"null",)),
        "prompt_embeds": FieldRule(Treatment.WHOLE, "hand-offs name prompts by their token ids"),
        "use_beam_search": FieldRule(Treatment.WHOLE, "beams are many engine requests with prompts of their own"),
    }
)
"""Completions and chat completions."""

RESPONSES = Rules(
    {
        **_STREAM,
        "max_output_tokens": FieldRule(Treatment.SET, _ONE_TOKEN, _ONE),
        "store": FieldRule(Treatment.SET, "only decode's response is one that a client may ask for again", _FALSE),
        "include": FieldRule(Treatment.DROP, "adds to an answer that is thrown away"),
        "top_logprobs": FieldRule(Treatment.DROP, _THROWN_AWAY),
        "enable_response_messages": FieldRule(Treatment.DROP, "would send the prompt back to us for nothing"),
        "previous_response_id": FieldRule(Treatment.WHOLE, "prefill stores no responses"),
        "background": FieldRule(Treatment.WHOLE, "its answer comes before its prompt is computed"),
    }
)

MESSAGES = Rules({**_STREAM, "max_tokens": FieldRule(Treatment.SET, _ONE_TOKEN, _ONE)})

_SAMPLING_PARAMS = Rules(
    {
        "max_tokens": FieldRule(Treatment.SET, _ONE_TOKEN, _ONE),
        "min_tokens": FieldRule(Treatment.DROP, "refused above max_tokens"),
        "n": FieldRule(Treatment.CAP, "one prompt needs one prefill; decode's samples share its KV", _ONE),
        "logprobs": FieldRule(Treatment.DROP, _THROWN_AWAY),
        "logprob_token_ids": FieldRule(Treatment.DROP, "refused without logprobs"),
        "stream_interval": FieldRule(Treatment.DROP, "only means something with stream"),
        "prompt_logprobs": FieldRule(Treatment.WHOLE, _NO_PROMPT_LOGPROBS, unset=(b"null",)),
        "prompt_logprob_token_ids": FieldRule(Treatment.WHOLE, _NO_PROMPT_LOGPROBS, unset=(b"null",)),
    }
)

GENERATE = Rules(
    {
        **_STREAM,
        "return_token_ids": FieldRule(Treatment.DROP, "would send the prompt back to us for nothing"),
        "output_mode": FieldRule(Treatment.DROP, "prefill's text is thrown away"),
    },
    nested={"sampling_params": _SAMPLING_PARAMS},
)
