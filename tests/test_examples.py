"""Each of examples/ runs small, and its numbers are ours."""

import asyncio
import contextlib
import doctest
import importlib
import json
import sys
import types

import pytest
import torch

import at2po
from common.model import token_logprobs
from common.rollout import Trajectory, Turn, collate


def example(name):
    return importlib.import_module(f"examples.{name}")


# ---------------------------------------------------------------- TRL

@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
    folder = str(tmp_path_factory.mktemp("trl"))
    return example("trl_atpo").make_trainer(folder, questions=8, chains=2, rounds=1, expand=2)


def test_trl_s_batch_has_our_loss_and_gradient(trainer):
    rows = [dict(row) for row in trainer.train_dataset for _ in range(4)][:16]
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(rows)
    trajectories = [row["leaf"].trajectory for row in rows]
    assert sum(bool(t.advantages) for t in trajectories) >= 4, "no tree teaches anything"
    for t in trajectories:
        t.advantages = t.advantages or [0.0] * len(t.turns)
    batch = collate(trajectories)
    with torch.no_grad():
        batch.old_logprobs = token_logprobs(trainer.model, batch)
        generator = torch.Generator().manual_seed(0)
        for p in trainer.model.parameters():
            p += .01 * torch.randn(p.shape, generator=generator)
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    theirs = trainer._compute_loss(trainer.model, inputs)
    logprobs = token_logprobs(trainer.model, batch)
    ours, stats = at2po.atpo_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.response_mask, batch.turn_ids,
        trainer.epsilon_low, trainer.epsilon_high)
    assert 0 < stats["clipped_tokens"] < stats["tokens"]
    assert trainer._metrics["train"]["clip_ratio/turns"][-1] == stats["clipped_tokens"] / stats["tokens"]
    assert torch.allclose(theirs, ours, atol=1e-5)
    alone = example("trl_loss")  # finds the same turns in TRL's own mask
    assert doctest.testmod(alone).failed == 0
    del inputs["turn_ids"]
    again = alone.ATPOLossTrainer._compute_loss(trainer, trainer.model, inputs)
    assert torch.allclose(again, ours, atol=1e-5)
    its, = torch.autograd.grad(theirs, weight)
    gradient, = torch.autograd.grad(ours, weight)
    assert gradient.abs().max() > 1e-4 and torch.allclose(its, gradient, atol=1e-5)


def test_trl_trains(trainer):
    before = trainer.model.model.embed_tokens.weight.detach().clone()
    trainer.train()
    assert trainer.state.global_step == 2
    assert not torch.equal(before, trainer.model.model.embed_tokens.weight)


# ---------------------------------------------------------------- verl

@pytest.fixture
def verl_loss(monkeypatch):
    """The example's loss, as verl finds it by its name; where verl is not installed, by a registry with the
    signature of verl 0.9's (core_algos.register_policy_loss)."""
    try:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        example("verl_atpo")
        return get_policy_loss_fn("atpo")
    except ImportError:
        registry = {}
        core = types.ModuleType("verl.trainer.ppo.core_algos")
        core.register_policy_loss = lambda name: lambda function: registry.setdefault(name, function)
        for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, core.__name__, core)
        monkeypatch.delitem(sys.modules, "examples.verl_atpo", raising=False)
        example("verl_atpo")
        return registry["atpo"]


def a_batch():
    generator = torch.Generator().manual_seed(1)

    def turn(n, seen):
        return Turn([1] * n, [-.5] * n, "", "", observation_ids=[2] * seen)

    first = turn(3, 2)
    batch = collate([
        Trajectory("", [3], [first, turn(2, 1), turn(1, 0)], advantages=[1.0, -2.0, .5]),
        Trajectory("", [3], [first, turn(4, 0)], advantages=[1.0, -1.0])])
    old = -torch.rand(batch.input_ids.shape, generator=generator)
    new = old + .3 * torch.randn(old.shape, generator=generator)
    return batch, old, new.requires_grad_()


