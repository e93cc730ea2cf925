"""Files and batches, with OpenAI's client: run by the offline runner, and not lost by a restart."""

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cli.files import strict
from tests.server.rig import MODEL, Rig, running, wait_for
from tests.server.test_process import FAKE, ready, serving

URL = "/v1/completions"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("batches")
    limits = {"max_upload_bytes": 200_000}
    with running(folder / "m", files=folder / "files", server=limits) as rig:
        yield rig


def lines(count: int, **options: Any) -> bytes:
    bodies = ({"prompt": f"{i}", "temperature": 1, "seed": i} | options for i in range(count))
    rows = (
        {"custom_id": f"id-{i}", "method": "POST", "url": URL, "body": body}
        for i, body in enumerate(bodies)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch").id


def begin(client: openai.OpenAI, data: bytes) -> str:
    return client.batches.create(
        input_file_id=upload(client, data),
        endpoint=URL,
        completion_window="24h",
        metadata={"a": "b"},
    ).id


def ended(client: openai.OpenAI, name: str) -> Any:
    wait_for(
        lambda: client.batches.retrieve(name).status in ("completed", "failed", "cancelled"), 60
    )
    return client.batches.retrieve(name)


def rows(client: openai.OpenAI, name: str) -> dict[str, Any]:
    text = client.files.content(name).text
    return {row["custom_id"]: row for row in map(strict, text.splitlines())}


def test_a_batch_gives_what_requests_give(keeping: Rig):
    client = keeping.client()
    data = lines(8, max_tokens=9) + b'{"custom_id": "bad", "url": "/v1/completions", "body": {}}\n'
    data += b'{"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": []}}\n'
    other = {"custom_id": "other", "url": URL, "body": {"prompt": "a", "model": "x"}}
    data += json.dumps(other).encode() + b"\n"
    batch = ended(client, begin(client, data))
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (11, 8, 3)
    good, bad = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert set(bad) == {"bad", "chat", "other"}
    assert "prompt" in bad["bad"]["error"]["message"]
    assert "endpoint" in bad["chat"]["error"]["message"]
    assert bad["other"]["error"]["code"] == "model_not_found"
    for i in range(8):
        body = {"prompt": f"{i}", "temperature": 1, "seed": i, "max_tokens": 9}
        answer = keeping.post(URL, json=body).json()
        result = good[f"id-{i}"]["response"]["body"]
        assert result["choices"] == answer["choices"]
        assert result["model"] == MODEL
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    wait_for(keeping.is_idle)


def test_lists_and_deletes(keeping: Rig):
    client = keeping.client()
    names = {upload(client, b"{}\n") for _ in range(3)}
    listed = [file.id for file in client.files.list(purpose="batch", limit=2)]  # pages by itself
    assert names <= set(listed)
    for name in names:
        assert client.files.delete(name).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(name)
    batch = begin(client, lines(1))
    assert batch in [entry.id for entry in client.batches.list(limit=1)]
    ended(client, batch)


def test_a_batch_is_cancelled_and_keeps_what_is_done(keeping: Rig):
    client = keeping.client()
    name = begin(client, lines(900, max_tokens=100, ignore_eos=True))
    wait_for(lambda: client.batches.retrieve(name).request_counts.completed > 5, 30)
    with pytest.raises(openai.ConflictError):
        client.files.delete(client.batches.retrieve(name).input_file_id)
    assert client.batches.cancel(name).status == "cancelling"
    batch = ended(client, name)
    assert batch.status == "cancelled"
    assert 5 < batch.request_counts.completed == len(rows(client, batch.output_file_id)) < 900
    wait_for(keeping.is_idle)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(name)


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "no lines"), (lines(1) * 2, "same custom_id"), (b"\n\n", "no lines")],
)
def test_b79_a_file_that_cannot_be_run_fails_the_batch(data: bytes, words: str, keeping: Rig):
    client = keeping.client()
    batch = ended(client, begin(client, data))
    if batch.status == "failed":
        assert batch.errors is not None
        message = batch.errors.data[0].message
        assert message is not None and words in message and "/" not in message
    else:
        assert not data.strip() and batch.request_counts.total == 0


