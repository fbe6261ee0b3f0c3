"""LaLT and LaLN: the language of a sentence, memory, refusals.

Their equations are proven in ``test_whole_models.py``, what must hold for all models in ``test_methods.py``.
"""

import argparse

import pytest
from fairseq.data import Dictionary

from fairseq_deep.core.language_tags import tag_indices
from fairseq_deep.core.languages import LanguageIndex
from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.runtime.dictionary import Dictionary as RuntimeDictionary
from fairseq_deep.runtime.model import untrained
from tests.helpers.methods import LALN, LALT, LANGUAGES
from tests.helpers.models import PRENORM, make_batch, tiny_flags
from tests.helpers.tensors import saved_bytes


def tagged_batch(dictionary, left_pad=True):
    """Four sentences: two of one language, one of another, one without a tag."""
    source, lengths, target = make_batch(dictionary, (5, 3, 4, 5), (4, 5, 3, 5), left_pad)
    for row, word in enumerate(("<2l7>", "<2l0>", "<2l7>", "w3")):
        source[row, source.size(1) - lengths[row] if left_pad else 0] = dictionary.index(word)
    return source, lengths, target


@pytest.mark.parametrize("left_pad", [True, False])
def test_the_first_word_tells_the_language(dictionary, left_pad):
    tags = tag_indices(dictionary.symbols)
    assert [dictionary[tag] for tag in tags] == [f"<2l{index}>" for index in range(24)]
    source, pad = tagged_batch(dictionary, left_pad)[0], dictionary.pad()
    source[3, -2:] = tags[5]  # a tag that is not the first word is an ordinary word
    index = LanguageIndex(24)
    assert index(source, source.eq(pad)).tolist() == [0] * 4  # no tags are known yet
    index.set_tags(tags)
    assert index(source, source.eq(pad)).tolist() == [8, 1, 8, 0]


def test_symbols_that_are_tags():
    symbols = ["<2de>", "<2zh_Hans>", "2de", "<2>", "<2de", "x<2de>", "<2de>x", "<s>", "<2 de>"]
    assert tag_indices(symbols) == [0, 1]


def test_a_decoder_asks_for_the_languages(build, batch):
    model, (source, lengths, target) = build(PRENORM, **LALN), batch
    encoded = model.encoder(source, lengths)
    encoded.pop("languages")
    with pytest.raises(UsageError, match="--language-norm requires languages in encoder_out: pass the encoder"):
        model.decoder(target, encoder_out=encoded)


def test_recomputation_keeps_no_copies_of_the_matrices(build, dictionary):
    (name, flags), batch, kept = LANGUAGES["languages memories"], tagged_batch(dictionary), {}
    for recompute in (False, True):
        model = build(name, **flags, checkpoint_activations=recompute).train()
        kept[recompute] = saved_bytes(lambda model=model: model(*batch), model.parameters())
    assert kept[False] - kept[True] > 4 * 16 * 16 * 4


def test_a_model_without_languages_is_refused():
    """Also where someone has edited a package."""
    with pytest.raises(UsageError, match="--language-norm requires --num-languages of at least 1, not 0: change it"):
        untrained(argparse.Namespace(language_norm=True), RuntimeDictionary(), RuntimeDictionary())
    with pytest.raises(UsageError, match="--language-transform requires language tags in the source dictionary: begin"):
        build_architecture(PRENORM, Dictionary(), **tiny_flags(PRENORM), **LALT)
