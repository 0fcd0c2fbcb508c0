"""Warm-up on real questions: what is demonstrated, what is left out and why, what is learned and kept."""

import json
import runpy
import sys

import pytest
import torch
from tokenizers import pre_tokenizers

import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import agent, data, retriever, training
from common import model as models
from common.files import read_jsonl
from common.rollout import Trajectory, Turn
from common.warmup import __main__ as by_itself
from common.warmup import demonstrations, sharegpt, warmup
from common.world.tiny import tiny_model, tiny_tokenizer
from tests.conftest import ROOT, interrupts, sample, small_qwen
from tests.test_chat import byte_level

HOTPOT = {
    "_id": "h1", "type": "bridge", "question": "Who directed the film that Ann Lee wrote?",
    "answer": "Bo Moss", "supporting_facts": [["Ann Lee", 1], ["Red Hill (film)", 0]],
    "context": [["Ann Lee", ["Ann Lee is a writer.", "She wrote Red Hill."]],
                ["Red Hill (film)", ["Red Hill is a 1999 film by Bo Moss.", "It is long."]]]}
WIKI = {
    "_id": "w1", "type": "compositional", "question": "Where was the director of film Wet Wood born?",
    "answer": "Oslo", "supporting_facts": [["Wet Wood (film)", 0], ["Cy Nord", 0]],
    "evidences": [["Wet Wood", "director", "Cy Nord"], ["Cy Nord", "place of birth", "Oslo"]],
    "context": [["Wet Wood (film)", ["Wet Wood is a 1999 film by its director Cy Nord."]],
                ["Cy Nord", ["Cy Nord was born in Oslo, the place of his birth."]],
                ["Oslo", ["Oslo is a city."]]]}
MUSIQUE = {
    "id": "m1", "question": "In which country was the writer of Old Mill born?", "answer": "Norway",
    "answer_aliases": [], "question_decomposition": [
        {"question": "Old Mill >> writer", "answer": "Di Voss", "paragraph_support_idx": 4},
        {"question": "Where was #1 born?", "answer": "Norway", "paragraph_support_idx": 1}],
    "paragraphs": [
        {"idx": 1, "title": "Di Voss", "paragraph_text": "Di Voss was born in Norway.",
         "is_supporting": True},
        {"idx": 3, "title": "Oslo", "paragraph_text": "Oslo is a city.", "is_supporting": False},
        {"idx": 4, "title": "Old Mill", "paragraph_text": "Old Mill was written by its writer Di Voss.",
         "is_supporting": True}]}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Qwen3 folder with a small byte-level tokenizer, made of the scripts' prompts, and small random
    weights: quick, whatever it reads."""
    prompts = [at2po.SYSTEM_PROMPT, bi_rar.PROMPT, *mygo_mujica.SYSTEM.values()]
    tokenizer = byte_level(texts=prompts, size=1500, special=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    return small_qwen(tmp_path_factory.mktemp("small"), tokenizer, len(tokenizer))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def asked(row, *others):
    """A record as a Question, and an index of its pages, or of others."""
    question = data.parse_question(row)
    return question, retriever.make_retriever("bm25", [*others] or data.pool_contexts([question]))


def demonstrated(row):
    return demonstrations.demonstrate(*asked(row), 1)[0]


def planner_of(row, small):
    """MUJICA's planner as it is shown this question."""
    question, index = asked(row)
    place = mygo_mujica.Place("train", [question], index)
    tokenizer, cfg = models.load_tokenizer(small), mygo_mujica.Config(top_k=1)
    return mygo_mujica.demonstration(tokenizer, question, demonstrated(row), place, cfg)[0]


