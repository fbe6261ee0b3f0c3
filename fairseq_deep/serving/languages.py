"""English names of languages by their ISO 639-1 codes."""

_NAMES = (
    "af Afrikaans, ar Arabic, az Azerbaijani, be Belarusian, bg Bulgarian, bn Bengali, bs Bosnian, ca Catalan, "
    "cs Czech, cy Welsh, da Danish, de German, el Greek, en English, eo Esperanto, es Spanish, et Estonian, "
    "eu Basque, fa Persian, fi Finnish, fr French, ga Irish, gl Galician, gu Gujarati, he Hebrew, hi Hindi, "
    "hr Croatian, hu Hungarian, hy Armenian, id Indonesian, is Icelandic, it Italian, ja Japanese, ka Georgian, "
    "kk Kazakh, ko Korean, lt Lithuanian, lv Latvian, mk Macedonian, mr Marathi, ms Malay, mt Maltese, nb Norwegian, "
    "nl Dutch, pl Polish, pt Portuguese, ro Romanian, ru Russian, sk Slovak, sl Slovenian, sq Albanian, sr Serbian, "
    "sv Swedish, ta Tamil, te Telugu, th Thai, tr Turkish, uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, zh Chinese"
)
NAMES = dict(entry.split(" ") for entry in _NAMES.split(", "))


def name_of(code: str) -> str:
    """Return the name of the language, or *code* if its name is unknown."""
    return NAMES.get(code, code)
