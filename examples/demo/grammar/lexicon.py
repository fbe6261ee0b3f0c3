"""The words of the demo: one readable table per word class, one English word for one German word.

No English noun, adjective or verb stands twice with different German words, except where the sentence decides
("know" with an object is *kennen*, with a clause *wissen*). "you" is always *du*.
"""

from typing import NamedTuple


class Phrase(NamedTuple):
    """A finished piece of both languages."""

    en: str
    de: str


class Noun(NamedTuple):
    """A noun with its plural forms; `oblique` is the accusative and dative singular (weak nouns add -n).

    `owner` is "kin" where a possessive is expected ("my aunt"), "free" where none is ("the woman").
    """

    en: str
    en_plural: str
    de: str
    de_plural: str
    oblique: str
    gender: str
    kind: str
    owner: str


class Verb(NamedTuple):
    """A verb: English base, -s, -ing and past forms, German infinitive, ich, du and er forms and participle.

    `particle` is the English particle, `prefix` the German separable prefix (the German forms here are without it),
    `roles` maps "acc", "dat", "prep", "place" and "goal" to the kinds of noun that may fill them.
    """

    en: tuple
    de: tuple
    particle: str
    prefix: str
    aux: str
    subjects: tuple
    roles: dict
    flags: frozenset


class Time(NamedTuple):
    """A time adverbial; `span` is "now", "future", "past" or "habit"."""

    en: str
    de: str
    span: str


# English singular and plural, German singular (/ oblique form of a weak noun) and plural, gender, kind, owner;
# "-": no plural.
NOUN_TABLE = """
man men            Mann Männer              m person free
woman women        Frau Frauen              f person free
child children     Kind Kinder              n person
boy boys           Junge/Jungen Jungen      m person free
girl girls         Mädchen Mädchen          n person free
friend friends     Freund Freunde           m person
neighbour neighbours  Nachbar/Nachbarn Nachbarn  m person
teacher teachers   Lehrer Lehrer            m person
brother brothers   Bruder Brüder            m person kin
sister sisters     Schwester Schwestern     f person kin
mother -           Mutter -                 f person kin
father -           Vater -                  m person kin
aunt aunts         Tante Tanten             f person kin
dog dogs           Hund Hunde               m animal
cat cats           Katze Katzen             f animal
horse horses       Pferd Pferde             n animal
book books         Buch Bücher              n text
letter letters     Brief Briefe             m text
newspaper newspapers  Zeitung Zeitungen     f text
apple apples       Apfel Äpfel              m food
egg eggs           Ei Eier                  n food
soup -             Suppe -                  f dish
cheese -           Käse -                   m dish
bread -            Brot -                   n dish
coffee -           Kaffee -                 m drink
milk -             Milch -                  f drink
water -            Wasser -                 n drink
door doors         Tür Türen                f opening
window windows     Fenster Fenster          n opening
suitcase suitcases Koffer Koffer            m opening
chair chairs       Stuhl Stühle             m thing
table tables       Tisch Tische             m thing
lamp lamps         Lampe Lampen             f thing
bag bags           Tasche Taschen           f thing
picture pictures   Bild Bilder              n thing
car cars           Auto Autos               n thing
house -            Haus -                   n place
garden -           Garten -                 m place
kitchen -          Küche -                  f place
city -             Stadt -                  f place
school -           Schule -                 f place
village -          Dorf -                   n place
park -             Park -                   m place
station -          Bahnhof -                m place
"""

