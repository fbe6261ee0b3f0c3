"""fairseq's generators on our decoders: the same hypotheses as with fairseq's own transformer."""

import pytest
import torch
from fairseq import search
from fairseq.models.transformer_align import TransformerAlignModel
from fairseq.sequence_generator import SequenceGeneratorWithAlignment

from tests.helpers.generation import (
    LENGTHS,
    assert_lively,
    assert_same,
    generate,
    make_sample,
    prepare,
    strengthen,
)
from tests.helpers.models import fairseq_transformer, tiny_flags


@pytest.fixture
def twins(build, dictionary):
    """twins(norm, seed): fairseq's own transformer with random weights, and ours with those."""

    def make(norm="prenorm", seed=1):
        torch.manual_seed(seed)
        name = f"transformer_{norm}_6l"
        flags = {**tiny_flags(name), "encoder_layers": 2, "decoder_layers": 3}
        theirs = fairseq_transformer(dictionary, norm, **flags).eval()
        strengthen(theirs)
        ours = build(name, **flags).eval()
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    return make


@pytest.mark.parametrize("norm", ["prenorm", "postnorm"])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_beam_search_finds_what_fairseqs_transformer_does(norm, seed, twins, dictionary):
    """With attention as the model is, and without as ``fairseq-generate`` prepares it."""
    (stock, model), sample = twins(norm, seed), make_sample(dictionary)
    expected = generate(stock, dictionary, sample)
    assert_lively(expected)
    assert_same(generate(model, dictionary, sample), expected)
    for one in (stock, model):
        prepare(one)
    assert_same(generate(model, dictionary, sample), expected, attention=False)
    assert generate(model, dictionary, sample)[0][0]["attention"].numel() == 0


SEARCHES = {
    "ngrams": {"no_repeat_ngram_size": 2},
    "length": {"match_source_len": True, "temperature": 1.7},
    "diverse": {"strategy": lambda words: search.DiverseBeamSearch(words, 2, 0.5)},
    "siblings": {"strategy": lambda words: search.DiverseSiblingsSearch(words, 0.3)},
    "sampling": {"strategy": lambda words: search.Sampling(words, sampling_topp=0.8), "beam_size": 1},
}


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("lengths", [LENGTHS, (4,), (9, 1, 1, 3)], ids=str)
def test_other_searches_and_batches(options, lengths, twins, dictionary):
    (stock, model), sample = twins(seed=2), make_sample(dictionary, lengths)
    assert_same(generate(model, dictionary, sample, **options), generate(stock, dictionary, sample, **options))


def test_an_ensemble(twins, dictionary):
    """Of two of ours, and of one of fairseq's and one of ours."""
    pairs, sample = [twins("prenorm", 1), twins("postnorm", 2)], make_sample(dictionary)
    (first, ours), (second, others) = pairs
    expected = generate([first, second], dictionary, sample)
    assert_same(generate([ours, others], dictionary, sample), expected)
    assert_same(generate([first, others], dictionary, sample), expected)


def test_prefixes(twins, dictionary):
    """Of different lengths, padded on the right; one of them ends the sentence."""
    (stock, model), sample = twins(), make_sample(dictionary)
    prefix = torch.randint(4, 40, (5, 3))
    prefix[0, 1:], prefix[1, 2], prefix[2, 1], prefix[2, 2] = dictionary.pad(), dictionary.pad(), 2, dictionary.pad()
    results = [generate(one, dictionary, sample, prefix_tokens=prefix) for one in (model, stock)]
    assert_same(*results)
    for row, sentence in zip(prefix.tolist(), results[0]):
        words = [word for word in row if word != dictionary.pad()]
        assert all(hypothesis["tokens"].tolist()[: len(words)] == words for hypothesis in sentence)


@pytest.mark.parametrize("how", ["hard", "soft"])
@pytest.mark.parametrize("full_context", [False, True], ids=["", "full_context"])
def test_alignments_are_fairseqs(how, full_context, twins, dictionary):
    (stock, model), sample = twins(), make_sample(dictionary)
    stock.__class__ = TransformerAlignModel
    stock.alignment_layer, stock.alignment_heads = len(stock.decoder.layers) - 1, None
    results = []
    for one in (model, stock):
        one.full_context_alignment = full_context
        prepare(one, print_alignment=True)
        results.append(generate(one, dictionary, sample, SequenceGeneratorWithAlignment, print_alignment=how))
    pairs = [pair for sentences in zip(*results) for pair in zip(*sentences)]
    assert len(pairs) == 20
    for got, want in pairs:
        assert torch.equal(got["tokens"], want["tokens"])
        if how == "hard":
            assert got["alignment"] and got["alignment"] == want["alignment"]
        else:  # as text
            ours, theirs = (torch.tensor([list(map(float, row)) for row in one["alignment"]]) for one in (got, want))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
