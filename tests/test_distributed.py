"""Two processes are one: the same metrics, predictions, weights and files, whatever is shared out; they skip
together, end together, and a checkpoint knows nothing of how many they were."""

import json
import math
import operator
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import distributed, rollout, run, training
from common import model as models
from common.files import read_jsonl
from common.rollout import Trajectory, Turn
from common.world import tiny
from tests.conftest import ROOT, rows_of

SMALL = (
    "--warmup-steps 20 --eval-limit 4 --limit 20 --questions-per-step 4 --mini-batch 2 --lr 1e-4 "
    "--micro-tokens 400").split()
TREES = "--chains 3 --expand 2 --rounds 1 --group-size 3 --max-response 80".split()

# ---------------------------------------------------------------- what the processes do

def by_chance(trajectory):
    """A reward that a policy of no skill gets now and then, the same wherever the trajectory was played."""
    return sum(trajectory.turns[0].ids) % 5 / 4


def rewarded(patch):
    """Every script pays by_chance."""
    def of(judge):
        def judged(trajectory, *args):
            trajectory = judge(trajectory, *args)
            trajectory.reward = by_chance(trajectory)
            trajectory.info.em = float(trajectory.reward > .5)
            return trajectory
        return judged
    patch.setattr(at2po, "score", of(at2po.score))
    patch.setattr(bi_rar, "check_answer", of(bi_rar.check_answer))
    patch.setattr(mygo_mujica, "score", of(mygo_mujica.score))
    for stage in omne_r1.REWARD:
        patch.setitem(omne_r1.REWARD, stage, by_chance)


def steadied(patch):
    """AT2PO's update_spread as if each token's log-ratio were a nat higher. Eq 13 divides by the sum of a
    trajectory's turns: where that nearly cancels, rounding alone moves it by 1e-5 to 1e-3."""
    update_spread = at2po.update_spread
    patch.setattr(at2po, "update_spread", lambda moved, *of: update_spread(moved + 1, *of))


def play(script, *args):
    """A run of the script's command line."""
    with pytest.MonkeyPatch.context() as patch:
        rewarded(patch)
        steadied(patch)
        sys.modules[script].main(list(map(str, args)))
    while run.opened:  # this process goes on, and others may write there
        folder = run.opened.pop()
        if folder.lock:
            folder.lock.close()


def learn(folder, lora, cases, lr=1e-3):
    """Updates of ATPO on made-up trajectories, one a case: [(loss, norm)], the weights after them."""
    with run.program():
        torch.manual_seed(0)
        model = distributed.shard(models.load_model(folder, lora=lora))
        optimizer = training.make_optimizer(model, lr)
        cfg = at2po.Config(micro_tokens=60, clip_low=.03, clip_high=.04)
        told = []
        for case in cases:
            trajectories = made_up(**case)
            batches = training.prepare(model, None, trajectories, cfg.micro_tokens)
            meter = training.Meter(batches)
            for b in batches:
                logprobs = models.turn_logprobs(model, b)
                loss, stats = at2po.policy_loss(*logprobs, b, cfg, len(trajectories), 1)
                loss = loss + sum(t.reward for t in b.trajectories)  # (0, or what spoils it alone)
                (loss * b.weight).backward()
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(model, 1.0)
            if meter.end_update(norm):
                optimizer.step()
            optimizer.zero_grad()
            told.append((meter.means(), [b.weight for b in batches]))
        weights = {n: distributed.whole(p.detach()).numpy().copy() for n, p in model.named_parameters()}
        cut = [hasattr(p, "device_mesh") for p in model.parameters()]
        return told, weights, sum(cut) / len(cut)


def made_up(trees, seed, advantage=0.0, loss=0.0):
    """Trajectories of trees of uneven size, with advantages. To the last one's an advantage is added, and its
    reward is what learn() adds to the loss."""
    g = torch.Generator().manual_seed(seed)

    def turn(n):
        ids = torch.randint(5, 60, (n,), generator=g).tolist()
        return Turn(ids, [-4.0] * n, "x", "", ids[:3])

    made = []
    for tree in range(trees):
        prompt, first = turn(8 + 3 * tree).ids, turn(6)
        for leaf in range(1 + tree % 3):
            turns = [first, turn(3 + (5 * tree + leaf) % 9)]
            advantages = torch.randn(2, generator=g).tolist()
            made.append(Trajectory(str(tree), prompt, turns, advantages=advantages))
    made[-1].advantages[-1] += advantage
    made[-1].reward = loss
    return made


# ---------------------------------------------------------------- two processes

