"""Translation of raw text with trained models."""

from .bundle import Bundle, find_bundle, search_of
from .text import TextSteps
from .translator import Translation, Translator, build_model, build_task, check_merges, load_state

__all__ = ["Bundle", "TextSteps", "Translation", "Translator", "build_model", "build_task", "check_merges",
           "find_bundle", "load_state", "search_of"]  # fmt: skip
