"""LaLT and LaLN: transforms and norms that depend on the target language of each sentence."""

import argparse

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_deep.core.compat import skip_initialisation
from fairseq_deep.core.language_tags import tag_indices
from fairseq_deep.core.languages import LanguageIndex, LanguageTransform
from fairseq_deep.core.norms import LanguageNorm
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.runtime.dictionary import Dictionary as RuntimeDictionary
from fairseq_deep.runtime.model import untrained
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import POSTNORM, PRENORM, make_batch, make_tagged_dictionary, size_of, tiny_flags
from tests.helpers.tensors import DOUBLE, assert_same, saved_bytes, shake
from tests.reference import naive_languages

T, B, C = 3, 4, 6
LANGUAGES, ENTRIES = 12, 22  # so most random sources begin with a tag
LALT, LALN = {"language_transform": True}, {"language_norm": True}
BOTH = {**LALT, **LALN}
MODELS = {
    "LaLT, memories": (POSTNORM, {**LALT, "decoder_memory": "transparent"}),
    "LaLN": (PRENORM, {**LALN, "layernorm_embedding": True}),
    "paper": (POSTNORM, {**BOTH, "decoder_attn": "merged"}),
    "LaLN, bare": ("transformer_hyper_connections_6l", {**LALN, "encoder_layers": 2, "decoder_layers": 2}),
    "LaLN, LSTM": ("transformer_lstm_2l2l_tiny", BOTH),
    "LaLN, ODE": (PRENORM, {**LALN, "layer_agg": "ode", "ode_method": "rk2-learned"}),
}


@pytest.fixture(scope="module")
def tagged():
    return make_tagged_dictionary(ENTRIES, LANGUAGES)


def make(name, tagged, **flags):
    """A narrow model of two layers for the dictionary *tagged*."""
    arch, own = MODELS[name]
    return build_architecture(arch, tagged, **{**tiny_flags(arch), **own, **flags})


def tagged_batch(tagged, left_pad=True):
    """Four sentences: two of one language, one of another, one without a tag."""
    source, lengths, target = make_batch(tagged, (5, 3, 4, 5), (4, 5, 3, 5), left_pad)
    for row, word in enumerate(("<2l7>", "<2l0>", "<2l7>", "w3")):
        source[row, source.size(1) - lengths[row] if left_pad else 0] = tagged.index(word)
    return source, lengths, target


@pytest.mark.parametrize("left_pad", [True, False])
def test_the_first_word_tells_the_language(tagged, left_pad):
    tags = tag_indices(tagged.symbols)
    assert [tagged[tag] for tag in tags] == [f"<2l{index}>" for index in range(LANGUAGES)]
    source, pad = tagged_batch(tagged, left_pad)[0], tagged.pad()
    source[3, -2:] = tags[5]  # a tag that is not the first word is an ordinary word
    index = LanguageIndex(LANGUAGES)
    assert index(source, source.eq(pad)).tolist() == [0] * 4  # no tags are known yet
    index.set_tags(tags)
    found = index(source, source.eq(pad)).tolist()
    assert found == [naive_languages.language_of(row, tags, pad) for row in source] == [8, 1, 8, 0]


def test_symbols_that_are_tags():
    symbols = ["<2de>", "<2zh_Hans>", "2de", "<2>", "<2de", "x<2de>", "<2de>x", "<s>", "<2 de>"]
    assert tag_indices(symbols) == [0, 1]


def test_the_transform_equals_the_equation():
    module = shake(LanguageTransform(LANGUAGES, C).double())
    x, languages = torch.randn(T, B, C, requires_grad=True, **DOUBLE), [8, 0, 8, 12]
    got = module(x, torch.tensor(languages))
    want = naive_languages.transform(x, module.weight, languages)
    gradient = assert_same(got, want, [x, module.weight])[1]
    used = gradient.flatten(1).any(1).nonzero().flatten().tolist()
    assert used == [0, 8, 12]  # others get zeros, not None, so that workers of DDP agree


