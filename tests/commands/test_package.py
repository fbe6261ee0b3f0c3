"""``fairseq-deep package``: the folder translates as the checkpoint does, wherever it is, by whichever program."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import zipfile

import pytest
import torch

from fairseq_deep import cli
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import Translator, find_bundle, text
from fairseq_deep.tools.card import make_card
from tests.helpers.commands import PACKAGE, WITHOUT_FAIRSEQ, run, train_command
from tests.helpers.exports import EMPTY, GENERATE, dictionary_of, learn_pieces, write_model

SEARCH = {"beam": 3, "lenpen": 0.8, "max_len_a": 1.0, "max_len_b": 50, "nbest": 3, "cpu": True}
RESULT = {
    "beam": 3, "lenpen": 0.8, "bleu": 31.4, "updates": 240, "hardware": "2 cores, a | b", "commit": "abc",
    "data": {"route": "demo", "sets": {"train": {"pairs": 22000, "sha256": {"en": "e" * 64, "de": "d" * 64}}}},
    "scores": {"test": {"sacrebleu": {"bleu": 31.4, "signature": "nrefs:1|case:mixed", "chrf": 55.5,
                                      "chrf_signature": "nc:6", "hypotheses": "/home/me/generate.txt"},
                        "tokenised": {"bleu": 30.0, "signature": "tok:none"}}},
}  # fmt: skip


def package(*words):
    """Run the command, which works."""
    assert cli.main(["package", *map(str, words)]) == 0


@pytest.fixture(scope="module")
def pair(trained, tmp_path_factory):
    """A run with tied embeddings, its checkpoint, and the packaged model, which has been moved."""
    folder = tmp_path_factory.mktemp("pair")
    package(trained, "--output", folder / "made", "--licence", "MIT")
    os.rename(folder / "made", folder / "elsewhere")
    return trained, trained / "averaged.pt", folder / "elsewhere"


def found(path, lines):
    return Translator(str(path), **SEARCH).translate_nbest(lines)


def same_weights(*paths):
    before, after = (torch.load(path, weights_only=False)["model"] for path in paths)
    return all(torch.equal(after[key], before[key]) for key in before if not key.endswith(EMPTY))


def raw_lines(exp):
    return (exp / "text/raw/test.en").read_text().splitlines()


def alone(*words):
    """fairseq-deep where fairseq cannot be imported."""
    return run("fairseq-deep", *words, prepare=WITHOUT_FAIRSEQ, check=False)


def test_all_programs_give_what_the_checkpoint_gives(pair):
    """From Python, by fairseq's hub, and where fairseq is missing."""
    exp, _, package = pair
    lines = raw_lines(exp)
    want = found(exp, lines)
    assert len({best.score for best, *_ in want}) > 20
    assert found(package, lines) == want  # texts and scores of all hypotheses
    done = alone("translate", package, "--input", exp / "text/raw/test.en", "--json", "--nbest", "3", "--cpu")
    assert (done.returncode, done.stderr) == (0, "")
    for line, each in zip(done.stdout.splitlines(), want, strict=True):
        got = json.loads(line)["translations"]
        assert [one["text"] for one in got] == [one.text for one in each]
        assert [one["score"] for one in got] == pytest.approx([one.score for one in each], abs=2e-4)
    model = DeepTransformerModel.from_pretrained(str(package), checkpoint_file="model.safetensors")
    for line in lines[:4]:  # one at a time: other batches round otherwise
        (want,) = found(exp, [line])
        got = model.generate(model.encode(line), beam=3)
        assert [model.decode(each["tokens"]) for each in got] == [each.text for each in want]
        assert [float(each["score"]) / math.log(2) for each in got] == [each.score for each in want]