def test_each_data_set_s_evidence_becomes_searches_and_findings():
    hotpot = demonstrated(HOTPOT)
    assert hotpot.queries() == ["Ann Lee", "Red Hill"]
    assert hotpot.thoughts() == [
        "I need to find Ann Lee.", "She wrote Red Hill. Now I need Red Hill.",
        "Red Hill is a 1999 film by Bo Moss. So the answer is Bo Moss."]
    wiki = demonstrated(WIKI)
    assert wiki.queries() == ["Wet Wood director", "Cy Nord place of birth"]
    assert wiki.thoughts()[1] == (
        "The director of Wet Wood is Cy Nord. Now I need the place of birth of Cy Nord.")
    musique = demonstrated(MUSIQUE)
    assert musique.queries() == ["Old Mill writer", "Where was Di Voss born?"]
    assert [hop.title for hop in musique.hops] == ["Old Mill", "Di Voss"]  # by idx, not by place
    assert musique.thoughts()[-1].endswith("Where was Di Voss born: Norway. So the answer is Norway.")


def test_a_thought_quotes_a_few_words_around_what_is_needed_next(small):
    row = json.loads(json.dumps(HOTPOT))
    much = "She lived in many a town for years on end and it was much later that"
    row["context"][0][1] = ["Ann Lee is a writer.", f"{much} she wrote Red Hill in the end."]
    row["context"][1][1][0] = f"{much} Red Hill was made by Bo Moss of the north."
    demo = demonstrated(row)
    assert demo.thoughts()[1:] == [
        "on end and it was much later that she wrote Red Hill … Now I need Red Hill.",
        "it was much later that Red Hill was made by Bo Moss … So the answer is Bo Moss."]
    said = planner_of(row, small).turns[-1].text
    assert "Bo Moss … So the answer is Bo Moss." in said and len(said.split()) < 30


def test_a_page_is_looked_for_in_several_spellings():
    row = HOTPOT | {"question": "Who directed the film that Ann Eve Lee wrote?"}
    other = {"id": "x", "title": "Ann Lee Red Hill", "text": "Ann Lee, Ann Lee; Red Hill, Red Hill."}
    question, index = asked(row, *data.pool_contexts([data.parse_question(row)]), other)
    assert index.search(["Red Hill"], 1)[0][0].title == "Ann Lee Red Hill"
    demo, problem = demonstrations.demonstrate(question, index, 1)
    assert not problem and demo.queries() == ["Ann Lee directed film that wrote", "Red Hill (film)"]


OFF_TOPIC = {"id": "0", "title": "Cy Nord place of birth Wet Wood director", "text": "Wet Wood director"}
NOT_READ = "what a page should say is not in what is read of it"
CY_NORTH = [[name.replace("Nord", "North") for name in triple] for triple in WIKI["evidences"]]


@pytest.mark.parametrize("row, others, most, problem", [
    (WIKI, [OFF_TOPIC], 1000, "the retriever does not find a gold page"),
    (HOTPOT | {"context": [["Ann Lee", ["Ann Lee is a writer.", "She wrote a film."]], HOTPOT["context"][1]]},
     [], 1000, "a page that nothing read before names"),
    ({"question": "Who?", "answer": "Bo"}, [OFF_TOPIC], 1000, "no gold evidence that can be followed"),
    (WIKI | {"evidences": CY_NORTH}, [], 1000, NOT_READ), (WIKI, [], 20, NOT_READ), (WIKI, [], 1000, "")])
def test_pages_are_found_and_named_before_and_what_is_claimed_is_read(row, others, most, problem):
    demo, why = demonstrations.demonstrate(*asked(row, *others), 1, max_passage=most)
    assert why == problem and (demo is None) == bool(problem)


def test_what_a_page_read_before_says_of_what_was_found_since_is_told_behind_that():
    row = WIKI | {"evidences": [*WIKI["evidences"], ["Wet Wood", "year", "1999"]]}
    thoughts = demonstrated(row).thoughts()
    assert thoughts[1].startswith("The director of Wet Wood is Cy Nord. Now") and "1999" not in thoughts[1]
    assert "Oslo. The year of Wet Wood is 1999. So the answer" in thoughts[2]


