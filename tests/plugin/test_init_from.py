"""``--init-from``: what a new model takes from a trained one, training runs that begin with it, and what is refused."""

import argparse
import logging
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.dictionaries import sums
from fairseq_deep.plugin.models.init_from import repeated_layers
from fairseq_deep.plugin.training import restart
from tests.errors import assert_says, read_model, rows
from tests.helpers.commands import PACKAGE, entries, hypotheses, losses, run, saved, train_command
from tests.helpers.flags import parse
from tests.helpers.models import fairseq_transformer, make_batch, make_dictionary, task_of, tiny_flags

PRE = "prenorm_6l"
TWO_ONE = {"encoder_layers": 2, "decoder_layers": 1}


@pytest.mark.parametrize("order, old, new, layers", [
    ("block", 6, 6, [0, 1, 2, 3, 4, 5]), ("block", 6, 8, [0, 1, 2, 3, 4, 5, 4, 5]),
    ("block", 6, 12, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]), ("block", 3, 8, [0, 1, 2, 0, 1, 2, 1, 2]),
    ("block", 1, 3, [0, 0, 0]), ("interleave", 3, 6, [0, 0, 1, 1, 2, 2]), ("interleave", 3, 3, [0, 1, 2]),
    ("interleave", 6, 8, [0, 0, 1, 2, 3, 3, 4, 5]), ("interleave", 2, 5, [0, 0, 0, 1, 1]),
])  # fmt: skip
def test_whole_stacks_are_repeated_and_then_the_top_or_layers_are_interleaved(order, old, new, layers):
    assert repeated_layers(old, new, order) == layers


@pytest.fixture
def trained(tmp_path, build, dictionary):
    """trained(name, **flags): a model whose weights differ from those of a new model, and its checkpoint old.pt.

    *name* is that of the architecture without "transformer_", or "transformer" for fairseq's.
    """

    def make(name, **flags):
        arch = "transformer" if name == "transformer" else f"transformer_{name}"
        flags = {**tiny_flags("transformer_prenorm_6l" if arch == name else arch), **flags}
        model = fairseq_transformer(dictionary, **flags) if arch == name else build(arch, **flags)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        path = tmp_path / "old.pt"
        torch.save({"args": argparse.Namespace(arch=arch, **flags), "model": model.state_dict()}, path)
        return model.eval(), path

    return make


def output(model, dictionary):
    batch = make_batch(dictionary)
    return model.eval()(*batch)[0][batch[2].ne(dictionary.pad())]


def seeded(run, *arguments):
    torch.manual_seed(5)
    return run(*arguments)


LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
DEEPER = {"encoder_layers": 5, "decoder_layers": 4}
MAPS = {"encoder": [0, 1, 0, 1, 1], "decoder": [0, 1, 2, 2]}


def check_layers(new, old, parts=None):
    """Whether all of the model *new* is of *old*, layers by `MAPS`, of these only those with one of the *parts*."""
    theirs, count = old.state_dict(), 0
    for name, value in new.state_dict().items():
        found = LAYER.fullmatch(name)
        if found and (parts is None or any(part in name for part in parts)):
            name = f"{found[1]}.layers.{MAPS[found[1]][int(found[2])]}.{found[3]}"
        elif found or ".history." in name or "_float_tensor" in name:
            continue
        assert torch.equal(value, theirs[name]), name
        count += found is not None
    assert count >= 2 * 9 * 3


@pytest.mark.parametrize("name", ["transformer", "prenorm_6l"])
def test_layers_of_a_deeper_model_are_those_that_it_repeats(name, trained, build, caplog):
    side = {f"{side}_normalize_before": True for side in ("encoder", "decoder")}
    old, path = trained(name, encoder_layers=2, decoder_layers=3, **side)
    with caplog.at_level(logging.INFO):
        new = build("transformer_prenorm_6l", init_from=str(path), **DEEPER)
    check_layers(new, old)
    arch = "transformer" if name == "transformer" else f"transformer_{name}"
    assert f"--init-from {path} ({arch}): encoder layers 1 2 1 2 2, decoder layers 1 2 3 3" in caplog.text
    assert "with their own initialisation: none; not copied: none; its dictionaries" in caplog.text


