"""What a request says about where its KV may be cached already."""

from collections.abc import Mapping
from hashlib import blake2b

from proxy import relay
from proxy.fields import Body
from proxy.headers import SESSION_ID
from proxy.routing import Hints

PREFIX_BYTES = 2048
"""How much of a prompt's beginning has to be equal for two prompts to count as beginning alike: about 500 tokens."""

_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
_KEY_BYTES = 16


def hints_of(headers: Mapping[str, str], body: Body) -> Hints:
    """The keys of a request for the affinity policies.

    The prefix is taken from the JSON as it was sent: prompts that differ in its spelling only are not recognised. Its
    salt, if it has one, belongs to it, as it does in vLLM's prefix cache.
    """
    parts = [bytes(memoryview(body[name])[:PREFIX_BYTES]) for name in relay.PROMPT_FIELDS if name in body]
    prompt = b"".join(parts)[:PREFIX_BYTES]
    salt = bytes(body.get("cache_salt", b""))
    session = headers.get(SESSION_ID) or next(
        filter(None, (relay.text_field(body, name) for name in _SESSION_FIELDS)), ""
    )
    return Hints(prefix=_key(salt + prompt), session=_key(session.encode(errors="surrogatepass")))


def _key(text: bytes) -> bytes:
    return blake2b(text, digest_size=_KEY_BYTES).digest() if text else b""
