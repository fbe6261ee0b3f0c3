"""The tokenizer of a packaged model, with the runtime's text processing, sub-words and dictionaries."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizer

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.dictionary import SPECIAL, Dictionary
from fairseq_deep.runtime.packaged.folder import CARD, CONFIG, SUMS, write_sums
from fairseq_deep.runtime.text import TextSteps, tokenizer_of

from .folder import HUB, filled, find_package, read_files, write_files, written

_IGNORED = ("_commit_hash", "_from_auto", "_from_pipeline", "config", "trust_remote_code", "use_fast")


class FairseqDeepTokenizer(PreTrainedTokenizer):
    """Converts raw text to indices and back, exactly like :class:`fairseq_deep.runtime.Translator`.

    ``tokenizer(text)`` prepares a source, ``tokenizer(text_target=text)`` a target. Special symbols in raw text are
    plain text. ``decode`` expects indices of the target dictionary. With ``skip_special_tokens``, it keeps ``<unk>``,
    like the runtime.

    Args:
        files: ``config.json``, dictionaries and sub-words of a package
        options: options of ``PreTrainedTokenizer``

    Attributes:
        source, target: dictionaries

    Raises:
        UsageError: a file is invalid, or a Python package is missing
    """

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, files: dict[str, bytes], **options: Any):
        self.files, self.options = files, options
        with written(files) as folder:
            write_sums(folder)
            package = packaged.load(folder, weights=False)
            config, self.source, self.target = package.config, package.source, package.target
            task, text = config["task"], config["text"]
            languages, codes = (task["source_lang"], task["target_lang"]), packaged.codes_of(config)
            self.steps = TextSteps(*languages, codes and package.paths[codes], text["tokenizer"], text["lowercase"],
                                   self.source.symbols[len(SPECIAL) :])  # fmt: skip
            # a recipe lowercases both sides; "lowercase" of a checkpoint says nothing of its targets
            lowercase = text["lowercase"] and all(word == word.lower() for word in self.target.symbols)
            self._prepare_target = tokenizer_of(languages[1], text["tokenizer"], lowercase)
        self.current = self.source
        limits = (task["max_source_positions"], config["model"].get("max_source_positions"))
        limit = min((each for each in limits if each), default=None)
        symbols = {f"{name}_token": SPECIAL[getattr(Dictionary, name)] for name in ("bos", "pad", "eos", "unk")}
        fixed = {**symbols, "special_tokens_pattern": "eos", "split_special_tokens": True}
        super().__init__(**{"model_max_length": limit, **options, **fixed})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *inputs: Any, **kwargs: Any):
        """Load the tokenizer of a package.

        Args:
            pretrained_model_name_or_path: its directory, or the name of a repository on the Hub
            kwargs: arguments that select the repository's files, and options of ``PreTrainedTokenizer``

        Raises:
            UsageError: the package is invalid
        """
        hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
        for name in _IGNORED:
            kwargs.pop(name, None)
        paths = dict(find_package(pretrained_model_name_or_path, weights=False, **hub).paths)
        paths.pop(CARD, None)
        return cls(read_files(paths), name_or_path=os.fspath(pretrained_model_name_or_path), **kwargs)

    def __reduce__(self):
        """Pickle the files, since the text steps are local functions."""
        return functools.partial(type(self), **self.options), (self.files,)

    @property
    def vocab_size(self) -> int:
        """Size of the current dictionary: the source's, or the target's while a target is being prepared."""
        return len(self.current)

    def get_vocab(self) -> dict[str, int]:
        """Return the indices of the tokens in the current dictionary."""
        return dict(self.current.indices)

    def _switch_to_input_mode(self) -> None:
        self.current = self.source

    def _switch_to_target_mode(self) -> None:
        self.current = self.target

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        if self.current is self.source:
            return self.steps.prepare(text).split()
        words = self._prepare_target(text)
        return (words if self.steps.cut is None else self.steps.cut(words)).split()

    def _convert_token_to_id(self, token: str) -> int:
        return self.current.indices.get(token, Dictionary.unk)

    def _convert_id_to_token(self, index: int) -> str:
        return self.current.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the raw text of target *tokens*."""
        return self.steps.finish(" ".join(tokens))

    def _decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        hidden = (Dictionary.bos, Dictionary.pad, Dictionary.eos) if skip_special_tokens else ()
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        outside = next((each for each in ids if not 0 <= each < len(self.target)), None)
        if outside is not None:
            raise UsageError(f"decode() got the index {outside}: replace ignored positions by the padding index")
        return self.convert_tokens_to_string([self.target.symbols[each] for each in ids if each not in hidden])

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Write the files that :meth:`from_pretrained` reads; a directory with this package is not changed.

        Raises:
            UsageError: *save_directory* has another package, or cannot be written
        """
        if kwargs.get("push_to_hub"):
            self.push_to_hub(os.path.basename(save_directory))
        folder = os.fspath(save_directory)
        if not os.path.exists(os.path.join(folder, CONFIG)):
            with filled(folder) as new:
                write_files(new, self.files)
                write_sums(new)
        paths = {name: os.path.join(folder, name) for name in self.files}
        texts = {name: path for name, path in paths.items() if name != CONFIG}
        if not all(map(os.path.exists, texts.values())) or not read_files(texts).items() <= self.files.items():
            raise UsageError(f"{folder} holds another model; choose another directory")
        return (*paths.values(), os.path.join(folder, SUMS))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """Reject an upload, since a tokenizer is only a part of a package."""
        raise UsageError("a tokenizer is a part of a package; the model's push_to_hub() uploads both")
