"""Decoding steps on a CPU in compiled code: a layer of the decoder is one call.

``step.cpp`` and its headers have the kernels, ``library.py`` builds and loads them, ``packed.py`` lays out weights for
them, ``steps.py`` runs the layers that they support.
"""

from .library import load, status

__all__ = ["load", "status"]
