"""The official client of OpenAI, unchanged, against the server."""

import asyncio

import openai
import pytest

from jaxserve.completion import Sample
from jaxserve.config import EngineConfig
from jaxserve.llm import LLM
from jaxserve.openai_api import answers
from jaxserve.request import SamplingParams, TokenLogprobs
from tests.cli import fakes
from tests.server.rig import MODEL, Rig

MESSAGES = [{"role": "user", "content": "Name a colour."}]


def test_models(server: Rig):
    client = server.client()
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "jaxserve")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_streamed_and_not_sync_and_async(server: Rig):
    options = dict(model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0.8, seed=3)
    with server.client() as client:
        whole = client.chat.completions.create(**options)
        events = list(client.chat.completions.create(**options, stream=True))
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {event.id for event in events} == {events[0].id}
    assert all(event.object == "chat.completion.chunk" for event in events)

    async def both() -> tuple[str, str]:
        async with server.async_client() as client:
            whole = await client.chat.completions.create(**options)
            stream = await client.chat.completions.create(**options, stream=True)
            parts = [event.choices[0].delta.content or "" async for event in stream]
            return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(both()) == (text, text)


def test_a_completion_streamed_and_not_with_usage(server: Rig):
    options = dict(model=MODEL, prompt=["one", "two"], n=2, max_tokens=12, seed=1)
    with server.client() as client:
        whole = client.completions.create(**options)
        events = list(
            client.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in whole.choices}) == 4
    texts = ["", "", "", ""]
    for event in events[:-1]:
        assert event.usage is None
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert events[-1].choices == []
    usage = events[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == 6


def test_what_is_not_named_has_openais_defaults(server: Rig):
    with server.client() as client:
        text = client.completions.create(
            model=MODEL, prompt="a", temperature=0, extra_body={"ignore_eos": True}
        )
        chat = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
        )
    assert text.usage is not None and text.usage.completion_tokens == 16
    assert chat.usage is not None and chat.usage.total_tokens == 256  # all that the model takes


def test_tokenize_and_detokenize(server: Rig):
    answer = server.post("/tokenize", json={"prompt": "héllo"}).json()
    assert answer["count"] == len(answer["tokens"]) == 6
    back = server.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "héllo"}
    chat = server.post("/tokenize", json={"messages": MESSAGES}).json()
    text = server.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|turn|>user: Name a colour.\n<|turn|>assistant: "


def test_probes(server: Rig):
    assert server.get("/health").status_code == server.get("/ready").status_code == 200


def test_the_answer_is_that_of_the_python_api(server: Rig):
    llm = LLM.from_assembly(fakes.assemble(EngineConfig()))
    expected = llm.generate("hello", SamplingParams(max_tokens=30, temperature=0.9, seed=7))[0]
    answer = server.client().completions.create(
        model=MODEL, prompt="hello", max_tokens=30, temperature=0.9, seed=7
    )
    assert answer.choices[0].text == expected.text


def test_text_offset_says_where_each_token_begins(server: Rig):
    """Streamed too, for every choice; tokens of one character all begin where it does."""
    options = dict(model=MODEL, prompt=["é", "b"], n=2, max_tokens=12, seed=1, logprobs=0)
    pieces: dict[int, tuple[str, list[int]]] = {}
    with server.client() as client:
        whole = client.completions.create(**options)
        for event in client.completions.create(**options, stream=True):
            choice = event.choices[0]
            text, offsets = pieces.get(choice.index, ("", []))
            new = choice.logprobs.text_offset if choice.logprobs else []
            pieces[choice.index] = (text + choice.text, offsets + new)
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert pieces[choice.index] == (choice.text, choice.logprobs.text_offset)

    tokenizer = fakes.byte_tokenizer()
    ids = (*tokenizer.encode("aé😀b"), *tokenizer.eos_ids)
    logprobs = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in ids)
    sample = Sample(0, "aé😀b", ids, "stop", logprobs)
    choice = answers.Choice(0, [], tokenizer, is_chat=False, token_ids=False)
    offsets = choice.write(sample)["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2, 2, 2, 2, 3, 4]
