"""``--log-depth-interval`` in fairseq's own training log, against gradients recomputed from the checkpoints."""

import math

import pytest

from fairseq_deep.core.diagnostics import depth_record, layer_gradient_norms, stream_statistics
from tests.helpers.commands import EXACT, entries, load_trained, run, train_command

SIDES = {"enc": "encoder", "dec": "decoder"}
FLAGS = (*EXACT, "--disable-validation")
EVERY = ("--save-interval-updates", "1", "--no-epoch-checkpoints")  # a checkpoint after each update
POST, DLCL, LSTM = (f"transformer_{method}_2l2l_tiny" for method in ("postnorm", "dlcl", "lstm"))
NORMS = ("gnorm_", "ratio_")
DIGITS = {"rel": 1e-3, "abs": 1e-4}  # the log has 4 decimals


def train(data, folder, *flags, arch=POST):
    """The entries of the log, {update: {name: value}}."""
    return entries(run(*train_command(data, folder, *FLAGS, *flags, arch=arch)))


def depth(entry):
    """What is about depth in an *entry* of the log: all that fairseq would not log by itself."""
    return {name: value for name, value in entry.items() if name.startswith((*NORMS, "dlcl_", "lstm_"))}


def loaded(checkpoint, batches):
    """The model in *checkpoint* with the gradients of these training batches, the batches, and the number of words."""
    model, cfg, task, every = load_trained(checkpoint)
    criterion, samples, words = task.build_criterion(cfg.criterion), [every[number] for number in batches], 0
    for sample in samples:
        loss, sample_size, _ = criterion(model.train(), sample)
        loss.backward()
        words += sample_size
    return model, samples, words


def expected_norms(model, words):
    """What the log should say of the gradients of *model*, which ``tests/core/test_diagnostics.py`` proves by hand."""
    norms = {part: [norm / words for norm in each] for part, each in layer_gradient_norms(model).items()}
    found = {"gnorm_embed": norms["embedding"][0]}
    for short, side in SIDES.items():
        found.update({f"gnorm_{short}_{number}": value for number, value in enumerate(norms[side], 1)})
        found[f"ratio_{short}"] = norms[side][0] / norms[side][-1]
    return found


CASES = {
    "dlcl": (DLCL, ("--clip-norm", "0.05")),
    "lstm": (LSTM, ("--update-freq", "2", "--clip-norm", "0.1")),
}


@pytest.fixture(scope="module", params=CASES)
def logged(request, data, tmp_path_factory):
    """The folder with a checkpoint of each update, the entries of the log, and the number of batches in an update."""
    folder = tmp_path_factory.mktemp(request.param)
    arch, flags = CASES[request.param]
    flags = ("--max-update", "4", "--log-depth-interval", "1", *flags)
    found = train(data, folder, *EVERY, *flags, arch=arch)
    assert set(found) == {1, 2, 3, 4}
    return folder, found, 2 if "--update-freq" in flags else 1


def test_norms_are_those_of_the_gradients(logged):
    """Summed over accumulated batches, divided by the number of words, and before clipping.

    The share of variance between positions is that of the first batch before the update.
    """
    folder, found, accumulated = logged
    for update in (2, 3):
        batches = range((update - 1) * accumulated, update * accumulated)
        checkpoint = folder / f"checkpoint_1_{update - 1}.pt"
        model, (sample, *_), words = loaded(checkpoint, batches)
        expected, whole = expected_norms(model, words), math.hypot(*(p.grad.norm() for p in model.parameters())) / words
        assert found[update]["gnorm"] == pytest.approx(whole, abs=6e-4)  # fairseq's has 3 decimals
        logged_norms = {name: value for name, value in depth(found[update]).items() if name.startswith(NORMS)}
        assert logged_norms == pytest.approx(expected, **DIGITS) and min(expected.values()) > 0
        assert found[update]["gnorm"] > 0.2, "clipping has something to do"
        shares = stream_statistics(model, sample["net_input"], model.encoder.padding_idx)["between"]
        between = {f"between_{short}": shares[side][-1] for short, side in SIDES.items()}
        assert {name: found[update][name] for name in between} == pytest.approx(between, rel=2e-3)
        assert 0.01 < min(between.values())


def test_weights_of_the_aggregators_are_those_after_the_update(logged):
    """They are the summary of the saved model, which ``tests/core/test_diagnostics.py`` compares by hand."""
    folder, found, _ = logged
    for update in (1, 3):
        model, *_ = load_trained(folder / f"checkpoint_1_{update}.pt")
        expected, actual = ({name: value for name, value in record.items() if name.startswith(("dlcl_", "lstm_"))}
                            for record in (depth_record(model), found[update]))  # fmt: skip
        assert actual == pytest.approx(expected, **DIGITS) and expected


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The log of 6 updates with everything at each of them."""
    flags = ("--max-update", "6", "--no-save", "--log-depth-interval", "1")
    return train(data, tmp_path_factory.mktemp("whole"), *flags, arch=DLCL)


def test_every_second_update(data, tmp_path, whole):
    """While fairseq's own log has an entry for each; what is logged does not change what is learned."""
    found = train(data, tmp_path, "--max-update", "6", "--no-save", "--log-depth-interval", "2", arch=DLCL)
    assert set(found) == set(range(1, 7))
    for update, entry in found.items():
        assert entry["loss"] == whole[update]["loss"] and entry["gnorm"] == whole[update]["gnorm"]
        assert depth(entry) == (pytest.approx(depth(whole[update]), **DIGITS) if update % 2 == 0 else {})


def test_entries_of_several_updates_have_means_also_in_half_precision(data, tmp_path, whole):
    """Gradients of fp16 are those of a scaled loss."""
    flags = ("--max-update", "4", "--no-save", "--log-depth-interval", "2", "--log-interval", "4")
    means = {name: (value + depth(whole[4])[name]) / 2 for name, value in depth(whole[2]).items()}
    for more in ((), ("--memory-efficient-fp16",)):
        [(update, entry)] = train(data, tmp_path, *flags, *more, arch=DLCL).items()
        assert update == 4 and depth(entry) == pytest.approx(means, rel=0.1, abs=2e-3)
