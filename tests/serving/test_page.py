"""The web page: nothing from elsewhere, its policy, and, where there is a Chromium, what a browser makes of it."""

import html
import re
import shutil
import subprocess
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fairseq_deep.runtime import Translator  # noqa: E402
from fairseq_deep.serving.app import _page  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_is_one_file_and_escapes_text():
    text, policy = _page()
    page = re.sub("(?s)<(script|style)>.*?</\\1>", "", text)
    assert re.findall(' href="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"<[^>]* (src|style|action|on\w+)=", page)
    assert not re.search("https?://|innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|@import|url\\(", text)
    ids = re.findall(' id="([^"]+)"', page)
    named = re.findall(r'\bat\("([^"]+)"\)', text) + re.findall(' for="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and {*named} <= {*ids}
    assert len(re.findall("<script>|<style>", text)) == 2
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 2


@pytest.fixture(scope="module")
def browse(served, tmp_path_factory):
    """browse(**query): the page's elements after its scripts have run, and texts by id."""
    if BROWSER is None:
        pytest.skip("no Chromium")
    profile = tmp_path_factory.mktemp("profile")

    def browse(**query):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--enable-logging=stderr"]
        flags += ["--virtual-time-budget=15000", "--dump-dom"]
        command = [BROWSER, *flags, f"{served.url}/?{urlencode(query)}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "CONSOLE" not in done.stderr  # neither errors nor violations of the policy
        return done.stdout

    return browse


def content(page, name):
    """The text of the element with this id, with "|" for tags."""
    found = re.search(f'<(\\w+)[^>]* id="{name}"[^>]*>(.*?)</\\1>', page, re.DOTALL)[2]
    return html.unescape(re.sub("<[^>]+>", "|", found))


def test_a_browser_translates(browse, packages):
    line = "w1 w2 w3"
    found = [each.text for each in Translator(str(packages[1]), cpu=True, nbest=4).translate_nbest([line])[0]]
    page = browse(source="de", target="en", q=line)
    assert content(page, "result") == found[0]
    assert content(page, "list").strip("|").split("||") == found[1:]
    assert content(page, "source-name").strip("|") == "German" and content(page, "target-name") == "English"
    assert "English to German" in content(page, "pair") and "random de-en" in content(page, "model")
    assert re.fullmatch(r"\d+\.\d\d s", content(page, "time")) and content(page, "error") == ""
    assert content(page, "count") == "8 of 300 characters"


def test_a_browser_shows_markup_as_text(browse, served):
    page = browse(source="en", target="de", q="<img src=x onerror=alert(1)> w1 </textarea><script>alert(2)</script>")
    assert page.count("<script>") == 1 and "<img" not in page and "onerror=alert(1)>" not in page
    assert content(page, "result") and content(page, "error") == ""


def test_a_browser_shows_an_error(browse):
    page = browse(source="en", target="de", q="w1 " * 60)  # more tokens than the model has positions
    assert content(page, "result") == "" and "has more tokens than the model's 40 positions" in content(page, "error")
    page = browse(source="en", target="de", q="x" * 301)
    assert 'class="over"' in page and content(page, "result") == ""
