"""A packaged model in transformers' Auto classes: text and translations are the runtime's."""

import copy
import json
import os
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fairseq_deep.cli import main  # noqa: E402
from fairseq_deep.errors import UsageError  # noqa: E402
from fairseq_deep.huggingface import (  # noqa: E402
    FairseqDeepConfig,
    FairseqDeepForConditionalGeneration,
    FairseqDeepTokenizer,
)
from fairseq_deep.runtime import Translator  # noqa: E402
from fairseq_deep.runtime.packaged.folder import find_problems, write_sums  # noqa: E402
from tests.helpers.commands import WITHOUT_FAIRSEQ, run  # noqa: E402

AUTO = (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoModelForSeq2SeqLM)
ODD = ["", " ", "Old  not-see's (green) & <unk> </s> <s> <pad> \u00fc\u4f60", "&lt; @-@ a@@ b|", "x" * 40]


@pytest.fixture(scope="module")
def loaded(package):
    """Configuration, tokenizer and model, as Auto classes load them."""
    return [each.from_pretrained(package) for each in AUTO]


@pytest.fixture(scope="module")
def lines(recipe):
    return [line for split in ("train", "test") for line in (recipe / f"text/raw/{split}.en").read_text().splitlines()]


def translate(tokenizer, model, lines, **options):
    found = model.generate(**tokenizer(lines, padding=True, return_tensors="pt"), **options)
    return tokenizer.batch_decode(found, skip_special_tokens=True)


def copied(package, folder, change=None):
    """A copy of the package, changed by *change*, with checksums that fit."""
    shutil.copytree(package, folder)
    if change is not None:
        content = json.loads((folder / "config.json").read_text())
        change(content)
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "SHA256SUMS").unlink()
        write_sums(str(folder))
    return folder


def test_auto_classes_load_a_package(loaded, package):
    assert [type(each) for each in loaded] == [
        FairseqDeepConfig, FairseqDeepTokenizer, FairseqDeepForConditionalGeneration,
    ]  # fmt: skip
    config, tokenizer, model = loaded
    assert config.package == json.loads((package / "config.json").read_text())
    assert not model.training and model.dtype == torch.float32
    assert AUTO[2].from_pretrained(package, dtype=torch.float16, device_map="auto").dtype == torch.float16
    assert model.config.vocab_size == len(model.get_output_embeddings().weight) == len(tokenizer.target)
    assert model.config.source_vocab_size == len(model.get_input_embeddings().weight) == len(tokenizer.source)
    found = model.generation_config
    search = found.num_beams, found.length_penalty, found.early_stopping, found.suppress_tokens
    assert search == (3, 0.8, True, [1])


def test_the_tokenizer_has_the_text_steps_of_the_runtime(loaded, package, lines, recipe):
    tokenizer, runtime = loaded[1], Translator(package, cpu=True)
    assert runtime.source != runtime.target
    for line in [*lines[:50], *ODD]:
        assert tokenizer(line).input_ids == runtime.source.encode(runtime.text.prepare(line)).tolist()
    for split in ("train", "test"):  # what the recipe has made of the target
        raw, cut = (recipe / name / f"{split}.de" for name in ("text/raw", "text/bpe"))
        found = tokenizer(text_target=raw.read_text().splitlines()).input_ids
        assert found == [runtime.target.encode(line).tolist() for line in cut.read_text().splitlines()]
    ids = torch.randint(3, len(runtime.target), (40, 9))
    expected = [runtime.text.finish(runtime.target.decode(row)) for row in ids.tolist()]
    framed = torch.cat([torch.full((40, 1), 2), ids, torch.full((40, 1), 2), torch.ones(40, 2).long()], dim=1)
    assert tokenizer.batch_decode(framed, skip_special_tokens=True) == expected
    assert any("<unk>" in line for line in expected)


def test_targets_are_lowercased_where_their_dictionary_is(package, tmp_path):
    folder = copied(package, tmp_path / "copy", lambda content: content["text"].update(lowercase=True))
    cased, small = (AUTO[1].from_pretrained(folder)(text_target=line).input_ids for line in ("Haus", "haus"))
    assert cased != small
    words = (folder / "dict.de.txt").read_text().splitlines(keepends=True)
    (folder / "dict.de.txt").write_text("".join(word for word in words if word == word.lower()))
    (folder / "SHA256SUMS").unlink()
    write_sums(str(folder))
    cased, small = (AUTO[1].from_pretrained(folder)(text_target=line).input_ids for line in ("Haus", "haus"))
    assert cased == small


