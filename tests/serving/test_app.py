"""The routes in this process: answers are the translator's, and hostile requests get an error while others go on."""

import asyncio
import json
import random
import re
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from starlette.testclient import TestClient  # noqa: E402

from fairseq_deep.errors import UsageError  # noqa: E402
from fairseq_deep.runtime import Translator, find_bundle, load_model  # noqa: E402
from fairseq_deep.serving.app import DRAINED, HELD, make_app  # noqa: E402
from fairseq_deep.serving.batching import Batcher, Pair  # noqa: E402
from fairseq_deep.serving.messages import Limits  # noqa: E402
from fairseq_deep.serving.service import Keys, ServedModel, Service, check_pairs, read_keys  # noqa: E402
from tests.helpers.serving import Fake, FakeModel, random_lines, write_package  # noqa: E402

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
EN, DE = Pair("en", "de"), Pair("de", "en")


def service_of(models, limits=None, keys=(), **options):
    options = {"capacity": 1000, **options}
    batcher = Batcher({model.pair: model.translator for model in models}, **options)
    return Service(models, batcher, limits or Limits(), Keys(keys))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random models for both directions, in double precision: batches do not change their choices."""
    folder, found = tmp_path_factory.mktemp("models"), []
    for seed, (source, target) in enumerate((EN, DE)):
        path = str(write_package(folder / f"{source}{target}", source, target, seed))
        translator = Translator(path, cpu=True, nbest=3)
        for model in translator.models:
            model.double()
        found.append(ServedModel(translator, find_bundle(path)))
    return found


@pytest.fixture(scope="module")
def client(models):
    with TestClient(make_app(service_of(models))) as client:
        yield client


@pytest.fixture(scope="module")
def expected(models):
    """Lines, and their hypotheses by pair."""
    lines = random_lines(300)
    return lines, {model.pair: [[each.text for each in found] for found in model.translator.translate_nbest(lines)]
                   for model in models}  # fmt: skip


def ask(client, q, source="en", target="de", **more):
    answer = client.post("/translate", json={"q": q, "source": source, "target": target, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_and_a_list_in_json_and_in_a_form(client, expected):
    lines, found = expected
    best = [each[0] for each in found[EN]]
    assert len(set(best)) > 200
    assert ask(client, lines[0]) == {"translatedText": best[0]}
    assert ask(client, lines[:50]) == {"translatedText": best[:50]}
    assert ask(client, lines[0], "de", "en") == {"translatedText": found[DE][0][0]}
    form = {"q": lines[1], "source": "en", "target": "de", "format": "text", "alternatives": "0"}
    assert client.post("/translate", data=form).json() == {"translatedText": best[1]}
    assert client.post("/translate", data={**form, "q": lines[:3]}).json() == {"translatedText": best[:3]}


def test_lines_of_a_text_keep_their_places(client, expected):
    lines, found = expected
    best = [each[0] for each in found[EN]]
    assert ask(client, f"\n{lines[0]}\r\n\n  {lines[1]}  \n")["translatedText"] == f"\n{best[0]}\n\n{best[1]}\n"
    assert ask(client, "") == {"translatedText": ""} and ask(client, ["", " "]) == {"translatedText": ["", ""]}
    assert ask(client, [], alternatives=2) == {"translatedText": [], "alternatives": []}


def test_alternatives_are_the_next_hypotheses(client, expected):
    lines, found = expected
    for count in (1, 2, 9):  # the beam is 3
        answer = ask(client, lines[:20], alternatives=count)
        want = [list(dict.fromkeys(each)) for each in found[EN][:20]]
        assert answer["translatedText"] == [each[0] for each in want]
        assert answer["alternatives"] == [each[1 : count + 1] for each in want]
    first, second = found[EN][:2]
    joined = ask(client, f"{lines[0]}\n{lines[1]}", alternatives=1)
    assert joined["alternatives"] == [f"{first[1]}\n{second[1]}"]


def test_odd_characters_are_translated_like_the_translator_does(client, models):
    texts = ["w1 \x00 w2", "\x00", "\u2028w3\u2028", "\U0001f600 w4", "\ufeff", "w5\tw6", "<b>w7</b>", "\x1b[0m w1"]
    assert ask(client, texts)["translatedText"] == models[0].translator.translate(texts)


def test_information(client, models):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/languages").json() == [{"code": "de", "name": "German", "targets": ["en"]},
                                               {"code": "en", "name": "English", "targets": ["de"]}]  # fmt: skip
    found = client.get("/models").json()
    first = found["models"][0]
    assert (first["name"], first["beam"], first["vocabulary"]) == ("random en-de", 3, [200, 200])
    assert first["parameters"] == sum(each.numel() for each in load_model(models[0].bundle).model.parameters())
    assert first["layers"] == "2 + 2" and first["architecture"].startswith("transformer_prenorm")
    assert found["limits"] == {"characters": 10000, "lines": 200, "seconds": 60.0} and not found["key_required"]
    assert "/" not in json.dumps(found)  # no path of this machine


def test_a_language_without_a_model_from_it_has_no_targets():
    service = service_of([FakeModel(Fake(), Pair("en", "tlh"))])
    assert service.languages()[1] == {"code": "tlh", "name": "tlh", "targets": []}


def test_metrics_count(models):
    with TestClient(make_app(service_of(models))) as client:
        ask(client, ["w1", "w2 w3"])
        client.get("/nowhere"), client.get("/%0A%22"), client.post("/translate")
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    for route, status, count in (("/translate", 200, "1"), ("/translate", 415, "1"), ("other", 404, "2")):
        assert samples[f'fairseq_deep_requests_total{{route="{route}",status="{status}"}}'] == count
    assert samples['fairseq_deep_lines_total{source="en",target="de"}'] == "2"
    assert samples['fairseq_deep_batch_lines_bucket{le="1"}'] == "0"
    assert samples['fairseq_deep_batch_lines_bucket{le="2"}'] == samples["fairseq_deep_batch_lines_count"] == "1"
    assert samples['fairseq_deep_request_seconds_bucket{le="+Inf"}'] == "2"
    assert samples["fairseq_deep_queue_lines"] == "0" and float(samples["fairseq_deep_translation_seconds_total"]) > 0
    names = re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", answer.text, re.MULTILINE)
    assert len(names) == len(set(names)) == 7 and all(key.startswith(tuple(names)) for key in samples)


GOOD = {"q": "w1", "source": "en", "target": "de"}
BAD = {
    "no body": (b"", JSON, 400, "not valid JSON"),
    "invalid JSON": (b'{"q": ', JSON, 400, "not valid JSON"),
    "not UTF-8": (b'{"q": "\xff"}', JSON, 400, "must be UTF-8"),
    "half a surrogate pair": (b'{"q": "\\ud800", "source": "en", "target": "de"}', JSON, 400, "surrogate"),
    "a name twice": (b'{"q": "a", "q": "b"}', JSON, 400, "repeated"),
    "deep nesting": (b"[" * 100_000, JSON, 400, "levels deep"),
    "a huge number": (b'{"q": ' + b"9" * 10_000 + b"}", JSON, 400, "body cannot be read"),
    "a list": (b"[]", JSON, 400, "must be a JSON object, not a list"),
    "no type": (json.dumps(GOOD).encode(), "", 415, "Content-Type must be"),
    "another type": (b"--x\r\n\r\n--x--", "multipart/form-data; boundary=x", 415, "Content-Type must be"),
    "a form that is not UTF-8": (b"q=%ff&source=en&target=de", FORM, 400, "must be UTF-8"),
    "a form with many fields": (b"a=1&" * 2000, FORM, 400, "body cannot be read"),
    "a form with a word for a number": (b"q=a&source=en&target=de&alternatives=two", FORM, 400, "alternatives must"),
    "no q": ({"q": None}, JSON, 400, "q is missing"),
    "q is a number": ({"q": 3}, JSON, 400, "q must be a string or a list"),
    "q has a number": ({"q": ["a", 3]}, JSON, 400, "q must be a string or a list"),
    "q is an object": ({"q": {"a": 1}}, JSON, 400, "q must be a string or a list"),
    "no source": ({"source": ...}, JSON, 400, "source is missing"),
    "source is a list": ({"source": ["en"]}, JSON, 400, "source must be a string"),
    "auto": ({"source": "auto"}, JSON, 400, "languages are not detected; choose from de, en"),
    "unknown source": ({"source": "xx\x1b"}, JSON, 400, r"'xx\x1b' is not supported; choose from de, en"),
    "unknown target": ({"target": "en"}, JSON, 400, "not supported from en; choose from de"),
    "html": ({"format": "html"}, JSON, 400, "only 'text' is supported, not 'html'"),
    "format is a number": ({"format": 1}, JSON, 400, "only 'text' is supported, not a number"),
    "alternatives is true": ({"alternatives": True}, JSON, 400, "alternatives must be a whole number"),
    "alternatives is negative": ({"alternatives": -1}, JSON, 400, "alternatives must be a whole number"),
    "alternatives is a string": ({"alternatives": "1"}, JSON, 400, "alternatives must be a whole number"),
    "too many characters": ({"q": ["x" * 5001] * 2}, JSON, 400, "10,002 characters, more than 10,000"),
    "too many texts": ({"q": [""] * 201}, JSON, 400, "201 texts or lines, more than 200"),
    "a million lines": ({"q": "\n" * 1_000_000}, JSON, 413, "more than 1,048,576 bytes"),
    "many lines": ({"q": "\n" * 9_999}, JSON, 400, "10,000 texts or lines"),
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


def test_keys(models, tmp_path, capsys):
    (tmp_path / "keys").write_text("first-key\n\n  second-kéy  \n", encoding="utf-8")
    service = service_of(models)
    service.keys = read_keys(str(tmp_path / "keys"))
    with TestClient(make_app(service)) as client:
        for key in (None, "", "first", "first-key ", "third", 5, ["first-key"]):
            answer = client.post("/translate", json={**GOOD, "api_key": key})
            assert (answer.status_code, answer.json()) == (403, {"error": "api_key: invalid or missing API key"})
        assert client.post("/translate", json={"api_key": "wrong", "q": 3}).status_code == 403  # before all else
        for key in ("first-key", "second-kéy"):
            ask(client, "w1", api_key=key)
            assert client.post("/translate", data={**GOOD, "api_key": key}).status_code == 200
        assert client.get("/models").json()["key_required"] and client.get("/languages").status_code == 200
    logged = capsys.readouterr().err
    assert logged and not any(key in logged for key in ("first-key", "third", "kéy", "k\\u00e9y"))
    for content, reason in (("\n \n", "holds no key"), (b"\xff", "must be UTF-8")):
        (tmp_path / "keys").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UsageError, match=reason):
            read_keys(str(tmp_path / "keys"))
    with pytest.raises(UsageError, match=r"--api-key-file .*none: cannot be read \(No such file"):
        read_keys(str(tmp_path / "none"))


def test_the_log_has_one_json_line_per_request_without_texts_or_keys(client, capsys):
    capsys.readouterr()
    ask(client, "w1 w2\nw3", api_key="hush")
    client.post("/translate", json={**GOOD, "q": 1})
    client.get("/a\u2028%0Ab")
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time")) and first.pop("milliseconds") > 0
    assert first == {"event": "request", "method": "POST", "path": "/translate", "status": 200, "source": "en",
                     "target": "de", "lines": 2, "characters": 7}  # fmt: skip
    assert "w1" not in str(first) and "hush" not in str(first)
    assert second["reason"].startswith("q must be") and third["path"] == "/a\u2028\nb"


def test_a_full_queue_and_a_late_translation():
    fake = Fake()
    service = service_of([FakeModel(fake, EN)], Limits(lines=2, timeout=0.5), capacity=2)
    with TestClient(make_app(service)) as client:
        fake.ready.clear()
        first = service.batcher.submit(EN, ["a"])
        while service.batcher.waiting:
            time.sleep(0.001)
        others = [service.batcher.submit(EN, ["b"]) for _ in range(2)]
        full = client.post("/translate", json=GOOD)
        assert full.status_code == 429 and "the queue is full" in full.json()["error"]
        assert 1 <= int(full.headers["retry-after"]) <= 60
        others[0].cancel()
        late = client.post("/translate", json=GOOD)
        assert late.status_code == 503 and "not ready in time" in late.json()["error"]
        assert service.batcher.waiting == 1  # a late request has left the queue
        fake.ready.set()
        assert first.result(30) and others[1].result(30)
        assert ask(client, "back") == {"translatedText": "BACK"}


def test_a_failing_translation_is_an_internal_error_in_the_log(capsys):
    with TestClient(make_app(service_of([FakeModel(Fake(), EN)])), raise_server_exceptions=False) as client:
        answer = client.post("/translate", json={**GOOD, "q": "fail"})
        assert answer.status_code == 500 and answer.json()["error"].startswith("internal error")
        assert json.loads(capsys.readouterr().err.splitlines()[-1])["error"] == "RuntimeError: failed as asked"
        assert ask(client, "on") == {"translatedText": "ON"}


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
    assert called(app, [b"x" * 100_000] * 30 + [5.0])[0] == 408  # too large, and not at its end
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


def test_2000_concurrent_requests_get_their_own_answers(models, expected):
    """Both pairs, texts and lists, with and without alternatives."""
    lines, found = expected
    service, rng = service_of(models, capacity=20_000), random.Random(2)

    async def ask(client):
        pair, first, count = rng.choice((EN, DE)), rng.randrange(len(lines) - 3), rng.choice((0, 0, 0, 0, 1, 3))
        alternatives = rng.choice((0, 2))
        fields = {"q": lines[first : first + count] if count else lines[first], "source": pair.source,
                  "target": pair.target, "alternatives": alternatives}  # fmt: skip
        answer = (await client.post("/translate", json=fields)).json()
        want = [list(dict.fromkeys(each)) for each in found[pair][first : first + max(count, 1)]]
        best, others = [each[0] for each in want], [each[1:] for each in want]
        good = {"translatedText": best if count else best[0]}
        good.update({"alternatives": others if count else others[0]} if alternatives else {})
        return answer == good

    async def run():
        transport = httpx.ASGITransport(make_app(service))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client) for _ in range(2000)))

    service.batcher.start()
    results = asyncio.run(run())
    service.batcher.close()
    assert len(results) == 2000 and all(results)
    counted = dict(line.rsplit(" ", 1) for line in service.metrics.render().splitlines())
    assert counted['fairseq_deep_requests_total{route="/translate",status="200"}'] == "2000"


def test_two_models_of_one_pair_and_a_queue_that_is_too_small():
    with pytest.raises(UsageError, match="^a and c both translate en to de; omit one, or name other languages"):
        check_pairs([(EN, "a"), (DE, "b"), (EN, "c")])
    with pytest.raises(UsageError, match="--max-queue 1 is less than --max-lines 200; raise it"):
        service_of([FakeModel(Fake(), EN)], capacity=1)
