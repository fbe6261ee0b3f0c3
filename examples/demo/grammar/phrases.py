"""Noun phrases, pronouns, places and clauses in both languages at once."""

from typing import NamedTuple

from . import english, german
from .lexicon import NOUN, POSSESSIVES, PRONOUNS, Adjective, Noun, Phrase, Time, Verb, number_words

STEMS = {"the": "der", "a": "ein", "no": "kein", "this": "dies", "": "", **POSSESSIVES}


class NounPhrase(NamedTuple):
    """A noun with its determiner ("" for none), number, adjective and count (0: not counted)."""

    noun: Noun
    det: str = "the"
    plural: bool = False
    adjective: Adjective | None = None
    count: int = 0

    @property
    def definite(self) -> bool:
        return self.det not in ("", "a", "no")

    def en(self) -> str:
        words = [self.adjective.en if self.adjective else "", self.noun.en_plural if self.plural else self.noun.en]
        if self.count:
            words = [number_words(self.count).en, *words]
        text = " ".join(word for word in words if word)
        if self.det == "a":
            return english.article(text)
        det = "these" if self.det == "this" and self.plural else self.det
        return f"{det} {text}" if det else text

    def de(self, case: str) -> str:
        stem, agreement = STEMS[self.det], (case, self.noun.gender, self.plural)
        words = [german.determiner(stem, *agreement)]
        if self.count:
            words.append(number_words(self.count).de)
        if self.adjective:
            words.append(self.adjective.stem + german.adjective_ending(stem, *agreement))
        words.append(german.noun_form(self.noun, case, self.plural))
        return " ".join(word for word in words if word)


class Subject(NamedTuple):
    """The subject: both languages, and the person and number that the verbs agree with."""

    en: str
    de: str
    person: str


class Item(NamedTuple):
    """An object: both languages, and what decides its place and its negation."""

    en: str
    de: str
    definite: bool = True
    pronoun: bool = False
    negative: bool = False


class Clause(NamedTuple):
    """One clause without its word order; `tail` holds places, prepositional phrases and predicates.

    `tense` is "present", "past", a modal of the lexicon, or "like" (likes to: gern); `simple` forbids the progressive.
    """

    subject: Subject
    verb: Verb
    tense: str = "present"
    objects: tuple = ()
    tail: tuple = ()
    time: Time | None = None
    negated: bool = False
    simple: bool = False


def subject_of(phrase: NounPhrase) -> Subject:
    return Subject(phrase.en(), phrase.de("nom"), "3pl" if phrase.plural else "3sg")


def pronoun_subject(person: str) -> Subject:
    english_form, _, german_form, _, _ = PRONOUNS[person]
    return Subject(english_form, german_form, person)


def pronoun_object(person: str, case: str) -> Item:
    _, english_form, _, accusative, dative = PRONOUNS[person]
    return Item(english_form, accusative if case == "acc" else dative, pronoun=True)


def object_of(phrase: NounPhrase, case: str, negated: bool = False) -> Item:
    """The object; in a negated clause an indefinite one takes "kein" in German ("not ... a")."""
    negative = negated and not phrase.definite
    german_phrase = phrase._replace(det="no") if negative else phrase
    return Item(phrase.en(), german_phrase.de(case), phrase.definite, negative=negative or phrase.det == "no")


def prepositional(en: str, de: str, case: str, phrase: NounPhrase) -> Phrase:
    """Preposition and noun phrase, contracted in German where the article is "the"."""
    text = f"{de} {phrase.de(case)}"
    return Phrase(f"{en} {phrase.en()}", german.contract(text) if phrase.det == "the" else text)


PLACES = {  # English, German, case, nouns
    "place": (
        ("in", "in", "dat", ("house", "garden", "kitchen", "city", "school", "village", "park", "car")),
        ("at", "an", "dat", ("station", "window", "table", "door")),
        ("behind", "hinter", "dat", ("house", "school", "car", "station")),
        ("in front of", "vor", "dat", ("house", "school", "car", "station")),
    ),
    "goal": (
        ("into", "in", "acc", ("house", "garden", "kitchen", "city", "village", "park")),
        ("to", "zu", "dat", ("school", "station", "car", "table", "window", "door")),
    ),
    "spot": (
        ("on", "auf", "dat", ("table", "chair", "suitcase")),
        ("under", "unter", "dat", ("table", "chair", "car", "picture")),
        ("in", "in", "dat", ("house", "kitchen", "car", "bag", "suitcase")),
    ),
}
HOME = {"place": Phrase("at home", "zu Hause"), "goal": Phrase("home", "nach Hause")}


def place(entry: tuple, name: str, det: str = "the", adjective: Adjective | None = None) -> Phrase:
    en, de, case, _ = entry
    return prepositional(en, de, case, NounPhrase(NOUN[name], det, adjective=adjective))
