"""The routes in this process: answers are the translator's, also of concurrent requests."""

import json
import re

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from starlette.testclient import TestClient  # noqa: E402

from fairseq_deep.runtime import load_model  # noqa: E402
from fairseq_deep.serving.app import make_app  # noqa: E402
from fairseq_deep.serving.batching import Pair  # noqa: E402
from fairseq_deep.serving.messages import Limits  # noqa: E402
from fairseq_deep.serving.service import read_keys  # noqa: E402
from tests.helpers.processes import until  # noqa: E402
from tests.serving import DE, EN, GOOD, Fake, service_of  # noqa: E402


def ask(client, q, source="en", target="de", **more):
    answer = client.post("/translate", json={"q": q, "source": source, "target": target, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_and_a_list_in_json_and_in_a_form(client, expected):
    lines, found = expected
    best = [each[0] for each in found[EN]]
    assert ask(client, lines[0]) == {"translatedText": best[0]}
    assert ask(client, lines[:50]) == {"translatedText": best[:50]}
    assert ask(client, lines[0], "de", "en") == {"translatedText": found[DE][0][0]}
    form = {"q": lines[1], "source": "en", "target": "de", "format": "text", "alternatives": "0"}
    assert client.post("/translate", data=form).json() == {"translatedText": best[1]}
    assert client.post("/translate", data={**form, "q": lines[:3]}).json() == {"translatedText": best[:3]}
    parts = [(name, (None, value)) for name, value in form.items()]
    assert client.post("/translate", files=parts).json() == {"translatedText": best[1]}  # as a page's FormData
    parts.append(("q", (None, lines[2].encode())))
    assert client.post("/translate", files=parts).json() == {"translatedText": best[1:3]}
    assert ask(client, lines[0], format=None, alternatives=None) == {"translatedText": best[0]}


@pytest.mark.parametrize("host, status", [
    ("127.0.0.1:5000", 200), ("[::1]:5000", 200), ("localhost", 200), ("a.localhost:1", 200), ("mt.example:5000", 200),
    ("evil.example", 403), ("localhost.evil.example", 403), ("evillocalhost", 403),
    ("127.0.0.1.evil.example:5000", 403), ("[", 403), ("", 403),
])  # fmt: skip
def test_a_name_of_another_site_is_refused(host, status, models):
    """Such as a page that points its own name to this machine (DNS rebinding)."""
    server = make_app(service_of(models), {"mt.example"})
    with TestClient(server) as own:
        for path in ("/models", "/translate/", "/"):
            answer = own.get(path, headers={"Host": host}, follow_redirects=False)
            assert answer.status_code == status or status == 200 and path == "/translate/" and answer.status_code == 404
            assert status == 200 or "is not accepted" in answer.json()["error"] and "location" not in answer.headers


def test_pages_of_an_allowed_origin_can_read_answers(models):
    with TestClient(make_app(service_of(models), origins=["https://a.example"])) as own:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            before = own.options("/translate", headers={"Origin": origin, **asked})
            answer = own.post("/translate", json={**GOOD}, headers={"Origin": origin})
            found = [each.headers.get("access-control-allow-origin") for each in (before, answer)]
            assert found == [allowed, allowed] and answer.status_code == 200


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
    service = service_of([Fake(Pair("en", "tlh"))])
    assert service.languages()[1] == {"code": "tlh", "name": "tlh", "targets": []}


def test_metrics_count(models):
    with TestClient(make_app(service_of(models))) as client:
        ask(client, ["w1", "w2 w3"])
        client.get("/nowhere"), client.get("/%0A%22"), client.post("/translate")
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    for route, status, count in (("/translate", 200, "1.0"), ("/translate", 415, "1.0"), ("other", 404, "2.0")):
        assert samples[f'fairseq_deep_requests_total{{route="{route}",status="{status}"}}'] == count
    assert samples['fairseq_deep_lines_total{source="en",target="de"}'] == "2.0"
    assert samples['fairseq_deep_batch_lines_bucket{le="1.0"}'] == "0.0"
    assert samples['fairseq_deep_batch_lines_bucket{le="2.0"}'] == samples["fairseq_deep_batch_lines_count"] == "1.0"
    assert samples['fairseq_deep_request_seconds_bucket{le="+Inf"}'] == "2.0"
    assert samples["fairseq_deep_queue_lines"] == "0.0" and float(samples["fairseq_deep_translation_seconds_total"]) > 0


def test_keys(models, tmp_path, capsys):
    (tmp_path / "keys").write_text("\ufefffirst-key\n\n  second-kéy  \n", encoding="utf-8")
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


def test_the_log_has_one_json_line_per_request_without_texts_or_keys(client, models, capsys):
    capsys.readouterr()
    ask(client, "w1 w2\nw3", api_key="hush")
    client.post("/translate", json={**GOOD, "q": 1})
    client.get("/a\u2028%0Ab")
    with TestClient(make_app(service_of(models), {"mt.example"})) as own:
        own.get("/", headers={"Host": "evil.example"})
    first, second, third, fourth = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time")) and first.pop("milliseconds") > 0
    assert first == {"event": "request", "method": "POST", "path": "/translate", "status": 200, "source": "en",
                     "target": "de", "lines": 2, "characters": 7}  # fmt: skip
    assert "w1" not in str(first) and "hush" not in str(first)
    assert second["reason"].startswith("q is 1, not a string") and third["path"] == "/a\u2028\nb"
    assert fourth["reason"].startswith("the host evil.example is not accepted")


def test_a_full_queue_and_a_late_translation():
    fake = Fake()
    service = service_of([fake], Limits(lines=2, timeout=0.5), capacity=2)
    with TestClient(make_app(service)) as client:
        fake.ready.clear()
        first = service.batcher.submit(EN, ["a"])
        until(lambda: not service.batcher.waiting)
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
    with TestClient(make_app(service_of([Fake()])), raise_server_exceptions=False) as client:
        answer = client.post("/translate", json={**GOOD, "q": "fail"})
        assert answer.status_code == 500 and answer.json()["error"].startswith("internal error")
        assert json.loads(capsys.readouterr().err.splitlines()[-1])["error"] == "RuntimeError: failed as asked"
        assert ask(client, "on") == {"translatedText": "ON"}
