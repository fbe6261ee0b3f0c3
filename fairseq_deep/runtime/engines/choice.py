"""Which engine translates: CTranslate2 where it gives the same translations, and otherwise ours."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch

from fairseq_deep.core.search import SearchOptions
from fairseq_deep.errors import UsageError, one_line

from ..bundle import Bundle
from ..dictionary import Dictionary
from ..loading import LoadedModel, ModelFacts, check_ensemble, languages_of, load_model
from . import ct2_cache, ct2_format
from .ct2_convert import Disagreement, convert, make_plain
from .ct2_engine import COMPUTED, Ct2Engine, find_problem
from .torch_engine import TorchEngine


class Unsuited(UsageError):
    """CTranslate2 does not support a request, or gives other translations; *fixed*: the message names the fix."""

    def __init__(self, problem: object, fixed: bool = False):
        super().__init__(str(problem))
        self.fixed = fixed


@dataclasses.dataclass
class Request:
    """Models and settings of a translation.

    Attributes:
        bundles: bundle of one model, or bundles of an ensemble
        options: search options
        nbest: hypotheses per sentence
        precision: "fp32", "bf16" or "int8"
        device: torch device
        cache: directory of converted models; None: the user's cache
        parallel: number of batches that may be translated at once
    """

    bundles: Sequence[Bundle]
    options: SearchOptions
    nbest: int = 1
    precision: str = "fp32"
    device: str = "cpu"
    cache: str | None = None
    parallel: int = 1

    def __post_init__(self):
        self._loaded: list[LoadedModel] = []

    def open(self, engine: str) -> TorchEngine | Ct2Engine:
        """Open the engine *engine*.

        Raises:
            UsageError: a model cannot be loaded, or CTranslate2 does not support the request
        """
        if engine == "torch":
            return self.open_torch()
        try:
            return self._open_ctranslate2()
        except Unsuited as error:
            if engine == "ctranslate2":
                raise UsageError(f"{error}" if error.fixed else f"{error}; use --engine torch") from error
            found = self.open_torch()
            found.note = error.message
            return found

    def open_torch(self) -> TorchEngine:
        """Open the torch engine."""
        loaded = self._loaded or [load_model(bundle) for bundle in self.bundles]
        self._loaded = []
        check_ensemble(loaded, self.bundles)
        return TorchEngine(loaded, self.options, self.precision, self.device)

    def _open_ctranslate2(self) -> Ct2Engine:
        """Open CTranslate2 with a converted model.

        Raises:
            Unsuited: CTranslate2 does not support the request, or gives other translations
        """
        if len(self.bundles) > 1:
            raise Unsuited("an ensemble, which CTranslate2 does not support")
        if self.device != "cpu":
            raise Unsuited("a GPU is used, but CTranslate2 is verified only on a CPU; add --cpu", fixed=True)
        problem = find_problem(self.options, self.nbest, self.precision)
        if problem:
            raise Unsuited(problem)
        try:
            ct2_format.check_package()
        except UsageError as error:
            raise Unsuited(error, fixed=True) from error
        bundle = self.bundles[0]
        root = os.path.abspath(self.cache or ct2_cache.default_folder())
        folder = os.path.join(root, ct2_cache.key_of(bundle, COMPUTED[self.precision]))
        record, origin = self._entry(folder)
        if record["problem"]:
            raise Unsuited(record["problem"])
        facts = ModelFacts(**{**record["facts"], "layers": tuple(record["facts"]["layers"])})
        languages = languages_of(bundle, record["task"])
        sides = [Dictionary.load(f"{bundle.data}/dict.{language}.txt") for language in languages]
        try:
            engine = Ct2Engine(folder, facts, sides, languages, self.options, self.open_torch,
                               torch.get_num_threads(), self.parallel)  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise Unsuited(f"CTranslate2 cannot load {folder} ({one_line(error, 200)})") from error
        engine.note = f"{origin} {folder}; {record['report']}"
        return engine

    def _entry(self, folder: str) -> tuple[dict[str, Any], str]:
        """Return the record of the converted model, after conversion if necessary, and a note about its origin."""
        try:
            record, done = ct2_cache.read(folder), "converted to"
        except ct2_cache.Damaged as error:
            record, done = None, f"replaced a corrupt model ({error}):"
        if record is not None:
            return record, "cached in"
        bundle = self.bundles[0]
        loaded = load_model(bundle)
        self._loaded = [loaded]
        try:
            plain = make_plain(bundle, loaded)
        except UsageError as error:
            raise Unsuited(error) from error

        def fill(new: str) -> dict[str, Any]:
            facts = dataclasses.asdict(ModelFacts.of([loaded]))
            task = {name: loaded.stored.task.get(name) for name in ("source_lang", "target_lang")}
            record = {"task": task, "facts": facts, "report": "", "problem": ""}
            self._loaded = []  # the conversion changes the model in place
            try:
                record["report"] = str(convert(bundle, loaded, plain, new, COMPUTED[self.precision]))
            except Disagreement as error:
                record["problem"] = error.message
                shutil.rmtree(new)
                os.mkdir(new)
            except UsageError as error:
                raise Unsuited(error, fixed=True) from error
            return record

        try:
            return ct2_cache.write(folder, fill), done
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unsuited(f"cannot write {folder}: {reason}; choose another --cache-dir", fixed=True) from error
