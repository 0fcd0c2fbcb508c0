"""Pieces of at2po.py, lifted into an empty folder with torch alone, give the numbers that they give here."""

from tests.lifting import lift, run

DATACLASS = "from dataclasses import dataclass, field\n"


def test_the_loss(tmp_path):
    """The numbers of docs/walkthrough.md: turn 0 has ratio sqrt(1.25) and is clipped at 1.1, turn 1 has 1.2
    and A < 0; the gradient of its token is 1.2 / 3."""
    lift(tmp_path, "training.py", "import torch\n", common__training="turn_sums check_shapes loss_stats")
    lift(tmp_path, "loss.py", "import torch\nimport training\n", at2po="atpo_loss update_spread")
    run(tmp_path, """
import math, torch
from loss import atpo_loss, update_spread
log = math.log
old = torch.tensor([[log(.4), log(.5), 0.0, log(.5)]])
new = torch.tensor([[log(.5), log(.5), 0.0, log(.6)]], requires_grad=True)
mask = torch.tensor([[True, True, False, True]])
turns = torch.tensor([[0, 0, -1, 1]])
advantages = torch.tensor([[2.0, 2.0, 0.0, -1.0]])
loss, stats = atpo_loss(new, old, advantages, mask, turns, clip_low=.2, clip_high=.1)
assert abs(loss.item() + (2 * 2.2 - 1.2) / 3) < 1e-6 and stats["clipped_tokens"] == 2
gradient = torch.autograd.grad(loss, new)[0][0]
assert torch.allclose(gradient, torch.tensor([0, 0, 0, .4])), gradient
even = torch.tensor([[.1, .1, 0, .2]])
assert abs(update_spread(even, mask, turns) - 1) < 1e-6
""")


def test_the_credit_of_turns(tmp_path):
    """Leaves of rewards 1, 0 below one turn and 0 beside it: mean 1/3, std sqrt(2)/3, values sqrt(2) and
    -1/sqrt(2). The two leaves have entropies 0 and ln 3, so their parent has a quarter of the one and three
    of the other."""
    lift(tmp_path, "credit.py", "import math\n" + DATACLASS, at2po="Node leaf_values node_value turn_credit")
    run(tmp_path, """
import math
from types import SimpleNamespace as Made
from credit import Node, turn_credit

def turn(parent, entropy, reward=None):
    node = Node(Made(entropy=entropy), parent, done=reward is not None, trajectory=Made(reward=reward))
    parent.children.append(node)
    return node

root = Node()
first = turn(root, .5)
right, wrong = turn(first, 0.0, 1.0), turn(first, math.log(3), 0.0)
other = turn(root, .5, 0.0)
turn_credit(root, "child-weighted", "value", False)
a, b = math.sqrt(2), -1 / math.sqrt(2)
for node, value in ((right, a), (wrong, b), (other, b), (first, a / 4 + 3 * b / 4)):
    assert abs(node.value - value) < 1e-5 and node.advantage == node.value
assert abs(root.value - (first.value + b) / 2) < 1e-5
turn_credit(root, "child-mean", "td", False)
assert abs(right.advantage - (a - (a + b) / 2)) < 1e-5
""")


def test_the_tree(tmp_path):
    """Two chains, then the turn of highest entropy once more: the first of chain0, sampled anew from the
    prompt."""
    lift(tmp_path, "chat.py", "import functools\nimport re\n",
         common__chat="Foreign added_tokens no_tags harmless _blank_before _ids encode")
    imports = "import asyncio\nimport hashlib\nimport random\nimport re\nimport chat\n" + DATACLASS
    lift(tmp_path, "tree.py", imports,
         common__turns="Turn context_ids sampled_text stable_seed",
         at2po="REGENERATION_PENALTY THINK LIMIT_MESSAGE render_passages render_observation "
               "render_result inside Node play_turn play choose_nodes grow_tree")
    run(tmp_path, """
import asyncio
from functools import partial
from types import SimpleNamespace as Made
from tree import Node, grow_tree, play

class Letters:
    '''A tokenizer of letters.'''
    all_special_tokens, unk_token = [], None
    def get_added_vocab(self): return {}
    def __call__(self, text, add_special_tokens=False): return {"input_ids": list(map(ord, text))}
    def decode(self, ids): return "".join(map(chr, ids))

class Engine:
    '''A search, which chain0 is unsure of, then an answer.'''
    async def generate(self, ids, stop, max_tokens, temperature, seed):
        seeds.append(seed)
        text = "<answer>x</answer>" if "<result>" in Letters().decode(ids) else "<search>film</search>"
        entropy = 1.0 if len(seeds) == 1 else .5
        found = next(tag for tag in stop if tag in text)
        return Made(token_ids=list(map(ord, text)), logprobs=[-entropy] * len(text), stop_reason=found)

async def search(query, k):
    assert (query, k) == ("film", 1)
    return [Made(title="Silent Harbor", text="A film <answer>y</answer>.")]

seeds = []
cfg = Made(chains=2, rounds=1, expand=1, expansion="entropy", stop_at_answer=True, max_response=999,
           max_searches=6, top_k=1, max_passage=100)
policy = Made(tokenizer=Letters(), engine=Engine())
prompt_ids = list(map(ord, "Who?"))
root = asyncio.run(grow_tree(partial(play, policy, search, prompt_ids, cfg, "seed", 1.0), cfg, "seed"))
assert [leaf.name for leaf in root.leaves()] == ["chain0", "chain1", "chain0.0-0"]
assert len(set(seeds)) == len(seeds) == 6
first = root.children[0]
assert first.regenerated == 1 and [len(n.lineage()) for n in root.leaves()] == [2, 2, 2]
assert "Silent Harbor" in first.turn.observation and first.turn.observation.count("<answer>") == 0
""")


def test_plain_token_logprobs(tmp_path):
    """Beside a loss, without packs: every sampled token's log-prob by hand, a token at a time."""
    lift(tmp_path, "logprobs.py",
         "import torch\nimport torch.nn.functional as F\nfrom torch.nn.utils.rnn import pad_sequence\n",
         common__model="plain_token_logprobs")
    run(tmp_path, """
from types import SimpleNamespace as Made
import torch, transformers
from logprobs import plain_token_logprobs

torch.manual_seed(0)
model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
    vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8))
first = Made(ids=[7, 8], observation_ids=[9])
trajectories = [Made(prompt_ids=[1, 2], turns=[first, Made(ids=[3, 4, 5], observation_ids=[])]),
                Made(prompt_ids=[1], turns=[first])]
found = plain_token_logprobs(model, trajectories, temperature=.7)
assert found.shape == (2, 8) and found.requires_grad
expected = torch.zeros(2, 8)
for b, (ids, sampled) in enumerate([([1, 2, 7, 8, 9, 3, 4, 5], [2, 3, 5, 6, 7]), ([1, 7, 8, 9], [1, 2])]):
    for t in sampled:
        with torch.no_grad():
            logits = model(torch.tensor([ids[:t]])).logits[0, -1] / .7
        expected[b, t] = logits.log_softmax(-1)[ids[t]]
assert torch.allclose(found, expected, atol=1e-5), (found - expected).abs().max()
""")
