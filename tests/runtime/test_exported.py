"""Directories of CTranslate2 and transformers as models: ``translate``, ``serve`` and ``Translator`` run them."""

import importlib.util
import json

import pytest
import torch

from fairseq_deep import cli
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.tools import serve
from tests.helpers.serving import POSITIONS, random_lines, write_package

pytestmark = pytest.mark.skipif(not all(map(importlib.util.find_spec, ("ctranslate2", "transformers"))),
                                reason="needs ctranslate2 and transformers")  # fmt: skip
LINES = ["", *random_lines(30), "   ", "no such words"]
FORMATS = {"ctranslate2": "CTranslate2", "huggingface": "transformers"}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("package") / "model", ends=0.6)


@pytest.fixture(scope="module")
def exports(package, tmp_path_factory):
    """The package as a directory of each format."""
    folder = tmp_path_factory.mktemp("exports")
    for form in FORMATS:
        assert cli.main(["export", str(package), "--format", form, "--output", str(folder / form)]) == 0
    return {form: str(folder / form) for form in FORMATS}


def by_ctranslate2(folder, lines, **options):
    """(text, score) of each hypothesis by the library itself."""
    import ctranslate2

    found = ctranslate2.Translator(folder).translate_batch([line.split() for line in lines], return_scores=True,
                                                           **options)  # fmt: skip
    texts = [[" ".join(words).replace("<s> ", "") for words in each.hypotheses] for each in found]
    return [[*zip(each, result.scores)] for each, result in zip(texts, found)]


def by_transformers(folder, lines, **options):
    """(text, score) of each hypothesis by the library itself, in batches of one line."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer, model = (each.from_pretrained(folder) for each in (AutoTokenizer, AutoModelForSeq2SeqLM))
    found = []
    for line in lines:
        output = model.generate(**tokenizer([line], return_tensors="pt"), return_dict_in_generate=True,
                                output_scores=True, **options)  # fmt: skip
        texts = [tokenizer.decode([index for index in row if index > 2]) for row in output.sequences.tolist()]
        found.append([*zip(texts, output.sequences_scores.tolist())])
    return found


def nats(found):
    return [[(each.text, each.score * torch.log(torch.tensor(2.0)).item()) for each in found] for found in found]


def assert_same(found, expected):
    assert [[text for text, _ in each] for each in found] == [[text for text, _ in each] for each in expected]
    for ours, theirs in zip(found, expected):
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)
    assert len({each[0] for each in found}) > 20


def test_ctranslate2_gives_what_the_library_gives(exports):
    folder, lines = exports["ctranslate2"], random_lines(60)
    model = Translator(folder, cpu=True, nbest=3, beam=4, lenpen=0.6, max_len_a=0, max_len_b=15, parallel=2)
    expected = by_ctranslate2(folder, lines, beam_size=4, num_hypotheses=3, length_penalty=0.6,
                              max_decoding_length=15)  # fmt: skip
    assert_same(nats(model.translate_nbest(lines)), expected)
    assert (model.engine.name, len(model.models), model.max_source) == ("ctranslate2", 0, POSITIONS)


def test_transformers_gives_what_the_library_gives(exports):
    folder, lines = exports["huggingface"], random_lines(30)
    model = Translator(folder, cpu=True, nbest=3, beam=4, lenpen=0.6, max_len_a=0, max_len_b=15, batch_size=1)
    expected = by_transformers(folder, lines, num_beams=4, num_return_sequences=3, length_penalty=0.6,
                               max_new_tokens=16)  # fmt: skip
    assert_same(nats(model.translate_nbest(lines)), expected)
    assert (model.engine.name, len(model.models), model.max_source) == ("transformers", 0, POSITIONS)


@pytest.mark.parametrize("form", FORMATS)
def test_the_record_has_what_the_package_has(form, package, exports):
    """So results, limits and the server's description are the same as the package's."""
    ours, theirs = (Translator(str(path), cpu=True) for path in (package, exports[form]))
    assert (theirs.facts, theirs.options) == (ours.facts, ours.options)
    names = ("tokenizer", "lowercase", "source_lang", "target_lang", "codes")
    bundles = [find_bundle(str(path)) for path in (package, exports[form])]
    assert len({tuple(getattr(bundle, name) for name in names) for bundle in bundles}) == 1
    assert bundles[1].program == FORMATS[form]
    assert (theirs.translate(""), theirs.source_lang, len(theirs.target)) == ("", "en", len(ours.target))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("beam", [1, 3])
def test_limits_of_each_sentence_do_not_depend_on_the_batch(form, beam, exports):
    options = {"cpu": True, "beam": beam, "max_len_a": 1.0, "max_len_b": 2, "limit_each": True}
    model, lines = Translator(exports[form], **options), random_lines(12)
    alone = [model.translate_nbest([line])[0][0] for line in lines]
    assert [each.text for [each] in model.translate_nbest(lines)] == [each.text for each in alone]
    assert [each.score for [each] in model.translate_nbest(lines)] == pytest.approx([a.score for a in alone], abs=1e-4)
    lengths = [(len(line.split()), len(each.text.split())) for line, each in zip(lines, alone)]
    assert all(target <= source + 3 + (form == "huggingface") for source, target in lengths)
    assert len({target for _, target in lengths}) > 3


@pytest.mark.parametrize("form", FORMATS)
def test_the_commands_take_the_directory(form, exports, tmp_path, capsys):
    (tmp_path / "in").write_text("\n".join([*LINES, " ".join(["w1"] * POSITIONS)]) + "\n")
    words = ["translate", exports[form], "--input", str(tmp_path / "in"), "--cpu", "--json"]
    assert cli.main(words) == 1
    out, err = capsys.readouterr()
    problem = f"line {len(LINES) + 1} has more tokens than the model's {POSITIONS} positions"
    assert err.endswith(f"{problem}: its translation is empty; split it\n")
    (model,) = serve.load(cli.parse(["serve", exports[form], "--cpu"])).values()
    expected = [[each.text for each in found] for found in Translator(exports[form], cpu=True).translate_nbest(LINES)]
    texts = [[each["text"] for each in json.loads(line)["translations"]] for line in out.splitlines()]
    assert texts == [*expected, []] and len({*map(str, texts)}) > 20
    described = model.describe()
    found = [described[name] for name in ("name", "engine", "layers")]
    assert found == [form, model.translator.engine.name, "2 + 2"]
    assert model.translator.translate(LINES[1]) == expected[1][0]
    assert cli.main(["check", exports[form]]) == 1  # its content is not inspected
    assert f"model for {FORMATS[form]}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="which does not support the search option min_len: omit it"):
        Translator(exports[form], cpu=True, min_len=3)


def test_an_old_package_is_refused(exports, monkeypatch):
    import ctranslate2

    monkeypatch.setattr(ctranslate2, "__version__", "4.6.1")
    with pytest.raises(UsageError, match=r"ctranslate2 4.6.1 is too old; pip install 'ctranslate2>=4.7'$"):
        Translator(exports["ctranslate2"], cpu=True)
