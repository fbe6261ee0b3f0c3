"""Raw text through one model, or an ensemble of several, to raw text."""

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any, overload

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils
from fairseq.dataclass.configs import GenerationConfig
from omegaconf import OmegaConf

from fairseq_deep.core.registry import UsageError
from fairseq_deep.plugin.task import DeepTranslationConfig, DeepTranslationTask

from .bundle import Bundle, find_bundle, search_of
from .files import sha256
from .text import SEPARATOR, TextSteps


@dataclasses.dataclass(frozen=True)
class Translation:
    """One hypothesis: raw text, and its log-probability (base 2) over length^lenpen, as fairseq-generate prints it."""

    text: str
    score: float


class Translator:
    """Beam search with one model, or with an ensemble of models that share dictionaries and sub-words.

    Args:
        models: a path, as `find_bundle` takes it, or a `Bundle`; a list of these is an ensemble
        precision: the decoder's products on a CPU, "fp32", "bf16" or "int8"
        batch_size, max_tokens: most sentences, and most tokens with padding, in a batch
        cpu: leave a GPU alone
        decoding: beam, lenpen, max_len_a, max_len_b, nbest and other fields of fairseq's ``GenerationConfig``;
            the first model's own search fills those of `search_of`. constraints and score_reference are not
            supported, since they need more than a source

    Raises:
        UsageError: a model cannot be loaded, *decoding* needs more than a source, or the models do not belong together
    """

    def __init__(
        self,
        models: str | os.PathLike | Bundle | Sequence[str | os.PathLike | Bundle],
        precision: str = "fp32",
        batch_size: int = 64,
        max_tokens: int = 4000,
        cpu: bool = False,
        **decoding: Any,
    ):
        for name in ("constraints", "score_reference"):
            if decoding.get(name):
                raise UsageError(f"{name} needs more than a source, which is all that a Translator takes: leave it out")
        self.batch_size, self.max_tokens = batch_size, max_tokens
        paths = [models] if isinstance(models, (str, os.PathLike, Bundle)) else models
        bundles = [path if isinstance(path, Bundle) else find_bundle(os.fspath(path)) for path in paths]
        if not bundles:
            raise UsageError("Translator has no model: give the directory of a recipe, a package, or a checkpoint")
        states = [load_state(bundle) for bundle in bundles]
        self.task = build_task(bundles[0], states[0]["cfg"], precision)
        for bundle in bundles[1:]:
            self._check_same(bundle, bundles[0])
        config, first = self.task.cfg, bundles[0]
        check_merges(first, self.task)
        self.text = TextSteps(config.source_lang, config.target_lang, first.codes, first.tokenizer, first.lowercase)
        generation = OmegaConf.structured(GenerationConfig(**{**search_of(first), **decoding}))
        self.nbest = min(generation.nbest, generation.beam)
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        self.models = [self._build(bundle, state, generation) for bundle, state in zip(bundles, states)]
        self.generator = self.task.build_generator(self.models, generation)
        longest = utils.resolve_max_positions(self.task.max_positions(), *[m.max_positions() for m in self.models])
        self.max_source = int(longest[0])

    def _check_same(self, bundle: Bundle, first: Bundle) -> None:
        for side in ("source", "target"):
            path = f"{bundle.data}/dict.{getattr(self.task.cfg, f'{side}_lang')}.txt"
            if _dictionary(path) != getattr(self.task, f"{side}_dictionary"):
                raise UsageError(f"{path} is not the dictionary of {first.checkpoint}: an ensemble shares dictionaries")
        differs = [name for name in ("tokenizer", "lowercase") if getattr(bundle, name) != getattr(first, name)]
        sums = [sha256(each.codes) if each.codes else None for each in (bundle, first)]
        differs += ["sub-words"] if sums[0] != sums[1] else []
        if differs:
            raise UsageError(
                f"{bundle.checkpoint} has its text prepared otherwise than {first.checkpoint} ({', '.join(differs)}):"
                " an ensemble shares that"
            )

    def _build(self, bundle: Bundle, state: dict[str, Any], generation: Any) -> torch.nn.Module:
        model = build_model(bundle, state, state["cfg"].model, self.task)
        model.to(self.device).eval()
        model.prepare_for_inference_(argparse.Namespace(generation=generation))
        return model

    @overload
    def translate(self, text: str) -> str: ...

    @overload
    def translate(self, text: Sequence[str]) -> list[str]: ...

    def translate(self, text):
        """Translate a string to a string, or a list of strings to the list of their best translations.

        Raises:
            UsageError: a sentence is not a string, or has more tokens than the models have positions; nothing is
                translated
        """
        lines = [text] if isinstance(text, str) else list(text)
        found, encoded = self._encode(lines)
        for number, hypotheses in enumerate(found, 1):
            if not hypotheses and number - 1 not in encoded:
                problem = f"sentence {number} has more tokens than the model's {self.max_source} positions"
                raise UsageError(f"{problem}; split it, or use translate_nbest(), which skips it")
        best = [hypotheses[0].text for hypotheses in self._fill(found, encoded)]
        return best[0] if isinstance(text, str) else best

    def translate_nbest(self, lines: Sequence[str]) -> list[list[Translation]]:
        """Return the *nbest* hypotheses of each line with their scores, best first.

        An empty line has one empty hypothesis. A line with more tokens than the models have positions has none.

        Raises:
            UsageError: *lines* is one string, or an element is not a string
        """
        if isinstance(lines, str):
            raise UsageError("translate_nbest() takes a list of strings, not a string; put it in a list")
        return self._fill(*self._encode(lines))

    def _encode(self, lines: Sequence[str]) -> tuple[list[list[Translation]], dict[int, torch.Tensor]]:
        """Return the hypotheses that need no search, for each line, and the tokens of the lines to search."""
        found: list[list[Translation]] = [[] for _ in lines]
        encoded = {}
        for number, line in enumerate(lines):
            if not isinstance(line, str):
                raise UsageError(f"sentence {number + 1} is of type {type(line).__name__}; it must be a string")
            units = self.text.prepare(line)
            tokens = self.task.source_dictionary.encode_line(units, add_if_not_exist=False).long()
            if not units:
                found[number] = [Translation("", 0.0)]
            elif len(tokens) <= self.max_source:
                encoded[number] = tokens
        return found, encoded

    def _fill(self, found: list[list[Translation]], encoded: dict[int, torch.Tensor]) -> list[list[Translation]]:
        for numbers in self._batches(encoded):
            for number, hypotheses in zip(numbers, self._search([encoded[number] for number in numbers])):
                found[number] = [self._finish(each) for each in hypotheses[: self.nbest]]
        return found

    def _batches(self, encoded: dict[int, torch.Tensor]) -> Iterator[list[int]]:
        """Lines of like lengths, the longest first: what does not fit into memory shows at once."""
        batch: list[int] = []
        longest = 0
        for number in sorted(encoded, key=lambda each: -len(encoded[each])):
            longest = max(longest, len(encoded[number]))
            if batch and (len(batch) == self.batch_size or longest * (len(batch) + 1) > self.max_tokens):
                yield batch
                batch, longest = [], len(encoded[number])
            batch.append(number)
        if batch:
            yield batch

    def _search(self, tokens: list[torch.Tensor]) -> list[list[dict[str, torch.Tensor]]]:
        """Hypotheses of the sentences in order, which the collater sorts by length."""
        dataset = self.task.build_dataset_for_inference(tokens, [len(each) for each in tokens])
        sample = dataset.collater([dataset[index] for index in range(len(tokens))])
        order = sample["id"].tolist()
        sample = utils.move_to_cuda(sample) if self.device.type == "cuda" else sample
        hypotheses = dict(zip(order, self.task.inference_step(self.generator, self.models, sample)))
        return [hypotheses[index] for index in range(len(tokens))]

    def _finish(self, hypothesis: dict[str, torch.Tensor]) -> Translation:
        tokens = hypothesis["tokens"].int().cpu()
        words = self.task.target_dictionary.string(tokens, self.text.symbol)
        return Translation(self.text.finish(words), float(hypothesis["score"]) / math.log(2))


