"""Texts that are nearly another one."""

import random


def mutations(text: str, count: int, alphabet: str) -> list[str]:
    """So many different texts, each a few small changes away from `text`; the same every time."""
    generator = random.Random(20_240_607)
    found: set[str] = set()
    while len(found) < count:
        found.add(_mutated(text, generator, alphabet))
        found.discard(text)
    return sorted(found)


def _mutated(text: str, generator: random.Random, alphabet: str) -> str:
    letters = list(text)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(letters) + 1)
        match generator.randrange(4):
            case 0 if at < len(letters):
                letters[at] = generator.choice(alphabet)
            case 1:
                letters.insert(at, generator.choice(alphabet))
            case 2 if at < len(letters):
                del letters[at]
            case _:
                other = generator.randrange(len(letters)) if letters else 0
                if at < len(letters):
                    letters[at], letters[other] = letters[other], letters[at]
    return "".join(letters)
