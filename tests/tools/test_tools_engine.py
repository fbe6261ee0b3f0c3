"""``--engine`` of ``translate`` and ``serve``: CTranslate2 translates as our search does, or not at all."""

import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import time

import pytest

from fairseq_deep.core.registry import UsageError
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.runtime.engines import ct2_cache, ct2_convert
from fairseq_deep.tools import main, serve
from tests.helpers.commands import run
from tests.helpers.serving import POSITIONS, random_lines, write_package
from tests.helpers.tools import failing

installed = pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="needs ctranslate2")
fails = failing("translate")
ABOUT_LINES = re.compile(r": (line \d+ has|engine torch for \d+ of) ")
SPECIAL = "w1 <pad> w2"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("package") / "model", ends=0.6)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Lines of every kind."""
    path = tmp_path_factory.mktemp("text") / "lines.en"
    lines = ["", *random_lines(40), "   ", "no such words", SPECIAL, " ".join(["w1"] * POSITIONS), "w3"]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def filled(package, tmp_path_factory):
    """A cache with the package in it."""
    folder = tmp_path_factory.mktemp("filled")
    Translator(str(package), cpu=True, engine="ctranslate2", cache_dir=str(folder))
    return folder


def entries(folder):
    """What is in the cache *folder* besides its lock."""
    return (path for path in folder.iterdir() if path.name != ct2_cache.LOCK)


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of that cache, and its entry."""
    folder = shutil.copytree(filled, tmp_path / "cache")
    return folder, next(entries(folder))


@pytest.fixture
def translate(capsys, text):
    """translate(MODEL, ...): exit code, output, and errors without those about lines."""

    def translate(*words):
        capsys.readouterr()
        code = main.main(["translate", *map(str, words), "--input", str(text), "--cpu"])
        out, err = capsys.readouterr()
        return code, out, [line for line in err.splitlines() if not ABOUT_LINES.search(line)]

    return translate


@installed
def test_the_command_gives_the_same_and_converts_once(package, text, tmp_path):
    words = ["fairseq-deep", "translate", package, "--input", text, "--cpu", "--batch-size", 7, "--max-len-b", 20]
    torch = run(*words, check=False)
    assert torch.returncode == 1 and torch.stderr.count("\n") == 1 and "line 45 has more tokens" in torch.stderr
    assert len({*torch.stdout.splitlines()}) > 30
    cached = ["--cache-dir", tmp_path / "new/cache"]
    first, second, named = (run(*words, *cached, "--engine", name, check=False) for name in ("auto", "auto",
                                                                                         "ctranslate2"))
    for done in (first, second, named):
        assert (done.returncode, done.stdout) == (1, torch.stdout)
        assert torch.stderr in done.stderr
    (entry,) = entries(tmp_path / "new/cache")
    report = "log-probabilities of 16 sentences within "
    assert first.stderr.startswith(f"fairseq-deep translate: engine ctranslate2: converted to {entry}; {report}")
    for done in (second, named):
        assert done.stderr.startswith(f"fairseq-deep translate: engine ctranslate2: cached in {entry}; {report}")
    last = first.stderr.splitlines()[-1]
    number, reasons = re.fullmatch(r".*: engine torch for (\d+) of 46 lines \((.*)\)", last).groups()
    counts = {name: int(count) for name, _, count in (each.rpartition(" ") for each in reasons.split(", "))}
    assert {*counts} <= {"length limit", "empty candidate", "special symbols"} and counts["special symbols"] == 1
    assert 1 < int(number) == sum(counts.values()) < 40


@installed
@pytest.mark.parametrize("words, lines, reason", [
    ([], 5 * [SPECIAL], "special symbols 5"),
    (["--beam", 110], random_lines(5), "beam too large for the dictionary 5"),
])  # fmt: skip
def test_the_command_says_if_torch_translates_all_lines(words, lines, reason, package, filled, tmp_path, capsys):
    path = tmp_path / "few.en"
    path.write_text("\n".join(["", *lines]) + "\n")
    words = ["translate", package, "--input", path, "--cpu", "--engine", "auto", "--cache-dir", filled, *words]
    assert main.main([*map(str, words)]) == 0
    said = f"engine torch for 5 of 6 lines ({reason}); CTranslate2 gave no translation\n"
    assert capsys.readouterr().err.endswith(said)


