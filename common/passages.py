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


def unquoted(title):
    """A title without the quotes around it, with those that are its own.

    >>> unquoted('"Oslo"'), unquoted('"Heroes" (David Bowie album)'), unquoted('""Heroes" (album)"')
    ('Oslo', '"Heroes" (David Bowie album)', '"Heroes" (album)')
    """
    title = title.strip()
    inner = title[1:-1]
    before = inner.partition('"')[0]
    around = len(title) > 1 and title[0] == title[-1] == '"'
    opens = before[-1:] in ("", " ", "(")  # (else the first quote inside closes a name: "Ann" and "Bo")
    return inner.strip() if around and ('"' not in inner or opens) else title


def titled(title, contents):
    """(title, text) of `contents`, whose first line may be the title, given or not.

    >>> titled("", '"Oslo"\\nA capital.'), titled("Oslo", '"Oslo"\\nA capital.'), titled("", "A line.")
    (('Oslo', 'A capital.'), ('Oslo', 'A capital.'), ('', 'A line.'))
    >>> titled("", '"Heroes" (album)\\nBy Bowie.'), titled("", '"Oslo"\\n')
    (('"Heroes" (album)', 'By Bowie.'), ('Oslo', ''))
    """
    first, broken, rest = contents.partition("\n")
    first = unquoted(first)
    if broken and first == (title or first):
        return first, rest
    return title, contents