def test_interactive_requests_find_a_seat_beside_a_batch(keeping: Rig):
    client = keeping.client()
    name = begin(client, lines(600, max_tokens=200, ignore_eos=True))
    wait_for(lambda: client.batches.retrieve(name).request_counts.completed > 0, 30)
    began = time.monotonic()
    assert keeping.canary()
    assert time.monotonic() - began < 1
    client.batches.cancel(name)
    ended(client, name)
    wait_for(keeping.is_idle)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"input_file_id": "file-0", "endpoint": URL, "completion_window": "24h"}, 400),
        ({"input_file_id": "../../etc", "endpoint": URL, "completion_window": "24h"}, 400),
        ({"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"}, 400),
        ({"input_file_id": "f", "endpoint": URL, "completion_window": "1h"}, 400),
        ({"input_file_id": "f", "endpoint": URL, "completion_window": "24h", "x": 1}, 400),
    ],
)
def test_batches_that_are_refused(body: Any, status: int, keeping: Rig):
    answer = keeping.post("/v1/batches", json=body)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_uploads_that_are_refused(keeping: Rig):
    big = {"file": ("a", b"x" * 300_000)}
    assert keeping.post("/v1/files", files=big, data={"purpose": "batch"}).status_code == 413
    small = {"file": ("a", b"x")}
    assert keeping.post("/v1/files", files=small, data={"purpose": "assistants"}).status_code == 400
    assert keeping.post("/v1/files", data={"purpose": "batch"}).status_code == 400
    assert keeping.post("/v1/files", content=b"no form").status_code == 400
    for name in ("..", "%2e%2e%2fkeys", "file-" + "0" * 24):
        assert keeping.get(f"/v1/files/{name}/content").status_code == 404
    for query in ("limit=0", "limit=x", "after=nothing"):
        assert keeping.get(f"/v1/files?{query}").status_code == 400


def test_a_batch_survives_kill_9_of_the_server(tmp_path: Path):
    """Every line ends exactly once, with the text it has in an undisturbed batch."""
    from tests.cli import fakes

    fakes.byte_tokenizer().save(tmp_path)
    options = ("--files", str(tmp_path / "files"), "--set", "scheduler.max_seqs=8")
    data = lines(300, max_tokens=20)
    with serving(tmp_path, *options, code=FAKE) as served:
        wait_for(lambda: ready(served), 60)
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        name = begin(client, data)
        wait_for(lambda: client.batches.retrieve(name).request_counts.completed > 20, 30)
        os.kill(served.process.pid, signal.SIGKILL)
        client.close()
    with serving(tmp_path, *options, code=FAKE) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        assert client.batches.retrieve(name).status == "in_progress"  # it waits for the engine
        batch = ended(client, name)
        assert (batch.status, batch.request_counts.completed) == ("completed", 300)
        texts = client.files.content(batch.output_file_id).text.splitlines()
        assert len({json.loads(line)["custom_id"] for line in texts}) == len(texts) == 300
        for line in texts[::30]:
            row = json.loads(line)
            i = int(row["custom_id"][3:])
            body = {"prompt": f"{i}", "temperature": 1, "seed": i, "max_tokens": 20}
            answer = httpx.post(f"{served.url}{URL}", json=body).json()
            assert row["response"]["body"]["choices"] == answer["choices"]
        client.close()


def test_a_batch_is_never_of_two_models(tmp_path: Path):
    """Another model or other settings do not go on with it; what is finished is kept."""
    folder, files = tmp_path / "m", tmp_path / "m" / "files"
    with running(folder, files=files) as rig:
        client = rig.client()
        whole = ended(client, begin(client, lines(3)))
        part = begin(client, lines(900, max_tokens=100, ignore_eos=True))
        wait_for(lambda: client.batches.retrieve(part).request_counts.completed > 5, 30)
    results = files / "batches" / part / "results.jsonl"
    finished = [strict(line) for line in results.read_text().splitlines()]
    results.write_bytes(results.read_bytes() + b'{"custom_id": "to')  # torn by a crash
    unfinish(files / "batches" / whole.id / "batch.json")
    (folder / "model.safetensors").write_bytes(b"other weights")
    with running(folder, files=files, sampling={"seed": 7}) as rig:
        client = rig.client()
        assert ended(client, whole.id).status == "completed", "it has nothing left to run"
        batch = ended(client, part)
        assert batch.status == "failed" and batch.failed_at and batch.errors is not None
        (error,) = batch.errors.data
        assert error.code == "settings_changed" and error.message is not None
        assert "weights was" in error.message
        assert "sampling.seed was 0 and is 7" in error.message and "/" not in error.message
        assert list(rows(client, batch.output_file_id).values()) == finished
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (900, len(finished), 0)
        assert ended(client, begin(client, lines(2))).status == "completed", "others go on"


def unfinish(record: Path) -> None:
    """As a crash leaves a batch whose last line is written."""
    left = json.loads(record.read_text()) | {"status": "in_progress", "output_file_id": None}
    record.write_text(json.dumps(left))


def test_two_servers_cannot_share_a_folder(keeping: Rig, tmp_path: Path):
    from jaxserve.offline.errors import InputError
    from jaxserve.server.files_batches import FilesAndBatches

    folder = keeping.server._files
    assert folder is not None
    with pytest.raises(InputError, match="another process"):
        FilesAndBatches(keeping.service, Path(folder._files._folder).parent)
