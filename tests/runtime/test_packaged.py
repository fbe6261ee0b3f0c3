"""Packaged models come back to the last bit, and a folder that is damaged or hostile is refused in one line."""

import argparse
import json
import os
import random
import re
import shutil
import struct
import sys

import pytest
import torch
from fairseq import safe_load
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from safetensors.torch import load_file, save_file

from fairseq_deep.cli import main
from fairseq_deep.core.checkpoints import upgrade_layers
from fairseq_deep.errors import UsageError
from fairseq_deep.plugin.architectures import ARCHITECTURES
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.packaged.config import model_settings
from fairseq_deep.runtime.packaged.folder import write_sums
from tests.helpers.fuzz import TIMES
from tests.helpers.methods import DLCL
from tests.helpers.models import VOCAB, task_of, tiny_flags
from tests.helpers.tools import EMPTY

PLAIN = {**{f"{side}_{key}": value for side in ("encoder", "decoder")
            for key, value in (("layers", 1), ("embed_dim", 16), ("ffn_embed_dim", 32), ("attention_heads", 2))},
         "dropout": 0.0}  # fmt: skip


def of_each_family():
    """The shallowest architecture of each family, with flags that make it narrow and, if it is deep, shallow."""
    rows = sorted(ARCHITECTURES.values(), key=lambda row: -row.encoder_layers - row.decoder_layers)
    first = {row.family: row for row in rows}
    shallow = {"encoder_layers": 3, "decoder_layers": 3}
    return {row.name: {**tiny_flags(row.name), **(shallow if row.encoder_layers > 6 else {})} for row in first.values()}


MODELS = {
    **of_each_family(),
    "transformer_lstm_share_all_6l": tiny_flags("transformer_lstm_share_all_6l"),
    "deep_transformer": {**PLAIN, "share_decoder_input_output_embed": True},
    "transformer_iwslt_de_en": {**PLAIN, "share_all_embeddings": True},  # fairseq's own
    "dlcl_transformer_toy": {"dropout": 0.0, "share_all_embeddings": True, "init_value": "one"},  # of the original code
}


@pytest.fixture(scope="module")
def data(dictionary, tmp_path_factory):
    """A folder with both dictionaries."""
    folder = tmp_path_factory.mktemp("dictionaries")
    for lang in ("src", "tgt"):
        dictionary.save(str(folder / f"dict.{lang}.txt"))
    return folder


def write_checkpoint(path, name, flags, dictionary):
    """A checkpoint of a fresh model, as fairseq-train leaves it; the model."""
    resolved = argparse.Namespace(_name=name, arch=name, **flags)
    ARCH_CONFIG_REGISTRY[name](resolved)
    task = task_of(dictionary)
    model = ARCH_MODEL_REGISTRY[name].build_model(argparse.Namespace(**vars(resolved)), task).eval()
    model.load_state_dict(model.state_dict())  # fairseq's own fills its unused copies then
    cfg = {"model": resolved, "task": {"_name": "translation", "data": "x", "source_lang": "src", "target_lang": "tgt"}}
    history = [{"criterion_name": "x", "optimizer_name": "x", "lr_scheduler_state": {}, "num_updates": 3}]
    torch.save({"cfg": cfg, "args": None, "model": model.state_dict(), "optimizer_history": history,
                "extra_state": {"train_iterator": {}}}, path)  # fmt: skip
    return model


def package(checkpoint, data, output, *words):
    return main(["package", str(checkpoint), "--data", str(data), "--output", str(output), *words])


