"""``fairseq-deep serve`` as a process: a client of LibreTranslate's API, signals, hostile connections, bad input."""

import contextlib
import json
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fairseq_deep.runtime import Translator  # noqa: E402
from tests.helpers.processes import until  # noqa: E402
from tests.serving import GOOD, ServerProcess  # noqa: E402


def post(url, line):
    """The translation of *line* by the server at *url*."""
    body, headers = json.dumps({**GOOD, "q": line}).encode(), {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/translate", body, headers), timeout=60) as answer:
        return json.load(answer)["translatedText"]


@pytest.fixture(scope="module")
def expected(packages, lines):
    """Lines, and their best translations by the first model."""
    return lines, Translator(str(packages[0]), cpu=True).translate(lines)


def test_a_client_of_libretranslate(served, expected):
    client = pytest.importorskip("libretranslatepy").LibreTranslateAPI(served.url)
    lines, found = expected
    assert [client.translate(line, "en", "de", timeout=30) for line in lines[:5]] == found[:5]
    assert [(each["code"], each["targets"]) for each in client.languages()] == [("de", ["en"]), ("en", ["de"])]


def talk(address, *parts):
    """What the server answers to raw *parts*; numbers are seconds of waiting between them."""
    with socket.create_connection(address, 20) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server may close it before the end
            for part in parts:
                time.sleep(part) if isinstance(part, float) else connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 16):
                answer += chunk
    return answer


POST = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE, CHUNKED = POST + b"Content-Length: 30000000\r\n\r\n", POST + b"Transfer-Encoding: chunked\r\n\r\n"


def test_hostile_connections(served):
    """The server answers others meanwhile and afterwards."""
    address = served.address
    slow = [socket.create_connection(address) for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST /translate HTTP/1.1\r\nHo")
    assert post(served.url, "w1")
    assert talk(address, b"\x00\xff\x16\x03 nothing\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert talk(address, b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 200_000).startswith(b"HTTP/1.1 4")
    assert talk(address, LARGE, *[b" " * 1_000_000] * 30).startswith(b"HTTP/1.1 413")
    parts = [b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"] * 3
    assert talk(address, CHUNKED, *parts, b"0\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert talk(address, CHUNKED, b"zz\r\n").startswith(b"HTTP/1.1 400")
    assert talk(address, LARGE.replace(b"30000000", b"9" * 40)).startswith(b"HTTP/1.1 4")
    for connection in slow:  # they send on, byte by byte, and are closed all the same
        connection.settimeout(30)
        assert connection.recv(10) == b""
        connection.close()
    assert talk(address, b"GET /heal", 0.3, b"th HT", 0.3, b"TP", 0.3, b"/") == b""
    assert post(served.url, "w1")
    assert not [event for event in served.events if "line" in event or event.get("level") == "error"]


def wait_for(server, *samples):
    """Until the metrics have one of these."""
    until(lambda: any(sample in urlopen(f"{server.url}/metrics").read() for sample in samples))


def test_sigterm_lets_accepted_requests_finish(packages, expected):
    """All requests arrive within the window as a rule, and the signal comes before any is answered."""
    lines, found = (each[:200] for each in expected)
    with ServerProcess(packages[0], "--window", 2500, "--batch-size", 400) as server, ThreadPoolExecutor(200) as pool:
        answers = pool.map(lambda line: post(server.url, line), lines)
        wait_for(server, b"queue_lines 200.0\n", b"lines_total{")
        server.process.send_signal(signal.SIGTERM)
        assert list(answers) == found
        assert server.stop(0) == 0
        names = [event["event"] for event in server.events if event["event"] != "request"]
        assert names == ["ready", "stopping", "stopped"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)


def test_requests_that_wait(packages):
    """A slow body is refused, a client that leaves takes its request along, and a second signal stops at once."""
    with ServerProcess(packages[0], "--window", 60_000) as server, ThreadPoolExecutor() as pool:
        body = b'{"q": "w1", "source": "en", "target": "de"}'
        whole = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        assert talk(server.address, whole[:-1]).startswith(b"HTTP/1.1 408")
        with socket.create_connection(server.address) as client:
            client.sendall(whole)
            wait_for(server, b"queue_lines 1.0\n")
        wait_for(server, b"queue_lines 0.0\n")
        pool.submit(post, server.url, "w1")
        wait_for(server, b"queue_lines 1.0\n")
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.events[-1]["event"] == "stopping")
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        assert [event["at_once"] for event in server.events if event["event"] == "stopping"] == [False, True]
        assert any(event.get("reason") == "the client has left" for event in server.events)


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
