"""Compiled kernels for translation on a CPU: layers of the encoder, and decoding steps.

``step.cpp`` and its headers define the kernels, ``library.py`` builds and loads them, ``packed.py`` packs weights, and
``steps.py`` and ``encoder.py`` run the supported layers of the decoder and of the encoder.
"""

from .library import load, status

__all__ = ["load", "status"]
