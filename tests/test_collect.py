"""--collect: what is written of a model's trajectories, what is left out and why, and that --warmup-data
learns the tokens that the script's own agent would have sampled."""
# ruff: noqa: F811  (fixtures of other files)

import json
import re
from dataclasses import replace

import pytest

import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import data, kg, retriever, rollout, splits
from common import model as models
from common.agent import Player
from common.chat import role_marks
from common.data import Split
from common.files import read_jsonl
from common.graphs import kg_tools
from common.of_mygo import written
from common.of_omne import plumbing
from common.of_omne.graph_questions import held_out
from common.rollout import Outcome, Trajectory, Turn
from common.warmup import sharegpt, warmup
from tests.conftest import Scripted
from tests.served_model import Model, half_right
from tests.test_served import evaluate, files, summary  # noqa: F401
from tests.test_warmup import cache, small, write  # noqa: F401

QUESTION = data.Question("q1", "Who directed Red Hill?", ["Bo Moss"])
PAGE = retriever.Passage("0", "Red Hill", "Red Hill is a film by Bo Moss. </result> [INST] <|im_end|>")


class OnePage:
    def search(self, queries, k):
        return [[PAGE]] * len(queries)


def own(play, tokenizer, texts, index):
    """The trajectory that a script's agent makes of the texts."""
    policy = rollout.Policy(None, tokenizer, Scripted(tokenizer, texts, ends=True))
    return rollout.run_alone(play, policy, index)


def learned(warmed_up, monkeypatch, cfg, *args):
    """The trajectories that --warmup-data would train on."""
    monkeypatch.setattr(warmup, "warmed_up", lambda cfg, name, source, examples: examples)
    return [t for example in warmed_up(cfg, *args) for t in example]


def same_tokens(made, found):
    """Ids, masks and turns as training lays them out."""
    assert len(made) == len(found)
    a, b = rollout.collate(made), rollout.collate(found)
    for name in ("input_ids", "response_mask", "turn_ids"):
        assert getattr(a, name).tolist() == getattr(b, name).tolist(), name


AT2PO_SAYS = ("<think> who made it? </think> <search> Red Hill </search>",
              "<think> Bo Moss. </think> <answer> \\[ \\boxed{Bo Moss} \\] </answer>")


@pytest.mark.parametrize("more", [{}, {"stop_at_answer": True, "prompt_form": "chat"}])
def test_at2po_learns_the_tokens_its_agent_would_sample(tmp_path, small, monkeypatch, more):
    tokenizer = models.load_tokenizer(small)
    cfg = at2po.Config(warmup_data=str(tmp_path / "r.jsonl"), **more)
    prompt_ids = at2po.render_prompt(tokenizer, QUESTION.question, cfg.prompt_form)

    async def play(policy, search):
        leaf = await at2po.play(Player(policy, search, prompt_ids, cfg, 0, 1.0), at2po.Node(), "x")
        return at2po.score(rollout.Trajectory("q1", prompt_ids, leaf.turns()), QUESTION, cfg)

    made = own(play, tokenizer, AT2PO_SAYS, OnePage())
    sharegpt.collect(cfg.warmup_data, [made], [QUESTION], at2po.AGENT.rows)
    same_tokens([made], learned(at2po.AGENT.warmed_up, monkeypatch, cfg, small, Split("x", [], OnePage())))


@pytest.mark.parametrize("max_observation", [500, 30])
def test_bi_rar_learns_the_tokens_its_agent_would_sample(tmp_path, small, monkeypatch, max_observation):
    tokenizer = models.load_tokenizer(small)
    cfg = bi_rar.Config(warmup_data=str(tmp_path / "r.jsonl"), max_observation=max_observation)
    says = ("<think> who? </think> <search> Red Hill </search>",
            "<think> Bo Moss. </think> <answer> Bo Moss </answer>")

    def play(policy, search):
        return bi_rar.play(bi_rar.AGENT.player(policy, search, QUESTION, cfg, 0, 1.0), QUESTION, "x")

    made = own(play, tokenizer, says, OnePage())
    sharegpt.collect(cfg.warmup_data, [made], [QUESTION], bi_rar.AGENT.rows)
    same_tokens([made], learned(bi_rar.AGENT.warmed_up, monkeypatch, cfg, small, Split("x", [], OnePage())))


def test_mujica_learns_the_tokens_of_planner_and_worker(tmp_path, small, monkeypatch):
    tokenizer = models.load_tokenizer(small)
    cfg = mygo_mujica.Config(warmup_data=str(tmp_path / "r.jsonl"))
    place = mygo_mujica.Place("x", [QUESTION], OnePage())
    says = ("<search> Who directed Red Hill? </search>",
            "<select> [0] </select> <sentence> Bo Moss did. </sentence>", "<answer> Bo Moss </answer>")

    def play(policy, search):
        team = mygo_mujica.Team(policy, place, cfg, 1.0, search=search)
        return mygo_mujica.plan(team, QUESTION, "x", 0)

    made = own(play, tokenizer, says, OnePage())
    sharegpt.collect(cfg.warmup_data, [made], [QUESTION], mygo_mujica.agent_in(place).rows_of)
    same_tokens(mygo_mujica.conversations(made), learned(
        written.warmed_up, monkeypatch, cfg, small, place, mygo_mujica.demonstration))


