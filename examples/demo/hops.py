"""The control task for depth: apply a table several times, as a translation task.

A source "h3 f0 f1 ... f15" has the number of hops k and a table that maps each of 16 symbols to a symbol: f0 is the
image of the first symbol, and so on. The target has the image of each symbol after k hops, here f(f(f(x))). Each hop
needs the result of the one before, or of half of them, so an encoder needs more layers for more hops.
"""

import random

from grammar.lexicon import Phrase

SYMBOLS = [f"s{letter}" for letter in "abcdefghijklmnop"]


def draw_hops(count: int, seed: int, most: int) -> list:
    """Distinct pairs with 1 to *most* hops, equally often; tables are drawn at random."""
    drawn, pairs, seen = random.Random(seed), [], set()
    while len(pairs) < count:
        table = [drawn.randrange(len(SYMBOLS)) for _ in SYMBOLS]
        hops, images = 1 + len(pairs) % most, list(range(len(SYMBOLS)))
        source = words([f"h{hops}"], table)
        if source in seen:
            continue
        seen.add(source)
        for _ in range(hops):
            images = [table[image] for image in images]
        pairs.append(Phrase(source, words([], images)))
    return pairs


def words(first: list, numbers: list) -> str:
    """The words *first*, and the symbols with these *numbers*."""
    return " ".join([*first, *(SYMBOLS[number] for number in numbers)])
