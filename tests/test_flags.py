"""Names of runs, "auto" on the command line and in Python, flags that do not go together, what --resume
refuses."""

import json
import re
import shlex
from dataclasses import replace

import pytest

import askit
import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import flags, guards, run, splits
from common.folder import open_folder
from tests.conftest import ROOT

SCRIPTS = {"at2po": at2po, "bi_rar": bi_rar, "mygo_mujica": mygo_mujica, "askit": askit, "omne_r1": omne_r1}


def refused(script, line):
    with pytest.raises(SystemExit) as end:
        SCRIPTS[script].parse_args(line.split())
    said = str(end.value)
    assert said.startswith("error: ") and "\n" not in said
    return said


# ---- names

NAMES = [
    ("at2po", "", "atpo-hard-seed0"),
    ("at2po", "--world plain", "atpo-seed0"),
    ("at2po", "--loss grpo --seed 3", "grpo-hard-seed3"),
    ("at2po", "--world hard:elastic=.3", "atpo-hard-elastic=.3-seed0"),
    ("at2po", "--model Qwen/Qwen3-4B", "atpo-Qwen3-4B-seed0"),
    ("at2po", "--model a/b.c --data d/my.jsonl.gz --retriever bm25 --corpus c", "atpo-b.c-my-seed0"),
    ("at2po", "--model m --data owner/name:part", "atpo-m-name-part-seed0"),
    ("bi_rar", "", "hard-elastic=.3-seed0"),
    ("bi_rar", "--world plain", "seed0"),
    ("bi_rar", "--model Qwen/Qwen3-4B --data nq", "Qwen3-4B-nq-seed0"),
    ("mygo_mujica", "--model m --data x.json", "m-x-seed0"),
    ("askit", "", "seed0"),
    ("askit", "--encoder e/mini --fine-layers 2 --data d.json", "mini-d-seed0"),
    ("omne_r1", "", "seed0"),
    ("omne_r1", "--model m --graph cs=a/cs.graphml,b/law.graphml", "cs-law-m-seed0")]


def test_names_tell_model_and_data_where_they_are_not_the_default():
    for script, line, name in NAMES:
        assert SCRIPTS[script].parse_args(line.split()).name == name


# ---- auto

@pytest.mark.parametrize("script", ["at2po", "bi_rar", "mygo_mujica"])
def test_an_evaluation_is_named_after_what_it_evaluates(script, tmp_path):
    lines = [["--eval-only", "--checkpoint", str(tmp_path / name)] for name in ("a", "b", "b")]
    a, b, again = (SCRIPTS[script].parse_args(line).name for line in lines)
    assert a != b == again and b.startswith("eval-")


@pytest.mark.parametrize("script", ["at2po", "bi_rar", "mygo_mujica"])
def test_a_config_of_python_is_that_of_the_command_line(script):
    module = SCRIPTS[script]
    plain, hard = (flags.world_defaults(script, level) for level in ("plain", "hard"))
    resolved = module.resolve(replace(module.Config(), **plain))
    assert resolved == module.parse_args(["--world", "plain"])
    assert resolved.engine == "transformers"
    hard = module.resolve(replace(module.Config(), **hard | {"world": "hard"}))
    line = ["--world", "hard"]
    assert replace(hard, lr=0, name="") == replace(module.parse_args(line), lr=0, name="")


# ---- flags that do something else, or nothing

