"""Archives, data folders and settings of checkpoints from strangers: nothing is run, nothing is written elsewhere."""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import socket
import tarfile
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import (
    checkpoint_utils,
    criterions,
    file_utils,
    hub_utils,
    models,
    safe_files,
    safe_load,
    safe_settings,
    tasks,
)
from fairseq.data import encoders
from fairseq.data.fasta_dataset import FastaDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf

import fairseq_deep  # noqa: F401 (registers its task)
from tests.helpers.hostile import archive, checkpoint, everything, member, seen, write_dictionaries
from tests.helpers.paths import STOCK

OUTSIDE = Path(tempfile.gettempdir(), f"fairseq_deep-{uuid.uuid4()}")
"""A file that no run before this one can have left behind."""
INCOMPLETE = "not a complete tar archive"


@pytest.mark.parametrize("members, named", [
    ([member("m/a"), member("m/../../../x", "bad")], "is outside the archive"),
    ([member(str(OUTSIDE), "bad")], "is outside the archive"),
    ([member("..\\x", "bad")], "is outside the archive"),
    ([member("m/link", type=tarfile.SYMTYPE, linkname="../../.."), member("m/link/x", "bad")], "neither a file nor"),
    ([member("m/link", type=tarfile.LNKTYPE, linkname="/etc/hostname")], "neither a file nor"),
    ([member("m/pipe", type=tarfile.FIFOTYPE)], "neither a file nor"),
    ([member("m"), member("m/x", "bad")], INCOMPLETE), (b"no archive", INCOMPLETE), (b"", INCOMPLETE),
    ([member("m/a", "x" * 50)], "larger than the free space"),
])  # fmt: skip
@pytest.mark.parametrize("cached", [False, True])
def test_hostile_archives_are_refused_and_stay(members, named, cached, tmp_path, monkeypatch):
    outer = tmp_path / "a/b/c"
    outer.mkdir(parents=True)
    path = outer / "model.tar.gz"
    path.write_bytes(members) if isinstance(members, bytes) else archive(path, *members)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=49))
    monkeypatch.setattr(safe_files.tempfile, "tempdir", str(outer))
    before, bytes_before = everything(tmp_path), path.read_bytes()
    with pytest.raises(safe_load.CheckpointError, match=named) as refusal:
        safe_files.unpack(str(path), replace=cached)
    assert "\n" not in str(refusal.value) and path.read_bytes() == bytes_before
    left = [name for name in everything(tmp_path) if name not in before and "fairseq-model-" not in name]
    assert left == [] and not OUTSIDE.exists()


def test_a_truncated_archive_is_one_line(tmp_path):
    whole = archive(tmp_path / "a.tar.gz", member("m/big", "x" * 50_000 + str(np.random.default_rng(0).random(2000))))
    whole.write_bytes(whole.read_bytes()[:-300])
    with pytest.raises(safe_load.CheckpointError, match=INCOMPLETE):
        file_utils.load_archive_file(str(whole))


@pytest.mark.parametrize("members, top", [
    ([member("m", type=tarfile.DIRTYPE), member("m/model.pt", "w", mode=0o6777), member("m/dict.en.txt", "d")], "m"),
    ([member("m/sub/model.pt", "w"), member("m/sub/dict.en.txt", "d")], "m/sub"),
    ([member("model.pt", "w"), member("dict.en.txt", "d")], ""),
])  # fmt: skip
def test_good_archives_are_unpacked_and_stay(members, top, tmp_path):
    path = archive(tmp_path / "model.tar.gz", *members)
    folder = Path(file_utils.load_archive_file(str(path)))
    assert (folder / "model.pt").read_text() == "w" and (folder / "dict.en.txt").read_text() == "d"
    assert (folder / "model.pt").stat().st_mode & 0o7777 == 0o644
    assert str(folder).endswith(top) and path.is_file() and everything(tmp_path) == ["model.tar.gz"]
    assert safe_files.unpack(str(path), replace=True) == str(path), "a download in the cache becomes a folder"
    assert (path / "model.pt").read_text() == "w" and file_utils.load_archive_file(str(path)) == str(path)


