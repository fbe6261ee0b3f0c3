"""Sentences: one function per construction, and how often each is drawn."""

from bisect import bisect
from itertools import accumulate

from .english import question, statement, to_infinitive
from .german import relative_pronoun, verb_final, verb_first, verb_second, zu_infinitive
from .lexicon import BE, CLAUSE_VERBS, COST, RAIN, VERB, Phrase, number_words
from .phrases import Clause, NounPhrase, Subject, object_of, pronoun_subject, subject_of
from .sampling import RELATIVES, Sampler

NOW = (*["present"] * 7, "can", "must", "want", "should", "will")
PLAIN = ("present", "past")
WHO, WHAT = Subject("who", "wer", "3sg"), Subject("what", "was", "3sg")
IT = Subject("it", "es", "3sg")
CONJUNCTIONS = (Phrase("because", "weil"), Phrase("because", "weil"), Phrase("although", "obwohl"))
KNOW, SAY, THINK, ASK, TRY, FORGET = CLAUSE_VERBS


def finish(en: str, de: str, mark: str = ".") -> Phrase:
    """The finished sentence: a capital first, the mark last."""
    return Phrase(en[0].upper() + en[1:] + mark, de[0].upper() + de[1:] + mark)


def main_clause(s: Sampler) -> Phrase:
    """The subject first."""
    clause = s.clause(s.nobody(), negation=0) if s.chance(0.06) else s.clause(time=0.5)
    return finish(statement(clause), verb_second(clause))


def time_first(s: Sampler) -> Phrase:
    """V2: with the time in front, the subject follows the German verb."""
    clause = s.clause(tenses=(*["present"] * 6, *["past"] * 3, "can", "must", "want", "should", "will"), time=0)
    while "timeless" in clause.verb.flags:
        clause = s.clause(tenses=("present", "past"), time=0)
    when = s.time(clause.tense)
    while when.en == "often" or when.span == "habit" and clause.negated:
        when = s.time(clause.tense)
    clause = clause._replace(simple=when.span == "habit")
    return finish(statement(clause, when.en), verb_second(clause, when.de))


def object_first(s: Sampler) -> Phrase:
    """V2 with the object in front, in contrast: "The dog I like, but the cat I do not like." """
    verb = s.pick((VERB["like"], VERB["know"]))
    subject = pronoun_subject(s.pick(("1sg", "1sg", "2sg", "3m", "3f", "1pl")))
    kinds = [s.pick(verb.roles["acc"])]
    first = s.known(kinds)
    second = s.known(kinds, without=[first.noun.en])
    yes = Clause(subject, verb)
    no = yes._replace(negated=True)
    if s.chance(0.5):
        yes, no = no, yes
    en = f"{statement(yes, first.en())}, but {statement(no, second.en())}"
    return finish(en, f"{verb_second(yes, first.de('acc'))}, aber {verb_second(no, second.de('acc'))}")


def yes_no_question(s: Sampler) -> Phrase:
    """The German verb first."""
    clause = s.state() if s.chance(0.15) else s.clause(s.pick((None, pronoun_subject("2sg"))), negation=0, time=0.45)
    clause = clause._replace(negated=False)
    return finish(question(clause), verb_first(clause), "?")


def _asked(s: Sampler) -> tuple:
    """(question word, clause) of a direct or indirect question; the word is "" when it is the subject."""
    subject = s.pick((None, pronoun_subject("2sg")))
    form = s.pick(("who", "whom", "to whom", "what", "where", "where to", "why", "why", "when"))
    tenses = ("present", "past", "can", "want", "should", "will")
    if form == "who":
        return Phrase("", ""), s.clause(WHO, ("present", "past", "can", "want", "like", "will"), negation=0)
    if form in ("whom", "to whom"):
        role = "acc" if form == "whom" else "dat"
        word = Phrase("who", "wen" if role == "acc" else "wem")
        return word, s.clause(subject, PLAIN, gap=role, gap_kind="person", negation=0, time=0.5)
    if form == "what":
        kind = s.pick(("text", "food", "thing"))
        return Phrase("what", "was"), s.clause(subject, tenses, gap="acc", gap_kind=kind, negation=0, time=0.5)
    if form == "where" and s.chance(0.5):
        phrase = s.known(s.pick((("text",), ("animal",), ("person",))), plural=s.chance(0.3))
        return Phrase("where", "wo"), Clause(subject_of(phrase), BE, s.pick(PLAIN))
    if form in ("where", "where to"):
        role = "place" if form == "where" else "goal"
        clause = s.clause(subject, tenses, gap=role, negation=0, time=0.4)
        while clause.verb is VERB["come"]:
            clause = s.clause(subject, tenses, gap=role, negation=0, time=0.4)
        return Phrase("where", "wo" if role == "place" else "wohin"), clause
    if form == "when":
        return Phrase("when", "wann"), s.clause(subject, ("past", "can", "want", "will"), time=0, negation=0)
    return Phrase("why", "warum"), s.clause(subject, ("present", "past", "want"), negation=0.25)


