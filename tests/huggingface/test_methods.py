"""Every method as a model of transformers: scores, caches and searches are the core's."""

import argparse
import copy
import pickle

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

pytest.importorskip("transformers")

from fairseq_deep.core.search import BeamSearch, SearchOptions  # noqa: E402
from fairseq_deep.errors import UsageError  # noqa: E402
from fairseq_deep.huggingface import FairseqDeepConfig, FairseqDeepForConditionalGeneration  # noqa: E402
from fairseq_deep.huggingface.modeling import CACHE  # noqa: E402
from fairseq_deep.runtime import packaged  # noqa: E402
from fairseq_deep.runtime.dictionary import Dictionary  # noqa: E402
from fairseq_deep.runtime.model import untrained  # noqa: E402
from tests.helpers.methods import METHODS, OPTIONS, PRENORM  # noqa: E402
from tests.helpers.models import make_batch, make_dictionary, strengthen, tiny_flags  # noqa: E402

LANGUAGES = {"language_norm": True, "language_transform": True, "num_languages": 20}
ALL = {**METHODS, **OPTIONS, "languages": (PRENORM, LANGUAGES)}
PAD, EOS = 1, 2
DICTIONARY = make_dictionary(36)
TASK = {"source_lang": "src", "target_lang": "tgt", "left_pad_source": True, "left_pad_target": False,
        "max_source_positions": 1024, "max_target_positions": 1024, "truncate_source": False}  # fmt: skip
SEARCH = {"beam": 4, "lenpen": 1.0, "max_len_a": 0.0, "max_len_b": 12, "gnmt_lenpen": False}
WORDS = {"src": [f"s{index}" for index in range(36)], "tgt": [f"t{index}" for index in range(32)]}


def make_model(name, flags, **search):
    """A model of the architecture *name* with random weights, and the core's model of the same weights."""
    resolved = argparse.Namespace(arch=name, **{**tiny_flags(name), **flags})
    ARCH_CONFIG_REGISTRY[name](resolved)
    words = {**WORDS, "tgt": WORDS["src"]} if flags.get("share_all_embeddings") else WORDS
    source, target = map(Dictionary, words.values())
    text = {"tokenizer": "none", "lowercase": False, "sub_words": None}
    content = packaged.make_config("a model", "MIT", resolved, {}, task=TASK, text=text, search={**SEARCH, **search},
                                   criterion={"label_smoothing": 0.1}, made_with={})  # fmt: skip
    config = FairseqDeepConfig(package=content, source_vocab_size=len(source), vocab_size=len(target))
    model = FairseqDeepForConditionalGeneration(config).eval()
    model.files = {f"dict.{side}.txt": "".join(f"{word} 1\n" for word in words[side]).encode() for side in words}
    strengthen(model)
    if model.encoder.language_index is not None:
        model.encoder.language_index.set_tags(range(4, 4 + flags["num_languages"]))
    core = untrained(resolved, source, target).eval()
    core.load_state_dict(model.state_dict())
    return model, core


@pytest.fixture(params=ALL)
def models(request):
    return make_model(*ALL[request.param])


def sources(lengths=(6, 8, 4), side="left"):
    """Sources that are padded on one *side*."""
    return make_batch(DICTIONARY, lengths, left_pad=side == "left")[0]


def targets(lengths=(5, 7, 7)):
    """Target inputs that are padded on the right."""
    return make_batch(DICTIONARY, target_lengths=lengths)[2]


