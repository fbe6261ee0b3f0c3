"""Every refusal of ``fairseq-deep COMMAND``: status 2, one line that begins with the command, and nothing written.

A row has the command's words, a part of the line, and perhaps a change of the prepared files before it; all names are
relative to a copy of the prepared files.
"""

import argparse
import gzip
import json
import math
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceTrainer

from fairseq_deep import cli
from tests.helpers.exports import write_model
from tests.helpers.models import POSTNORM as POST
from tests.helpers.models import make_dictionary, make_tagged_dictionary
from tests.helpers.paths import STOCK
from tests.helpers.tools import checkpoint

GROWS = "encoder.layers.3.residual.scale"
SHARED, PAIR = torch.zeros(2), {"a": torch.zeros(2), "b": torch.zeros(2, 3)}
CHECKPOINTS = {
    "one.pt": {"w": torch.ones(2)}, "nan.pt": {"w": torch.tensor([1, math.nan])},
    "inf.pt": {"w": torch.tensor([-math.inf, 1])}, "ab.pt": PAIR, "a.pt": {"a": torch.zeros(2)},
    "abc.pt": {**PAIR, "c": torch.zeros(1)}, "turned.pt": {**PAIR, "b": torch.zeros(3, 2)},
    "whole.pt": {**PAIR, "b": torch.zeros(2, 3, dtype=torch.int64)}, "tied.pt": {"a": SHARED, "b": SHARED},
    "untied.pt": {"a": SHARED, "b": SHARED.clone()}, "grows.pt": {GROWS: torch.tensor(0.5)},
    "grown.pt": {GROWS: torch.tensor(0.75)}, "empty.pt": {}, "sparse.pt": {"w": torch.eye(2).to_sparse()},
    "meta.pt": {"w": torch.ones(2, device="meta")}, "number.pt": {3: torch.ones(1)},
    "dlcl.pt": {"encoder.history.weight": torch.eye(3)}, "bad.pt": {"encoder.history.weight": torch.eye(3) * math.nan},
    "dir/checkpoint1.pt": {"w": torch.ones(2)}, "dir/checkpoint2.pt": {"w": torch.ones(2)},
    "dir/run/checkpoints/checkpoint_1_500.pt": {"w": torch.ones(2)},
    "best/checkpoint.best_mystery_1.0.pt": {"w": torch.ones(2)},
    "mixed/checkpoint.best_mystery_1.0.pt": {"w": torch.ones(2)},
    "mixed/checkpoint.best_loss_1.0.pt": {"w": torch.ones(2)},
}  # fmt: skip
ARCH = {"arch": "transformer_prenorm_6l", "_name": "transformer_prenorm_6l"}
ODD = {
    "cfg.pt": {"cfg": ["model"]}, "model.pt": {"cfg": {"model": "transformer"}},
    "args.pt": {"args": {"arch": "x"}},
    "heads8.pt": {"cfg": {"model": argparse.Namespace(**ARCH)}},
    "heads4.pt": {"cfg": {"model": argparse.Namespace(**ARCH, encoder_attention_heads=4)}},
}  # fmt: skip
LINE = "The old man did not see the red-haired girl yesterday."
WORDS = [f"{LINE} {number}" for number in range(60)]
TEXTS = {
    "sys": [LINE] * 4, "ref": [LINE] * 4, "three": [LINE] * 3, "void": [], "text.pt": ["no checkpoint"],
    "ours": WORDS, "truth": WORDS, "cmp/test.hyp.de": WORDS, "cmp/test.ref.de": WORDS, "bare/test.hyp.de": WORDS,
    "many/test.hyp.de": WORDS, "many/test.hyp.en": WORDS, "many/test.ref.de": WORDS, "short/test.hyp.de": WORDS[:59],
    "short/test.ref.de": WORDS, "fewer/test.hyp.de": WORDS[:59], "fewer/test.ref.de": WORDS[:59],
    "cropped/test.hyp.de": WORDS, "cropped/test.ref.de": WORDS[:59],
    "other/test.hyp.de": WORDS, "other/test.ref.de": [*WORDS[:41], "another", *WORDS[42:]],
    "pairs/test.en-de.hyp": WORDS, "pairs/test.en-de.ref": WORDS, "pairs/test.en-fr.hyp": WORDS,
    "pairs/test.en-fr.ref": WORDS, "pair/test.en-de.hyp": WORDS, "pair/test.en-de.ref": WORDS[::-1],
    "uneven/test.en-de.hyp": WORDS, "uneven/test.en-de.ref": WORDS[:9],
    "gen": ["T-0\ta house is here", "H-0\t-1\ta house was here"], "full/x": ["x"], "in.txt": ["We see “it”…"],
    "ct2/config.json": ["{}"], "ct2/model.bin": ["{}"], "hf/config.json": ["{}"], "hf/model.safetensors": ["{}"],
    "hf/tokenizer_config.json": ["{}"],
}  # fmt: skip
PARTS = ("averaged.pt", "data-bin/dict.en.txt", "data-bin/dict.de.txt", "text/bpe/code", "text/bpe/steps.json")


