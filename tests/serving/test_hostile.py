"""Requests that are wrong, slow or too large get an error with the reason, and others go on."""

import asyncio
import json
import random
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fairseq_deep.serving.app import DRAINED, HELD, make_app  # noqa: E402
from fairseq_deep.serving.messages import FORM, JSON, Limits  # noqa: E402
from tests.helpers.serving import EN, GOOD, Fake, FakeModel, service_of  # noqa: E402

BAD = {
    "invalid JSON": (b'{"q": ', JSON, 400, "not valid JSON"),
    "not UTF-8": (b'{"q": "\xff"}', JSON, 400, "must be UTF-8"),
    "deep nesting": (b"[" * 100_000, JSON, 400, "levels deep"),
    "a list": (b"[]", JSON, 400, "must be a JSON object"),
    "no type": (json.dumps(GOOD).encode(), "", 415, "Content-Type must be"),
    "another type": (b"q", "text/plain", 415, "Content-Type must be"),
    "a part without a name": (b"--x\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x", 400, "a part has no name"),
    "a form without an end": (b"--x\r\n\r\n1", "multipart/form-data; boundary=x", 400, "not a form with a boundary"),
    "many parts": (b"--x\r\n" * 3000, "multipart/form-data; boundary=x", 400, "at most 1,000 parts"),
    "a form that is not UTF-8": (b"q=%ff&source=en&target=de", FORM, 400, "must be UTF-8"),
    "a form with many fields": (b"a=1&" * 2000, FORM, 400, "body cannot be read"),
    "a form with a word for a number": (b"q=a&source=en&target=de&alternatives=two", FORM, 400, "is 'two', not a"),
    "no q": ({"q": None}, JSON, 400, "q is None, not a string or a list"),
    "q is a number": ({"q": 3}, JSON, 400, "q is 3, not a string or a list of strings"),
    "q has a number": ({"q": ["a", 3]}, JSON, 400, "q is a list, not a string or a list of strings"),
    "no source": ({"source": ...}, JSON, 400, "source is missing"),
    "source is a list": ({"source": ["en"]}, JSON, 400, "source is a list, not the code of a language"),
    "auto": ({"source": "auto"}, JSON, 400, "languages are not detected; choose from de, en"),
    "unknown source": ({"source": "xx\x1b"}, JSON, 400, r"'xx\x1b' is not supported; choose from de, en"),
    "unknown target": ({"target": "en"}, JSON, 400, "not supported from en; choose from de"),
    "html": ({"format": "html"}, JSON, 400, "format is 'html', not text or null"),
    "alternatives is negative": ({"alternatives": -1}, JSON, 400, "is -1, not a whole number from 0 to 100"),
    "alternatives is true": ({"alternatives": True}, JSON, 400, "alternatives is True, not a whole number"),
    "alternatives is a string": ({"alternatives": "1"}, JSON, 400, "alternatives is '1', not a whole number"),
    "too many characters": ({"q": ["x" * 5001] * 2}, JSON, 400, "10,002 characters, more than 10,000"),
    "too many texts": ({"q": [""] * 201}, JSON, 400, "201 texts or lines, more than 200"),
    "a million lines": ({"q": "\n" * 1_000_000}, JSON, 413, "more than 1,048,576 bytes"),
    "a huge body": (b"x" * (3 << 20), JSON, 413, "more than 1,048,576 bytes"),
    "too many tokens": ({"q": ["w1", f"w2\n{'w3 ' * 40}"]}, JSON, 400, "text 2, line 2 has more tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_the_reason(client, name):
    body, kind, status, reason = BAD[name]
    if isinstance(body, dict):
        body = json.dumps({key: value for key, value in {**GOOD, **body}.items() if value is not ...}).encode()
    answer = client.post("/translate", content=body, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == status and set(answer.json()) == {"error"}
    assert reason in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/translate", 405), ("POST", "/languages", 405), ("GET", "/detect", 404), ("GET", "/../etc/passwd", 404),
    ("BREW", "/", 405), ("GET", "/" + "x" * 5000, 404),
])  # fmt: skip
def test_other_routes_and_methods(client, method, path, status):
    answer = client.request(method, path)
    assert answer.status_code == status and set(answer.json()) == {"error"}


def test_random_bytes_never_get_an_internal_error(client):
    rng = random.Random(3)
    good = json.dumps({**GOOD, "alternatives": 1}).encode()
    for _ in range(300):
        body = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        kind = rng.choice((JSON, FORM))
        assert client.post("/translate", content=bytes(body), headers={"Content-Type": kind}).status_code in (200, 400)


def called(app, messages, headers=()):
    """Messages that *app* sends for a request whose body comes as *messages*: parts, seconds of waiting, or None."""
    sent, rest = [], iter(messages)

    async def receive():
        for part in rest:
            if isinstance(part, float):
                await asyncio.sleep(part)
            elif part is None:
                return {"type": "http.disconnect"}
            else:
                return {"type": "http.request", "body": part, "more_body": True}
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/translate", "raw_path": b"", "query_string": b"",
             "headers": [(b"content-type", JSON.encode()), *headers], "http_version": "1.1"}  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return sent[0]["status"], dict(sent[0]["headers"])


def test_slow_large_and_broken_bodies(capsys):
    service = service_of([FakeModel(Fake(), EN)], Limits(body_timeout=0.2))
    app = make_app(service)
    assert called(app, [b'{"q"', 5.0])[0] == 408
    assert called(app, [b'{"q"', None])[0] == 499
    assert called(app, [b"x" * 100_000] * 30 + [5.0])[0] == 413  # and not at its end
    status, headers = called(app, [b"x" * (8 << 20)] * 20)  # without an end
    assert status == 413 and headers[b"connection"] == b"close"
    for length in (b"9" * 30, b"%d" % (DRAINED + 1)):
        assert called(app, [], [(b"content-length", length)])[0] == 413  # nothing is read
    assert called(app, [], [(b"content-length", b"2000000"), (b"expect", b"100-continue")])[0] == 413
    assert all(json.loads(line)["reason"] for line in capsys.readouterr().err.splitlines())


def test_bodies_together_are_bounded():
    service = service_of([FakeModel(Fake(), EN)], Limits(body_timeout=0.2))
    service.held = HELD - 1000
    assert called(make_app(service), [b"x" * 2000, 5.0])[0] == 503
    assert called(make_app(service), [b"x" * 500, 5.0])[0] == 408
    assert service.held == HELD - 1000


def test_a_client_that_leaves_takes_its_request_along(capsys):
    fake = Fake()
    service = service_of([FakeModel(fake, EN)])
    fake.ready.clear()
    service.batcher.start()
    running = service.batcher.submit(EN, ["a"])
    while service.batcher.waiting:
        time.sleep(0.001)
    body = json.dumps({**GOOD, "q": "gone"}).encode()
    status = called(make_app(service), [body, 0.2, None], [(b"content-length", str(len(body)).encode())])[0]
    assert status == 499 and service.batcher.waiting == 0
    fake.ready.set()
    assert running.result(30)
    service.batcher.close()
    assert fake.batches == [["a"]] and json.loads(capsys.readouterr().err)["reason"] == "the client has left"
