"""Export of a trained model to a directory for CTranslate2, with a check."""

import argparse
import copy
import os
import shutil

import torch
from torch import Tensor

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.core.transformer import Transformer
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import LoadedModel, load_model, packaged, search_of, verification
from fairseq_deep.runtime.bundle import Bundle
from fairseq_deep.runtime.engines.ct2_engine import Ct2Engine, check_package
from fairseq_deep.runtime.engines.torch_engine import TorchEngine
from fairseq_deep.runtime.exported import CTRANSLATE2, write_record
from fairseq_deep.runtime.loading import ModelFacts
from fairseq_deep.runtime.plain import check_layers, check_weights, fold_all
from fairseq_deep.runtime.verification import Limits, Report, Side
from fairseq_deep.tools import ctranslate2_format, translate
from fairseq_deep.tools.alternatives import naming_others
from fairseq_deep.tools.output_files import check_new_folder, new_folder

DEFAULT = "float32"
"""Type of the weights."""
SENTENCES = 50
"""Number of sentences for the check."""
EXACT, ROUNDED, SHARE = 1e-4, 0.5, 0.98
"""Limits of the difference of log-probabilities: in float32 of the maximum, relative to the largest value if that is
above 1; for other types of weights of the mean. In float32 also the share of translations that must be equal."""


def write(args: argparse.Namespace) -> int:
    """Write the directory, and compare it with the model."""
    check_new_folder(args.output)
    bundle = translate.find_parts(args.checkpoint, args)
    loaded = load_model(bundle)
    with naming_others():
        plain = make_plain(bundle, loaded)
    quantization, languages = args.quantization or DEFAULT, (loaded.source_lang, loaded.target_lang)
    facts, steps = ModelFacts.of([loaded]), bundle.text_steps(*languages, loaded.source)
    with new_folder(args.output) as folder:
        report = convert(bundle, loaded, plain, folder, quantization)
        if bundle.codes is not None:
            shutil.copyfile(bundle.codes, os.path.join(folder, packaged.CODES[steps.kind]))
        write_record(folder, bundle, search_of(bundle), facts, languages)
    print(f"{bundle.checkpoint} -> {args.output}: for CTranslate2, {quantization}; {report}")
    return 0


def make_plain(bundle: Bundle, loaded: LoadedModel) -> Transformer:
    """Return a copy of the model in a form that CTranslate2 supports.

    Raises:
        UsageError: CTranslate2 does not support this model
    """
    path, flags = bundle.checkpoint, loaded.stored.flags
    check_layers(path, flags, "ctranslate2")
    check_weights(path, loaded.model, "ctranslate2")
    problem = ctranslate2_format.find_problem(loaded.model, flags, loaded.source, loaded.target)
    if problem:
        raise UsageError(f"{path} has {problem}")
    plain = copy.deepcopy(loaded.model)
    fold_all(path, plain, tables=True)
    return plain


def convert(bundle: Bundle, loaded: LoadedModel, plain: Transformer, folder: str, quantization: str) -> Report:
    """Write the model to the empty *folder* and compare it with *loaded*; afterwards, *loaded* cannot be trained.

    Args:
        plain: result of :func:`make_plain`
        quantization: type of the weights

    Raises:
        UsageError: CTranslate2 is not installed, or the results differ by more than rounding
        OSError: the directory cannot be written
    """
    check_package()
    spec = ctranslate2_format.build_spec(plain, loaded.stored.flags.activation_fn, loaded.source, loaded.target)
    ctranslate2_format.save_spec(spec, folder, quantization)
    del spec
    search, facts = search_of(bundle), ModelFacts.of([loaded])
    languages = loaded.source_lang, loaded.target_lang
    steps = bundle.text_steps(*languages, loaded.source)
    origin, rows = verification.token_rows(bundle, loaded, steps, SENTENCES, facts.max_source)
    longest = min(int(search["max_len_a"] * max(map(len, rows)) + search["max_len_b"]), facts.max_target - 1)
    options = SearchOptions(**{**search, "max_len_a": 0, "max_len_b": longest})

    def same(ours: list[int], theirs: list[int]) -> bool:
        return ours == theirs or min(len(ours), len(theirs)) > longest  # at the limit, the searches end differently

    exact = quantization == DEFAULT
    limits = Limits(EXACT, None if exact else ROUNDED, SHARE if exact else None, same)
    theirs = _theirs(Ct2Engine(folder, facts, (loaded.source, loaded.target), languages, options))
    real, ours = origin != verification.RANDOM, _ours(TorchEngine([loaded], options))
    return verification.compare(CTRANSLATE2, "log-probabilities", ours, theirs, rows, limits, real)


def _ours(engine: TorchEngine) -> Side:
    def translate(rows: list[list[int]]) -> list[list[int]]:
        return [found[0]["tokens"].tolist() for found in engine.translate_batch([*map(torch.tensor, rows)])]

    def score(rows: list[list[int]], targets: list[list[int]]) -> Tensor:
        logits = verification.logits_of(engine.models[0], verification.padded(rows), targets)
        logits[..., engine.target.pad] = -torch.inf  # CTranslate2 excludes it before the softmax
        tokens = torch.tensor(sum(targets, []))
        return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)

    return Side(translate, score)


def _theirs(engine: Ct2Engine) -> Side:
    def translate(rows: list[list[int]]) -> list[list[int]]:
        return [found[0]["tokens"].tolist() for found in next(engine.translate([[*map(torch.tensor, rows)]]))]

    def score(rows: list[list[int]], targets: list[list[int]]) -> Tensor:
        return torch.cat(engine.log_probabilities([*map(torch.tensor, rows)], [*map(torch.tensor, targets)]))

    return Side(translate, score)