def wh_question(s: Sampler) -> Phrase:
    """The question word first, in its case ("wen", "wem")."""
    if s.chance(0.12):
        kind = s.pick(("text", "food", "thing"))
        clause = s.clause(tenses=("past", "want", "can"), gap="acc", gap_kind=kind, negation=0, time=0.3)
        item = NounPhrase(s.noun((kind,), plural=True), "", True)
        en, de = f"how many {item.en()}", f"wie viele {item.de('acc')}"
        return finish(question(clause, en), verb_second(clause, de), "?")
    if s.chance(0.08):
        clause = Clause(s.subject(), BE)
        return finish(question(clause, "how old"), verb_second(clause, "wie alt"), "?")
    word, clause = _asked(s)
    if not word.en:
        return finish(statement(clause), verb_second(clause), "?")
    return finish(question(clause, word.en), verb_second(clause, word.de), "?")


def _reason(s: Sampler, past: bool) -> Clause:
    tenses = ("past",) if past else NOW
    draw = s.random.random()
    if draw < 0.12:
        return Clause(IT, RAIN, "past" if past else "present")
    if draw < 0.35:
        return s.state(tenses[:1])
    return s.clause(s.subject(pronouns=0.7), tenses)


def subordinate_last(s: Sampler) -> Phrase:
    """A verb-final clause after the main clause."""
    past, word = s.chance(0.3), s.pick(CONJUNCTIONS)
    main, reason = s.clause(tenses=("past",) if past else NOW, time=0.2), _reason(s, past)
    en, de = statement(reason, word.en), verb_final(reason, word.de)
    return finish(f"{statement(main)} {en}", f"{verb_second(main)}, {de}")


def subordinate_first(s: Sampler) -> Phrase:
    """A verb-final clause in front, so that the main clause begins with its verb."""
    if s.chance(0.6):
        word, reason = Phrase("if", "wenn"), _reason(s, False)
        if reason.tense != "present":
            reason = s.clause(tenses=("present",), time=0.1)
        reason, tenses = reason._replace(simple=True), ("can", "must", "want", "should", "will")
    else:
        past = s.chance(0.3)
        word, reason, tenses = s.pick(CONJUNCTIONS), _reason(s, past), ("past",) if past else NOW
    main = s.clause(s.subject(pronouns=0.7), tenses, time=0.1)
    # In German the subordinate clause, with its comma, is the first field of the main clause.
    en, de = f"{statement(reason, word.en)},", f"{verb_final(reason, word.de)},"
    return finish(statement(main, en), verb_second(main, de))


def content_clause(s: Sampler) -> Phrase:
    """dass, ob and indirect questions: all verb-final."""
    inner = s.state() if s.chance(0.25) else s.clause(s.subject(pronouns=0.4), time=0.25)
    person = s.subject(pronouns=0.75)
    draw = s.random.random()
    if draw < 0.45:
        outer = Clause(person, s.pick((KNOW, SAY, THINK)))
        en, de = statement(inner, "that"), verb_final(inner, "dass")
        return finish(f"{statement(outer)} {en}", f"{verb_second(outer)}, {de}")
    inner = inner._replace(negated=False)
    if draw < 0.7:
        word = Phrase("whether", "ob")
    else:
        word, inner = _asked(s)
    if s.chance(0.3):
        outer = Clause(pronoun_subject("2sg"), KNOW)
        en, de, mark = question(outer), verb_first(outer), "?"
    else:
        asks = Clause(person, ASK, "past" if inner.tense == "past" else "present")
        outer = s.pick((Clause(person, KNOW, negated=True), asks))
        en, de, mark = statement(outer), verb_second(outer), "."
    return finish(f"{en} {statement(inner, word.en)}", f"{de}, {verb_final(inner, word.de)}", mark)


