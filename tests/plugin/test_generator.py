"""Our search and decoders against fairseq's generators and transformer: the same hypotheses, scores and alignments."""

import argparse
import copy
import math

import pytest
import torch
from fairseq import search
from fairseq.models.transformer_align import TransformerAlignModel
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import nn

from fairseq_deep.core.attention.beams import LARGEST_BEAM
from fairseq_deep.core.decoding import reduce_precision
from fairseq_deep.core.native import functions, library, load
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.core.search.candidates import BLOCK, best_candidates, log_normaliser
from fairseq_deep.core.search.choices import draw
from fairseq_deep.plugin.generator import AlignedGenerator, Generator
from fairseq_deep.plugin.task import DeepTranslationConfig, DeepTranslationTask
from tests.helpers.invariances import NEAR
from tests.helpers.methods import METHODS, OPTIONS
from tests.helpers.models import fairseq_transformer, make_batch, strengthen, tiny_flags

LENGTHS = (7, 3, 5, 2, 6, 7, 1)
CASES = ["layer_agg-residual", "layer_agg-dlcl", "layer_agg-lstm", "decoder_attn-average", "decoder_attn-merged",
         "decoder_attn-luna", "decoder_memory-layerwise",
         "prenorm relative_positions=2 relative_values=True"]  # fmt: skip
# (settings of the generator, what generate() is given)
SETTINGS = {
    "plain": ({}, {}),
    "one": ({"beam_size": 1}, {}),
    "wide": ({"beam_size": 9}, {}),
    "penalties": ({"len_penalty": 0.6, "unk_penalty": 2.0}, {}),
    "no normalisation": ({"normalize_scores": False}, {}),
    "long": ({"min_len": 6, "max_len_b": 9}, {}),
    "as long as the source": ({"max_len_a": 1, "max_len_b": 2}, {}),
    "short": ({"max_len_b": 1}, {}),
    "temperature": ({"temperature": 1.7}, {}),
    "source length": ({"match_source_len": True}, {}),
    "suppressed": ({"tokens_to_suppress": ("w3",)}, {}),
    "another first word": ({}, {"bos_token": 0}),
    "prefix": ({}, {"prefix_tokens": torch.full((len(LENGTHS), 2), 6)}),
    "other prefixes": ({}, {"prefix_tokens": torch.tensor([[6, 7], [6, 1], [1, 1], [5, 9], [6, 6], [7, 1], [8, 8]])}),
    "one sentence": ({"lengths": (4,)}, {}),
    "other lengths": ({"lengths": (9, 1, 1, 3)}, {}),
}
# what is left to fairseq's generator
OTHERS = {
    "diverse": ({"strategy": lambda words: search.DiverseBeamSearch(words, 2, 0.5)}, {}),
    "siblings": ({"strategy": lambda words: search.DiverseSiblingsSearch(words, 0.3)}, {}),
    "a prefix that ends": ({}, {"prefix_tokens": torch.tensor([[6, 2]] * len(LENGTHS))}),
}


class Lively(nn.Module):
    """An output projection after which hypotheses differ and sentences end at all steps."""

    def __init__(self, linear, eos):
        super().__init__()
        self.linear, self.eos = linear, eos
        self.mix = torch.randn(linear.in_features, linear.out_features, generator=torch.Generator().manual_seed(3))

    def forward(self, x):
        y = self.linear(x) + 2.0 * torch.sin(x @ self.mix)
        y[..., self.eos] += 1.5
        return y


@pytest.fixture
def lively(build, dictionary):
    """lively(seed, stock, **flags): a model prepared as fairseq-generate prepares it; *stock*: of fairseq's class."""

    def make(seed=1, stock=False, name="transformer_prenorm_6l", print_alignment=None, **flags):
        torch.manual_seed(seed)
        depth = {"encoder_layers": 2, "decoder_layers": 2}
        model = build(name, **depth, **flags).eval()
        strengthen(model)
        if stock:
            own, norm = model.state_dict(), "prenorm" if "prenorm" in name else "postnorm"
            model = fairseq_transformer(dictionary, norm, **tiny_flags(name), **depth).eval()
            model.load_state_dict(own)
        generation = argparse.Namespace(print_alignment=print_alignment)
        model.prepare_for_inference_(argparse.Namespace(generation=generation))
        model.decoder.output_projection = Lively(model.decoder.output_projection, dictionary.eos())
        return model

    return make


