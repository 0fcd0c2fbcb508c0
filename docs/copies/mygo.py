import torch
from mygo import Question, Team, mini_batches, mle_loss, sample, select

# the first attempts have mean (1 + 0 + 0 + .6) / 4 = .4, so K = (.4 + 1) / 2 = .7
rewards = {"a": [1, 1, 1], "b": [0] * 16, "c": [0, 1, 0, 0, 1, .9], "d": [.6] * 16}
team = Team(rewards)
made, K = sample(team, [Question(name) for name in rewards], step=1, K=.5)
assert abs(K - .7) < 1e-12, K
assert [len(group) for group in made] == [3, 16, 6, 16] and len(set(team.asked)) == 41
chosen = [select(group, K) for group in made]
assert [[t.reward for t in group] for group in chosen] == [[1, 1, 1], [], [1, 1, .9], []]
assert [len(part) for part in mini_batches(chosen, 4)] == [3, 3]
assert sample(Team(rewards), [Question("b")], 1, .8)[1] == .8               # it never falls
assert sample(Team(rewards), [Question("a")], 1, .5)[1] < 1                 # and stays below r_sup
assert sample(Team(rewards), [Question("d")], 1, .65, raise_K=False)[1] == .65

mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-9.0, -3.0, -4.0]])
assert float(mle_loss(logprobs, mask, 4)) == 2.5                            # (1 + 2 + 3 + 4) / 4

# the loop learns to say the word with reward 1
team, K, means = Team(), .5, []
optimizer = torch.optim.Adam([team.logits], lr=.2)
for step in range(12):
    made, K = sample(team, [Question(f"q{i}") for i in range(8)], step, K)
    means.append(sum(group[0].reward for group in made) / len(made))
    for part in mini_batches([select(group, K) for group in made], 8):
        words = torch.tensor([[t.turns[0].ids[0]] for t in part])           # (B, 1)
        loss = mle_loss(team.logits.log_softmax(0)[words], torch.ones(words.shape), words.numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
assert means[-1] == 1.0 > means[0] and team.logits.softmax(0)[2] > .9, (means, team.logits)
print("mean reward by step", [round(mean, 2) for mean in means])