@pytest.mark.parametrize("whole", [{}, {"dp_size": 2, "global_batch_size": 12, "batch_num_tokens": 99}])
@pytest.mark.parametrize("weighed", [False, True])
def test_verl_s_loss_is_ours(verl_loss, whole, weighed):
    batch, old, new = a_batch()
    made = example("verl_atpo")
    assert torch.equal(made.turns_of(batch.response_mask), batch.turn_ids)
    assert doctest.testmod(made) == (0, 1)
    config = types.SimpleNamespace(clip_ratio_low=.2, clip_ratio_high=.1, global_batch_info=whole)
    times, weights = 1.0, None
    if whole:
        times = 2 / (12 / 2)    # the mean over two sequences; here of twelve, on one of two ranks
    if weighed:
        times, weights = 1.5 * times, torch.full(old.shape, 1.5)
    theirs, metrics = verl_loss(
        old_log_prob=old, log_prob=new, advantages=batch.advantages, config=config,
        response_mask=batch.response_mask.float(), loss_agg_mode="seq-mean-token-mean",
        rollout_is_weights=weights)
    ours, stats = at2po.atpo_loss(new, old, batch.advantages, batch.response_mask, batch.turn_ids, .2, .1)
    assert torch.allclose(theirs, ours * times)
    assert metrics["actor/pg_clipfrac"] == stats["clipped_tokens"] / stats["tokens"] > 0
    gradients = [torch.autograd.grad(loss, new)[0] for loss in (theirs, ours * times)]
    assert torch.allclose(*gradients)
    with pytest.raises(ValueError, match="seq-mean-token-mean"):
        verl_loss(old, new, batch.advantages, batch.response_mask, "token-mean", config)


# ---------------------------------------------------------------- tree attention

def test_a_tree_has_the_log_probs_and_gradients_of_its_paths():
    loop = example("tree_attention_loop")
    assert doctest.testmod(loop) == (0, 1)
    model = loop.main(steps=1)
    tree = ([1, 2, 3], [([5, 6], [([7, 8, 9], []), ([9], [])]), ([10, 11], [])])
    paths = [[1, 2, 3, 5, 6, 7, 8, 9], [1, 2, 3, 5, 6, 9], [1, 2, 3, 10, 11]]
    places = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8], [0, 1, 2, 9, 10]]
    found = loop.tree_logprobs(model, tree)
    alone = torch.zeros(11)
    for ids, at in zip(paths, places, strict=True):
        row = torch.tensor(ids)
        logprobs = model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        alone = alone.index_put((torch.tensor(at[1:]),), logprobs)
    assert torch.allclose(found, alone, atol=1e-5)
    weight = model.model.layers[0].self_attn.q_proj.weight
    gradients = [torch.autograd.grad(x.sum(), weight)[0] for x in (found, alone)]
    assert torch.allclose(*gradients, atol=1e-4)


def test_the_plain_loop_learns(capsys):
    example("tree_attention_loop").main(steps=8)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.split("\n") if line]
    assert losses[-1] < losses[0] - .3


# ---------------------------------------------------------------- verifiers

@pytest.fixture
def world(monkeypatch):
    """The example's module; where verifiers is not installed, over classes that have what it uses of 0.4."""
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        class Any:
            def __init__(self, *given, **fields):
                vars(self).update(fields)

            def __class_getitem__(cls, item):
                return cls

        class Taskset(Any):
            def __init__(self, config):
                self.config = config

        class Task(Any):
            def __init__(self, row, config):
                self.data = row

        v1 = types.ModuleType("verifiers.v1")
        vars(v1).update(TaskData=Any, TasksetConfig=Any, EnvConfig=Any, AgentConfig=Any, Env=Any)
        vars(v1).update(Taskset=Taskset, Task=Task)
        monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
        monkeypatch.setitem(sys.modules, "verifiers.v1", v1)
        sys.modules["verifiers"].v1 = v1
        monkeypatch.delitem(sys.modules, "examples.verifiers_world", raising=False)
    return example("verifiers_world")


class Talk:
    """A model that says what it is told. Keeps what it heard, and what was recorded."""

    def __init__(self, *replies):
        self.replies, self.heard, self.rewards, self.metrics = list(replies), [], {}, {}
        self.trace = self

    async def turn(self, message=None):
        self.heard.append(message)
        return types.SimpleNamespace(last_reply=self.replies.pop(0) if self.replies else "")

    @contextlib.asynccontextmanager
    async def interaction(self, task):
        yield self

    def record_reward(self, name, value):
        self.rewards[name] = value

    def record_metric(self, name, value):
        self.metrics[name] = value