def test_the_norm_equals_the_equation_also_in_half_precision():
    module = shake(LanguageNorm(LANGUAGES, C).double())
    x, languages = torch.randn(T, B, C, requires_grad=True, **DOUBLE), [8, 0, 8, 12]
    got = module(x, torch.tensor(languages))
    want = naive_languages.layer_norm(x, module.weight, module.bias, languages)
    for gradient in assert_same(got, want, [x, module.weight, module.bias])[1:]:
        assert gradient.any(1).nonzero().flatten().tolist() == [0, 8, 12]
    large = torch.tensor([[[300.0, -300.0] * C]]).half()  # whose squares are beyond fp16
    torch.testing.assert_close(LanguageNorm(1, 2 * C).half()(large, torch.tensor([1])), large / 300)


def without_languages(name, tagged, state, **flags):
    """The plain model with the weights *state*: of the rows of a norm, it takes the last."""
    plain = make(name, tagged, **dict.fromkeys(BOTH, False), **flags)
    own = plain.state_dict()
    for key in own:
        own[key].copy_(state[key] if state[key].shape == own[key].shape else state[key][-1])
    return plain.eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_new_model_is_the_plain_one_and_a_row_changes_the_sentences_of_its_language(name, tagged):
    """Also with an initialisation, which leaves the matrices of languages as they are."""
    model, batch = make(name, tagged, deep_init="xavier").eval(), tagged_batch(tagged)
    plain, before = without_languages(name, tagged, model.state_dict(), deep_init="xavier"), model(*batch)[0]
    near = {"rtol": 1e-5, "atol": 1e-5} if model.encoder.stack.language_norm else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(before, plain(*batch)[0], **near)
    for norm in (module for module in model.modules() if isinstance(module, LanguageNorm)):
        own = norm.bias[8].clone()
        norm.bias[8].normal_()
        after = model(*batch)[0]
        assert [torch.equal(a, b) for a, b in zip(after, before)] == [False, True, False, True]
        norm.bias[8] = own


def test_a_decoder_asks_for_the_languages(tagged):
    model, (source, lengths, target) = make("LaLN", tagged), tagged_batch(tagged)
    encoded = model.encoder(source, lengths)
    encoded.pop("languages")
    with pytest.raises(UsageError, match="--language-norm requires languages in encoder_out: pass the encoder"):
        model.decoder(target, encoder_out=encoded)


@pytest.mark.parametrize("check", INVARIANCES)
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_keep_what_must_hold(name, check, tagged):
    """As in ``test_methods.py``, with sources that begin with tags of several languages, or with none."""
    INVARIANCES[check](lambda **flags: shake(make(name, tagged, **flags), 0.15), tagged)


def test_recomputation_keeps_no_copies_of_the_matrices(tagged):
    batch, kept = tagged_batch(tagged), {}
    for recompute in (False, True):
        model = make("LaLT, memories", tagged, checkpoint_activations=recompute).train()
        kept[recompute] = saved_bytes(lambda model=model: model(*batch), model.parameters())
    assert kept[False] - kept[True] > B * 16 * 16 * 4


def test_the_papers_models_have_so_many_parameters_more():
    """100 languages of OPUS-100: rows of 24 norms (12 + 12 with merged attention), and a matrix for each language."""
    tags, flags = make_tagged_dictionary(200, 100), {"decoder_attn": "merged", "share_all_embeddings": True}
    with skip_initialisation():
        plain, norms, transform = (size_of(build_architecture("transformer_postnorm_6l", tags, **flags, **more))
                                   for more in ({}, LALN, LALT))  # fmt: skip
    assert (norms - plain, transform - plain) == (24 * 2 * 512 * 100, 101 * 512**2)


def test_a_model_without_languages_is_refused():
    """Also where someone has edited a package."""
    with pytest.raises(UsageError, match="--language-norm requires --num-languages of at least 1, not 0: change it"):
        untrained(argparse.Namespace(language_norm=True), RuntimeDictionary(), RuntimeDictionary())
    with pytest.raises(UsageError, match="--language-transform requires language tags in the source dictionary: begin"):
        build_architecture(PRENORM, Dictionary(), **tiny_flags(PRENORM), **LALT)
