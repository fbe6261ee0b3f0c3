"""Tests of ``--robt``: a naive reference per sentence, rejected input, and training from the command line."""

import argparse
import random

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion, label_smoothed_nll_loss
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.plugin.task import DeepTranslationConfig, DeepTranslationTask
from fairseq_deep.plugin.training.backtranslation import BackTranslator
from tests.helpers.commands import EXACT, PACKAGE, binarise, entries, hypotheses, run, train_command
from tests.helpers.models import fairseq_transformer, make_batch, make_tagged_dictionary, tiny_flags

LANGUAGES, SMOOTHING, LONGEST = 4, 0.1, 12
DICTIONARY = make_tagged_dictionary(24, LANGUAGES)
TAGS = range(len(DICTIONARY) - LANGUAGES, len(DICTIONARY))
PAD, EOS = DICTIONARY.pad(), DICTIONARY.eos()


def make_task(source=DICTIONARY, target=DICTIONARY, **flags):
    return DeepTranslationTask(DeepTranslationConfig(**{"robt": True, **flags}), source, target)


def our_model(**flags):
    flags = {"encoder_layers": 2, "decoder_layers": 2, "max_source_positions": LONGEST, **flags}
    args = argparse.Namespace(**{**tiny_flags("transformer_prenorm_6l"), **flags})
    ARCH_CONFIG_REGISTRY["transformer_prenorm_6l"](args)
    return DeepTransformerModel.build_model(args, make_task())


def stock_model():
    flags = {**tiny_flags("transformer_prenorm_6l"), "encoder_layers": 2, "decoder_layers": 2}
    return fairseq_transformer(DICTIONARY, "prenorm", max_source_positions=LONGEST, **flags)


MODELS = {"ours": our_model, "languages": lambda: our_model(language_transform=True, language_norm=True),
          "stock": stock_model}  # fmt: skip


def make_sample():
    """Sources that begin with tags, padded on the left, and targets with end-of-sentence, padded on the right."""
    source, lengths, _ = make_batch(DICTIONARY, (6, 3, 8))
    words, target_lengths = (DICTIONARY.nspecial, len(DICTIONARY) - LANGUAGES), (4, 7, 11)
    target = torch.full((3, max(target_lengths)), PAD)
    inputs = target.clone()
    for row, (length, other) in enumerate(zip(lengths, target_lengths)):
        source[row, -length:] = torch.randint(*words, (length,))
        source[row, -length], source[row, -1] = random.choice(TAGS), EOS
        target[row, : other - 1], target[row, other - 1] = torch.randint(*words, (other - 1,)), EOS
        inputs[row, :other] = target[row, :other].roll(1)
    net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": inputs}
    return {"id": torch.arange(3) + 5, "nsentences": 3, "ntokens": sum(target_lengths), "target": target,
            "net_input": net_input}  # fmt: skip


def scores_of(model, source, inputs):
    tokens = torch.tensor([source])
    return model(tokens, torch.tensor([len(source)]), torch.tensor([inputs]))[0][0]


@torch.no_grad()
def greedy(model, source, longest):
    """The most probable token after another, at most *longest* with end-of-sentence; no padding, no empty sentence."""
    found = []
    while len(found) < longest and EOS not in found:
        scores = scores_of(model, source, [EOS, *found])[-1]
        scores[[PAD] if found else [PAD, EOS]] = -torch.inf
        found.append(int(scores.argmax()))
    return found if found[-1] == EOS else [*found, EOS]


def naive_loss(model, source, target):
    logs = scores_of(model, source, [EOS, *target[:-1]]).log_softmax(-1)
    return label_smoothed_nll_loss(logs, torch.tensor(target), SMOOTHING)[0].sum()


def clipped(source):
    return source if len(source) <= LONGEST else [*source[: LONGEST - 1], EOS]


def rows_of(tokens):
    return [[int(token) for token in row if token != PAD] for row in tokens]


@pytest.fixture(autouse=True)
def seeds():
    torch.manual_seed(3)
    random.seed(3)


class Optimizer:
    backward = staticmethod(lambda loss: loss.backward())


