"""Translation of raw text with trained models."""

from .bundle import Bundle, find_bundle
from .text import TextSteps
from .translator import Translation, Translator

__all__ = ["Bundle", "TextSteps", "Translation", "Translator", "find_bundle"]
