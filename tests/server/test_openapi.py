"""The description at /openapi.json, and random requests that follow it and that do not."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
)

from tests.server.rig import Rig, running, wait_for

CALM = (sys.executable, "-m", "tests.server.calm_engine")
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{name}"),
    ("DELETE", "/v1/files/{name}"),
    ("GET", "/v1/files/{name}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{name}"),
    ("POST", "/v1/batches/{name}/cancel"),
]
SECONDS = 20.0  # within which any request is answered


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("fuzz")
    with running(
        folder / "m", engine=CALM, files=folder / "files", server={"log_requests": False}
    ) as rig:
        yield rig


def description(rig: Rig) -> dict[str, Any]:
    answer = rig.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def test_every_route_is_described_and_no_other(rig: Rig):
    described = {
        (method.upper(), path)
        for path, methods in description(rig)["paths"].items()
        for method in methods
    }
    assert described == set(OPERATIONS)
    # A route that is not there says so; each of these is.
    for method, path in OPERATIONS:
        answer = rig.http.request(method, path.replace("{name}", "x"))
        assert answer.status_code != 405
        if answer.status_code == 404:
            assert answer.json()["error"]["code"] != "no_such_route", path


def test_the_description_names_every_field(rig: Rig):
    schemas = description(rig)["components"]["schemas"]
    assert set(schemas) >= {"Chat", "Text", "Tokenize", "Detokenize", "NewBatch", "Error"}
    assert not any(name.startswith("_") for name in schemas)
    chat = schemas["Chat"]
    assert chat["additionalProperties"] is False and chat["required"] == ["messages"]
    assert chat["properties"]["n"]["maximum"] == 64
    assert chat["properties"]["tools"] == {"enum": [None, []]}
    for name in chat["properties"]:  # known to the server, if with another value
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, name: None}
        if name != "messages":
            answer = rig.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, (name, answer.text)
    body = {"messages": [], "no_such_field": 1}
    answer = rig.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "unknown_field"


def try_many(rig: Rig, method: str, path: str, examples: int) -> int:
    """Random requests, a canary after each: no 500, nothing that hangs, and what is answered is as
    described.  The number of requests."""
    schema = schemathesis.openapi.from_dict(description(rig))
    schema.config.update(base_url=rig.url)
    operation = schema[path][method]
    expected, count = rig.canary(), 0

    def run(case: Any) -> None:
        nonlocal count
        count += 1
        began = time.monotonic()
        answer = case.call(timeout=SECONDS, stream=False)
        case.validate_response(answer, checks=CHECKS)
        assert time.monotonic() - began < SECONDS
        assert answer.status_code < 500
        assert rig.canary() == expected

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        try:
            cases = operation.as_strategy(generation_mode=mode)
            settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )(given(cases)(run))()
        except Unsatisfiable:  # nothing there to make wrong
            assert mode is GenerationMode.NEGATIVE
    wait_for(rig.is_idle)
    return count


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_random_requests(rig: Rig, method: str, path: str):
    assert try_many(rig, method, path, examples=4 if method == "POST" else 2) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_many_random_requests(rig: Rig, method: str, path: str):
    assert try_many(rig, method, path, examples=150) >= 1


def test_the_description_is_json(rig: Rig):
    assert json.loads(rig.get("/openapi.json").content)["openapi"] == "3.1.0"
