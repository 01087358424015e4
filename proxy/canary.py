"""The start-up canary: before the first request, a prompt goes through every pair of engines, and its KV has to move.

A right answer proves nothing, because a decode engine that cannot read the KV computes the prompt itself. Its count of
loaded tokens does. It is one count for all requests, so the canary runs before the proxy listens, with one prompt at a
time on each decode engine.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from multidict import CIMultiDict
from prometheus_client.parser import text_string_to_metric_families

from proxy.dialects import OPENAI
from proxy.endpoints import COMPLETIONS
from proxy.engines import EngineClient, EngineRequest, Reply
from proxy.errors import EngineAnswerError, EngineFailedError
from proxy.fields import Body
from proxy.headers import REQUEST_ID, without_compression
from proxy.health import Check
from proxy.registry import Engine, Load
from proxy.routing import Role

logger = logging.getLogger("proxy.canary")


class CanaryError(Exception):
    """No KV moved through some pairs of engines; the message has a line for each."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient the canary is, in seconds."""

    look_seconds: float = 0.2
    """Between two looks at an engine's health or counts."""
    check_seconds: float = 2.0
    """For the answer to a question about health."""
    count_seconds: float = 3.0
    """For decode's counts, which follow its answer by a moment."""
    try_seconds: float = 60.0
    """For one prompt on both engines."""
    pauses: tuple[float, ...] = (1.0, 4.0)
    """Before the second, the third... try of a pair. The first one may meet a peer that was not up a moment ago."""


_TEXT = "A canary sings before the miners go to work, so that they know whether the air below is good. "
_REPEATS = 4
"""Enough for more than one block of KV of usual sizes."""

_TOLD_BYTES = 300
"""So much of an engine's refusal is told."""

_OURS = "pd_transfer:"
_OUR_TOKENS = "pd_transfer:tokens_verified_total"
_OUR_OUTCOMES = "pd_transfer:outcomes_total"
_GOOD_OUTCOME = "receive_verified"
_ANY_TOKENS = "vllm:prompt_tokens_by_source_total"
_ANY_SOURCE = "external_kv_transfer"


class Counts(NamedTuple):
    """What a decode engine has counted so far, over all its ranks."""

    verified: float
    """Tokens, by this project's connector."""
    outcomes: Mapping[str, float]
    """By name, by this project's connector."""
    external: float
    """Tokens, by vLLM itself for whatever connector; some are promised rather than loaded."""
    is_ours: bool
    """Whether this project's connector counts here."""


def read_counts(metrics: str) -> Counts:
    """The counts in Prometheus' text format. Raises ``ValueError`` for other text."""
    verified = external = 0.0
    outcomes: dict[str, float] = {}
    is_ours = False
    for family in text_string_to_metric_families(metrics):
        is_ours = is_ours or family.name.startswith(_OURS)
        for sample in family.samples:
            if sample.name == _OUR_TOKENS:
                verified += sample.value
            elif sample.name == _OUR_OUTCOMES:
                name = sample.labels.get("outcome", "")
                outcomes[name] = outcomes.get(name, 0.0) + sample.value
            elif sample.name == _ANY_TOKENS and sample.labels.get("source") == _ANY_SOURCE:
                external += sample.value
    return Counts(verified, outcomes, external, is_ours)


def loaded(before: Counts, after: Counts) -> bool:
    """Whether KV was loaded between two looks. This project's own count is believed where there is one."""
    if after.is_ours:
        return after.verified > before.verified
    return after.external > before.external


def losses(before: Counts, after: Counts) -> str:
    """What went wrong between two looks, in the connector's words; empty if it does not say."""
    gained = {name for name, count in after.outcomes.items() if count > before.outcomes.get(name, 0.0)}
    return ", ".join(sorted(gained - {_GOOD_OUTCOME}))


