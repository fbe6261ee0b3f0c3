"""fairseq-deep check: what is in a file, told without loading it."""

import io
import os
import pickle
import socket
import struct
import tarfile
import zipfile

import pytest
import torch
from fairseq import safe_load

from fairseq_deep.tools.main import main
from tests.helpers.hostile import HOSTILE, Call
from tests.helpers.paths import STOCK


@pytest.fixture
def check(capsys):
    """check(path): exit code, rows of the table by their name, and what is unusual."""

    def check(path):
        code = main(["check", str(path)])
        captured = capsys.readouterr()
        lines = [line.split(maxsplit=1) for line in captured.out.splitlines()]
        unusual = [text for name, text in lines if name == "unusual"]
        return code, dict(lines), unusual if unusual != ["nothing"] else [], captured.err

    return check


def state(**parts):
    return {"cfg": {"model": {"arch": "transformer_x"}}, "model": {"w": torch.ones(2, 3), "b": torch.ones(5)}, **parts}


def test_a_package_with_other_files_stays_a_package(check, tmp_path):
    for name in ("config.json", "model.safetensors", "model.bin", "SHA256SUMS"):
        (tmp_path / name).write_bytes(b"")
    found, rows, _, _ = check(tmp_path)
    assert found == 1 and rows["kind"] == "packaged model" and rows["unusual"] != "nothing"


@pytest.mark.parametrize("program, names, given", [
    ("CTranslate2", ["config.json", "model.bin"], "."),
    ("transformers", ["config.json", "model.safetensors", "tokenizer_config.json"], "."),
    ("transformers", ["config.json", "model.safetensors", "tokenizer_config.json"], "model.safetensors"),
])  # fmt: skip
def test_models_of_other_programs_are_not_inspected(check, tmp_path, program, names, given):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found, rows, _, _ = check(tmp_path / given)
    assert found == 1 and rows["kind"] == f"model for {program}" and rows["uninspected"] == ", ".join(names)


@pytest.mark.parametrize("zipped", [True, False])
def test_an_ordinary_checkpoint(check, tmp_path, zipped):
    path = tmp_path / "c.pt"
    content = state(extra_state={"epoch": 3})
    content["model"]["p"] = torch.nn.Parameter(torch.ones(4))
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    code, rows, unusual, _ = check(path)
    assert code == 0 and unusual == [] and rows["model"] == "transformer_x, 3 tensors, 15 values"
    assert rows["parts"] == "cfg, extra_state, model" and f"{path.stat().st_size:,} bytes" in rows["kind"]


def test_a_checkpoint_of_stock_fairseq(check):
    code, rows, unusual, _ = check(STOCK)
    values = sum(tensor.numel() for tensor in torch.load(STOCK, weights_only=False)["model"].values())
    assert code == 0 and unusual == [] and rows["model"].endswith(f", {values:,} values")


@pytest.mark.parametrize("zipped", [True, False])
def test_planted_calls_are_named_and_not_run(check, tmp_path, zipped):
    path = tmp_path / "planted.pt"
    content = state(extra_state=[Call(os.system, f"touch {tmp_path}/ran"), Call(eval, "1"), Call(torch.load, "x")])
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    code, rows, unusual, _ = check(path)
    assert code == 1 and not (tmp_path / "ran").exists() and rows["model"] == "transformer_x, 2 tensors, 11 values"
    names = [text.split()[1].rstrip(",") for text in unusual]
    assert [name.rpartition(".")[2] for name in names] == ["eval", "system", "load"]


WITHOUT_TENSORS = [each for each in HOSTILE if "tensor" not in each[1]]  # of which check knows no more than the place


