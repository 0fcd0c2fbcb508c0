"""Python's form, JSON's form, and a call that would have to be evaluated."""
from tool_calls import Fault, parse_tool_call

assert [*parse_tool_call("open('a(b), c', graph_type='x')")[1].values()] == ["a(b), c", "x"]
name, arguments = parse_tool_call('{"name": "search", "parameters": {"graph_type": "x", "node_name": "y"}}')
assert name == "search"
try:
    parse_tool_call("open(__import__('os').getcwd(), 'x')")
    raise SystemExit("a call was evaluated")
except Fault as fault:
    assert fault.name == "argument that is no text"
print(name, arguments)
