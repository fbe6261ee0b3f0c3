"""fairseq-deep check: what is in a file, told without running code of it."""

import argparse
import io
import os
import struct
import tarfile
import zipfile

import pytest
import torch
from fairseq import safe_load
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf
from omegaconf.nodes import AnyNode

from tests.helpers.hostile import Call, archive, checkpoint, member
from tests.helpers.paths import STOCK


@pytest.fixture
def check(command):
    """check(path): exit code, rows of the table by their name, what is unusual, and errors."""

    def check(path):
        code, out, errors = command("check", path)
        lines = [line.split(maxsplit=1) for line in out.splitlines()]
        unusual = [text for name, text in lines if name == "unusual"]
        return code, dict(lines), unusual if unusual != ["nothing"] else [], errors

    return check


def state(**parts):
    return {"cfg": {"model": {"arch": "transformer_x"}}, "model": {"w": torch.ones(2, 3), "b": torch.ones(5)}, **parts}


def saved(content, **options):
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


@pytest.mark.parametrize("kind, names, given, row", [
    ("packaged model", ["config.json", "model.safetensors", "model.bin", "SHA256SUMS"], ".", "unusual"),
    ("model for CTranslate2", ["config.json", "model.bin"], ".", "uninspected"),
    ("model for transformers", ["config.json", "model.safetensors", "tokenizer_config.json"], ".", "uninspected"),
    ("model for transformers", ["config.json", "model.safetensors", "tokenizer_config.json"], "model.safetensors",
     "uninspected"),
])  # fmt: skip
def test_models_of_other_programs_are_told_apart_from_packages(check, tmp_path, kind, names, given, row):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    code, rows, _, _ = check(tmp_path / given)
    assert code == 1 and rows["kind"] == kind
    assert rows[row] == ", ".join(names) if row == "uninspected" else rows[row] != "nothing"


@pytest.mark.parametrize("zipped", [True, False])
def test_an_ordinary_checkpoint(check, tmp_path, zipped):
    path, content = tmp_path / "c.pt", state(extra_state={"epoch": 3}, optimizer={"m": torch.tensor([float("nan")])})
    content["model"]["p"] = torch.nn.Parameter(torch.ones(4))
    assert check(STOCK)[::2] == (0, [])
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    code, rows, unusual, _ = check(path)
    assert code == 0 and unusual == [] and rows["model"] == "transformer_x, 3 tensors, 15 values"
    assert rows["parts"] == "cfg, extra_state, model, optimizer" and f"{path.stat().st_size:,} bytes" in rows["kind"]


@pytest.mark.parametrize("zipped", [True, False])
def test_planted_calls_are_named_and_not_run(check, tmp_path, zipped):
    path = tmp_path / "planted.pt"
    content = state(extra_state=[Call(os.system, f"touch {tmp_path}/ran"), Call(eval, "1"), Call(torch.load, "x")])
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    code, rows, unusual, _ = check(path)
    assert code == 1 and not (tmp_path / "ran").exists() and "model" not in rows
    names = [text.split()[1].rstrip(",").rpartition(".")[2] for text in unusual]
    assert names == (["eval", "system", "load"] if zipped else ["system"]), "an old pickle is read to the first name"


def nested(levels, value=0):
    for _ in range(levels):
        value = [value]
    return value


def of_arch(**flags):
    return {"cfg": {"model": {"_name": "transformer_dlcl_6l", **flags}}}


def model(**weights):
    return {"model": {name.replace("__", "."): value for name, value in weights.items()}}


REJECTED, CONTRADICTS = "a setting that is rejected: ", "cannot build a model with its settings: "
FILES = {"model": {"arch": "x"}, "bpe": {"_name": "subword_nmt", "bpe_codes": "http://x\n\x1b[2J/\ud800"},
         "checkpoint": {"restore_file": "checkpoint_last.pt", "save_dir": "x"}}  # fmt: skip
