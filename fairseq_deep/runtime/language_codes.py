"""Language codes: which language a code names, and sacreBLEU's tokenizer of that language.

Moses, jieba and sacreBLEU know languages by their codes of ISO 639-1.
"""

from __future__ import annotations

import re

_SHORT = dict(pair.split(":") for pair in """
asm:as ben:bn bod:bo bur:my cat:ca ces:cs chi:zh cmn:zh cze:cs deu:de dut:nl ekk:et ell:el eng:en est:et fin:fi fra:fr
fre:fr gan:zh ger:de gle:ga gre:el guj:gu hin:hi hun:hu ice:is isl:is ita:it jpn:ja kan:kn khm:km kor:ko lao:lo lav:lv
lit:lt lvs:lv lzh:zh mal:ml mar:mr mya:my nld:nl ori:or ory:or pan:pa pol:pl por:pt ron:ro rum:ro rus:ru slk:sk slo:sk
slv:sl spa:es swe:sv tam:ta tel:te tha:th tib:bo wuu:zh yue:zh zho:zh
""".split())  # fmt: skip
"""Codes of three letters (ISO 639-2 and 639-3) for the languages that one of the packages treats specially."""
TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", **dict.fromkeys(("bo", "km", "lo", "my", "th"), "char")}
"""sacreBLEU's tokenizers other than 13a; it has none for words of the languages with "char", which write no blanks."""


def short_code(code: str) -> str:
    """Return the language of *code* without script and region, as its code of ISO 639-1 if it is in the table.

    All usual forms are known: ISO 639 ("zh", "zho"), BCP 47 ("zh-CN"), FLORES ("zho_Hans") and mBART ("zh_CN").
    """
    language = re.split("[-_]", code.lower(), maxsplit=1)[0]
    return _SHORT.get(language, language)


def tokenizer_language(code: str) -> str:
    """Return the short code if sacreBLEU has its own tokenizer for the target language; otherwise ""."""
    language = short_code(code)
    return language if language in TOKENIZERS else ""