@installed
@pytest.mark.parametrize(
    "beam, lenpen, limit_each", [(1, 0.6, False), (4, 0.0, False), (4, 1.0, False), (4, 0.6, True)]
)
def test_both_searches_find_the_same(beam, lenpen, limit_each, package, filled):
    """Also where empty hypotheses and those that are too long end otherwise, and with the length penalty 0."""
    lines = random_lines(150)
    search = {"beam": beam, "lenpen": lenpen, "max_len_a": 0.5, "max_len_b": 20, "limit_each": limit_each, "cpu": True}
    ours = Translator(str(package), **search)
    theirs = Translator(str(package), engine="ctranslate2", cache_dir=str(filled), parallel=2, **search)
    assert (ours.engine.name, theirs.engine.name) == ("torch", "ctranslate2")
    found, expected = ([best for best, in each.translate_nbest(lines)] for each in (theirs, ours))
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-3)
    assert 50 < theirs.engine.by_torch < 130 and ours.engine.by_torch == 0
    assert ours.facts == theirs.facts and ours.max_source == theirs.max_source == POSITIONS


def flip(entry):
    path = entry / "model.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit": (flip, "model.bin has another checksum"),
    "a file": (lambda entry: (entry / "model.bin").unlink(), "No such file or directory"),
    "the record": (lambda entry: (entry / "fairseq_deep.json").write_text("{"), "not valid JSON"),
    "no record": (lambda entry: (entry / "fairseq_deep.json").unlink(), "fairseq_deep.json is missing"),
    "no folder": (lambda entry: (shutil.rmtree(entry), entry.write_text("")), "fairseq_deep.json is missing"),
}


@installed
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_converted_again(damage, package, cache, translate):
    folder, entry = cache
    harm, reason = DAMAGES[damage]
    words = [package, "--engine", "auto", "--cache-dir", folder]
    before = translate(*words)
    harm(entry)
    code, out, (line,) = translate(*words)
    assert (code, out) == before[:2] and reason in line
    assert line.startswith("fairseq-deep translate: engine ctranslate2: replaced a corrupt model (")
    assert translate(*words) == before and "cached in" in before[2][0]
    assert [*entries(folder)] == [entry]


@installed
def test_a_cache_that_cannot_be_written(package, translate, text, tmp_path, capsys):
    expected = translate(package)[:2]
    (tmp_path / "file").write_text("")
    words = ["--cache-dir", tmp_path / "file/cache"]
    code, out, (line,) = translate(package, "--engine", "auto", *words)
    assert (code, out) == expected
    assert line.startswith(f"fairseq-deep translate: engine torch: cannot write {tmp_path}/file/cache")
    assert line.endswith(": Not a directory; choose another --cache-dir")
    assert line[38:] in fails(capsys, package, "--input", text, "--cpu", "--engine", "ctranslate2", *words)


def test_without_the_package(package, translate, text, tmp_path, capsys, monkeypatch):
    expected = translate(package)[:2]
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    monkeypatch.delitem(sys.modules, "ctranslate2.specs", raising=False)
    words = ["--cache-dir", tmp_path / "cache"]
    code, out, (line,) = translate(package, "--engine", "auto", *words)
    assert (code, out) == expected and line.endswith("; pip install ctranslate2")
    assert line.startswith("fairseq-deep translate: engine torch: ctranslate2 is not installed (")
    error = fails(capsys, package, "--input", text, "--cpu", "--engine", "ctranslate2", *words)
    assert error.endswith("); pip install ctranslate2\n") and not (tmp_path / "cache").exists()


@installed
def test_an_old_package(package, monkeypatch):
    import ctranslate2

    monkeypatch.setattr(ctranslate2, "__version__", "4.4.0")
    with pytest.raises(UsageError, match=r"ctranslate2 4.4.0 is too old; pip install 'ctranslate2>=4.5'$"):
        Translator(str(package), cpu=True, engine="ctranslate2")


@installed
def test_a_package_that_is_too_old_for_the_model(package, monkeypatch, tmp_path):
    def refuse(*_):
        raise UsageError("--norm rms requires ctranslate2 4.7; pip install 'ctranslate2>=4.7'")

    monkeypatch.setattr("fairseq_deep.runtime.engines.choice.convert", refuse)
    settings = {"cpu": True, "cache_dir": str(tmp_path)}
    assert "requires ctranslate2 4.7" in Translator(str(package), engine="auto", **settings).engine.note
    with pytest.raises(UsageError, match=r"^--norm rms requires ctranslate2 4.7; pip install 'ctranslate2>=4.7'$"):
        Translator(str(package), engine="ctranslate2", **settings)


