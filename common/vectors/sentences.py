"""Sentence encoders (sentence-transformers), and what each reads before queries and passages."""

import functools
import re
import threading
from pathlib import Path

from common import cache
from common.files import HubError, locate, say
from common.passages import read


def load_encoder(name):
    """One SentenceTransformer a content and process; a folder asks no network. Raises HubError.

    Pooling and normalisation come from the model's own modules.json; a folder without one gets mean pooling.
    """
    return _load_encoder(name, cache.digest(name))


@functools.cache
def _load_encoder(name, content):
    import torch
    from sentence_transformers import SentenceTransformer
    found = locate(name)
    say(f"loading the encoder {name}")
    try:
        encoder = SentenceTransformer(found, local_files_only=Path(found).is_dir())
    except Exception as error:  # format errors of every kind have the same remedy
        raise HubError(f"{name}: the encoder did not load ({type(error).__name__}); "
                       "give a folder or a hub id with a sentence-transformers model") from error
    if torch.cuda.is_available():
        encoder.half()
    return encoder


ENCODING = threading.Lock()  # a server asks from several threads, a fast tokenizer bears one


def encode(encoder, texts, prefix, task, progress=False):
    """(n, d) float32, rows of length 1. task: "query" or "document", for models that have layers for each."""
    with ENCODING:
        vectors = encoder.encode(texts, prompt=prefix, task=task, batch_size=64, normalize_embeddings=True,
                                 convert_to_numpy=True, show_progress_bar=progress)
    return vectors.astype("float32")


WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
PREFIXES = {  # encoders without prompts of their own, by whole names: (before queries, before passages)
    r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?": ("query: ", "passage: "),
    r"multilingual-e5-large-instruct|e5-mistral-7b-instruct": (WEB_SEARCH, ""),
    r"bge-(small|base|large)-en(-v1\.5)?": ("Represent this sentence for searching relevant passages: ", ""),
    r"bge-(small|base|large)-zh(-v1\.5)?": ("为这个句子生成表示以用于检索相关文章：", ""),
}


@functools.cache
def prefixes(name, encoder):
    """(what stands before queries, what stands before passages) for an encoder, and says so once: its own
    prompts where it has some, else those of its name in PREFIXES, else nothing."""
    own = {use: text for use, text in encoder.prompts.items() if text}
    passages = own.get("document") or own.get("passage") or own.get("corpus") or ""
    found = own.get("query", ""), passages
    source = "its own prompts"
    if not any(found):
        source = f"its name is not known, its own: {', '.join(own) or 'none'}"
        for pattern, those in PREFIXES.items():
            if re.fullmatch(pattern, _called(name)):
                found, source = those, f"those of {_called(name)}"
    say(f"encoder {name}: {found[0]!r} before queries, {found[1]!r} before passages and names ({source})")
    return found


def _called(name):
    """A model's own name in small letters, without its owner.

    >>> _called("models--intfloat--e5-base-v2/snapshots/0a1b"), _called("BAAI/bge-m3/")
    ('e5-base-v2', 'bge-m3')
    """
    path = re.sub("/snapshots/[^/]+$", "", str(Path(name).expanduser().absolute()))
    return re.split("/|--", path)[-1].lower()


MAX_TOKENS = 256  # of a passage or query that are read


class Encoder:
    """A sentence-transformers model with what it reads before queries and passages.

    It reads MAX_TOKENS tokens of each. On CUDA it works in fp16; on a CPU passages are encoded in bf16 (twice
    as fast; least cosine to fp32 .99997 with MiniLM)."""

    def __init__(self, name):
        self.name = name
        self.weights = cache.digest(name) or name
        self.model = load_encoder(name)
        self.query_prefix, self.passage_prefix = prefixes(name, self.model)
        self.model.max_seq_length = min(MAX_TOKENS, self.model.max_seq_length or MAX_TOKENS)
        self.dimension = self.queries(["x"]).shape[1]

    def queries(self, texts):
        return encode(self.model, texts, self.query_prefix, "query")

    def passages(self, corpus, numbers):
        import torch
        texts = [read(corpus[int(i)]) for i in numbers]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return encode(self.model, texts, self.passage_prefix, "document")
