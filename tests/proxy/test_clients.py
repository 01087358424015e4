"""The official clients understand what the proxy says, above all when something goes wrong. They come with vLLM."""

import anthropic
import openai
import pytest

from tests.proxy.fake_engines import Drop, Refuse, asynchronous, cluster, event

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MESSAGES = [{"role": "user", "content": "hi"}]


def openai_client(c, retries=0):
    return openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="key", max_retries=retries)


def anthropic_client(c, retries=0):
    return anthropic.AsyncAnthropic(base_url=c.url, api_key="key", max_retries=retries)


async def texts(stream):
    return [chunk.choices[0].delta.content async for chunk in stream]


@asynchronous
async def test_openai_reads_answers_and_streams():
    async with cluster() as c, openai_client(c) as client:
        reply = await client.chat.completions.create(model="m", messages=MESSAGES)
        streamed = await texts(await client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        assert reply.choices[0].message.content == "".join(streamed)
        assert c.ledger.count("used") == 2
        assert c.decodes[0].generations[0].headers["Authorization"] == "Bearer key"


@asynchronous
@pytest.mark.parametrize("fault", [Drop.IN_BODY, Refuse(500)], ids=str)
async def test_openai_raises_when_decode_is_lost(fault):
    async with cluster() as c, openai_client(c) as client:
        c.decodes[0].always = fault
        with pytest.raises(openai.APIError) as failed:
            await texts(await client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        assert isinstance(failed.value, openai.APIStatusError) is isinstance(fault, Refuse)
        assert "engine" in failed.value.message


@asynchronous
@pytest.mark.parametrize("retries", [0, 1])
async def test_openai_comes_again_when_it_is_told_to(retries):
    async with cluster(max_in_flight=1, max_queued=0) as c, openai_client(c, retries) as client:
        c.prefills[0].faults.append(Refuse(503))
        if retries:
            reply = await client.chat.completions.create(model="m", messages=MESSAGES)
            assert reply.choices[0].message.content
        else:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            assert failed.value.response.headers["Retry-After"] == "1"


@asynchronous
async def test_openai_tells_a_bad_request():
    async with cluster(max_prompts=1) as c, openai_client(c) as client:
        with pytest.raises(openai.BadRequestError) as failed:
            await client.completions.create(model="m", prompt=["a", "b"])
        assert failed.value.param == "prompt"


RESPONSES_BEGIN = b"event: response.created\n" + event(
    {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1", "object": "response"}}
)


@asynchronous
async def test_openai_reads_the_error_of_a_broken_responses_stream():
    async with cluster() as c, openai_client(c) as client:
        c.decodes[0].begin = RESPONSES_BEGIN
        c.decodes[0].always = Drop.IN_BODY
        begin, error = [what async for what in await client.responses.create(model="m", input="hi", stream=True)]
        assert begin.type == "response.created"
        # In this API an error is an event like others.
        assert (error.type, error.code, error.sequence_number) == ("error", "502", 1)
        assert "engine" in error.message


MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "hello"}],
    "model": "m",
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
MESSAGE_BEGIN = b"event: message_start\n" + event(
    {"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}}
)


@asynchronous
async def test_anthropic_reads_the_error_of_a_broken_stream():
    async with cluster() as c, anthropic_client(c) as client:
        c.decodes[0].begin = MESSAGE_BEGIN
        c.decodes[0].always = Drop.IN_BODY
        stream = await client.messages.create(model="m", max_tokens=5, messages=MESSAGES, stream=True)
        assert (await anext(stream)).type == "message_start"
        with pytest.raises(anthropic.APIStatusError) as failed:
            await anext(stream)
        assert failed.value.body["error"]["type"] == "api_error"


@asynchronous
async def test_anthropic_tells_what_is_wrong():
    async with cluster(unreachable=["p0"]) as c, anthropic_client(c) as client:
        with pytest.raises(anthropic.InternalServerError) as failed:
            await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
        assert failed.value.status_code == 503
        assert failed.value.body["error"]["type"] == "overloaded_error"