def make_sample(dictionary, lengths):
    source, lengths, _ = make_batch(dictionary, lengths=lengths)
    source[:, -1] = dictionary.eos()
    return {"id": torch.arange(len(lengths)), "net_input": {"src_tokens": source, "src_lengths": lengths}}


def assert_same(actual, expected, attention=True):
    """The same hypotheses of each sentence in the same order, with scores and, unless told otherwise, attention."""
    assert len(actual) == len(expected) > 0
    for ours, theirs in zip(actual, expected):
        assert [hypothesis["tokens"].tolist() for hypothesis in ours] == [h["tokens"].tolist() for h in theirs]
        for got, want in zip(ours, theirs):
            for name in ("score", "positional_scores", *(["attention"] if attention else [])):
                assert got[name].numel() > 0 or name != "attention"
                torch.testing.assert_close(got[name], want[name], **NEAR)


def compare(models, dictionary, given=None, attention=False, searches=True, stock=None, lengths=LENGTHS, **options):
    """Assert that ours finds what fairseq's finds, and whether it *searches* by itself; what both found.

    Args:
        stock: models of fairseq's class for fairseq's generator; ours if omitted
    """
    models, stock = ([each] if isinstance(each, nn.Module) else each for each in (models, stock or models))
    options, sample = {"beam_size": 4, "max_len_b": 14, **options}, make_sample(dictionary, lengths)
    if "strategy" in options:
        options["search_strategy"] = options.pop("strategy")(dictionary)
    ours, theirs = Generator(models, dictionary, **options), SequenceGenerator(stock, dictionary, **options)
    searched, search_ours = [], ours._search
    ours._search = lambda *args: searched.append(True) or search_ours(*args)
    found = ours.generate(models, copy.deepcopy(sample), **(given or {}))
    expected = theirs.generate(stock, copy.deepcopy(sample), **(given or {}))
    assert bool(searched) == searches
    assert_same(found, expected, attention=attention)
    return found, expected


@pytest.mark.parametrize("settings", [*SETTINGS, *OTHERS])
@pytest.mark.parametrize("seed, norm", [(1, "prenorm"), (5, "postnorm")])
def test_hypotheses_are_those_of_fairseqs_transformer(settings, seed, norm, lively, dictionary):
    name, (options, given) = f"transformer_{norm}_6l", {**SETTINGS, **OTHERS}[settings]
    models = {"models": lively(seed, name=name), "stock": lively(seed, True, name)}
    ours, theirs = compare(**models, dictionary=dictionary, given=given, searches=settings in SETTINGS, **options)
    if settings == "plain":
        assert len({len(hypothesis["tokens"]) for sentence in theirs for hypothesis in sentence}) > 3
    for got, want in zip(sum(ours, []), sum(theirs, [])):
        assert got.keys() == want.keys()
        assert got.pop("attention").numel() == 0 and want.pop("attention").numel() > 0  # unasked
        assert all(got[key].dtype == want[key].dtype and got[key].shape == want[key].shape for key in want)
        got["positional_scores"].div_(math.log(2))  # as fairseq-generate does