def test_a_batch_for_training(loaded, lines):
    _, tokenizer, model = loaded
    batch = tokenizer(lines[:6], text_target=lines[:6], padding=True, return_tensors="pt")
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    assert model(**batch).loss.isfinite()
    assert (len(tokenizer), tokenizer.model_max_length) == (len(tokenizer.source), 24)
    assert len(tokenizer(" ".join(lines[:9]), truncation=True).input_ids) == 24
    tokens = tokenizer.tokenize(lines[0])
    ids = tokenizer(lines[0]).input_ids
    assert tokenizer.convert_tokens_to_ids(tokens) == ids[:-1]
    assert tokenizer.convert_ids_to_tokens(tokenizer.convert_tokens_to_ids(["</s>"])) == ["</s>"]
    for same in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert same(lines[0]).input_ids == ids and same.padding_side == "right"


def test_translations_are_those_of_the_runtime(loaded, package, lines):
    found = translate(*loaded[1:], lines, length_penalty=0.6)
    expected = Translator(package, cpu=True, lenpen=0.6).translate(lines)
    assert len({*expected}) > 100
    assert sum(map(str.__eq__, found, expected)) >= 0.98 * len(lines)


def test_a_saved_model_is_a_package(loaded, package, lines, tmp_path):
    _, tokenizer, model = loaded
    for order in ((model, tokenizer), (tokenizer, model)):
        folder = tmp_path / type(order[0]).__name__
        for each in order:
            each.save_pretrained(folder)
        assert sorted(os.listdir(folder)) == sorted(os.listdir(package))
        assert all((folder / name).read_bytes() == (package / name).read_bytes() for name in os.listdir(folder))
    changed = copy.deepcopy(model)
    torch.nn.init.ones_(changed.decoder.layer_norm.bias)
    changed.save_pretrained(folder, state_dict=changed.state_dict(), safe_serialization=True, max_shard_size="5GB")
    expected = translate(tokenizer, changed, lines[:9])
    assert expected != translate(tokenizer, model, lines[:9])
    assert Translator(folder, cpu=True).translate(lines[:9]) == expected
    # from what decodes quickly on a CPU, too
    expected = {name: value.clone() for name, value in changed.state_dict().items()}
    changed.prepare_for_decoding().save_pretrained(folder)
    again = FairseqDeepForConditionalGeneration.from_pretrained(folder).state_dict()
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in again)


def test_what_cannot_be_saved(loaded, package, tmp_path):
    _, tokenizer, model = loaded
    broken = copy.deepcopy(model)
    broken.decoder.layer_norm.bias.data[0] = torch.nan
    with pytest.raises(UsageError, match="the model cannot be saved: decoder.layer_norm.bias holds NaN or Inf"):
        broken.save_pretrained(tmp_path / "broken")
    assert not (tmp_path / "broken").exists() or os.listdir(tmp_path / "broken") == []
    weights = model.state_dict()
    unfilled = {name: torch.full_like(value, torch.nan) for name, value in weights.items() if "_float_tensor" in name}
    model.save_pretrained(tmp_path / "unfilled", state_dict={**weights, **unfilled})
    assert unfilled and find_problems(str(tmp_path / "unfilled")) == []
    with pytest.raises(UsageError, match="the model cannot be saved: decoder.layer_norm.bias holds NaN or Inf"):
        model.save_pretrained(tmp_path / "broken", state_dict=broken.state_dict())
    (copied(package, tmp_path / "other") / "dict.de.txt").write_text("other 1\n")
    with pytest.raises(UsageError, match="other holds another model; choose another directory"):
        tokenizer.save_pretrained(tmp_path / "other")


@pytest.mark.parametrize("has_card", [False, True])
def test_push_to_hub_uploads_a_package(has_card, loaded, package, lines, tmp_path, monkeypatch):
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import EntryNotFoundError

    hub, load = tmp_path / "hub", ModelCard.load
    hub.mkdir()

    def load_card(path, **kwargs):
        if os.path.exists(path):
            return load(path)
        if has_card:
            return ModelCard("---\nlicense: mit\n---\nTheir card")
        raise EntryNotFoundError("no card")

    def create_commit(operations, **_):
        for each in operations:
            shutil.copy(each.path_or_fileobj, hub / each.path_in_repo)

    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name), create_commit=create_commit)
    monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: api)
    monkeypatch.setattr(ModelCard, "load", load_card)
    loaded[2].push_to_hub("someone/model", tags=["translation"])
    assert sorted(os.listdir(hub)) == sorted(os.listdir(package)) and find_problems(str(hub)) == []
    card = (hub / "README.md").read_text()
    assert "- translation\n" in card
    assert ("Their card" in card) == has_card and ((package / "README.md").read_text().strip() in card) != has_card
    tokenizer, model = (each.from_pretrained(hub) for each in AUTO[1:])
    assert translate(tokenizer, model, lines[:5]) == translate(*loaded[1:], lines[:5])