def test_fasta_is_indexed_as_it_is_read_and_its_name_reaches_no_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "p.a-b$(touch MARK)"
    Path(f"{path}.fasta").write_text(">one\nACD\nEF\n>two x\n>three\nGHIKL \n", encoding="utf-8")
    with seen() as events:
        dataset = FastaDataset(path, cache_indices=True)
    assert [dataset[index] for index in range(len(dataset))] == [(">one", "ACDEF"), (">two x", ""), (">three", "GHIKL")]
    assert dataset.sizes.tolist() == [5, 0, 5] and dataset.sizes.dtype == np.int64
    assert not Path("MARK").exists() and [event for event in events if event.startswith("<")] == []


@pytest.fixture
def address(monkeypatch):
    """An address of this machine; the test fails if anything connects to it or to another."""
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, place: asked.append(place))
    yield "http://127.0.0.1:9/x"
    assert asked == []


NAMING = {
    "bpe_codes": {"bpe": {"_name": "subword_nmt", "bpe_codes": 0, "bpe_separator": "@@"}},
    "sentencepiece_model": {"bpe": {"_name": "sentencepiece", "sentencepiece_model": 0}},
    "gpt2_encoder_json": {"bpe": {"_name": "gpt2", "gpt2_encoder_json": 0, "gpt2_vocab_bpe": 0}},
    "bpe_vocab_file": {"bpe": {"_name": "bert", "bpe_vocab_file": 0}},
    "replace_unk": {"generation__replace_unk": 0},
    "encoder_embed_path": {"model__encoder_embed_path": 0},
    "save_predictions": {"criterion": {"_name": "sentence_ranking", "save_predictions": 0}},
    "data": {"task__data": 0},
}


def planted(content, value):
    """*content* with *value* for each 0."""
    if isinstance(content, dict):
        return {key: planted(each, value) for key, each in content.items()}
    return value if content == 0 and content is not False else content


@pytest.fixture
def stranger(tmp_path):
    """stranger(settings): the folder of a checkpoint with its dictionaries."""

    def make(settings):
        state = torch.load(STOCK, weights_only=False)
        for name, value in settings.items():
            section, _, key = name.partition("__")
            place, key = (state["cfg"][section], key) if key else (state["cfg"], section)
            vars(place).update({key: value}) if isinstance(place, argparse.Namespace) else place.update({key: value})
        torch.save(state, tmp_path / "model.pt")
        write_dictionaries(tmp_path, "src", "tgt")
        return tmp_path

    return make


@pytest.mark.parametrize("kind", ["address", "file", "pipe"])
@pytest.mark.parametrize("key", NAMING)
def test_what_settings_name_is_not_opened(key, kind, stranger, address, tmp_path, caplog):
    """A pipe would wait for ever; /etc/passwd would be no error."""
    os.mkfifo(tmp_path / "pipe")
    value = {"address": address, "file": "/etc/passwd", "pipe": str(tmp_path / "pipe")}[kind]
    folder = stranger({"task__source_lang": "src", "task__target_lang": "tgt", **planted(NAMING[key], value)})
    found = hub_utils.from_pretrained(str(folder), "model.pt")
    # files of sub-words must lie next to the checkpoint or be named by the caller; transformers raises Exception itself
    missing = pytest.raises(Exception, match="not found|install|vocab.txt|No such file")
    with missing if "bpe" in NAMING[key] else contextlib.nullcontext():
        hub_utils.GeneratorHubInterface(found["args"], found["task"], found["models"])
    said = [record.getMessage() for record in caplog.records if record.name == "fairseq.safe_load"]
    if key == "data" and kind != "address":  # every checkpoint says where its data were
        assert said == []
    else:
        assert len(said) == 1 and f"{key} = {value}" in said[0] and "\n" not in said[0]
    [model], _, _ = checkpoint_utils.load_model_ensemble_and_task([str(folder / "model.pt")])  # data: its own folder
    assert model is not None


def test_files_next_to_a_checkpoint_and_those_of_the_caller_are_used(stranger, address, tmp_path):
    folder = stranger({"task__source_lang": "src", "task__target_lang": "tgt",
                       **planted(NAMING["bpe_codes"], address)})  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own/merges").write_text("#version: 0.2\na b</w>\n")
    found = hub_utils.from_pretrained(str(folder), "model.pt", bpe_codes=str(tmp_path / "own/merges"))
    assert found["args"].bpe.bpe_codes == str(tmp_path / "own/merges")
    (folder / "code").write_text("#version: 0.2\na b</w>\n")
    found = hub_utils.from_pretrained(str(folder), "model.pt")
    hub = hub_utils.GeneratorHubInterface(found["args"], found["task"], found["models"])
    assert hub.apply_bpe("ab ba") == "ab b@@ a"


