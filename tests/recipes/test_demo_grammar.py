"""The grammar of the demo corpus: correct German, word for word, on hand-written pairs."""

import sys

import pytest

from tests.helpers.paths import ROOT

DEMO = ROOT / "examples/demo"
sys.path.insert(0, str(DEMO))

from grammar import german, sentences  # noqa: E402
from grammar.english import question, statement, to_infinitive  # noqa: E402
from grammar.german import verb_final, verb_first, verb_second, zu_infinitive  # noqa: E402
from grammar.lexicon import ADJECTIVES, BE, CLAUSE_VERBS, NOUN, VERB, Phrase, Time, number_words  # noqa: E402
from grammar.phrases import (  # noqa: E402
    PLACES,
    Clause,
    NounPhrase,
    Subject,
    object_of,
    place,
    prepositional,
    pronoun_object,
    pronoun_subject,
    subject_of,
)
from grammar.sampling import Sampler  # noqa: E402

ADJECTIVE = {adjective.en: adjective for adjective in ADJECTIVES}
NOW, YESTERDAY, OFTEN = Time("now", "jetzt", "now"), Time("yesterday", "gestern", "past"), Time("often", "oft", "habit")
IN, INTO, TO = PLACES["place"][0], PLACES["goal"][0], PLACES["goal"][1]


def np(noun, det="the", adjective=None, plural=False, count=0):
    return NounPhrase(NOUN[noun], det, plural, ADJECTIVE.get(adjective), count)


def clause(subject, verb, *objects, **rest):
    """Objects are noun phrases or pronouns ("3m"); the verb's roles give their cases."""
    name = pronoun_subject(subject) if isinstance(subject, str) else subject_of(subject)
    verb = VERB.get(verb, BE)
    cases = [role for role in ("dat", "acc") if role in verb.roles]
    negated = rest.get("negated", False)
    items = tuple(
        pronoun_object(item, case) if isinstance(item, str) else object_of(item, case, negated)
        for item, case in zip(objects, cases)
    )
    return Clause(name, verb, objects=items, **rest)


WOMAN, MAN, CHILD = np("woman"), np("man"), np("child")
READS = clause(WOMAN, "read", np("book"))