class Canary:
    """Tries pairs of engines. ``key`` is the API key that the engines want, if they do."""

    def __init__(self, client: EngineClient, key: str | None = None, pace: Pace | None = None) -> None:
        self._client = client
        self._key = key
        self._pace = pace or Pace()

    async def move_kv(self, prefill_urls: Sequence[str], decode_urls: Sequence[str], wait_seconds: float) -> None:
        """Move KV through every pair of engines.

        Waits up to ``wait_seconds`` for engines that are not up, and leaves out those that never come, unless that
        leaves none of a role. Raises ``CanaryError``.
        """
        up = await self._up({*prefill_urls, *decode_urls}, wait_seconds)
        prefills = _members("prefill", prefill_urls, up)
        decodes = _members("decode", decode_urls, up)
        reasons = await asyncio.gather(*(self._try_all(prefills, decode) for decode in decodes))
        if failed := [reason for several in reasons for reason in several]:
            raise CanaryError("\n".join(failed))
        logger.info("KV moves through %d pairs of engines", len(prefills) * len(decodes))

    async def _up(self, urls: set[str], wait_seconds: float) -> set[str]:
        up: set[str] = set()
        try:
            async with asyncio.timeout(wait_seconds):
                while missing := list(urls - up):
                    found = await asyncio.gather(*map(self._check, missing))
                    up |= {url for url, check in zip(missing, found, strict=True) if check is Check.WELL}
                    await asyncio.sleep(0 if up == urls else self._pace.look_seconds)
        except TimeoutError:
            logger.warning("not up after %g s, so not tried: %s", wait_seconds, ", ".join(sorted(urls - up)))
        return up

    async def _check(self, url: str) -> Check:
        return await self._client.check(url, self._pace.check_seconds)

    async def _try_all(self, prefills: Iterable[str], decode: str) -> list[str]:
        """Why no KV came from some prefill engines to one decode engine."""
        reasons = [(prefill, await self._try_again(prefill, decode)) for prefill in prefills]
        return [f"no KV moved from {prefill} to {decode}: {reason}" for prefill, reason in reasons if reason]

    async def _try_again(self, prefill: str, decode: str) -> str:
        reason = await self._try(prefill, decode)
        for pause in self._pace.pauses:
            if not reason:
                break
            logger.warning("no KV moved from %s to %s: %s; another try in %g s", prefill, decode, reason, pause)
            await asyncio.sleep(pause)
            reason = await self._try(prefill, decode)
        return reason

    async def _try(self, prefill: str, decode: str) -> str:
        """Why no KV moved; empty if it did."""
        try:
            async with asyncio.timeout(self._pace.try_seconds):
                return await self._send(prefill, Load(Engine(Role.DECODE, decode), 0))
        except EngineAnswerError as error:
            return f"{error}: {error.answer(OPENAI).body[:_TOLD_BYTES].decode(errors='replace')}"
        except (EngineFailedError, ValueError) as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {self._pace.try_seconds:g} s"

    async def _send(self, prefill: str, decode: Load) -> str:
        headers = self._headers()
        request = EngineRequest(COMPLETIONS, headers, _prompt(await self._model(decode)))
        before = await self._counts(decode)
        prefilled = await self._client.prefill(prefill, headers, request)
        if prefilled.params is None:
            return "prefill offers no hand-off: does it run with the connector, as kv_producer or kv_both?"
        await _body(await self._client.decode(headers, request, prefilled.params, decode))
        after = await self._counts(decode)
        deadline = asyncio.get_running_loop().time() + self._pace.count_seconds
        while not loaded(before, after):
            if asyncio.get_running_loop().time() > deadline:
                return f"decode counts no loaded tokens ({losses(before, after) or 'and tells no reason'})"
            await asyncio.sleep(self._pace.look_seconds)
            after = await self._counts(decode)
        return ""

    async def _model(self, decode: Load) -> str:
        models = msgspec.json.decode(await self._get(decode, "/v1/models"))
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"decode names no model: {error!r}") from error

    async def _counts(self, decode: Load) -> Counts:
        return read_counts((await self._get(decode, "/metrics")).decode())

    async def _get(self, engine: Load, path: str) -> bytes:
        reply = await self._client.forward("GET", path, self._headers(), None, engine)
        body = await _body(reply)
        if reply.status != 200:
            raise ValueError(f"{path} of decode answers {reply.status}")
        return body

    def _headers(self) -> CIMultiDict[str]:
        headers = CIMultiDict({"Content-Type": "application/json", REQUEST_ID: f"canary-{uuid.uuid4().hex}"})
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return without_compression(headers)


def _members(role: str, urls: Sequence[str], up: set[str]) -> list[str]:
    """The engines of a role that are up, of which there has to be one."""
    members = [url for url in urls if url in up]
    if not members:
        raise CanaryError(f"no {role} engine is up")
    return members


def _prompt(model: str) -> Body:
    """A prompt whose KV is in nobody's cache: of what decode has, it loads nothing."""
    request = {"model": model, "prompt": _TEXT * _REPEATS, "max_tokens": 1, "cache_salt": f"canary-{uuid.uuid4().hex}"}
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in request.items()}


async def _body(reply: Reply) -> bytes:
    try:
        return await reply.read()
    finally:
        reply.close()
