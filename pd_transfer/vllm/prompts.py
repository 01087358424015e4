"""vLLM's requests -> what the core compares, and the n-1 rule: prefill computes all tokens of a prompt but the last.

Decode computes the last token itself, because vLLM always runs one. If prefill ran it too, its sliding windows would
have moved one position further than decode's, and the block that decode still looks at could be gone.
"""

from vllm.v1.request import Request
from vllm.v1.utils import ConstantList

from pd_transfer.core.params import MultimodalSpan, prompt_digest


def why_not_split(request: Request) -> str | None:
    """Why a request's last prompt token cannot be left to another engine; None when it can."""
    sampling = request.sampling_params
    token_ids = request.prompt_token_ids
    if token_ids is None or not is_plain_tokens(request):
        return "the prompt is not plain token ids"
    if sampling is None or request.pooling_params is not None:
        return "the request does not generate"
    if request.resumable:
        return "the request streams its input"
    if len(token_ids) < 2:
        return "the prompt has fewer than 2 tokens"
    if sampling.prompt_logprobs is not None:
        return "prompt_logprobs need the whole prompt on one engine"
    last = len(token_ids) - 1
    if any(span.offset <= last < span.offset + span.length for span in _spans(request)):
        return "the last token belongs to a multimodal input"
    return None


def is_plain_tokens(request: Request) -> bool:
    """Whether a prompt is token ids and nothing else: no embeddings, not even in part."""
    return (
        request.prompt_token_ids is not None and request.prompt_embeds is None and request.prompt_is_token_ids is None
    )


def split_prompt(request: Request, hash_block_size: int) -> None:
    """Drop the last prompt token, before the request is scheduled for the first time.

    New lists are assigned, because vLLM shares the old ones; block hashes that cover the token go with it.
    """
    assert request.prompt_token_ids is not None
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    request._all_token_ids = request._all_token_ids[:-1]
    request.all_token_ids = ConstantList(request._all_token_ids)
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    request.block_hashes = request.block_hashes[: request.num_prompt_tokens // hash_block_size]


def digest_of(request: Request, num_tokens: int) -> bytes:
    """The digest of a request's first ``num_tokens`` tokens and of all else that their KV depends on."""
    lora = request.lora_request.lora_name if request.lora_request is not None else None
    spans = [span for span in _spans(request) if span.offset < num_tokens]
    return prompt_digest((request.prompt_token_ids or [])[:num_tokens], lora, request.cache_salt, spans)


def _spans(request: Request) -> list[MultimodalSpan]:
    return [
        MultimodalSpan(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    ]
