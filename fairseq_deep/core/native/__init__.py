"""Compiled kernels for decoding steps on a CPU; one call runs a decoder layer.

``step.cpp`` and its headers define the kernels, ``library.py`` builds and loads them, ``packed.py`` packs weights, and
``steps.py`` runs the supported layers.
"""

from .library import load, status

__all__ = ["load", "status"]