def _antecedent(s: Sampler, kind: str, without=()) -> NounPhrase:
    """What a relative clause describes: "the", since a possessive already says which one."""
    phrase = s.known((kind,), plural=s.chance(0.25), without=(*RELATIVES, *without), adjective=0.08)
    return phrase if phrase.det == "this" else phrase._replace(det="the")


def _relative(s: Sampler, phrase: NounPhrase) -> tuple:
    """(relative clause, its verb); its pronoun takes gender and number from the noun, and case from its own clause."""
    kind, agreement = phrase.noun.kind, (phrase.noun.gender, phrase.plural)
    word = "who" if kind == "person" else "that"
    roles = ["nom"] if kind in ("person", "animal") else []
    roles += ["acc"] + (["dat"] if kind == "person" else [])
    role = s.pick(roles)
    pronoun = relative_pronoun(role, *agreement)
    if role == "nom":
        subject = Subject(word, pronoun, "3pl" if phrase.plural else "3sg")
        clause = s.clause(subject, PLAIN, subject_kind=kind, time=0.2)
        return Phrase(statement(clause), verb_final(clause)), clause.verb
    clause = s.clause(s.subject(pronouns=0.7), PLAIN, gap=role, gap_kind=kind, time=0.2, negation=0.1)
    return Phrase(statement(clause, word), verb_final(clause, pronoun)), clause.verb


def relative_to_subject(s: Sampler) -> Phrase:
    """Between commas, after the subject."""
    phrase = _antecedent(s, s.pick(("person", "person", "animal", "text", "thing")))
    (relative, verb), subject = _relative(s, phrase), subject_of(phrase)
    kind = phrase.noun.kind
    if kind in ("person", "animal") and s.chance(0.5):
        clause = s.clause(subject, subject_kind=kind, time=0.1)
    else:
        clause = s.state(subject=subject) if kind == "person" else s.state(phrase=phrase)
    if clause.verb is verb:
        return relative_to_subject(s)
    described = subject._replace(en=f"{subject.en} {relative.en}", de=f"{subject.de}, {relative.de},")
    clause = clause._replace(subject=described)
    return finish(statement(clause), verb_second(clause))


def relative_to_object(s: Sampler) -> Phrase:
    """At the end of the sentence, after the rest of the German verb."""
    role = s.pick(("acc", "acc", "dat"))
    kind = "person" if role == "dat" else s.pick(("person", "person", "animal", "text", "thing"))
    tenses = ("present", "past", "can", "want", "will")
    clause = s.clause(tenses=tenses, gap=role, gap_kind=kind, time=0, negation=0)
    while clause.tail or clause.objects:  # the object must come last in English
        clause = s.clause(tenses=tenses, gap=role, gap_kind=kind, time=0, negation=0)
    phrase = _antecedent(s, kind, clause.subject.en.split())
    relative, verb = _relative(s, phrase)
    if clause.verb is verb:
        return relative_to_object(s)
    clause = clause._replace(objects=(object_of(phrase, role),))
    return finish(f"{statement(clause)} {relative.en}", f"{verb_second(clause)}, {relative.de}")


def quality(s: Sampler) -> Phrase:
    """A quality or a place with "be"."""
    clause = s.state()
    return finish(statement(clause), verb_second(clause))


