"""``fairseq-deep export``: in models with target-language tags and pieces of SentencePiece, tags stay whole."""


import pytest

from fairseq_deep.runtime import Translator, find_bundle, text
from fairseq_deep.runtime.engines.transformers_engine import quiet
from tests.helpers.commands import WITHOUT_PLUGIN, run
from tests.helpers.docs import code_of
from tests.helpers.exports import dictionary_of, learn_pieces, write_model
from tests.helpers.paths import ROOT

POSITIONS = {"max_source_positions": 128, "max_target_positions": 128}


@pytest.fixture
def multilingual(trained, tmp_path):
    """multilingual(TAG, ...): words of ``export`` for a model with these tags, lines, and the model's translator."""
    pieces, lines = tmp_path / "spm.model", (trained / "text/raw/train.en").read_text().splitlines()

    def multilingual(*tags):
        learn_pieces(pieces, lines, vocab_size=120)
        units = dictionary_of([*tags, *map(text.cutter_of(str(pieces)), lines)])
        write_model(tmp_path, "prenorm_2l2l_tiny", (units, units), share_all_embeddings=True, **POSITIONS)
        bundle = find_bundle(str(tmp_path / "model.pt"), tokenizer="none", codes=str(pieces))
        words = ["export", tmp_path / "model.pt", "--tokenizer", "none", "--bpe-codes", pieces, "--format"]
        return words, lines[:20], Translator(bundle, cpu=True)

    return multilingual


def test_tags_of_any_form_stay_whole(multilingual, tmp_path, command, refused):
    """In the example, as in translate; the tokenizer for transformers knows two forms, so others are refused."""
    words, lines, ours = multilingual("__de__", "<2fr>")
    file = tmp_path / "model.pt2"
    assert command(*words, "torch", "--output", file)[0] == 0
    given = [f"{tag}{line}" for tag, line in zip(["__de__ ", "<2fr> ", "", ">>nl<< "] * 5, lines)]
    example = ROOT / "examples/translate_pt2.py"
    shown = run("python3", example, file, stdin="\n".join(given) + "\n", prepare=WITHOUT_PLUGIN)
    assert shown.stdout.split("\n")[:-1] == ours.translate(given)
    assert "would split __de__ of" in refused(*words, "huggingface", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_transformers_keeps_tags(multilingual, tmp_path, command):
    """The card from raw text with a tag to raw text, ``translate``, and the way back."""
    pytest.importorskip("transformers")
    tags = ["<2de>", "<2zh>"]
    words, lines, ours = multilingual(*tags)
    code, out, err = command(*words, "huggingface", "--output", tmp_path / "out")
    assert (code, err) == (0, "") and " 16 sentences within " in out and "(random units, " in out
    card = (tmp_path / "out/README.md").read_text()
    assert "Begin each line with the tag of its target language and a blank: `<2de>`, `<2zh>`." in card
    assert "The tokenizer expects raw text." in card and "sacremoses" not in card.partition("## Use")[2]
    names, given = {}, [f"{tags[number % 2]} {line}" for number, line in enumerate(lines)]
    with quiet():
        exec(code_of(tmp_path / "out/README.md").replace("FOLDER", str(tmp_path / "out")), names)
        found = names["translate"](given)
    theirs = Translator(str(tmp_path / "out"), cpu=True)
    assert theirs.source.encode(given[0])[0] == ours.source.indices[tags[0]] and ours.max_source == theirs.max_source
    assert found == theirs.translate(given)
    (tmp_path / "back").mkdir()
    back = tmp_path / "back/model.pt"
    assert command("import", tmp_path / "out", "--from", "huggingface", "--output", back)[::2] == (0, "")
    assert Translator(str(back), cpu=True).translate(given) == ours.translate(given)
