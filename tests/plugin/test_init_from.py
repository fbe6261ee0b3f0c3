"""``--init-from``: what a new model takes of a trained one, what is refused, and trainings that begin with it."""

import argparse
import json
import logging
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.residuals.layerscale import LayerScale
from fairseq_deep.plugin.models.dictionaries import sums
from fairseq_deep.plugin.models.init_from import ORDERS, repeated_layers, take_path
from fairseq_deep.plugin.training import restart
from tests.helpers.commands import PACKAGE, hypotheses, losses, run, train_command
from tests.helpers.flags import parse
from tests.helpers.models import fairseq_transformer, make_batch, make_dictionary, task_of, tiny_flags


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
    """trained(name, **flags): a model of an architecture with other weights than a fresh one, and its checkpoint."""

    def make(name, **flags):
        arch = "transformer" if name == "transformer" else f"transformer_{name}"
        flags = {**tiny_flags("transformer_prenorm_6l" if arch == name else arch), **flags}
        if arch == name:
            model = fairseq_transformer(dictionary, **flags)
        else:
            model = build(arch, **flags)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        state = {"args": argparse.Namespace(arch=arch, **flags), "model": model.state_dict()}
        torch.save(state, tmp_path / "old.pt")
        return model.eval(), tmp_path / "old.pt"

    return make


def output(model, dictionary):
    batch = make_batch(dictionary)
    return model.eval()(*batch)[0][batch[2].ne(dictionary.pad())]


def seeded(run, *arguments):
    torch.manual_seed(5)
    return run(*arguments)


STOCK = {"encoder_layers": 2, "decoder_layers": 1}


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
@pytest.mark.parametrize("flags", [{"share_all_embeddings": True}, {"encoder_learned_pos": True}], ids=["one", "three"])
def test_equal_depth_is_fairseqs_model(norm, flags, trained, build, dictionary):
    flags = {**STOCK, **flags}
    side = {f"{side}_normalize_before": norm == "prenorm" for side in ("encoder", "decoder")}
    stock, path = trained("transformer", **flags, **side)
    name = f"transformer_{norm}_6l"
    model, loaded = build(name, init_from=str(path), **flags), build(name, **flags)
    loaded.load_state_dict(stock.state_dict())
    assert torch.equal(seeded(output, model, dictionary), seeded(output, loaded, dictionary))
    torch.testing.assert_close(seeded(output, model, dictionary), seeded(output, stock, dictionary))


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
    assert f"--init-from {path} ({arch}): encoder layers 1, 2, 1, 2 twice, decoder layers 1, 2, 3 twice" in caplog.text
    assert "with their own initialisation: none; not copied: none; its dictionaries" in caplog.text


def encoded(model, tokens, lengths):
    """The output of the encoder without padding."""
    with torch.no_grad():
        out = model.eval().encoder(tokens, lengths)["encoder_out"][0].transpose(0, 1)
    return torch.cat([row[-length:] for row, length in zip(out, lengths)])


def test_interleaved_layers_of_half_the_factor_are_nearer_to_the_old_function(build, dictionary, tmp_path, caplog):
    """With a factor of 1/L on each branch; the error is of order sum |F_l|^2, that of blocks (sum |F_l|)^2."""
    flags = {**tiny_flags("transformer_prenorm_6l"), "residual": "layerscale", "decoder_layers": 1}
    args = argparse.Namespace(arch="transformer_prenorm_6l", encoder_layers=12, **flags)
    sources, errors = make_batch(dictionary)[:2], dict.fromkeys(ORDERS, 0.0)
    for number in range(3):
        torch.manual_seed(number)
        old = build("transformer_prenorm_6l", layerscale_start=1 / 12, **{**flags, "encoder_layers": 12})
        torch.save({"args": args, "model": old.state_dict()}, tmp_path / "old.pt")
        for order in ORDERS:
            ours = {**flags, "encoder_layers": 24, "init_from": str(tmp_path / "old.pt"), "init_from_order": order}
            with caplog.at_level(logging.INFO):
                new = build("transformer_prenorm_6l", **ours)
            with torch.no_grad():
                for part in new.encoder.modules():
                    if isinstance(part, LayerScale):
                        part.weight.mul_(0.5)
            errors[order] += float((encoded(new, *sources) - encoded(old, *sources)).norm())
    assert 0 < errors["interleave"] < 0.7 * errors["block"]
    assert "encoder layers 1-12, 1-12, decoder" in caplog.text and "encoder layers 1 twice, 2 twice" in caplog.text