def test_a_repository_in_the_cache_of_the_hub(loaded, package, lines, tmp_path):
    """The cache has links to blobs, and transformers asks it for files that a package does not have."""
    repo, commit = tmp_path / "models--someone--model", "0" * 40
    for name in ("refs", "blobs", f"snapshots/{commit}"):
        (repo / name).mkdir(parents=True)
    (repo / "refs/main").write_text(commit)
    for name in os.listdir(package):
        shutil.copy(package / name, repo / "blobs" / name)
        (repo / "snapshots" / commit / name).symlink_to(f"../../blobs/{name}")
    options = {"cache_dir": str(tmp_path), "local_files_only": True}
    tokenizer, model = (each.from_pretrained("someone/model", **options) for each in AUTO[1:])
    assert translate(tokenizer, model, lines[:5]) == translate(*loaded[1:], lines[:5])
    with pytest.raises(UsageError, match="someone/other: neither a directory nor a packaged model on the Hub"):
        FairseqDeepForConditionalGeneration.from_pretrained("someone/other", **options)


def test_a_package_of_before_loads_by_its_class(loaded, package, lines, tmp_path):
    def older(content):
        del content["model_type"], content["architectures"], content["search"]["max_len_a"]

    folder = copied(package, tmp_path / "older", older)
    tokenizer, model = (each.from_pretrained(folder) for each in (FairseqDeepTokenizer, type(loaded[2])))
    assert translate(tokenizer, model, lines[:5]) == translate(*loaded[1:], lines[:5])
    model.save_pretrained(tmp_path / "newer")
    assert type(transformers.AutoConfig.from_pretrained(tmp_path / "newer")) is FairseqDeepConfig


def test_code_in_a_package_is_not_run(package, tmp_path):
    """transformers would import it; other changes are told by the runtime, whose checks apply."""
    folder = copied(package, tmp_path / "folder")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\n")
    content = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "evil.C", "AutoModelForSeq2SeqLM": "evil.M", "AutoTokenizer": ["evil.T", None]}
    (folder / "config.json").write_text(json.dumps({**content, "auto_map": names}))
    write_sums(str(folder))
    for each in AUTO[1:]:
        with pytest.raises(UsageError, match="the unknown setting 'auto_map'|evil.py: refused") as raised:
            each.from_pretrained(folder, trust_remote_code=True)
        assert "\n" not in str(raised.value) and not (tmp_path / "MARK").exists()


def test_files_of_a_trainer_are_never_opened(package, lines, loaded, tmp_path, capsys):
    """As ``Seq2SeqTrainer`` and the Hub leave them; opening a FIFO would block."""
    folder = copied(package, tmp_path / "checkpoint-4")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", "trainer_state.json"):
        os.mkfifo(folder / name)
    for name in ("checkpoint-2", ".cache"):
        (folder / name).mkdir()
    tokenizer, model = (each.from_pretrained(folder) for each in AUTO[1:])
    assert translate(tokenizer, model, lines[:5]) == translate(*loaded[1:], lines[:5])
    assert Translator(str(folder), cpu=True).translate(lines[0])
    assert main(["check", str(folder)]) == 0 and "unusual  nothing" in capsys.readouterr().out


def test_an_untrained_model_from_a_configuration(package, loaded, tmp_path):
    config = transformers.AutoConfig.from_pretrained(package, encoder_layers=3)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    assert len(model.encoder.layers) == 3
    weights = [each.state_dict()["encoder.embed_tokens.weight"] for each in (model, loaded[2])]
    assert weights[0].shape == weights[1].shape and not torch.equal(*weights)
    model.save_pretrained(tmp_path / "new")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    config.package["model"]["encoder_layer"] = 3
    with pytest.raises(UsageError, match="unknown setting 'encoder_layer'"):
        transformers.AutoModelForSeq2SeqLM.from_config(config)


PROGRAM = """
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
import fairseq_deep  # registers its classes, for the Auto classes are imported
folder, *lines = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
found = model.generate(**tokenizer(lines, padding=True, return_tensors="pt"))
print("\\n".join(tokenizer.batch_decode(found, skip_special_tokens=True)))
"""


def test_it_works_without_fairseq_and_after_importing_the_package(loaded, package, lines):
    done = run("python3", "-c", PROGRAM, package, *lines[:3], prepare=WITHOUT_FAIRSEQ)
    assert done.stdout.splitlines() == translate(*loaded[1:], lines[:3])
