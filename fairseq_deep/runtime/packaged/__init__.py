"""Packaged models: pickle-free directories with weights, settings and dictionaries."""

from .config import read_config
from .folder import CODES, WEIGHTS, Folder, find_problems, folder_of, is_package
from .reading import Package, codes_of, load, text_files
from .writing import Content, make_config, make_tensors, write

__all__ = ["CODES", "Content", "Folder", "Package", "WEIGHTS", "codes_of", "find_problems", "folder_of", "is_package",
           "load", "make_config", "make_tensors", "read_config", "text_files", "write"]  # fmt: skip
