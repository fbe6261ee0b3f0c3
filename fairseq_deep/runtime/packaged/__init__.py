"""Packaged models: one folder with weights, settings and dictionaries, and no pickle in it."""

from fairseq_deep.plugin.compat import register_format

from .card import make_card
from .config import read_config
from .folder import CODES, WEIGHTS, PackageError, find_problems, folder_of, is_package, place
from .reading import codes_of, load, odd_pieces
from .writing import Content, make_config, make_tensors, write

register_format(".safetensors", load)

__all__ = ["CODES", "Content", "PackageError", "WEIGHTS", "find_problems", "folder_of", "is_package",
           "codes_of", "load", "make_card", "make_config", "make_tensors", "odd_pieces", "place", "read_config",
           "write"]  # fmt: skip