REFUSED = {
    "at2po": [
        ("--loss grpo --group-size 1", "--group-size 1: at least 2"),
        ("--expansion none --group-size 1", "--group-size 1: at least 2"),
        ("--chains 1 --rounds 0", "--chains 1: at least 2"),
        ("--kl-coef .1", "--kl-coef 0.1: goes with --loss grpo"),
        ("--mini-batch 0", "--mini-batch 0: at least 1"), ("--lr nan", "and finite"),
        ("--temperature 0", "above 0"),
        ("--eval-data foo", "one of warmup"), ("--warmup-data x.jsonl", "is for --model and --data FILE"),
        ("--model m --data q.jsonl --warmup-steps 0", "at least 1"),
        ("--model m --data q.jsonl --warmup-lr 0", "above 0"), ("--data x.json", "needs --model"),
        ("--data q.jsonl --model m --collect r.jsonl", "goes with --eval-only"),
        ("--data q.jsonl --model m --eval-only --ask Who? --collect r.jsonl", "without --ask"),
        ("--eval-only --collect r.jsonl", "is for --data FILE"),
        ("--policy http://x/v1 --policy-model m --data q.jsonl", "--eval-only"),
        ("--policy http://x/v1 --data q.jsonl --eval-only", "--policy-model"),
        ("--policy http://x/v1 --policy-model m --model x --data q.jsonl --eval-only", "instead of --"),
        ("--world easy", "--world easy: plain, hard, or hard"),
        ("--world hard:partial=2", "--world hard:partial=2: plain, hard, or"),
        ("--world hard:partial=x", "partial=x: plain"), ("--world hard:lists=.3", "lists=.3: plain"),
        ("--world hard --data hotpotqa --model x --corpus contexts", "without --model")],
    "omne_r1": [
        ("--stage sft --lora 8", "the adapters of stage 2 are --sft-lora"),
        ("--think-weight -1", "--think-weight -1"), ("--max-rounds 0", "--max-rounds 0"),
        ("--data world --graph x.graphml", "not with --data world")],
    "mygo_mujica": [
        ("--stage mygo --sampler-correction token", "goes with --stage grpo"),
        ("--envs web", "--envs web: text, kg or kimi"),
        ("--envs text,text", "--envs text,text"), ("--group-size 1", "--group-size"),
        ("--threshold 1", "--threshold 1.0"), ("--model x --data f.json --envs kg", "--graph FILE"),
        ("--eval-temperature -1", "--eval-temperature -1.0"),
        ("--model x --data f.json --envs kimi --retriever http://127.0.0.1:9", "--envs kimi"),
        ("--eval-data train", "--eval-data train")],
    "bi_rar": [
        ("--lambdas .5,2", "numbers between 0 and 1"),
        ("--group-size 1", "--group-size 1: at least 2")],
    "askit": [
        ("--model Qwen/Qwen3-4B", "several models"),
        ("--encoder x", "needs --fine-layers"), ("--action-model x", "and these need it"),
        ("--encoder x --fine-layers 2 --data y --stage qap", "--question-model"),
        ("--fine-layers 2", "and these need it"), ("--checkpoint x", "one of the stages"),
        ("--stage ppo --checkpoint x", "holds no policy"), ("--group-size 1", "at least 2"),
        ("--candidates 0", "at least 1"), ("--gamma 2", "--gamma 2.0: at most 1")]}
OF_EVERY_SCRIPT = [("--ask=", "--ask is empty")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_that_no_run_can_use_are_one_line(script):
    for line, why in REFUSED[script] + OF_EVERY_SCRIPT:
        assert why in refused(script, line), line


def test_a_pair_that_is_not_there_is_all_that_merge_says(tmp_path, capsys):
    with pytest.raises(SystemExit, match="forward, which was not run: no .*forward/checkpoint"):
        bi_rar.main(["--stage", "merge", "--out", str(tmp_path)])
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script, line, message", [
    ("omne_r1", "--stage rl", "goes on from sft-think"),
    ("mygo_mujica", "--stage mygo --envs text", "mygo goes on from warm-up"),
    ("bi_rar", "--scorer ./nosuch", "nosuch")])
def test_what_a_stage_goes_on_from_is_missed_before_data_are_read(
        script, line, message, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("data were read first")

    monkeypatch.setattr(omne_r1.graph_questions, "load", read)
    monkeypatch.setattr(mygo_mujica.places, "load_splits", read)
    monkeypatch.setattr(bi_rar.splits, "load_splits", read)
    with pytest.raises(SystemExit, match=message):
        SCRIPTS[script].main([*line.split(), "--out", str(tmp_path)])


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["a\nb", "../up", ".hidden", "..", "a/b", "/tmp/a"])
def test_names_are_those_of_a_folder(script, name):
    with pytest.raises(SystemExit, match="the name of a folder"):
        SCRIPTS[script].parse_args(["--name", name])


# ---- what --resume refuses

@pytest.mark.parametrize("script, line", [
    ("at2po", ""), ("bi_rar", ""), ("mygo_mujica", ""), ("askit", ""), ("omne_r1", "--stage ppo")])