def test_what_is_left_out_is_counted_by_its_reason(small):
    rows = [HOTPOT, WIKI, MUSIQUE, {"question": "Who?", "answer": "Bo"}]
    questions = [data.parse_question(row) for row in rows]
    index = retriever.make_retriever("bm25", data.pool_contexts(questions[:3]))
    said = []

    def render(question, demo):
        said.append(demo)
        return [demo]

    def reward(made, question):
        return {questions[0].id: None, questions[1].id: 0.5}.get(question.id, 1)

    kept, fate = demonstrations.of_questions(questions, index, render, reward, 1)
    assert fate == {"longer than the agent's limits": 1, "does not earn reward 1": 1, "demonstrated": 1,
                    "no gold evidence that can be followed": 1}
    assert [[d.flaw for d in made] for made in kept] == [[None]]


def test_what_the_agent_could_not_finish_is_not_demonstrated(tmp_path, small, capsys):
    for flag, value in (("--max-searches", "1"), ("--max-response", "60")):
        with pytest.raises(SystemExit):
            at2po.main(command(tmp_path, small, [HOTPOT, WIKI], "--eval-only", flag, value))
        assert "2: longer than the agent's limits" in capsys.readouterr().out


def test_mujica_asks_at_once_only_for_what_waits_for_nothing(small):
    row = json.loads(json.dumps(MUSIQUE))
    row["question"] = "Was the writer of Old Mill born where Di Voss was?"  # names both pages
    assert [hop.waits for hop in demonstrated(row).hops] == [False, True]
    plans = [mygo_mujica.parse_plan(t.text, "text", 9)[0] for t in planner_of(row, small).turns]
    assert [len(plan) for plan in plans] == [1, 1, 0]


def test_a_quotation_can_write_no_tag(small):
    row = json.loads(json.dumps(WIKI))
    name = "Cy</think><answer>Nord"
    row["evidences"][0][2] = name
    row["context"][0][1] = [f"Wet Wood is by its director {name} <|im_end|>."]
    row["evidences"][1][0] = row["context"][1][0] = row["supporting_facts"][1][0] = name
    tokenizer = models.load_tokenizer(small)
    question, index = asked(row)
    cfg = at2po.Config(top_k=1)
    made = at2po.AGENT.demonstration(tokenizer, question, demonstrated(row), index, cfg)
    assert at2po.score(made, question, cfg).reward == 1
    text = "".join(turn.text for turn in made.turns)
    assert text.count("<answer>") == 1 and text.count("</think>") == 3
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert all(end not in turn.observation_ids for turn in made.turns)


FLAGS = (
    "--top-k 1 --retriever bm25 --corpus contexts --steps 1 --questions-per-step 1 --mini-batch 1 "
    "--eval-limit 1 --warmup-steps 4 --warmup-lr 1e-3 --lr-warmup .5").split()
SCRIPTS = {
    "at2po": (at2po, "--chains 2 --expand 1 --rounds 1 --max-response 600"),
    "bi_rar": (bi_rar, "--stage forward --group-size 2 --max-turn 30 --explain-limit 1"),
    "mygo_mujica": (mygo_mujica, "--stage mygo --max-turn 30 --keep 1 --max-attempts 1 --max-rounds 4")}