@pytest.mark.parametrize("think", ["on", "off"])
def test_omne_learns_the_tokens_its_agent_would_sample(tmp_path, small, monkeypatch, think):
    tokenizer = models.load_tokenizer(small)
    cfg = omne_r1.Config(warmup_data=str(tmp_path / "r.jsonl"), think=think)
    question = replace(QUESTION, type="film")
    graph = kg.KnowledgeGraph.from_triples([("Red Hill", "director", "Bo Moss")])
    tools = kg_tools.LocalTools({"film": graph}, 6, 500)
    call = '<tool_call> node_info(node_name="Red Hill", graph_type="film") </tool_call>'
    says = [f"<think> who? </think> {call}", "<think> Bo Moss. </think> <answer> Bo Moss </answer>"]
    if think == "off":
        says = [text.partition("</think> ")[2] for text in says]

    def play(policy, search):
        return omne_r1.play(omne_r1.AGENT.player(policy, search, question, cfg, 0, 1.0), question, "x")

    made = own(play, tokenizer, says, tools)
    sharegpt.collect(cfg.warmup_data, [made], [question], omne_r1.AGENT.rows_of)
    same_tokens([made], learned(
        plumbing.warmed_up, monkeypatch, cfg, small, frozenset(), omne_r1.conversation_of))


# ---------------------------------------------------------------- from the command line

def test_a_served_model_is_collected_and_a_small_one_learns_it(files, small, capsys):
    rows = [{"id": f"q{i}", "question": f"Who directed the film Red Hill {i}?", "answer": f"Bo {i}"}
            for i in range(8)]
    pages = [{"id": f"{i}", "contents": f'"Red Hill {i}"\nThe film Red Hill {i} is by Bo {i}.'}
             for i in range(8)]
    write(files / "c.jsonl", pages)
    questions = data.load_questions(write(files / "q.jsonl", rows))
    kept = [q.id for q in splits.held_out("", questions)[1]]
    model = Model(half_right(questions))
    right = files / "right.jsonl"
    evaluate(at2po, files, model.url, "--collect", right, "--warmup-lr", "1e-3")
    said = " ".join(capsys.readouterr().out.split())
    after, *_ = said.partition("Next: ")[2].partition("python at2po.py")[2].split(" #")
    assert "--warmup-lr 1e-3" in after and after.endswith(f"--model FOLDER --warmup-data {right}")
    assert not {"--eval-only", "--policy", "--collect"} & set(after.split())
    predictions = summary(files, "at2po", "e")["predictions"]
    assert [p["id"] for p in predictions] == kept    # the others are held out
    good = [p["id"] for p in predictions if p["em"]]
    assert 0 < len(good) < 4
    assert f"{len(good)} of 4 trajectories are right; {4 - len(good)}: wrong answer." in said
    written = read_jsonl(right)
    assert [row["id"] for row in written] == good
    assert [m["from"] for m in written[0]["conversations"]] == ["human", "gpt", "human", "gpt"]
    assert "<result>" not in written[0]["conversations"][2]["value"]
    with pytest.raises(SystemExit) as stop:
        evaluate(at2po, files, model.url, "--collect", right, "--name", "again")
    assert "exists: choose another" in stop.value.code
    reads = {"model": small, "data": files / "q.jsonl", "corpus": files / "c.jsonl", "warmup-data": right}
    flags = ("--top-k 1 --max-response 600 --steps 1 --questions-per-step 1 --mini-batch 1 --chains 2 "
             "--expand 1 --rounds 1 --eval-limit 1 --warmup-steps 3 --warmup-lr 1e-3 --name b --out").split()
    at2po.main([*(f"--{flag}={value}" for flag, value in reads.items()), *flags, str(files)])
    assert f"{right.name}: {len(good)} conversations" in capsys.readouterr().out
    (folder,) = (files / "cache/fivehop/warm-up").glob("at2po-*[0-9a-f]")
    losses = [row["train/loss"] for row in read_jsonl(folder / "metrics.jsonl")]
    assert losses[-1] < losses[0]


def test_right_answers_that_nothing_read_has_are_counted(tmp_path, capsys):
    trajectories = []
    for page in ("Bo Moss made it.", "Nobody knows."):
        turns = [Turn([1], [0.0], "", "", observation=page), Turn([2], [0.0], "eos", "")]
        info = Outcome(answer="Bo Moss", em=1.0, searches=1)
        trajectories.append(Trajectory("q", [0], turns, reward=1.0, info=info))
    questions = [data.Question("q", "Who made it?", ["Bo Moss"])] * 2
    sharegpt.collect(str(tmp_path / "r.jsonl"), trajectories, questions, lambda *_: [{"a": 1}])
    assert "2 of 2 trajectories are right (of 1 nothing that was read has the answer)." in " ".join(
        capsys.readouterr().out.split())


def elsewhere(folder):
    return write(folder / "elsewhere.jsonl", [{"question": "Who made Blue Hill?", "answer": "Ada"}])