@installed
def test_a_model_that_cannot_be_expressed(translate, text, tmp_path, capsys):
    package = write_package(tmp_path / "model", layer_agg="dlcl", ends=0.6)
    expected = translate(package)[:2]
    words = ["--cache-dir", tmp_path / "cache"]
    code, out, (line,) = translate(package, "--engine", "auto", *words)
    problem = f"{package}/model.safetensors has --layer-agg dlcl (encoder), which CTranslate2 does not support"
    assert (code, out) == expected and line == f"fairseq-deep translate: engine torch: {problem}"
    error = fails(capsys, package, "--input", text, "--cpu", "--engine", "ctranslate2", *words)
    assert error == f"fairseq-deep translate: {problem}; use --engine torch\n" and not (tmp_path / "cache").exists()


@installed
@pytest.mark.parametrize("words, problem", [
    (["--json", "--nbest", "2"], "several hypotheses per sentence, which CTranslate2 ranks differently"),
    (["--decode-precision", "bf16"], "--decode-precision bf16, which CTranslate2 does not support"),
    (["--gnmt-lenpen"], "GNMT's length penalty, which CTranslate2 does not support"),
    (["{package}"], "an ensemble, which CTranslate2 does not support"),
])  # fmt: skip
def test_a_search_that_cannot_be_expressed(words, problem, package, translate, text, capsys):
    words = [package, *(word.format(package=package) for word in words)]
    expected = translate(*words)[:2]
    assert translate(*words, "--engine", "auto") == (*expected, [f"fairseq-deep translate: engine torch: {problem}"])
    error = fails(capsys, *words, "--input", text, "--cpu", "--engine", "ctranslate2")
    assert error == f"fairseq-deep translate: {problem}; use --engine torch\n"


def test_a_cache_is_of_no_use_to_torch(package, text, capsys):
    assert fails(capsys, package, "--input", text, "--cache-dir", "x").endswith(
        "--cache-dir requires --engine auto or ctranslate2: add one, or omit --cache-dir\n"
    )


@installed
def test_a_search_of_python_and_an_unknown_engine(package):
    with pytest.raises(UsageError, match="the search option min_len, which CTranslate2 does not support in the same"):
        Translator(str(package), cpu=True, engine="ctranslate2", min_len=3)
    with pytest.raises(UsageError, match=r"unknown engine ctranslate \(did you mean ctranslate2\?\); choose from"):
        Translator(str(package), cpu=True, engine="ctranslate")


