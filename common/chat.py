"""Text on its way into a model: chat templates, and text from outside that may try to be more than text.

Passages, titles, questions, tool results and graph descriptions are Foreign: in their ids no added token of
the tokenizer occurs, special or not (single letters apart), and no tag can be read. What a script writes
itself (instructions, tags, the template's role marks) is plain str.

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
    """(ids of the tokenizer's added tokens, pattern of their texts). Left out is what can only be text: the
    unknown token, which any odd word may become, runs of blanks, and single letters (some tokenizers have
    added "ü")."""
    vocabulary = dict(tokenizer.get_added_vocab())
    for text in tokenizer.all_special_tokens:
        vocabulary[text] = tokenizer.convert_tokens_to_ids(text)
    added = {}
    for text, i in vocabulary.items():
        letter = len(text) == 1 and text.isalpha()
        if text != tokenizer.unk_token and text.strip() and not letter:
            added[text] = i
    longest_first = sorted(added, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return frozenset(added.values()), re.compile(pattern, re.IGNORECASE)


def no_tags(text):
    """The text with "<" before anything but a space, a digit or "=" as a look-alike, so that no tag and no
    role mark can be read."""
    return re.sub(r"<(?=[^\s\d=<])", "‹", text)


def harmless(tokenizer, text):
    """The text without halves of surrogate pairs, without tags, and with every spelling of an added token
    broken up by a space (a sign that is one becomes a space)."""
    def broken(match):
        found = match[0]
        return f"{found[0]} {found[1:]}" if len(found) > 1 else " "

    text = str(text).encode("utf-8", "replace").decode()
    text = no_tags(text)
    _, pattern = added_tokens(tokenizer)
    for _ in range(8):  # what is broken up may spell another; whatever is left, `encode` takes out
        if not pattern.search(text):
            break
        text = pattern.sub(broken, text)
    return text


@functools.lru_cache(maxsize=1024)
def _ids(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode(tokenizer, *parts):
    """(text, ids) of parts in a row, those that are Foreign made harmless.

    Whole texts are tokenised at once, so that ids are what the tokenizer makes of them. Should an added token
    appear that no part of our own wrote (a tokenizer may normalise before it looks), the parts are tokenised
    apart and Foreign ones lose such ids."""
    added, _ = added_tokens(tokenizer)
    cleaned = []
    own = []  # added tokens that parts of our own wrote
    for part in parts:
        if isinstance(part, Foreign):
            part = Foreign(harmless(tokenizer, part))
        else:
            own += [i for i in _ids(tokenizer, part) if i in added]
        cleaned.append(part)
    text = "".join(cleaned)
    ids = list(_ids(tokenizer, text))
    if [i for i in ids if i in added] == own:
        return text, ids
    ids = []
    for part in cleaned:
        foreign = isinstance(part, Foreign)
        ids += [i for i in _ids(tokenizer, part) if not (foreign and i in added)]
    return text, ids


@functools.lru_cache(maxsize=64)
def template_parts(tokenizer, roles):
    """(ids of what the chat template writes before, between and behind messages of these roles, the messages'
    order in it). A template that opens the thought itself is cut before it, since a policy has to write all
    of its tags."""
    messages = [{"role": role, "content": f"@@{i}@@"} for i, role in enumerate(roles)]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as error:
        raise TemplateError("this model's chat template refuses a conversation of "
                            f"{', '.join(roles)}: {error}") from error
    order = [int(i) for i in re.findall(r"@@(\d+)@@", text)]
    text = re.sub(r"<think>\s*$", "", text)
    parts = []
    for part in re.split(r"@@\d+@@", text):
        parts.append(tokenizer(part, add_special_tokens=False)["input_ids"])
    return parts, order


def render_chat(tokenizer, messages):
    """Token ids of [(role, text or list of parts)] up to where the assistant speaks; a later turn appends ids
    and renders nothing.

    Messages are tokenised apart from the template, so none can write one of its tokens, and a template that
    strips thoughts from earlier turns leaves those of few-shot examples alone."""
    roles = tuple(role for role, _ in messages)
    parts, order = template_parts(tokenizer, roles)
    for i, role in enumerate(roles):
        # (the tiny policy's template leaves out system messages, which it cannot read)
        if i not in order and (role != "system" or len(roles) == 1):
            raise TemplateError(f"this model's chat template prints nothing of a {role} message in a "
                                f"conversation of {', '.join(roles)}; at2po.py has --prompt-form chat")
    ids = list(parts[0])
    for part, i in zip(parts[1:], order, strict=True):
        content = messages[i][1]
        if isinstance(content, str):
            content = [content]
        ids += encode(tokenizer, *content)[1]
        ids += part
    return ids


def render_reply(tokenizer, turn_ids, *content):
    """Ids that follow a sampled turn: the end of its message where it was not sampled, the user's message
    (parts as `encode` takes them), the next turn's opening."""
    parts, order = template_parts(tokenizer, ("user", "assistant", "user"))
    if order != [0, 1, 2]:
        raise TemplateError("this model's chat template does not print a conversation of user, assistant, "
                            "user in that order: an answer of one turn is all that can be asked of it")
    end = list(parts[2])
    if turn_ids and end and end[0] == turn_ids[-1]:  # it was sampled
        end = end[1:]
    return end + encode(tokenizer, *content)[1] + parts[3]


def unknown_words(tokenizer, text):
    """The words of a text that the tokenizer has no token for; [] for tokenizers that know every byte."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return []
    found = []
    for word in re.findall(r"\w+", text):
        if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]:
            found.append(word)
    return found
