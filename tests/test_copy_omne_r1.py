"""What docs/copy.md says can be taken from omne_r1.py: lifted into an empty folder, it runs without us."""

from tests.lifting import lift, run


def copied(folder, imports, names, use):
    """What `use` prints behind these pieces of the script, as words."""
    lift(folder, "copied.py", imports, omne_r1=names)
    return run(folder, "import torch\nfrom copied import *\n" + use).split()


def test_gae(tmp_path):
    """gamma .5, lambda .5; an observation between the two sampled tokens, which is not read."""
    found = copied(tmp_path, "import torch", "gae", """\
mask = torch.tensor([[False, True, False, True]])
rewards = torch.tensor([[9.0, 0.0, 9.0, 1.0]])
values = torch.tensor([[7.0, 0.5, 7.0, 0.2]])
advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
print(*[round(x, 4) for x in advantages[0].tolist() + returns[0].tolist()])
""")
    last = 1 - .2
    first = .5 * .2 - .5 + .25 * last
    assert list(map(float, found)) == [0, round(first, 4), 0, last, 0, round(first + .5, 4), 0, 1]


def test_algorithm_1(tmp_path):
    """Labels: not learned, <think> 5 </think>, then two tokens; tags of one id and of two."""
    found = copied(tmp_path, "import torch", "think_weights starts_of weighted_loss", """\
one = think_weights(torch.tensor([[-100, 1, 5, 2, 6, 7]]), [1], [2], .1)
two = think_weights(torch.tensor([[1, 1, 5, 2, 2, 7]]), [1, 1], [2, 2], .1)
print(*[round(x, 4) for x in one[0].tolist() + two[0].tolist()])
weights = torch.where(torch.tensor([[False, True, True, True, True, True]]), one, 0.0)
logprobs = torch.full((1, 6), -2.0, requires_grad=True)
loss = weighted_loss(logprobs, weights, float(weights.sum()))
loss.backward()
print(round(float(loss), 4), *[round(x, 4) for x in logprobs.grad[0].tolist()])
print(float(weighted_loss(logprobs, 0 * weights, 0.0)) == 0)
""")
    assert list(map(float, found[:12])) == [1, .1, .1, .1, 1, 1, .1, .1, .1, .1, .1, 1]
    share = [round(w / 2.3, 4) for w in (0, .1, .1, .1, 1, 1)]
    assert list(map(float, found[12:19])) == [2, *(-w for w in share)] and found[19] == "True"


def test_the_parser_of_tool_calls(tmp_path):
    names = "ARGUMENTS MAX_CALL Fault parse_tool_call python_call json_call known_tool"
    imports = 'import ast, json, re, warnings\nTOOLS = ("search", "open")'
    found = copied(tmp_path, imports, names, """\
print(*parse_tool_call("open('a(b), c', graph_type='x')")[1].values(), sep="|")
print(parse_tool_call('{"name": "search", "parameters": {"graph_type": "x", "node_name": "y"}}')[0])
try:
    parse_tool_call("open(__import__('os').getcwd(), 'x')")
except Fault as fault:
    print(fault.name)
""")
    assert " ".join(found) == "a(b), c|x search argument that is no text"
