"""Every endpoint through the proxy, by official clients and by curl: a single engine's answer, from moved KV."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.pair import TOKENS_VERIFIED, Pair, gain, running_pair, same_settings
from tests.e2e.proxy_stack import curl, differing, events_of, folded, num_prompt_tokens, running_proxy, scrubbed
from tests.models.random_models import CHAT_TEMPLATE
from tests.stack.engines import ServerProcess
from tests.stack.exactness import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
NUM_TOKENS = 12
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}


@dataclass(frozen=True)
class Case:
    """A request. ``extra`` is what the official clients do not know of; ``num_prompts`` are computed by prefill."""

    api: str
    fields: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    num_prompts: int = 1
    num_samples: int = 1


def completion(prompt: Any = TEXT, num_prompts: int = 1, num_samples: int = 1, **more: Any) -> Case:
    fields = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **more}
    return Case("completions", fields, {"ignore_eos": True}, num_prompts, num_samples)


def chat(num_samples: int = 1, **more: Any) -> Case:
    fields = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": NUM_TOKENS, "temperature": 0, **more}
    return Case("chat", fields, {"ignore_eos": True} if "max_tokens" not in more else {}, num_samples=num_samples)


def response(**more: Any) -> Case:
    return Case("responses", {"input": TEXT, "max_output_tokens": NUM_TOKENS, "temperature": 0, **more})


def message(**more: Any) -> Case:
    messages = [{"role": "user", "content": TEXT}]
    return Case("messages", {"messages": messages, "max_tokens": NUM_TOKENS, **more}, {"temperature": 0})


def generate(**more: Any) -> Case:
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    return Case("generate", {"token_ids": random_prompt(170, seed=60, num_words=250), "sampling_params": sampling})


SAMPLED = {"n": 2, "temperature": 0.8, "seed": 5}
PLAIN = {
    "completions": completion(),
    "chat": chat(),
    "responses": response(),
    "messages": message(),
    "generate": generate(),
}
CASES = PLAIN | {
    "completion of token ids": completion(random_prompt(200, seed=61, num_words=250)),
    "completion with logprobs": completion(logprobs=5),
    "completion, two samples": completion(num_samples=2, **SAMPLED),
    "completions of a list": completion(["One. " + TEXT, "Two, and longer. " + TEXT], num_prompts=2),
    "completion with echo": completion(num_prompts=0, echo=True, logprobs=1),
    "chat with logprobs": chat(logprobs=True, top_logprobs=5),
    "chat, two samples": chat(num_samples=2, **SAMPLED),
    "chat with a JSON schema": chat(
        max_tokens=60, response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    ),
    "chat with a tool": chat(
        max_tokens=40,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ),
    "chat that must use a tool": chat(
        max_tokens=30, tools=[{"type": "function", "function": TOOL}], tool_choice="required"
    ),
    "response with logprobs": response(include=["message.output_text.logprobs"], top_logprobs=3),
    "response with a JSON schema": response(
        max_output_tokens=60, text={"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    ),
    "message with a system prompt and a tool": message(
        system="Answer in one word.",
        tools=[{"name": "weather", "input_schema": CITY}],
        tool_choice={"type": "tool", "name": "weather"},
    ),
    "tokens with logprobs": generate(logprobs=5),
}
JSON_CASES = ("chat with a JSON schema", "response with a JSON schema")
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/inference/v1/generate",
}


@pytest.fixture(scope="module")
def pair(random_models: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text("{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + CHAT_TEMPLATE)
    arguments = ["--block-size", "32", "--enable-scale-out", "--chat-template", str(template)]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # A random model would fill its JSON with white space.
    arguments += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    with running_pair("proxy-endpoints", *same_settings(random_models["hybrid"], *arguments)) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(pair: Pair) -> Iterator[ServerProcess]:
    """Its canary has to pass first."""
    with running_proxy([pair.prefill], [pair.decode], pair.logs, "--canary", "60") as server:
        yield server


def body_of(case: Case, salt: str, stream: bool) -> dict[str, Any]:
    body = {"model": "model", **case.fields, **case.extra, "cache_salt": salt}
    if stream and case.api in ("completions", "chat"):
        body["stream_options"] = {"include_usage": True}
    return body | ({"stream": True} if stream else {})


@contextmanager
def official_clients(url: str) -> Iterator[tuple[Any, Any]]:
    """OpenAI's and Anthropic's, which ask once. Importing them takes seconds, which collecting tests need not."""
    import anthropic
    import openai

    with (
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as one,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        yield one, other


def by_client(url: str, case: Case, salt: str, stream: bool) -> Any:
    """The answer that the official client of an endpoint gets; tokens in and out have none."""
    if case.api == "generate":
        return by_curl(url, case, salt, stream)
    body = body_of(case, salt, stream)
    extra = {name: body.pop(name) for name in (*case.extra, "cache_salt")}
    with official_clients(url) as (one, other):
        create = {
            "completions": one.completions.create,
            "chat": one.chat.completions.create,
            "responses": one.responses.create,
            "messages": other.messages.create,
        }[case.api]
        answer = create(**body, extra_body=extra)
        return folded(event.model_dump() for event in answer) if stream else scrubbed(answer.model_dump())


def by_curl(url: str, case: Case, salt: str, stream: bool) -> Any:
    status, answer = curl(url + PATHS[case.api], body_of(case, salt, stream))
    assert status == 200, answer
    return folded(events_of(answer)) if stream else scrubbed(json.loads(answer))


def assert_equal(pair: Pair, proxy: ServerProcess, case: Case, ask: Any, salt: str, stream: bool) -> Any:
    """The answer from the proxy, after it was found to be the single engine's, and its KV to have moved."""
    answers: list[Any] = []
    moved = {TOKENS_VERIFIED: 0}
    want = ask(pair.prefill.url, case, f"single {salt}", stream)
    if case.num_prompts:
        num_tokens = len(case.fields["token_ids"]) if case.api == "generate" else num_prompt_tokens(want)
        moved[TOKENS_VERIFIED] = num_tokens - case.num_prompts

    def through_the_proxy() -> None:
        answers.append(ask(proxy.url, case, f"moved {salt}", stream))

    gained = gain(pair.decode, through_the_proxy, moved).get(TOKENS_VERIFIED, 0)
    assert differing(answers, [want]) == []
    if case.num_prompts:
        assert moved[TOKENS_VERIFIED] > 4 * 32
    # Samples of one prompt come from one hand-off, but each of them may read it.
    assert moved[TOKENS_VERIFIED] <= gained <= moved[TOKENS_VERIFIED] * case.num_samples
    return want


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CASES)
def test_by_the_official_clients(pair: Pair, proxy: ServerProcess, name: str, stream: bool) -> None:
    answer = assert_equal(pair, proxy, CASES[name], by_client, f"client {name} {stream}", stream)
    if name in JSON_CASES:
        assert "Bern" in json.dumps(answer) or "Rome" in json.dumps(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", PLAIN)
def test_by_curl(pair: Pair, proxy: ServerProcess, api: str, stream: bool) -> None:
    assert_equal(pair, proxy, PLAIN[api], by_curl, f"curl {api} {stream}", stream)


@pytest.mark.parametrize("case", [completion(), chat()], ids=["completion", "chat"])
def test_stop_strings(pair: Pair, proxy: ServerProcess, case: Case) -> None:
    letters = requests.post(pair.prefill.url + "/tokenize", json={"model": "model", "prompt": "abcdef"}, timeout=10)
    spelled = Case(case.api, case.fields, {**case.extra, "allowed_token_ids": letters.json()["tokens"][-6:]})
    (choice,) = by_client(pair.prefill.url, spelled, f"unstopped {case.api}", False)["choices"]
    stop = (choice["text"] if case.api == "completions" else choice["message"]["content"])[2:5]
    stopped = Case(case.api, {**case.fields, "stop": [stop]}, spelled.extra)
    for stream in (False, True):
        answer = assert_equal(pair, proxy, stopped, by_client, f"stopped {case.api} {stream}", stream)
        assert f"'stop_reason': '{stop}'" in repr(answer)


@pytest.mark.parametrize("api", PLAIN)
def test_transfer_params_of_a_client_go_nowhere(pair: Pair, proxy: ServerProcess, api: str) -> None:
    """With them, decode would read from wherever the client says, and find nothing."""
    params = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1, "remote_engine_id": "x"}
    case = PLAIN[api]
    hostile = Case(api, case.fields, {**case.extra, "kv_transfer_params": params})

    def ask(url: str, case: Case, salt: str, stream: bool) -> Any:
        return by_curl(url, hostile if url == proxy.url else case, salt, stream)

    assert_equal(pair, proxy, case, ask, f"hostile {api}", False)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_refusal_is_the_engines_own(pair: Pair, proxy: ServerProcess, path: str) -> None:
    body = {"model": "nobody", "max_tokens": 4, "prompt": "a", "input": "a"}
    body["messages"] = [{"role": "user", "content": "a"}]
    told = curl(proxy.url + path, body)
    assert told == curl(pair.decode.url + path, body)
    assert 400 <= told[0] < 500