STATEMENTS = {
    "present": (READS, "the woman is reading the book", "die Frau liest das Buch"),
    "perfect with haben": (
        clause(WOMAN, "buy", np("apple", "a"), tense="past", time=YESTERDAY),
        "the woman bought an apple yesterday",
        "die Frau hat gestern einen Apfel gekauft",
    ),
    "perfect with sein": (
        clause("1sg", "go", tense="past", tail=(place(INTO, "city"),)),
        "I went into the city",
        "ich bin in die Stadt gegangen",
    ),
    "separable verb, weak noun": (
        clause("2sg", "call", np("neighbour"), time=NOW),
        "you are calling the neighbour now",
        "du rufst den Nachbarn jetzt an",
    ),
    "separable participle with sein": (
        clause(CHILD, "get", tense="past", time=YESTERDAY),
        "the child got up yesterday",
        "das Kind ist gestern aufgestanden",
    ),
    "particle after a pronoun": (
        clause("1pl", "pick", "3f", tense="will"),
        "we will pick her up",
        "wir werden sie abholen",
    ),
    "modal with the infinitive last": (
        clause(np("girl", "this"), "open", np("window"), tense="want", negated=True),
        "this girl does not want to open the window",
        "dieses Mädchen will das Fenster nicht aufmachen",
    ),
    "dative verb": (
        clause(np("boy", plural=True), "help", np("friend", "my", plural=True)),
        "the boys are helping my friends",
        "die Jungen helfen meinen Freunden",
    ),
    "dative before accusative": (
        clause(np("father", "our"), "give", CHILD, np("lamp", "a", "new"), tense="past", time=YESTERDAY),
        "our father gave the child a new lamp yesterday",
        "unser Vater hat dem Kind gestern eine neue Lampe gegeben",
    ),
    "dative pronoun": (
        clause("3f", "thank", "3pl", time=OFTEN, simple=True),
        "she often thanks them",
        "sie dankt ihnen oft",
    ),
    "kein for an indefinite object": (
        clause(MAN, "drink", np("coffee", ""), negated=True),
        "the man is not drinking coffee",
        "der Mann trinkt keinen Kaffee",
    ),
    "nicht after a definite object": (
        clause("3pl", "know", np("teacher", "your"), negated=True),
        "they do not know your teacher",
        "sie kennen deinen Lehrer nicht",
    ),
    "nicht before a place": (
        clause(np("dog", "his"), "sleep", tail=(place(IN, "kitchen"),), negated=True),
        "his dog is not sleeping in the kitchen",
        "sein Hund schläft nicht in der Küche",
    ),
    "zu contracted, with an adjective": (
        clause(MAN, "go", tense="past", tail=(place(TO, "school", adjective=ADJECTIVE["old"]),)),
        "the man went to the old school",
        "der Mann ist zur alten Schule gegangen",
    ),
    "like to: gern": (
        clause(np("aunt", "her"), "eat", np("cheese", ""), tense="like"),
        "her aunt likes to eat cheese",
        "ihre Tante isst gern Käse",
    ),
    "number: units before tens": (
        clause("1sg", "see", np("horse", "", plural=True, count=21), tense="past"),
        "I saw twenty-one horses",
        "ich habe einundzwanzig Pferde gesehen",
    ),
    "was and had": (
        clause("1pl", "have", np("car", "no"), tense="past"),
        "we had no car",
        "wir hatten kein Auto",
    ),
    "predicate": (
        clause(np("suitcase", "your", plural=True), "be", tail=(Phrase("too big", "zu groß"),), negated=True),
        "your suitcases are not too big",
        "deine Koffer sind nicht zu groß",
    ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_are_word_for_word_right(name):
    meant, english, expected = STATEMENTS[name]
    assert statement(meant) == english
    assert verb_second(meant) == expected


OPENS = clause("3m", "open", np("door"))
OPENED = clause("3m", "open", np("door"), tense="past")


@pytest.mark.parametrize(
    ("english", "expected", "pair"),
    [
        ("today the woman is reading the book", "heute liest die Frau das Buch",
         (statement(READS, "today"), verb_second(READS, "heute"))),
        ("the man I know", "den Mann kenne ich",
         (statement(clause("1sg", "know"), MAN.en()), verb_second(clause("1sg", "know"), MAN.de("acc")))),
        ("is the woman reading the book", "liest die Frau das Buch", (question(READS), verb_first(READS))),
        ("did he open the door", "hat er die Tür aufgemacht", (question(OPENED), verb_first(OPENED))),
        ("who are you helping", "wem hilfst du",
         (question(clause("2sg", "help"), "who"), verb_second(clause("2sg", "help"), "wem"))),
        ("because he is opening the door", "weil er die Tür aufmacht",
         (statement(OPENS, "because"), verb_final(OPENS, "weil"))),
        ("that he opened the door", "dass er die Tür aufgemacht hat",
         (statement(OPENED, "that"), verb_final(OPENED, "dass"))),
        ("whether you can call me", "ob du mich anrufen kannst",
         (statement(clause("2sg", "call", "1sg", tense="can"), "whether"),
          verb_final(clause("2sg", "call", "1sg", tense="can"), "ob"))),
        ("to open the door", "die Tür aufzumachen", (to_infinitive(OPENS), zu_infinitive(OPENS))),
        ("to read the book", "das Buch zu lesen", (to_infinitive(READS), zu_infinitive(READS))),
        ("picks up the boy", "holt den Jungen ab",
         tuple(text.split(" ", 1)[1] for text in (
             statement(clause("3m", "pick", np("boy"), simple=True)), verb_second(clause("3m", "pick", np("boy")))))),
        ("with my children", "mit meinen Kindern",
         tuple(prepositional("with", "mit", "dat", np("child", "my", plural=True)))),
    ],
)  # fmt: skip
def test_word_orders_are_word_for_word_right(english, expected, pair):
    assert pair == (english, expected)


def test_relative_pronoun_agrees_with_the_noun_and_has_the_case_of_its_clause():
    assert [german.relative_pronoun(case, "m", False) for case in ("nom", "acc", "dat")] == ["der", "den", "dem"]
    assert [german.relative_pronoun(case, "f", False) for case in ("nom", "acc", "dat")] == ["die", "die", "der"]
    assert [german.relative_pronoun(case, "n", True) for case in ("nom", "acc", "dat")] == ["die", "die", "denen"]
    who = Subject("who", german.relative_pronoun("nom", "n", False), "3sg")
    helps = Clause(who, VERB["help"], objects=(pronoun_object("1pl", "dat"),))
    assert (statement(helps), verb_final(helps)) == ("who is helping us", "das uns hilft")


def test_a_fronted_clause_fills_the_first_field():
    rains = Clause(sentences.IT, sentences.RAIN, simple=True)
    stays = clause("1pl", "stay", tense="must", tail=(Phrase("at home", "zu Hause"),))
    assert statement(rains, "if") == "if it rains"
    assert verb_second(stays, verb_final(rains, "wenn") + ",") == "wenn es regnet, müssen wir zu Hause bleiben"


def test_infinitive_clause_follows_its_verb():
    tries = next(verb for verb in CLAUSE_VERBS if verb.en[0] == "try")
    outer = Clause(pronoun_subject("3f"), tries, "past")
    assert f"{verb_second(outer)}, {zu_infinitive(OPENS)}" == "sie hat versucht, die Tür aufzumachen"


AGREEMENT = {  # determiner: nominative, accusative, dative of an "old" masculine, feminine, neuter and plural noun
    "the": (
        ("der alte Mann", "die alte Frau", "das alte Haus", "die alten Bücher"),
        ("den alten Mann", "die alte Frau", "das alte Haus", "die alten Bücher"),
        ("dem alten Mann", "der alten Frau", "dem alten Haus", "den alten Büchern"),
    ),
    "this": (
        ("dieser alte Mann", "diese alte Frau", "dieses alte Haus", "diese alten Bücher"),
        ("diesen alten Mann", "diese alte Frau", "dieses alte Haus", "diese alten Bücher"),
        ("diesem alten Mann", "dieser alten Frau", "diesem alten Haus", "diesen alten Büchern"),
    ),
    "our": (
        ("unser alter Mann", "unsere alte Frau", "unser altes Haus", "unsere alten Bücher"),
        ("unseren alten Mann", "unsere alte Frau", "unser altes Haus", "unsere alten Bücher"),
        ("unserem alten Mann", "unserer alten Frau", "unserem alten Haus", "unseren alten Büchern"),
    ),
    "no": (
        ("kein alter Mann", "keine alte Frau", "kein altes Haus", "keine alten Bücher"),
        ("keinen alten Mann", "keine alte Frau", "kein altes Haus", "keine alten Bücher"),
        ("keinem alten Mann", "keiner alten Frau", "keinem alten Haus", "keinen alten Büchern"),
    ),
    "": (
        ("alter Mann", "alte Frau", "altes Haus", "alte Bücher"),
        ("alten Mann", "alte Frau", "altes Haus", "alte Bücher"),
        ("altem Mann", "alter Frau", "altem Haus", "alten Büchern"),
    ),
}


@pytest.mark.parametrize("det", AGREEMENT)
def test_agreement_tables(det):
    nouns = (("man", False), ("woman", False), ("house", False), ("book", True))
    made = tuple(
        tuple(np(noun, det, "old", plural).de(case) for noun, plural in nouns) for case in ("nom", "acc", "dat")
    )
    assert made == AGREEMENT[det]


def test_an_adjective_that_loses_its_e_and_the_article_a():
    assert np("milk", "my", "expensive").de("nom") == "meine teure Milch"
    assert np("suitcase", "a", "old").en() == "an old suitcase"
    assert np("egg", "a").de("acc") == "ein Ei"
    assert np("lamp", "this", plural=True).en() == "these lamps"


@pytest.mark.parametrize(
    ("value", "english", "expected"),
    [(2, "two", "zwei"), (12, "twelve", "zwölf"), (20, "twenty", "zwanzig"), (21, "twenty-one", "einundzwanzig"),
     (30, "thirty", "dreißig"), (37, "thirty-seven", "siebenunddreißig")],
)  # fmt: skip
def test_numbers(value, english, expected):
    assert number_words(value) == (english, expected)


@pytest.mark.parametrize("construction", sentences.CONSTRUCTIONS, ids=lambda function: function.__name__)
def test_every_construction_gives_well_formed_sentences(construction):
    sampler = Sampler(7)
    for _ in range(200):
        pair = construction(sampler)
        for text in pair:
            assert text[0].isupper() and text[-1] in ".?" and text == " ".join(text.split())
            assert " ," not in text and ",," not in text and not set(text) & set("{}|+_/0123456789")
        assert pair.en[-1] == pair.de[-1]


def test_translation_is_a_function_of_the_english():
    sampler, known = Sampler(11), {}
    for _ in range(60_000):
        pair = sentences.sentence(sampler)
        assert known.setdefault(pair.en, pair.de) == pair.de, pair.en