@pytest.mark.parametrize("how", ["hard", "soft"])
@pytest.mark.parametrize("full_context", [False, True], ids=["", "full context"])
def test_alignments_are_those_of_fairseqs_transformer(how, full_context, lively, dictionary):
    results, sample = [], make_sample(dictionary, LENGTHS[:5])
    for stock in (False, True):
        model = lively(stock=stock, print_alignment=True)
        if stock:
            model.__class__, model.alignment_layer, model.alignment_heads = TransformerAlignModel, 1, None
        model.full_context_alignment = full_context
        generator = SequenceGeneratorWithAlignment([model], dictionary, beam_size=4, max_len_b=14, print_alignment=how)
        results.append(generator.generate([model], copy.deepcopy(sample)))
    for got, want in zip(*(sum(found, []) for found in results)):
        assert torch.equal(got["tokens"], want["tokens"]) and got["alignment"]
        if how == "hard":
            assert got["alignment"] == want["alignment"]
        else:  # as text
            ours, theirs = (torch.tensor([list(map(float, row)) for row in one["alignment"]]) for one in (got, want))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_hypotheses_are_fairseqs_with_every_method(case, kernels, lively, dictionary, monkeypatch):
    """Also without C++ kernels, and where the beam is so large that each hypothesis has keys of its own."""
    monkeypatch.setattr(library, "enabled", kernels)
    name, flags = {**METHODS, **OPTIONS}[case]
    model = lively(name=name, **flags)
    compare(model, dictionary)
    model.decoder.beam_state.largest_beam = 2
    compare(model, dictionary)


def test_hypotheses_and_attention_of_an_ensemble_and_in_bf16(lively, dictionary):
    models = [lively(1), lively(2, name="transformer_dlcl_6l")]
    compare(models, dictionary, temperature=1.2)
    stock = [lively(1, True), lively(2, True)]
    for ours in ([lively(1), lively(2)], [stock[0], lively(2)]):
        compare(ours, dictionary, stock=stock, searches=ours[0] is not stock[0])
    reduce_precision(models[0].decoder, "bf16")
    compare(models[0], dictionary)
    for model in models:
        model.decoder.make_generation_fast_(need_attn=True)
    compare(models[1], dictionary, attention=True)
    compare(models, dictionary, attention=True)


def test_other_models_are_left_to_fairseq(build, dictionary):
    shallow = {"encoder_layers": 1, "decoder_layers": 1}
    adaptive = build("transformer_prenorm_6l", **shallow, adaptive_softmax_cutoff="10,20")
    stock = fairseq_transformer(dictionary, **tiny_flags("transformer_prenorm_6l"), **shallow)
    for model in (adaptive, stock):
        compare(model.eval(), dictionary, searches=False)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_sentence_without_probabilities_is_an_error(value, lively, dictionary):
    """fairseq's generator stops with an assertion that says nothing."""
    model, sample = lively(), make_sample(dictionary, (5, 4, 3))
    model.encoder.embed_tokens.weight.data[int(sample["net_input"]["src_tokens"][1, 2])] = value
    with pytest.raises(UsageError, match="no translation with a probability"):
        Generator([model], dictionary, beam_size=4, max_len_b=14).generate([model], sample)


def test_a_beam_is_at_most_as_large_as_the_dictionary(lively, dictionary):
    """fairseq's generator reduces a larger one."""
    model, source = lively(), make_sample(dictionary, (5, 4, 3))["net_input"]["src_tokens"]
    largest = len(dictionary) - 1
    found = BeamSearch([model], SearchOptions(beam=largest, max_len_b=6), suppressed=[0, 3])(source)
    assert [sum(each["score"] > -math.inf for each in hypotheses) for hypotheses in found] == [largest] * 3
    with pytest.raises(UsageError, match=f"beam {largest + 1} exceeds the {largest} tokens .*: lower it"):
        BeamSearch([model], SearchOptions(beam=largest + 1, max_len_b=6))(source)