def load_state(bundle: Bundle) -> dict[str, Any]:
    """The checkpoint, with settings of today's form.

    Raises:
        UsageError: it cannot be loaded
    """
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(bundle.checkpoint)
    except Exception as error:
        raise UsageError(f"cannot load {bundle.checkpoint}: {' '.join(str(error).split())}") from error
    if not isinstance(state, dict) or not state.get("model") or not state.get("cfg"):
        raise UsageError(f"{bundle.checkpoint} is not a checkpoint of fairseq")
    return state


def build_model(bundle: Bundle, state: dict[str, Any], flags: Any, task: DeepTranslationTask) -> torch.nn.Module:
    """The model of a checkpoint.

    Args:
        state: the checkpoint, whose tensors get today's names
        flags: its model's settings, which the architecture fills

    Raises:
        UsageError: the checkpoint and the dictionaries do not belong together
    """
    try:
        task.load_state_dict(state.get("task_state") or {})  # the model compares the dictionaries that it names
        model = task.build_model(flags, from_checkpoint=True)
        model.load_state_dict(state["model"], strict=True, model_cfg=flags)
    except Exception as error:  # settings of any kind set off what they like in fairseq and torch
        problem = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UsageError(f"{bundle.checkpoint} does not fit {bundle.data}: {problem}") from error
    return model


