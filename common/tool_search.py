"""--prompt-form tools: the model's own chat template, which is told of one tool, `search`. A call is JSON in
<tool_call> tags, as Qwen and Hermes models write it, and a result is a message of the role "tool". So a model
that was trained to call tools begins above zero, and what is trained can be served to any client. Thoughts
and answers stay in the paper's tags.

    ids = prompt(tokenizer, INSTRUCTIONS, question)
    query_of('{"name": "search", "arguments": {"query": "Silent Harbor"}}')  ->  "Silent Harbor"
    text, ids = result(tokenizer, passages)      # behind a turn that stopped at CALL[1]
"""

import json

from common import chat, flags

CALL, RESPONSE = ((f"<{tag}>", f"</{tag}>") for tag in ("tool_call", "tool_response"))
IN_RESPONSE = f"{RESPONSE[0]}\n", f"\n{RESPONSE[1]}"  # what stands before and after a result
TOOL = {"type": "function", "function": {
    "name": "search",
    "description": "Searches an encyclopedia and returns the passages that fit best.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "what to search for"}},
        "required": ["query"],
    },
}}
MAX_CALL = 4000  # characters


def check(form, cfg):
    """Refuses what knows no calls."""
    if form == "tools" and (cfg.data == "world" or cfg.policy or cfg.collect):
        flags.refuse("prompt_form", "tools", "is for --model: the world's tiny policy and served ones are "
                     "not told of the tool")


def prompt(tokenizer, instructions, question):
    """Ids of the first prompt."""
    messages = [("system", instructions), ("user", [chat.Foreign(question)])]
    return chat.render_chat(tokenizer, messages, tool=json.dumps(TOOL), marks=CALL)


def query_of(text):
    """The query of a call, the text between CALL's tags; "" where it is none. Nothing is evaluated.

    >>> query_of('{"name": "search", "arguments": {"query": "a \\\\"b\\\\""}}'), query_of('search("a")')
    ('a "b"', '')
    >>> query_of('{"name": "delete", "arguments": {"query": "a"}}'), query_of("[" * 9999)
    ('', '')
    """
    try:
        call = json.loads(text[:MAX_CALL], strict=False)
        given = call["arguments"]
        if isinstance(given, str):  # OpenAI's are JSON in a text
            given = json.loads(given, strict=False)
        query = given["query"]
        if call["name"] != "search" or not isinstance(query, str):
            return ""
        return query.strip().encode("utf-8", "replace").decode()  # (JSON may hold half a character)
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def written(query):
    """A call's parts, as chat.encode takes them, for demonstrations."""
    call = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
    return f"\n{CALL[0]}\n", chat.Foreign(call), f"\n{CALL[1]}"


def result(tokenizer, text):
    """(text, ids) of a search result, up to where the assistant goes on."""
    shown = f"{IN_RESPONSE[0]}{chat.harmless(tokenizer, text)}{IN_RESPONSE[1]}"
    return shown, chat.render_reply(
        tokenizer, [], chat.Foreign(text), role="tool", tool=json.dumps(TOOL))