@pytest.mark.parametrize("content, named", WITHOUT_TENSORS, ids=[named for _, named in WITHOUT_TENSORS])
def test_settings_that_loading_refuses(check, tmp_path, content, named):
    torch.save({"model": {}, **content}, tmp_path / "c.pt")
    code, _, unusual, _ = check(tmp_path / "c.pt")
    assert code == 1 and [f"a setting that is rejected: {named}"] == unusual


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """The zip file *path* with *change* applied to its list of (name, content)."""
    with zipfile.ZipFile(path) as old:
        entries = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in change(entries):
            new.writestr(name, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("change, compression, said", [
    (lambda entries: entries, zipfile.ZIP_DEFLATED, "compressed"),
    (lambda entries: [*entries, entries[-1]], zipfile.ZIP_STORED, "duplicate names"),
    (lambda entries: [*entries, ("c/constants.pkl", b"")], zipfile.ZIP_STORED, "TorchScript"),
])  # fmt: skip
def test_odd_zip_files(check, tmp_path, change, compression, said):
    torch.save(state(), tmp_path / "c.pt")
    rewritten(tmp_path / "c.pt", change, compression)
    code, _, unusual, _ = check(tmp_path / "c.pt")
    assert code == 1 and len(unusual) == 1 and said in unusual[0]


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04 no more", STOCK.read_bytes()[:40000]])
def test_unreadable_files_are_one_line(check, tmp_path, content):
    (tmp_path / "c.pt").write_bytes(content)
    code, _, _, error = check(tmp_path / "c.pt")
    assert code == 2 and error.count("\n") == 1 and "c.pt is not a readable checkpoint" in error


def test_what_is_no_dictionary_and_what_has_no_model(check, tmp_path):
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "bare.pt")
    assert "not the dictionary" in check(tmp_path / "list.pt")[2][0]
    assert check(tmp_path / "bare.pt")[2] == ["it has no model"]