def loaded(path, data):
    (model,), _, _ = load_model_ensemble_and_task([str(path)], arg_overrides={"data": str(data)})
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_to_the_last_bit(name, dictionary, data, batch, tmp_path):
    original = write_checkpoint(tmp_path / "c.pt", name, MODELS[name], dictionary)
    assert package(tmp_path / "c.pt", data, tmp_path / "made") == 0
    os.rename(tmp_path / "made", tmp_path / "moved")
    model = loaded(tmp_path / "moved/model.safetensors", tmp_path / "moved")
    back, state = model.state_dict(), original.state_dict()
    upgrade_layers(state)  # fairseq's own has unused copies
    assert back.keys() == state.keys()
    assert [key for key in state if not torch.equal(back[key], state[key]) and not key.endswith(EMPTY[0])] == []
    atol = 1e-5 if name == "transformer_iwslt_de_en" else 0.0  # comes back as its twin, with other kernels
    words = batch[2].ne(dictionary.pad())
    torch.testing.assert_close(model(*batch)[0][words], original(*batch)[0][words], rtol=0, atol=atol)


@pytest.fixture
def dlcl(dictionary, tmp_path):
    """The weights of a checkpoint in c.pt."""
    return write_checkpoint(tmp_path / "c.pt", DLCL, tiny_flags(DLCL), dictionary).state_dict()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_the_same_weights_rounded(dtype, dlcl, data, tmp_path):
    assert package(tmp_path / "c.pt", data, tmp_path / "made", "--dtype", dtype) == 0
    found = packaged.load(str(tmp_path / "made/model.safetensors")).tensors
    kind = getattr(torch, dtype)
    assert found.keys() == dlcl.keys()
    kept = [key for key in sorted(found) if found[key].dtype == torch.float32]  # as the model does in training
    assert kept == ["decoder.history.weight", "encoder.history.weight"]
    kinds = {key: torch.float32 if key in kept else kind for key in dlcl}
    assert all(torch.equal(found[key], dlcl[key].to(kinds[key])) for key in dlcl if not key.endswith(EMPTY))
    model = loaded(tmp_path / "made/model.safetensors", data)
    assert torch.equal(model.encoder.embed_tokens.weight, dlcl["encoder.embed_tokens.weight"].to(kind).float())
    # a checkpoint in half precision stays what it is
    half = torch.load(tmp_path / "c.pt", weights_only=False)
    half["model"] = {key: value.to(kind) for key, value in half["model"].items()}
    torch.save(half, tmp_path / "half.pt")
    assert package(tmp_path / "half.pt", data, tmp_path / "again") == 0
    again = packaged.load(str(tmp_path / "again/model.safetensors")).tensors
    assert {value.dtype for key, value in again.items() if not key.endswith(EMPTY)} == {kind}


def test_settings_as_fairseq_hydra_train_leaves_them(dlcl, data, tmp_path):
    state = torch.load(tmp_path / "c.pt", weights_only=False)
    flags = vars(state["cfg"]["model"])
    state["cfg"]["model"] = {key: flags[key] for key in flags if key != "arch"}
    torch.save(state, tmp_path / "hydra.pt")
    assert package(tmp_path / "hydra.pt", data, tmp_path / "made") == 0
    back = loaded(tmp_path / "made/model.safetensors", data).state_dict()
    assert all(torch.equal(back[key], value) for key, value in dlcl.items() if not key.endswith(EMPTY))


def test_tied_tensors_are_stored_once_and_packages_of_one_checkpoint_are_alike(dictionary, data, tmp_path):
    write_checkpoint(tmp_path / "c.pt", DLCL, {**tiny_flags(DLCL), "share_all_embeddings": True}, dictionary)
    for made in ("a/model", "b/model"):
        (tmp_path / made).parent.mkdir()
        assert package(tmp_path / "c.pt", data, tmp_path / made) == 0
    assert (tmp_path / "a/model/SHA256SUMS").read_text() == (tmp_path / "b/model/SHA256SUMS").read_text()
    stored = load_file(tmp_path / "a/model/model.safetensors")
    shaped = [key for key, value in stored.items() if value.shape == (VOCAB, 16)]
    assert shaped == ["encoder.embed_tokens.weight"]
    found = packaged.load(str(tmp_path / "a/model/model.safetensors")).tensors
    assert found["decoder.output_projection.weight"] is found["encoder.embed_tokens.weight"]


