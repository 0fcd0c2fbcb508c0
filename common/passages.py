"""A passage, how it is read, and what a corpus of them is known by."""

from dataclasses import dataclass

from common import cache
from common.files import UserError


class RetrieverError(UserError):
    """What cannot be searched, or not so; the message names the remedy."""


@dataclass(frozen=True)
class Passage:
    id: str
    title: str
    text: str
    score: float = 0.0


def found_in(row, score):
    """The Passage of a corpus row that was found."""
    return Passage(row["id"], row["title"], row["text"], float(score))


def read(row):
    """A corpus row as an encoder reads it."""
    return f"{row['title']}\n{row['text']}"


def identity(corpus):
    """What a corpus is known by here: a mapped one by its file, others by all their texts."""
    return getattr(corpus, "_fingerprint", "") or cache.key(map(read, corpus))


def titled(title, contents):
    """(title, text) of a passage as servers send it: a title of its own, else the first line of `contents`.

    >>> titled("", '"Oslo"\\nA capital.'), titled("Oslo", '"Oslo"\\nA capital.'), titled("", "A line.")
    (('Oslo', 'A capital.'), ('Oslo', 'A capital.'), ('', 'A line.'))
    >>> titled("", '"Heroes" (album)\\nBy Bowie.'), titled("", '"Oslo"\\n')
    (('"Heroes" (album)', 'By Bowie.'), ('Oslo', ''))
    """
    first, broken, rest = contents.partition("\n")
    first = first.strip()
    if first.count('"') == 2 and first[0] == first[-1] == '"':
        first = first[1:-1]
    if title:
        return title, rest if first == title else contents
    return (first, rest) if broken else ("", contents)