# English forms (base, -s, -ing, past; "-": unused) [particle] | German infinitive, ich, du, er, participle | subjects |
# role=kinds | flags. "auf+machen" marks a separable prefix, "+sein" the auxiliary. Flags: state (no -ing form in
# English), now (only the simple present), past (only the past), timeless (no adverbial of time), fun (after "like to").
VERB_TABLE = """
see sees seeing saw             | sehen sehe siehst sieht gesehen | person animal | acc=person,animal,thing | state
buy buys buying bought          | kaufen kaufe kaufst kauft gekauft | person | acc=goods | fun
read reads reading read         | lesen lese liest liest gelesen | person | acc=text | fun
know knows - -                  | kennen kenne kennst kennt - | person | acc=person,animal,text,place | timeless now
like likes - -                  | mögen mag magst mag - | person | acc=person,animal,dish,drink,place | timeless now
have has having had             | haben habe hast hat gehabt | person | acc=animal,text,thing | state timeless
need needs - -                  | brauchen brauche brauchst braucht - | person | acc=goods | now
look looks looking looked for   | suchen suche suchst sucht gesucht | person | acc=person,animal,text,thing |
eat eats eating ate             | essen esse isst isst gegessen | person animal | acc=food,dish | fun
drink drinks drinking drank     | trinken trinke trinkst trinkt getrunken | person | acc=drink | fun
visit visits visiting visited   | besuchen besuche besuchst besucht besucht | person | acc=person,place | fun
help helps helping helped       | helfen helfe hilfst hilft geholfen | person | dat=person,animal | fun
thank thanks thanking thanked   | danken danke dankst dankt gedankt | person | dat=person |
give gives giving gave          | geben gebe gibst gibt gegeben | person | dat=person acc=text,food,drink,thing |
show shows showing showed       | zeigen zeige zeigst zeigt gezeigt | person | dat=person acc=text,thing |
call calls calling called       | an+rufen rufe rufst ruft gerufen | person | acc=person | fun
invite invites inviting invited | ein+laden lade lädst lädt geladen | person | acc=person | fun
pick picks picking picked up    | ab+holen hole holst holt geholt | person | acc=person,text,thing |
open opens opening opened       | auf+machen mache machst macht gemacht | person | acc=opening |
close closes closing closed     | zu+machen mache machst macht gemacht | person | acc=opening |
get gets getting got up         | auf+stehen+sein stehe stehst steht gestanden | person | |
arrive arrives arriving arrived | an+kommen+sein komme kommst kommt gekommen | person | place |
work works working worked       | arbeiten arbeite arbeitest arbeitet gearbeitet | person | place | fun
sleep sleeps sleeping slept     | schlafen schlafe schläfst schläft geschlafen | person animal | place | fun
play plays playing played       | spielen spiele spielst spielt gespielt | person | prep=person,animal | fun
wait waits waiting waited       | warten warte wartest wartet gewartet | person animal | prep=person |
live lives living lived         | wohnen wohne wohnst wohnt gewohnt | person | place | state timeless fun
go goes going went              | gehen+sein gehe gehst geht gegangen | person | goal | fun
come comes coming came          | kommen+sein komme kommst kommt gekommen | person animal | goal | fun
stay stays staying stayed       | bleiben+sein bleibe bleibst bleibt geblieben | person animal | place | fun
"""

# Verbs that take a clause; the same columns, the role names the conjunction ("zu": an infinitive).
CLAUSE_VERB_TABLE = """
know knows - -                  | wissen weiß weißt weiß - | person | dass | now
say says - said                 | sagen sage sagst sagt gesagt | person | dass | state
think thinks - -                | glauben glaube glaubst glaubt - | person | dass | now
ask asks - asked                | fragen frage fragst fragt gefragt | person | ob | state
try tries trying tried          | versuchen versuche versuchst versucht versucht | person | zu |
forget forgets - forgot         | vergessen vergesse vergisst vergisst vergessen | person | zu | past
"""

# English, German base form, stem before an ending, kinds of noun; "pred": only after a form of "be".
ADJECTIVE_TABLE = """
old        alt        alt        person animal text thing place
young      jung       jung       person
friendly   freundlich freundlich person animal pred
small      klein      klein      animal food thing place opening
big        groß       groß       animal food thing place opening
new        neu        neu        text thing opening
expensive  teuer      teur       thing dish drink
good       gut        gut        text dish drink
beautiful  schön      schön      animal thing place
tired      müde       -          pred
ill        krank      -          pred
hungry     hungrig    -          pred
"""

GROUPS = {"goods": ["text", "food", "dish", "drink", "thing"]}  # a name for several kinds

PRONOUNS = {  # person and number: English subject, object; German nominative, accusative, dative
    "1sg": ("I", "me", "ich", "mich", "mir"),
    "2sg": ("you", "you", "du", "dich", "dir"),
    "3m": ("he", "him", "er", "ihn", "ihm"),
    "3f": ("she", "her", "sie", "sie", "ihr"),
    "1pl": ("we", "us", "wir", "uns", "uns"),
    "3pl": ("they", "them", "sie", "sie", "ihnen"),
}

