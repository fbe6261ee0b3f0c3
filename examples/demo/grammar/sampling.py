"""Random noun phrases and clauses that make sense: who can do what to whom, where and when."""

import random
from collections import defaultdict

from .lexicon import (
    ADJECTIVES,
    BE,
    CLOCK_AND_DAYS,
    MODALS,
    NOUN,
    NOUNS,
    POSSESSIVES,
    PRONOUNS,
    SPANS,
    TIMES,
    VERBS,
    Noun,
    Phrase,
    Time,
    Verb,
    number_words,
)
from .phrases import (
    HOME,
    PLACES,
    Clause,
    Item,
    NounPhrase,
    Subject,
    object_of,
    place,
    prepositional,
    pronoun_object,
    pronoun_subject,
    subject_of,
)

PLAIN = ("present", "present", "past")
FREE = (*["present"] * 11, *["past"] * 4, *MODALS, "like")
MASS = ("dish", "drink")
PARENTS = ("mother", "father")
RELATIVES = tuple(noun.en for noun in NOUNS if noun.owner == "kin")
BARRED = defaultdict(tuple, old=("child", "boy", "girl"), young=("child", "boy", "girl"), friendly=("friend",))
OWNED = ("house", "garden", "kitchen", "car")
PREPOSITIONS = {"play": ("with", "mit", "dat"), "wait": ("for", "auf", "acc")}
DEGREES = (Phrase("", ""), Phrase("", ""), Phrase("very ", "sehr "), Phrase("too ", "zu "))
WHERE = {"live": ("house", "city", "village"), "arrive": ("city", "village")}


