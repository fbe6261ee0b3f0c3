"""The control task for depth: follow a table for several hops, as a translation task.

A source "h3 b f0 f1 ... f15" has the number of hops, a first symbol, and a table that maps each of 16 symbols to a
symbol: f0 is the image of the first symbol, and so on. The target is the symbol after the hops, here f(f(f(b))). Each
hop needs the result of the one before, or of half of them, so an encoder needs more layers for more hops.
"""

import random

from grammar.lexicon import Phrase

SYMBOLS = [f"s{letter}" for letter in "abcdefghijklmnop"]


def draw_hops(count: int, seed: int, most: int) -> list:
    """Distinct pairs with 1 to *most* hops, equally often; tables are drawn at random."""
    drawn, pairs, seen = random.Random(seed), [], set()
    while len(pairs) < count:
        table = [drawn.randrange(len(SYMBOLS)) for _ in SYMBOLS]
        first, hops = drawn.randrange(len(SYMBOLS)), 1 + len(pairs) % most
        source = " ".join([f"h{hops}", SYMBOLS[first], *(SYMBOLS[image] for image in table)])
        if source in seen:
            continue
        seen.add(source)
        pairs.append(Phrase(source, SYMBOLS[follow(table, first, hops)]))
    return pairs


def follow(table: list, symbol: int, hops: int) -> int:
    """The symbol after so many hops."""
    for _ in range(hops):
        symbol = table[symbol]
    return symbol