def test_a_name_that_holds_no_run_is_not_begun_anew(script, line, tmp_path, capsys):
    (tmp_path / script / "seed0-forward").mkdir(parents=True)  # another run's
    (tmp_path / script / "seed0-forward/config.json").write_text("{}")
    with pytest.raises(SystemExit, match="--resume: .* holds no (run|stage)"):
        SCRIPTS[script].main([*line.split(), "--resume", "--name", "mistyped", "--out", str(tmp_path)])
    assert [f.name for f in (tmp_path / script).iterdir()] == ["seed0-forward"]


# ---- own questions

@pytest.mark.parametrize("n, held, said", [(400, 45, False), (100, 20, False), (12, 6, True)])
def test_what_is_held_out_can_decide_something_or_is_said_not_to(n, held, said, tmp_path, capsys):
    file = tmp_path / "own.jsonl"
    rows = [json.dumps({"question": f"Who is {i}?", "answer": f"a{i}"}) for i in range(n)]
    file.write_text("\n".join(rows))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "contents": "\"T\"\nText"}))
    line = ["--model", "m", "--data", str(file), "--corpus", str(corpus), "--retriever", "bm25"]
    train, [test] = splits.load_splits(at2po.parse_args(line), at2po.PAPER_EVAL)
    assert (len(test.questions), len(train.questions)) == (held, n - held)
    assert ("decide nothing" in capsys.readouterr().out) == said


def test_the_first_lines_say_what_they_are(tmp_path, capsys):
    cfg = at2po.parse_args(["--model", "m", "--steps", "7", "--out", str(tmp_path)])
    open_folder(cfg, "at2po")
    run.tell(cfg)
    text = " ".join(capsys.readouterr().out.split())
    title, _, settings = text.partition("differ from the paper's, which is in brackets: ")
    assert title == "Settings that " and "steps 7 [240]" in settings and "model m " in settings
    assert settings.count("[") < 10


def test_a_legend_is_told_once_in_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(run, "explained", [])
    for _ in range(2):
        run.explain(guards.EVALUATION)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(" ".join(lines).split()) == guards.EVALUATION and max(map(len, lines)) <= 80


@pytest.mark.parametrize("table", [at2po.METRICS, mygo_mujica.METRICS, omne_r1.SFT_METRICS, askit.METRICS])
def test_each_word_of_a_step_s_line_is_explained_where_it_first_stands(table, capsys, monkeypatch):
    monkeypatch.setattr(run, "explained", [])
    row = {key: 0.5 for key, metric in table.items() if metric.line}
    for _ in range(2):  # a step without an update, and one with
        row.pop("train/grad_norm", None)
        run.announce(row, table, run.step_line(row, table))
    line, *legend, again = capsys.readouterr().out.splitlines()
    assert line == again and max(map(len, legend)) <= 80
    told = " ".join(" ".join(legend).split())
    for word in line.split(" | ")[1:]:
        word, _, number = word.partition(" ")
        assert number in ("GB", "update") or told.count(f"{word} = ") == 1, word
    run.announce(row | {"train/grad_norm": 0.5}, table, "")
    assert capsys.readouterr().out.split() == f"gnorm = {table['train/grad_norm'].words}.".split()


def test_run_names_are_short_enough_for_a_folder():
    cfg = at2po.parse_args(["--model", "m" * 300])
    assert len(flags.run_name(cfg)) <= 100
    dotted = at2po.parse_args(["--model", "m" * 50 + "." + "n" * 93])  # cut right before the dot
    assert flags.run_name(dotted)[0] == "n"


def test_evaluations_of_both_worlds_have_folders_of_their_own():
    plain, hard = (at2po.parse_args(["--eval-only", "--world", level]).name for level in ("plain", "hard"))
    assert plain != hard


def test_every_command_that_we_print_has_flags_that_go_together():
    texts = [module.__doc__ for module in SCRIPTS.values()]
    for pattern in ("*.md", "docs/*.md", "results/*.md", "recipes/*.args"):
        texts += [path.read_text(encoding="utf-8") for path in ROOT.glob(pattern)]
    command = re.compile(r"(?:python|uv run|node \d) (\w+)\.py( [@-][^`\n]*)")
    tried = set()
    for script, line in {match.groups() for text in texts for match in command.finditer(text)}:
        if script in SCRIPTS:
            line = re.sub(r"(: |:$|  | [#&>|]|; |, and ).*| …$", "", line).replace("$s", "1")
            tried.add(line)
            SCRIPTS[script].parse_args(shlex.split(line))
    assert len(tried) > 40
