"""Compares answers bit for bit: log probabilities keyed by token id, one dictionary per generated token."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import requests

from tests.stack.engines import complete, completion_body

TOP_LOGPROBS = 20
HAND_OFF_REQUEST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def random_prompt(num_tokens: int, seed: int = 0, num_words: int = 500) -> list[int]:
    """Token ids that no tokenizer has to be asked for; the same for the same arguments."""
    generator = random.Random(seed * 1_000_003 + num_tokens)
    return [generator.randrange(4, num_words) for _ in range(num_tokens)]


def hand_off(prefill_url: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Run the prefill leg by hand; the params for the decode leg. Raises ValueError when prefill gave none."""
    reply = complete(prefill_url, prompt, max_tokens=1, kv_transfer_params=HAND_OFF_REQUEST, **fields)
    params = reply.get("kv_transfer_params")
    if not params:
        raise ValueError(f"prefill answered without a hand-off: {reply}")
    return dict(params)


def generated(reply: Mapping[str, Any], choice: int = 0) -> list[dict[str, float]]:
    """The top log probabilities of every generated token of a choice."""
    return [dict(top) for top in reply["choices"][choice]["logprobs"]["top_logprobs"]]


def stream_generated(url: str, prompt: Sequence[int], **fields: Any) -> list[dict[str, float]]:
    """The same of a streamed answer."""
    body = completion_body(prompt, stream=True, **fields)
    with requests.post(url + "/v1/completions", json=body, stream=True, timeout=120) as reply:
        reply.raise_for_status()
        lines = [line.removeprefix(b"data: ") for line in reply.iter_lines() if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return [dict(top) for choice in choices if choice["logprobs"] for top in choice["logprobs"]["top_logprobs"]]


def tokens(reply: Mapping[str, Any], choice: int = 0) -> list[str]:
    """The generated tokens of a choice, as ``token_id:N``."""
    return list(reply["choices"][choice]["logprobs"]["tokens"])


def difference(got: Sequence[Mapping[str, float]], want: Sequence[Mapping[str, float]]) -> float:
    """Largest absolute difference; infinite when the numbers of tokens or the tokens themselves differ."""
    if len(got) != len(want):
        return math.inf
    worst = 0.0
    for ours, theirs in zip(got, want, strict=True):
        if ours.keys() != theirs.keys():
            return math.inf
        worst = max([worst, *(abs(ours[token] - theirs[token]) for token in ours)])
    return worst
