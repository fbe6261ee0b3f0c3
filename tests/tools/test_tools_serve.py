"""``fairseq-deep serve`` as a process: a client of LibreTranslate's API, signals, hostile connections, bad input."""

import asyncio
import json
import signal
import socket
import sys
import time
import urllib.error

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fairseq_deep.runtime import Translator  # noqa: E402
from tests.helpers.serving import ServerProcess, http, parsed, random_lines, write_package  # noqa: E402

HEAD = 3.0  # seconds for the head of a request: 300 clients of a loaded machine need some of them


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    return [write_package(folder / "there", "en", "de", 1), write_package(folder / "back", "de", "en", 2)]


@pytest.fixture(scope="module")
def served(packages):
    with ServerProcess(*packages, head=HEAD) as server:
        yield server
        assert server.stop(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def expected(packages):
    """Lines, and their best translations by the first model."""
    lines = random_lines(300)
    return lines, Translator(str(packages[0]), cpu=True).translate(lines)


async def exchange(address, request):
    """The bytes that the server answers to *request*, in a connection of its own."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


def fields(line):
    return {"q": line, "source": "en", "target": "de"}


def test_a_client_of_libretranslate(served, expected):
    client = pytest.importorskip("libretranslatepy").LibreTranslateAPI(served.url)
    lines, found = expected
    assert [client.translate(line, "en", "de", timeout=30) for line in lines[:5]] == found[:5]
    assert [(each["code"], each["targets"]) for each in client.languages()] == [("de", ["en"]), ("en", ["de"])]
    for source, reason in (("auto", "languages are not detected"), ("fr", "'fr' is not supported")):
        with pytest.raises(urllib.error.HTTPError) as error:
            client.translate("w1", source, "de")
        assert error.value.code == 400 and reason in json.load(error.value)["error"]


def talk(address, *parts, timeout=20):
    """What the server answers to raw *parts*; numbers are seconds of waiting between them."""
    with socket.create_connection(address, timeout) as connection:
        for part in parts:
            if isinstance(part, float):
                time.sleep(part)
                continue
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):  # the server has closed it
                break
        answer = b""
        try:
            while chunk := connection.recv(1 << 16):
                answer += chunk
        except ConnectionResetError:
            pass
    return answer


POST = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE, CHUNKED = POST + b"Content-Length: 30000000\r\n\r\n", POST + b"Transfer-Encoding: chunked\r\n\r\n"


def test_hostile_connections(served):
    """The server answers others meanwhile and afterwards."""
    address = served.address
    slow = [socket.create_connection(address) for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST /translate HTTP/1.1\r\nHo")
    assert parsed(talk(address, http(fields("w1"))))[0] == 200
    assert talk(address, b"\x00\xff\x16\x03 nothing\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert talk(address, b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000).startswith(b"HTTP/1.1 4")
    assert talk(address, LARGE, *[b" " * 1_000_000] * 30).startswith(b"HTTP/1.1 413")
    parts = [b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"] * 3
    assert talk(address, CHUNKED, *parts, b"0\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert talk(address, CHUNKED, b"zz\r\n").startswith(b"HTTP/1.1 400")
    assert talk(address, LARGE.replace(b"30000000", b"9" * 40)).startswith(b"HTTP/1.1 4")
    talk(address, http({"q": "w1" * 10_000_000}), timeout=30)
    for connection in slow:  # they send on, byte by byte, and are closed all the same
        connection.settimeout(10)
        assert connection.recv(10) == b""
        connection.close()
    begun = time.monotonic()
    assert talk(address, b"GET /heal", 0.3, b"th HT", 0.3, b"TP", 0.3, b"/") == b"" and time.monotonic() - begun < 10
    assert parsed(talk(address, http(fields("w1"))))[0] == 200
    assert not [event for event in served.events if "line" in event or event.get("level") == "error"]


def test_sigterm_lets_accepted_requests_finish(packages, expected):
    lines, found = (each[:200] for each in expected)

    async def run(server):
        """All requests arrive within the window as a rule, and the signal comes before any is answered."""
        asked = [asyncio.ensure_future(exchange(server.address, http(fields(line)))) for line in lines]
        arrived = b""
        while b"queue_lines 200.0\n" not in arrived and b"lines_total{" not in arrived:
            await asyncio.sleep(0.05)
            arrived = await exchange(server.address, b"GET /metrics HTTP/1.0\r\n\r\n")
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*asked)

    with ServerProcess(packages[0], "--window", 2500, "--batch-size", 400) as server:
        answers = asyncio.run(run(server))
        assert [parsed(answer) for answer in answers] == [(200, {"translatedText": text}) for text in found]
        assert server.stop(0) == 0
        names = [event["event"] for event in server.events if event["event"] != "request"]
        assert names == ["ready", "stopping", "stopped"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)


def test_a_second_signal_stops_at_once(packages):
    with ServerProcess(packages[0], "--window", 60_000) as server, socket.create_connection(server.address) as client:
        client.sendall(http(fields("w1")))
        while b"queue_lines 1.0\n" not in talk(server.address, b"GET /metrics HTTP/1.0\r\n\r\n"):
            time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        while server.events[-1]["event"] != "stopping":
            time.sleep(0.05)
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        assert [event["at_once"] for event in server.events if event["event"] == "stopping"] == [False, True]


def test_a_port_in_use(packages, refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        line = refused("serve", packages[0], "--port", other.getsockname()[1])
    assert "cannot listen on 127.0.0.1:" in line and "address already in use; choose another --host or --port" in line


@pytest.mark.parametrize("name", ["prometheus_client", "starlette", "uvicorn"])
def test_a_missing_package_is_one_line(name, refused, monkeypatch):
    for module in [*sys.modules]:
        if module.startswith("fairseq_deep.serving"):
            monkeypatch.delitem(sys.modules, module)
        elif module.partition(".")[0] == name:
            monkeypatch.setitem(sys.modules, module, None)
    line = refused("serve", "no-model")
    assert f"{name} is not installed (" in line and "); pip install prometheus-client starlette uvicorn" in line
