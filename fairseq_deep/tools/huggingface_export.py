"""Export of a trained model to a directory that transformers loads without this package, with a check."""

import argparse
import contextlib
import copy
import glob
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from fairseq_deep.core.language_tags import TAG
from fairseq_deep.tools import UsageError, check_new_folder, new_folder, read_lines, translate, write_text
from fairseq_deep.tools import huggingface_format as form
from fairseq_deep.tools import huggingface_tokenizer as text
from fairseq_deep.tools.export import naming_others
from fairseq_deep.tools.huggingface_pieces import Pieces, tags_of

OTHER_TAG = re.compile(r"[^\w&].*[^\W\d_].*|__.*")
"""Tags such as >>de<< and __de__, but not @-@, &quot; and words that other steps of a corpus joined."""

TARGET = "target"
"""Directory of the target tokenizer, if there are two dictionaries."""
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and messages."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


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
    from fairseq_deep.tools import huggingface_card, huggingface_check

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
        texts = huggingface_check.random_texts(loaded.source, parts.steps.kind)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    unigram = isinstance(parts.subwords, Pieces) and parts.subwords.unigram
    meanings = parts.sizes.meanings
    rows, ties = huggingface_check.encode(tokenizer, texts, parts.steps.cut, loaded.source, meanings, unigram)
    rows = [row for row in rows if 1 < len(row) <= limit][: args.verify_sentences]
    if not rows:
        raise UsageError(f"{origin} has no sentence of at most {limit} tokens to check the export with")
    means = [*range(len(loaded.source)), *meanings]
    plain = [[means[index] for index in row] for row in rows]
    real = origin != verification.RANDOM
    report = huggingface_check.check_export(folder, loaded.model, search, rows, plain, real, parts.tolerance)
    found = f"{report} ({origin}, beam {search['beam']}, lenpen {search['lenpen']:g})"
    found += f"; {ties} of {len(texts)} sentences have pieces with equal scores in another order" if ties else ""
    card = huggingface_card.make(parts, args, search, name, size, found)
    write_text(os.path.join(folder, "README.md"), card)
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