def test_old_checkpoints_and_shared_parts_name_no_files():
    """The flags of all parts in one Namespace; one object in two places; an address in a setting of any name."""
    args = argparse.Namespace(bpe="gpt2", gpt2_vocab_bpe="http://x", init_from="x", data="y", save_dir="z",
                              mirror="https://x")  # fmt: skip
    shared = {"_name": "gpt2"}
    state = {"args": args, "cfg": OmegaConf.create({"x": shared, "bpe": shared, "y": [{"w2v_path": "w"}]})}
    assert safe_settings.drop(state, "/d") == ["gpt2_vocab_bpe = http://x", "init_from = x", "mirror = https://x",
                                               "w2v_path = w"]  # fmt: skip
    own = {"gpt2_encoder_json": "/d/encoder.json", "gpt2_vocab_bpe": "/d/vocab.bpe"}
    assert vars(state["args"]) == {"bpe": "gpt2", **own, "init_from": None, "data": "/d", "save_dir": "z",
                                   "mirror": ""}  # fmt: skip
    own = {"_name": "gpt2", **own}
    assert state["cfg"] == {"x": own, "bpe": own, "y": [{"w2v_path": ""}]}
    state = {"cfg": {"bpe": "gpt2", "task": TranslationConfig(data="y")}}
    assert safe_settings.drop(state, "/d") == [] and state["cfg"]["bpe"] == own and state["cfg"]["task"].data == "/d"


def test_the_lists_name_every_setting_of_a_file():
    """Of fairseq and of this package, as far as names tell."""
    odd = re.compile(r"path|file|dir(?!ection)|codes|merges|vocab|json|yaml|pretrained|_from$|_dict$|checkpoint"
                     r"|url|repo|save|vocoder|lexicon|kenlm|init_method|_data$")  # fmt: skip
    harmless = {"best_checkpoint_metric", "checkpoint_suffix", "pretrained"}
    found = set()
    for registry in (models.MODEL_REGISTRY, tasks.TASK_REGISTRY, criterions.CRITERION_REGISTRY, encoders.BPE_REGISTRY):
        for part in registry.values():
            parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
            with contextlib.suppress(Exception):  # parts of speech without their packages
                part.add_args(parser)
            found.update(each.dest for each in parser._actions if each.nargs != 0 and each.type in (None, str))
    waiting = [FairseqDataclass]
    while waiting:
        config = waiting.pop()
        waiting += config.__subclasses__()
        found.update(field.name for field in dataclasses.fields(config) if "str" in str(field.type))
    known = {*safe_settings.FILES, *safe_settings.OF_THE_RUN, *harmless}
    assert len(found) > 100 and {name for name in found if odd.search(name)} - known == set()


@pytest.mark.parametrize("state", [
    *(checkpoint(**settings) for settings in (
        {}, {"task": "deep_translation"}, {"task": "of_a_user_dir_that_is_not_here"}, {"bpe": "subword_nmt"},
        {"criterion": "fused_label_smoothed_cross_entropy"}, {"criterion": "label_smoothed_cross_entropy"},
        {"optimization__lr": "${optimization.lr}"}, {"task__dataset_impl": "${dataset.dataset_impl}"},
        {"task__dataset_impl": None}, {"tokenizer": ""}, {"task__eval_bleu_detok": "moses"},
        {"model__dataset_impl": "mmap"}, {"common__price": "5$ {or so}"},
    )),
    [], {"model": {}}, {"cfg": None, "args": None}, {"cfg": "x"}, "text",
], ids=range(18))  # fmt: skip
def test_other_settings_are_not_refused(state):
    assert safe_settings.refused(state) == []


def test_the_lists_name_what_fairseq_has():
    """A misspelt name would refuse a good checkpoint."""
    allowed = safe_settings.ALLOWED
    assert set(allowed["task"]) < set(tasks.TASK_REGISTRY)
    assert set(allowed["criterion"]) < set(criterions.CRITERION_REGISTRY)
    assert set(allowed["bpe"]) <= set(encoders.BPE_REGISTRY)
    assert set(allowed["tokenizer"]) <= set(encoders.TOKENIZER_REGISTRY)
