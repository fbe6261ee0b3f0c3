"""Requests that are wrong or too large get an error with the reason, and others go on.

tests/serving/test_process.py has slow requests, and connections that are no requests.
"""

import json
import random

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient  # noqa: E402

from fairseq_deep.serving.app import DRAINED, HELD, make_app  # noqa: E402
from fairseq_deep.serving.messages import FORM, JSON  # noqa: E402
from tests.serving import GOOD, Fake, service_of  # noqa: E402

BAD = {
    "invalid JSON": (b'{"q": ', JSON, 400, "not valid JSON"),
    "not UTF-8": (b'{"q": "\xff"}', JSON, 400, "must be UTF-8"),
    "deep nesting": (b"[" * 100_000, JSON, 400, "levels deep"),
    "a list": (b"[]", JSON, 400, "must be a JSON object"),
    "no type": (json.dumps(GOOD).encode(), "", 415, "Content-Type must be"),
    "a part without a name": (b"--x\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x", 400, "a part has no name"),
    "a form without an end": (b"--x\r\n\r\n1", "multipart/form-data; boundary=x", 400, "not a form with a boundary"),
    "many parts": (b"--x\r\n" * 3000, "multipart/form-data; boundary=x", 400, "at most 1,000 parts"),
    "a form that is not UTF-8": (b"q=%ff&source=en&target=de", FORM, 400, "must be UTF-8"),
    "a form with many fields": (b"a=1&" * 2000, FORM, 400, "body cannot be read"),
    "a form with a word for a number": (b"q=a&source=en&target=de&alternatives=two", FORM, 400, "is 'two', not a"),
    "no q": ({"q": None}, JSON, 400, "q is None, not a string or a list"),
    "q has a number": ({"q": ["a", 3]}, JSON, 400, "q is a list, not a string or a list of strings"),
    "no source": ({"source": ...}, JSON, 400, "source is missing"),
    "auto": ({"source": "auto"}, JSON, 400, "languages are not detected; choose from de, en"),
    "unknown source": ({"source": "xx\x1b"}, JSON, 400, r"'xx\x1b' is not supported; choose from de, en"),
    "unknown target": ({"target": "en"}, JSON, 400, "not supported from en; choose from de"),
    "html": ({"format": "html"}, JSON, 400, "format is 'html', not text or null"),
    "alternatives is true": ({"alternatives": True}, JSON, 400, "alternatives is True, not a whole number"),
    "too many characters": ({"q": ["x" * 5001] * 2}, JSON, 400, "10,002 characters, more than 10,000"),
    "too many texts": ({"q": [""] * 201}, JSON, 400, "201 texts or lines, more than 200"),
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


@pytest.mark.parametrize("headers", [
    {"Content-Length": "9" * 30}, {"Content-Length": str(DRAINED + 1)},
    {"Content-Length": "2000000", "Expect": "100-continue"},
], ids=str)  # fmt: skip
def test_a_body_that_is_announced_as_too_large_is_not_read(client, headers):
    assert client.post("/translate", content=b"x", headers=headers).status_code == 413


def test_bodies_together_are_bounded():
    service = service_of([Fake()])
    service.held = HELD - 1000
    with TestClient(make_app(service)) as own:
        assert own.post("/translate", json={**GOOD, "q": "w1" * 1000}).status_code == 503
        assert own.post("/translate", content=b"x" * (3 << 20)).status_code == 413
        assert own.post("/translate", json=GOOD).status_code == 200
    assert service.held == HELD - 1000
