"""The endpoints that prefill and decode share. Every other path goes to one engine as it is."""

from collections.abc import Mapping
from typing import NamedTuple

from proxy import dialects, fields
from proxy.dialects import Dialect
from proxy.fields import Rules


class Endpoint(NamedTuple):
    """One of them. ``name`` is its label in metrics."""

    name: str
    path: str
    rules: Rules
    dialect: Dialect
    takes_prompt_lists: bool = False


COMPLETIONS = Endpoint("completions", "/v1/completions", fields.COMPLETIONS, dialects.OPENAI, takes_prompt_lists=True)

ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.path: endpoint
    for endpoint in (
        COMPLETIONS,
        Endpoint("chat", "/v1/chat/completions", fields.COMPLETIONS, dialects.OPENAI),
        Endpoint("responses", "/v1/responses", fields.RESPONSES, dialects.RESPONSES),
        Endpoint("messages", "/v1/messages", fields.MESSAGES, dialects.ANTHROPIC),
        Endpoint("generate", "/inference/v1/generate", fields.GENERATE, dialects.OPENAI),
    )
}

_ANTHROPIC_PATHS = "/v1/messages"


def name_of(path: str) -> str:
    """The label of a path in metrics, with or without a slash at its end."""
    endpoint = ENDPOINTS.get(path.removesuffix("/"))
    return "other" if endpoint is None else endpoint.name


def dialect_of(path: str) -> Dialect:
    """How errors are written on a path."""
    return dialects.ANTHROPIC if path.startswith(_ANTHROPIC_PATHS) else dialects.OPENAI
