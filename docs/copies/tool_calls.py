"""Python's form, JSON's, OpenAI's arguments as text, and a call that would have to be evaluated."""
from tool_calls import Fault, parse_tool_call

assert parse_tool_call("open('a(b), c', line='3')") == ("open", {"title": "a(b), c", "line": "3"})
assert parse_tool_call('{"name": "search", "parameters": {"query": "y"}}') == ("search", {"query": "y"})
name, arguments = parse_tool_call(r'{"name": "search", "arguments": "{\"query\": \"y\"}"}')
assert (name, arguments) == ("search", {"query": "y"})
try:
    parse_tool_call("open(__import__('os').getcwd(), 'x')")
    raise SystemExit("a call was evaluated")
except Fault as fault:
    assert fault.name == "argument that is no text"
print(name, arguments)