POSSESSIVES = {"my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser"}

MODALS = {  # English: German ich, du, er, wir forms
    "can": ("kann", "kannst", "kann", "können"),
    "must": ("muss", "musst", "muss", "müssen"),
    "want": ("will", "willst", "will", "wollen"),
    "should": ("sollte", "solltest", "sollte", "sollten"),
    "will": ("werde", "wirst", "wird", "werden"),
}

TIMES = [
    Time("now", "jetzt", "now"),
    Time("today", "heute", "now"),
    Time("tomorrow", "morgen", "future"),
    Time("next week", "nächste Woche", "future"),
    Time("yesterday", "gestern", "past"),
    Time("last week", "letzte Woche", "past"),
    Time("last year", "letztes Jahr", "past"),
    Time("every day", "jeden Tag", "habit"),
    Time("every evening", "jeden Abend", "habit"),
    Time("often", "oft", "habit"),
]

CLOCK_AND_DAYS = [  # fit the future and the past
    Phrase("on Monday", "am Montag"),
    Phrase("on Friday", "am Freitag"),
    Phrase("on Sunday", "am Sonntag"),
    Phrase("in the morning", "am Morgen"),
    Phrase("in the evening", "am Abend"),
]

SPANS = [Phrase("days", "Tagen"), Phrase("weeks", "Wochen"), Phrase("years", "Jahren")]  # dative, after "vor"

UNITS = ["", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
UNITS_DE = ["", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
TENS = {20: Phrase("twenty", "zwanzig"), 30: Phrase("thirty", "dreißig")}


def number_words(value: int) -> Phrase:
    """The number in words, 2 to 12 and 20 to 39: in German the unit stands first (21: "einundzwanzig")."""
    if value < len(UNITS):
        return Phrase(UNITS[value], UNITS_DE[value])
    ten, unit = TENS[value // 10 * 10], value % 10
    if not unit:
        return ten
    return Phrase(f"{ten.en}-{UNITS[unit]}", f"{UNITS_DE[unit]}und{ten.de}")


def _rows(table: str) -> list:
    return [line for line in table.splitlines() if line.strip()]


def _noun(row: str) -> Noun:
    en, en_plural, de, de_plural, gender, kind, *owner = row.split()
    de, _, oblique = de.partition("/")
    return Noun(en, en_plural, de, de_plural, oblique or de, gender, kind, "".join(owner))


def _verb(row: str) -> Verb:
    english, german, subjects, roles, flags = (part.split() for part in (row + " |" * (4 - row.count("|"))).split("|"))
    stem, *rest = german[0].split("+")
    aux = "sein" if "sein" in rest else "haben"
    prefix = stem if rest and rest[0] != "sein" else ""
    infinitive = rest[0] if prefix else stem
    participle = prefix + german[4]
    particle = english[4] if len(english) == 5 else ""
    filled = {name: GROUPS.get(kinds) or kinds.split(",") for name, _, kinds in (role.partition("=") for role in roles)}
    forms = (infinitive, *german[1:4], participle)
    return Verb(tuple(english[:4]), forms, particle, prefix, aux, tuple(subjects), filled, frozenset(flags))


class Adjective(NamedTuple):
    """An adjective; `stem` takes the endings and is None for one that only follows "be"."""

    en: str
    de: str
    stem: str | None
    kinds: tuple


def _adjective(row: str) -> Adjective:
    en, de, stem, *kinds = row.split()
    return Adjective(en, de, None if stem == "-" else stem, tuple(kinds))


NOUNS = [_noun(row) for row in _rows(NOUN_TABLE)]
VERBS = [_verb(row) for row in _rows(VERB_TABLE)]
CLAUSE_VERBS = [_verb(row) for row in _rows(CLAUSE_VERB_TABLE)]
ADJECTIVES = [_adjective(row) for row in _rows(ADJECTIVE_TABLE)]
NOUN = {noun.en: noun for noun in NOUNS}
VERB = {verb.en[0]: verb for verb in VERBS}
BE = _verb("be - - - | sein - - - - | |")
RAIN = _verb("rain rains raining rained | regnen - - regnet geregnet | |")
COST = _verb("cost costs - - | kosten - - kostet - | thing | | now")
