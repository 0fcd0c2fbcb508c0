"""Beside a loss, without packs: every sampled token's log-prob by hand, a token at a time."""
from types import SimpleNamespace as Made

import torch
import transformers
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
print("log-probs", found.shape)
