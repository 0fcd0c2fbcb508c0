"""Two chains, then the turn of highest entropy once more: the first of chain0, sampled anew from the
prompt."""
import asyncio
from functools import partial
from types import SimpleNamespace as Made

from tree import Player, grow_tree, play


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
           max_searches=6, top_k=1, max_passage=100, prompt_form="system")
policy = Made(tokenizer=Letters(), engine=Engine())
prompt_ids = list(map(ord, "Who?"))
player = Player(policy, search, prompt_ids, cfg, "seed", 1.0)
root = asyncio.run(grow_tree(partial(play, player), cfg, "seed"))
assert [leaf.name for leaf in root.leaves()] == ["chain0", "chain1", "chain0.0-0"]
assert len(set(seeds)) == len(seeds) == 6
first = root.children[0]
assert [len(n.lineage()) for n in root.leaves()] == [2, 2, 2]
assert "Silent Harbor" in first.turn.observation and first.turn.observation.count("<answer>") == 0
print("leaves", [leaf.name for leaf in root.leaves()])
