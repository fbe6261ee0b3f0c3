"""Directories of CTranslate2 and transformers as models: ``translate``, ``serve`` and ``Translator`` run them."""

import json
import math

import pytest

from fairseq_deep import cli
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.tools import serve

ctranslate2 = pytest.importorskip("ctranslate2")
pytest.importorskip("transformers")
FORMATS = {"ctranslate2": "CTranslate2", "huggingface": "transformers"}


@pytest.fixture(scope="module")
def lines(plain):
    return (plain / "text/raw/test.en").read_text().splitlines()[:30]


@pytest.fixture(scope="module", params=FORMATS)
def exported(request, plain, tmp_path_factory):
    """The format, and a recipe's model as a directory of it."""
    output = str(tmp_path_factory.mktemp("exported") / request.param)
    assert cli.main(["export", str(plain), "--format", request.param, "--output", output]) == 0
    return request.param, output


def test_hypotheses_have_the_scores_of_the_program(exported, plain, lines):
    """transformers scores as the model, but stops otherwise, so a few differ; CTranslate2 scores in its own way."""
    form, folder = exported
    search = {"nbest": 3, "beam": 4, "lenpen": 0.6, "max_len_a": 0, "max_len_b": 15, "parallel": 2}
    ours, theirs = (Translator(str(path), cpu=True, **search) for path in (plain, folder))
    found = theirs.translate_nbest(lines)
    assert all(len(each) == 3 for each in found)
    assert (theirs.engine.name, len(theirs.models)) == (FORMATS[form].lower(), 0)
    if form == "huggingface":
        pairs = zip(found, ours.translate_nbest(lines))
        same = [each.text == other.text and abs(each.score - other.score) < 1e-3
                for some, expected in pairs for each in some for other in expected]  # fmt: skip
        assert sum(same) > 75
        return
    words = [ours.text.prepare(line).split() for line in lines]
    options = {"beam_size": 4, "num_hypotheses": 3, "length_penalty": 0.6, "max_decoding_length": 15}
    expected = ctranslate2.Translator(folder).translate_batch(words, return_scores=True, **options)
    scores = [[each.score * math.log(2) for each in some] for some in found]
    assert scores == [pytest.approx(each.scores, abs=1e-4) for each in expected]


def test_the_record_has_what_the_model_has(exported, plain):
    """So results, limits and the server's description are the same."""
    form, folder = exported
    ours, theirs = (Translator(str(path), cpu=True) for path in (plain, folder))
    assert (theirs.facts, theirs.options) == (ours.facts, ours.options)
    assert (theirs.source_lang, theirs.target_lang) == ("en", "de")
    bundle = find_bundle(folder)
    assert (bundle.program, bundle.tokenizer, bundle.lowercase) == (FORMATS[form], "moses", False)
    with pytest.raises(UsageError, match="which does not support the search option min_len: omit it"):
        Translator(folder, cpu=True, min_len=3)


@pytest.mark.parametrize("beam", [1, 3])
def test_limits_of_each_sentence_do_not_depend_on_the_batch(beam, exported, lines):
    form, folder = exported
    model = Translator(folder, cpu=True, beam=beam, max_len_a=0.5, max_len_b=1, limit_each=True)
    alone = [model.translate_nbest([line])[0][0] for line in lines]
    assert [each.text for [each] in model.translate_nbest(lines)] == [each.text for each in alone]
    assert [each.score for [each] in model.translate_nbest(lines)] == pytest.approx([a.score for a in alone], abs=1e-4)
    limits = [int(0.5 * len(model.source.encode(model.text.prepare(line))) + 1) for line in lines]
    lengths = [len(each.text.split()) for each in alone]
    assert all(length <= limit + (form == "huggingface") for length, limit in zip(lengths, limits))
    assert len({*lengths}) > 3


def test_the_commands_take_the_directory(exported, lines, tmp_path, capsys):
    form, folder = exported
    (tmp_path / "in").write_text("\n".join(["", *lines, "   ", "no such words", "a " * 24]) + "\n")
    assert cli.main(["translate", folder, "--input", str(tmp_path / "in"), "--cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    problem = f"line {len(lines) + 4} has more tokens than the model's 24 positions"
    assert err.endswith(f"{problem}: its translation is empty; split it\n")
    expected = Translator(folder, cpu=True).translate(["", *lines, "   ", "no such words"])
    texts = [[each["text"] for each in json.loads(line)["translations"]] for line in out.splitlines()]
    assert texts == [*([text] for text in expected), []] and len({*expected}) > 15
    (model,) = serve.load(cli.parse(["serve", folder, "--cpu"])).values()
    described = model.describe()
    found = [described[name] for name in ("name", "engine", "layers")]
    assert found == [form, model.translator.engine.name, "2 + 2"]
    assert model.translator.translate(lines[0]) == expected[1]
