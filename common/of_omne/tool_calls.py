"""A tool call as text (Omne-R1, appendix B): read, in Python's or in JSON's style, and never evaluated.

    parse_tool_call('node_info("Rastrigin Function", "cs")')
        -> "node_info", {"node_name": "Rastrigin Function", "graph_type": "cs"}
"""

import ast
import json
import re
import warnings

from common.graphs.kg_tools import ENTITY_MATCHER, NODE_INFO

ARGUMENTS = {  # a signature per tool: its arguments, in the order of positional ones
    ENTITY_MATCHER: ("node_name", "graph_type"),
    NODE_INFO: ("node_name", "graph_type"),
}
MAX_CALL = 4000  # characters


class Fault(Exception):
    """Why a text is no call: its name is counted, and the policy is told its detail."""

    def __init__(self, name, detail):
        super().__init__(name, detail)
        self.name = name
        self.detail = detail


def parse_tool_call(text):
    """(tool, {argument: text}) of a call in Python's or in JSON's style; raises Fault. The arguments stand in
    the order of the signature however they were written, so equal calls are equal.

    >>> parse_tool_call('node_info(graph_type="cs", node_name="Rastrigin Function")')
    ('node_info', {'node_name': 'Rastrigin Function', 'graph_type': 'cs'})
    """
    if len(text) > MAX_CALL:
        raise Fault("too long", f"a call may have {MAX_CALL:,} characters, this one has {len(text):,}")
    text = text.strip()
    if text.startswith(("`", "~~~")):  # these two could be read, but are not the right format
        raise Fault("not a call", "expected a call without a code fence around it: leave out the ` signs")
    if text.startswith("["):
        raise Fault("not a call", "expected one call and not a list: leave out the square brackets")
    read = json_call if text.startswith("{") else python_call
    tool, given = read(text)
    signature = ARGUMENTS[tool]
    arguments = {}
    for name, value in given:
        if name not in signature:
            expected = ", ".join(signature)
            raise Fault("unknown argument", f"the arguments are {expected}, not {str(name)[:60]}")
        if name in arguments:
            raise Fault("repeated argument", f"{name} is given twice")
        if not isinstance(value, str):
            raise Fault("argument that is no text", f"{name} is no text in quotes")
        arguments[name] = value
    for name in signature:
        if name not in arguments:
            raise Fault("missing argument", f"{name} is missing")
    return tool, {name: arguments[name] for name in signature}


def python_call(text):
    """(tool, [(argument, value)]); the value is no text where the call has anything but a literal."""
    name = re.match(r"([^\W\d]\w*)\s*\(", text)
    if not name:
        raise Fault("not a call", f"expected {' or '.join(f'{tool}(…)' for tool in ARGUMENTS)}")
    tool = known_tool(name[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\d" in a name
            call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        detail = ("not a call in Python's syntax: is a quote or bracket not closed, or a quote within a name "
                  "not escaped?")
        raise Fault("not a call", detail) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise Fault("not a call", "expected one call and nothing else")
    signature = ARGUMENTS[tool]
    if len(call.args) > len(signature):
        noun = "argument" if len(signature) == 1 else "arguments"
        raise Fault("unknown argument", f"expected {len(signature)} {noun}, not {len(call.args)}")
    given = list(zip(signature, call.args))
    given += [(keyword.arg, keyword.value) for keyword in call.keywords]
    # a literal's value; of other nodes None, or a node again
    return tool, [(name, getattr(node, "value", None)) for name, node in given]


def json_call(text):
    """As python_call. Llama and the authors' code call the arguments "parameters"; OpenAI's are JSON in a
    text, perhaps under "function"."""
    try:
        call = json.loads(text, strict=False, object_pairs_hook=once_each)
        call = call.get("function", call)
        given = call.get("arguments", call.get("parameters", {}))
        if "arguments" in call and "parameters" in call:
            raise Fault("repeated argument", "arguments and parameters are both given")
        if isinstance(given, str):
            given = json.loads(given, strict=False, object_pairs_hook=once_each)
        return known_tool(call["name"]), given.items()
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise Fault("not a call", 'expected one {"name": …, "arguments": {…}} and nothing else') from None


def once_each(pairs):
    """The dict of a JSON object. A key that is given twice is a Fault: json would keep its last value."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise Fault("repeated argument", f"{name[:60]} is given twice")
        found[name] = value
    return found


def known_tool(name):
    if not isinstance(name, str) or name not in ARGUMENTS:
        raise Fault("unknown tool", f"there are the tools {' and '.join(ARGUMENTS)}, not {str(name)[:60]}")
    return name


def written(call):
    """A kg_tools.Call as the policy writes it."""
    name, graph = (json.dumps(text, ensure_ascii=False) for text in (call.node_name, call.graph_type))
    return f"<tool_call> {call.tool}(node_name={name}, graph_type={graph}) </tool_call>"
