"""Leaves of rewards 1, 0 below one turn and 0 beside it: mean 1/3, std sqrt(2)/3, values sqrt(2) and
-1/sqrt(2). The two leaves have entropies .1 and .3, so their parent has a quarter of the one and three
of the other."""
import math
from types import SimpleNamespace as Made

from credit import Node, turn_credit


def turn(parent, entropy, reward=None):
    node = Node(Made(entropy=entropy), parent, done=reward is not None, trajectory=Made(reward=reward))
    parent.children.append(node)
    return node

root = Node()
first = turn(root, .5)
right, wrong = turn(first, .1, 1.0), turn(first, .3, 0.0)
other = turn(root, .5, 0.0)
turn_credit(root, "child-weighted", "value", False)
a, b = math.sqrt(2), -1 / math.sqrt(2)
for node, value in ((right, a), (wrong, b), (other, b), (first, a / 4 + 3 * b / 4)):
    assert abs(node.value - value) < 1e-5 and node.advantage == node.value
assert abs(root.value - (first.value + b) / 2) < 1e-5
turn_credit(root, "child-mean", "td", False)
assert abs(right.advantage - (a - (a + b) / 2)) < 1e-5
print("values", [round(node.value, 3) for node in (first, right, wrong, other)])
