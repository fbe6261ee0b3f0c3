"""Decoding against other programs, in turns: the parts of ``benchmarks/against_ctranslate2.py``."""