def test_the_world_as_an_environment_of_verifiers_is_scored_as_here(world):
    config = types.SimpleNamespace(split="test", questions=5, task=None, system_prompt=None, data="",
                                   corpus="")
    taskset = world.World(config)
    tasks = list(taskset.load())
    assert len(tasks) == 5 and tasks[0].data.system_prompt == at2po.SYSTEM_PROMPT
    question = taskset.world.questions[0]
    env = types.SimpleNamespace(taskset=taskset)

    def played(*replies):
        talk = Talk(*replies)
        asyncio.run(world.SearchWorld.run(env, tasks[0], types.SimpleNamespace(agent=talk)))
        return talk

    gold = question.answers[0]
    title = question.supporting_facts[0][0]
    search = f"<think> a </think> <search> {title} "          # servers leave the stop string out
    answer = f"<think> b </think> <answer> \\boxed{{ {gold} }} "
    right = played(search, answer)
    assert right.rewards == {"exact_match": 1.0} and right.metrics == {"searches": 1}
    assert right.heard[0] is None and f'Page 1: "{title}"' in right.heard[1]
    assert played(answer).rewards == {"exact_match": 1.0}
    assert played(search, answer.replace(gold, "somebody")).rewards == {"exact_match": 0.0}
    assert played(search, f"<think> {answer}").rewards == {"exact_match": -1.0}, "thoughts not paired"
    assert played(search, f"{answer}</answer> <answer> \\boxed{{ {gold} }} ").rewards == {"exact_match": -1.0}
    endless = played(*[search] * 12)
    assert len(endless.heard) == at2po.Config().max_searches + 2 and at2po.LIMIT_MESSAGE in endless.heard[-1]


def test_own_questions_are_an_environment_of_verifiers(world, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "Who made Tern?", "answer": "Ann"}\n')
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "1", "contents": "\"Tern\"\nTern is by Ann."}) + "\n")
    own = types.SimpleNamespace(data=str(tmp_path / "q.jsonl"), corpus=str(tmp_path / "c.jsonl"), questions=9,
                                task=None)
    taskset = world.World(own)
    assert [task.data.prompt for task in taskset.load()] == ["Who made Tern?"]
    assert taskset.world.retriever.search(["Tern"], 1)[0][0].text == "Tern is by Ann."


# ---------------------------------------------------------------- a tool of one's own

def test_a_calculator_evaluates_arithmetic_alone():
    tool = example("calculator").Calculator()
    results = [tool.result(q) for q in ("12 * 7", "30 + 8", "9 % 4", "999 + 999")]
    assert results == ["84", "38", "1", "1998"]
    for query in ("2 ** 9", "__import__('os')", "1 + 1 + 1", "9999 * 2", "5 % 0", "", "1 +\n2", "٣ + ٤"):
        assert tool.result(query) == "nothing", query


def test_a_policy_learns_what_to_ask_the_calculator(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = example("calculator")
    sums = tmp_path / "sums"
    made.main(sums)
    told = (sums / "right.jsonl").read_text().splitlines()
    assert len(told) == 3200
    (sums / "right.jsonl").write_text("\n".join(told[:32]))
    flawed = 0
    for n in range(40):
        gold, said = made.question(n, drawn=.5)
        right = made.question(n)
        assert right[0]["answer"] in right[1][-1]["value"]
        flawed += said != right[1]
    assert 10 < flawed < 30
    small = ("--retriever own:examples.calculator:Calculator --prompt-form chat --stop-at-answer "
             "--warmup-steps 3 --steps 1 --questions-per-step 2 --mini-batch 1 --chains 2 --rounds 1 "
             "--expand 2 --max-response 60 --token-budget 0 --eval-limit 20 --name x --out").split()
    files = {"model": "model", "data": "train.jsonl", "eval-data": "test.jsonl", "warmup-data": "right.jsonl"}
    at2po.main([*(f"--{flag}={sums / name}" for flag, name in files.items()), *small, str(tmp_path)])
    folder = tmp_path / "at2po/x"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((folder / "eval_test.json").read_text())["summary"]["n"] == 20
    assert (folder / "trajectories.html").exists()
