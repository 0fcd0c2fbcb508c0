"""Text on its way into a model: chat templates, and text from outside that may try to be more than text.

Passages, titles, questions, tool results and graph descriptions are Foreign: in their ids no added token of the
tokenizer occurs, special or not (single letters apart), and no tag can be read. What a script writes itself
(instructions, tags, the template's role marks) is plain str.

    render_chat(tokenizer, [("system", INSTRUCTIONS), ("user", ["Question:", Foreign(f" {question}")])])
    text, ids = encode(tokenizer, "<result>\\n", Foreign(passages), "\\n</result>")
"""

import functools
import re

import jinja2


class TemplateError(ValueError):
    """A chat template that cannot render the conversation."""


class Foreign(str):
    """Text of a data set, a retriever or a tool."""


@functools.lru_cache(maxsize=16)
def added_tokens(tokenizer):
    """(ids of the tokenizer's added tokens, pattern of their texts). Left out is what can only be text: the unknown token, which any
    odd word may become, runs of blanks, and single letters (some tokenizers have added "ü")."""
    special = {text: tokenizer.convert_tokens_to_ids(text) for text in tokenizer.all_special_tokens}
    added = {text: i for text, i in {**tokenizer.get_added_vocab(), **special}.items()
             if text != tokenizer.unk_token and text.strip() and not (len(text) == 1 and text.isalpha())}
    longest_first = sorted(added, key=len, reverse=True)
    return frozenset(added.values()), re.compile("|".join(map(re.escape, longest_first)) or r"(?!)", re.IGNORECASE)


def harmless(tokenizer, text):
    """The text without halves of surrogate pairs, with "<" before anything but a space, a digit or "=" as a look-alike, and with
    every spelling of an added token broken up by a space (a sign that is one becomes a space)."""
    text = str(text).encode("utf-8", "replace").decode()
    text = re.sub(r"<(?=[^\s\d=<])", "‹", text)
    _, pattern = added_tokens(tokenizer)
    for _ in range(8):  # what is broken up may spell another; whatever is left, `encode` takes out
        if not pattern.search(text):
            break
        text = pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}" if len(m[0]) > 1 else " ", text)
    return text


@functools.lru_cache(maxsize=1024)
def _ids(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer, *parts):
    """(text, ids) of parts in a row, those that are Foreign made harmless.

    Whole texts are tokenised at once, so that ids are what the tokenizer makes of them. Should an added token appear that no part
    of our own wrote (a tokenizer may normalise before it looks), the parts are tokenised apart and Foreign ones lose such ids."""
    added, _ = added_tokens(tokenizer)
    parts = [Foreign(harmless(tokenizer, p)) if isinstance(p, Foreign) else p for p in parts]
    own = [i for p in parts if not isinstance(p, Foreign) for i in _ids(tokenizer, p) if i in added]
    text = "".join(parts)
    ids = list(_ids(tokenizer, text))
    if [i for i in ids if i in added] != own:
        ids = [i for p in parts for i in _ids(tokenizer, p) if not (isinstance(p, Foreign) and i in added)]
    return text, ids


@functools.lru_cache(maxsize=64)
def template_parts(tokenizer, roles):
    """(ids of what the chat template writes before, between and behind messages of these roles, the messages' order in it). A
    template that opens the thought itself is cut before it, since a policy has to write all of its tags."""
    messages = [{"role": role, "content": f"@@{i}@@"} for i, role in enumerate(roles)]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as error:
        raise TemplateError(f"this model's chat template refuses a conversation of {', '.join(roles)}: {error}") from error
    parts = re.split(r"@@\d+@@", re.sub(r"<think>\s*$", "", text))
    order = [int(i) for i in re.findall(r"@@(\d+)@@", text)]
    return [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts], order


def render_chat(tokenizer, messages):
    """Token ids of [(role, text or list of parts)] up to where the assistant speaks; a later turn appends ids and renders nothing.

    Messages are tokenised apart from the template, so none can write one of its tokens, and a template that strips thoughts from
    earlier turns leaves those of few-shot examples alone."""
    parts, order = template_parts(tokenizer, tuple(role for role, _ in messages))
    lost = [role for i, (role, _) in enumerate(messages) if i not in order and (role != "system" or len(messages) == 1)]
    if lost:  # (the tiny policy's template leaves out system messages, which it cannot read)
        raise TemplateError(f"this model's chat template prints nothing of a {lost[0]} message in a conversation of "
                            f"{', '.join(role for role, _ in messages)}; at2po.py has --prompt-form chat")
    ids = list(parts[0])
    for part, i in zip(parts[1:], order, strict=True):
        content = messages[i][1]
        ids += encode(tokenizer, *([content] if isinstance(content, str) else content))[1] + part
    return ids


def render_reply(tokenizer, turn_ids, content):
    """Ids that follow a sampled turn: the end of its message where it was not sampled, the user's message, the next turn's opening."""
    parts, _ = template_parts(tokenizer, ("user", "assistant", "user"))
    end = list(parts[2])
    sampled_end = bool(turn_ids) and bool(end) and end[0] == turn_ids[-1]
    return end[int(sampled_end):] + encode(tokenizer, content)[1] + parts[3]


def unknown_words(tokenizer, text):
    """The words of a text that the tokenizer has no token for; [] for tokenizers that know every byte."""
    unknown = tokenizer.unk_token_id
    words = re.findall(r"\w+", text)
    return [w for w in words if unknown is not None and unknown in tokenizer(w, add_special_tokens=False)["input_ids"]]