class Sampler:
    """Draws phrases and clauses from one seeded generator."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, items):
        return items[int(self.random.random() * len(items))]

    def number(self) -> int:
        return self.pick(range(2, 13)) if self.chance(0.4) else self.pick(range(20, 40))

    def noun(self, kinds, plural: bool = False, without=()) -> Noun:
        kind = self.pick(kinds)
        fits = [noun for noun in NOUNS if noun.kind == kind and (not plural or noun.en_plural != "-")]
        return self.pick([noun for noun in fits if noun.en not in without] or fits)

    def countable(self, kinds, plural: bool) -> tuple:
        """(kinds, plural) where the kinds have a plural, or else the singular."""
        with_plural = [kind for kind in kinds if kind not in (*MASS, "place")]
        return (with_plural, True) if plural and with_plural else (kinds, False)

    def adjective(self, noun: Noun, probability: float = 0.25):
        fits = [word for word in ADJECTIVES if noun.kind in word.kinds and noun.en not in BARRED[word.en]]
        return self.pick(fits) if fits and self.chance(probability) else None

    def possessive(self) -> str:
        return self.pick(list(POSSESSIVES))

    def known(self, kinds, plural: bool = False, without=(), adjective: float = 0.2) -> NounPhrase:
        """A definite noun phrase: the, this, or a possessive (always for relatives)."""
        kinds, plural = self.countable(kinds, plural)
        noun = self.noun(kinds, plural, without)
        free = noun.owner == "free" or noun.kind == "place"
        own = noun.owner == "kin" or not free and self.chance(0.4)
        det = self.possessive() if own else "this" if self.chance(0.2) else "the"
        parent = noun.en in PARENTS
        return NounPhrase(noun, det, plural, None if parent else self.adjective(noun, adjective))

    def unknown(self, kinds, without=(), countable: bool = True) -> NounPhrase:
        """An indefinite noun phrase: a, a bare plural or mass noun, or a number."""
        kinds, plural = self.countable(kinds, self.chance(0.4))
        noun = self.noun(kinds, plural, (*PARENTS, *without))
        adjective = self.adjective(noun)
        if plural:
            return NounPhrase(noun, "", True, adjective, self.number() if countable and self.chance(0.5) else 0)
        return NounPhrase(noun, "" if noun.kind in MASS else "a", False, adjective)

    def subject(self, kinds=("person",), pronouns: float = 0.5, without=()) -> Subject:
        if "person" in kinds and self.chance(pronouns):
            return pronoun_subject(self.pick(["1sg", "1sg", "1sg", "2sg", "2sg", "2sg", *PRONOUNS]))
        if kinds == ("person",) and self.chance(0.06):
            return self.pair()
        return subject_of(self.known(kinds, plural=self.chance(0.25), without=without))

    def nobody(self) -> Subject:
        """The subject "no child", "kein Kind"."""
        return subject_of(NounPhrase(self.noun(["person"], without=RELATIVES), "no"))

    def pair(self) -> Subject:
        """Two people joined by "and", a plural subject."""
        first, second = self.known(["person"], adjective=0), self.known(["person"], adjective=0)
        while second.noun == first.noun:
            second = self.known(["person"], adjective=0)
        return Subject(f"{first.en()} and {second.en()}", f"{first.de('nom')} und {second.de('nom')}", "3pl")

    def object(self, verb: Verb, role: str, subject: Subject, negated: bool, indefinite: bool = False) -> Item:
        kinds = verb.roles[role]
        if "person" in kinds and self.chance(0.4) and verb.en[0] != "have" and not indefinite:
            others = [person for person in PRONOUNS if person[0] == "3" or person[0] != subject.person[0]]
            return pronoun_object(self.pick(others), role)
        taken = subject.en.split()
        only_known = role == "dat" or kinds == ["person"] or verb.en[0] in ("like", "know") or "place" in kinds
        if verb.en[0] == "have" or indefinite or self.chance(0.5) and not only_known:
            phrase = self.unknown(kinds, taken, countable=not negated)
            if verb.en[0] == "have" and not negated and phrase.det == "a" and self.chance(0.2):
                phrase = phrase._replace(det="no")
            return object_of(phrase, role, negated)
        return object_of(self.known(kinds, plural=self.chance(0.3), without=taken), role)

    def objects(self, verb: Verb, subject: Subject, negated: bool, gap: str | None) -> tuple:
        roles = [role for role in ("dat", "acc") if role in verb.roles and role != gap]
        return tuple(self.object(verb, role, subject, negated, role == "acc" and "dat" in verb.roles) for role in roles)

    def place(self, role: str, verb: Verb | None = None) -> Phrase:
        """A place ("in the garden"), goal ("into the garden") or spot ("on the table"); "at home" is a fixed phrase."""
        names = WHERE.get(verb.en[0]) if verb else None
        if role in HOME and not names and self.chance(0.15):
            return HOME[role]
        entry = PLACES[role][0] if names else self.pick(PLACES[role])
        noun = NOUN[self.pick(names or entry[3])]
        det = self.possessive() if noun.en in OWNED and self.chance(0.3) else "the"
        return place(entry, noun.en, det, self.adjective(noun, 0.12))

    def tail(self, verb: Verb, subject: Subject) -> tuple:
        """Prepositional objects, goals and places."""
        parts, name = [], verb.en[0]
        if "prep" in verb.roles:
            en, de, case = PREPOSITIONS[name]
            item = self.known(verb.roles["prep"], plural=self.chance(0.25), without=subject.en.split())
            parts.append(prepositional(en, de, case, item))
        if "goal" in verb.roles:
            parts.append(self.place("goal"))
        if name in WHERE or "place" in verb.roles and self.chance(0.75) or name == "play" and self.chance(0.4):
            parts.append(self.place("place", verb))
        return tuple(parts)

    def time(self, tense: str) -> Time | None:
        """A time that fits the tense; "twenty-one days ago" is "vor einundzwanzig Tagen"."""
        if tense == "past" and self.chance(0.2):
            span, count = self.pick(SPANS), number_words(self.number())
            return Time(f"{count.en} {span.en} ago", f"vor {count.de} {span.de}", "past")
        if tense == "present" and self.chance(0.7):
            return self.pick([time for time in TIMES if time.span == "habit"])
        if self.chance(0.12) and tense != "past":
            hour = number_words(self.pick(range(2, 13)))
            return Time(f"at {hour.en} o'clock", f"um {hour.de} Uhr", "future")
        if self.chance(0.35):
            return Time(*self.pick(CLOCK_AND_DAYS), "past" if tense == "past" else "future")
        spans = ("past",) if tense == "past" else ("now", "future")
        return self.pick([time for time in TIMES if time.span in spans])

    def verb(self, tense: str, gap: str | None, gap_kind: str, subject_kind: str) -> Verb:
        """A verb that has this tense, leaves this role open for this kind of noun, and takes this kind of subject."""
        barred = "now" if tense != "present" else ""
        fits = [verb for verb in VERBS if subject_kind in verb.subjects and barred not in verb.flags]
        if tense == "like":
            fits = [verb for verb in fits if "fun" in verb.flags]
        if gap:
            fits = [verb for verb in fits if gap in verb.roles and (not gap_kind or gap_kind in verb.roles[gap])]
        # A separable verb has twice as many forms to meet.
        return self.pick(fits + [verb for verb in fits if verb.prefix])

    def clause(
        self,
        subject: Subject | None = None,
        tenses=FREE,
        gap: str | None = None,
        gap_kind: str = "",
        subject_kind: str = "person",
        time: float = 0.45,
        negation: float = 0.15,
        simple: bool = False,
    ) -> Clause:
        """A clause with a fitting verb; `gap` names the role that is left open, for a question or relative clause."""
        tense = self.pick(tenses)
        verb = self.verb(tense, gap, gap_kind, subject_kind)
        subject = subject or self.subject(verb.subjects)
        timed = tense != "like" and "timeless" not in verb.flags and self.chance(time)
        when = self.time(tense) if timed else None
        habit = bool(when and when.span == "habit")
        negatable = tense not in ("must", "like") and not habit
        negated = negatable and self.chance(negation)
        tail = self.tail(verb, subject) if gap not in ("place", "goal") else ()
        if gap == "dat" and "acc" in verb.roles:
            tail = (Phrase("to", ""), *tail)
        objects = self.objects(verb, subject, negated, gap)
        return Clause(subject, verb, tense, objects, tail, when, negated, simple or habit)

    def thing(self) -> NounPhrase:
        """Something that has qualities: not a person."""
        phrase = self.known((self.pick(("text", "thing", "animal", "place", "dish", "drink")),), adjective=0.35)
        return phrase._replace(plural=phrase.noun.en_plural != "-" and self.chance(0.3))

    def state(self, tenses=PLAIN, subject: Subject | None = None, phrase: NounPhrase | None = None) -> Clause:
        """A clause with "be": a quality or a place, of a person (`subject`) or of a thing (`phrase`)."""
        if not subject and not phrase:
            subject, phrase = (self.subject(), None) if self.chance(0.6) else (None, self.thing())
        kind = phrase.noun.kind if phrase else "pred"
        if kind in ("pred", "text", "animal") and self.chance(0.3):
            tail = self.place("place" if kind == "pred" else "spot")
        else:
            told = phrase.adjective if phrase else None
            fits = [adjective for adjective in ADJECTIVES if kind in adjective.kinds and adjective != told]
            word, degree = self.pick(fits), self.pick(DEGREES)
            tail = Phrase(f"{degree.en}{word.en}", f"{degree.de}{word.de}")
        subject = subject or subject_of(phrase)
        return Clause(subject, BE, self.pick(tenses), tail=(tail,), negated=self.chance(0.2))
