"""Passages cut to the sentences around what a query matches (--excerpt): less to read for a small model."""

import re
from dataclasses import replace

from common.retriever import tokens

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def excerpt(text, query, characters, title=""):
    """The sentences in a row, of at most so many characters, that hold most different words of the query: the
    earliest such, the longest from there. Words that the title has are no matter. A sentence that is longer
    by itself is cut.

    >>> excerpt("Iran is old. Its film Ran won. Kurosawa made it in 1985. It was long.", "Who made Ran?", 45)
    'Its film Ran won. Kurosawa made it in 1985.'
    >>> excerpt("Kurosawa made it.", "Who?", 8)
    'Kurosawa'
    """
    wanted = set(tokens(query)) - set(tokens(title))
    sentences = SENTENCE_END.split(text)
    best, most = "", -1
    for first in range(len(sentences)):
        kept = sentences[first]
        for sentence in sentences[first + 1:]:
            if len(kept) + 1 + len(sentence) > characters:
                break
            kept += " " + sentence
        found = len(wanted & set(tokens(kept)))
        if found > most:
            best, most = kept[:characters], found
    return best


class Excerpts:
    """A retriever whose passages are excerpts of another's; all else is the other's."""

    def __init__(self, retriever, characters):
        self.retriever = retriever
        self.characters = characters

    def __getattr__(self, name):
        return getattr(self.retriever, name)

    def search(self, queries, k):
        found = []
        for query, passages in zip(queries, self.retriever.search(queries, k), strict=True):
            found.append([self.cut(p, query) for p in passages])
        return found

    def cut(self, passage, query):
        text = excerpt(passage.text, query, self.characters, passage.title)
        return replace(passage, text=text)