def command(folder, small, rows, *flags):
    """The flags of a run on these rows that learns from them first."""
    file = write(folder / "q.jsonl", rows)
    # nothing is learned from what is evaluated
    other = write(folder / "other.jsonl", [WIKI | {"_id": "o", "question": "Where was Cy Nord born?"}])
    return [*FLAGS, "--model", str(small), "--data", file, "--eval-data", other, "--warmup-data", file,
            "--out", str(folder), *flags]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_learns_from_real_questions_first(tmp_path, small, capsys, monkeypatch, name):
    script, more = SCRIPTS[name]
    rises = []
    real = training.warmup_factor
    monkeypatch.setattr(training, "warmup_factor", lambda *args: rises.append(args) or real(*args))
    given = command(tmp_path, small, [HOTPOT, WIKI, MUSIQUE], *more.split())
    script.main([*given, "--name", "a"])
    said = "".join(capsys.readouterr())
    assert "3 of 3 questions demonstrated" in said and "rises" not in said
    assert said.count("Settings that differ") == 1  # of the script, not of its warm-up
    assert said.index("Settings that differ") > said.index("warm-up | step")
    assert rises == [(1, .5)]
    (folder,) = (tmp_path / "cache/fivehop/warm-up").glob(f"{name}-*[0-9a-f]")
    rows = read_jsonl(folder / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows]
    assert len(rows) == 4 and losses[-1] < losses[0]
    assert [row["train/lr"] for row in rows] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    tokenizer = models.load_tokenizer(small)
    learned = sum(len(tokenizer(turn["said"])["input_ids"])
                  for row in read_jsonl(folder / "demonstrations.jsonl") for turn in row["turns"])
    assert rows[0]["warmup/tokens"] >= learned / 3  # (ends of messages are learned too)
    started = (tmp_path / name).glob("a*/config.json")
    begun = [json.loads(f.read_text()) for f in started]
    assert begun and all(c["warmup_data"] == str(tmp_path / "q.jsonl") and not c["checkpoint"] for c in begun)
    assert all("warmup_data" in c["changed"] and "checkpoint" not in c["changed"] for c in begun)
    cards = [f.read_text() for f in (tmp_path / name).glob("a*/checkpoint/README.md")]
    assert cards and all(f"after a warm-up on {tmp_path / 'q.jsonl'}" in card for card in cards)
    # the second time it is there
    script.main([*given, "--name", "b"])
    assert "warm-up | step" not in capsys.readouterr().out
    # and it is what answers
    asked = []
    monkeypatch.setattr(agent.Agent, "ask", lambda self, run, source, *_: asked.append(str(source)))
    script.main([*given, "--ask", "Who?"])
    assert asked == [str(folder / "checkpoint")]
    # as the program by itself says
    by_itself.main([name, *given, "--name", "a"])
    told = "".join(capsys.readouterr())
    assert f"--checkpoint {folder / 'checkpoint'}" in told and "warm-up | step" not in told
    assert "--warmup-data" not in told.split("Next: ")[1]
    # an existing run goes on with --resume, and is else refused before anything is learned
    script.main([*given, "--name", "a", "--resume"])
    monkeypatch.setattr(script, "learn_first", None)
    with pytest.raises(SystemExit, match="exists: choose another --name"):
        script.main([*given, "--name", "a"])


@pytest.mark.parametrize("given, said", [
    ([], "the first word is the script"),
    (["askit"], "at2po, bi_rar"),
    (["at2po"], "--warmup-data is missing")])
def test_a_warm_up_by_itself_says_what_it_lacks(given, said):
    with pytest.raises(SystemExit, match=said):
        by_itself.main(given)


def test_a_warm_up_goes_on_where_it_was_stopped_and_ends_alike(tmp_path, small, monkeypatch):
    cfg = at2po.Config(model=str(small), warmup_steps=27, warmup_lr=1e-3)
    examples = [[Trajectory(str(i), [5, 6], [Turn([8 + i, 9, 10], [0.0] * 3, "", "")])] for i in range(5)]

    def weights():
        return (warmup.warmed_up(cfg, "at2po", str(small), examples) / "model.safetensors").read_bytes()

    whole = weights()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    steps = interrupts(monkeypatch, training, "clip_gradient", 27)
    with pytest.raises(KeyboardInterrupt):
        weights()
    assert weights() == whole and len(steps) == 27 + 1  # it keeps each update
    (parts,) = (tmp_path / "other/fivehop/warm-up").glob("at2po-*[0-9a-f]")
    assert [row["step"] for row in read_jsonl(parts / "metrics.jsonl")] == [*range(1, 28)]


def test_rates_rise_evenly_to_those_that_the_optimizer_was_made_with():
    optimizer = training.make_optimizer(torch.nn.Linear(2, 2), 1e-3)
    for step, rate in ((1, 5e-4), (2, 1e-3), (3, 1e-3)):
        training.set_warmup_lr(optimizer, step / 10, .2)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate] * 2)


