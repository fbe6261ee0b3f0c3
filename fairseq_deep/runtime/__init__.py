"""Translation of raw text with trained models: packages, text processing, the translator."""

import importlib

_HOMES = {
    "bundle": ("Bundle", "find_bundle", "search_of"),
    "text": ("TextSteps",),
    "loading": ("LoadedModel", "load_model"),
    "model": ("StoredModel", "build_model", "read_stored"),
    "translator": ("Translation", "Translator"),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str):
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