@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_single_sentences(kind):
    task, model, sample = make_task(), MODELS[kind]().double(), make_sample()
    with torch.no_grad():  # so that translations differ from each other
        for name, parameter in model.named_parameters():
            parameter.mul_(20 if "encoder_attn.out_proj.weight" in name else 1)
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, SMOOTHING)
    task.back_translate = BackTranslator(task)
    others = []
    draw = task.back_translate._draw
    task.back_translate._draw = lambda *given: others.append(draw(*given)) or others[0]
    loss, size, logs = task.train_step(sample, model, criterion, Optimizer, 1)
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert model.training

    model.zero_grad()
    sources, targets = rows_of(sample["net_input"]["src_tokens"]), rows_of(sample["target"])
    tagged = [clipped([int(tag), *target]) for tag, target in zip(others[0], targets)]
    model.eval()
    longest = max(map(len, tagged))
    back = [clipped([source[0], *greedy(model, each, longest)]) for source, each in zip(sources, tagged)]
    assert len({tuple(each[1:]) for each in back}) > 1
    model.train()
    plain = sum(naive_loss(model, source, target) for source, target in zip(sources, targets))
    own = sum(naive_loss(model, source, target) for source, target in zip(back, targets))
    (plain + own).backward()
    torch.testing.assert_close(loss.double(), plain + own)
    torch.testing.assert_close(logs["robt_loss"].double(), own.detach())
    assert size == logs["sample_size"] == logs["ntokens"] == 2 * sample["ntokens"]
    for name, parameter in model.named_parameters():
        # fairseq's criterion computes in fp32
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_translations_are_made_without_dropout_each_time():
    back, model, sample = BackTranslator(make_task()), our_model(dropout=0.5), make_sample()
    found = [back(model.train(), sample)["net_input"]["src_tokens"] for _ in range(3)]
    assert all(torch.equal(each, found[0]) for each in found)


def test_another_language_is_drawn_from_all_others():
    back = BackTranslator(make_task())
    own = torch.tensor([TAGS[1]] * 30000)
    torch.manual_seed(7)
    drawn = back._draw(own, 5)
    assert torch.equal(back._draw(own, 5), drawn), "the same seed, update and batch"
    counts = torch.bincount(drawn, minlength=len(DICTIONARY))
    assert counts[: TAGS[0]].sum() == counts[TAGS[1]] == 0
    assert all(abs(int(counts[tag]) - 10000) < 400 for tag in TAGS if tag != TAGS[1])
    assert not torch.equal(back._draw(own, 6), drawn)
    torch.manual_seed(8)
    assert not torch.equal(back._draw(own, 5), drawn)


@pytest.mark.parametrize("flags, words", [
    ({"target": make_tagged_dictionary(24, 3)}, "--robt requires one dictionary for both sides"),
    (dict.fromkeys(("source", "target"), make_tagged_dictionary(24, 1)),
     "requires at least two language tags such as <2de> in the .*, not 1"),
    ({"load_alignments": True}, "--robt is not supported with --load-alignments"),
    ({}, r"the source of training pair 6 .* does not begin with a language tag"),
], ids=["two dictionaries", "one language", "alignments", "a source without a tag"])  # fmt: skip
def test_data_that_do_not_fit_are_refused(flags, words):
    sample = make_sample()
    sample["net_input"]["src_tokens"][1, -3] = DICTIONARY.nspecial
    with pytest.raises(UsageError, match=words) as caught:
        task = make_task(**flags)
        task.build_criterion(argparse.Namespace(_name="cross_entropy", sentence_avg=False) if not flags else None)
        BackTranslator(task)(our_model(), sample)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """Digits to letters of two alphabets and back: <2a>, <2b> and <2n>; a to b and back never occurs in training."""
    folder, rng = tmp_path_factory.mktemp("tagged"), random.Random(2)
    alphabets = {"n": "0123456789", "a": "abcdefghij", "b": "klmnopqrst"}
    for split, count in (("train", 240), ("valid", 12), ("test", 6)):
        with open(folder / f"{split}.src", "w") as source, open(folder / f"{split}.tgt", "w") as target:
            for index in range(count):
                digits = [rng.randrange(10) for _ in range(rng.randint(3, 5))]
                sides = [("n", "a"), ("a", "n"), ("n", "b"), ("b", "n")][index % 4]
                texts = [" ".join(alphabets[side][digit] for digit in digits) for side in sides]
                print(f"<2{sides[1]}> {texts[0]}", file=source)
                print(texts[1], file=target)
    return binarise(folder, ("train", "valid", "test"))


ROBT = ["--task", "deep_translation", "--robt"]


def test_two_processes_train_as_one_and_the_model_translates(tagged, tmp_path):
    """Both log the loss of back-translations."""
    flags = ["--max-update", "4", "--max-tokens", "100", *EXACT, *ROBT, "--language-transform",
             "--criterion", "fused_label_smoothed_cross_entropy", "--distributed-backend", "gloo"]  # fmt: skip
    one = entries(run(*train_command(tagged, tmp_path / "one", *flags, "--update-freq", "2")))
    two = entries(run(*train_command(tagged, tmp_path / "two", *flags), processes=2))
    assert [*one] == [*two] == [1, 2, 3, 4]
    for name in ("loss", "robt_loss"):
        losses = [entry[name] for entry in one.values()]
        assert min(losses) > 1 and [entry[name] for entry in two.values()] == pytest.approx(losses, abs=2e-3), name
    path = tmp_path / "one/checkpoint_best.pt"
    done = run("fairseq-generate", tagged, "--user-dir", PACKAGE, "--path", path, "--cpu", "--beam", "2")
    assert len(hypotheses(done)) == 6
