"""Bodies and templates that hang or grow: killed, and nobody else notices."""

import asyncio
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.errors import ApiError
from jaxserve.server.protocol import Load, Parsed
from jaxserve.server.text_client import TextClient
from jaxserve.text.tokenizer import Tokenizer
from tests.cli import fakes
from tests.server.rig import Rig, running

CHAT = "/v1/chat/completions"
# Its own bound of five seconds comes after the server's three, on any machine.
SLOW = (
    "{% set s = 'ab' * 2000000 %}{% for i in range(100000) %}"
    "{% set t = s|replace('a', 'b')|replace('b', 'a') %}{% endfor %}"
)
GROWS = "{{ ('x' * 4000000)|replace('x', 'x' * 2000)|length }}"
FAILS = "{{ raise_exception('not like this') }}"
ESCAPES = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
TEMPLATE = (
    "{% set c = messages[0].content %}{% if c == 'slow' %}" + SLOW + "{% elif c == 'grows' %}"
    + GROWS + "{% elif c == 'fails' %}" + FAILS + "{% elif c == 'escapes' %}" + ESCAPES
    + "{% endif %}" + fakes.CHAT
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template may do anything."""
    folder = tmp_path_factory.mktemp("wicked")
    parts = dataclasses.replace(fakes.byte_tokenizer()._parts, chat_template=TEMPLATE)
    Tokenizer(parts).save(folder)
    return folder


@pytest.fixture(scope="module")
def wicked(folder: Path) -> Iterator[Rig]:
    with running(folder) as rig:
        yield rig


def ask(server: Rig, content: str) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return server.post(CHAT, json=body)


@pytest.fixture
def impatient(folder: Path) -> Iterator[Rig]:
    """What is killed is killed sooner; on a very busy machine that may be anything."""
    with running(folder, server={"text_s": 3.0}) as rig:
        yield rig


def test_cve_2026_115911_a_template_that_hangs_is_killed(impatient: Rig):
    """A stream that began before comes to its end meanwhile."""
    wicked = impatient
    usual = ask(wicked, "usual").json()["choices"]
    killed = wicked.service.text.num_killed
    body = {"prompt": "s", "max_tokens": 120, "ignore_eos": True, "stream": True}
    ends: list[float] = []

    def stream() -> None:
        with wicked.http.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            began.set()
            assert b"".join(pieces).endswith(b"[DONE]\n\n")
        ends.append(time.monotonic())

    began = threading.Event()
    thread = threading.Thread(target=stream)
    thread.start()
    assert began.wait(20)
    answer = ask(wicked, "slow")
    answered = time.monotonic()
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_slow"
    thread.join()
    assert ends[0] < answered
    assert wicked.service.text.num_killed == killed + 1
    assert ask(wicked, "usual").json()["choices"] == usual


def test_those_beside_a_body_that_hangs_are_read(folder: Path):
    """One process has them all when it is killed for the second one."""

    async def ask_all() -> tuple[list[Any], int]:
        load = Load(str(folder), ["m"], chat_max_tokens=9, text_max_tokens=9)
        client = TextClient(load, count=1, limit_s=3.0)
        await client.start()
        contents = ["usual", "slow", *(["usual"] * 20)]
        bodies = [json.dumps({"messages": [{"role": "user", "content": c}]}) for c in contents]
        asked = [client.parse("chat", body.encode()) for body in bodies]
        try:
            return await asyncio.gather(*asked, return_exceptions=True), client.num_killed
        finally:
            await client.close()

    (first, slow, *others), killed = asyncio.run(ask_all())
    assert isinstance(slow, ApiError) and slow.code == "too_slow"
    assert killed == 1
    assert isinstance(first, Parsed)
    assert [other.prompts for other in others] == [first.prompts] * 20


@pytest.mark.parametrize(
    ("content", "words"),
    [("grows", "memory"), ("fails", "not like this"), ("escapes", "template refuses")],
)
def test_cve_2025_62426_a_template_can_do_little(content: str, words: str, wicked: Rig):
    answer = ask(wicked, content)
    assert answer.status_code == 400 and words in answer.text
    assert "0x" not in answer.text and "<class" not in answer.text
    assert ask(wicked, "usual").status_code == 200


def test_a_text_process_that_was_killed_costs_no_request(wicked: Rig):
    killed = wicked.service.text.num_killed
    (child,) = wicked.service.text._children
    os.kill(child.pid, signal.SIGKILL)
    assert ask(wicked, "usual").status_code == 200
    assert wicked.service.text.num_killed == killed + 1


def test_a_long_body_holds_up_nobody(wicked: Rig):
    """Fifteen million bytes of JSON, while others stream."""
    times: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert wicked.http.get("/health").status_code == 200
            times.append(time.monotonic() - began)

    data = json.dumps({"prompt": "x", "user": "y" * 1000, "stop": ["z"] * 3_000_000}).encode()
    assert len(data) > 10_000_000
    thread = threading.Thread(target=beat)
    thread.start()
    began = time.monotonic()
    answer = wicked.post("/v1/completions", content=data)
    took = time.monotonic() - began
    done.set()
    thread.join()
    assert answer.status_code == 400
    assert max(times) < took / 2
    assert ask(wicked, "usual").status_code == 200