def test_what_the_old_model_has_not_keeps_its_own_initialisation(trained, build, caplog):
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
def test_a_model_of_ours_goes_on_with_all_that_it_has(name, trained, build, dictionary, caplog):
    """At its own depth everything; deeper, what belongs to the old depth is left behind."""
    recorded = {"lstm_attn_residual": True} if name == "lstm_6l" else {}  # as fairseq-train stores it
    old, path = trained(name, encoder_layers=2, decoder_layers=2, **recorded)
    new = build(f"transformer_{name}", init_from=str(path), encoder_layers=2, decoder_layers=2)
    assert torch.equal(seeded(output, new, dictionary), seeded(output, old, dictionary))
    with caplog.at_level(logging.INFO):
        deeper = build(f"transformer_{name}", init_from=str(path), encoder_layers=3, decoder_layers=2)
    history = ", ".join(re.findall(r"encoder\.history\.\S+", caplog.text.partition("own initialisation: ")[2]))
    assert bool(history) == (name.startswith(("dlcl", "lstm")))
    last = [{key: value for key, value in model.state_dict().items() if key.startswith(f"encoder.layers.{index}.")}
            for model, index in ((deeper, 2), (old, 1))]  # fmt: skip
    assert last[0] and all(torch.equal(a, b) for a, b in zip(last[0].values(), last[1].values()))


