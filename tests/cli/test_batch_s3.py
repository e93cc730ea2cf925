"""A job from and to an S3 service: moto's, on this machine, where it and s3fs are installed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.test_batch_resume import SEEDED, interrupt_after, texts

pytestmark = pytest.mark.slow


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the service; `s3://bucket` is there, and empty."""
    server = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    service = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    service.start()
    host, port = service.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3fs.S3FileSystem.clear_instance_cache()
    client = s3fs.S3FileSystem()
    client.mkdir("bucket")
    yield client
    s3fs.S3FileSystem.clear_instance_cache()
    service.stop()


def test_a_job_in_s3_is_interrupted_goes_on_and_ends_exactly_once(
    s3: Any, jaxserve: Any, monkeypatch: pytest.MonkeyPatch
):
    def run(output: str) -> Any:
        command = ("batch", "s3://bucket/in-*.jsonl", "--output", f"s3://bucket/{output}")
        return jaxserve(*command, "--roll-size", 4000, "--sync-interval", 0)

    def results(output: str) -> list[dict[str, Any]]:
        s3.invalidate_cache()
        parts = sorted(s3.glob(f"bucket/{output.removesuffix('.jsonl')}-*.jsonl"))
        assert len(parts) > 1
        return [json.loads(line) for part in parts for line in s3.cat_file(part).splitlines()]

    for shard in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in SEEDED[shard::2])
        s3.pipe_file(f"bucket/in-{shard}.jsonl", lines.encode())
    ran = run("whole.jsonl")
    assert ran.code == 0, ran.err
    undisturbed = texts(results("whole.jsonl"))
    assert len(undisturbed) == len(SEEDED)
    interrupt_after(monkeypatch, 25)
    assert run("out.jsonl").code == 75
    ran = run("out.jsonl")
    assert ran.code == 0 and "going on: " in ran.err
    assert texts(results("out.jsonl")) == undisturbed
    assert run("out.jsonl").code == 0, "nothing is left"
    names = {path.rsplit("/", 1)[1] for path in s3.ls("bucket/out.jsonl.journal", detail=False)}
    assert "lease.json" not in names