def test_the_tools_where_fairseq_is_missing(pair, tmp_path):
    _, checkpoint, package = pair
    work = [["check", package], ["average", "--inputs", checkpoint, "--output", tmp_path.parent / "mean.pt"],
            ["package", "--help"]]  # fmt: skip
    need = [["translate", checkpoint, "--data", package], ["package", checkpoint, "--output", tmp_path / "made"],
            ["export", checkpoint, "--output", tmp_path / "out.pt"], ["archs"], ["flags"],
            ["diagnose", "transformer_dlcl_2l2l_tiny", "--data", package]]  # fmt: skip
    for words in work:
        assert alone(*words).returncode == 0, words
    for words in need:
        done = alone(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.text
        assert "requires fairseq" in done.stderr and done.stderr.startswith(f"fairseq-deep {words[0]}: "), done.stderr
    assert not list(tmp_path.iterdir())


def test_sentencepiece_and_gnmts_length_penalty_are_kept(trained, tmp_path):
    pytest.importorskip("sentencepiece")
    exp, lines = tmp_path / "exp", raw_lines(trained)
    for name in ("data-bin", "text/bpe"):
        (exp / name).mkdir(parents=True)
    learn_pieces(exp / "text/bpe/spm.model", lines, vocab_size=40)
    dictionary = dictionary_of(map(text.cutter_of(str(exp / "text/bpe/spm.model")), lines))
    write_model(exp / "data-bin", "dlcl_2l2l_tiny", (dictionary, dictionary), decoder_layers=2)
    (exp / "data-bin/model.pt").rename(exp / "averaged.pt")
    (exp / "text/bpe/steps.json").write_text(json.dumps({"tokenizer": "none", "lowercase": False}))
    result = {"beam": 3, "lenpen": 3.0, "gnmt_lenpen": True, "max_len_a": 0.5, "max_len_b": 2}
    (exp / "RESULT.json").write_text(json.dumps(result))
    package(exp, "--output", tmp_path / "made")
    assert (tmp_path / "made/spm.model").is_file() and not (tmp_path / "made/code").exists()
    lines, search = lines[:10], {**SEARCH, "lenpen": 3.0}
    want, got = (Translator(path, **search).translate_nbest(lines) for path in (exp, tmp_path / "made"))
    plain = Translator([find_bundle(str(exp), gnmt_lenpen=False)], **search).translate_nbest(lines)
    assert got == want and [each[0].score for each in want] != [each[0].score for each in plain]
    card = (tmp_path / "made/README.md").read_text()
    assert "GNMT lenpen 3.0, at most 0.5 x source + 2 units" in card and "--max-len-a 0.5 --max-len-b 2 " in card
    assert "--remove-bpe sentencepiece --task deep_translation --gnmt-lenpen" in card
    model = DeepTransformerModel.from_pretrained(str(tmp_path / "made"), checkpoint_file="model.safetensors")
    assert model.encode(lines[0]).tolist() and model.bpe.sp.get_piece_size() > 10


def test_values_are_plain_text_in_the_card():
    evil = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) ![b](data:x) https://x.y | # `c` \x1b[2J\n<https://z>"
    card = make_card({
        "name": evil, "licence": evil, "arch": "a_b", "made_with": {evil: evil},
        "search": {"beam": 4, "lenpen": 1, "gnmt_lenpen": False, "max_len_a": 1.2, "max_len_b": 10},
        "task": {"source_lang": "en", "target_lang": "de"},
        "text": {"tokenizer": "moses", "lowercase": False, "sub_words": None},
    }, {}, {
        "data": {"route": evil, "sets": {evil: {"pairs": evil, "sha256": {"en": evil}}}}, "hardware": evil,
        "scores": {evil: {"sacrebleu": {"bleu": evil, "signature": f"`{evil}"}}},
    })  # fmt: skip
    outside = re.sub(r"`[^`\n]*`", "", card.replace("\\`", ""))  # what is no code
    assert not re.search(r"<|(?<!\\)(\]\(|!)|\x1b|(javascript|data|https):\S", outside) and card.count("&lt;img") == 11
    assert "| architecture | `a_b` of fairseq_deep |" in card


