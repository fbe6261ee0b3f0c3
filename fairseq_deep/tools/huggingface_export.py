"""Export of a trained model to a directory that transformers loads without this package, with a check."""

import argparse
import copy
import dataclasses
import glob
import os
import random
import re
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

from fairseq_deep.core.language_tags import TAG
from fairseq_deep.core.search import BeamSearch, SearchOptions
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import text as text_steps
from fairseq_deep.runtime.engines.transformers_engine import TARGET, ended, quiet
from fairseq_deep.runtime.exported import TRANSFORMERS, write_record
from fairseq_deep.runtime.loading import ModelFacts
from fairseq_deep.runtime.text import joined
from fairseq_deep.runtime.verification import (
    DRAWN,
    LONGEST,
    Limits,
    Report,
    Side,
    compare,
    logits_of,
    padded,
    shifted,
)
from fairseq_deep.tools import huggingface_format as form
from fairseq_deep.tools import huggingface_tokenizer as text
from fairseq_deep.tools import translate
from fairseq_deep.tools.alternatives import naming_others
from fairseq_deep.tools.huggingface_pieces import Pieces, tags_of
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.output_files import check_new_folder, new_folder, write_text

OTHER_TAG = re.compile(r"[^\w&].*[^\W\d_].*|__.*")
"""Tags such as >>de<< and __de__, but not @-@, &quot; and words that other steps of a corpus joined."""

SHARE, LENPEN = 0.98, 0.6
"""Share of translations that must be equal, and minimum length penalty of this check. With smaller penalties, the
searches differ: transformers compares all hypotheses that end at the same step, and fairseq stops at the first ones."""
TOLERANCE, SHORT_FORM = 1e-5, 1e-4
"""Maximum difference of logits, relative to the largest one if that is above 1. The second value applies if folding
changes the eps of DeepNet's first norms, as with fixed positions."""


class Parts(NamedTuple):
    """Parts of an export.

    Attributes:
        bundle: paths and settings of the model
        loaded: the trained model
        plain: the model with plain connections
        steps: text processing
        subwords: see `huggingface_tokenizer.read_subwords`; None: tokens are words
        vocabularies: {piece: id} of source and target
        sizes: sizes of the embedding tables
        kind: transformers' ``model_type``
        tolerance: tolerance of logits
    """

    bundle: Any
    loaded: Any
    plain: Any
    steps: Any
    subwords: Any
    vocabularies: tuple[dict[str, int], dict[str, int]]
    sizes: form.Vocabulary
    kind: str
    tolerance: float


def check_package() -> None:
    """Raise `UsageError` if transformers is missing."""
    try:
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(f"this requires transformers ({error}): pip install 'transformers>=5'") from error


def write(args: argparse.Namespace) -> int:
    """Write the directory, and compare transformers' results with the model."""
    check_new_folder(args.output)
    given = args.verify and [args.verify, *read_lines(args.verify)]
    parts = collect(args)
    check_package()
    with quiet(), new_folder(os.path.abspath(args.output)) as folder:
        name, report = write_folder(folder, parts, args, given)
    print(f"{parts.bundle.checkpoint} -> {args.output}: {name}; {report}")
    return 0


def collect(args: argparse.Namespace) -> Parts:
    """Return the parts of the model.

    Raises:
        UsageError: a part is missing, or transformers has no class for the model
    """
    from fairseq_deep.runtime import load_model

    bundle = translate.find_parts(args.checkpoint, args)
    loaded = load_model(bundle)
    with naming_others():
        plain, streams = make_plain(bundle, loaded)
    steps = bundle.text_steps(loaded.source_lang, loaded.target_lang, loaded.source)  # also checks the codes
    found = steps.tags(loaded.source.symbols[4:])
    tags = [tag for tag in found if OTHER_TAG.fullmatch(tag) and not TAG.fullmatch(tag)]
    if tags:
        raise UsageError(f"the tokenizer for transformers keeps only tags such as <2de> whole, and would split "
                         f"{tags[0]} of {bundle.checkpoint}: use --format torch, or train with such tags")  # fmt: skip
    subwords = text.read_subwords(bundle.codes) if bundle.codes else None
    try:
        source, meanings = text.make_vocabulary(loaded.source.symbols, subwords)
        target, _ = text.make_vocabulary(loaded.target.symbols, subwords)
        sizes = form.Vocabulary(len(loaded.source), len(loaded.target), meanings, loaded.source == loaded.target)
        with naming_others():
            kind = form.choose_class(plain, loaded.stored.flags.activation_fn, sizes)
    except UsageError as error:
        raise UsageError(f"{bundle.checkpoint} has {error}") from error
    tolerance = SHORT_FORM if streams and kind == form.FSMT else TOLERANCE
    return Parts(bundle, loaded, plain, steps, subwords, (source, target), sizes, kind, tolerance)


