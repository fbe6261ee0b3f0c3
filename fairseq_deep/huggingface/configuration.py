"""The configuration of a packaged model as a transformers class."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.packaged.config import FORMAT, HUGGINGFACE, check_config


class FairseqDeepConfig(PreTrainedConfig):
    """Configuration of :class:`FairseqDeepForConditionalGeneration`.

    Attributes:
        package: the content of the package's ``config.json``
        source_vocab_size, vocab_size: entries of the dictionaries; None until a model is loaded

    Raises:
        UsageError: ``config.json`` has an invalid setting
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
        """Read *config_dict*, the content of a package's ``config.json`` or the result of :meth:`to_dict`."""
        if config_dict.get("format") == FORMAT:
            config_dict = {"package": config_dict, "architectures": HUGGINGFACE["architectures"]}
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        if self.package is not None:
            try:
                check_config(self.package)
            except ValueError as error:
                raise UsageError(f"config.json: rejected: {error}") from error
        super().__post_init__(**kwargs)
