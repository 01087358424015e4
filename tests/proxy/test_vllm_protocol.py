"""The prefill leg of a full request is one that vLLM's own request types accept, endpoint by endpoint."""

import json

import pytest

from proxy import relay
from proxy.endpoints import ENDPOINTS

pytestmark = pytest.mark.vllm

TOOL = {"name": "f", "description": "d"}
SCHEMA = {"type": "object", "properties": {}}
FULL = {
    "/v1/completions": {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 50,
        "min_tokens": 20,
        "n": 3,
        "logprobs": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["x"],
    },
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 50,
        "min_tokens": 20,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": TOOL | {"parameters": SCHEMA}}],
        "tool_choice": "required",
    },
    "/v1/responses": {
        "model": "m",
        "input": "hello",
        "max_output_tokens": 50,
        "top_logprobs": 5,
        "include": ["message.output_text.logprobs"],
        "stream": True,
        "store": True,
        "tools": [{"type": "function", **TOOL, "parameters": SCHEMA, "strict": False}],
    },
    "/v1/messages": {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5000,
        "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "tools": [TOOL | {"input_schema": SCHEMA}],
    },
    "/inference/v1/generate": {
        "model": "m",
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 50, "min_tokens": 20, "n": 3, "logprobs": 5},
        "stream": True,
        "stream_options": {"include_usage": True},
        "output_mode": "text",
        "return_token_ids": True,
    },
}


@pytest.fixture(scope="module")
def request_types():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    return {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": AnthropicMessagesRequest,
        "/inference/v1/generate": GenerateRequest,
    }


def legs(path):
    body = relay.parse_body(json.dumps(FULL[path]).encode())
    return FULL[path], json.loads(relay.prefill_body(body, ENDPOINTS[path].rules))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_both_legs_are_accepted(request_types, path):
    for leg in legs(path):
        request_types[path].model_validate(leg)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_prefill_leg_asks_for_one_token_and_a_hand_off(request_types, path):
    request = request_types[path].model_validate(legs(path)[1])
    assert request.kv_transfer_params["do_remote_decode"] is True
    assert not request.stream
    if path == "/v1/messages":
        assert request.max_tokens == 1
        return
    params = request.sampling_params if path == "/inference/v1/generate" else request.to_sampling_params(1, {})
    assert (params.max_tokens, params.min_tokens, params.n, params.logprobs) == (1, 0, 1, None)


# What vLLM's types do not know: these rules are for what clients of other engines send.
UNKNOWN = {
    "completions": {"best_of", "max_completion_tokens", "min_completion_tokens", "return_prompt_text", "top_logprobs"},
    "chat": {"best_of", "min_completion_tokens", "prompt_embeds"},
    "responses": {"stream_options"},
    "messages": {"stream_options"},
    "generate": set(),
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_rule_is_about_a_field_that_vllm_knows(request_types, path):
    endpoint = ENDPOINTS[path]
    assert set(endpoint.rules.fields) - set(request_types[path].model_fields) == UNKNOWN[endpoint.name]