def assert_near(actual, expected):
    """Scores are large where a model has no norms, and routing amplifies rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(expected.abs().max())))


def hypotheses(found):
    """Tokens that ``generate()`` returns, without the first symbol and padding."""
    return [[token for token in row[1:].tolist() if token != PAD] for row in found]


@torch.no_grad()
def test_scores_and_searches_are_those_of_the_core(models):
    model, core = models
    source, target = sources(), targets()
    expected = core(source, None, target)[0]
    found = model(source, decoder_input_ids=target).logits
    assert_near(found[target.ne(PAD)], expected[target.ne(PAD)])
    # a mask hides what is not padding, on the other side, too
    right = sources(side="right")
    mask = right.ne(PAD).long()
    hidden = right.masked_fill(right.eq(PAD), 7)
    found = model(hidden, mask, target, target.ne(PAD).long()).logits
    assert_near(found[target.ne(PAD)], core(right, None, target)[0][target.ne(PAD)])
    # in cached steps: the first three at once, then one at a time
    whole = targets((7, 7, 7))
    expected, cache, steps = core(source, None, whole)[0], None, []
    encoded = model.encode(source)
    for words in [whole[:, :3], *whole[:, 3:].split(1, dim=1)]:
        out = model(encoder_outputs=encoded, decoder_input_ids=words, use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        steps.append(out.logits)
    assert cache.get_seq_length() == 7
    assert_near(torch.cat(steps, dim=1), expected)
    core.prepare_for_decoding()
    for beam in (1, 4):
        best = BeamSearch([core], SearchOptions(beam=beam, max_len_b=12))(source)
        found = hypotheses(model.generate(source, num_beams=beam))
        assert found == [sentence[0]["tokens"].tolist() for sentence in best]
    assert found == hypotheses(model.generate(source, use_cache=False))


def test_half_precision_and_a_round_trip(models, tmp_path):
    model, core = models
    model.save_pretrained(tmp_path)
    half = FairseqDeepForConditionalGeneration.from_pretrained(tmp_path, dtype="bfloat16")
    found, expected = half.state_dict(), core.to(torch.bfloat16).state_dict()
    assert {name: value.dtype for name, value in found.items()} == {name: expected[name].dtype for name in expected}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    source, target = sources(), targets((7, 7, 7))
    with torch.no_grad():
        expected = core(source, None, target, alignment_layer=-1)[0]  # weights take other kernels
        assert torch.equal(half(source, decoder_input_ids=target).logits, expected)
    assert half.generate(source, max_new_tokens=4).shape == (3, 5)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_hypothesis_at_the_limit_ends_with_its_own_probability(limit):
    model, core = make_model(PRENORM, {}, max_len_b=limit, beam=3)
    source = sources()
    best = BeamSearch([core], SearchOptions(beam=3, max_len_b=limit))(source)
    found = model.generate(source, return_dict_in_generate=True, output_scores=True)
    assert hypotheses(found.sequences) == [sentence[0]["tokens"].tolist() for sentence in best]
    scores = torch.stack([sentence[0]["score"] for sentence in best])
    torch.testing.assert_close(found.sequences_scores, scores, rtol=0, atol=1e-5)


def test_sampling_draws_from_the_probabilities_of_the_core():
    model, core = make_model(PRENORM, {})
    source = sources((6,))
    logits = core(source, None, torch.tensor([[EOS]]))[0][0, -1]
    logits[[PAD, EOS]] = -torch.inf  # padding, and a translation without words
    drawn = model.generate(source, do_sample=True, num_beams=1, top_k=0, num_return_sequences=4000, max_new_tokens=1)
    shares = drawn[:, 1].bincount(minlength=len(logits)) / 4000
    torch.testing.assert_close(shares, logits.softmax(-1), rtol=0, atol=0.04)


def test_loss_and_gradients_are_those_of_the_core():
    model, core = make_model(PRENORM, {"decoder_memory": "transparent"})
    source, target = sources(), targets()
    labels = torch.cat([target[:, 1:], torch.full((3, 1), PAD)], dim=1)
    labels[labels.eq(PAD) & target.ne(PAD)] = EOS
    ignored = labels.masked_fill(labels.eq(PAD), -100)
    loss = model(source, labels=ignored).loss
    logits = core(source, None, target)[0]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(model(source, labels=labels).loss, loss)
    for each in (loss, expected):
        each.backward()
    gradients = {name: parameter.grad for name, parameter in core.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_outputs_of_a_caller():
    """A tuple in place of the encoder's output; hidden states; a tuple as the result."""
    model, core = make_model(PRENORM, {})
    source, target = sources(), targets((7, 7, 7))
    encoded = model.encode(source, output_hidden_states=True)
    assert len(encoded.hidden_states) == 3 and encoded.memories is None
    mask = source.ne(PAD).long()
    out = model(None, mask, target, encoder_outputs=(encoded[0],), output_hidden_states=True, use_cache=True)
    expected, extra = core(source, None, target)
    assert_near(out.logits, expected)
    for found, state in zip(out.decoder_hidden_states, extra["inner_states"]):
        assert_near(found, state.transpose(0, 1))
    as_tuple = model(source, decoder_input_ids=target, return_dict=False)
    assert torch.equal(as_tuple[0], model(source, decoder_input_ids=target).logits)
    # an encoder's output that is copied for each hypothesis, and one that hypotheses share
    repeated = encoded[0].repeat_interleave(2, dim=0)
    twice = model(None, mask.repeat_interleave(2, 0), target.repeat_interleave(2, 0), encoder_outputs=(repeated,))
    assert_near(twice.logits[::2], expected)
    shared = model(None, mask, target.repeat_interleave(2, 0), encoder_outputs=(encoded[0],))
    assert_near(shared.logits, twice.logits)
    assert torch.equal(model.generate(encoder_outputs=encoded), model.generate(source))


@pytest.mark.parametrize("beam, more", [(4, {}), (1, {"num_beams": 4})])
def test_the_length_penalty_of_gnmt_is_refused(beam, more):
    model, _ = make_model(PRENORM, {}, gnmt_lenpen=True, beam=beam)
    source = torch.tensor([[5, 6, 2]])
    with pytest.raises(UsageError, match="GNMT's length penalty, which transformers does not support"):
        model.generate(source, **more)
    for other in ({"length_penalty": 0.6}, {"num_beams": 1}):
        assert torch.equal(model.generate(source, **other)[:, :1], source[:, 2:])


def test_the_limit_of_the_package_holds_in_a_trainer():
    """``Seq2SeqTrainer`` writes transformers' defaults into the model's settings after each batch."""
    model, _ = make_model(PRENORM, {}, beam=1, max_len_b=40)
    model.decoder.output_projection.weight.data[2].fill_(0)  # never ends by itself
    source = torch.tensor([[5, 6, 2]])

    def length(**options):
        return model.generate(source, min_new_tokens=30, **options).size(1)

    assert length() == length(max_length=None) == length(max_new_tokens=None) > 30
    settings = model.generation_config
    settings.update(**settings._get_default_generation_params(), defaults_only=True)
    assert length() > 30 and settings.max_length == 42
    assert (length(max_new_tokens=32), length(max_length=33)) == (33, 33)
    assert copy.deepcopy(settings).ceiling == pickle.loads(pickle.dumps(model)).generation_config.ceiling == 42


def test_a_beam_search_has_the_length_penalty_of_a_greedy_package():
    model, core = make_model(PRENORM, {}, beam=1, lenpen=0.3)
    source = torch.tensor([[5, 6, 7, 2]])
    options = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    scores = [model.generate(source, **options, **more).sequences_scores
              for more in ({}, {"length_penalty": 0.3, "early_stopping": True}, {"length_penalty": 1.0})]  # fmt: skip
    assert torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])
    model.generation_config.length_penalty = 1.0  # the user's own counts
    assert torch.equal(model.generate(source, **options).sequences_scores, scores[2])
