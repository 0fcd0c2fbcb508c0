"""Q = 0 1, A = 2, T = 3 4, the line break 9, under a table of bigrams: K(T) is 4 bits, K(A) 2, K(Q) 5."""
import math
from types import SimpleNamespace

import torch
from bi_rar_reward import ReasoningStep, cascade, complexity, distances, step_reward, terms_of

table = torch.zeros(10, 10)
table[9, 0], table[9, 2], table[9, 3], table[0, 1], table[3, 4] = 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 2
table[:, 8] = 1 - table.sum(1)


class Model:
    device = "cpu"

    def __call__(self, input_ids):
        return SimpleNamespace(logits=table[input_ids].log())


terms = terms_of(ReasoningStep((0, 1), (2,), (3, 4)), [9])
K = {name: complexity(Model(), before, ids) for name, (before, ids) in terms.items()}
for term, bits in {"T|QA": 4, "A|QT": 2, "Q|AT": 5, "T|Q": 4, "A|Q": 2, "T|A": 4, "Q|A": 5}.items():
    assert abs(K[term] - bits) < 1e-4, (term, K[term])
d_TA, d_TQ = distances(K)
assert abs(d_TA - 1) < 1e-5 and abs(d_TQ - 1) < 1e-5
reward = cascade([step_reward(d_TA), step_reward(d_TQ)])
assert abs(reward - (1 - (1 - math.exp(-1)) ** 2)) < 1e-5
print(f"two reasoning steps at distance 1 earn {reward:.3f}")
