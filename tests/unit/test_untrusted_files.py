"""Archives, data folders and settings of checkpoints from strangers: nothing is run, nothing is written elsewhere."""

import argparse
import io
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import file_utils, safe_files, safe_load, safe_settings
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf
from omegaconf.nodes import AnyNode

import fairseq_deep  # noqa: F401 (registers its task)
from tests.commands import binarise, run, train_command, write_pairs

STOCK = Path(__file__).resolve().parents[1] / "data/stock_fairseq_0.12.2.pt"


def member(name, text="", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(text)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, text.encode()


def archive(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as opened:
        for info, content in members:
            opened.addfile(info, io.BytesIO(content))
    return path


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("members, named", [
    ([member("m/a"), member("m/../../../x", "bad")], "outside of the archive"),
    ([member("/tmp/x", "bad")], "outside of the archive"),
    ([member("..\\x", "bad")], "outside of the archive"),
    ([member("m/link", type=tarfile.SYMTYPE, linkname="../../.."), member("m/link/x", "bad")], "neither a file nor"),
    ([member("m/link", type=tarfile.LNKTYPE, linkname="/etc/hostname")], "neither a file nor"),
    ([member("m/pipe", type=tarfile.FIFOTYPE)], "neither a file nor"),
    ([member("m"), member("m/x", "bad")], "not a whole tar archive"),
])  # fmt: skip
@pytest.mark.parametrize("cached", [False, True])
def test_hostile_archives_are_refused_and_stay(members, named, cached, tmp_path, monkeypatch):
    outer = tmp_path / "a/b/c"
    outer.mkdir(parents=True)
    path = archive(outer / "model.tar.gz", *members)
    monkeypatch.setattr(safe_files.tempfile, "tempdir", str(outer))
    before, bytes_before = everything(tmp_path), path.read_bytes()
    with pytest.raises(safe_load.CheckpointError, match=named) as refusal:
        safe_files.unpack(str(path), replace=cached)
    assert "\n" not in str(refusal.value) and path.read_bytes() == bytes_before
    left = [name for name in everything(tmp_path) if name not in before and "fairseq-model-" not in name]
    assert left == [] and not Path("/tmp/x").exists()


@pytest.mark.parametrize("name, content", [("model.tar.gz", b"no archive"), ("model.pt", b""), ("cut.tar.gz", None)])
def test_what_is_no_archive_is_one_line(name, content, tmp_path):
    path = tmp_path / name
    if content is None:
        archive(path, member("m/big", "x" * 50_000 + str(np.random.default_rng(0).random(2000).tolist())))
        content = path.read_bytes()[:-300]
    path.write_bytes(content)
    with pytest.raises(safe_load.CheckpointError, match="not a whole tar archive"):
        file_utils.load_archive_file(str(path))
    assert path.read_bytes() == content


def test_an_archive_that_the_disk_cannot_hold_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = archive(tmp_path / "m.tar", member("m/a", "x" * 100), mode="w:")
    usage = safe_files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(safe_files.shutil, "disk_usage", lambda _: usage._replace(free=50))
    with pytest.raises(safe_load.CheckpointError, match="larger than the free space"):
        safe_files.unpack(str(path), replace=False)


@pytest.mark.parametrize("members, top", [
    ([member("m", type=tarfile.DIRTYPE), member("m/model.pt", "w"), member("m/dict.en.txt", "d")], "m"),
    ([member("m/sub/model.pt", "w"), member("m/sub/dict.en.txt", "d")], "m/sub"),
    ([member("model.pt", "w"), member("dict.en.txt", "d")], ""),
])  # fmt: skip
def test_good_archives_are_unpacked_and_stay(members, top, tmp_path):
    path = archive(tmp_path / "model.tar.gz", *members)
    folder = Path(file_utils.load_archive_file(str(path)))
    assert (folder / "model.pt").read_text() == "w" and (folder / "dict.en.txt").read_text() == "d"
    assert str(folder).endswith(top) and path.is_file() and everything(tmp_path) == ["model.tar.gz"]


def test_a_download_in_the_cache_becomes_a_folder_once(tmp_path):
    path = archive(tmp_path / "0f3a", member("m/model.pt", "w"))
    assert safe_files.unpack(str(path), replace=True) == str(path)
    assert everything(tmp_path) == ["0f3a", "0f3a/model.pt"]
    assert file_utils.load_archive_file(str(path)) == str(path)


def test_fasta_is_indexed_as_it_is_read(tmp_path):
    from fairseq.data.fasta_dataset import FastaDataset

    (tmp_path / "p.fasta").write_text(">one\nACD\nEF\n>two x\n>three\nGHIKL \n", encoding="utf-8")
    dataset = FastaDataset(str(tmp_path / "p"))
    assert [dataset[index] for index in range(len(dataset))] == [(">one", "ACDEF"), (">two x", ""), (">three", "GHIKL")]
    assert dataset.sizes.tolist() == [5, 0, 5] and dataset.sizes.dtype == np.int64


@pytest.fixture
def hostile_folder(tmp_path):
    """A data folder whose second language has a command for a name."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    write_pairs(folder / "train", 40, random.Random(1))
    data = binarise(folder, ["train"])
    evil = "tgt$(touch MARK)"
    for split in ("train", "valid", "test"):
        for kind in ("idx", "bin"):
            (data / f"{split}.src-{evil}.src.{kind}").write_bytes((data / f"train.src-tgt.src.{kind}").read_bytes())
        (data / f"{split}.src-{evil}.{evil}.fasta").write_text(">a\n123\n>b\n45\n")
    for language in ("src", evil):  # as large as those of STOCK
        (data / f"dict.{language}.txt").write_text("".join(f"{letter} 1\n" for letter in "abcdefgh"))
    for path in data.glob("train.src-tgt.*"):
        path.unlink()
    return data


@pytest.mark.parametrize("command", ["train", "generate", "diagnose"])
def test_names_of_files_are_not_run(command, hostile_folder, tmp_path):
    commands = {
        "train": train_command(hostile_folder, tmp_path / "save", "--max-update", "1"),
        "generate": ["fairseq-generate", hostile_folder, "--path", STOCK, "--cpu", "--gen-subset", "valid"],
        "diagnose": ["fairseq-deep", "diagnose", hostile_folder, "--checkpoint", STOCK],
    }
    done = run(*commands[command], check=False, cwd=tmp_path)
    assert not list(tmp_path.rglob("MARK")), done.stderr[-2000:]
    assert list(hostile_folder.glob("*.npy")) or command == "diagnose", done.stderr[-2000:]  # it was read


def checkpoint(**settings):
    cfg = {"task": {"_name": "translation", "data": "x"}, "model": {"_name": "transformer"}, "common": {"seed": 1}}
    for name, value in settings.items():
        section, _, key = name.partition("__")
        cfg.setdefault(section, {})[key or "_name"] = value
    return {"cfg": cfg, "model": {"w": torch.ones(1)}}


def loop():
    content = {"_name": "translation"}
    content["self"] = content
    return content


HOSTILE = [
    (checkpoint(task="speech_unit_modeling"), "task = speech_unit_modeling"),
    (checkpoint(task__dataset_impl="fasta"), "dataset_impl = fasta"),
    (checkpoint(task__dataset_impl=OmegaConf.create({"_name": "fasta"})), "dataset_impl = fasta"),
    (checkpoint(task__data="${oc.env:SECRET}"), "data = ${oc.env:SECRET}"),
    (checkpoint(task__data=AnyNode("${oc.env:SECRET}")), "data = ${oc.env:SECRET}"),
    (checkpoint(task__data="${model.data}"), "data = ${model.data}"),
    (checkpoint(task="${task.data}"), "task = ${task.data}"),
    (checkpoint(criterion="ctc"), "criterion = ctc"),
    (checkpoint(task__data="fasta", task__dataset_impl="fasta"), "dataset_impl = fasta"),
    (checkpoint(tokenizer=3), "tokenizer = 3"),
    (checkpoint(common__self=loop(), task="hubert_pretraining"), "task = hubert_pretraining"),
    ({"cfg": OmegaConf.create({"task": {"x": "${oc.env:SECRET}"}})}, "x = ${oc.env:SECRET}"),
    ({"cfg": {"task": TranslationConfig(data="${oc.env:A}")}}, "data = ${oc.env:A}"),
    ({"args": argparse.Namespace(task="text_to_speech", arch="transformer")}, "task = text_to_speech"),
    ({"args": argparse.Namespace(dataset_impl="fasta"), "cfg": None}, "dataset_impl = fasta"),
]


@pytest.mark.parametrize("state, named", HOSTILE, ids=[named for _, named in HOSTILE])
def test_settings_off_the_list_are_refused(state, named, tmp_path, monkeypatch):
    monkeypatch.delenv(safe_load.OPT_OUT, raising=False)
    path = tmp_path / "c.pt"
    torch.save(state, path)
    with pytest.raises(safe_load.CheckpointError) as refusal:
        safe_load.load(str(path))
    message = str(refusal.value)
    assert message.startswith(f"{path}: refused") and named in message and safe_load.OPT_OUT in message
    assert "\n" not in message
    monkeypatch.setenv(safe_load.OPT_OUT, "1")
    safe_load.load(str(path))


@pytest.mark.parametrize("settings", [
    {}, {"task": "deep_translation"}, {"task": "of_a_user_dir_that_is_not_here"}, {"bpe": "subword_nmt"},
    {"criterion": "fused_label_smoothed_cross_entropy"}, {"criterion": "label_smoothed_cross_entropy"},
    {"optimization__lr": "${optimization.lr}"}, {"task__dataset_impl": "${dataset.dataset_impl}"},
    {"task__dataset_impl": None}, {"tokenizer": ""}, {"task__eval_bleu_detok": "moses"},
    {"model__dataset_impl": "mmap"}, {"common__price": "5$ {or so}"},
])  # fmt: skip
def test_other_settings_are_not(settings):
    assert safe_settings.refused(checkpoint(**settings)) == []


@pytest.mark.parametrize("state", [[], {"model": {}}, {"cfg": None, "args": None}, {"cfg": "x"}, "text"])
def test_what_has_no_settings_has_nothing_to_refuse(state):
    assert safe_settings.refused(state) == []


def test_the_lists_name_what_fairseq_has():
    """A misspelt name would refuse a good checkpoint."""
    from fairseq import criterions, tasks
    from fairseq.data import encoders

    allowed = safe_settings.ALLOWED
    assert set(allowed["task"]) < set(tasks.TASK_REGISTRY)
    assert set(allowed["criterion"]) < set(criterions.CRITERION_REGISTRY)
    assert set(allowed["bpe"]) <= set(encoders.BPE_REGISTRY)
    assert set(allowed["tokenizer"]) <= set(encoders.TOKENIZER_REGISTRY)