def test_a_hypothesis_that_is_not_finite_harms_no_other(lively, dictionary):
    """A word after which everything is NaN: fairseq, where each hypothesis has its own keys, is not disturbed by it."""
    model, sample = lively(), make_sample(dictionary, LENGTHS)
    options = {"beam_size": 4, "max_len_b": 14}
    generator = SequenceGenerator([model], dictionary, **options)
    before = generator.generate([model], sample)
    words = [int(hypothesis["tokens"][1]) for hypothesis in sum(before, [])]
    model.decoder.embed_tokens = copy.deepcopy(model.decoder.embed_tokens)
    model.decoder.embed_tokens.weight.data[max({*words} - {dictionary.eos()}, key=words.count)] = math.nan
    model.decoder.beam_state.largest_beam = 0
    expected = generator.generate([model], sample)
    model.decoder.beam_state.largest_beam = LARGEST_BEAM
    assert [len(sentence) for sentence in expected] == [4] * len(LENGTHS) and tokens(before) != tokens(expected)
    assert_same(Generator([model], dictionary, **options).generate([model], sample), expected, attention=False)
    both = Generator([model, model], dictionary, **options).generate([model, model], sample)
    assert tokens(both) == tokens(expected)


def tokens(found):
    return [hypothesis["tokens"].tolist() for sentence in found for hypothesis in sentence]


@pytest.mark.parametrize("generator, beam, strategy", [
    *((kind, beam, None) for kind in (Generator, SequenceGenerator) for beam in (2, 4)),
    *((kind, 4, lambda words: search.DiverseBeamSearch(words, 2, 0.5)) for kind in (Generator, SequenceGenerator)),
    (Generator, 4, search.Sampling),
], ids=range(7))  # fmt: skip
def test_no_ngram_is_repeated(generator, beam, strategy, lively, dictionary):
    """Also where words are drawn, and hypotheses that have ended go on for want of others, but do not end again.

    fairseq's own form compares with the padding behind a hypothesis on a CPU, and so finds nothing.
    """
    model, sample = lively(), make_sample(dictionary, 3 * LENGTHS)
    more, repeats = {"search_strategy": strategy(dictionary)} if strategy else {}, {}
    for size in (0, 1, 2):
        made = generator([model], dictionary, beam_size=beam, max_len_b=14, no_repeat_ngram_size=size, **more)
        found = tokens(made.generate([model], sample))
        assert len(found) > (beam - 1) * 3 * len(LENGTHS)
        assert not any(dictionary.eos() in each[:-1] for each in found)
        repeats[size] = [len(each) - len({*zip(*(each[start:] for start in range(size or 1)))}) for each in found]
    assert any(repeats[0]) and repeats[1] == [0] * len(repeats[1]) and {*repeats[2]} == {1}


def test_words_are_drawn_by_their_probabilities():
    logs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    scores = torch.tensor([[-3.0]])
    for options, wanted in (({}, [0.5, 0.25, 0.125, 0.125]), ({"sampling_topk": 2}, [2 / 3, 1 / 3, 0, 0]),
                            ({"sampling_topp": 0.7}, [2 / 3, 1 / 3, 0, 0])):  # fmt: skip
        asked = SearchOptions(beam=20000, sampling=True, **options)
        values, words, ranks = draw(logs, scores, asked)
        shares = words.flatten().bincount(minlength=4) / 20000
        torch.testing.assert_close(shares, torch.tensor(wanted), atol=0.02, rtol=0)
        torch.testing.assert_close(values[0], logs[0][words[0]] - 3)
        assert not ranks.any()


def test_the_task_builds_it_only_for_plain_beam_search(build, dictionary):
    task = DeepTranslationTask(DeepTranslationConfig(), dictionary, dictionary)
    model = build("transformer_postnorm_2l2l_tiny").eval()
    assert type(task.build_generator([model], argparse.Namespace(beam=4))) is Generator
    aligned = task.build_generator([model], argparse.Namespace(beam=4, print_alignment="hard"))
    assert type(aligned) is AlignedGenerator
    assert not hasattr(task.build_generator([model], argparse.Namespace(score_reference=True)), "search")
    asked = task.build_generator([model], argparse.Namespace(beam=4), seq_gen_cls=SequenceGenerator)
    assert type(asked) is SequenceGenerator
    task.cfg.gnmt_lenpen = True
    with pytest.raises(UsageError, match="--gnmt-lenpen requires a search with normalised scores"):
        task.build_generator([model], argparse.Namespace(beam=4, score_reference=True))


