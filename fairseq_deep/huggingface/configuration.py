"""The configuration of a packaged model as a transformers class."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from fairseq_deep.errors import UsageError, nearest
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.packaged.config import FORMAT, HUGGINGFACE, check_config, model_settings


class FairseqDeepConfig(PreTrainedConfig):
    """Configuration of :class:`FairseqDeepForConditionalGeneration`.

    Attributes:
        package: the content of the package's ``config.json``
        source_vocab_size, vocab_size: entries of the dictionaries; None until a model is loaded

    Raises:
        UsageError: a setting is invalid, or unknown and similar to a known one
    """

    model_type = HUGGINGFACE["model_type"]

    package: dict[str, Any] | None = None
    source_vocab_size: int | None = None
    vocab_size: int | None = None
    is_encoder_decoder: bool = True
    bos_token_id: int | None = Dictionary.bos
    pad_token_id: int | None = Dictionary.pad
    eos_token_id: int | None = Dictionary.eos
    decoder_start_token_id: int | None = Dictionary.eos

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Read *config_dict*, the content of a package's ``config.json`` or the result of :meth:`to_dict`.

        Flags of the model in *kwargs*, such as ``encoder_layers=12``, replace the package's.
        """
        if config_dict.get("format") == FORMAT:
            config_dict = {"package": config_dict, "architectures": HUGGINGFACE["architectures"]}
        flags = {name: kwargs.pop(name) for name in model_settings() if name in kwargs}
        if flags:
            package = config_dict["package"]
            config_dict = {**config_dict, "package": {**package, "model": {**package["model"], **flags}}}
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        self.check()
        own = ("package", "vocab_size", "source_vocab_size")
        for name in kwargs:
            if nearest(name, (*own, *model_settings()), 0.8):
                fix = 'AutoConfig.from_pretrained("PACKAGE", encoder_layers=12) sets flags of the model'
                raise UsageError(f"unknown argument {name}{nearest(name, own, 0.8)}; {fix}")
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Reject an invalid package.

        Raises:
            UsageError: a setting is missing, unknown or invalid
        """
        try:
            if self.package is not None:
                check_config(self.package)
        except ValueError as error:
            raise UsageError(f"config.json: rejected: {error}") from error