def test_instructions_on_stand_ins_do_nothing(check, tmp_path):
    """Lists and dictionaries made of what is not allowed, attributes set on it, calls of what it returned."""
    import collections

    stream = pickle.dumps(collections.deque([1, 2]), 2) + pickle.dumps(collections.ChainMap({1: 2}), 2)
    for number, part in enumerate((stream, b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R}X\x01\x00\x00\x00aK\x01sb.")):
        path = tmp_path / f"{number}.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("c/data.pkl", part)
        assert check(path)[0] == 1


def test_archives(check, tmp_path):
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        for name, kind in (("m/a", tarfile.REGTYPE), ("../b", tarfile.REGTYPE), ("m/l", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc"
            archive.addfile(info, io.BytesIO())
    code, rows, unusual, _ = check(tmp_path / "m.tar.gz")
    assert code == 1 and rows["holds"] == "m/a, ../b, m/l"
    ends = ["the path '../b' is outside the archive", "'m/l' is neither a file nor a directory"]
    assert [each.rpartition("because ")[2] for each in unusual] == ends


def saved(content, **options):
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def packed(path, **members):
    """A tar file of *members*, whose names have dots for double underscores."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


PLANTED = {"model": {}, "x": Call(os.system, "touch RAN")}


@pytest.mark.parametrize("members, code, said", [
    ({"model__pt": saved(state()), "dict__en__txt": b"a 1\n", "code": "#version: 0.2\nä b\n".encode()}, 0, {}),
    ({"model__pt": saved(PLANTED)}, 1, {"unusual": "model.pt: contains posix.system, which could run code: fairseq "
                                        "rejects it"}),
    ({"weights": saved(PLANTED, _use_new_zipfile_serialization=False)}, 1, {"unusual": "weights: contains posix.syst"}),
    ({"dict__txt": b"cos\nsystem\n(S'touch RAN'\ntR."}, 1, {"unusual": "dict.txt: contains os.system"}),
    ({"model__pt": saved(state()), "x": b"\x00\xff"}, 1, {"uninspected": "x", "unusual": "nothing"}),
    ({"model__pt": b"text\n"}, 1, {"uninspected": "model.pt"}),
    ({"a\nunusual  nothing\x1b[2J": b""}, 1, {"holds": r"a\nunusual  nothing\x1b[2J", "unusual": "a\\nunusual"}),
])  # fmt: skip
def test_members_of_an_archive(check, tmp_path, monkeypatch, members, code, said):
    monkeypatch.chdir(tmp_path)
    found, rows, _, _ = check(packed(tmp_path / "m.tar.gz", **members))
    assert found == code and all(rows[name].startswith(text) for name, text in said.items())
    assert ("uninspected" in rows) == ("uninspected" in said) and not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("odd", [
    torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")]).bfloat16(), torch.tensor([float("inf")]).half(),
], ids=str)  # fmt: skip
def test_weights_that_are_not_finite(check, tmp_path, odd, zipped):
    content = state(optimizer={"m": torch.tensor([float("nan")])})  # of which only the model counts
    torch.save(content, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    assert check(tmp_path / "c.pt")[0] == 0
    content["model"]["odd"] = odd
    torch.save(content, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    assert check(tmp_path / "c.pt")[0::2] == (1, ["odd holds NaN or Inf"])


def test_values_that_are_not_whole(check, tmp_path):
    torch.save(state(), tmp_path / "c.pt")
    rewritten(tmp_path / "c.pt", lambda entries: [(name, b"x" if "/data/" in name else it) for name, it in entries])
    code, _, _, error = check(tmp_path / "c.pt")
    assert code == 2 and "the values of w are incomplete" in error


def test_settings_that_name_files(check, tmp_path):
    content = state()
    content["cfg"]["bpe"] = {"_name": "subword_nmt", "bpe_codes": "http://x\n\x1b[2J/\ud800"}
    content["cfg"]["checkpoint"] = {"restore_file": "checkpoint_last.pt", "save_dir": "x"}
    torch.save(content, tmp_path / "c.pt")
    assert check(tmp_path / "c.pt")[0::2] == (
        1, [r"a setting that names a file, which is ignored: bpe_codes = http://x\n\x1b[2J/\ud800"],
    )  # fmt: skip


def nested(levels, value=0):
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("cfg, said", [
    (nested(240), "more than 50 levels of containers"), ({"task": 10**5000}, "task = an int that cannot be printed"),
    ({"model": {"encoder_attention_heads": 0}}, "encoder_attention_heads = 0"),
    ({"model": {"encoder_attention_heads": -1}}, "encoder_attention_heads = -1"),
    ({"model": {"dropout": "x"}}, "dropout = x"),
])  # fmt: skip
def test_settings_of_which_no_model_can_be_built(check, tmp_path, cfg, said):
    torch.save(state(cfg=cfg), tmp_path / "c.pt")
    code, _, problems, _ = check(tmp_path / "c.pt")
    assert code == 1 and problems[-1] == f"a setting that is rejected: {said}"
    with pytest.raises(safe_load.CheckpointError, match="rejected, because"):
        safe_load.load(str(tmp_path / "c.pt"))


@pytest.mark.parametrize("flags, said", [
    ({"encoder_attention_heads": 3}, "--encoder-embed-dim 512 is not divisible by --encoder-attention-heads 3"),
    ({"decoder_layers": -1}, "--decoder-layers must be a whole number of at least 0 (-1): change it"),
    ({"encoder_layers": "x"}, "--encoder-layers must be a whole number of at least 0 ('x'): change it"),
    ({"max_source_positions": -5}, "--max-source-positions must be a whole number of at least 1 (-5): change it"),
    ({"layer_agg": "new"}, "unknown --layer-agg new"), ({"decoder_attn": 5}, ""),
    ({"encoder_layers": 10**9}, "it has fewer tensors than 1,000,000,000 layers"),
])  # fmt: skip
def test_settings_that_contradict_each_other(check, tmp_path, flags, said):
    torch.save(state(cfg={"model": {"_name": "transformer_dlcl_6l", **flags}}), tmp_path / "c.pt")
    code, _, [problem], _ = check(tmp_path / "c.pt")
    assert code == 1 and problem.startswith(f"cannot build a model with its settings: {said}")


def test_weights_that_are_whole_numbers_or_have_no_values(check, tmp_path):
    weights = {"encoder.fc1.weight": torch.ones(2, dtype=torch.int8), "encoder.fc1.bias": torch.ones(2, device="meta")}
    torch.save(state(model=weights), tmp_path / "c.pt")
    problems = check(tmp_path / "c.pt")[2]
    assert "encoder.fc1.weight holds whole numbers (CharStorage), which are not" in problems[0] + problems[1]
    assert "encoder.fc1.bias has no values" in problems


@pytest.mark.skipif(not safe_load.NAMED_SAFE_GLOBALS, reason="older torch follows all instructions")
@pytest.mark.parametrize("content, protocol, code", [(state(), 4, 149), (state(cfg={"lr": 1 << 9999}), 2, 139)])
def test_instructions_that_loading_refuses(check, tmp_path, content, protocol, code):
    torch.save(content, tmp_path / "c.pt", pickle_protocol=protocol)
    assert any(f"contains pickle instruction {code}, " in problem for problem in check(tmp_path / "c.pt")[2])
    with pytest.raises(safe_load.CheckpointError, match=f"contains pickle instruction {code}"):
        safe_load.load(str(tmp_path / "c.pt"))


def test_very_deep_nesting(check, tmp_path):
    """As no pickler in Python writes it."""
    pickled = b"\x80\x02}X\x03\x00\x00\x00cfg" + b"]" * 1500 + b"a" * 1499 + b"s."
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        for name, content in (("c/data.pkl", pickled), ("c/version", b"3\n"), ("c/byteorder", b"little")):
            archive.writestr(name, content)
    assert "a setting that is rejected: more than 50 levels of containers" in check(tmp_path / "c.pt")[2]
    with pytest.raises(safe_load.CheckpointError, match="more than 50 levels"):
        safe_load.load(str(tmp_path / "c.pt"))


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "dangling link"])
def test_what_is_no_file_is_not_opened(check, folder, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(folder)  # the name of a socket is short
    made = {
        "fifo": os.mkfifo, "socket": socket.socket(socket.AF_UNIX).bind,
        "device": lambda name: os.symlink("/dev/zero", name), "dangling link": lambda name: os.symlink("none", name),
    }  # fmt: skip
    made[kind]("dict.de.txt")
    code, _, _, error = check("dict.de.txt")
    problem = "No such file or directory" if kind == "dangling link" else "it must be a regular file or a directory"
    assert code == 2 and error == f"fairseq-deep check: cannot read dict.de.txt: {problem}\n"
    code, _, unusual, _ = check(folder)
    assert code == 1 and unusual[-1] == "'dict.de.txt' is not a regular file, and is not read"


def index(sizes, places, code=8, version=1):
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", version, code, len(sizes))
    return head + struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(places)}q", *places)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dict.en.txt").write_text("a 1\nb 1\n")
    (folder / "train.en-de.en.idx").write_bytes(index([2, 3], [0, 4]))
    (folder / "train.en-de.en.bin").write_bytes(bytes(10))
    return folder


def test_an_ordinary_folder(check, folder):
    code, rows, unusual, _ = check(folder)
    assert code == 0 and unusual == []
    assert rows["sentences"] == "train.en-de.en 2" and rows["dictionaries"] == "en 2"


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
    pair = folder / "train.en-de.de"
    for name in (f"{pair}.bin", folder / "train.align.en-de.bin"):
        with open(name, "wb") as stream:
            stream.write(bytes(10))
    for sizes, name in (([2, 3], f"{pair}.idx"), ([2], folder / "train.align.en-de.idx")):
        with open(name, "wb") as stream:
            stream.write(index(sizes, [0, 4][: len(sizes)]))
    for name in ("valid.en-de.en", "valid.en-de.de"):  # of --dataset-impl raw
        (folder / name).write_text("a\rb\nc\n")
    unequal = "train.en-de: unequal numbers of sentences"
    assert check(folder)[2] == [unequal]
    (folder / "train.align.en-de.idx").write_bytes(index([2, 3], [0, 4]))
    assert check(folder)[2] == []
    (folder / "valid.en-de.de").write_text("a\rb\n")
    assert check(folder)[2] == [unequal.replace("train", "valid")]


def test_odd_files_in_a_folder(check, folder, tmp_path):
    (tmp_path / "outside").touch()
    (folder / "dict.de$(touch MARK).txt").touch()
    (folder / "valid.en-de.de.fasta").touch()
    (folder / "dict.de.txt").symlink_to(tmp_path / "outside")
    (folder / "more").mkdir()
    (folder / "train.en-de.en.bin").unlink()
    code, _, unusual, _ = check(folder)
    said = "\n".join(unusual)
    assert code == 1 and len(unusual) == 5 and "'dict.de.txt' is a link to" in said and "its .bin is missing" in said
    for name in ("dict.de$(touch MARK).txt", "valid.en-de.de.fasta", "more"):
        assert f"{name!r} is not a file that fairseq-preprocess writes" in said


def test_an_empty_folder(check, tmp_path):
    assert check(tmp_path)[2] == ["no data: it has neither an index (.idx) nor a dictionary"]