def test_official_clients_understand_refusals(proxy: ServerProcess) -> None:
    with official_clients(proxy.url) as (one, other):
        with pytest.raises(Exception, match="nobody") as told:
            one.completions.create(model="nobody", prompt="a")
        assert type(told.value).__name__ == "NotFoundError"
        with pytest.raises(Exception, match="nobody") as told:
            other.messages.create(model="nobody", max_tokens=4, messages=[{"role": "user", "content": "a"}])
        assert type(told.value).__name__ == "NotFoundError"


def test_what_goes_to_one_engine(pair: Pair, proxy: ServerProcess) -> None:
    with official_clients(proxy.url) as (one, _):
        assert [model.id for model in one.models.list()] == ["model"]
    for path, body in (
        ("/version", None),
        ("/v1/models/nobody", None),
        ("/tokenize", {"model": "model", "prompt": TEXT}),
        ("/detokenize", {"model": "model", "tokens": [40, 50, 60]}),
        ("/v1/messages/count_tokens", {"model": "model", "messages": [{"role": "user", "content": TEXT}]}),
    ):
        got, want = (curl(server.url + path, body) for server in (proxy, pair.decode))
        assert (got[0], scrubbed(json.loads(got[1]))) == (want[0], scrubbed(json.loads(want[1]))), path


