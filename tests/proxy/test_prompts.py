"""Lists of prompts: how they are split, and how their answers become one."""

import json

import pytest

from proxy.errors import EngineFailedError, FailureKind, ProxyError
from proxy.prompts import (
    EngineErrorEvent,
    EventSplitter,
    StreamMerger,
    choices_per_prompt,
    merge_replies,
    split_prompts,
)
from proxy.relay import parse_body


def split(prompt, max_prompts=100):
    body = parse_body(json.dumps({"prompt": prompt, "n": 2}).encode())
    bodies = split_prompts(body, max_prompts)
    assert all(bytes(single["n"]) == b"2" for single in bodies)
    return [json.loads(bytes(single["prompt"])) for single in bodies]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        ('["not a list"]', ['["not a list"]']),
        ([1, 2, 3], [[1, 2, 3]]),
        ([], [[]]),
        (None, [None]),
        (["one"], ["one"]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2]], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[]], [[]]),
        (["a", 1], ["a", 1]),
        ({"odd": 1}, [{"odd": 1}]),
        ([{"odd": 1}, {"odd": 2}], [[{"odd": 1}, {"odd": 2}]]),
    ],
)
def test_a_list_of_prompts_is_split_in_order(prompt, prompts):
    assert split(prompt) == prompts


def test_white_space_does_not_hide_a_list():
    body = parse_body(b'{"prompt" : \n [ \t"a" , "b"] }')
    assert [bytes(single["prompt"]) for single in split_prompts(body, 10)] == [b'"a"', b'"b"']


def test_a_body_without_prompt_is_left_alone():
    body = parse_body(b'{"messages":[]}')
    assert split_prompts(body, 10) == [body]


def test_too_many_prompts_are_refused():
    assert len(split(["a"] * 3, max_prompts=3)) == 3
    with pytest.raises(ProxyError) as refusal:
        split(["a"] * 4, max_prompts=3)
    assert (refusal.value.status, refusal.value.param) == (400, "prompt")


def test_a_long_list_of_token_ids_is_not_counted_as_prompts():
    assert split(list(range(1000)), max_prompts=1) == [list(range(1000))]


@pytest.mark.parametrize(("n", "count"), [(b"1", 1), (b"3", 3), (b"null", 1), (b"0", 1), (b'"2"', 2), (b"[]", 1)])
def test_the_choices_of_a_prompt(n, count):
    assert choices_per_prompt(parse_body(b'{"n":' + n + b"}")) == count


def reply(texts, usage=None, **more):
    choices = [{"index": index, "text": text, "logprobs": None} for index, text in enumerate(texts)]
    return json.dumps({"id": "cmpl-7", "model": "m", "choices": choices, "usage": usage, **more}).encode()