def environment(port, rank, world=2):
    """What torchrun tells a process."""
    return {
        "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}


def work(rank, port, jobs, results):
    """A process that does what it is told until it is told nothing."""
    os.environ |= environment(port, rank)
    torch.set_num_threads(1)
    for function, args in iter(jobs.get, None):
        try:
            results.put((rank, function(*args), None))
        except BaseException as error:  # SystemExit, too
            results.put((rank, None, repr(error)))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def pair():
    """both(function, *args): what it returns on rank 0 and on rank 1."""
    context = torch.multiprocessing.get_context("fork")
    jobs = [context.Queue(), context.Queue()]
    results = context.Queue()
    port = free_port()
    workers = [context.Process(target=work, args=(r, port, jobs[r], results), daemon=True) for r in (0, 1)]
    for worker in workers:
        worker.start()

    def both(function, *args):
        for queue in jobs:
            queue.put((function, args))
        found = {}
        for _ in workers:
            rank, value, error = results.get(timeout=600)  # (a rank waits for ever where the other is gone)
            assert error is None, (rank, error)
            found[rank] = value
        return found[0], found[1]

    yield both
    for queue in jobs:
        queue.put(None)
    for worker in workers:
        worker.join(20)


def random_policy(folder, tied=True):
    """A tiny policy of random weights."""
    tokenizer = tiny.tiny_tokenizer([f"w{i}" for i in range(70)], [])
    model = tiny.tiny_model(tokenizer, width=32)
    if not tied:
        model.config.tie_word_embeddings = False
        head = model.get_input_embeddings().weight.detach() + .01
        model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_policy(tmp_path_factory.mktemp("policy"))


def same_run(one, two):
    """Whether two run folders tell the same, up to rounding."""
    a, b = (rows_of(folder / "metrics.jsonl") for folder in (one, two))
    assert len(a) == len(b) and len(a) > 0
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == pytest.approx(y[key], rel=1e-5, abs=1e-5), key
    files = []
    for folder in (one, two):
        files.append({PART.sub("", str(f.relative_to(folder))) for f in folder.rglob("*") if f.is_file()})
    assert files[0] == files[1]
    for file in one.glob("eval_*.json"):
        x, y = (json.loads((f / file.name).read_text()) for f in (one, two))
        assert [p["answer"] for p in x["predictions"]] == [p["answer"] for p in y["predictions"]]
        assert x["summary"] == y["summary"]
    x, y = tensors(one / "checkpoint"), tensors(two / "checkpoint")
    assert x.keys() == y.keys()
    for key in x:  # (Adam's step of a weight whose gradient is next to nothing follows its rounding)
        difference = (x[key] - y[key]).abs()
        assert difference.max() < 1e-4 and difference.mean() < 1e-6, key
    return a


PART = re.compile(r"-\d-of-\d(?=\.safetensors)")  # of a file that a rank wrote


def tensors(folder):
    """{(file, name): tensor} of a checkpoint, however many ranks wrote it."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        for name, tensor in load_file(str(file)).items():
            key = PART.sub("", str(file.relative_to(folder))), name
            assert key not in found
            found[key] = tensor
    return found


# ---------------------------------------------------------------- tests

@pytest.mark.parametrize("lora, tied", [(0, True), (0, False), (4, True)])
def test_an_update_is_that_of_one_process(pair, tmp_path, lora, tied):
    folder = random_policy(tmp_path / "policy", tied)
    cases = [{"trees": trees, "seed": seed} for seed, trees in enumerate((6, 5, 1, 7))]
    one, weights, _ = learn(folder, lora, cases, 5e-4)
    (two, cut_weights, cut), (other, _, _) = pair(learn, folder, lora, cases, 5e-4)
    assert cut == 1.0
    for (a, _), (b, here), (c, there) in zip(one, two, other, strict=True):
        assert len(here) == len(there) and 1.0 in here + there
        for key in ("train/loss", "train/grad_norm", "train/kl", "train/ratio", "train/clip_fraction"):
            assert b[key] == c[key] == pytest.approx(a[key], rel=1e-5, abs=1e-5)
    # one question of one trajectory: a rank has nothing to learn from, and keeps step
    assert sorted([two[2][1], other[2][1]]) == [[0.0], [1.0]]
    assert weights.keys() == cut_weights.keys() and ("lm_head.weight" in weights) != tied
    for name in weights:
        assert abs(weights[name] - cut_weights[name]).max() < 1e-5, name


@pytest.mark.parametrize("spoilt", ["advantage", "loss"])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(pair, folder, spoilt):
    cases = [{"trees": 6, "seed": 0}, {"trees": 6, "seed": 1, spoilt: math.inf}, {"trees": 6, "seed": 2}]
    _, weights, _ = learn(folder, 0, [cases[0], cases[2]])
    (two, skipped, _), (other, _, _) = pair(learn, folder, 0, cases)
    assert [t["train/not_finite"] for t, _ in two] == [t["train/not_finite"] for t, _ in other] == [0, 1, 0]
    for name in weights:
        assert abs(weights[name] - skipped[name]).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("lora, loss", [(0, "atpo"), (4, "grpo")])
def test_a_run_goes_on_with_another_number_of_ranks(pair, tmp_path, lora, loss):
    args = [*SMALL, *TREES, "--lora", lora, "--loss", loss, "--save-every", "1", "--name", "a"]
    play("at2po", *args, "--steps", 3, "--out", tmp_path / "one")
    args += ["--out", tmp_path / "two"]
    pair(play, "at2po", *args, "--steps", 1)
    parts = [load_file(str(f)) for f in (tmp_path / "two/at2po/a/checkpoint").glob("optimizer-?-of-2.*")]
    sizes = [sum(tensor.numel() for tensor in part.values()) for part in parts]
    assert len(sizes) == 2 and max(sizes) < .7 * sum(sizes)  # each rank wrote its part
    play("at2po", *args, "--steps", 2, "--resume")
    assert (tmp_path / "two/at2po/a/checkpoint/optimizer.safetensors").exists()
    pair(play, "at2po", *args, "--steps", 3, "--resume")
    rows = same_run(tmp_path / "one/at2po/a", tmp_path / "two/at2po/a")
    assert sum(r["train/updates"] for r in rows) == 12  # three steps, two mini-batches, two passes
    assert (tmp_path / "two/at2po/a/trajectories.html").exists()


OTHERS = {
    "bi_rar": "--world plain --stage forward --group-size 3 --max-turn 30 --max-searches 2 "
              "--explain-limit 3 --kl-coef .01",
    "mygo_mujica": "--envs text --stage all --sft-trajectories 4 --sft-epochs 1 --max-attempts 4 "
                   "--max-turn 20 --max-rounds 2",
    "omne_r1": "--stage ppo --per-graph 8 --group-size 3 --max-turn 12 --kl-coef .01"}
SFT = "--stage sft --per-graph 8 --sft-sampled 4 --sft-templates 6 --sft-epochs 1 --max-turn 12".split()


@pytest.mark.slow
@pytest.mark.parametrize("script", OTHERS)
def test_the_other_scripts(pair, tmp_path, script):
    args = [*SMALL, *OTHERS[script].split(), "--warmup-steps", 3, "--steps", 1, "--name", "a"]
    play(script, *args, "--out", tmp_path / "one")
    pair(play, script, *args, "--out", tmp_path / "two")
    made = [f.parent for f in (tmp_path / "one" / script).glob("*/metrics.jsonl")]
    assert made
    for one in made:
        same_run(one, tmp_path / "two" / script / one.name)
    if script == "omne_r1":  # stage 2: the ranks sample, each its part, what stage 1 has learned
        args = [*SMALL, *SFT, "--warmup-steps", 3, "--name", "a"]
        play(script, *args, "--out", tmp_path / "one")
        pair(play, script, *args, "--out", tmp_path / "two")
        base = [tmp_path / side / script for side in ("one", "two")]
        by_id = operator.itemgetter("id")
        one, two = (read_jsonl(folder / "a-sft-data/sharegpt.jsonl") for folder in base)
        assert one and one == two
        one, two = (read_jsonl(folder / "a-sft-data/sampled.jsonl") for folder in base)
        assert one and sorted(one, key=by_id) == sorted(two, key=by_id)  # each as it ended
        same_run(*(folder / "a-sft-think" for folder in base))


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_with_its_own_words(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import at2po\n"
        "from common import distributed\n"
        "real = at2po.score_trees\n"
        "def score_trees(*args):\n"
        "    if distributed.rank() == 0:\n"
        "        raise ValueError('the third leaf is ripe')\n"
        "    return real(*args)\n"
        "at2po.score_trees = score_trees\n"
        "at2po.main(sys.argv[1:])\n")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(),
        program, *SMALL, *TREES, "--steps", 2, "--name", "a", "--out", tmp_path]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode != 0 and "ValueError: the third leaf is ripe" in done.stderr


# ---------------------------------------------------------------- what is shared out

def test_portions_are_about_equal_and_keep_trees_together():
    made = made_up(6, 0)
    parts = rollout.portions(made, 2)
    assert [id(t) for part in parts for t in part] == [id(t) for t in rollout.prefix_order(made)]
    tokens = [sum(t.length for t in part) for part in parts]
    assert max(tokens) - min(tokens) <= 2 * max(t.length for t in made)
