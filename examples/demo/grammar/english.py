"""English: noun phrases, do-support, the progressive, particles, and the order of a clause."""

from .german import PERSONS
from .lexicon import MODALS

BE = {"present": ("am", "are", "is", "are"), "past": ("was", "were", "was", "were")}


def article(text: str) -> str:
    """The text after its "a" or "an"."""
    return ("an " if text[0] in "aeiou" else "a ") + text


def _third(clause) -> bool:
    return PERSONS[clause.subject.person] == 2


def _verb(clause, support: bool) -> tuple:
    """(auxiliary or "", main verb); `support` asks for an auxiliary, as negation and questions do."""
    base, third, ing, past = clause.verb.en
    person, tense = PERSONS[clause.subject.person], clause.tense
    if base == "be" and tense in BE:
        return BE[tense][person], ""
    if tense in ("want", "like"):
        word = f"{tense}s" if _third(clause) and not support else tense
        return ("does" if _third(clause) else "do") if support else "", f"{word} to {base}"
    if tense in MODALS:
        return tense, base
    if tense == "past":
        return ("did", base) if support else ("", past)
    if clause.simple or clause.verb.flags & {"state", "now"}:
        if support:
            return ("does" if _third(clause) else "do"), base
        return "", third if _third(clause) else base
    return BE["present"][person], ing


def _after_verb(clause, main: str) -> list:
    """Verb, particle and objects: "picks up the boy", but "picks him up"."""
    objects = [item.en for item in clause.objects]
    particle = clause.verb.particle
    if particle == "up" and clause.objects and clause.objects[0].pronoun:
        return [main, *objects, particle]
    return [main, particle, *objects]


def _order(clause, inverted: bool, early: str = "", subject: bool = True) -> str:
    aux, main = _verb(clause, support=inverted or clause.negated)
    often = clause.time.en if clause.time and clause.time.en == "often" else ""
    late = clause.time.en if clause.time and not often else ""
    negation = "not" if clause.negated else ""
    name = clause.subject.en if subject else ""
    if aux == "can" and negation and not inverted:
        aux, negation = "cannot", ""
    start = [aux, name] if inverted else [name, aux]
    end = [phrase.en for phrase in clause.tail]
    words = [early, *start, negation, often, *_after_verb(clause, main), *end, late]
    return " ".join(word for word in words if word)


def statement(clause, front: str = "") -> str:
    """Subject, verb, objects, places, time, after an optional opening word or phrase."""
    return _order(clause, inverted=False, early=front)


def question(clause, front: str = "") -> str:
    """Auxiliary before the subject, after an optional question word."""
    return _order(clause, inverted=True, early=front)


def to_infinitive(clause) -> str:
    """What follows "tries": "to open the door"."""
    end = [phrase.en for phrase in clause.tail]
    time = [clause.time.en] if clause.time else []
    return " ".join(word for word in ["to", *_after_verb(clause, clause.verb.en[0]), *end, *time] if word)