def make_plain(bundle: Any, loaded: Any) -> tuple[Any, bool]:
    """Return a copy of the model with plain connections, and whether weights of streams were folded.

    Raises:
        UsageError: transformers does not support the model
    """
    from fairseq_deep.runtime.plain import check_layers, check_weights, fold_all

    path = bundle.checkpoint
    if bundle.gnmt_lenpen:
        raise UsageError(f"{path} has GNMT's length penalty, which transformers does not support")
    check_layers(path, loaded.stored.flags, "huggingface")
    check_weights(path, loaded.model, "huggingface")
    plain = copy.deepcopy(loaded.model)
    return plain, fold_all(path, plain)


def write_folder(folder: str, parts: Parts, args: argparse.Namespace, given: list[str] | None) -> tuple[str, str]:
    """Write the export to *folder*, and return the name of the class and the result of the check.

    Args:
        given: the name of a file with sentences for the check, and its lines; None: the recipe's test set
    """
    from fairseq_deep.runtime import search_of, verification
    from fairseq_deep.tools import huggingface_card

    model, loaded, search = parts.plain, parts.loaded, search_of(parts.bundle)
    languages = (loaded.source_lang, loaded.target_lang)
    config = form.make_config(model, loaded.stored.flags, parts.kind, parts.sizes, languages)
    other = form.make_model(model, config, parts.sizes)
    other.generation_config = form.make_generation(search, model)
    name, size = type(other).__name__, sum(parameter.numel() for parameter in other.parameters())
    other.save_pretrained(folder)
    del other
    for path in glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):  # created with private permissions
        shutil.copymode(os.path.join(folder, "config.json"), path)
    limit = write_tokenizers(folder, parts)
    origin, texts = verification.sentences(parts.bundle, loaded, parts.steps, args.verify_sentences, given)
    if origin == verification.RANDOM:
        texts = random_texts(loaded.source, parts.steps.kind)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    unigram = isinstance(parts.subwords, Pieces) and parts.subwords.unigram
    meanings = parts.sizes.meanings
    rows, ties = encode(tokenizer, texts, parts.steps.cut, loaded.source, meanings, unigram)
    rows = [row for row in rows if 1 < len(row) <= limit][: args.verify_sentences]
    if not rows:
        raise UsageError(f"{origin} has no sentence of at most {limit} tokens to check the export with")
    means = [*range(len(loaded.source)), *meanings]
    plain = [[means[index] for index in row] for row in rows]
    real = origin != verification.RANDOM
    report = check_export(folder, loaded.model, search, list(map(Sentence, rows, plain)), real, parts.tolerance)
    found = f"{report} ({origin}, beam {search['beam']}, lenpen {search['lenpen']:g})"
    found += f"; {ties} of {len(texts)} sentences have pieces with equal scores in another order" if ties else ""
    card = huggingface_card.make(parts, args, search, name, size, found)
    write_text(os.path.join(folder, "README.md"), card)
    write_record(folder, parts.bundle, search, ModelFacts.of([loaded]), languages)
    return name, found


def write_tokenizers(folder: str, parts: Parts) -> int:
    """Write the source tokenizer and, if necessary, the target tokenizer; return the maximum length of a source."""
    limits = [stack.max_positions() for stack in (parts.plain.encoder, parts.plain.decoder)]
    tags = tags_of(parts.loaded.source.symbols)
    text.save_tokenizer(text.make_tokenizer(parts.vocabularies[0], parts.subwords, limits[0], tags), folder)
    if not parts.sizes.shared:
        own = text.make_tokenizer(parts.vocabularies[1], parts.subwords, limits[1])
        text.save_tokenizer(own, os.path.join(folder, TARGET))
    return limits[0]


