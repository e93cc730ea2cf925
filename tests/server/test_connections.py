"""Bounds of connections, headers and bodies; keys."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from jaxserve.server import keys
from jaxserve.server.serve import is_loopback
from tests.server.rig import Rig, read_all, running, wait_for

TEXT = "/v1/completions"
LIMITS = {
    "idle_s": 0.5, "max_body_bytes": 2000, "max_header_bytes": 1000, "max_connections": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A server with small limits that asks for keys."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "keys").write_text("# of the tests\nfirst-key\n\nsecond-key\n")
    with running(folder / "m", keys=keys.read(folder / "keys"), server=LIMITS) as rig:
        yield rig


AUTH = {"authorization": "Bearer first-key"}


def open_to(server: Rig) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    return connection


def test_keys(small: Rig):
    for header in ({}, {"authorization": "Bearer first-ke"}, {"authorization": "Basic first-key"}):
        answer = small.post(TEXT, json={"prompt": "a"}, headers=header)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert small.get("/v1/models", headers=header).status_code == 401
    assert small.get("/health").status_code == small.get("/ready").status_code == 200
    for key in ("first-key", "second-key"):
        assert small.client(api_key=key).models.list().data
    with pytest.raises(openai.AuthenticationError):
        small.client(api_key="wrong").models.list()


@pytest.mark.parametrize("content", ["", "# only\n\n", "two words\n", "schlüssel\n"])
def test_a_file_without_a_usable_key_is_refused(content: str, tmp_path: Path):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ValueError, match="keys"):
        keys.read(tmp_path / "keys")


def test_a_body_that_is_too_long_is_413(small: Rig):
    body = {"prompt": "x" * 3000}
    assert small.post(TEXT, json=body, headers=AUTH).status_code == 413
    chunks = (b"x" * 500 for _ in range(10))  # no length is declared
    assert small.post(TEXT, content=chunks, headers=AUTH).status_code == 413


def test_a_client_that_goes_on_sending_reads_its_refusal(small: Rig):
    """Also when its bytes come after the answer, which a reset would overtake."""
    with open_to(small) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first-key\r\n"
            b"content-length: 9000000\r\n\r\n"
        )
        for _ in range(10):
            connection.sendall(b"x" * 50_000)
            time.sleep(0.01)
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 413") and b"connection: close" in answer
    wait_for(lambda: len(small.server.server_state.connections) <= 1)  # nobody lingers for good


def test_a_body_that_does_not_go_on_is_408(small: Rig):
    with open_to(small) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first-key\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"y" * 5000, b"\r\n".join(b"x%d: y" % i for i in range(101)), b"x" * 3000 + b": y"],
    ids=["long", "many", "name"],
)
def test_cve_2025_48956_headers_are_bounded(headers: bytes, small: Rig):
    with open_to(small) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 431")


def test_cve_2025_48956_headers_without_an_end_are_cut_off(small: Rig):
    with open_to(small) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        answer = b""
        try:
            for _ in range(1000):
                connection.sendall(b"y" * 100)
                time.sleep(0.0005)
            answer = connection.recv(1000)
        except ConnectionError:
            answer = answer or b"cut"
        assert answer.startswith((b"HTTP/1.1 431", b"cut"))


def test_slow_loris_connections_are_closed(small: Rig):
    """One says nothing, one a byte now and then, one is idle after an answer."""
    silent, slow, idle = open_to(small), open_to(small), open_to(small)
    idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert read_all(idle, until=b"}").startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    closed = False
    while not closed and time.monotonic() - began < 5:
        try:
            slow.sendall(b"G" if time.monotonic() - began < 0.1 else b"E")
            time.sleep(0.1)
        except ConnectionError:
            closed = True
    assert closed
    assert silent.recv(10) == b""
    assert idle.recv(10) == b""
    for connection in (silent, slow, idle):
        connection.close()


def test_connections_are_bounded(small: Rig):
    wait_for(lambda: not small.server.server_state.connections)
    held = [open_to(small) for _ in range(20)]
    try:
        with open_to(small) as one_more:
            answer = read_all(one_more)
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
    finally:
        for connection in held:
            connection.close()
    wait_for(lambda: not small.server.server_state.connections)
    assert small.get("/health").status_code == 200


def test_what_is_no_http_is_400(small: Rig):
    with open_to(small) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_two_requests_in_one_packet(small: Rig):
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with open_to(small) as connection:
        connection.sendall(request * 3)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3:
            more = connection.recv(1000)
            assert more
            data += more


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_who_is_warned(host: str, expected: bool):
    assert is_loopback(host) is expected