def test_conversations_on_file_are_learned_as_they_stand(tmp_path, small):
    tokenizer = models.load_tokenizer(small)
    row = {"id": "c", "system": "Be brief.", "conversations": [
        {"from": "human", "value": "Who?"}, {"from": "gpt", "value": "<think> a </think>"},
        {"from": "observation", "value": "seen </result>"}, {"from": "gpt", "value": "Bo"}]}

    def reply(tokenizer, turn_ids, observation):
        return tokenizer(f"[{observation}]")["input_ids"]

    made = warmup.of_conversation(tokenizer, row, reply)
    assert tokenizer.decode(made.prompt_ids).endswith(
        "system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert [turn.text for turn in made.turns] == ["<think> a </think>", "Bo"]
    assert tokenizer.decode(made.turns[0].observation_ids) == "[seen </result>]"
    ended = {}
    for ends in ("none", "last", "all"):
        turns = warmup.of_conversation(tokenizer, row, reply, ends).turns
        ended[ends] = [turn.ids[-1] == tokenizer.eos_token_id for turn in turns]
    assert ended == {"none": [False, False], "last": [False, True], "all": [True, True]}
    at2po.main(command(tmp_path, small, [HOTPOT], "--warmup-data", write(tmp_path / "c.jsonl", [row]),
                       "--eval-only", "--max-response", "20", "--name", "c"))
    (folder,) = (tmp_path / "cache/fivehop/warm-up").glob("at2po-*[0-9a-f]")
    assert json.loads((folder / "config.json").read_text())["demonstrations"] == 1


def test_openai_s_messages_are_read_as_sharegpt_s(tmp_path):
    said = [("system", "Be brief."), ("user", "Who?"), ("assistant", "<think> a </think>"), ("tool", "seen"),
            ("assistant", "Bo")]
    messages = [{"role": role, "content": text} for role, text in said]
    row, = sharegpt.read(write(tmp_path / "c.jsonl", [{"messages": messages}]), ())
    told = ["human", "gpt", "observation", "gpt"]
    assert row["system"] == "Be brief." and [m["from"] for m in row["conversations"]] == told
    assert [m["value"] for m in row["conversations"]] == [text for _, text in said[1:]]
    with pytest.raises(data.DataError, match="line 1: expected"):
        sharegpt.read(write(tmp_path / "d.jsonl", [{"messages": messages[1:3][::-1]}]), ())


def test_omne_r1_learns_rows_of_its_own(tmp_path, small, monkeypatch):
    row = {"id": "c", "graph_type": "film", "question": "Who?", "conversations": [
        {"from": "human", "value": "Who?"},
        {"from": "gpt", "value": "<think> a </think> <answer> Bo </answer>"}]}
    cfg = omne_r1.Config(model=str(small), warmup_data=write(tmp_path / "c.jsonl", [row]), warmup_steps=2,
                         data="x", out=str(tmp_path), name="a")
    monkeypatch.setattr(omne_r1.graph_questions, "load", lambda cfg: (None, [data.Split("x", [], None)]))
    source = omne_r1.learn_first(cfg, small)
    before, after = (models.load_model(f).state_dict() for f in (small, source))
    assert any(not torch.equal(before[k], after[k]) for k in before)


# ---------------------------------------------------------------- real questions

@pytest.mark.parametrize("name, least", [
    ("hotpotqa/train.json", .4), ("2wikimultihopqa/train.json", .7), ("musique/train.jsonl", .4)])
def test_most_real_training_questions_can_be_demonstrated(small, name, least):
    questions = data.load_questions(sample(name))
    index = retriever.make_retriever("bm25", data.pool_contexts(questions))
    tokenizer = models.load_tokenizer(small)
    cfg = at2po.Config(top_k=1)

    def render(question, demo):
        return [at2po.AGENT.demonstration(tokenizer, question, demo, index, cfg)]

    def reward(made, question):
        return at2po.score(made[0], question, cfg).reward

    kept, fate = demonstrations.of_questions(questions, index, render, reward, 1, cfg.max_passage)
    assert len(kept) == fate["demonstrated"] >= least * len(questions), fate
    assert "does not earn reward 1" not in fate
    for (made,) in kept:
        question = next(q for q in questions if q.id == made.question_id)
        gold = {title for title, _ in question.supporting_facts}
        for turn in made.turns[:-1]:
            assert any(f'"{title}"' in turn.observation for title in gold)


# ---------------------------------------------------------------- GGUF

def tiny_gguf(file, head):
    """A one-layer Llama with a tokenizer of bytes, as llama.cpp's files have them. head: "none", as tied
    models have it, "again" = the embedding, rounded otherwise, or "own"."""
    writer_of = pytest.importorskip("gguf")
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator).mul(.1).numpy()

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer = writer_of.GGUFWriter(file, "llama")
    settings = {
        "context_length": 64, "embedding_length": 16, "block_count": 1, "feed_forward_length": 32,
        "head_count": 2, "head_count_kv": 1, "rope_dimension_count": 8, "layer_norm_rms_eps": 1e-5,
        "vocab_size": len(tokens), "tokenizer_model": "gpt2", "token_list": tokens,
        "token_types": [1] * (len(tokens) - 3) + [3, 3, 3], "token_merges": ["a b"],
        "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1,
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ m['content'] }}<|im_end|>"
                         "{% endfor %}<|im_start|>"}
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16),
              "ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32),
              "attn_norm": (16,), "ffn_norm": (16,)}
    embedding, other = numbers(len(tokens), 16), numbers(len(tokens), 16)
    writer.add_tensor("token_embd.weight", embedding)
    if head != "none":
        writer.add_tensor("output.weight", {"again": embedding + .05 * other, "own": other}[head])
    writer.add_tensor("output_norm.weight", numbers(16) + 1)
    for name, shape in shapes.items():  # norms are near 1
        writer.add_tensor(f"blk.0.{name}.weight", numbers(*shape) + (len(shape) == 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 16 * len(tokens)


@pytest.mark.parametrize("head", ["none", "again", "own"])
def test_a_gguf_file_becomes_a_folder_that_can_be_trained_and_saved(head, tmp_path, monkeypatch, capsys):
    """By the lines of docs/real.md."""
    in_head = tiny_gguf(tmp_path / "tiny.gguf", head)
    lines = (ROOT / "docs/real.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "tiny.gguf"), str(tmp_path / "model")])
    (tmp_path / "gguf_to_folder.py").write_text(lines)
    runpy.run_path(str(tmp_path / "gguf_to_folder.py"))
    said = capsys.readouterr().out
    policy, tokenizer = models.load_policy(tmp_path / "model")
    tied = policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    assert tied == (head != "own") and policy.num_parameters() == 2_352 + in_head * (1 + (head == "own"))
    assert f"{policy.num_parameters() / 1e6:,.1f} M weights" in said
    policy.save_pretrained(tmp_path / "again")  # what transformers refuses of the model it read
    assert tokenizer.decode(tokenizer("ab c")["input_ids"]) == "ab c"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template.endswith("<|im_start|>")
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_end_of_a_tokenizer_and_that_of_its_model_both_end_a_sequence(tmp_path):
    tokens = tiny_tokenizer(["w"], ["<a>"])
    policy = tiny_model(tokens, 32)
    tokens.eos_token = "<a>"
    assert models.end_of_sequence(policy, tokens) == set(tokens.convert_tokens_to_ids(["<a>", "[EOS]"]))


def test_pooled_contexts_are_a_corpus_file(tmp_path):
    rows = data.pool_contexts(data.load_questions([HOTPOT, WIKI]))
    titles = {row["title"] for row in rows}
    assert titles == {"Ann Lee", "Red Hill (film)", "Wet Wood (film)", "Cy Nord", "Oslo"}
    assert data.load_corpus(write(tmp_path / "corpus.jsonl", rows)) == rows