def test_the_programs_of_fairseq_take_a_package(pair, tmp_path):
    """Training goes on from it, and its losses and translations are those of the checkpoint."""
    exp, checkpoint, path = *pair[:2], pair[2] / "model.safetensors"
    flags = ["--source-lang", "en", "--target-lang", "de", "--max-source-positions", "24", "--max-update", "1"]
    flags += ["--finetune-from-model", path, "--lr", "1e-30", "--disable-validation"]
    run(*train_command(exp / "data-bin", tmp_path, *flags))
    assert same_weights(checkpoint, tmp_path / "checkpoint_last.pt")
    flags = ["--user-dir", PACKAGE, "--task", "translation", "--cpu", "--path"]
    done = [run("fairseq-validate", exp / "data-bin", "--max-tokens", "400", *flags, each).text
            for each in (checkpoint, path)]  # fmt: skip
    losses = [re.findall(r"subset \| (loss \S+ \| nll_loss \S+)", text) for text in done]
    assert len(losses[0]) == 1 and losses[0] == losses[1]
    source = "".join((exp / "text/bpe/test.en").read_text().splitlines(keepends=True)[:5])
    command = ["fairseq-interactive", exp / "data-bin", "--remove-bpe", *GENERATE, "--path", path]
    said = [line.split("\t")[2] for line in run(*command, stdin=source).stdout.splitlines() if line[:2] == "H-"]
    translator = Translator([find_bundle(str(exp))], **SEARCH)
    want = [best.text for best, *_ in translator.translate_nbest(raw_lines(exp)[:5])]
    assert [translator.text.finish(line) for line in said] == want
    mean = str(tmp_path / "mean.pt")
    assert cli.main(["average", "--inputs", str(checkpoint), str(path), "--output", mean]) == 0
    assert same_weights(checkpoint, mean)
    assert cli.main(["plot", "weights", str(path), "--csv", str(tmp_path / "w.csv")]) == 0


def test_what_is_in_the_folder(pair):
    _, _, package = pair
    names = {"model.safetensors", "config.json", "dict.en.txt", "dict.de.txt", "code", "README.md"}
    assert {path.name for path in package.iterdir()} == names | {"SHA256SUMS"}
    lines = [f"{hashlib.sha256((package / name).read_bytes()).hexdigest()}  {name}" for name in sorted(names)]
    assert (package / "SHA256SUMS").read_text().splitlines() == lines
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=package, check=False).returncode == 0
    assert len({path.stat().st_mode for path in package.iterdir()} - {(package / "code").stat().st_mode}) == 0
    for path in package.iterdir():  # no pickle
        assert not zipfile.is_zipfile(path) and path.read_bytes()[:1] != b"\x80"
        assert os.fsencode(package.parent.parent) not in path.read_bytes()  # no path of the machine that made it


def test_the_card_and_an_own_architecture(trained, tmp_path, monkeypatch):
    """Of a model whose architecture has a name that is not packaged."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    exp = shutil.copytree(trained, tmp_path / "exp", ignore=shutil.ignore_patterns("checkpoints"))
    (exp / "RESULT.json").write_text(json.dumps(RESULT))
    package(exp, "--output", tmp_path / "made", "--name", "Ours", "--licence", "CC-BY-4.0")
    card = (tmp_path / "made/README.md").read_text()
    state = torch.load(trained / "averaged.pt", weights_only=False)
    sizes = {value.data_ptr(): value.numel() for key, value in state["model"].items() if not key.endswith(EMPTY)}
    for row in (
        "# Ours\n", "| licence | CC-BY-4.0 |", "| architecture | `transformer_dlcl_2l2l_tiny` of fairseq_deep |",
        f"| parameters | {sum(sizes.values()):,} |", f"| train | 22,000 | {'e' * 64} | {'d' * 64} |",
        "| test | sacreBLEU | 31.40 | `nrefs:1\\|case:mixed` |", "| test | chrF | 55.50 | `nc:6` |",
        "| hardware | 2 cores, a \\| b |", "--beam 3 --lenpen 0.8 --remove-bpe",
        "| search | beam 3, lenpen 0.8, at most 1 x source + 50 units |",
    ):  # fmt: skip
        assert row in card, row
    assert "/home/me" not in card
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert (config["name"], config["licence"]) == ("Ours", "CC-BY-4.0")
    for registry in (ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY):
        monkeypatch.setitem(registry, "mine", registry[state["cfg"]["model"].arch])
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "mine"
    torch.save(state, tmp_path / "mine.pt")
    parts = ["--data", trained / "data-bin", "--bpe-codes", trained / "text/bpe/code"]
    package(tmp_path / "mine.pt", *parts, "--output", tmp_path / "own")
    assert json.loads((tmp_path / "own/config.json").read_text())["arch"] == "deep_transformer"


def test_a_write_that_fails_leaves_nothing(trained, refused, monkeypatch, tmp_path):
    import safetensors.torch

    def full(tensors, path, metadata):
        with open(path, "wb") as stream:
            stream.write(b"half")
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    (tmp_path / "made").mkdir()  # empty ones may be there
    line = refused("package", trained, "--output", tmp_path / "made")
    assert "cannot be written (I/O error: No space left on device" in line
    assert list(tmp_path.rglob("*")) == [tmp_path / "made"]
