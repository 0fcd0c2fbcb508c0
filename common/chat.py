"""Text on its way into a model: chat templates, and text from outside that may try to be more than text.

Passages, titles, questions, tool results and graph descriptions are Foreign: in their ids no added token of
the tokenizer occurs, special or not (single letters apart), and no tag can be read. What a script writes
itself (instructions, tags, the template's role marks) is plain str.

    render_chat(tokenizer, [("system", INSTRUCTIONS), ("user", ["Question:", Foreign(f" {question}")])])
    text, ids = encode(tokenizer, "<result>\\n", Foreign(passages), "\\n</result>")
"""

import datetime
import functools
import json
import re

from common.files import UserError


class TemplateError(UserError):
    """A chat template that cannot render the conversation."""


class Foreign(str):
    """Text of a data set, a retriever or a tool."""


today = datetime.date.today().isoformat()  # the date that templates write: a run keeps the one it began with
PROBE = "The Right, right\nthing  is < 3 {}?"  # what templates like to alter: case, blanks, signs


@functools.lru_cache(maxsize=16)
def added_tokens(tokenizer):
    """(ids of the tokenizer's added tokens, pattern of their texts). Left out is what can only be text: the
    unknown token, which any odd word may become, runs of blanks, and single letters (some tokenizers have
    added "ü")."""
    added = {}
    for text in (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens):
        letter = len(text) == 1 and text.isalpha()
        if text != tokenizer.unk_token and text.strip() and not letter:
            added[text] = tokenizer.convert_tokens_to_ids(text)
    longest_first = sorted(added, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return frozenset(added.values()), re.compile(pattern, re.IGNORECASE)


def no_tags(text):
    """The text with "<" before anything but a space, a digit or "=" as a look-alike."""
    return re.sub(r"<(?=[^\s\d=<])", "‹", text)


def harmless(tokenizer, text):
    """The text without halves of surrogate pairs, without tags, and with every spelling of an added token
    broken up by a space (a sign that is one becomes a space)."""
    def broken(match):
        found = match[0]
        return f"{found[0]} {found[1:]}" if len(found) > 1 else " "

    text = no_tags(text.encode("utf-8", "replace").decode())
    _, pattern = added_tokens(tokenizer)
    for _ in range(8):  # what is broken up may spell another; whatever is left, `encode` takes out
        if not pattern.search(text):
            break
        text = pattern.sub(broken, text)
    return text


@functools.lru_cache(maxsize=16)
def _blank_before(tokenizer):
    """Ids of a line break where the tokenizer puts a blank before whatever begins a text (SentencePiece),
    else []."""
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    line = ids("\n")
    return line if ids("\na") != line + ids("a") and ids("\na")[:len(line)] == line else []


@functools.lru_cache(maxsize=1024)
def _ids(tokenizer, text, begins=False):
    """begins: the text stands at the beginning of a sequence. What stands further on is tokenised behind a
    line break, whose ids are then taken off."""
    line = [] if begins else _blank_before(tokenizer)
    ids = tokenizer("\n" * bool(line) + text, add_special_tokens=False)["input_ids"]
    return tuple(ids[len(line):])


def encode(tokenizer, *parts, begins=False):
    """(text, ids) of parts in a row, those that are Foreign made harmless. begins: nothing stands before.

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
    ids = list(_ids(tokenizer, text, begins))
    if [i for i in ids if i in added] == own:
        return text, ids
    ids = []
    for n, part in enumerate(cleaned):
        foreign = isinstance(part, Foreign)
        ids += [i for i in _ids(tokenizer, part, begins and n == 0) if not (foreign and i in added)]
    return text, ids


def before_a_turn(tokenizer, *parts):
    """encode for parts that end in line breaks, behind which a turn begins with a tag: tokenizers of GPT-2's
    kind cut two line breaks apart where "<" follows, and make one piece of them at a text's end."""
    text, ids = encode(tokenizer, *parts, "<")
    return text[:-1], ids[:-1]


@functools.lru_cache(maxsize=64)
def template_parts(tokenizer, roles, date, tool=""):
    """(what the chat template writes before, between and behind messages of these roles, the messages' order
    in it). tool: JSON of one that it is told of. A template that opens the thought itself, or writes an empty
    one, is cut before it, since a policy has to write all of its tags."""
    def rendered(contents):
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        day = datetime.date.fromisoformat(date)
        try:
            return tokenizer.apply_chat_template(
                messages, tools=[json.loads(tool)] if tool else None, add_generation_prompt=True,
                tokenize=False, strftime_now=day.strftime)
        except Exception as error:  # a template is a program: it may raise anything
            words = " ".join(str(error).split())
            raise TemplateError("this model's chat template refuses a conversation of "
                                f"{', '.join(roles)}: {words[:200]}") from error

    marks = [f"@@{i}@@" for i in range(len(roles))]
    text = rendered(marks)
    probes = [PROBE.format(i) for i in range(len(roles))]
    if rendered(probes) != re.sub(r"@@(\d+)@@", lambda i: probes[int(i[1])], text):
        raise TemplateError("this model's chat template alters what it is given (case, blanks or signs): "
                            "what the policy reads would not be what was written")
    order = [int(i) for i in re.findall(r"@@(\d+)@@", text)]
    text = re.sub(r"<think>\s*(</think>\s*)?$", "", text)
    return re.split(r"@@\d+@@", text), order


def render_chat(tokenizer, messages, tool="", marks=()):
    """Token ids of [(role, text or list of parts)] up to where the assistant speaks, as the template's own
    rendering is tokenised (but a message keeps the blanks at its ends, where templates may take them off); a
    later turn appends ids and renders nothing.

    No Foreign part can write one of the template's tokens, and a template that strips thoughts from earlier
    turns leaves those of few-shot examples alone. tool: JSON of one that the template is told of; marks: what
    it has to say of calls."""
    roles = tuple(role for role, _ in messages)
    texts, order = template_parts(tokenizer, roles, today, tool)
    if not all(mark in "".join(texts) for mark in marks):
        raise TemplateError(f"this model's chat template does not tell of calls in {' '.join(marks)} tags: "
                            "--prompt-form tools is for those of Qwen's and Hermes' kind")
    for i, role in enumerate(roles):
        # (the tiny policy's template leaves out system messages, which it cannot read)
        if i not in order and (role != "system" or len(roles) == 1):
            raise TemplateError(f"this model's chat template prints nothing of a {role} message")
    parts = [texts[0]]
    for text, i in zip(texts[1:], order, strict=True):
        content = messages[i][1]
        if isinstance(content, str):
            content = [content]
        parts += [*content, text]
    return encode(tokenizer, *parts, begins=True)[1]


def render_reply(tokenizer, turn_ids, *content, role="user", tool=""):
    """Ids that follow a sampled turn: the end of its message where it was not sampled, the message of `role`
    (parts as `encode` takes them), the next turn's opening."""
    texts, order = template_parts(tokenizer, ("user", "assistant", role), today, tool)
    if order != [0, 1, 2]:
        raise TemplateError("this model's chat template does not print a conversation of user, assistant, "
                            f"{role} in that order: an answer of one turn is all that can be asked of it")
    ids = encode(tokenizer, texts[2], *content, texts[3])[1]
    if turn_ids and ids and ids[0] == turn_ids[-1]:  # it was sampled
        ids = ids[1:]
    return ids


def end_of_turn(tokenizer):
    """The added token with which the chat template closes what the assistant said; None where none is."""
    try:
        texts, order = template_parts(tokenizer, ("user", "assistant", "user"), today)
    except TemplateError:
        return None
    ids = _ids(tokenizer, texts[2]) if order == [0, 1, 2] else ()
    return ids[0] if ids and ids[0] in added_tokens(tokenizer)[0] else None


def role_marks(tokenizer):
    """Ids of the added tokens by which the chat template tells who speaks, and of the end of sequence. What a
    policy learns to say must not write them."""
    written = render_chat(tokenizer, [("user", "")])
    return added_tokens(tokenizer)[0].intersection([*written, tokenizer.eos_token_id])


def is_tiny(tokenizer):
    """Whether it is the embedded world's, whose policies know no instructions and no examples."""
    return "[USER]" in tokenizer.all_special_tokens


def unknown_words(tokenizer, text):
    """The words of a text that the tokenizer has no token for; [] for tokenizers that know every byte."""
    words = re.findall(r"\w+", text)
    unknown = tokenizer.unk_token_id    # None where there is none
    return [word for word in words if unknown in tokenizer(word, add_special_tokens=False)["input_ids"]]
