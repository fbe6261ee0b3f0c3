"""LaLT: what depends on the target language of a sentence (``--language-transform``)."""

import pytest
import torch
from fairseq.data import Dictionary

from fairseq_deep.core.languages import LanguageIndex, LanguageTransform, tag_indices
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from tests.helpers.invariances import INVARIANCES
from tests.helpers.models import POSTNORM, PRENORM, make_batch, make_dictionary, size_of, tiny_flags
from tests.helpers.tensors import DOUBLE, assert_same_gradients, saved_bytes, shake
from tests.reference import naive_languages

T, B, C = 3, 4, 6
LANGUAGES = 12
LALT = {"language_transform": True}
MODELS = {
    "LaLT": (PRENORM, LALT),
    "LaLT, memories": (POSTNORM, {**LALT, "decoder_memory": "transparent"}),
}


@pytest.fixture(scope="module")
def tagged():
    """A dictionary of 30 entries, of which 12 are tags."""
    symbols = make_dictionary(30 - LANGUAGES)
    for index in range(LANGUAGES):
        symbols.add_symbol(f"<2l{index}>")
    return symbols


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
    torch.testing.assert_close(got, want)
    gradient = assert_same_gradients(got, want, [x, module.weight])[1]
    used = gradient.flatten(1).any(1).nonzero().flatten().tolist()
    assert used == [0, 8, 12]  # others get zeros, not None, so that workers of DDP agree


@pytest.mark.parametrize("init", ["fairseq", "xavier"])
@pytest.mark.parametrize("name", MODELS)
def test_a_new_model_is_the_plain_one(name, init, tagged):
    model, batch = make(name, tagged, deep_init=init).eval(), tagged_batch(tagged)
    plain = make(name, tagged, deep_init=init, language_transform=False).eval()
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if ".language_" not in key})
    assert torch.equal(model(*batch)[0], plain(*batch)[0])
    torch.testing.assert_close(model.half()(*batch)[0], plain.half()(*batch)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_sentences_of_several_languages_are_translated_as_alone(name, tagged):
    model, pad = shake(make(name, tagged), 0.3).eval(), tagged.pad()
    source, lengths, target = tagged_batch(tagged)
    with torch.no_grad():
        together = model(source, lengths, target)[0]
        for row in range(B):
            words, outputs = source[row][source[row] != pad], target[row][target[row] != pad]
            alone = model(words[None], lengths[row : row + 1], outputs[None])[0][0]
            torch.testing.assert_close(together[row, : len(outputs)], alone, rtol=1e-4, atol=1e-4)
        source[1, -3] = tagged.index("<2l3>")
        other = model(source, lengths, target)[0]
    assert torch.equal(other[[0, 2, 3]], together[[0, 2, 3]]) and not torch.allclose(other[1], together[1])


@pytest.mark.parametrize("check", INVARIANCES)
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_keep_what_must_hold(name, check, tagged):
    INVARIANCES[check](lambda **flags: shake(make(name, tagged, **flags), 0.15), tagged)


def test_recomputation_keeps_no_copies_of_the_matrices(tagged):
    batch, kept = tagged_batch(tagged), {}
    for recompute in (False, True):
        model = make("LaLT", tagged, checkpoint_activations=recompute).train()
        kept[recompute] = saved_bytes(lambda model=model: model(*batch), model.parameters())
    assert kept[False] - kept[True] > B * 16 * 16 * 4


def test_parameters_are_counted_exactly(tagged):
    plain = size_of(make("LaLT", tagged, language_transform=False))
    assert size_of(make("LaLT", tagged)) == plain + (LANGUAGES + 1) * 16**2


@pytest.mark.parametrize(
    "flags, problem, cure",
    [
        ({**LALT, "num_languages": 3}, "--num-languages 3: the source dictionary has 12 language tags", "omit the"),
        ({"num_languages": 12}, "--num-languages has no effect without --language-transform", "add it, or omit"),
    ],
)
def test_flags_that_clash(flags, problem, cure, tagged):
    with pytest.raises(UsageError) as error:
        build_architecture(PRENORM, tagged, **{**tiny_flags(PRENORM), **flags})
    assert "\n" not in str(error.value) and problem in str(error.value) and cure in str(error.value)


def test_a_dictionary_without_tags_is_refused():
    with pytest.raises(UsageError, match="--language-transform requires language tags in the source dictionary: begin"):
        build_architecture(PRENORM, Dictionary(), **tiny_flags(PRENORM), **LALT)