def gnmt_score(hypothesis, alpha):
    """GNMT's, from the log-probability of each word, by a loop."""
    total = sum(float(word) for word in hypothesis["positional_scores"])
    return total / ((5 + len(hypothesis["tokens"])) / 6) ** alpha


DIVERSE = {"diverse_beam_groups": 2, "diverse_beam_strength": 0.5}


@pytest.mark.parametrize("asked", [{}, {"min_len": 4}, DIVERSE], ids=["", "long", "fairseq's search"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_gnmts_length_penalty_ranks_the_same_hypotheses(asked, alpha, lively, dictionary):
    model, sample = lively(), make_sample(dictionary, LENGTHS)
    task = DeepTranslationTask(DeepTranslationConfig(gnmt_lenpen=True), dictionary, dictionary)
    wanted = {"beam": 4, "max_len_a": 0, "max_len_b": 14, "lenpen": alpha, **asked}
    got = task.build_generator([model], argparse.Namespace(**wanted)).generate([model], copy.deepcopy(sample))
    given = {"search_strategy": search.DiverseBeamSearch(dictionary, 2, 0.5)} if asked is DIVERSE else asked
    stock = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=14, **given).generate([model], sample)
    orders = 0
    for ours, theirs in zip(got, stock):
        expected = sorted(theirs, key=lambda each: -gnmt_score(each, alpha))
        assert [each["tokens"].tolist() for each in ours] == [each["tokens"].tolist() for each in expected]
        for one, other in zip(ours, expected):
            assert float(one["score"]) == pytest.approx(gnmt_score(other, alpha), rel=1e-4)
        orders += [id(each) for each in theirs] != [id(each) for each in expected]
    assert orders > 0, "another order than with length^1"


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("beam", [1, 4, 7])
@pytest.mark.parametrize("words", [40, 17 * BLOCK, 2000, 33 * BLOCK - 1, 33 * BLOCK + 1])
@torch.no_grad()
def test_candidates_are_the_best(beam, words, kernels, monkeypatch):
    """Also where a sentence's best are all in one block, or in the last words, which are no whole block."""
    monkeypatch.setattr(library, "enabled", kernels)
    logits, offsets = torch.randn(6, beam, words), torch.randn(6, beam)
    logits[1, :, BLOCK - 3 : BLOCK + 3] += 9.0
    logits[2, :, -BLOCK // 2 :] += 9.0
    logits[3, 0, : min(BLOCK, words)] += 9.0
    logits[4, -1, ::BLOCK] += 9.0
    logits[5, :, 20:] = -math.inf
    offsets[0, 1:] = -math.inf  # hypotheses that are out
    before, ran, kernel = logits.clone(), [], functions.best_candidates
    monkeypatch.setattr(functions, "best_candidates", lambda *args: ran.append(1) or kernel(*args))
    got = best_candidates(logits.view(-1, words), offsets, beam, 2 * beam)
    assert bool(ran) == (kernels and load() is not None and words // BLOCK > 4 * beam)
    values, places = (logits + offsets.unsqueeze(2)).flatten(1).topk(2 * beam, dim=1)
    assert torch.equal(logits, before) and torch.equal(got[0], values)
    likely = values > -math.inf
    for found, expected in zip(got[1:], (places % words, places // words)):
        assert torch.equal(found[likely], expected[likely])


@pytest.mark.parametrize("shift", [0.0, 50.0, -50.0, 200.0, -200.0])
@torch.no_grad()
def test_the_normaliser_is_right_at_every_size(shift):
    logits = 5 * torch.randn(6, 3000, dtype=torch.float64) + shift
    logits[0, 5] = -math.inf
    got = log_normaliser(logits.float())
    torch.testing.assert_close(got.double(), torch.logsumexp(logits, 1), rtol=1e-6, atol=1e-5)
    logits[1, 7] = math.nan
    assert log_normaliser(logits.float()).isnan().tolist() == [False, True, False, False, False, False]
