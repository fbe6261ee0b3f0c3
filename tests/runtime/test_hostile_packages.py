"""A packaged model that is damaged or hostile is refused in one line, and nothing outside of it is read."""

import json
import os
import random
import re
import shutil

import pytest
import torch
from fairseq import safe_load
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from safetensors.torch import load_file, save_file

from fairseq_deep.cli import main
from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.packaged.config import model_settings
from fairseq_deep.runtime.packaged.folder import write_sums
from tests.helpers.exports import write_model
from tests.helpers.fuzz import TIMES
from tests.helpers.hostile import seen
from tests.helpers.methods import DLCL
from tests.helpers.models import VOCAB


def package(folder, dictionary, *words):
    """A packaged model in *folder*."""
    write_model(folder, DLCL.removeprefix("transformer_"), (dictionary, dictionary))
    assert main(["package", str(folder / "model.pt"), "--output", str(folder / "made"), *words]) == 0
    return folder / "made"


@pytest.fixture(scope="module")
def whole(dictionary, tmp_path_factory):
    """A packaged model, and a file with a secret beside it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "secret").write_text("secret 1\n" * 2)
    return package(folder, dictionary)


def config(**changes):
    """A change of config.json: {"model__user_dir": "x"}; a value that is a function changes the section."""

    def change(folder):
        content = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            section, _, key = name.partition("__")
            place = content[section] if key else content
            if value is KeyError:
                del place[key or section]
            else:
                place[key or section] = value
        (folder / "config.json").write_text(json.dumps(content))

    return change


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def tensors(change, metadata=None):
    """A change of the tensors, written again by the library."""

    def rewrite(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata)

    return rewrite


def cut(folder):
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)


def link(folder):
    os.remove(folder / "README.md")
    os.symlink("../secret", folder / "README.md")


def fifo(folder):
    os.remove(folder / "model.safetensors")
    os.mkfifo(folder / "model.safetensors")


EMBED = "encoder.embed_tokens.weight"
HOSTILE = {
    "a folder of programs": (config(model__user_dir="/tmp/evil"), "model has the unknown setting 'user_dir'"),
    "at the top": (config(user_dir="."), "the content has the unknown setting 'user_dir'"),
    "another class of transformers": (config(model_type="bert"), "model_type must be fairseq_deep or missing"),
    "a criterion": (config(criterion__criterion="ctc"), "has the unknown setting"),
    "a reference": (config(model__dlcl_init="${oc.env:HOME}"), "model.dlcl_init is '${oc.env:HOME}', not a short"),
    "a language elsewhere": (config(task__source_lang="../secret/x"), "source_lang is '../secret/x', not a language"),
    "a path for a model": (config(arch="../x"), "arch is '../x', not the name of a Transformer"),
    "very deep": (config(model__encoder_layers=900_000), "does not have that many encoder_layers"),
    "very wide": (config(model__encoder_embed_dim=10**9), "model.encoder_embed_dim is 1000000000, not a short"),
    "whole numbers as in indices": (
        tensors(lambda found: found.update({EMBED: found[EMBED].long()})), f"{EMBED} has the type torch.int64"),
    "many empty tensors": (
        tensors(lambda found: found.update({f"x{n}": torch.zeros(0) for n in range(4000)})), "more than"),
    "heads that do not divide": (config(model__encoder_attention_heads=3), "with its settings (--encoder"),
    "no such method": (config(model__layer_agg="x"), "model.layer_agg is 'x', not a method of this version"),
    "a setting less": (config(task__left_pad_source=KeyError), "task.left_pad_source is missing"),
    "tied to nothing": (config(tied={"x": "y"}), "x cannot be tied to y"),
    "tied although it is stored": (config(tied={EMBED: EMBED}), f"{EMBED} cannot be tied to {EMBED}"),
    "a card that lies": (config(name="a\nb"), "name is 'a\\nb', not one line of text"),
    "a later version": (config(version=2),
                        "has format version 2, but only 1 is supported; install a newer fairseq_deep"),
    "another format": (config(format="x"), "its format must be"),
    "nested": (text("config.json", b"[" * 500_000), "not a packaged-model configuration"),
    "large": (text("config.json", b" " * (2 << 20)), "at most 1,048,576 bytes"),
    "truncated": (cut, "invalid safetensors file"),
    "another shape": (tensors(lambda found: found.update({EMBED: found[EMBED].T.contiguous()})),
                      f"{EMBED} is (16, {VOCAB}), in the model ({VOCAB}, 16)"),
    "whole numbers": (tensors(lambda found: found.update({EMBED: found[EMBED].int()})),
                      f"rejected: '{EMBED}' has the unsupported type I32"),
    "a tensor less": (tensors(lambda found: found.pop(EMBED)), f"it lacks {EMBED}"),
    "a tensor more": (tensors(lambda found: found.update(x=torch.ones(1))), "it has x, which the model lacks"),
    "a word less": (text("dict.src.txt", b"".join(b"w%d 1\n" % index for index in range(VOCAB - 5))), "(39, 16)"),
    "a pipe": (fifo, "must be a regular file"),
    "merges without a setting": (text("code", b"a b\n"), "a package must not have a file of this name"),
    "a link for the card": (link, "must not be a link"),
    "no checksums": (text("SHA256SUMS", b""), "has no checksum of config.json"),
    "a checksum of a file elsewhere": (text("SHA256SUMS", b"0" * 64 + b"  ../config.json\n"), "SUMS: invalid line"),
    "NaN in the weights": (tensors(lambda found: found[EMBED].fill_(float("nan"))), f"'{EMBED}' holds NaN or Inf"),
    "metadata without end": (tensors(len, {"x": "y" * (9 << 20)}), "its header has 9,"),
}  # fmt: skip


def opened(action):
    """The files that Python opens while *action* runs, and what it runs; its error."""
    with seen() as events:
        try:
            action()
        except UsageError as error:
            return events, str(error)
    return events, ""


def changed(whole, folder, change):
    """A copy of the package with *change* and with valid checksums, which an attacker can also compute.

    A pipe has no sum, and sums may be the change.
    """
    shutil.rmtree(folder, ignore_errors=True)
    sums = shutil.copytree(whole, folder) / "SHA256SUMS"
    change(folder)
    if change is not fifo and sums.read_text() == (whole / "SHA256SUMS").read_text():
        sums.unlink()
        write_sums(str(folder))
    return str(folder / "model.safetensors")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused(name, whole, command, tmp_path):
    change, message = HOSTILE[name]
    folder = tmp_path / "made"
    shutil.copy(whole.parent / "secret", tmp_path)
    path = changed(whole, folder, change)
    seen, problem = opened(lambda: packaged.load(path))
    assert message in problem and "\n" not in problem and problem.startswith(str(folder))
    assert all(each.startswith(f"{folder}/") for each in seen)
    code, out, err = command("translate", folder, "--cpu", "--input", folder / "README.md")
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("fairseq-deep translate: ") and message in err
    assert not os.path.exists("MARK")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "dict.src.txt"])
def test_what_is_changed_at_random_is_read_or_refused(name, whole, tmp_path):
    """A few bytes of the text, or of the header of the weights; the checksums fit."""
    rng, outcomes = random.Random(7), []

    def change(folder):
        content = bytearray((folder / name).read_bytes())
        size = 8 + int.from_bytes(content[:8], "little") if name == "model.safetensors" else len(content)
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(size)] = rng.choice(b'0123456789[]{},:"-\n aFIU#\x00\xff')
        (folder / name).write_bytes(content[: rng.choice([None, None, None, rng.randrange(size)])])

    for _ in range(8 * TIMES):
        path = changed(whole, tmp_path / "made", change)
        seen, problem = opened(lambda path=path: packaged.load(path))
        assert "\n" not in problem and all(each.startswith(f"{tmp_path}/made/") for each in seen)
        outcomes.append(problem != "")
    assert any(outcomes)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "dict.src.txt", "dict.tgt.txt"])
def test_damage_is_told(name, whole, tmp_path):
    damaged = shutil.copytree(whole, tmp_path / "made") / name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(UsageError, match=f"^{damaged}: corrupt, its sha256 differs from SHA256SUMS; copy it again"):
        packaged.load(str(tmp_path / "made/model.safetensors"))
    damaged.unlink()
    with pytest.raises(UsageError, match=f"^{damaged}: No such file or directory; copy the directory again"):
        packaged.load(str(tmp_path / "made/model.safetensors"))


@pytest.mark.parametrize("arch", ["transformer_from_pretrained_xlm", "transformer_of_a_later_version"])
def test_fairseq_makes_no_checkpoint_of_another_model(arch, whole, tmp_path):
    """The runtime takes no notice of the name."""
    path = changed(whole, tmp_path / "made", config(arch=arch))
    assert packaged.load(path).config["arch"] == arch
    with pytest.raises(UsageError, match=f"{arch}, which is neither of this package nor of fairseq's transformer"):
        safe_load.load(path)


def test_a_package_without_limits_of_length_has_those_of_its_time(whole, tmp_path):
    path = changed(whole, tmp_path / "made", config(search__max_len_a=KeyError, search__max_len_b=KeyError))
    assert {"max_len_a": 1.0, "max_len_b": 50}.items() <= packaged.load(path).config["search"].items()


def test_no_setting_names_a_file():
    """Flags of later versions included: `model_settings` lists what a package may have."""
    known = model_settings()
    odd = re.compile(r"path|file|dir|from|restore|pretrain|profile|checkpoint|url|cmd|command|module")
    assert len(known) > 60 and [name for name in known if odd.search(name)] == []


def test_check_says_what_is_unusual(whole, command, tmp_path):
    shutil.copytree(whole, tmp_path / "made")
    code, out, _ = command("check", tmp_path / "made")
    assert code == 0 and "transformer_dlcl_2l2l_tiny" in out
    (tmp_path / "made/evil.py").write_text("x")
    (tmp_path / "made/README.md").write_text("another card")
    code, out, _ = command("check", tmp_path / "made/model.safetensors")
    assert code == 1 and "'evil.py' is not in SHA256SUMS" in out and "README.md: corrupt" in out


@pytest.fixture(scope="module")
def with_merges(dictionary, tmp_path_factory):
    """A packaged model of sub-words."""
    folder = tmp_path_factory.mktemp("merges")
    one, two = ([f"w {number}{end}" for number in range(10)] for end in ("</w>", ""))
    merges = [*one, *two, *(f"w{number // 10} {number % 10}</w>" for number in range(100))]
    (folder / "code").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return package(folder, dictionary, "--bpe-codes", str(folder / "code"))


@pytest.mark.parametrize("load", [
    lambda path: DeepTransformerModel.from_pretrained(str(path), "model.safetensors"),
    lambda path: load_model_ensemble_and_task([str(path / "model.safetensors")]),
], ids=["from_pretrained", "fairseq"])  # fmt: skip
def test_merges_are_those_of_the_package(load, with_merges, tmp_path):
    """Of a file or link of another name fairseq's hub would take them."""
    load(shutil.copytree(with_merges, tmp_path / "made"))
    (tmp_path / "bpecodes").write_text("w 3</w>\n")
    for place in (os.symlink, shutil.copy):
        changed(with_merges, tmp_path / "made", lambda folder: place(tmp_path / "bpecodes", folder / "bpecodes"))  # noqa: B023
        with pytest.raises(UsageError, match="made/bpecodes: rejected: a package must not have a file of this name"):
            load(tmp_path / "made")


