"""Tool calls of a policy: read by hand, never evaluated.

    parse_tool_call('node_info(node_name="Pays de Caux", graph_type="agriculture")')
    parse_tool_call('{"name": "node_info", "arguments": {"node_name": "Pays de Caux", "graph_type": "cs"}}')
        -> ("node_info", {"node_name": "Pays de Caux", "graph_type": …})

    write_tool_call("node_info", {"node_name": …, "graph_type": …})    the first of them

A text that is no such call is a Fault with a name, which a script counts.
"""

import ast
import json
import re
import warnings

TOOLS = ("entity_matcher", "node_info")
ARGUMENTS = ("node_name", "graph_type")  # of both tools, in the order of positional ones
MAX_CALL = 4000                          # characters

TOO_LONG = "too long"
NO_CALL = "not a call"
UNKNOWN_TOOL = "unknown tool"
UNKNOWN_ARGUMENT = "unknown argument"
REPEATED_ARGUMENT = "repeated argument"
MISSING_ARGUMENT = "missing argument"
NO_TEXT = "argument that is no text"


class Fault(Exception):
    """Why a text is no call: one of the names above, and what to tell the policy."""

    def __init__(self, name, detail):
        super().__init__(name, detail)
        self.name = name
        self.detail = detail


def parse_tool_call(text):
    """(tool, {argument: value}) of a call in Python or JSON style, or a Fault.

    Arguments stand in the order of ARGUMENTS, however they were given, so equal calls are equal."""
    if len(text) > MAX_CALL:
        return Fault(TOO_LONG, f"a call may have {MAX_CALL:,} characters, this one has {len(text):,}")
    text = text.strip()
    try:
        if text.startswith("{"):
            tool, positional, named = _json_call(text)
        else:
            tool, positional, named = _python_call(text)
        return tool, _arguments(positional, named)
    except Fault as fault:
        return Fault(fault.name, fault.detail)  # (one that was raised holds the frames of its way)


def _json_call(text):
    """(tool, positional values, [(argument, value)]). `arguments`, which Omne-R1's code and Llama call
    `parameters`, may be an object, a list, or the text of either, as some APIs have it."""
    pairs = _json(text)
    call = dict(pairs)
    if len(call) < len(pairs):
        raise Fault(NO_CALL, "a key given twice")
    key = "parameters" if "parameters" in call else "arguments"
    if "name" not in call or call.keys() - {"name", key}:
        raise Fault(NO_CALL, 'expected {"name": …, "arguments": {…}}')
    _check_tool(call["name"])
    given = call.get(key, _Pairs())
    if isinstance(given, str):
        given = _json(given)
    if isinstance(given, _Pairs):
        return call["name"], [], given
    if isinstance(given, list):
        return call["name"], given, []
    raise Fault(NO_CALL, "expected an object of arguments")


class _Pairs(tuple):
    """A JSON object as it was written, repeated keys and all."""


def _json(text):
    try:
        return json.loads(text, object_pairs_hook=_Pairs, strict=False)
    except (ValueError, RecursionError):
        raise Fault(NO_CALL, "not valid JSON") from None


def _python_call(text):
    """As _json_call."""
    found = re.match(r"([^\W\d]\w*)\s*\(", text)
    if not found:
        raise Fault(NO_CALL, f"expected {TOOLS[0]}(…) or {TOOLS[1]}(…)")
    _check_tool(found[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a name is two characters, and no news
            call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Fault(NO_CALL, "not a call in Python's syntax: is a quote or bracket not closed, or a quote "
                             "within a name not escaped?") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise Fault(NO_CALL, "expected one call and nothing else")
    named = [(keyword.arg, _literal(keyword.value)) for keyword in call.keywords]
    return found[1], [_literal(value) for value in call.args], named


def _literal(node):
    """The value of a literal; None, which is no text, of anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def _check_tool(name):
    if name not in TOOLS:
        raise Fault(UNKNOWN_TOOL, f"there are the tools {' and '.join(TOOLS)}, not {str(name)[:60]}")


def _arguments(positional, named):
    """{argument: text} with every argument once."""
    if len(positional) > len(ARGUMENTS):
        raise Fault(UNKNOWN_ARGUMENT, f"expected {len(ARGUMENTS)} arguments, not {len(positional)}")
    given = {}
    for name, value in [*zip(ARGUMENTS, positional), *named]:
        if name not in ARGUMENTS:
            expected = ", ".join(ARGUMENTS)
            raise Fault(UNKNOWN_ARGUMENT, f"the arguments are {expected}, not {str(name)[:60]}")
        if name in given:
            raise Fault(REPEATED_ARGUMENT, f"{name} is given twice")
        if not isinstance(value, str):
            raise Fault(NO_TEXT, f"{name} is no text in quotes")
        given[name] = value
    for name in ARGUMENTS:
        if name not in given:
            raise Fault(MISSING_ARGUMENT, f"{name} is missing")
    return {name: given[name] for name in ARGUMENTS}


def write_tool_call(tool, arguments):
    """A call in Python style as parse_tool_call reads it, whatever its texts hold.

    >>> write_tool_call("node_info", {"node_name": 'Scrooge\\'s "Ghost"', "graph_type": "carol"})
    'node_info(node_name="Scrooge\\'s \\\\"Ghost\\\\"", graph_type="carol")'
    """
    # (a text in JSON's quotes is also one in Python's)
    given = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items()]
    return f"{tool}({', '.join(given)})"
