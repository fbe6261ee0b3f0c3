"""What translates the sentences of a :class:`~fairseq_deep.runtime.Translator`: our search, or CTranslate2.

`choice.py` chooses an engine. `torch_engine.py` searches with our models. The others belong to CTranslate2:
`ct2_format.py` (its format), `ct2_convert.py` (conversion and check), `ct2_cache.py` (converted models on disk) and
`ct2_engine.py` (its search).
"""

ENGINES = ("auto", "torch", "ctranslate2")