@installed
def test_a_model_that_disagrees_is_remembered(package, translate, tmp_path, monkeypatch):
    words = [package, "--engine", "auto", "--cache-dir", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(ct2_convert, "EXACT", 0.0)
        first = translate(*words)
    assert first[:2] == translate(package)[:2]
    problem = f"CTranslate2's log-probabilities differ from {package}/model.safetensors (by up to "
    assert first[2][0].startswith(f"fairseq-deep translate: engine torch: {problem}")
    monkeypatch.setattr(ct2_convert, "convert", None)
    assert translate(*words) == first


@installed
def test_the_check_compares_translations_of_real_text(package, filled, tmp_path, monkeypatch):
    """Where a recipe's test set is; and it fails if too few are equal."""
    folder = shutil.copytree(package, tmp_path / "exp/model")
    (tmp_path / "exp/text/raw").mkdir(parents=True)
    (tmp_path / "exp/text/raw/test.en").write_text("\n".join(random_lines(60)) + "\n")
    engine = Translator(str(folder), cpu=True, engine="ctranslate2", cache_dir=str(tmp_path / "cache")).engine
    assert engine.note.endswith(", 50 of 50 translations equal")
    monkeypatch.setattr(ct2_convert.Ct2Engine, "_finish", lambda self, sentences, longest, results: [
        [{"tokens": sentence}] for sentence in sentences])  # fmt: skip
    with pytest.raises(UsageError, match="translations differ from .* for 50 of 50 sentences; use --engine"):
        Translator(str(folder), cpu=True, engine="ctranslate2", cache_dir=str(tmp_path / "other"))


@installed
def test_int8_is_that_of_ctranslate2(package, cache, translate):
    folder, entry = cache
    words = [package, "--engine", "auto", "--cache-dir", folder]
    exact = translate(*words)[1].splitlines()
    code, out, (line,) = translate(*words, "--decode-precision", "int8")
    (other,) = {*entries(folder)} - {entry}
    assert f"converted to {other}" in line
    assert (other / "model.bin").stat().st_size < (entry / "model.bin").stat().st_size / 2
    equal = sum(map(str.__eq__, out.splitlines(), exact))
    assert 15 < equal < len(exact)


@installed
def test_a_server_takes_the_engine(package, filled, capsys):
    args = main.parse(["serve", str(package), "--cpu", "--engine", "auto", "--cache-dir", str(filled)])
    (model,) = serve.load(args)
    logged = json.loads(capsys.readouterr().err)
    assert logged["event"] == "engine" and logged["engine"] == "ctranslate2" and logged["note"].startswith("cached in ")
    assert model.describe()["engine"] == "ctranslate2" and model.describe()["layers"] == "2 + 2"
    lines, ours = random_lines(20), Translator(str(package), cpu=True, nbest=3)
    assert model.translator.translate(lines) == ours.translate(lines)
    assert model.translator.translate_nbest(lines, 3) == ours.translate_nbest(lines)


@installed
def test_processes_that_write_at_once_leave_one_model(tmp_path):
    """Each of them also finds a damaged model there."""
    folder, barrier, found = tmp_path / "cache/key", threading.Barrier(3), []
    folder.mkdir(parents=True)
    stale, young = tmp_path / "cache/unfinished-1", tmp_path / "cache/unfinished-2"
    for path in (stale, young):
        path.mkdir()
    os.utime(stale, (0, time.time() - 2 * ct2_cache.STALE))
    facts = {"arch": None, "parameters": 1, "layers": [1, 1], "max_source": 1, "max_target": 1, "pads_left": True}
    record = {"task": {"source_lang": None, "target_lang": None}, "facts": facts, "report": "", "problem": ""}

    def fill(new):
        with open(f"{new}/model.bin", "w") as stream:
            stream.write("weights")
        barrier.wait(30)
        return {**record}

    threads = [threading.Thread(target=lambda: found.append(ct2_cache.write(str(folder), fill))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and found[0] == found[1] == found[2] == ct2_cache.read(str(folder))
    assert sorted(path.name for path in entries(folder.parent)) == ["key", "unfinished-2"]
    assert ct2_cache.read(str(folder.parent / "other")) is None


@installed
def test_the_key_is_that_of_the_files(package, tmp_path):
    bundle = find_bundle(str(shutil.copytree(package, tmp_path / "model")))
    keys = [ct2_cache.key_of(find_bundle(str(package)), "float32"), ct2_cache.key_of(bundle, "float32")]
    assert keys[0] == keys[1]
    keys.append(ct2_cache.key_of(bundle, "int8"))
    names = ("model.safetensors", "dict.de.txt", "dict.en.txt", "config.json")
    for path in (f"{bundle.data}/{name}" for name in names):
        with open(path, "ab") as stream:
            stream.write(b" ")
        keys.append(ct2_cache.key_of(bundle, "float32"))
    assert len({*keys}) == 6


@installed
def test_a_damaged_package_is_refused_as_ever(package, text, cache, capsys, tmp_path):
    """Also if the cache has it."""
    folder = shutil.copytree(package, tmp_path / "model")
    words = [folder, "--input", text, "--cpu", "--engine", "auto", "--cache-dir", cache[0]]
    with open(folder / "dict.de.txt", "a") as stream:
        stream.write("more 1\n")
    assert "dict.de.txt: corrupt, its sha256 differs from SHA256SUMS" in fails(capsys, *words)
    shutil.copy(package / "dict.de.txt", folder)
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(package / "README.md")
    assert "README.md: must not be a link" in fails(capsys, *words)


def test_the_cache_is_that_of_the_user(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert ct2_cache.default_folder() == "/caches/fairseq_deep/ctranslate2"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert ct2_cache.default_folder() == "/home/me/.cache/fairseq_deep/ctranslate2"


@installed
def test_json_has_the_scores(package, filled, tmp_path, text):
    outputs = []
    for engine, *more in (("torch",), ("ctranslate2", "--cache-dir", filled)):
        words = ["translate", package, "--input", text, "--cpu", "--json", "--engine", engine, *more]
        assert main.main([*map(str, words), "--output", str(tmp_path / engine)]) == 1
        outputs.append([json.loads(line) for line in (tmp_path / engine).read_text().splitlines()])
    for ours, theirs in zip(*outputs):
        scores = [[each.pop("score") for each in line["translations"]] for line in (ours, theirs)]
        assert ours == theirs and scores[1] == pytest.approx(scores[0], abs=1e-3)