@pytest.mark.parametrize("content, said", [
    (b"#version: 0.2\nw 1\nw\n", "invalid line 3 in BPE codes file: w"), (b"\xff b\n", "can't decode byte 0xff"),
    (b"#version: 0.9\nw 1\n", "has merges of version 0.9; subword-nmt supports 0.1 and 0.2"),
])  # fmt: skip
def test_broken_merges(content, said, with_merges, command, tmp_path):
    path = changed(with_merges, tmp_path / "made", text("code", content))
    with pytest.raises(UsageError, match=said):
        packaged.load(path)
    code, out, _ = command("check", tmp_path / "made")
    assert code == 1 and said in out


def test_without_the_plugin_fairseq_names_the_cure(whole, monkeypatch):
    monkeypatch.delitem(safe_load.FORMATS, ".safetensors")
    with pytest.raises(safe_load.CheckpointError, match="add the --user-dir"):
        safe_load.load(str(whole / "model.safetensors"))


def test_from_pretrained_reads_nothing_beside_the_folder(whole):
    seen, _ = opened(lambda: DeepTransformerModel.from_pretrained(str(whole), checkpoint_file="model.safetensors",
                                                                  tokenizer=None))  # fmt: skip
    assert {os.path.dirname(path) for path in seen if "site-packages" not in path and "/lib/python" not in path} == {
        str(whole)
    }
