"""German: noun phrases with case and agreement, and clauses as topological fields.

A clause is  Vorfeld | finite verb | Mittelfeld | rest of the verb,  and the finite verb moves to the end in a
subordinate clause. In the Mittelfeld stand, in this order, the subject, definite objects, time, indefinite objects,
"nicht", places and predicates.
"""

from .lexicon import MODALS, Verb

DER = {  # case: masculine, feminine, neuter, plural
    "nom": ("der", "die", "das", "die"),
    "acc": ("den", "die", "das", "die"),
    "dat": ("dem", "der", "dem", "den"),
}
STRONG = {"nom": ("er", "e", "es", "e"), "acc": ("en", "e", "es", "e"), "dat": ("em", "er", "em", "en")}
CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "zu dem": "zum", "zu der": "zur"}
BE = {"present": ("bin", "bist", "ist", "sind"), "past": ("war", "warst", "war", "waren")}
HAVE = {"present": ("habe", "hast", "hat", "haben"), "past": ("hatte", "hattest", "hatte", "hatten")}
PERSONS = {"1sg": 0, "2sg": 1, "3sg": 2, "3m": 2, "3f": 2, "1pl": 3, "3pl": 3}


def _column(gender: str, plural: bool) -> int:
    return 3 if plural else "mfn".index(gender)


def determiner(stem: str, case: str, gender: str, plural: bool) -> str:
    """The inflected determiner: "der", "dies", or an ein-word ("ein", "kein", a possessive); "" stays empty."""
    column = _column(gender, plural)
    if stem == "der":
        return DER[case][column]
    if not stem:
        return ""
    bare = stem != "dies" and (case == "nom" and column in (0, 2) or case == "acc" and column == 2)
    return stem if bare else stem + STRONG[case][column]


def adjective_ending(stem: str, case: str, gender: str, plural: bool) -> str:
    """The weak ending after an inflected determiner, the strong one where the determiner shows no case."""
    column = _column(gender, plural)
    form = determiner(stem, case, gender, plural)
    if not form or form == stem != "der":
        return STRONG[case][column]
    weak_e = not plural and (case == "nom" or case == "acc" and gender != "m")
    return "e" if weak_e else "en"


def noun_form(noun, case: str, plural: bool) -> str:
    """The noun in its case: dative plural in -n, weak nouns in their oblique form."""
    if not plural:
        return noun.de if case == "nom" else noun.oblique
    form = noun.de_plural
    return form + "n" if case == "dat" and form[-1] not in "ns" else form


def relative_pronoun(case: str, gender: str, plural: bool) -> str:
    """The relative pronoun: the article, but "denen" in the dative plural."""
    return "denen" if plural and case == "dat" else DER[case][_column(gender, plural)]


def contract(text: str) -> str:
    """Join preposition and article where German does: "in dem Garten" -> "im Garten"."""
    words = text.split(" ", 2)
    head = CONTRACTIONS.get(" ".join(words[:2]))
    return " ".join([head, *words[2:]]) if head else text


def _finite(clause) -> tuple:
    """(finite verb, separated prefix or "", non-finite rest) of a main clause."""
    verb: Verb = clause.verb
    infinitive, ich, du, er, participle = verb.de
    person = PERSONS[clause.subject.person]
    if clause.tense in MODALS:
        return MODALS[clause.tense][person], "", verb.prefix + infinitive
    if infinitive in ("sein", "haben"):
        return {"sein": BE, "haben": HAVE}[infinitive][clause.tense][person], "", ""
    if clause.tense == "past":
        return {"sein": BE, "haben": HAVE}[verb.aux]["present"][person], "", participle
    return (ich, du, er, infinitive)[person], verb.prefix, ""


def _middle(clause) -> list:
    given = [item.de for item in clause.objects if item.definite]
    new = [item.de for item in clause.objects if not item.definite]
    time = [clause.time.de] if clause.time else []
    gladly = ["gern"] if clause.tense == "like" else []
    no = any(item.negative for item in clause.objects)
    negation = ["nicht"] if clause.negated and not no else []
    return [*given, *time, *gladly, *new, *negation, *(phrase.de for phrase in clause.tail)]


def _join(parts) -> str:
    return " ".join(part for part in parts if part)


def verb_second(clause, front: str = "") -> str:
    """A main clause; `front` (or else the subject) stands before the finite verb. "Heute kauft die Frau ein Buch"."""
    finite, prefix, rest = _finite(clause)
    field = [front, finite, clause.subject.de] if front else [clause.subject.de, finite]
    return _join([*field, *_middle(clause), prefix, rest])


def verb_first(clause) -> str:
    """A yes/no question. "Kauft die Frau ein Buch"."""
    finite, prefix, rest = _finite(clause)
    return _join([finite, clause.subject.de, *_middle(clause), prefix, rest])


def verb_final(clause, front: str = "") -> str:
    """A subordinate clause; `front` is the conjunction, or the relative pronoun or question word that is no subject."""
    finite, prefix, rest = _finite(clause)
    return _join([front, clause.subject.de, *_middle(clause), rest, prefix + finite])


def zu_infinitive(clause) -> str:
    """An infinitive with "zu", which goes between prefix and verb: "die Tür aufzumachen"."""
    verb = clause.verb
    infinitive = f"{verb.prefix}zu{verb.de[0]}" if verb.prefix else f"zu {verb.de[0]}"
    return _join([*_middle(clause), infinitive])
