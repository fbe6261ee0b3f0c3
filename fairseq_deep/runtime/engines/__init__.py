"""Engines of a :class:`~fairseq_deep.runtime.Translator`: beam search with our models, or CTranslate2.

`choice.py` selects an engine. `torch_engine.py` searches with our models. The other modules implement CTranslate2:
`ct2_format.py` (its format), `ct2_convert.py` (conversion and check), `ct2_cache.py` (converted models on disk) and
`ct2_engine.py` (its search).
"""

ENGINES = ("auto", "torch", "ctranslate2")
"""Names of the engines; "auto" is CTranslate2 if it gives the same translations, otherwise "torch"."""