def test_what_the_proxy_answers_itself(proxy: ServerProcess) -> None:
    assert curl(proxy.url + "/health") == (200, b'{"status":"ok"}')
    status, ready = curl(proxy.url + "/ready")
    assert (status, json.loads(ready)["ready"]) == (200, True)
    status, metrics = curl(proxy.url + "/metrics")
    assert status == 200
    assert b'pd_proxy_requests_total{endpoint="chat",outcome="ok"}' in metrics
    assert b"pd_proxy_missing_handoffs_total 0.0" in metrics
    status, page = curl(proxy.url + "/status")
    assert (status, page[:15].lower()) == (200, b"<!doctype html>")


def test_vllms_own_benchmark_runs(pair: Pair, proxy: ServerProcess, tmp_path: Path) -> None:
    num_prompts, num_input_tokens = 12, 80
    command = [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai"]
    command += ["--base-url", proxy.url, "--endpoint", "/v1/completions", "--model", "model"]
    command += ["--tokenizer", str(pair.decode.settings.model), "--dataset-name", "random"]
    command += ["--random-input-len", str(num_input_tokens), "--random-output-len", "8"]
    command += ["--num-prompts", str(num_prompts), "--max-concurrency", "4", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]

    def bench() -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    gained = gain(pair.decode, bench, {})
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (num_prompts, 0)
    # Beside these it sends a prompt to see whether there is an engine. Decode computes the last token of each.
    assert gained["vllm:prompt_tokens_by_source_total/local_compute"] <= 2 * num_prompts
    assert gained[TOKENS_VERIFIED] > num_prompts * num_input_tokens / 2