LOOP = {"_name": "translation"}
LOOP["self"] = LOOP
SETTINGS = [
    (checkpoint(task="speech_unit_modeling"), "task = speech_unit_modeling"),
    (checkpoint(task__dataset_impl="fasta"), "dataset_impl = fasta"),
    (checkpoint(task__dataset_impl=OmegaConf.create({"_name": "fasta"})), "dataset_impl = fasta"),
    (checkpoint(task__data="${oc.env:SECRET}"), "data = ${oc.env:SECRET}"),
    (checkpoint(task__data=AnyNode("${oc.env:SECRET}")), "data = ${oc.env:SECRET}"),
    (checkpoint(task__data="${model.data}"), "data = ${model.data}"),
    (checkpoint(task__lang_pairs=["a-b", "a-x/../../c"]), "lang_pairs = a-x/../../c"),
    (checkpoint(task__mono_langs="a,/tmp"), "mono_langs = a,/tmp"),
    (checkpoint(task="${task.data}"), "task = ${task.data}"),
    (checkpoint(criterion="ctc"), "criterion = ctc"),
    (checkpoint(task__data="fasta", task__dataset_impl="fasta"), "dataset_impl = fasta"),
    (checkpoint(tokenizer=3), "tokenizer = 3"),
    (checkpoint(common__self=LOOP, task="hubert_pretraining"), "task = hubert_pretraining"),
    ({"cfg": OmegaConf.create({"task": {"x": "${oc.env:SECRET}"}})}, "x = ${oc.env:SECRET}"),
    ({"cfg": {"task": TranslationConfig(data="${oc.env:A}")}}, "data = ${oc.env:A}"),
    ({"args": argparse.Namespace(task="text_to_speech", arch="transformer")}, "task = text_to_speech"),
    ({"args": argparse.Namespace(dataset_impl="fasta"), "cfg": None}, "dataset_impl = fasta"),
]
UNUSUAL = [
    *((content, REJECTED + named) for content, named in SETTINGS),
    ({"cfg": torch.zeros(0)}, f"{REJECTED}settings = "),
    ({"cfg": nested(240)}, f"{REJECTED}more than 50 levels of containers"),
    ({"cfg": {"task": 10**5000}}, "contains pickle instruction 139, which could run code"),
    ({"cfg": {"model": {"encoder_attention_heads": 0}}}, f"{REJECTED}encoder_attention_heads = 0"),
    ({"cfg": {"model": {"encoder_attention_heads": -1}}}, f"{REJECTED}encoder_attention_heads = -1"),
    ({"cfg": {"model": {"dropout": "x"}}}, f"{REJECTED}dropout = x"),
    (of_arch(encoder_attention_heads=3), f"{CONTRADICTS}--encoder-embed-dim 512 is not divisible by --encoder-attention"
     "-heads 3"),
    (of_arch(decoder_layers=-1), f"{CONTRADICTS}--decoder-layers must be a whole number of at least 0 (-1)"),
    (of_arch(encoder_layers="x"), f"{CONTRADICTS}--encoder-layers must be a whole number of at least 0 ('x')"),
    (of_arch(max_source_positions=-5), f"{CONTRADICTS}--max-source-positions must be a whole number of at least 1"),
    (of_arch(layer_agg="new"), f"{CONTRADICTS}unknown --layer-agg new"),
    (of_arch(decoder_attn=5), CONTRADICTS),
    (of_arch(encoder_layers=10**9), f"{CONTRADICTS}it has fewer tensors than 1,000,000,000 layers"),
    ({"cfg": FILES}, r"a setting that names a file, which is ignored: bpe_codes = http://x\n\x1b[2J/\ud800"),
    (model(odd=torch.tensor([1.0, float("nan")])), "odd holds NaN or Inf"),
    (model(odd=torch.tensor([float("-inf")]).bfloat16()), "odd holds NaN or Inf"),
    (model(odd=torch.tensor([float("inf")]).half()), "odd holds NaN or Inf"),
    (model(odd=torch.eye(2).to_sparse()), "odd is a sparse or quantised tensor, which is not inspected"),
    (model(fc1__weight=torch.ones(2, dtype=torch.int8)), "fc1.weight holds whole numbers (int8), which are not"),
    ({"model": None}, "it has no model"),
    ({"model": {}}, "it has no model"),
    (model(w=torch.ones(2), n=[1.0], b="text"), "2 parts of the model are not tensors, such as n"),
]  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])
@pytest.mark.parametrize("parts, finding", [pytest.param(*row, id=row[1][:60]) for row in UNUSUAL])
def test_what_is_unusual_in_a_checkpoint(check, tmp_path, parts, finding, zipped, monkeypatch):
    """Settings that are rejected here are rejected when it is loaded, unless the user trusts its source."""
    whole = {"model": {"w": torch.ones(1)}} if "cfg" in parts or "args" in parts else state()
    torch.save({**whole, **parts}, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    code, _, unusual, _ = check(tmp_path / "c.pt")
    assert code == 1 and len(unusual) == 1 and unusual[0].startswith(finding)
    if finding.startswith(REJECTED):
        with pytest.raises(safe_load.CheckpointError, match="c.pt: rejected, because") as refusal:
            safe_load.load(str(tmp_path / "c.pt"))
        message = str(refusal.value)
        assert finding.removeprefix(REJECTED) in message and safe_load.OPT_OUT in message and "\n" not in message
        monkeypatch.setenv(safe_load.OPT_OUT, "1")
        safe_load.load(str(tmp_path / "c.pt"))


def test_weights_without_values_and_what_is_no_dictionary(check, tmp_path):
    torch.save(state(model={"fc1.bias": torch.ones(2, device="meta")}), tmp_path / "c.pt")
    assert "fc1.bias has no values" in check(tmp_path / "c.pt")[2]
    torch.save([1], tmp_path / "c.pt")
    assert "not the dictionary" in check(tmp_path / "c.pt")[2][0]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("change, compression, code, said", [
    (lambda entries: entries, zipfile.ZIP_DEFLATED, 1, "compressed"),
    (lambda entries: [*entries, entries[-1]], zipfile.ZIP_STORED, 1, "duplicate names"),
    (lambda entries: [*entries, ("c/constants.pkl", b"")], zipfile.ZIP_STORED, 1, "TorchScript"),
    *((lambda entries, odd=odd: [(name, odd if "/data/" in name else it) for name, it in entries], zipfile.ZIP_STORED,
       2, "does not match expected size") for odd in (b"x", bytes(99))),
])  # fmt: skip
def test_odd_zip_files(check, tmp_path, change, compression, code, said):
    torch.save(state(), tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt") as old:
        entries = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(tmp_path / "c.pt", "w", compression) as new:
        for entry in change(entries):
            new.writestr(*entry)
    found, _, unusual, error = check(tmp_path / "c.pt")
    assert found == code and len(unusual) == (code == 1) and said in "".join([*unusual, error])


@pytest.mark.skipif(not safe_load.NAMED_SAFE_GLOBALS, reason="older torch follows all instructions")
@pytest.mark.parametrize("content, protocol, code", [(state(), 4, 149), (state(cfg={"lr": 1 << 9999}), 2, 139)])
def test_instructions_that_loading_refuses(check, tmp_path, content, protocol, code):
    torch.save(content, tmp_path / "c.pt", pickle_protocol=protocol)
    assert any(f"contains pickle instruction {code}, " in problem for problem in check(tmp_path / "c.pt")[2])
    with pytest.raises(safe_load.CheckpointError, match=f"contains pickle instruction {code}"):
        safe_load.load(str(tmp_path / "c.pt"))


PLANTED = {"model": {"w": torch.ones(1)}, "x": Call(os.system, "touch RAN")}
WHOLE = member("model.pt", saved(state()))


@pytest.mark.parametrize("members, code, said", [
    ([WHOLE, member("dict.en.txt", b"a 1\n"), member("code", "#version: 0.2\nä b\n".encode())], 0, {}),
    ([member("model.pt", saved(PLANTED))], 1, {"unusual": "model.pt: contains posix.system, which could run code: "
                                               "fairseq rejects it"}),
    ([member("weights", saved(PLANTED, _use_new_zipfile_serialization=False))], 1,
     {"unusual": "weights: contains posix.sy"}),
    ([member("dict.txt", b"cos\nsystem\n(S'touch RAN'\ntR.")], 1, {"unusual": "dict.txt: contains os.system"}),
    ([WHOLE, member("x", b"\x00\xff")], 1, {"uninspected": "x", "unusual": "nothing"}),
    ([member("model.pt", b"text\n")], 1, {"uninspected": "model.pt"}),
    ([member("a\nunusual  nothing\x1b[2J")], 1, {"holds": r"a\nunusual  nothing\x1b[2J", "unusual": "a\\nunusual"}),
])  # fmt: skip
def test_members_of_an_archive(check, tmp_path, monkeypatch, members, code, said):
    monkeypatch.chdir(tmp_path)
    found, rows, _, _ = check(archive(tmp_path / "m.tar.gz", *members))
    assert found == code and all(rows[name].startswith(text) for name, text in said.items())
    assert ("uninspected" in rows) == ("uninspected" in said) and not (tmp_path / "RAN").exists()


def test_members_outside_of_the_archive_and_links(check, tmp_path):
    code, rows, unusual, _ = check(archive(
        tmp_path / "m.tar.gz", member("m/a"), member("../b"), member("m/l", type=tarfile.SYMTYPE, linkname="/etc")
    ))  # fmt: skip
    assert code == 1 and rows["holds"] == "m/a, ../b, m/l"
    ends = ["the path '../b' is outside the archive", "'m/l' is neither a file nor a directory"]
    assert [each.rpartition("because ")[2] for each in unusual] == ends


def index(sizes, places, code=8, version=1):
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", version, code, len(sizes))
    return head + struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(places)}q", *places)


@pytest.fixture
def folder(tmp_path):
    """Binarised data."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dict.en.txt").write_text("a 1\nb 1\n")
    (folder / "train.en-de.en.idx").write_bytes(index([2, 3], [0, 4]))
    (folder / "train.en-de.en.bin").write_bytes(bytes(10))
    return folder


def test_an_ordinary_folder_and_an_empty_one(check, folder, tmp_path):
    code, rows, unusual, _ = check(folder)
    assert code == 0 and unusual == []
    assert rows["sentences"] == "train.en-de.en 2" and rows["dictionaries"] == "en 2"
    (tmp_path / "empty").mkdir()
    assert check(tmp_path / "empty")[2] == ["no data: it has neither an index (.idx) nor a dictionary"]


@pytest.mark.parametrize("content, said", [
    (index([2, 4], [0, 4]), "outside of its .bin"), (index([2, -3], [0, 4]), "outside of its .bin"),
    (index([2, 3], [0, 2**62]), "outside of its .bin"), (index([2, 3], [0, 4], code=99), "type 99"),
    (index([2, 3], [0]), "2 sentences in 16 bytes"), (b"MMIDIDX", "not an index"), (b"", "not an index"),
])  # fmt: skip
def test_indices_that_do_not_fit(check, folder, content, said):
    (folder / "train.en-de.en.idx").write_bytes(content)
    code, _, unusual, _ = check(folder)
    assert code == 1 and len(unusual) == 1 and unusual[0].startswith("train.en-de.en.idx: ") and said in unusual[0]


def test_sides_with_unequal_numbers_of_sentences(check, folder):
    for name, sizes in (("train.en-de.de", [2, 3]), ("train.align.en-de", [2])):
        (folder / f"{name}.bin").write_bytes(bytes(10))
        (folder / f"{name}.idx").write_bytes(index(sizes, [0, 4][: len(sizes)]))
    for name in ("valid.en-de.en", "valid.en-de.de"):  # of --dataset-impl raw
        (folder / name).write_text("a\rb\nc\n")
    unequal = "train.en-de: unequal numbers of sentences"
    assert check(folder)[2] == [unequal]
    (folder / "train.align.en-de.idx").write_bytes(index([2, 3], [0, 4]))
    assert check(folder)[2] == []
    (folder / "valid.en-de.de").write_text("a\rb\n")
    assert check(folder)[2] == [unequal.replace("train", "valid")]


def test_odd_files_in_a_folder_are_named_and_not_opened(check, folder):
    outside = folder.with_name(f"{folder.name}2")
    outside.touch()
    for name in ("dict.de$(touch MARK).txt", "valid.en-de.de.fasta"):
        (folder / name).touch()
    os.mkfifo(folder / "dict.fr.txt")
    (folder / "dict.de.txt").symlink_to(outside)
    (folder / "more").mkdir()
    (folder / "train.en-de.en.bin").unlink()
    code, _, unusual, _ = check(folder)
    said = "\n".join(unusual)
    assert code == 1 and len(unusual) == 6 and "'dict.de.txt' is a link to" in said and "its .bin is missing" in said
    assert "'dict.fr.txt' is not a regular file, and is not read" in said
    for name in ("dict.de$(touch MARK).txt", "valid.en-de.de.fasta", "more"):
        assert f"{name!r} is not a file that fairseq-preprocess writes" in said