def test_replies_are_merged_in_order():
    merged = json.loads(merge_replies([reply(["a0", "a1"]), reply(["b0", "b1"]), reply(["c0", "c1"])], 2))
    assert [(choice["index"], choice["text"]) for choice in merged["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
        (4, "c0"),
        (5, "c1"),
    ]
    assert merged["id"] == "cmpl-7"
    assert merged["usage"] is None


def test_choices_out_of_order_keep_their_numbers():
    odd = json.dumps({"choices": [{"index": 1, "text": "one"}, {"index": 0, "text": "zero"}]}).encode()
    merged = json.loads(merge_replies([reply(["a", "b"]), odd], 2))
    assert {choice["index"]: choice["text"] for choice in merged["choices"]} == {0: "a", 1: "b", 3: "one", 2: "zero"}


def test_usage_is_summed_with_its_details():
    usages = [
        {"prompt_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}},
        {"prompt_tokens": 4, "total_tokens": 9, "prompt_tokens_details": None, "extra": 2},
        {"prompt_tokens": 5, "total_tokens": 1, "prompt_tokens_details": {"cached_tokens": 7, "audio": 2}},
    ]
    merged = json.loads(merge_replies([reply(["x"], usage) for usage in usages], 1))
    assert merged["usage"] == {
        "prompt_tokens": 12,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8, "audio": 2},
        "extra": 2,
    }


def test_metrics_of_one_prompt_are_not_those_of_the_request():
    merged = json.loads(merge_replies([reply(["a"], metrics={"ttft": 1}), reply(["b"], metrics={"ttft": 2})], 1))
    assert merged["metrics"] is None


@pytest.mark.parametrize(
    "odd",
    [b"", b"[]", b"{}", b'{"choices":1}', b'{"choices":[{}]}', b'{"choices":[{"index":"x"}]}', b'{"choices":[1]}'],
)
def test_what_is_no_completion_is_the_engine_s_fault(odd):
    with pytest.raises(EngineFailedError) as failure:
        merge_replies([reply(["a"]), odd], 1)
    assert failure.value.kind is FailureKind.BROKEN


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_found_whatever_the_pieces(newline, size):
    stream = newline.join([b"data: 1", b"", b": alive", b"", b"event: x", b"data: 2", b"", b"data: half"])
    splitter = EventSplitter()
    found = []
    for start in range(0, len(stream), size):
        found += splitter.feed(stream[start : start + size])
    assert found == [b"data: 1", b": alive", b"event: x\ndata: 2"]


def chunk(index, text, **more):
    return b"data: " + json.dumps({"id": "1", "choices": [{"index": index, "text": text}], **more}).encode()


def summary(tokens):
    return b"data: " + json.dumps({"id": "1", "choices": [], "usage": {"total_tokens": tokens}}).encode()


def payloads(stream):
    return [
        event if event == b"data: [DONE]" else json.loads(event.removeprefix(b"data: "))
        for event in stream.split(b"\n\n")
        if event
    ]


def test_streams_are_merged_in_the_order_in_which_they_come():
    merger = StreamMerger(num_prompts=2, per_prompt=2)
    stream = merger.merge(1, [chunk(0, "b0"), chunk(1, "b1")])
    stream += merger.merge(0, [chunk(1, "a1")])
    indices = [payload["choices"][0]["index"] for payload in payloads(stream)]
    assert indices == [2, 3, 1]


def test_the_end_mark_comes_once_at_the_end():
    merger = StreamMerger(2, 1)
    assert merger.merge(0, [b"data: [DONE]"]) == b""
    assert merger.ended(0)
    assert not merger.ended(1)
    assert merger.merge(1, [chunk(0, "b"), b"data:[DONE]"])
    assert merger.ended(1)
    assert merger.finish() == b"data: [DONE]\n\n"


def test_usage_summaries_are_added_up_and_sent_once():
    merger = StreamMerger(2, 1)
    assert merger.merge(0, [summary(3)]) == b""
    assert merger.merge(1, [summary(4)]) == b""
    assert payloads(merger.finish()) == [{"id": "1", "choices": [], "usage": {"total_tokens": 7}}, b"data: [DONE]"]


def test_running_usage_passes_with_its_choice():
    merger = StreamMerger(2, 1)
    (payload,) = payloads(merger.merge(1, [chunk(0, "b", usage={"total_tokens": 3})]))
    assert payload["usage"] == {"total_tokens": 3}
    assert payload["choices"][0]["index"] == 1
    assert merger.finish() == b"data: [DONE]\n\n"


def test_comments_pass():
    assert StreamMerger(1, 1).merge(0, [b": keep-alive"]) == b": keep-alive\n\n"


def test_an_error_of_an_engine_passes_as_it_is():
    with pytest.raises(EngineErrorEvent) as error:
        StreamMerger(1, 1).merge(0, [b'data: {"error": {"message": "no"}}'])
    assert error.value.event == b'data: {"error": {"message": "no"}}\n\n'


@pytest.mark.parametrize("odd", [b"data: ", b"data: nonsense", b"data: {}", b'data: {"choices":[{"index":null}]}'])
def test_an_event_that_is_no_completion_is_the_engine_s_fault(odd):
    with pytest.raises(EngineFailedError) as failure:
        StreamMerger(1, 1).merge(0, [odd])
    assert failure.value.kind is FailureKind.BROKEN
