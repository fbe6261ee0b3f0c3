"""Search for translations, on a CPU or a GPU."""

from .beam_search import BeamSearch
from .options import SearchOptions

__all__ = ["BeamSearch", "SearchOptions"]