def this_is(s: Sampler) -> Phrase:
    """ "This is my new table." "Das ist mein neuer Tisch." """
    kinds = (s.pick(("person", "animal", "text", "thing", "food", "opening", "place", "drink", "dish")),)
    phrase = s.known(kinds, plural=s.chance(0.25), adjective=0.9)
    if phrase.noun.owner != "kin" and s.chance(0.4) and phrase.noun.kind not in ("dish", "drink"):
        phrase = phrase._replace(det="" if phrase.plural else "a")
    elif phrase.det in ("this", "the"):
        phrase = phrase._replace(det=s.possessive() if phrase.noun.owner != "free" else "the")
    negated = s.chance(0.25)
    item = object_of(phrase, "nom", negated)
    subject = Subject("these", "das", "3pl") if phrase.plural else Subject("this", "das", "3sg")
    clause = Clause(subject, BE, objects=(item,), negated=negated)
    if negated and not item.negative:  # "nicht" stands before a predicate noun, not after it as after an object
        return finish(statement(clause), verb_second(clause._replace(objects=(), tail=(Phrase("", item.de),))))
    return finish(statement(clause), verb_second(clause))


def there_is(s: Sampler) -> Phrase:
    """ "In the room there is ...": "es gibt" with the accusative."""
    inside = s.chance(0.6)
    where = s.place("place" if inside else "spot")
    while where.en.startswith("at "):
        where = s.place("place")
    phrase = s.unknown((s.pick(("thing", "animal", "person") if inside else ("text", "food")),), RELATIVES)
    item = object_of(phrase, "acc")
    verb = "are" if phrase.plural else "is"
    if s.chance(0.25):
        return finish(f"{verb} there {item.en} {where.en}", f"gibt es {where.de} {item.de}", "?")
    return finish(f"{where.en} there {verb} {item.en}", f"{where.de} gibt es {item.de}")


def age_or_price(s: Sampler) -> Phrase:
    """Numbers: "is twenty-one years old", "costs forty-three euros"."""
    if s.chance(0.5):
        count = number_words(s.pick(range(20, 40)))
        clause = Clause(s.subject(), BE, tail=(Phrase(f"{count.en} years old", f"{count.de} Jahre alt"),))
    else:
        count = number_words(s.number())
        phrase = s.known((s.pick(("thing", "thing", "dish", "drink", "food")),), plural=s.chance(0.3), adjective=0.4)
        clause = Clause(subject_of(phrase), COST, tail=(Phrase(f"{count.en} euros", f"{count.de} Euro"),))
    clause = clause._replace(negated=s.chance(0.15))
    return finish(statement(clause), verb_second(clause))


def two_clauses(s: Sampler) -> Phrase:
    """Two main clauses with "and" or "but"."""
    past = s.chance(0.3)
    tenses = ("past",) if past else NOW
    first, second = (s.clause(tenses=tenses, time=0.2, negation=0.1) for _ in range(2))
    word = s.pick((Phrase("and", " und"), Phrase("but", ", aber")))
    en, de = f"{statement(first)}, {word.en}", f"{verb_second(first)}{word.de}"
    return finish(f"{en} {statement(second)}", f"{de} {verb_second(second)}")


def infinitive_clause(s: Sampler) -> Phrase:
    """ "zu" with the infinitive, inside a separable verb: "aufzumachen"."""
    verb = s.pick((TRY, TRY, FORGET))
    tense = "past" if verb is FORGET else s.pick(PLAIN)
    outer = Clause(s.subject(pronouns=0.6), verb, tense, negated=verb is FORGET and s.chance(0.2))
    inner = s.clause(outer.subject, ("can",), time=0, negation=0)
    return finish(f"{statement(outer)} {to_infinitive(inner)}", f"{verb_second(outer)}, {zu_infinitive(inner)}")


CONSTRUCTIONS = {
    main_clause: 16,
    time_first: 12,
    object_first: 3,
    yes_no_question: 9,
    wh_question: 8,
    subordinate_last: 9,
    subordinate_first: 10,
    content_clause: 9,
    relative_to_subject: 5,
    relative_to_object: 4,
    quality: 5,
    this_is: 6,
    there_is: 3,
    age_or_price: 3,
    two_clauses: 6,
    infinitive_clause: 7,
}
_BOUNDS = list(accumulate(CONSTRUCTIONS.values()))
_FUNCTIONS = list(CONSTRUCTIONS)


def sentence(s: Sampler) -> Phrase:
    """One sentence pair."""
    return _FUNCTIONS[bisect(_BOUNDS, s.random.random() * _BOUNDS[-1])](s)