@pytest.fixture(scope="module")
def whole(dictionary, data, tmp_path_factory):
    """A packaged model, and a file with a secret beside it."""
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(1)
    write_checkpoint(folder / "c.pt", DLCL, tiny_flags(DLCL), dictionary)
    assert package(folder / "c.pt", data, folder / "made") == 0
    (folder / "secret").write_text("secret 1\n" * 2)
    return folder / "made"


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


def tensors(change):
    """A change of the tensors, written again by the library."""

    def rewrite(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return rewrite


def header(change, cut=None):
    """A change of the header of the weights, as JSON or as bytes; all but *cut* bytes of the data."""

    def rewrite(folder):
        content = (folder / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        head, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
        head = change(head) or head
        head = head if isinstance(head, bytes) else json.dumps(head).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + rest[:cut])

    return rewrite


def at(key, **fields):
    return header(lambda head: head[key].update(fields))


def link(name, target):
    def change(folder):
        os.remove(folder / name)
        os.symlink(target, folder / name)

    return change


def fifo(folder):
    os.remove(folder / "model.safetensors")
    os.mkfifo(folder / "model.safetensors")


EMBED = "encoder.embed_tokens.weight"
OUT = "decoder.output_projection.weight"
UNKNOWN = "has the unknown setting"
HOSTILE = {
    "a folder of programs": (config(model__user_dir="/tmp/evil"), "model has the unknown setting 'user_dir'"),
    "at the top": (config(user_dir="."), "the content has the unknown setting 'user_dir'"),
    "another class of transformers": (config(model_type="bert"), "model_type must be fairseq_deep or missing"),
    "several classes": (config(architectures=["FairseqDeepForConditionalGeneration", "X"]), "architectures must be"),
    "a criterion": (config(criterion__criterion="ctc"), UNKNOWN),
    "a task": (config(task___name="speech_to_text"), UNKNOWN),
    "a reference": (config(model__dlcl_init="${oc.env:HOME}"), "model.dlcl_init is '${oc.env:HOME}', not a short"),
    "an expression": (config(model__adaptive_softmax_cutoff="__import__('os').system('touch MARK')"),
                      "adaptive_softmax_cutoff is \"__import__('os').system('touch MARK')\", not a short"),
    "a language elsewhere": (config(task__source_lang="../secret/x"), "source_lang is '../secret/x', not a language"),
    "a tokenizer": (config(text__tokenizer="evil"), "text.tokenizer is 'evil', not one of moses, none"),
    "a number for a truth": (config(text__lowercase=1), "text.lowercase is 1, not true or false"),
    "a path for a model": (config(arch="../x"), "arch is '../x', not the name of a Transformer"),
    "a list for a number": (config(model__encoder_layers=[2]), "model.encoder_layers is a list, not a whole number"),
    "very deep": (config(model__encoder_layers=900_000), "does not have that many encoder_layers"),
    "very wide": (config(model__encoder_embed_dim=10**9), "model.encoder_embed_dim is 1000000000, not a short"),
    "a huge number": (config(model__dropout=10**400), "model.dropout is 1000"),
    "whole numbers as in indices": (
        tensors(lambda found: found.update({EMBED: found[EMBED].long()})), f"{EMBED} has the type torch.int64"),
    "many empty tensors": (
        tensors(lambda found: found.update({f"x{n}": torch.zeros(0) for n in range(4000)})), "more than"),
    "a huge search": (config(search__beam=10**6), "search.beam is 1000000, not a whole number from 1 to 1000"),
    "heads that do not divide": (config(model__encoder_attention_heads=3), "with its settings (--encoder"),
    "no such method": (config(model__layer_agg="x"), "model.layer_agg is 'x', not a method of this version"),
    "a section less": (config(search=KeyError), "search is missing"),
    "a setting less": (config(task__left_pad_source=KeyError), "task.left_pad_source is missing"),
    "a section that is none": (config(task=[1]), "task is a list, not an object"),
    "tied to nothing": (config(tied={"x": "y"}), "x cannot be tied to y"),
    "tied although it is stored": (config(tied={EMBED: EMBED}), f"{EMBED} cannot be tied to {EMBED}"),
    "tied to a list": (config(tied={"x": ["y"]}), "tied.x is a list, not the name of a tensor"),
    "a card that lies": (config(name="a\nb"), "name is 'a\\nb', not one line of text"),
    "a later version": (config(version=2),
                        "has format version 2, but only 1 is supported; install a newer fairseq_deep"),
    "another format": (config(format="x"), "its format must be"),
    "NaN": (config(search__lenpen=float("nan")), "search.lenpen is nan, not a number"),
    "infinity": (lambda folder: text("config.json", (folder / "config.json").read_bytes().replace(b'"lenpen": 0.6',
                 b'"lenpen": 1e999'))(folder), "search.lenpen is inf, not a number"),
    "twice": (text("config.json", b'{"format": 1, "format": 2}'), "a name is repeated in one object"),
    "nested": (text("config.json", b"[" * 500_000), "not a packaged-model configuration"),
    "no JSON": (text("config.json", b"cos\nsystem\n(S'touch MARK'\ntR."), "not a packaged-model configuration"),
    "not UTF-8": (text("config.json", b"\xff\xfe"), "must be UTF-8"),
    "large": (text("config.json", b" " * (2 << 20)), "at most 1,048,576 bytes"),
    "a pickle for weights": (lambda folder: torch.save({}, folder / "model.safetensors"), "invalid safetensors file"),
    "truncated": (header(lambda head: None, cut=-100), "invalid safetensors file"),
    "a header beyond the end": (text("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"), "safetensors file"),
    "a nested header": (header(lambda head: b"[" * 200_000), "invalid safetensors file"),
    "offsets that overlap": (header(lambda head: head[EMBED].update(data_offsets=head[OUT]["data_offsets"])),
                             "invalid safetensors file"),
    "a huge shape": (at(EMBED, shape=[1 << 40, 1 << 40]), "invalid safetensors file"),
    "another shape": (at(EMBED, shape=[16, VOCAB]), f"{EMBED} is (16, {VOCAB}), in the model ({VOCAB}, 16)"),
    "whole numbers": (at(EMBED, dtype="I32"), f"rejected: '{EMBED}' has the unsupported type I32"),
    "another type": (at(EMBED, dtype="F16"), "invalid safetensors file"),
    "a tensor less": (tensors(lambda found: found.pop(EMBED)), f"it lacks {EMBED}"),
    "a tensor more": (tensors(lambda found: found.update(x=torch.ones(1))), "it has x, which the model lacks"),
    "a word less": (text("dict.src.txt", b"".join(b"w%d 1\n" % index for index in range(VOCAB - 5))), "(39, 16)"),
    "no dictionary": (text("dict.src.txt", b"a\nb\n"), "copy the dictionary again"),
    "a dictionary in latin-1": (text("dict.tgt.txt", b"\xe4 1\n"), "must be UTF-8"),
    "words twice": (text("dict.tgt.txt", b"a 1\na 1\n"), "dict.tgt.txt:2: 'a' occurs twice"),
    "a link for weights": (link("model.safetensors", "../secret"), "must not be a link"),
    "a link for settings": (link("config.json", "/etc/hostname"), "must not be a link"),
    "a pipe": (fifo, "must be a regular file"),
    "merges of the hub's other name": (text("bpecodes", b"a b\n"), "a package must not have a file of this name"),
    "merges without a setting": (text("code", b"a b\n"), "a package must not have a file of this name"),
    "a link beside": (lambda folder: os.symlink("../secret", folder / "bpecodes"), "a package must not have a file"),
    "a link for the card": (link("README.md", "../secret"), "must not be a link"),
    "NaN in the weights": (tensors(lambda found: found[EMBED].fill_(float("nan"))), f"'{EMBED}' holds NaN or Inf"),
    "infinite weights": (tensors(lambda found: found[OUT][0].fill_(float("inf"))), f"'{OUT}' holds NaN or Inf"),
    "a tensor twice": (header(lambda head: b'{"x": {}, "x": {}, ' + json.dumps(head).encode()[1:]),
                       "invalid safetensors file"),
    "metadata without end": (header(lambda head: head.update(__metadata__={"x": "y" * (9 << 20)})),
                             "its header has 9,"),
    "numbers of thousands of digits": (text("config.json", b'{"format": ' + b"9" * 5000 + b"}"), "not a packaged"),
    "a lone surrogate": (config(arch="\ud800"), "a string has half of a surrogate pair"),
}  # fmt: skip


def opened(action):
    """The files that Python opens while *action* runs, which may raise."""
    seen = []
    OPENED.append(seen)
    try:
        action()
    except UsageError as error:
        return seen, str(error)
    finally:
        OPENED.remove(seen)
    return seen, ""


OPENED = []


@pytest.fixture(scope="module", autouse=True)
def watched():
    def hook(event, arguments):
        if OPENED and event == "open":
            OPENED[-1].append(str(arguments[0]))
        elif OPENED and event in ("os.system", "subprocess.Popen"):
            OPENED[-1].append(event)

    sys.addaudithook(hook)


def changed(whole, folder, change):
    """A copy of the package with *change*; its sums are right: whoever changes a file can also change its sum."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    change(folder)
    if change is not fifo:  # of which no sum can be made
        os.remove(folder / "SHA256SUMS")
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


ODD = [None, True, 0, -1, 2.5, 10**9, 1e300, "", "x", "../x", "${oc.env:HOME}", [], [1, "a"], {}, {"x": {"y": 1}}]


def nodes(value, path=()):
    """Where anything stands in an object."""
    yield path
    for key in value if isinstance(value, dict) else ():
        yield from nodes(value[key], (*path, key))


def change_values(folder, rng):
    content = json.loads((folder / "config.json").read_text())
    for path in rng.sample([path for path in nodes(content) if path], rng.randint(1, 2)):
        place = content
        for key in path[:-1]:
            place = place.get(key, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[rng.choice([path[-1], "x", "encoder_embed_path"])] = rng.choice(ODD)
    (folder / "config.json").write_text(json.dumps(content))


def change_header(folder, rng):
    content = bytearray((folder / "model.safetensors").read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(8 + size)] = rng.choice(b'0123456789[]{},:"-FIU\x00\xff')
    (folder / "model.safetensors").write_bytes(content[: rng.choice([None, None, None, rng.randrange(len(content))])])


def change_words(folder, rng):
    content = bytearray((folder / "dict.src.txt").read_bytes())
    content[rng.randrange(len(content))] = rng.choice(b"\n a0#\xff")
    (folder / "dict.src.txt").write_bytes(content)


@pytest.mark.parametrize("count", [8, pytest.param(50 * TIMES, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("change", [change_values, change_header, change_words])
def test_what_is_changed_at_random_is_read_or_refused(change, count, whole, tmp_path):
    rng, outcomes = random.Random(7), []
    for _ in range(count):
        path = changed(whole, tmp_path / "made", lambda folder: change(folder, rng))
        seen, problem = opened(lambda path=path: packaged.load(path))
        assert "\n" not in problem and all(each.startswith(f"{tmp_path}/made/") for each in seen)
        outcomes.append(problem != "")
    assert any(outcomes)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "dict.src.txt", "dict.tgt.txt"])
def test_damage_is_told(name, whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "made") / "model.safetensors"
    damaged = tmp_path / "made" / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UsageError, match=f"^{damaged}: corrupt, its sha256 differs from SHA256SUMS; copy it again"):
        packaged.load(str(path))
    damaged.unlink()
    with pytest.raises(UsageError, match=f"^{damaged}: No such file or directory; copy the directory again"):
        packaged.load(str(path))


@pytest.mark.parametrize("arch", ["transformer_from_pretrained_xlm", "transformer_of_a_later_version"])
def test_fairseq_makes_no_checkpoint_of_another_model(arch, whole, tmp_path):
    """The runtime takes no notice of the name."""
    path = changed(whole, tmp_path / "made", config(arch=arch))
    assert packaged.load(path).config["arch"] == arch
    with pytest.raises(UsageError, match=f"{arch}, which is neither of this package nor of fairseq's transformer"):
        safe_load.load(path)


def test_no_setting_names_a_file():
    """Flags of later versions included: `model_settings` lists what a package may have."""
    known = model_settings()
    odd = re.compile(r"path|file|dir|from|restore|pretrain|profile|checkpoint|url|cmd|command|module")
    assert len(known) > 60 and [name for name in known if odd.search(name)] == []


@pytest.mark.parametrize("content, message", [
    ("", "has no checksum of config.json"), ("x", "invalid line 'x'"),
    ("0" * 64 + "  ../config.json\n", "SHA256SUMS: invalid line"),
])  # fmt: skip
def test_sums_that_are_none(content, message, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "made")
    (tmp_path / "made/SHA256SUMS").write_text(content)
    with pytest.raises(UsageError, match=message):
        packaged.load(str(tmp_path / "made/model.safetensors"))


def test_check_says_what_is_unusual(whole, command, tmp_path):
    shutil.copytree(whole, tmp_path / "made")
    code, out, _ = command("check", tmp_path / "made")
    assert code == 0 and "transformer_dlcl_2l2l_tiny" in out
    (tmp_path / "made/evil.py").write_text("x")
    (tmp_path / "made/README.md").write_text("another card")
    code, out, _ = command("check", tmp_path / "made/model.safetensors")
    assert code == 1 and "'evil.py' is not in SHA256SUMS" in out and "README.md: corrupt" in out


@pytest.fixture(scope="module")
def with_merges(dictionary, data, tmp_path_factory):
    """A packaged model of sub-words."""
    folder = tmp_path_factory.mktemp("merges")
    write_checkpoint(folder / "c.pt", DLCL, tiny_flags(DLCL), dictionary)
    one, two = ([f"w {number}{end}" for number in range(10)] for end in ("</w>", ""))
    merges = [*one, *two, *(f"w{number // 10} {number % 10}</w>" for number in range(100))]
    (folder / "code").write_text("\n".join(["#version: 0.2", *merges, ""]))
    assert package(folder / "c.pt", data, folder / "made", "--bpe-codes", str(folder / "code")) == 0
    return folder / "made"


LOADERS = {
    "from_pretrained": lambda path: DeepTransformerModel.from_pretrained(str(path), "model.safetensors"),
    "fairseq": lambda path: load_model_ensemble_and_task([str(path / "model.safetensors")]),
}


@pytest.mark.parametrize("load", LOADERS)
def test_merges_are_those_of_the_package(load, with_merges, tmp_path):
    """Of a file or link of another name fairseq's hub would take them."""
    shutil.copytree(with_merges, tmp_path / "made")
    LOADERS[load](tmp_path / "made")
    (tmp_path / "bpecodes").write_text("w 3</w>\n")
    for place in (link_to_codes, lambda folder: shutil.copy(tmp_path / "bpecodes", folder)):
        changed(with_merges, tmp_path / "made", place)
        with pytest.raises(UsageError, match="made/bpecodes: rejected: a package must not have a file of this name"):
            LOADERS[load](tmp_path / "made")


def link_to_codes(folder):
    os.symlink("../bpecodes", folder / "bpecodes")


@pytest.mark.parametrize("content, said", [
    (b"#version: 0.2\nw 1\nw\n", "invalid line 3 in BPE codes file: w"), (b"a b c\n", "invalid line 1 in BPE"),
    (b"\xff b\n", "can't decode byte 0xff"), (b"", "invalid line 1 in BPE"),
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
