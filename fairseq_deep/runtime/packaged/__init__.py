"""Packaged models: pickle-free directories with weights, settings and dictionaries."""

from .config import read_config
from .folder import CODES, WEIGHTS, PackageError, find_problems, folder_of, is_package, place
from .reading import Package, check_text, codes_of, load, odd_pieces, read_dictionary, text_files
from .writing import Content, make_config, make_tensors, write

__all__ = ["CODES", "Content", "Package", "PackageError", "WEIGHTS", "find_problems", "folder_of", "is_package",
           "check_text", "codes_of", "load", "make_config", "make_tensors", "odd_pieces", "place",
           "read_config", "read_dictionary", "text_files", "write"]  # fmt: skip
