"""One law: Python = batch file = HTTP, streamed = not, for a table of options."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.completion import Completion
from jaxserve.config import EngineConfig
from jaxserve.llm import LLM
from jaxserve.openai_api import answers
from jaxserve.request import SamplingParams
from tests.cli import fakes
from tests.cli.files import Files
from tests.server.rig import MODEL, Rig

MESSAGES = [{"role": "system", "content": "Be <|turn|> brief."}, {"role": "user", "content": "é?"}]
BASE = {"max_tokens": 24}
# Options of a request, and what they are to the Python API.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 0.8, "seed": 4}, {"temperature": 0.8, "seed": 4}),
    ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ({"seed": 1, "n": 3}, {"seed": 1, "n": 3}),
    ({"seed": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}),
    ({"temperature": 0, "stop": "e"}, {"temperature": 0, "stop": ("e",)}),
    ({"seed": 2, "stop": ["ab", "é", " t"]}, {"seed": 2, "stop": ("ab", "é", " t")}),
    ({"temperature": 0, "stop_token_ids": [70]}, {"temperature": 0, "stop_token_ids": (70,)}),
    ({"seed": 5, "ignore_eos": True, "min_tokens": 3}, {"ignore_eos": True, "min_tokens": 3}),
    ({"seed": 5, "logit_bias": {"70": -100, "71": 5.5}}, {"logit_bias": {70: -100, 71: 5.5}}),
    (
        {"seed": 6, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5},
        {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5},
    ),
    ({"temperature": 0, "prompt_logprobs": 2}, {"temperature": 0, "prompt_logprobs": 2}),
    ({"temperature": 0, "max_tokens": 0}, {"temperature": 0, "max_tokens": 0}),
    ({"temperature": 0, "max_tokens": 1}, {"temperature": 0, "max_tokens": 1}),
    ({"temperature": 0, "priority": -5, "cache_salt": "x"}, {"temperature": 0}),
    ({"temperature": 0, "return_token_ids": True}, {"temperature": 0}),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_assembly(fakes.assemble(EngineConfig()))


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """Without what names one answer, and without what the prefix cache saved."""
    body = {key: value for key, value in body.items() if key not in ("id", "created", "model")}
    body["usage"] = {key: value for key, value in body["usage"].items() if "details" not in key}
    return body


def from_python(llm: LLM, chat: bool, options: dict[str, Any], **shown: Any) -> dict[str, Any]:
    given = BASE | options
    sampling = SamplingParams(**given)
    done: Completion = (llm.chat(MESSAGES, sampling) if chat else llm.generate("é?", sampling))[0]
    tokenizer = fakes.byte_tokenizer()
    body = answers.body([done], tokenizer, model=MODEL, name="x", is_chat=chat, **shown)
    return plain(json.loads(json.dumps(body)))


def joined(events: list[dict[str, Any]], chat: bool) -> dict[str, Any]:
    """The body that a stream comes to."""
    choices: dict[int, dict[str, Any]] = {}
    more: dict[str, Any] = {}
    for event in events:
        more |= {key: event[key] for key in ("prompt_logprobs", "prompt_token_ids") if key in event}
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": ""})
            delta = piece["delta"] if chat else {"content": piece["text"]}
            choice["text"] += delta.get("content", "")
            choice["finish_reason"] = piece["finish_reason"]
            logprobs = choice.setdefault("logprobs", None)
            if piece["logprobs"] is not None:
                logprobs = logprobs or {}
                for key, values in piece["logprobs"].items():
                    logprobs.setdefault(key, []).extend(values)
                choice["logprobs"] = logprobs
            if "token_ids" in piece:
                choice.setdefault("token_ids", []).extend(piece["token_ids"])
    for choice in choices.values():
        if chat:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
    usage = events[-1]["usage"]
    kind = "chat.completion" if chat else "text_completion"
    ordered = [choices[index] for index in sorted(choices)]
    return plain({"object": kind, "choices": ordered, "usage": usage} | more)


def events_of(text: str) -> list[dict[str, Any]]:
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_python_is_batch_file_is_http_and_streamed_is_not(
    chat: bool, llm: LLM, server: Rig, jaxserve: Any, tmp_path: Path
):
    url = "/v1/chat/completions" if chat else "/v1/completions"
    prompt: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": "é?"}
    asks = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    table = [*OPTIONS, (asks | {"temperature": 0}, {"logprobs": 2, "temperature": 0})]
    files = Files(tmp_path)
    bodies = [prompt | BASE | options for options, _ in table]
    files.write(*({"custom_id": f"{i}", "url": url, "body": body} for i, body in enumerate(bodies)))
    assert jaxserve("batch", files.input, "--output", files.output).code == 0
    batch = files.by_id()
    for index, (options, python) in enumerate(table):
        seeded = {"seed": options["seed"]} if "seed" in options else {}
        shown = {"token_ids": "return_token_ids" in options}
        expected = from_python(llm, chat, seeded | python, **shown)
        assert plain(batch[f"{index}"]["response"]["body"]) == expected, options
        answer = server.post(url, json=bodies[index])
        assert answer.status_code == 200, answer.text
        assert plain(answer.json()) == expected, options
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = server.post(url, json=bodies[index] | stream)
        assert joined(events_of(streamed.text), chat) == expected, options