@pytest.fixture(scope="session")
def prepared(trained, tmp_path_factory):
    """All files of the rows; ``run`` is a recipe's directory, and ``parts`` its checkpoint with what it needs."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in [*TEXTS, *CHECKPOINTS, "parts/x", "void-folder/x", "seeds/seed2/x"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, lines in TEXTS.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "latin1").write_bytes("gut\nsch\u00f6n\n".encode("latin-1"))
    for name in ("in.txt.gz", "in.txt.tgz"):
        (folder / name).write_bytes(gzip.compress(b"We see.\n"))
    for name, model in CHECKPOINTS.items():
        checkpoint(folder / name, model)
    for name, others in ODD.items():
        checkpoint(folder / name, {"w": torch.ones(2)}, **others)
    torch.save({"weights": 1}, folder / "other.pt")
    os.symlink("one.pt", folder / "link.pt")
    shutil.copytree(trained, folder / "run", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(trained / "data-bin", folder / "swapped")
    shutil.copytree(trained / "text/raw", folder / "text")
    for name in PARTS:
        shutil.copy(trained / name, folder / "parts")
    for name in ("norm", "transform"):
        (folder / name).mkdir()
        write_model(folder / name, "postnorm_6l", (make_tagged_dictionary(38, 6), make_dictionary(30)),
                    language_norm=True, language_transform=name == "transform", decoder_layers=2)  # fmt: skip
    for lang in ("en", "de"):
        words = (folder / f"swapped/dict.{lang}.txt").read_text().splitlines(keepends=True)
        (folder / f"swapped/dict.{lang}.txt").write_text("".join([words[1], words[0], *words[2:]]))
    SentencePieceTrainer.train(sentence_iterator=iter(["we see the house", "the house is old"]), vocab_size=20,
                               model_prefix=str(folder / "spm"), hard_vocab_limit=False, minloglevel=2)  # fmt: skip
    return folder


def write(**texts):
    """A change: files of these names and contents; ``__`` stands for a dot, ``___`` for a slash."""

    def change(folder):
        for name, text in texts.items():
            path = folder / name.replace("___", "/").replace("__", ".")
            path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def append(name, text):
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def remove(name):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def pipe(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def stored(change):
    """A change of the state in the checkpoint of ``parts``."""

    def save(folder):
        state = torch.load(folder / "parts/averaged.pt", weights_only=False)
        change(state)
        torch.save(state, folder / "parts/averaged.pt")

    return save


def nameless(state):
    state["cfg"]["task"]["source_lang"] = state["cfg"]["task"]["target_lang"] = None


def renamed(state):
    state["cfg"]["model"]._name = state["cfg"]["model"].arch = "transformer_align"


def pruned(state):
    state["cfg"]["model"].encoder_layers_to_keep = "0,1"


def filled(row, value):
    return stored(lambda state: state["model"]["encoder.embed_tokens.weight"][row].fill_(value))


def diverged(state):
    state["model"] = {name: value * math.nan for name, value in state["model"].items()}


def swapped(folder):
    """The dictionaries of ``parts`` in another order, of which the checkpoint has no record."""
    for lang in ("en", "de"):
        shutil.copy(folder / f"swapped/dict.{lang}.txt", folder / "parts")
    stored(lambda state: state.pop("task_state"))(folder)


def result(**settings):
    return lambda folder: (folder / "run/RESULT.json").write_text(json.dumps({"beam": 3, **settings}))


MODEL, OUT = "parts/averaged.pt", "--output out"
PACKAGE = f"package {MODEL} --data run/data-bin --bpe-codes run/text/bpe/code {OUT}"
DISTILL = f"distill run --text text {OUT} --cpu"
LOG = '{"kind": "train_inner", "num_updates": "5", "loss": "1"}\n'
SCORE, PIECES = "score --sys sys --ref ref", "\u2581a \u2581hou se \u2581is \u2581here\n"
INCOMPLETE = "is not a complete fairseq checkpoint: "
DIFFERS = "ab.pt: {}; average checkpoints of one run"
ROWS = [
    ("archs transformer_dlcl_31l", "no architecture matches 'transformer_dlcl_31l' (did you mean transformer_dlcl_3"),
    ("archs zzz", "lists all"),
    ("archs --jsn", "unrecognised arguments: --jsn"),
    ("flags dclc", "METHOD: unknown method or axis (dclc) (did you mean dlcl?)"),
    ("flags modern", "(modern); for architectures, run: fairseq-deep archs modern;"),

    ("average --output out", "one of the arguments --inputs"),
    ("average --last 0 --dir dir --output out", "argument --last: must be a whole number of at least 1, not '0'"),
    ("average --inputs one.pt nowhere.pt --output out", "nowhere.pt: no such checkpoint; correct the path"),
    ("average --inputs one.pt text.pt --output out", "cannot load text.pt"),
    ("average --inputs other.pt --output out", "it has no 'model'"),
    ("average --inputs one.pt --output no/out", "cannot write no/out: the directory no does not exist; create it"),
    ("average --inputs one.pt --output dir", "cannot write dir: it exists and is not a regular file"),
    ("average --inputs one.pt one.pt --output out", "given twice"),
    ("average --inputs one.pt link.pt --output out", "given twice (same file as one.pt)"),
    ("average --inputs one.pt nan.pt --output out", "nan.pt holds NaN or Inf in w"),
    ("average --inputs one.pt inf.pt --output out", "inf.pt holds NaN or Inf in w"),
    ("average --inputs ab.pt a.pt --output out",
     f"a.pt does not fit {DIFFERS.format('b is missing in it and 2x3 there')}"),
    ("average --inputs ab.pt abc.pt --output out", "c is 1 in it and missing there"),
    ("average --inputs ab.pt turned.pt --output out", "b is 3x2 in it and 2x3 there"),
    ("average --inputs ab.pt whole.pt --output out", "b is 2x3 without a mean in it and 2x3 there"),
    ("average --inputs tied.pt untied.pt --output out", "b is 2 in it and 2 tied to a there"),
    ("average --inputs grows.pt grown.pt --output out",
     f"{GROWS} is a factor of 0.75 in it and a factor of 0.5 there; average later"),
    ("average --inputs heads8.pt heads4.pt --output out", "heads4.pt does not fit heads8.pt: --encoder-attention-heads "
     "4 (heads8.pt: 8); average checkpoints of one run"),
    ("average --inputs cfg.pt --output out", f"{INCOMPLETE}its cfg is a list"),
    ("average --inputs model.pt --output out", f"{INCOMPLETE}its cfg.model is a str"),
    ("average --inputs args.pt --output out", f"{INCOMPLETE}its args are a dict"),
    ("average --inputs empty.pt --output out", f"{INCOMPLETE}its model is empty"),
    ("average --inputs sparse.pt --output out", f"{INCOMPLETE}w is a sparse tensor"),
    ("average --inputs meta.pt --output out", f"{INCOMPLETE}w is a meta tensor"),
    ("average --inputs number.pt --output out", f"{INCOMPLETE}a parameter has the name 3"),
    ("plot weights number.pt --output out.png", f"number.pt {INCOMPLETE}a parameter has the name 3"),
    ("plot weights one.pt --csv w.csv", "one.pt has no DLCL weights: give a checkpoint that was trained with"),
    ("plot weights bad.pt --csv w.csv", "bad.pt holds NaN or Inf in encoder.history.weight; give an earlier"),
    ("plot weights nowhere.pt --csv w.csv", "cannot load nowhere.pt"),
    ("plot weights dlcl.pt --output w.jpg", "cannot draw w.jpg: the file name must end in .png, .svg, .pdf"),
    ("plot weights dlcl.pt --csv no/w.csv", "cannot write no/w.csv: the directory no does not exist"),
    ("plot weights dlcl.pt --csv w.csv --column 3", "--column 3 must be from 0 to 2 for the encoder"),
    ("plot weights void-folder", "void-folder is a directory, not a checkpoint: give a checkpoint"),
    ("plot weights run", "run is a directory, not a checkpoint: give run/averaged.pt"),
    ("plot weights dir", "dir is a directory, not a checkpoint: give dir/checkpoint_last.pt",
     write(dir___checkpoint_last__pt="")),
    ("plot run no.log", "cannot read no.log: No such file"),
    ("plot run ref", "ref is not a training log: it must have a line with train_inner or valid"),
    ("plot run void-folder", "void-folder has neither train.jsonl nor logs/4-train.log: give the directory of a re"),
    ("plot run log log --names a", "--names has 1 names for 2 logs: give one per log", write(log=LOG)),
    ("plot run log log", "two logs have the same name: give --names A,B", write(log=LOG)),
    ("plot run log --output a.txt", "cannot draw a.txt: the file name must end in", write(log=LOG)),
    ("average --last 3 --dir dir --output out", "dir has 2 of the 3 epoch checkpoints (checkpointE.pt): checkpoint1.pt,"
     " checkpoint2.pt; ask for fewer"),
    ("average --last-updates 1 --dir dir --output out", "dir has 0 of the 1 update checkpoints (checkpoint_E_U.pt): "
     "none; use --last 2"),
    ("average --last 3 --dir dir/run --output out", "none; use --dir dir/run/checkpoints"),
    ("average --last 3 --dir dir/run/checkpoints --output out", "none; use --last-updates 1"),
    ("average --best 1 --dir dir --output out", ": none; use --last 2"),
    ("average --last 1 --output out", "require --dir"),
    ("average --inputs one.pt --dir dir --output out", "require --dir"),
    ("average --last 1 --dir no --output out", "--dir no: no such directory"),
    ("average --best 1 --dir best --output out", "cannot tell whether a high or a low mystery"),
    ("average --best 1 --dir mixed --output out", "different metrics (loss, mystery)"),

    ("check void", "void is not a readable checkpoint"),
    ("check text.pt", "text.pt is not a readable checkpoint"),
    ("check x.pt", "x.pt is not a readable checkpoint", write(x__pt=b"PK\x03\x04 no more")),
    ("check x.pt", "x.pt is not a readable checkpoint", write(x__pt=STOCK.read_bytes()[:40000])),
    ("check a", "cannot read a: it must be a regular file or a directory", pipe("a")),
    ("check a", "cannot read a: it must be a regular", lambda folder: socket.socket(socket.AF_UNIX).bind("a")),
    ("check a", "cannot read a: it must be a regular", lambda folder: os.symlink("/dev/zero", folder / "a")),
    ("check a", "cannot read a: No such file or directory", lambda folder: os.symlink("none", folder / "a")),

    ("diagnose run/data-bin", "nothing to measure: give --arch NAME or --path CHECKPOINT"),
    ("diagnose run/data-bin --arch transformer_dlcl_31l", "unknown architecture transformer_dlcl_31l: did you mean "),
    ("diagnose run/data-bin --arch transformer_iwslt_de_en", "transformer_iwslt_de_en is a TransformerModel: give a "
     "model of this package"),
    (f"diagnose run/data-bin --arch {POST} --encoder-layer 3", "--encoder-layer"),
    (f'diagnose run/data-bin --arch "{POST} \'open"', "wrong flags in"),
    (f"diagnose run/data-bin --arch {POST} --encoder-layers three", "invalid int value: 'three'"),
    (f"diagnose run/data-bin --arch {POST} --deep-init xaver", "unknown --deep-init xaver (did you mean xavier?)"),
    (f"diagnose run/data-bin --arch {POST} --encoder-embed-dim 15", "is not divisible by"),
    (f"diagnose run/data-bin --arch {POST} --split none", "cannot read the split none"),
    (f"diagnose run/data-bin --arch {POST} --source-lang xx --target-lang de", "dict.xx.txt"),
    (f"diagnose run/data-bin --arch {POST} --plot a.jpg", "the file name must end in .png, .svg, .pdf"),
    (f"diagnose run/data-bin --arch {POST} --json no/a", "cannot write no/a: the directory no does not exist"),
    (f"diagnose --encoder-layers 3 run/data-bin --arch {POST}", "3: no such directory; give a directory"),
    (f"diagnose void-folder --arch {POST}", "cannot read void-folder"),
    ("diagnose run/data-bin --path nowhere.pt", "nowhere.pt: no such checkpoint"),
    ("diagnose run/data-bin --path nowhere.pt --encoder-layers 3", "--encoder-layers is not supported with --path"),
    ("diagnose run/data-bin --path text.pt", "cannot load text.pt"),
    ("diagnose swapped --path run/averaged.pt", "trained with another source dictionary"),

    (DISTILL, "the teacher translates en to de: text/train.en is missing (plain or .gz)", remove("text/train.en")),
    (DISTILL, "text/train.en has 200 lines but text/train.de has 201", append("text/train.de", "mehr\n")),
    (DISTILL, "the teacher's dictionary lacks 100 % of the source", write(text___train__en="ξένη γλώσσα\n" * 200)),
    (DISTILL, "--text text: no such directory", remove("text")),
    (DISTILL, "train.de, line 1: not UTF-8", write(text___train__de=b"\xff\n")),
    (f"{DISTILL} --output text", "distill: cannot write text: it exists and is not an empty directory; give "),
    (f"{DISTILL} --output no/out", "distill: cannot write no/out: the directory no does not exist; create it first"),
    (f"{DISTILL} -s de -t en", "averaged.pt translates en to de, not de to en; omit -s and -t"),
    (f"{DISTILL} --data swapped", "the checkpoint was trained with another source dictionary"),

    ("package run --output full", "cannot write full: it exists and is not an empty directory"),
    ("package run --output full/x", "cannot write full/x: it exists and is"),
    ("package run --output a/b", "cannot write a/b: the directory "),
    (f"package no {OUT}", "no does not exist: give the directory of a recipe, a packaged model"),
    (f"package hf {OUT}", "hf is a model of transformers"),
    (f"package run/averaged.pt {OUT}", "run/dict.en.txt: cannot be read (No such file or directory); see --data"),
    (f"package run/averaged.pt --data run/data-bin {OUT}", "run/data-bin has sub-words, but no merges"),
    (f"package run --bpe-codes run/RESULT.json {OUT}", "run/RESULT.json: not a valid file of subword-nmt merges"),
    (f"package run --name 'a\nb' {OUT}", "run/averaged.pt cannot be packaged: name is "),
    (PACKAGE, f"{MODEL} cannot be packaged: encoder.embed_tokens.weight holds NaN or Inf", filled(0, math.inf)),
    (f"{PACKAGE} --dtype float16", "encoder.embed_tokens.weight is beyond the range of torch.float16", filled(5, 1e30)),
    (PACKAGE, f"{MODEL}", stored(pruned)),
    (PACKAGE, f"{MODEL}", stored(renamed)),
    (f"{PACKAGE} --data swapped", "was trained with another source dictionary"),

    (SCORE.replace("sys sys", "sys three"), "line counts differ: three has 3, ref has 4; align the files"),
    (SCORE.replace("sys sys", "sys void"), "void is empty (0 lines)"),
    (SCORE.replace("sys sys", "sys nowhere"), "cannot read nowhere"),
    (SCORE.replace("sys sys", "sys latin1"), "latin1 is not UTF-8 (line 2)"),
    (SCORE, "cannot read ref", write(ref=gzip.compress(b"some text\n" * 99)[:-9])),
    ("score --sys", "argument --sys: expected at least one argument"),
    ("score --sys sys", "--sys requires the references: add --ref"),
    (f"{SCORE} --hypotheses x", "--hypotheses requires --generate-output"),
    (f"{SCORE} --json no/out.json", "cannot write no/out.json: the directory no does not exist"),
    ("score --sys - - --ref ref", "'-' is given twice"),
    ("score --generate-output gen --detokenize de --tokenized", "--detokenize is not supported with --tokenized"),
    ("score --generate-output gen gen --hypotheses x", "--hypotheses is not supported with several systems"),
    ("score --sys sys sys --ref ref --against x", "--against is not supported with several systems"),
    ("score --generate-output gen --hypotheses o --references o", "cannot write o: o is the same file"),
    ("score --generate-output gen --hypotheses o --json ./o", "cannot write ./o: o is the same file"),
    ("score --generate-output gen other", "other has other references than gen; give the same with --ref",
     lambda folder: (shutil.rmtree(folder / "other"), write(other="T-0\ta cat is here\nH-0\t-1\ta\n")(folder))),
    ("score --generate-output gen --ref ref", "gen has 1 hypotheses for 4 references of ref: sentence 1 has only one"),
    ("score --generate-output gen --ref x --ref x --references o", "--references is given 1 time(s) for 2 set(s) of ref"
     "erences", write(x="a\n")),
    *((SCORE, words, write(**{"sys": system + "\n", "ref": reference + "\n"})) for system, reference, words in (
        ("a hou@@ se", "x", "sys: 1 of 1 lines have sub-word marks (@@); join"),
        ("x", "a hou@@ se", "ref: 1 of 1 lines have sub-word marks (@@); join"),
        (PIECES[:-1], "x", "sys: 1 of 1 lines have pieces of SentencePiece; join"),
        ("x", "a <<unk>> is", "ref: 1 of 1 lines have unknown words (<<unk>>); give the text before"),
        ("H-0\t-0.1\ta house", "x", "sys: 1 of 1 lines have the format of fairseq-generate's output; give the"),
        ('{"line": 1, "source": "x"}', "x", "sys: 1 of 1 lines have JSON; translate without --json"),
        ("It 's .\n" * 3 + "It 's .", "It's.\n" * 3 + "It's.", "sys is tokenised (4 lines end in ' .'), but "),
        ("\u6211\u4eec\u53bb", "\u6211\u4eec\u53bb", "ref has text without blanks between words; add --lang"),
    )),
    *(("score --generate-output gen", words, write(gen=text)) for text, words in (
        ("T-0\ta\nH-0\t-1\ta\nT-0\ta\n", "gen:3: sentence 0 has a T- line already (several"),
        ("H-0\t-1\ta\nH-1\t-1\tb\nH-0\t-1\tc\nH-1\t-1\td\n", "gen:3: sentence 0 has a H- line already (several"),
        (f"T-0\t{PIECES}H-0\t-1\t{PIECES}D-0\t-1\t{PIECES}", "gen: 1 of 1 lines have pieces of SentencePiece"),
        ("T-0\ta b\nH-0\t-1\ta b\nT-1\tb\nD-1\t-1\tb\n", "has 1 hypotheses for 2 references"),
        ("T-0\tahouseishere\nH-0\t-1\ta house is here\nD-0\t-1\tahouseishere\n", "SentencePiece was decoded twice"),
        ("T-0\ta <<unk>> is\nH-0\t-1\ta house is\n", "unknown words (<<unk>>); give the text before"),
        ("H-0\t-1\ta b c d\n", "no line 'T-...'"),
        ("T-0\tx\n", "no line 'H-...'"),
        ("H-0\tx\n", "H-0 has no score"),
        (f"H-{'9' * 5000}\t-1\tx\n", "the sentence number has 5000 digits"),
    )),
    ("report cmp --generate-output gen", "H-0 has no score",
     write(gen="H-0\tx\n", cmp___train__sh="fairseq-train data-bin\n")),

    ("score --sys ours --ref truth --against cmp --tokenized", "--against requires sacreBLEU"),
    ("score --sys ours --ref truth --resamples 5", "--resamples requires another system; add it, or --against"),
    ("score --sys ours --ref truth --against nowhere", "cannot read nowhere"),
    ("score --sys ours --ref truth --ref truth --against cmp", "1 set(s) of references, not 2"),
    ("score --sys ours --ref truth --against short", "59 sentences, but the references 60"),
    ("score --sys ours --ref truth --against fewer", "other references (line 60)"),
    ("score --sys ours --ref truth --against cropped", "other references (line 60)"),
    ("score --sys ours --ref truth --against other", "other references (line 42)"),
    ("score --sys ours --ref truth --against bare", "has no test.ref.de"),
    ("score --sys ours --ref truth --against many", "translations into de, en; choose one with --lang"),
    ("score --sys ours --ref truth --against many --lang en", "has no test.ref.en"),
    ("score --sys ours --ref truth --against void-folder", "has no test.hyp.LANG"),
    ("score --sys ours --ref truth --against seeds", "several seeds; give one, such as seeds/seed2"),
    ("score --multilingual none", "no such directory"),
    ("score --multilingual void-folder", "has no test.SRC-TGT.hyp"),
    ("score --multilingual pairs --against pair", "has no translations of en-fr"),
    ("score --multilingual pairs --lang de", "--lang is not supported with --multilingual"),
    ("score --multilingual pair --against pairs", "other references for en-de"),
    ("score --multilingual uneven", "line counts differ"),

    (f"translate {MODEL}", "parts/dict.de.txt: must be a regular file; see --data", pipe("parts/dict.de.txt")),
    ("translate nothing", "nothing does not exist: give the directory of a recipe, a packaged model, or a checkpoint"),
    ("translate dir", "dir has none of averaged.pt, checkpoints/checkpoint_best.pt, checkpoints/checkpoint_last.pt: "
     "give the directory of a recipe that has trained, or a checkpoint"),
    ("translate ct2", "ct2 is a model of CTranslate2 without fairseq_deep.json: export the model again with this"),
    ("translate hf", "hf is a model of transformers without fairseq_deep.json: export the model again with this "
     "version, or convert it with fairseq-deep import --from huggingface"),
    ("translate hf", "hf/fairseq_deep.json: nested more than 50 levels deep; export",
     write(hf___fairseq_deep__json="[" * 60 + "]" * 60)),
    ("translate in.txt.tgz", "in.txt.tgz is an archive, not a model: unpack it, and give"),
    (f"translate {MODEL} in.txt", "in.txt is text, not a model: give text with --input"),
    (f"translate {MODEL} in.txt.gz", "in.txt.gz is text, not a model: give text with"),
    (f"translate {MODEL} --bpe-codes spm.model", "spm.model does not fit the source dictionary: "),
    (f"translate {MODEL} --bpe-codes no", "no does not exist: see --bpe-codes"),
    (f"translate {MODEL} --data no", "no does not exist: see --data"),
    (f"translate {MODEL}", "parts/dict.de.txt: cannot be read (No such file", remove("parts/dict.de.txt")),
    (f"translate {MODEL}", "parts/dict.de.txt:1: must be a token", write(parts___dict__de__txt="nothing")),
    (f"translate {MODEL}", f"{MODEL} does not fit parts: the checkpoint was trained with another source dict",
     write(parts___dict__en__txt="other 1\n")),
    (f"translate {MODEL}", f"cannot load {MODEL}: ", write(parts___averaged__pt="nothing of the kind")),
    (f"translate {MODEL}", "parts has sub-words, but no merges or SentencePiece model: give", remove("parts/code")),
    (f"translate {MODEL}", "parts/code: not a valid file of subword-nmt merges: Error", write(parts___code="nothing")),
    (f"translate {MODEL}", "parts/code has merges of version 0.9; subword-nmt supports 0.1 and 0.2",
     write(parts___code="#version: 0.9\na b\n")),
    (f"translate {MODEL}", "parts/steps.json: ", write(parts___steps__json="nothing of the kind")),
    (f"translate {MODEL}", f"{MODEL} does not name its languages, and files in parts do not: give --data DIR, the "
     "binarised data, or --source-lang and --target-lang", stored(nameless)),
    (f"translate {MODEL} -t en", f"{MODEL} translates en to de, not en to en; omit -s and -t"),
    (f"translate {MODEL} --nbest 2", "--nbest 2 gives several translations per line: add --json"),
    (f"translate {MODEL} --nbest 9 --json", "--nbest 9 exceeds --beam 4: choose a larger beam"),
    (f"translate {MODEL} --input no", "cannot read no: No such file"),
    (f"translate {MODEL} --input latin1 {OUT}", "latin1 is not UTF-8 (line 2)"),
    (f"translate {MODEL} --output no/out", "cannot write no/out: the directory"),
    (f"translate {MODEL} --input in.txt {OUT}", "", stored(diverged)),
    (f"translate run {MODEL}", "run/averaged.pt prepare text differently (sub-words): use models with equal settings",
     write(parts___code="#version: 0.2\nh a\n")),
    (f"translate run {MODEL}", "run/averaged.pt prepare text differently (tokenizer, lowercase): use models with equal",
     write(parts___steps__json='{"tokenizer": "none", "lowercase": true}')),
    (f"translate run {MODEL}", "parts/dict.en.txt differs from the dictionary of run/averaged.pt: use models with equal"
     " dictionaries in an ensemble", swapped),
    ("translate run", "lenpen is nan, not a number from 0 to 100", result(lenpen=math.nan)),
    ("translate run", "gnmt_lenpen is 'no', not true or false", result(gnmt_lenpen="no")),
    ("translate run", "beam is 0, not a whole number from 1 to 1000", result(beam=0)),
    ("translate run", "max_len_b is 1000000000.0, not a whole number", result(max_len_b=1e9)),
    ("translate run", "half of a surrogate pair; run the recipe again with --stage 7", result(bleu="\ud800")),
    ("translate run", "difference is missing",
     result(scores={"test": {"sacrebleu": {"against": {"measures": {"BLEU": {}}}}}})),
    *((f"export {name}/model.pt --format {form} {OUT}", f"model.pt has --language-{name} (encoder), which ")
      for name in ("norm", "transform") for form in ("fairseq", "ctranslate2", "huggingface")),

    (f"export {MODEL} --quantization int8 {OUT}", "--quantization requires --format ctranslate2: add that, or omit"),
    (f"export {MODEL} --verify x {OUT}", "--verify requires --format ctranslate2 or huggingface or torch: "),
    (f"export {MODEL} --beam 3 {OUT}", "--beam requires --format torch: add that, or omit --beam"),
    *(row for form in ("ctranslate2", "huggingface") for row in (
        (f"export no --format {form} {OUT}", "no does not exist: give the directory of a recipe, a packaged model"),
        (f"export run --format {form} --output full", "cannot write full: it exists and is not an empty directory"),
        (f"export run --format {form} --output no/out", "cannot write no/out: the directory "),
    )),
    (f"export run --format huggingface --verify no {OUT}", "cannot read no: No such file"),
    (f"export run --format torch {OUT}", "--output out must end in .pt2"),
    ("export run --format torch --output a.pt2", "cannot write a.pt2: it exists; give another name", write(a__pt2="")),
    ("export run --format torch --output no/out.pt2", "the directory no does not exist"),
    ("export a.pt2 --format torch --output b.pt2", "a.pt2 is an export for other programs: give", write(a__pt2="")),

    ("report run", "lenpen is nan, not a number from 0 to 100", result(lenpen=math.nan),
     write(run___train__sh="fairseq-train data-bin\n")),

    *(("package run --output " + name, message) for name, message in (
        ("full", "cannot write full: it exists"), ("no/new", "cannot write no/new: the directory "),
        ("/proc/new", "cannot write /proc/new"),
    )),
]  # fmt: skip


@pytest.fixture
def place(prepared, tmp_path, monkeypatch):
    """A copy of all files as the current directory."""
    folder = shutil.copytree(prepared, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def contents(folder):
    """Every path in *folder* with its state, which a write would change."""
    states = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: (state.st_size, state.st_mtime_ns, state.st_ino) for path, state in states}


def refuse(words, part, folder, capsys):
    """Run the command, which is to be refused as the module's docstring says."""
    before = contents(folder)
    capsys.readouterr()
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    out, line = capsys.readouterr()
    assert (status, out, line.count("\n")) == (2, "", 1), line
    assert line.startswith(f"fairseq-deep {words[0]}: ") and part in line, line
    assert contents(folder) == before


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row[0][:70]}: {row[1][:50]}") for row in ROWS])
def test_a_command_is_refused_in_one_line(row, place, capsys):
    command, part, *changes = row
    for change in changes:
        change(place)
    refuse(shlex.split(command), part, place, capsys)