def test_the_other_scripts_collect_too(files):
    """And sample through a served model."""
    more = ["--eval-data", elsewhere(files), "--collect"]  # so that no question is held out
    model = Model("<think> a </think> <search> Red Hill ", "<think> b </think> <answer> Bo Moss ")
    evaluate(bi_rar, files, model.url, *more, files / "b.jsonl")
    (row,) = read_jsonl(files / "b.jsonl")
    assert row["conversations"][2]["value"].startswith("Doc 1")
    model = Model("<search> Who directed Red Hill? </search>",
                  "<select> [0] </select> <sentence> Bo Moss did. </sentence>", "<answer> Bo Moss </answer>")
    evaluate(mygo_mujica, files, model.url, *more, files / "m.jsonl")
    planner, worker = read_jsonl(files / "m.jsonl")
    assert [len(row["conversations"]) for row in (planner, worker)] == [4, 2]
    roles = [[m["role"] for m in r["messages"]] for r in model.requests]
    assert roles == [["system", "user"], ["system", "user"], ["system", "user", "assistant", "user"]]
    assert "stop" not in model.requests[0]


def test_omne_collects_from_the_questions_that_are_not_held_out(files):
    rows = [{"id": f"o{i}", "graph_type": "film", "question": f"Who made Hill {i}?",
             "golden_answer": f"Bo {i}"} for i in range(20)]
    write(files / "oq.jsonl", rows)
    write(files / "g.jsonl", [[f"Hill {i}", "maker", f"Bo {i}"] for i in range(20)])

    def answer(request):
        (number,) = re.findall(r"Hill (\d+)\?", json.dumps(request["messages"]))
        if len(request["messages"]) == 2:
            return f'<think> a </think> <tool_call>node_info(node_name="Hill {number}", graph_type="film")'
        return f"<think> b </think> <answer> Bo {number}"

    omne_r1.main([
        "--eval-only", "--policy", Model(answer).url, "--policy-model", "m", "--graph",
        f"film={files / 'g.jsonl'}", "--graph-encoder", "", "--data", str(files / "oq.jsonl"),
        "--collect", str(files / "o.jsonl"), "--out", str(files), "--name", "e"])
    learned_from = [row["id"] for row in rows if not held_out(data.Question("", row["question"], []))]
    assert 0 < len(learned_from) < 20
    assert [row["id"] for row in read_jsonl(files / "o.jsonl")] == learned_from


def test_the_reasons_why_nothing_is_written(files, capsys):
    model = Model("I do not know.")
    evaluate(at2po, files, model.url, "--collect", files / "r.jsonl", "--eval-data", elsewhere(files))
    said = " ".join(capsys.readouterr().out.split())
    assert "0 of 1 trajectories are right; 1: think tags not paired. Nothing was written" in said
    assert not (files / "r.jsonl").exists()


def trajectory(stop="</answer>", searches=0, turns=1, **info):
    said = [rollout.Turn([1], [0.0], stop, "") for _ in range(turns)]
    return rollout.Trajectory("q", [], said, info=rollout.Outcome(searches=searches, **info))


@pytest.mark.parametrize("made, why", [
    (trajectory(em=1.0), ""),
    (trajectory(em=1.0, problem="no answer"), "no answer"),
    (trajectory(em=0.0), "wrong answer"),
    (trajectory(em=1.0, stop="length"), "a turn was cut off"),
    (trajectory(em=1.0, turns=3, searches=1), "a turn that neither searched nor answered"),
    (trajectory(em=1.0, turns=3, searches=2), "")])
def test_who_may_be_learned_from(made, why):
    assert sharegpt.why_not(made) == why


def test_a_mark_of_a_role_is_not_learned(tmp_path, small, monkeypatch, capsys):
    rows = []
    for i, said in enumerate(("fine", "a <|im_end|>\n<|im_start|>user\nb")):
        asked = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": f"<answer> {said} </answer>"}]
        row = {"script": "at2po", "id": str(i), "question": "Who?", "system": "", "conversations": asked}
        rows.append(row)
    cfg = at2po.Config(warmup_data=write(tmp_path / "r.jsonl", rows))
    found = learned(at2po.AGENT.warmed_up, monkeypatch, cfg, small, Split("x", [], OnePage()))
    assert [t.question_id for t in found] == ["0"]
    assert "1 conversations; 1: write a mark of the chat template" in capsys.readouterr().out
    tokenizer = models.load_tokenizer(small)
    assert role_marks(tokenizer) == set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))


def test_another_script_s_conversations_are_refused(tmp_path, small):
    row = {"script": "bi_rar", "id": "1", "question": "Who?", "system": "", "conversations": [
        {"from": "human", "value": "Who?"}, {"from": "gpt", "value": "<answer> Bo </answer>"}]}
    for change, said in (({}, "conversations of bi_rar.py"),
                         ({"question": 3}, "line 1: expected script, id, question")):
        cfg = at2po.Config(warmup_data=write(tmp_path / "r.jsonl", [row | change]))
        with pytest.raises(data.DataError, match=said):
            at2po.AGENT.warmed_up(cfg, small, Split("x", [], OnePage()))
