"""Reading and writing of packages with transformers' methods: ``from_pretrained``, ``save_pretrained``, ..."""

from __future__ import annotations

import os
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor

from fairseq_deep.core.language_tags import tag_indices
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.model import load_weights
from fairseq_deep.runtime.packaged.config import HUGGINGFACE
from fairseq_deep.runtime.packaged.folder import CARD, write_sums
from fairseq_deep.runtime.packaged.writing import UNFILLED, check_finite

from .folder import HUB, filled, find_package, read_files

_IGNORED = ("_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "adapter_kwargs", "low_cpu_mem_usage",
            "trust_remote_code", "use_safetensors", "weights_only")  # fmt: skip


class Storage:
    """Mixin of :class:`FairseqDeepForConditionalGeneration`.

    Attributes:
        files: configuration, dictionaries, sub-words and card of the package, by name
    """

    files: dict[str, bytes]

    def _read_dictionaries(self, config: Any) -> list[int]:
        """Read the files of the package that *config* comes from, unless it has the sizes of the dictionaries.

        Returns:
            indices of the language tags in the source dictionary, if it was read

        Raises:
            UsageError: *config* does not come from a package
        """
        if config.package is not None and None not in (config.source_vocab_size, config.vocab_size):
            return []
        if config.package is None or not config.name_or_path:
            raise UsageError("the configuration has no dictionaries; use from_pretrained(PACKAGE) for a trained model, "
                             "or AutoConfig.from_pretrained(PACKAGE) for an untrained one")  # fmt: skip
        package = find_package(config.name_or_path, weights=False)
        self.files = read_files(package.paths)
        config.source_vocab_size, config.vocab_size = len(package.source), len(package.target)
        return tag_indices(package.source.symbols)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *model_args: Any,
        config: Any = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        generation_config: Any = None,
        **kwargs: Any,
    ):
        """Load a package in evaluation mode, with all checks of the runtime.

        Args:
            pretrained_model_name_or_path: its directory, or the name of a repository on the Hub
            config: settings that replace the package's
            dtype: type of the weights (default: as stored); weights that methods keep in fp32 are not converted
            device_map: one device, or "auto" for a GPU if available
            generation_config: search settings that replace the package's
            kwargs: arguments that select the repository's files

        Raises:
            UsageError: the package is invalid, or an argument is not supported
        """
        hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
        dtype = kwargs.pop("torch_dtype", None) if dtype is None else dtype
        for name in kwargs:
            if name not in _IGNORED and kwargs[name] not in (None, False):
                raise UsageError(f"{name} is not supported for models of fairseq_deep; omit it")
        package = find_package(pretrained_model_name_or_path, **hub)
        config = cls.config_class() if config is None else config
        if config.package is None:
            config.package = package.config
        config.source_vocab_size, config.vocab_size = len(package.source), len(package.target)
        config.name_or_path = os.fspath(pretrained_model_name_or_path)
        config.architectures = HUGGINGFACE["architectures"]
        model = cls(config)
        stored = package.tensors["encoder.embed_tokens.weight"].dtype
        load_weights(model, package.tensors)
        model.files = read_files(package.paths)
        if generation_config is not None:
            model.generation_config = generation_config
        config.dtype = _type_of(dtype, stored)
        return model.to(_device_of(device_map), config.dtype)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a package.

        Args:
            save_directory: a directory; its other files are not changed
            is_main_process: if false, nothing is written
            state_dict: weights to save instead of the model's
            push_to_hub: also upload the package
            kwargs: arguments of :meth:`push_to_hub`; settings of transformers' own file formats have no effect

        Raises:
            UsageError: a weight is missing or not finite, or the directory cannot be written
        """
        if not is_main_process:
            return
        if not self.files:
            raise UsageError("a model without dictionaries cannot be saved; load it with from_pretrained()")
        values = self.state_dict() if state_dict is None else state_dict
        try:
            tensors, tied = packaged.make_tensors(self, self.state_dict(), None)
            if state_dict is not None:
                check_finite(values, "holds NaN or Inf")
        except ValueError as error:
            raise UsageError(f"the model cannot be saved: {error}") from error
        missing = next((name for name in tensors if name not in values), None)
        if missing:
            raise UsageError(f"state_dict lacks {missing}: give all weights of this model")
        tensors.update({name: values[name].contiguous() for name in tensors if not name.endswith(UNFILLED)})
        config = {**HUGGINGFACE, **self.config.package, "tied": tied}
        with filled(os.fspath(save_directory)) as folder:
            packaged.write(folder, packaged.Content(config, tensors, self.files))
        if push_to_hub:
            options = {name: kwargs[name] for name in _PUSH if name in kwargs}
            self.push_to_hub(kwargs.get("repo_id") or os.path.basename(os.path.abspath(save_directory)), **options)

    def _upload_modified_files(self, working_dir: str | os.PathLike, *args: Any, **kwargs: Any):
        """Upload the package with the original card, which transformers may have replaced, and new checksums."""
        path = os.path.join(working_dir, CARD)
        card, own = ModelCard.load(path), self.files.get(CARD, b"").decode()
        if own and "automatically generated" in card.text:  # the repository had no card
            card.text = own
            card.save(path)
        write_sums(os.fspath(working_dir))
        return super()._upload_modified_files(working_dir, *args, **kwargs)


_PUSH = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


def _type_of(given: str | torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    found = stored if given in (None, "auto") else getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"unknown dtype {given}; choose from float32, bfloat16, float16, auto")
    return found


def _device_of(given: Any) -> torch.device:
    if isinstance(given, dict) and list(given) == [""]:
        given = given[""]
    if given == "auto":
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device_map {given} is not supported; give one device, such as cuda:0, or auto") from error