ABSENT = [
    ("matplotlib.figure", f"diagnose run/data-bin --arch {POST} --plot a.png", "pip install matplotlib"),
]


@pytest.mark.parametrize("module, command, part", ABSENT, ids=[row[0] for row in ABSENT])
def test_a_missing_package_is_named(module, command, part, place, capsys, monkeypatch):
    monkeypatch.setattr("fairseq_deep.tools.measuring._batch", lambda *_: pytest.fail("measured before"))
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    refuse(shlex.split(command), part, place, capsys)


RUN = ["run/averaged.pt", "run/data-bin/dict.en.txt", "run/text/bpe/code", "run/train.jsonl"]
OUTPUTS = {  # commands with OUT for the output, and inputs that OUT must not be
    "translate run --input in.txt --output OUT": [*RUN, "in.txt"],
    "translate lone.pt --input in.txt --output OUT": ["lone.pt", "code", "dict.en.txt", "steps.json", "in.txt"],
    "translate lone.pt --bpe-codes hyp.txt --data run/data-bin --output OUT": ["hyp.txt", "run/data-bin/dict.de.txt"],
    "plot weights lone.pt --csv OUT": ["lone.pt"],
    "plot weights lone.pt --json OUT": ["lone.pt"],
    "plot run run log.jsonl --csv OUT": ["run/train.jsonl", "run/averaged.pt", "log.jsonl"],
    "diagnose run/data-bin --path lone.pt --json OUT": ["lone.pt", "run/data-bin/dict.en.txt"],
    "diagnose run/data-bin --arch 'dlcl --init-from=lone.pt' --encoder-embed-path in.txt --json OUT":
        ["lone.pt", "in.txt"],
    "report run --generate-output gen.txt --output OUT": [*RUN, "run/test.hyp.de", "run/RESULT.json", "gen.txt"],
    "score --sys hyp.txt --ref ref.txt --against run --json OUT": ["hyp.txt", "ref.txt", "run/test.hyp.de"],
    "score --generate-output gen.txt --hypotheses OUT": ["gen.txt"],
    "score --generate-output gen.txt --references OUT": ["gen.txt"],
    "score --multilingual pairs --json OUT": ["pairs/test.en-de.ref"],
    "average --inputs lone.pt other.pt --output OUT": ["lone.pt", "other.pt"],
    "average --dir epochs --last 1 --output OUT": ["epochs/checkpoint1.pt", "epochs/checkpoint2.pt"],
    "average --inputs pkg/model.safetensors --output OUT": ["pkg/config.json"],
    "export lone.pt --output OUT": ["lone.pt"],
    "export run --output OUT": ["run/averaged.pt"],
}  # fmt: skip
NAMES = {*sum(OUTPUTS.values(), []), "run/train.sh", "run/test.ref.de", "run/data-bin/dict.de.txt", "dict.de.txt",
         "pairs/test.en-de.hyp", "pkg/model.safetensors"}  # fmt: skip


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_command_writes_over_its_input(command, tmp_path, monkeypatch, capsys):
    """By its own name, by its absolute name, by a symbolic link and by a hard link."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}\n")
    for name in OUTPUTS[command]:
        Path("link").symlink_to(name)
        os.link(name, "hard")
        for output in (name, os.path.abspath(name), "link", "hard"):
            words = [output if word == "OUT" else word for word in shlex.split(command)]
            refuse(words, f"cannot write {output}: it is an input", tmp_path, capsys)
        os.remove("link")
        os.remove("hard")