def random_texts(source: Any, kind: str | None) -> list[str]:
    """Return tokenised text of random entries of the dictionary *source*, without tags, identical at each call.

    Args:
        kind: kind of sub-words, as in `TextSteps`
    """
    draws, words = random.Random(1), [symbol for symbol in source.symbols[4:] if not text_steps.TAG.fullmatch(symbol)]
    lines = [draws.choices(words, k=draws.randint(2, LONGEST)) for _ in range(DRAWN)]
    return [joined(" ".join(line), kind or "subword-nmt") for line in lines]


def encode(
    tokenizer: Any, texts: Sequence[str], cut: Any, source: Any, meanings: Sequence[int], unigram: bool = False
) -> tuple[list[list[int]], int]:
    """Return the ids of tokenised *texts* from transformers' tokenizer, and the number of texts with other tie-breaks.

    Args:
        cut: the function from words to sub-words; None: tokens are words
        source: the dictionary
        meanings: see `make_vocabulary`
        unigram: whether the sub-words are SentencePiece's unigram model. It sums scores in single precision, so
            rounding decides between orders of the same pieces

    Raises:
        UsageError: the ids differ from fairseq's tokens
    """
    rows, ties = tokenizer(list(texts)).input_ids, 0
    for line, row in zip(texts, rows):
        expected = source.encode(cut(line) if cut else line).tolist()
        found = [index if index < len(source) else meanings[index - len(source)] for index in row]
        if found != expected and not (unigram and sorted(found) == sorted(expected)):
            raise UsageError(f"the tokenizer for transformers splits a sentence differently ({line[:60]!r})")
        ties += found != expected
    return rows, ties


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A source as ids of transformers' tokenizer, and as indices of the dictionary."""

    row: list[int]
    plain: list[int]

    def __len__(self) -> int:
        return len(self.row)


def check_export(
    folder: str, model: Any, search: dict[str, Any], sentences: Sequence[Sentence], real: bool, tolerance: float
) -> Report:
    """Compare the export in *folder* with its *model*.

    Args:
        search: "beam", "lenpen", "max_len_a" and "max_len_b"
        real: whether the sentences are real; then translations are also compared
        tolerance: tolerance of logits, relative to the largest one if that is above 1

    Raises:
        UsageError: the results differ by more than rounding
    """
    from transformers import AutoModelForSeq2SeqLM

    other = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()
    decoding = BeamSearch([copy.deepcopy(model).prepare_for_decoding()], SearchOptions(**search))

    def translate(batch: Sequence[Sentence]) -> list[list[int]]:
        return [found[0]["tokens"].tolist() for found in decoding(padded([each.plain for each in batch]))]

    def generate(batch: Sequence[Sentence]) -> list[list[int]]:
        rows = padded([each.row for each in batch])
        limit = form.longest(search, rows.size(1), model.decoder.max_positions())
        output = other.generate(input_ids=rows, attention_mask=rows.ne(form.PAD), max_new_tokens=limit)
        return [ended(row).tolist() for row in output]

    sides = (
        Side(translate, our_logits(model)),
        Side(generate, their_logits(other, model.decoder.embed_tokens.num_embeddings)),
    )
    limits = Limits(tolerance, share=SHARE if search["lenpen"] >= LENPEN else None)
    return compare(TRANSFORMERS, "logits", *sides, sentences, limits, real)


def our_logits(model: Any) -> Any:
    """Return the function from sentences and targets to the *model*'s logits."""
    return lambda batch, targets: logits_of(model, padded([each.plain for each in batch]), targets)


def their_logits(model: Any, size: int) -> Any:
    """Return the function from sentences and targets to the logits of transformers' *model*, for *size* ids."""

    def score(batch: Sequence[Sentence], targets: list[list[int]]) -> Any:
        rows, inputs = padded([each.row for each in batch]), shifted(targets)
        whole = {"decoder_input_ids": inputs, "use_cache": False}  # with a cache, FSMT does not mask later positions
        return model(input_ids=rows, attention_mask=rows.ne(form.PAD), **whole).logits[..., :size][inputs.ne(form.PAD)]

    return score