BEGINS = "its encoder has post-norm, the new one pre-norm: use an architecture transformer_"
# the old model, its flags, flags of the new model, the message
REFUSED = {
    "width": ("prenorm_6l", {"encoder_embed_dim": 32, "decoder_embed_dim": 32}, {},
              "it has --encoder-embed-dim 32, the new model 16: use --encoder-embed-dim 32"),
    "scale": ("prenorm_6l", {"no_scale_embedding": True}, {},
              "its encoder scales embeddings differently: add --no-scale-embedding"),
    "no positions": ("prenorm_6l", {"no_token_positional_embeddings": True}, {},
                     "its encoder has none positions, the new one sinusoidal: use the flags"),
    "feed-forward": ("prenorm_6l", {"decoder_ffn_embed_dim": 48}, {}, "it has --decoder-ffn-embed-dim 48, the new mod"),
    "norm": ("postnorm_6l", {}, {}, BEGINS + "postnorm_*, such as --arch transformer_postnorm_12l"),
    "depth": ("postnorm_6l", {}, {"encoder_layers": 20},
              BEGINS + "postnorm_*, such as --arch transformer_postnorm_20l"),
    "DLCL": ("postnorm_6l", {}, {"arch": "dlcl_6l"},
             BEGINS + "dlcl_postnorm_*, such as --arch transformer_dlcl_postnorm_12l"),
    "pre-norm decoder": ("postnorm_6l", {"decoder_normalize_before": True}, {"arch": "postnorm_6l"},
                         "its decoder has pre-norm, the new one post-norm: add --decoder-normalize-before"),
    "post-norm decoder": ("postnorm_6l", {"encoder_normalize_before": True}, {},
                          BEGINS.replace("encoder", "decoder") + "postnorm_*, such as --arch "
                          "transformer_postnorm_12l --encoder-normalize-before"),
    "no norms": ("postnorm_6l", {"deep_init": "rezero"}, {}, "its encoder has no norms, the new one pre-norm: use the"),
    "shallower": ("prenorm_6l", {"encoder_layers": 3}, {},
                  "its encoder has 3 layers, the new one 2: use --encoder-layers 3 or more"),
    "no layers": ("prenorm_6l", {"decoder_layers": 0}, {}, "its decoder has no layers to copy"),
    "positions": ("prenorm_6l", {"encoder_learned_pos": True}, {"encoder_learned_pos": True,
                  "max_source_positions": 8}, "its encoder.embed_positions.weight is (1026, 16), the new model's"),
    "tables": ("prenorm_6l", {}, {"share_all_embeddings": True},
               "its encoder.embed_tokens.weight and decoder.embed_tokens.weight differ, and the new model shares"),
    "profile": ("postnorm_6l", {}, {"arch": "postnorm_6l", "deep_init": "admin", "admin_start": "profile"},
                "--admin-start profile requires an untrained model: use another --admin-start"),
    "Mix-LN": ("prenorm_6l", {"residual": "mix-ln"}, {"encoder_layers": 4, "residual": "mix-ln"}, "layer 1 of its "
               "encoder has post-norm, its copy in layer 3 pre-norm: use the same --residual, and for Mix-LN "),
    "gates": ("prenorm_6l", {"ffn": "swiglu"}, {"ffn": "geglu"}, "it has --ffn swiglu, the new model geglu: use"),
    "query": ("lstm_6l", {"lstm_attn_residual": False}, {"arch": "lstm_6l", "lstm_attn_residual": True},
              "its decoder has another query of the cross-attention: add --lstm-no-attn-residual"),
    "split": ("postnorm_6l", {}, {"arch": "lstm_two_6l"}, "the layers of --layer-agg residual (decoder) are split"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case, trained, build):
    name, theirs, ours, problem = REFUSED[case]
    _, path = trained(name, **{**STOCK, **theirs})
    flags = {**STOCK, **ours}
    arch = flags.pop("arch", "prenorm_6l")
    with pytest.raises(UsageError) as refused:
        build(f"transformer_{arch}", init_from=str(path), **flags)
    assert str(refused.value).startswith(f"--init-from {path}: {problem}")
    assert "\n" not in str(refused.value)


def test_mix_ln_is_interleaved(trained, build):
    """With 8 of 4 layers, 2 instead of 1 are post-norm, the two copies of layer 1."""
    flags = {"decoder_layers": 1, "residual": "mix-ln"}
    old, path = trained("prenorm_6l", encoder_layers=4, **flags)
    new = build("transformer_prenorm_6l", encoder_layers=8, init_from=str(path), init_from_order="interleave", **flags)
    for number, layer in enumerate(new.encoder.layers):
        source = old.encoder.layers[number // 2]
        assert layer.residual.pre_norm == source.residual.pre_norm
        assert torch.equal(layer.fc1.weight, source.fc1.weight)


def test_feed_forward_sublayers_of_width_0(trained, build, dictionary):
    flags = {**STOCK, "encoder_ffn_embed_dim": 0}
    old, path = trained("prenorm_6l", **flags)
    new = build("transformer_prenorm_6l", init_from=str(path), **flags)
    assert torch.equal(seeded(output, new, dictionary), seeded(output, old, dictionary))


@pytest.mark.parametrize("setting", [{"encoder_layers": "x"}, {"layer_agg": "new"}, {"max_source_positions": -1}])
def test_settings_of_which_no_model_can_be_built(setting, trained, build):
    _, path = trained("prenorm_6l", **STOCK)
    state = torch.load(path, weights_only=False)
    vars(state["args"]).update(setting)
    torch.save(state, path)
    with pytest.raises(UsageError, match="cannot build a model with its settings") as refused:
        build("transformer_prenorm_6l", init_from=str(path), **STOCK)
    assert str(refused.value).startswith(f"--init-from {path}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("known", ["in itself", "beside it"])
def test_other_words_are_refused_where_the_dictionaries_are_known(known, trained, build, dictionary, tmp_path, caplog):
    _, path = trained("prenorm_6l", **STOCK)
    state = torch.load(path, weights_only=False)
    task = {"data": str(tmp_path / "data")}  # a setting of the checkpoint, whose files are not opened
    task.update(source_lang="src", target_lang="tgt")
    state = {"cfg": {"model": state["args"], "task": task}, "model": state["model"]}
    other = make_dictionary(len(dictionary), prefix="v")
    (tmp_path / "data").mkdir()
    for language in ("src", "tgt"):
        other.save(str(tmp_path / f"data/dict.{language}.txt"))

    def start(target, **flags):
        if known == "in itself":
            both = task_of(dictionary, target)
            state["task_state"] = {"dictionaries": sums(both)}
        else:
            for language, words in (("src", dictionary), ("tgt", target)):
                words.save(str(tmp_path / f"dict.{language}.txt"))
        torch.save(state, path)
        build("transformer_prenorm_6l", init_from=str(path), **STOCK, **flags)

    with caplog.at_level(logging.INFO):
        start(dictionary)
    assert "not copied: none" in caplog.text and "dictionaries" not in caplog.text
    problem = (
        r"it was trained with another target dictionary \(40 entries, sum \w+\) than the data's \(40 entries"
    )
    with pytest.raises(UsageError, match=problem):
        start(other)
    start(other, allow_other_dictionary=True)


def test_files_that_are_no_such_models_are_refused(trained, build, tmp_path):
    _, path = trained("prenorm_6l", **STOCK)
    state = torch.load(path, weights_only=False)
    smaller = {name: value[:-1] if "embed_tokens" in name else value for name, value in state["model"].items()}
    other = argparse.Namespace(**{**vars(state["args"]), "arch": "fconv"})
    (tmp_path / "text.pt").write_text("no checkpoint")
    for name, content, problem in (
        ("other", {**state, "args": other}, "unsupported architecture fconv; use"),
        ("text", None, "cannot load it "),
        ("nothing", {"best": 1}, "not a fairseq"),
        ("smaller", {**state, "model": smaller}, r"its vocabulary has 39 entries \(source\), the data's 40: binarise"),
    ):
        if content:
            torch.save(content, tmp_path / f"{name}.pt")
        with pytest.raises(UsageError, match=f"--init-from {tmp_path}/{name}.pt: {problem}") as refused:
            build("transformer_prenorm_6l", init_from=str(tmp_path / f"{name}.pt"), **STOCK)
        assert "\n" not in str(refused.value)


def test_the_file_is_wanted_at_the_first_start_only(tmp_path):
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


@pytest.mark.parametrize("config", [False, True], ids=["namespace", "hydra"])
def test_the_path_is_taken_out_of_the_flags(config):
    flags = {"arch": "transformer_prenorm_6l", "init_from": "old.pt"}
    flags = OmegaConf.create(flags) if config else argparse.Namespace(**flags)
    if config:
        OmegaConf.set_struct(flags, True)
    assert take_path(flags) == "old.pt" and flags.init_from is None and take_path(flags) is None


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
    text = done.stdout + done.stderr
    assert text.count(f"--init-from {old} (transformer): encoder layers 1, 2 twice, decoder layers 1 twice; ") == 1
    assert "own initialisation: none; not copied: none\n" in text  # the dictionaries were there to compare
    state, first = (torch.load(path, weights_only=False) for path in (save / "checkpoint_last.pt", old))
    assert state["cfg"]["model"].init_from is None and str(old) not in str(state["cfg"])
    for name in ("self_attn.q_proj.weight", "fc2.bias"):
        ours, theirs = state["model"][f"encoder.layers.2.{name}"], first["model"][f"encoder.layers.1.{name}"]
        assert torch.equal(ours, theirs)  # a learning rate of 0 leaves what was taken

    old.unlink()
    done = train(2)
    text = done.stdout + done.stderr
    assert f"training resumes from {save}/checkpoint_last.pt: --init-from is not used" in text
    assert list(losses(done)) == [2] and "encoder layers" not in text
    words = [data, "--user-dir", PACKAGE, "--path", save / "checkpoint_last.pt", "--cpu", "--max-len-b", "9"]
    assert len(hypotheses(run("fairseq-generate", *words))) == 30


def test_a_schedule_that_has_ended_is_rejected(monkeypatch):
    monkeypatch.setattr(restart, "_stock", lambda *_: None)
    flags = SimpleNamespace(model=SimpleNamespace(stack_restart_updates=10))
    trainer = SimpleNamespace(cfg=flags, get_num_updates=lambda: 0, set_num_updates=print, get_lr=lambda: 0.0)
    with pytest.raises(UsageError, match="--stack-restart-updates 10: the schedule's learning rate is 0 there; lower"):
        restart.load_checkpoint(trainer, "checkpoint_last.pt")


def test_a_deeper_model_may_start_at_the_peak_of_the_schedule(data, stock, tmp_path):

    def train(folder, updates):
        flags = [*DEEP, *SHORT, "--max-update", updates, "--init-from", stock,
                 "--init-from-order", "interleave", "--stack-restart-updates", "4"]  # fmt: skip
        done = run(*train_command(data, tmp_path / folder, *flags, arch="transformer_prenorm_6l"))
        found = re.findall(r"train_inner \| (\{.*\})", done.stdout + done.stderr)
        rates = {int(entry["num_updates"]): float(entry["lr"]) for entry in map(json.loads, found)}
        return done.stdout + done.stderr, rates, losses(done)

    text, whole, trained = train("whole", 8)
    assert "--stack-restart-updates: training starts at update 4, lr 0.002" in text  # the peak, warm-up is 4
    assert whole == pytest.approx({n: 2e-3 * (4 / n) ** 0.5 for n in (5, 6, 7, 8)}, rel=1e-3)
    start, rest = train("parts", 6), train("parts", 8)
    assert {**start[1], **rest[1]} == whole and {**start[2], **rest[2]} == trained and list(rest[1]) == [7, 8]
    assert "begins at" not in rest[0]