def test_parameters_that_the_old_model_lacks_keep_their_own_initialisation(trained, build, caplog):
    old, path = trained("prenorm_6l", encoder_layers=2, decoder_layers=3)
    fresh = seeded(lambda: build("transformer_dlcl_6l", relative_positions=3, **DEEPER))
    with caplog.at_level(logging.INFO):
        new = seeded(lambda: build("transformer_dlcl_6l", relative_positions=3, init_from=str(path), **DEEPER))
    check_layers(new, old, ["_proj", "fc", "norm"])
    theirs = fresh.state_dict()
    kept = {name: value for name, value in new.state_dict().items() if ".history." in name or "relative" in name}
    assert len(kept) == 2 + 2 * 9 + 9 and all(torch.equal(value, theirs[name]) for name, value in kept.items())
    assert "own initialisation: decoder.history.layer_norms.*.bias, decoder.history.layer_norms.*.we" in caplog.text


def test_dlcl_may_start_as_the_plain_stack(trained, build, dictionary):
    """Without norms on its entries, and with W that reads the newest one."""
    _, path = trained("prenorm_6l", encoder_layers=2, decoder_layers=3)
    plain = build("transformer_prenorm_6l", init_from=str(path), **DEEPER)
    dense = build("transformer_dlcl_6l", init_from=str(path), dlcl_init="last", dlcl_no_norm=True, **DEEPER)
    expected = seeded(output, plain, dictionary)
    torch.testing.assert_close(seeded(output, dense, dictionary), expected)
    other = build("transformer_dlcl_6l", init_from=str(path), **DEEPER)
    assert (seeded(output, other, dictionary) - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", ["dlcl_6l", "lstm_6l", "lstm_two_6l", "matt_6l", "transparent_16l", "sdu_6l"])
def test_a_model_of_ours_keeps_its_function(name, trained, build, dictionary, caplog):
    """At its own depth; a deeper model initialises an aggregator of another depth itself."""
    recorded = {"lstm_attn_residual": True} if name == "lstm_6l" else {}  # as fairseq-train stores it
    old, path = trained(name, encoder_layers=2, decoder_layers=2, **recorded)
    new = build(f"transformer_{name}", init_from=str(path), encoder_layers=2, decoder_layers=2)
    assert torch.equal(seeded(output, new, dictionary), seeded(output, old, dictionary))
    with caplog.at_level(logging.INFO):
        build(f"transformer_{name}", init_from=str(path), encoder_layers=3, decoder_layers=2)
    history = "encoder.history" in caplog.text.rpartition("own initialisation: ")[2].partition("not copied")[0]
    assert history == name.startswith(("dlcl", "lstm"))


def test_mix_ln_is_interleaved(trained, build, caplog):
    """With 8 of 4 layers, 2 instead of 1 are post-norm, the two copies of layer 1."""
    flags = {"decoder_layers": 1, "residual": "mix-ln"}
    old, path = trained("prenorm_6l", encoder_layers=4, **flags)
    flags = {**flags, "init_from": str(path), "init_from_order": "interleave"}
    with caplog.at_level(logging.INFO):
        new = build("transformer_prenorm_6l", encoder_layers=8, **flags)
    assert "encoder layers 1 1 2 2 3 3 4 4, decoder layers 1;" in caplog.text
    for number, layer in enumerate(new.encoder.layers):
        source = old.encoder.layers[number // 2]
        assert layer.residual.pre_norm == source.residual.pre_norm
        assert torch.equal(layer.fc1.weight, source.fc1.weight)


def test_the_file_is_required_only_at_the_first_start(tmp_path):
    def parsed(*flags):
        return parse("--arch", "transformer_prenorm_2l2l_tiny", "--optimizer", "adam", *map(str, flags))

    save = tmp_path / "save"
    with pytest.raises(UsageError, match=f"--init-from {tmp_path}/old.pt: no such file"):
        parsed("--init-from", tmp_path / "old.pt", "--save-dir", save)
    (tmp_path / "old.pt").write_text("")
    assert parsed("--init-from", tmp_path / "old.pt", "--save-dir", save).init_from == str(tmp_path / "old.pt")
    save.mkdir()
    torch.save({}, save / "checkpoint_last.pt")
    (tmp_path / "old.pt").unlink()
    more = ["--init-from-order", "interleave", "--stack-restart-updates", "4"]
    flags = parsed("--init-from", tmp_path / "old.pt", "--save-dir", save, *more)
    assert (flags.init_from, flags.init_from_order, flags.stack_restart_updates) == (None, None, None)


SHALLOW = ["--encoder-layers", "2", "--decoder-layers", "1", "--encoder-normalize-before", "--decoder-normalize-before"]
DEEP = ["--encoder-layers", "3", "--decoder-layers", "2", "--share-all-embeddings"]
SHORT = ["--disable-validation", "--no-epoch-checkpoints"]


@pytest.fixture(scope="module")
def stock(data, tmp_path_factory):
    """A checkpoint of fairseq's own model."""
    folder = tmp_path_factory.mktemp("stock")
    run(*train_command(data, folder, *SHALLOW, *SHORT, "--max-update", "3", arch="transformer"))
    return folder / "checkpoint_last.pt"


def test_a_deeper_model_starts_goes_on_and_translates_without_the_file(data, stock, tmp_path):
    old, save = tmp_path / "stock.pt", tmp_path / "save"
    shutil.copy(stock, old)
    for path in data.glob("dict.*.txt"):
        shutil.copy(path, tmp_path)

    def train(updates, *flags, **options):
        flags = [*DEEP, *SHORT, "--init-from", old, "--max-update", updates, *flags]
        return run(*train_command(data, save, *flags, arch="transformer_prenorm_6l"), **options)

    two = ["--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo", "--max-tokens", "200", "--lr", "0"]
    done = train(1, *two, processes=2)
    assert done.text.count(f"--init-from {old} (transformer): encoder layers 1 2 2, decoder layers 1 1; ") == 1
    assert "own initialisation: none; not copied: none\n" in done.text  # the dictionaries were there to compare
    state, first = saved(save), saved(tmp_path, "stock.pt")
    assert state["cfg"]["model"].init_from is None and str(old) not in str(state["cfg"])
    for name in ("self_attn.q_proj.weight", "fc2.bias"):
        ours, theirs = state["model"][f"encoder.layers.2.{name}"], first["model"][f"encoder.layers.1.{name}"]
        assert torch.equal(ours, theirs)  # a learning rate of 0 leaves what was taken

    old.unlink()
    done = train(2)
    assert f"training resumes from {save}/checkpoint_last.pt: --init-from is not used" in done.text
    assert list(losses(done)) == [2] and "encoder layers" not in done.text
    words = [data, "--user-dir", PACKAGE, "--path", save / "checkpoint_last.pt", "--cpu", "--max-len-b", "9"]
    assert len(hypotheses(run("fairseq-generate", *words))) == 30


def test_a_deeper_model_may_start_at_the_peak_of_the_schedule(data, stock, tmp_path):
    def train(folder, updates):
        flags = [*DEEP, *SHORT, "--max-update", updates, "--init-from", stock,
                 "--init-from-order", "interleave", "--stack-restart-updates", "4"]  # fmt: skip
        done = run(*train_command(data, tmp_path / folder, *flags, arch="transformer_prenorm_6l"))
        return done.text, {update: entry["lr"] for update, entry in entries(done).items()}, losses(done)

    text, whole, trained = train("whole", 8)
    assert "--stack-restart-updates: training starts at update 4, lr 0.002" in text  # the peak, warm-up is 4
    assert whole == pytest.approx({n: 2e-3 * (4 / n) ** 0.5 for n in (5, 6, 7, 8)}, rel=1e-3)
    start, rest = train("parts", 6), train("parts", 8)
    assert {**start[1], **rest[1]} == whole and {**start[2], **rest[2]} == trained and list(rest[1]) == [7, 8]
    assert "training starts at" not in rest[0]


@pytest.fixture
def refused(build):
    """refused(path, arch, **flags): the message after the name of the file, without a line break."""

    def message(path, arch=PRE, **flags):
        with pytest.raises(UsageError) as error:
            build(f"transformer_{arch}", init_from=str(path), **{**TWO_ONE, **flags})
        text = str(error.value)
        assert text.startswith(f"--init-from {path}: ") and "\n" not in text
        return text.removeprefix(f"--init-from {path}: ")

    return message


@pytest.mark.parametrize("before, models, said", rows("init_from"))
def test_a_model_that_does_not_fit(before, models, said, refused, trained):
    (old, theirs), (new, ours) = map(read_model, models.split("|"))
    _, path = trained(old, **{**TWO_ONE, **theirs})
    assert_says(refused(path, new, **ours), said)


@pytest.fixture
def state(trained):
    """A checkpoint, in the file old.pt."""
    return torch.load(trained(PRE, **TWO_ONE)[1], weights_only=False)


FILES = [
    *(({"args": setting}, "cannot build a model with its settings")
      for setting in ({"encoder_layers": "x"}, {"layer_agg": "new"}, {"max_source_positions": -1})),
    ({"args": {"arch": "fconv"}}, "cannot build a model with its settings ("),
    ({"model": None}, "not a fairseq"),
    ({"weights": {"encoder.embed_tokens.weight": torch.zeros(39, 16)}},
     "its vocabulary has 39 entries (source), the data's 40: binarise"),
]  # fmt: skip


@pytest.mark.parametrize("change, words", FILES, ids=str)
def test_a_file_of_another_kind(change, words, state, refused, tmp_path):
    vars(state["args"]).update(change.get("args", {}))
    state["model"].update(change.get("weights", {}))
    torch.save({**state, **{key: None for key in change if key == "model"}}, tmp_path / "old.pt")
    assert refused(tmp_path / "old.pt").startswith(words)
    (tmp_path / "old.pt").write_text("no checkpoint")
    assert refused(tmp_path / "old.pt").startswith("cannot load it ")


@pytest.mark.parametrize("stored", [True, False], ids=["in the checkpoint", "next to it"])
def test_another_dictionary_of_the_same_size(stored, state, refused, build, dictionary, tmp_path, caplog):
    """The hashes are in the checkpoint, or the files are next to it; its data are not opened."""
    state = {"model": state["model"], "cfg": {"model": state["args"], "task": {"data": str(tmp_path / "data")}}}
    state["cfg"]["task"].update(source_lang="src", target_lang="tgt")
    path, other = tmp_path / "old.pt", make_dictionary(len(dictionary), prefix="v")

    def store(target):
        if stored:
            state["task_state"] = {"dictionaries": sums(task_of(dictionary, target))}
        for language, words in () if stored else (("src", dictionary), ("tgt", target)):
            words.save(str(tmp_path / f"dict.{language}.txt"))
        torch.save(state, path)

    store(dictionary)
    with caplog.at_level("INFO"):
        build(f"transformer_{PRE}", init_from=str(path), **TWO_ONE)
    assert "not copied: none" in caplog.text and "dictionaries" not in caplog.text
    store(other)
    assert refused(path).startswith("it was trained with another target dictionary (40 entries, sum ")
    build(f"transformer_{PRE}", init_from=str(path), allow_other_dictionary=True, **TWO_ONE)


def test_a_schedule_that_has_ended(monkeypatch):
    monkeypatch.setattr(restart, "_stock", lambda *_: None)
    flags = SimpleNamespace(model=argparse.Namespace(stack_restart_updates=10))
    task = SimpleNamespace(state=None)
    trainer = SimpleNamespace(task=task, cfg=flags, get_num_updates=int, set_num_updates=print, get_lr=float)
    with pytest.raises(UsageError, match="--stack-restart-updates 10: the schedule's learning rate is 0 there; lower"):
        restart.load_checkpoint(trainer, "checkpoint_last.pt")