def check_merges(bundle: Bundle, task: DeepTranslationTask) -> None:
    """Refuse sub-words without the merges that cut words into them."""
    if bundle.codes is None and any(word.endswith(SEPARATOR) for word in task.source_dictionary.symbols):
        raise UsageError(f"{bundle.data} has sub-words, and there are no merges to cut words with: give --bpe-codes")


def _dictionary(path: str):
    if os.path.exists(path) and not os.path.isfile(path):  # to open a FIFO would wait for whoever writes to it
        raise UsageError(f"cannot read {path}: it must be a regular file; see --data")
    try:
        return DeepTranslationTask.load_dictionary(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or 'no such file'}; see --data") from error
    except Exception as error:  # fairseq raises nothing more special of a wrong encoding
        raise UsageError(f"{path} is no dictionary of fairseq: {' '.join(str(error).split())}") from error


def _languages(bundle: Bundle, source: str | None, target: str | None) -> list[str]:
    """Return both languages; the data directory names the missing ones, by its binarised data or its dictionaries."""
    pair: list[str | None] = [source, target]
    if not all(pair) and os.path.isdir(bundle.data):
        inferred = [name for name in data_utils.infer_language_pair(bundle.data) if name not in (None, "None")]
        matches = (re.match(r"dict\.([^.]+)\.txt$", name) for name in os.listdir(bundle.data))
        names = inferred if len(inferred) == 2 else [match[1] for match in matches if match]
        rest = [name for name in names if name not in pair]
        if any(pair) and len(rest) == 1:
            pair = [name or rest[0] for name in pair]
        elif not any(pair) and len(inferred) == 2:
            pair = list(inferred)
    if not all(pair):
        problem = f"{bundle.checkpoint} does not name its languages, and {bundle.data} does not tell them"
        raise UsageError(f"{problem}: give --source-lang and --target-lang")
    return [str(name) for name in pair]


def build_task(bundle: Bundle, config: Any, precision: str = "fp32") -> DeepTranslationTask:
    """The task of the checkpoint's settings *config*, with the dictionaries of *bundle*.

    Raises:
        UsageError: a dictionary cannot be read, or nothing says what the languages are
    """
    old, fields = config.task, {}
    for field in dataclasses.fields(DeepTranslationConfig):
        value = old.get(field.name) if hasattr(old, "get") else getattr(old, field.name, None)
        if value is not None and not field.name.startswith(("eval_bleu", "_", "decode_")):
            fields[field.name] = value
    given = [getattr(bundle, side) for side in ("source_lang", "target_lang")]
    stored = [fields.get(side) for side in ("source_lang", "target_lang")]
    if None not in stored and any(map(eq, given, reversed(stored))) and stored[0] != stored[1]:
        asked = " to ".join(str(name or there) for name, there in zip(given, stored))
        raise UsageError(f"{bundle.checkpoint} translates {' to '.join(stored)}, not {asked}; omit -s and -t")
    known = [name or there for name, there in zip(given, stored)]
    languages = dict(zip(("source_lang", "target_lang"), _languages(bundle, *known)))
    fields.update(data=bundle.data, decode_precision=precision, gnmt_lenpen=bundle.gnmt_lenpen, **languages)
    sides = [_dictionary(f"{bundle.data}/dict.{languages[side]}.txt") for side in ("source_lang", "target_lang")]
    return DeepTranslationTask(OmegaConf.structured(DeepTranslationConfig(**fields)), *sides)
