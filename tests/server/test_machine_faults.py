"""What disks and networks do to a server."""

import errno
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from jaxserve.offline.storage import Os
from jaxserve.server import batch_runner
from tests.server.rig import Rig, running, wait_for
from tests.server.test_faults import LONG, connect

TEXT = "/v1/completions"


def refuses(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_no_file_no_batch_and_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_runner, "SYNC_SECONDS", 0.1)
    folder = tmp_path / "files"
    row = {"custom_id": "a", "method": "POST", "url": TEXT, "body": {"prompt": "x", "seed": 1}}
    with running(tmp_path / "m", files=folder) as server, server.client() as client:
        before = server.canary()

        def upload() -> Any:
            data = {"file": ("in.jsonl", io.BytesIO(json.dumps(row).encode()))}
            return server.post("/v1/files", files=data, data={"purpose": "batch"})

        kept = upload().json()["id"]
        here = sorted(folder.rglob("*"))
        asked = {"input_file_id": kept, "endpoint": TEXT, "completion_window": "24h"}
        with monkeypatch.context() as full:
            full.setattr(Os, "pwrite", staticmethod(refuses))
            for answer in (upload(), server.post("/v1/batches", json=asked)):
                assert answer.status_code == 507
                assert answer.json()["error"]["code"] == "not_kept"
                assert "No space left on device" in answer.text
            assert server.get("/v1/batches").json()["data"] == []
            assert sorted(folder.rglob("*")) == here
            assert server.canary() == before
        tries = 0

        def refuses_results(file: int, data: bytes, place: int) -> int:
            nonlocal tries
            if tries < 3 and os.readlink(f"/proc/self/fd/{file}").endswith("results.jsonl"):
                tries += 1
                refuses()
            return os.pwrite(file, data, place)

        monkeypatch.setattr(Os, "pwrite", staticmethod(refuses_results))
        batch = server.post("/v1/batches", json=asked).json()["id"]
        wait_for(lambda: client.batches.retrieve(batch).status == "completed")
        assert tries == 3
        results = client.batches.retrieve(batch).output_file_id
        assert results is not None and client.files.content(results).read().count(b"\n") == 1


def test_a_client_that_closed_its_side_is_gone(slow_server: Rig):
    connection = connect(slow_server, LONG | {"stream": True})
    connection.recv(200)
    began = slow_server.engine.num_steps
    connection.shutdown(socket.SHUT_WR)
    wait_for(slow_server.is_idle)
    assert slow_server.engine.num_steps - began < 120  # of 240
    connection.close()


def test_half_open_connections_are_asked_whether_anybody_is_there(server: Rig):
    """The system does that; here is what it was told."""
    with connect(server, {"prompt": "a"}) as connection:
        connection.recv(200)
        ours = connection.getsockname()
        (theirs,) = (
            protocol.transport.get_extra_info("socket")  # type: ignore[attr-defined]
            for protocol in server.server.server_state.connections
            if protocol.client == ours  # type: ignore[attr-defined]
        )
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, between, count = (theirs.getsockopt(socket.IPPROTO_TCP, name) for name in options)
        assert idle + between * count <= 120
