"""Mujica-MyGO: Reinforcing Question Answering Agents with Minimalist Policy Gradient Optimization (arXiv 2505.17086).

Mujica is one model in two roles. The planner splits a question into sub-questions, a layer of a directed acyclic graph at a time, and reads only
one sentence for each; a worker answers one sub-question from the passages it retrieves, or from the triples of one entity. The sub-questions of a
layer run in parallel. MyGO trains both roles by plain likelihood on sampled trajectories whose reward passes a threshold that rises with the policy.

    Eq 1       planner and workers              plan, work
    sec. 3.3   rising threshold K               next_threshold
    D.1        multiple-attempt sampling        sample, attempts
    D.2        selection, planner and workers   select, examples
    Eq 6       likelihood of sampled tokens     mle_loss        (Eq 4, GRPO, for comparison: grpo_loss)
    App. F     offline MyGO                     --stage offline
    Tables 7-10   prompts                       SYSTEM, SHOTS

Misprints. The threshold is printed as K := max(K', (mean_r / r_sup + 1) r_sup), which is at least r_sup: r > K selects nothing. Read here as the midpoint,
K := max(K', (mean_r + r_sup) / 2). Eq 4 is printed as A min(r, clip(r)), which is not GRPO's min(r A, clip(r) A) where A < 0; ours is GRPO's.
Proposition 3.1 (KL(pi^{>K} || pi*) < delta for large K) needs Z^{>K} >= Z exp(-delta), and Z^{>K} falls as K grows: the proof holds for K small enough, and,
where the temperature alpha goes to 0, for any K below r_sup. Its pi^{>K} is a cut-off Boltzmann distribution; what MyGO samples is the policy, given that
r > K, of which it says nothing. Proposition 3.2's Var ~ 1/Z^2 does not follow from its own expansion, which tends to alpha^2.

Where the paper is silent (there is no public code):
    rounds                  6 planner turns; in the last one nothing is asked any more
    one turn                what stands outside closed thoughts; asks and answers at once: it asks, the answer is not read; at most 8 sub-questions
    a failed worker         no sentence, no selection, an index that does not exist: "No relevant information found."; nothing to read, or a label
                            that does not exist: not asked at all. [-1] counts as a selection in the graph too
    passages                without their titles, as in Table 8
    topic entities (graph)  those the data set names, else heads of evidences that no other evidence leads to (case and accents apart)
    new entities (graph)    tails of the selected triples that have facts themselves get the next labels, behind the sentence
    materials of an entity  its triples as head (the text; Table 10 also shows some as tail), at most 20: those that share most words with the question
    schedule                one cosine and one AdamW over all iterations, one epoch an iteration; K' starts at .5
    K at r_sup              a first pass without a fault would give K = r_sup and end all selection: K stays a hair below
    Eq 6's likelihood       at the sampling temperature
    Eq 6's denominator      tokens of the mini-batch, as in LLaMA-Factory: the same direction; its length matters to gradient clipping alone
    EM, F1                  HotpotQA's rules (yes and no count whole) for every data set
    STaR, RAFT, GRPO        the same agent: group_size attempts a question; any with reward 1 (at most m); the best one; all, with advantages. STaR
                            goes on from the last iteration's weights, like the others
In the embedded world "few-shot" is the tiny policy as it was made: it has no words for examples, so there the warm-up does no more than choose.

    python mygo_mujica.py                                  embedded world: few-shot, warm-up, MyGO; text, then graph; 8 minutes on two cores
    python mygo_mujica.py --stage offline                  one stage: few-shot, warm-up, mygo, offline, grpo, star, raft, eval (all = the first three)
    python mygo_mujica.py --model Qwen/Qwen2.5-7B-Instruct --data 2wiki_train.json --eval-data 2wiki_dev.json --corpus contexts \\
                          --retriever dense:BAAI/bge-large-en-v1.5                                                          2Wiki-Text
    python mygo_mujica.py --model … --data 2wiki_train.json --eval-data 2wiki_dev.json --envs kg --graph triples.jsonl      2Wiki-KG (Wikidata)
    python mygo_mujica.py --model … --data hotpot_train.json --eval-data hotpot_dev.json --envs kimi                        Hotpot-Kimi
--graph evidences makes the graph of 2Wiki's own evidences: gold facts and next to no others, so it is far easier than Wikidata.
Numbers reached: see the README. The paper's own (7B and 8B models) were not measured.
"""

import asyncio
import itertools
import json
import math
import random
import re
import sys
import time
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from common import process  # first: torch reads thread settings once

# isort: split
import torch
import transformers

from common import chat, data, flags, guards, kg, metrics, report, retriever, rollout, task, training, world
from common.engine import TransformersEngine
from common.rollout import Trajectory, Turn, stable_seed

# ---------------------------------------------------------------- config

@dataclass
class Config:
    """Defaults are the paper's where a model is given, the embedded world's (WORLD) where none is."""

    # ---- stages
    # what to do; all = few-shot, warm-up, mygo
    stage: Literal["all", "few-shot", "warm-up", "mygo", "offline", "grpo", "star", "raft", "eval"] = "all"
    envs: str = "text"              # text, kg, kimi (each question's own passages), or several with commas

    # ---- model and data
    model: str = ""                 # folder or hub id; empty = the tiny policy of the embedded world
    checkpoint: str = ""            # weights to start a stage from; empty = the model, after the warm-up the run's own warm-up
    data: str = "hotpotqa"          # training questions, 2Wiki or HotpotQA: file, hub name, or "world" | sec. 4.1
    eval_data: str = ""             # evaluation sets with commas; empty = hotpotqa-dev,musique-dev, the world's, or a file's last tenth
    corpus: str = ""                # text: JSONL with id, contents; or "contexts" = pooled from the questions (2Wiki-Text)
    # bm25, dense:MODEL[@INDEX] (the paper: dense:BAAI/bge-large-en-v1.5) or http://HOST:PORT; empty = bm25 with a corpus, else :8000
    retriever: str = ""
    search_timeout: float = 60.0    # seconds a request to a search server may take
    search_retries: int = 12        # further tries while a search server does not answer; 12 = some two minutes
    graph: str = ""                 # kg: triples (.jsonl, .json, .tsv) or .graphml; or "evidences" = of the questions (2Wiki)
    limit: int = 20000              # training questions, drawn at random; 0 = all | D.3
    eval_limit: int = 0             # first so many questions of each evaluation set; 0 = all
    skip_bad: bool = False          # leave malformed records and overlong prompts out, and count them

    # ---- embedded world
    world_size: float = 1.0         # 1.0 = about 1,000 entities
    flaw_rate: float = .6           # share of flawed demonstrations in the last fifth of what made the tiny policy, .1 before
    warmup_steps: int = 900         # supervised steps of 8 demonstrations that make the tiny policy

    # ---- agent
    top_k: int = 5                  # passages a worker reads
    max_triples: int = 20           # triples a worker reads
    max_words: int = 200            # words of a passage or triple, of at most 20 characters each
    max_rounds: int = 6             # planner turns
    max_parallel: int = 8           # sub-questions a turn
    max_turn: int = 512             # tokens sampled a turn
    max_prompt: int = 4096          # tokens of the first prompt
    temperature: float = 1.0        # of sampling in training
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy
    few_shot: bool = False          # --stage eval: with the examples of Tables 7-10
    max_batch: int = 256            # sequences decoded together, at most
    cache_gb: float = 8.0           # keys and values of running sequences; as much again for finished turns

    # ---- warm-up
    sft_trajectories: int = 300     # few-shot trajectories with EM 1 to learn from (sec. 4.2 says 1k) | D.3
    sft_epochs: int = 3             # passes over them
    sft_lr: float = 1e-5            # learning rate at the start | D.3
    sft_lr_final: float = 1e-6      # and at the end, cosine | D.3

    # ---- MyGO and its baselines
    steps: int = 20                 # iterations; 20,000 questions in all | D.3
    questions_per_step: int = 1000  # questions an iteration | D.3
    keep: int = 3                   # m, trajectories kept a question | D.3
    max_attempts: int = 16          # attempts a question | D.3
    threshold: float = .5           # K' at the start
    offline_threshold: float = .8   # K of offline MyGO
    group_size: int = 5             # attempts a question of STaR, RAFT and GRPO
    mini_batch: int = 32            # planner trajectories an update, their workers with them
    lr: float = 5e-7                # learning rate at the start | D.3
    lr_final: float = 1e-8          # and at the end, cosine | D.3
    grpo_lr: float = 1e-6           # GRPO's, constant; as in the other scripts
    clip: float = .2                # GRPO: half width of the clip window
    kl_coef: float = 1e-3           # GRPO: k3 estimate of the KL to the weights it started from
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient | LLaMA-Factory
    token_budget: int = 0           # stop when so many tokens were sampled in training; 0 = no limit
    # sample the next iteration while this one trains; auto = with a second GPU | D.2
    overlap: Literal["auto", "on", "off"] = "auto"
    micro_tokens: int = 16384       # packed tokens a forward pass; memory only
    pack_tokens: int = 16384        # tokens a pack of shared prefixes; memory only
    share_prefixes: Literal["on", "off"] = "on"   # compute shared starts of trajectories once; same results
    kernels: Literal["auto", "on", "off"] = "auto"  # Triton log-probs; auto = where there is CUDA
    lora: int = 0                   # rank of adapters; 0 = full weights
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations; auto = on a GPU; memory only

    # ---- running
    save_every: int = 1             # iterations between checkpoints; 0 = at the end only
    show_every: int = 5             # iterations between printed trajectories; 0 = none
    log: str = ""                   # trackers beside the files: tensorboard, wandb (offline), or both with a comma
    seed: int = 0                   # of everything that is random
    name: str = ""                  # of the run folders runs/mygo_mujica/<name>-<env>-<stage>; empty = seed<seed>
    out: str = "runs"               # where run folders go
    resume: bool = False            # go on with the run of this name
    eval_only: bool = False         # the same as --stage eval
    ask: str = ""                   # answer one question (in the first of --envs) and show how


# What differs in the embedded world. Ours.
WORLD = dict(data="world", envs="text,kg", retriever="bm25", top_k=2, max_turn=100, eval_limit=400, eval_temperature=1.0, limit=2000,
             sft_lr=3e-4, sft_lr_final=3e-5, steps=60, token_budget=800_000, questions_per_step=64, mini_batch=16, lr=1e-4,
             lr_final=1e-5, grpo_lr=1e-4, micro_tokens=8192, pack_tokens=512, max_batch=384)
WORLD_SETS = ("test", "dev", "other-relations")
PAPER_EVAL = "hotpotqa-dev,musique-dev"                                                                    # Tables 2 and 3
PAPER = {"text": {"few-shot": "12.41 / 19.71", "warm-up": "50.18 / 56.25", "mygo": "53.17 / 59.62", "offline": "53.27 / 59.78"},      # Table 6
         "kg": {"few-shot": "57.49 / 62.31", "warm-up": "74.93 / 80.74", "mygo": "77.63 / 84.15", "offline": "77.09 / 83.16"}}
# relations of the world that no training question has; the questions that need one are the out-of-domain set
OTHER_RELATIONS = ("author", "publisher", "employer", "educated at", "headquarters location", "located in")

# ---------------------------------------------------------------- prompts (Tables 7 to 10)

SYSTEM = {
    ("text", "planner"): """**Your Task:** Answer the user's question thoroughly and accurately.
Before answering, outline your plan and reasoning process within '<think>' tags. This includes understanding the question, identifying needed \
information, and planning your search queries.
You can use the search tool to get information.
Please put your search query in '<search>' tags, e.g., '<search> Who is the mother of Xawery Żuławski? </search>'
Every '<search>' tag only accepts one search query.
But you can use multiple '<search>' tags if needed.
Note that your query should be explicit and specific.
It is difficult to search a query with reference.
For example, if you directly search 'Who is the mother of the director of film Polish-Russian War', the search engine cannot find the information directly.
You should make a plan to decompose the question into multiple sub-queries.
Finally, integrate all the information and put your final answer within '<answer>' tags.""",
    ("text", "worker"): """You will be given a question with a context.
The context includes multiple passages labeled by index [x].
Your task is to select the most relevant passage from the context based on the question.
Please state the reason why you choose the passage. Put your thinking process into the <think>…</think> tag.
Put the index of the selected passage into the <select>…</select> tag.
Based on the selected passage, you should answer the question. State the answer as a complete declarative sentence, mirroring the question structure.
Put your answer into the <sentence>…</sentence> tag.
If the passages have no information related to the question, put [-1] in the <select>…</select> tag
and try your best to answer the question according to your knowledge in the <sentence>…</sentence> tag.""",
    ("kg", "planner"): """Your task is answering questions. You will be given a question and some candidate entities. You should first make a plan about how \
to solve this question.
You can use the Search(entity, question) function to get information.
Please think thoroughly and label the final answer with <answer> *** </answer>.""",
    ("kg", "worker"): """Task: Extract relevant information from provided materials and present it in a specified format.
Instructions:
Read Carefully:
First, analyze the question to identify the key entity and requested information (e.g., "mother," "birth date").
Review all materials systematically.
Extraction Rules:
Use only direct matches from materials. Never paraphrase or infer relationships.
If multiple materials contain the answer, select all of them.
If no material matches, respond with "No relevant information found."
Answer Format:
State the answer as a complete declarative sentence, mirroring the question structure.
Add the source ID in brackets at the beginning of the answer.
Use template:
<think> … let's think step by step … </think>
<select> [X][Y] </select>
<sentence> Full sentence answer </sentence>"""}
NOTHING = "No relevant information found."  # Table 10

# one conversation each, user and assistant in turn, for the few-shot model
SHOTS = {
    ("text", "planner"): ["Question: Who succeeded the first President of Namibia?", """<think>
The question asks about the person who succeeded the first President of Namibia.
1. I need to find who was the first President of Namibia.
2. I need to find who succeeded the first President of Namibia.
</think>
<search> Who was the first President of Namibia? </search>""", "Obs: Sam Nujoma was the first President of Namibia.", """<think>
Now I know that Sam Nujoma was the first President of Namibia.
I need to find who succeeded Sam Nujoma.
</think>
<search> Who succeeded Sam Nujoma? </search>""", "Obs: Hifikepunye Pohamba succeeded Sam Nujoma as the President of Namibia.", """<think>
The question asks about the person who succeeded the first President of Namibia.
Sam Nujoma was the first President of Namibia.
Hifikepunye Pohamba succeeded Sam Nujoma as the President of Namibia.
I have all the information to answer the question.
</think>
<answer> Hifikepunye Pohamba </answer>"""],
    ("text", "worker"): ["""Question: What college did Kyeon Mi-ri attend?
Context:
[0] Kyeon Mi-ri graduated from Seoul Traditional Arts High School in 1983, then studied Dance at Sejong University. She made her acting debut in 1984, and \
has since become active in television dramas, most notably as the arrogant and ambitious Lady Choi in the 2003 period drama "Dae Jang Geum" (or "Jewel in \
the Palace"), which was a hit not only in Korea but throughout Asia.
[1] Shin Kyeong-nim was born on April 6, 1936 in North Chungcheong Province, South Korea. When he was young, Shin Kyong-rim frequented the people of \
Korea's rural villages and collected the traditional songs they sang. Much of his poetry represents a modernization of things he heard then Shin Kyeong-nim \
graduated in English Literature from Dongguk University, from which time he strove to become a creative writer. In 1955 and 1956, he made his formal \
literary debut with the publication of poems "Day Moon" (Natdal), "Reeds" (Galdae) and "Statue of Stone" (Seoksang). He taught elementary school in his \
hometown for a period of time, before moving to Seoul to work as an editor for Hyundae munhak and Donghwa Publishers. But his strong desire to create \
poetry continued.
[2] Paige Ackerson-Kiely received a BA in Asian Studies from the University of New Mexico in Albuquerque. Prior to this achievement, she attended Beloit \
College in Beloit, Wisconsin, Marmara University in Istanbul, and Birzeit University in Birzeit, Palestine.
[3] Han Seung-yeon was born on July 24, 1988, in Seoul, South Korea. She made her acting debut as a child actress in a bit part in "Dear Ends" (1993), \
"Summer Showers" (1995) and "Star in My Heart" (1997). She later left South Korea to study at Tenafly High School in New Jersey, United States. However, she \
withdrew from high school mid-course in order to pursue a singing career. After returning to South Korea, she debuted as a member of girl group Kara on \
March 29, 2007. During her time with the group, she passed a high school qualification exam, the College Scholastic Ability Test, and was accepted by Kyung \
Hee University, majoring in theater and film.
[4] Myo Min Zaw studied English at the University of Yangon, where he became active in the pro-democracy group All Burma Federation of Student Unions \
(ABFSU). In December 1996, he participated in a student protest, and following the closing of Burma's universities, remaining involved in the pro-democracy \
movement.""", """<think> The question asks about what college Kyeon Mi-ri attended.
Passage [0] clearly states that "Kyeon Mi-ri graduated from Seoul Traditional Arts High School in 1983, then studied Dance at Sejong University."
So I select passage [0]. </think>
<select> [0] </select>
<sentence> Kyeon Mi-ri attended Sejong University. </sentence>"""],
    ("kg", "planner"): ["""Question: Which film came out first, Blind Shaft or The Mask Of Fu Manchu?
Candidate: [0] Blind Shaft [1] The Mask Of Fu Manchu""", """<think>
To solve this problem, I need to:
1. Figure out when Blind Shaft came out.
2. Figure out when The Mask Of Fu Manchu came out.
3. Compare their dates.
I need to search information for both of Blind Shaft and The Mask Of Fu Manchu.
</think>
<action>
Search([0], "When did Blind Shaft come out?")
Search([1], "When did The Mask Of Fu Manchu come out?")
</action>""", "Obs: Blind Shaft came out on 2003 and The Mask Of Fu Manchu came out on 1932.", """<think> Ok. Right now I need compare their released \
date. 1932 is much earlier than 2003. Therefore, The Mask Of Fu Manchu came out first. </think>
<answer> The Mask Of Fu Manchu </answer>"""],
    ("kg", "worker"): ["""Question: Who is the mother of Xawery Żuławski?
Materials:
[0] Xawery Żuławski, mother, Małgorzata Braunek
[1] Xawery Żuławski, father, Andrzej Żuławski
[2] Xawery Żuławski, family, Q63532193
[3] Xawery Żuławski, family name, Q56541485
[4] Xawery Żuławski, spouse, Maria Strzelecka
[5] Xawery Żuławski, date of birth, 1971-12-22T00:00:00Z
[6] Xawery Żuławski, sibling, Vincent Zulawski
[7] Xawery Żuławski, place of birth, Warsaw
[8] Andrzej Żuławski, child, Xawery Żuławski
[9] Małgorzata Braunek, child, Xawery Żuławski""", """<think> The question asks me to find the mother of Xawery Żuławski. [0] says Xawery Żuławski's mother \
Małgorzata Braunek, which excatly meets our need. </think>
<select> [0] </select>
<sentence> The mother of Xawery Żuławski is Małgorzata Braunek. </sentence>"""]}


def is_tiny(tokenizer):
    """The world's own policy has no words for examples; it was made on demonstrations instead."""
    return "[USER]" in tokenizer.all_special_tokens


def first_prompt(tokenizer, env, role, content, few_shot):
    """Prompt ids of planner or worker: instructions, examples if wanted, the request."""
    env = "kg" if env == "kg" else "text"
    shots = SHOTS[env, role] if few_shot and not is_tiny(tokenizer) else []
    examples = [(("user", "assistant")[i % 2], text) for i, text in enumerate(shots)]
    return chat.render_chat(tokenizer, [("system", SYSTEM[env, role]), *examples, ("user", chat.Foreign(content))])


def harmless(text, max_words):
    """One line of at most max_words words (20 characters each) that can neither write a tag, an index, nor the heading of a message.

    >>> harmless("Silent Harbor <b>\\n[3] Obs: me </sentence>", 20)
    'Silent Harbor ‹b> (3) Obs me ‹/sentence>'
    """
    text = " ".join(str(text).split()[:max_words])[:20 * max_words]
    text = re.sub(r"\b(Obs|Question|Context|Materials|Candidate)\s*:", r"\1", text)
    return re.sub(r"\[\s*(-?\d+)\s*\]", r"(\1)", re.sub(r"<(?=[/|!a-zA-Z])", "‹", text))


def numbered(lines):
    """
    >>> numbered(["a", "b"])
    '[0] a\\n[1] b'
    """
    return "\n".join(f"[{i}] {line}" for i, line in enumerate(lines))


def worker_request(env, question, materials):
    return f"Question: {question}\n{'Materials' if env == 'kg' else 'Context'}:\n{numbered(materials)}"


def planner_request(env, question, entities):
    candidates = f"\nCandidate: {' '.join(f'[{i}] {e}' for i, e in enumerate(entities))}" if env == "kg" else ""
    return f"Question: {question}{candidates}"


# ---------------------------------------------------------------- parsing: what a model wrote is read, never trusted

SEARCH = re.compile(r"<search>((?:(?!</?search>).)*)</search>", re.DOTALL)
CALL = re.compile(r"""Search\s*\(\s*((?:\[[^\]]*\]\s*)*),?\s*(?:["“]((?:(?!Search\s*\().)*?)["”]|'((?:(?!Search\s*\().)*?)')\s*\)""", re.DOTALL)


def parse_plan(text, env, max_parallel):
    """(sub-questions [(label or None, text)], answer or None, Counter of what was wrong) of a planner's turn; closed thoughts are not read.

    >>> parse_plan("<think> … </think> <search> a </search> <search> b <search> c </search>", "text", 8)
    ([(None, 'a'), (None, 'c')], None, Counter({'unclosed': 1}))
    >>> parse_plan('<action> Search([0], "Who wrote it?") Search([x], "When?") </action>', "kg", 8)
    ([(0, 'Who wrote it?')], None, Counter({'bad call': 1}))
    """
    text, wrong, calls = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL), Counter(), []
    if env == "kg":
        found = CALL.findall(text)
        wrong["bad call"] += max(0, len(re.findall(r"\bSearch\s*\(", text)) - len(found))
        for labels, double, single in found:
            label, question = re.fullmatch(r"\[\s*(-?\d{1,6})\s*\]\s*", labels), double or single
            if label and question.strip():
                calls.append((int(label[1]), " ".join(question.split())))
            else:
                wrong["bad call"] += 1
    else:
        found, opened, closed = SEARCH.findall(text), text.count("<search>"), text.count("</search>")
        wrong["unclosed"] += abs(opened - closed)
        wrong["nested"] += min(opened, closed) - len(found)
        calls = [(None, " ".join(q.split())) for q in found if q.strip()]
        wrong["empty"] += len(found) - len(calls)
    wrong["too many"] += max(0, len(calls) - max_parallel)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    answer = " ".join(answers[-1].split()) or None if answers else None
    if calls and answers:  # it cannot have read what it asks for
        answer, wrong["answered while asking"] = None, 1
    wrong["no action"] += not calls and not answer
    return calls[:max_parallel], answer, +wrong


def parse_report(text, materials):
    """(sentence or None, selected indices, what was wrong or "") of a worker's turn over so many materials; [-1] = nothing fits, from memory.

    >>> parse_report("<think> … </think> <select> [0][2] </select> <sentence> A is B. </sentence>", 3)
    ('A is B.', [0, 2], '')
    >>> parse_report("<select> [7] </select> <sentence> A is B. </sentence>", 3)
    (None, [], 'no such index')
    """
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    sentences, selects = (re.findall(rf"<{t}>(.*?)</{t}>", text, re.DOTALL) for t in ("sentence", "select"))
    sentence = " ".join(sentences[-1].split()) if sentences else ""
    if not sentence:
        return None, [], "no sentence"
    indices = [int(i) for bracket in re.findall(r"\[([^\]]*)\]", selects[-1] if selects else "") for i in re.findall(r"-?\d{1,6}", bracket)]
    if not indices:
        return None, [], "no selection"
    if indices == [-1]:
        return sentence, [], ""
    if any(not 0 <= i < materials for i in indices):
        return None, [], "no such index"
    return sentence, list(dict.fromkeys(indices)), ""


# ---------------------------------------------------------------- the agent (Eq 1)

@dataclass
class Policy:
    """What a rollout needs: the engine, the tokenizer, the search of a split."""
    engine: object
    tokenizer: object
    search: rollout.BatchedSearch
    own: dict = field(default_factory=dict)   # kimi: (set, question id) -> a retriever over its own passages


def topic_entities(question, graph):
    """Names in the graph of the entities that the question starts from (sec. 4.1: gold topic entities): those the data set names, else the heads of
    its evidences that no other evidence leads to."""
    def plain(name):
        return metrics.normalize_answer(unicodedata.normalize("NFKD", name.replace("ł", "l").replace("Ł", "L")).encode("ascii", "ignore").decode())
    tails = {plain(t) for _, _, t in question.evidences}
    named = question.entities or [[h, ""] for h, _, _ in question.evidences if plain(h) not in tails]
    found = [next((n for n in pair if n and n in graph), None) for pair in named]
    return list(dict.fromkeys(n for n in found if n))


def opening(question, place, cfg):
    """(entities a graph's planner may name at the start, the request it gets)"""
    entities = topic_entities(question, place.graph) if cfg.envs == "kg" else []
    return entities, planner_request(cfg.envs, harmless(question.question, cfg.max_words), [harmless(e, cfg.max_words) for e in entities])


async def materials_for(policy, place, question, sub, entity, cfg):
    """(lines a worker reads, triples behind them): an entity's facts, or the best passages of the corpus or of the question's own."""
    if cfg.envs == "kg":
        facts, words = place.graph.facts(entity), set(metrics.normalize_answer(sub).split())
        shared = lambda fact: len(words & set(metrics.normalize_answer(" ".join(fact)).split()))  # noqa: E731
        if len(facts) > cfg.max_triples:
            facts = sorted(facts, key=shared, reverse=True)[:cfg.max_triples]
        return [harmless(", ".join(f), cfg.max_words) for f in facts], facts
    if cfg.envs == "kimi":
        key = place.name, question.id
        if key not in policy.own:
            policy.own[key] = task.make_retriever(cfg, data.pool_contexts([question]))
        passages = policy.own[key].search([sub], cfg.top_k)[0]
    else:
        passages = await policy.search(sub, cfg.top_k)
    return [harmless(p.text, cfg.max_words) for p in passages], []


async def say(policy, prompt, turns, cfg, seed, temperature):
    """The next turn of a conversation, sampled to the end of the message."""
    context = prompt + [i for t in turns for i in t.ids + t.observation_ids]
    g = await policy.engine.generate(context, stop=(), max_tokens=cfg.max_turn, temperature=temperature, seed=seed)
    return Turn(g.token_ids, g.logprobs, g.stop_reason, policy.tokenizer.decode(g.token_ids, skip_special_tokens=True))


async def work(policy, place, question, sub, entity, cfg, seed, temperature):
    """One worker: reads, thinks, selects, states one sentence. A Trajectory of one turn (of none where there is nothing to read).
    entity: in a graph the one whose triples are read, None where the label does not exist."""
    sub = harmless(sub, cfg.max_words)
    lines, facts = await materials_for(policy, place, question, sub, entity, cfg)
    info = {"asked": sub, "entity": entity, "materials": lines, "sentence": NOTHING, "selected": [], "found": [],
            "problem": "unknown label" if cfg.envs == "kg" and entity is None else "nothing to read"}
    if not lines:
        return Trajectory(question.id, [], [], info=info)
    info["request"] = worker_request(cfg.envs, sub, lines)
    prompt = first_prompt(policy.tokenizer, cfg.envs, "worker", info["request"], cfg.few_shot)
    turn = await say(policy, prompt, [], cfg, seed, temperature)
    sentence, info["selected"], info["problem"] = parse_report(turn.text, len(lines))
    info["sentence"] = harmless(sentence, cfg.max_words) if sentence else NOTHING
    info["found"] = [facts[i][2] for i in info["selected"]] if facts else []
    return Trajectory(question.id, prompt, [turn], info=info)


async def plan(policy, place, question, path, cfg, seed, temperature, watch=None):
    """One answer to one question: the planner's loop, its workers in parallel. A Trajectory with the workers in info["workers"][round]."""
    entities, request = opening(question, place, cfg)
    prompt = first_prompt(policy.tokenizer, cfg.envs, "planner", request, cfg.few_shot)
    turns, rounds, wrong, asked = [], [], Counter(), set()
    while True:
        turn = await say(policy, prompt, turns, cfg, stable_seed(seed, path, len(turns)), temperature)
        calls, answer, faults = parse_plan(turn.text, cfg.envs, cfg.max_parallel)
        turns.append(turn)
        wrong += faults
        if answer or not calls or len(turns) == cfg.max_rounds:
            rounds.append([])
            wrong["out of rounds"] += bool(calls)
            break
        wrong["asked again"] += sum(call in asked for call in calls) + len(calls) - len(set(calls))
        asked.update(calls)
        named = [entities[label] if label is not None and 0 <= label < len(entities) else None for label, _ in calls]
        reports = await asyncio.gather(*(work(policy, place, question, sub, entity, cfg, stable_seed(seed, path, len(turns) - 1, "worker", i), temperature)
                                         for i, ((_, sub), entity) in enumerate(zip(calls, named, strict=True))))
        rounds.append(reports)
        wrong += Counter(f"worker: {r.info['problem']}" for r in reports if r.info["problem"])
        lines = []
        for r in reports:
            new = [e for e in dict.fromkeys(r.info["found"]) if e not in entities and place.graph.facts(e)]
            labels = "".join(f" [{len(entities) + i}] {harmless(e, cfg.max_words)}" for i, e in enumerate(new))
            lines.append(f"Obs: {r.info['sentence']}" + (f" Candidate:{labels}" if new else ""))
            entities += new
        turn.observation = "\n".join(lines)
        turn.observation_ids = chat.render_reply(policy.tokenizer, turn.ids, chat.Foreign(turn.observation))
        if watch:
            watch(turn, reports)
    if watch:
        watch(turns[-1], [])
    return judge(Trajectory(question.id, prompt, turns, info={"answer": answer, "workers": rounds, "faults": dict(+wrong), "request": request}), question)


def judge(trajectory, question):
    """The reward: F1 of the answer (sec. 4.1); nothing without one."""
    i = trajectory.info
    i["em"] = metrics.exact_match(i["answer"], question.answers) if i["answer"] else 0.0
    i["f1"] = trajectory.reward = metrics.f1(i["answer"], question.answers) if i["answer"] else 0.0
    i["problem"] = "" if i["answer"] else "out of rounds" if "out of rounds" in i["faults"] else "no answer"
    i["searches"] = sum(map(len, i["workers"]))
    i["tokens"] = sum(e.sampled_tokens for e in examples(trajectory))
    return trajectory


def examples(trajectory):
    """What one trajectory gives to learn from (D.2): the planner's conversation and, apart, each worker's single exchange."""
    return [trajectory] + [w for reports in trajectory.info["workers"] for w in reports if w.turns]


# ---------------------------------------------------------------- sampling and selection (sec. 3.3, D.1, D.2)

R_SUP = 1.0  # the largest reward there is: F1


def next_threshold(previous, mean_reward, r_sup=R_SUP):
    """K := max(K', (mean_r + r_sup) / 2), mean_r over the first pass (sec. 3.3, the misprint corrected).

    >>> next_threshold(.5, .4), next_threshold(.8, .4)
    (0.7, 0.8)
    """
    return max(previous, (mean_reward + r_sup) / 2)


async def attempts(policy, place, question, first, K, cfg, seed):
    """Goes on from the first attempt until m of them pass K, or max_attempts were made (D.1). As many at once as are lacking: never more than one by one."""
    made = [first]
    while (lacking := min(cfg.keep - sum(t.reward > K for t in made), cfg.max_attempts - len(made))) > 0:
        made += await asyncio.gather(*(plan(policy, place, question, f"attempt{len(made) + i}", cfg, seed, cfg.temperature) for i in range(lacking)))
    return made


def sample(policy, place, questions, cfg, stage, step, K):
    """(attempts a question, K of this iteration). An attempt depends on its own seed alone; how many there are, also on K, a mean over the batch."""
    seeds = [stable_seed(cfg.seed, step, q.id, sum(p.id == q.id for p in questions[:i])) for i, q in enumerate(questions)]
    run = lambda agents: rollout.run_agents(agents, policy.engine, policy.search)  # noqa: E731
    policy.search.retriever = place.retriever
    if stage in ("star", "raft", "grpo"):
        made = run(plan(policy, place, q, f"attempt{k}", cfg, s, cfg.temperature) for q, s in zip(questions, seeds, strict=True) for k in range(cfg.group_size))
        return [made[i:i + cfg.group_size] for i in range(0, len(made), cfg.group_size)], K
    first = run(plan(policy, place, q, "attempt0", cfg, s, cfg.temperature) for q, s in zip(questions, seeds, strict=True))
    if stage == "mygo":
        K = min(next_threshold(K, sum(t.reward for t in first) / len(first)), R_SUP - 1e-6)
    return run(attempts(policy, place, q, t, K, cfg, s) for q, t, s in zip(questions, first, seeds, strict=True)), K


def select(made, stage, K, cfg):
    """The trajectories of one question to learn from."""
    if stage == "raft":   # best of the group, however good
        return [max(made, key=lambda t: t.reward)]
    if stage == "grpo":   # all, unless all are alike
        return made if len({t.reward for t in made}) > 1 else []
    return [t for t in made if (t.reward >= R_SUP if stage == "star" else t.reward > K)][:cfg.keep]


def group_advantages(rewards):
    """(r - mean) / (sample std + 1e-6) (sec. 3.2)

    >>> [round(a, 3) for a in group_advantages([1.0, 0.0, 0.0])]
    [1.155, -0.577, -0.577]
    """
    mean = sum(rewards) / len(rewards)
    return [(r - mean) / (math.sqrt(sum((x - mean) ** 2 for x in rewards) / max(1, len(rewards) - 1)) + 1e-6) for r in rewards]


# ---------------------------------------------------------------- losses (Eq 6; Eq 4 for comparison)

def mle_loss(logprobs, response_mask, num_tokens):
    """Eq 6: minus the log-likelihood of what the agent said, over `num_tokens` (of the whole mini-batch). logprobs, response_mask (B, T)."""
    return -(logprobs * response_mask).sum() / num_tokens


def grpo_loss(logprobs, old_logprobs, advantages, response_mask, weights, clip=.2, kl_coef=0.0, ref_logprobs=None):
    """Eq 4 with a ratio a token and the k3 estimate of the KL term; all (B, T), weights (B, 1): what a sampled token of this sequence counts."""
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if kl_coef:
        to_ref = torch.where(response_mask, ref_logprobs - logprobs, 0.0)
        objective = objective - kl_coef * (to_ref.exp() - to_ref - 1)
    clipped = ((ratio > 1 + clip) & (advantages > 0) | (ratio < 1 - clip) & (advantages < 0)) & response_mask
    return -(objective * weights * response_mask).sum(), {
        "clip_fraction": float(clipped.sum()), "kl": float(-(log_ratio.detach() * response_mask).sum()), "ratio": float((ratio.detach() * response_mask).sum())}


# ---------------------------------------------------------------- update

def prepare(model, reference, chosen, advantage, cfg):
    """Micro-batches of the chosen trajectories' examples: (batch, None), or for GRPO (batch, {advantages, weights, old and reference log-probs})."""
    share, micro = cfg.share_prefixes == "on", []
    owner = {id(e): t for t in chosen for e in examples(t)}
    for part in rollout.micro_batches([e for t in chosen for e in examples(t)], cfg.micro_tokens, share):
        batch, more = rollout.collate(part, share, cfg.pack_tokens).to(model.device), None
        if advantage is not None:  # planner and workers share their trajectory's advantage; every trajectory counts the same, every token of it too
            column = lambda values: torch.tensor(values, device=model.device)[:, None]  # noqa: E731
            more = {"advantages": column([advantage[id(owner[id(e)])] for e in part]) * batch.response_mask,
                    "weights": column([1 / (len(chosen) * owner[id(e)].info["tokens"]) for e in part]), "ref_logprobs": None}
            with torch.no_grad():
                more["old_logprobs"] = training.token_logprobs(model, batch, cfg.temperature, cfg.kernels)
                if cfg.kl_coef:
                    with training.reference_weights(model, reference) as frozen:
                        more["ref_logprobs"] = training.token_logprobs(frozen, batch, cfg.temperature, cfg.kernels)
        micro.append((batch, more))
    return micro


def update(model, reference, optimizer, groups, advantage, cfg, rate, keep="nonfinite"):
    """One epoch over [[chosen trajectories] of a question] in mini-batches; rate(share of the epoch done) -> learning rate. Returns the step's means.
    advantage: {id(trajectory): A} makes it GRPO's update, None Eq 6's. An update that is not finite is skipped, its batch kept."""
    started, parts = time.time(), [[]]
    for group in groups:  # a question's trajectories stay together: they share their prompt
        if len(parts[-1]) + len(group) > cfg.mini_batch and parts[-1]:
            parts.append([])
        parts[-1] += group
    parts = [p for p in parts if p]
    prepared = [prepare(model, reference, part, advantage, cfg) for part in parts] if advantage is not None else [None] * len(parts)
    drift = [(more["old_logprobs"] - b.rollout_logprobs)[b.response_mask].abs() for micro in prepared if micro for b, more in micro]
    out, started = {"time/old_logprobs": time.time() - started}, time.time()
    if drift:
        out |= {"rollout/logprob_drift_mean": float(torch.cat(drift).mean()), "rollout/logprob_drift_max": float(torch.cat(drift).max())}
    sums, norms = Counter(), []
    for number, (part, micro) in enumerate(zip(parts, prepared, strict=True)):
        micro = micro or prepare(model, reference, part, None, cfg)
        tokens, mine = sum(int(b.response_mask.sum()) for b, _ in micro), Counter()
        for batch, more in micro:
            logprobs = training.token_logprobs(model, batch, cfg.temperature, cfg.kernels)
            if more is None:
                loss = mle_loss(logprobs, batch.response_mask, tokens)
            else:
                loss, stats = grpo_loss(logprobs, more["old_logprobs"], more["advantages"], batch.response_mask, more["weights"], cfg.clip, cfg.kl_coef,
                                        more["ref_logprobs"])
                mine.update(stats)
            loss.backward()
            mine["loss"] += float(loss.detach())
        for group in optimizer.param_groups:
            group["lr"] = rate(number / len(parts))
        norms.append(training.optimizer_step(model, optimizer, cfg.grad_clip, mine["loss"]))
        if math.isfinite(norms[-1]):
            sums.update({**mine, "tokens": tokens})  # (Counter.update adds, negative numbers too)
        else:
            for i, (batch, _) in enumerate(micro):
                training.save_batch(f"{keep}_{len(norms)}_{i}.safetensors", batch)
    finite = [n for n in norms if math.isfinite(n)]
    out |= {"train/updates": len(finite), "train/not_finite": len(norms) - len(finite), "train/tokens": sums["tokens"]}
    if finite:
        out |= {"train/loss": sums["loss"] / len(finite), "train/grad_norm": sum(finite) / len(finite), "train/lr": optimizer.param_groups[0]["lr"]}
        out |= {f"train/{k}": sums[k] / sums["tokens"] for k in ("clip_fraction", "kl", "ratio") if advantage is not None}
    return out | {"time/train": time.time() - started}


def rollout_metrics(made, chosen, stage):
    """Means over the step's trajectories; what was wrong with them, counted; what was chosen of them. Rewards are those of the first pass where
    further attempts go to the questions that need them."""
    ts = [t for group in made for t in group]
    fair = [group[0] for group in made] if stage in ("mygo", "offline") else ts
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    sampled = [u for t in ts for e in examples(t) for u in e.turns]
    faults = sum((Counter(t.info["faults"]) for t in ts), Counter())
    out = {"reward/mean": mean([t.reward for t in fair]), "reward/em": mean([t.info["em"] for t in fair]),
           "reward/format": mean([not t.info["problem"] for t in fair]), "rollout/tokens": sum(t.info["tokens"] for t in ts),
           "rollout/response_tokens": mean([t.info["tokens"] for t in ts]), "rollout/turns": mean([len(t.turns) for t in ts]),
           "rollout/searches": mean([t.info["searches"] for t in ts]),
           "rollout/entropy": -sum(sum(u.logprobs) for u in sampled) / sum(len(u.ids) for u in sampled),
           "select/attempts": len(ts), "select/trajectories": sum(map(len, chosen)), "select/accepted": sum(map(len, chosen)) / len(ts),
           "select/examples": sum(len(examples(t)) for group in chosen for t in group), "select/questions": sum(map(bool, chosen))}
    return out | {f"faults/{name.replace(' ', '_')}": n for name, n in sorted(faults.items())}


# ---------------------------------------------------------------- ShareGPT rows (LLaMA-Factory)

DATASET_INFO = {"mujica": {"file_name": "sharegpt.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system"}}}


def sharegpt_rows(trajectory, env, step):
    """A planner's conversation and its workers' as rows: human and gpt in turn, only gpt is learned."""
    rows = []
    for e in examples(trajectory):
        said = [x for t in e.turns for x in ({"from": "gpt", "value": t.text}, {"from": "human", "value": t.observation})][:-1]
        system = SYSTEM["kg" if env == "kg" else "text", "planner" if e is trajectory else "worker"]
        rows.append({"step": step, "id": e.question_id, "system": system, "conversations": [{"from": "human", "value": e.info["request"]}, *said]})
    return rows


# ---------------------------------------------------------------- the tiny policy of the embedded world

def layers(steps):
    """The steps of a demonstration as a DAG's layers: a step comes one layer after the one that finds its subject.

    >>> from common.demonstrations import Step
    >>> [[s.subject for s in layer] for layer in layers([Step("A", "r", "X"), Step("X", "s", "1"), Step("B", "r", "Y"), Step("Y", "s", "2")])]
    [['A', 'B'], ['X', 'Y']]
    """
    depth = []
    for i, step in enumerate(steps):
        depth.append(max((depth[j] + 1 for j in range(i) if steps[j].found == step.subject), default=0))
    return [[s for s, d in zip(steps, depth, strict=True) if d == layer] for layer in range(max(depth, default=-1) + 1)]


def render_demonstration(tokenizer, question, demo, place, cfg, env):
    """A demonstration of the world as this agent's conversations: [planner, worker, …]; what workers read is what they would really read."""
    cfg, out, turns, entities, found = replace(cfg, envs=env), [], [], [], ""
    spoken = lambda s: world.SPOKEN.get(s.relation, s.relation)  # noqa: E731
    if env == "kg":
        entities = topic_entities(data.parse_question(question), place.graph)
    request = planner_request(env, question["question"], entities)
    turn = lambda text: Turn(tokenizer(f"{text} {tokenizer.eos_token}", add_special_tokens=False)["input_ids"], [], "eos", text)  # noqa: E731
    for layer in layers(demo.steps):
        asked, lines = [], []
        for s in layer:
            sub = f"{spoken(s)} of {s.subject}"
            if env == "kg" and s.subject not in entities:
                asked.append((f'Search([9], "{sub}")', s))  # a label that does not exist
                lines.append(f"Obs: {NOTHING}")
                continue
            facts = place.graph.facts(s.subject) if env == "kg" else []
            lines_read = [harmless(", ".join(f), cfg.max_words) for f in facts] if env == "kg" else [
                harmless(p.text, cfg.max_words) for p in place.retriever.search([sub], cfg.top_k)[0]]
            at = next((i for i, line in enumerate(lines_read) if (facts[i][1] == s.relation if facts else line.startswith(s.subject))), None)
            asked.append((f'Search([{entities.index(s.subject)}], "{sub}")' if env == "kg" else f"<search> {sub} </search>", s))
            if at is None or s.found is None:
                select, sentence, new = -1, NOTHING, []
            else:
                select, sentence = at, f"{sub} is {s.found}."
                new = [s.found] if env == "kg" and s.found not in entities and place.graph.facts(s.found) else []
            text = f"<think> {f'[{select}] says {sub}' if select >= 0 else 'nothing'} </think> <select> [{select}] </select> <sentence> {sentence} </sentence>"
            out.append(Trajectory(question["_id"], first_prompt(tokenizer, env, "worker", worker_request(env, sub, lines_read), False), [turn(text)]))
            lines.append(f"Obs: {sentence}" + "".join(f" Candidate: [{len(entities) + i}] {e}" for i, e in enumerate(new)))
            entities += new
        calls = " ".join(call for call, _ in asked)
        thought = " ; ".join(f"now {spoken(s)} of {s.subject}" for _, s in asked)
        turns.append(turn(f"<think> {found}{thought} </think> {f'<action> {calls} </action>' if env == 'kg' else calls}"))
        turns[-1].observation = "\n".join(lines)
        turns[-1].observation_ids = chat.render_reply(tokenizer, turns[-1].ids, chat.Foreign(turns[-1].observation))
        found = "".join(f"found {spoken(s)} {s.found or 'nothing'} ; " for s in layer)
    final = demo.answer if demo.flaw == "bad format" else f"<answer> {demo.answer} </answer>"
    turns.append(turn(f"<think> {found}answer </think> {final}"))
    out.insert(0, Trajectory(question["_id"], first_prompt(tokenizer, env, "planner", request, False), turns))
    for t in (t for trajectory in out for t in trajectory.turns):
        t.logprobs = [0.0] * len(t.ids)
    return out


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that both environments of the embedded world start from; made once, then cached."""
    words = re.findall(r"\w+|[^\w\s]", "0 1 2 3 4 5 6 7 8 9 now found nothing answer says ; Search ( ) [ ] - Question Context Materials Candidate Obs : , "
                       + NOTHING)
    tags = [f"<{slash}{t}>" for t in ("think", "search", "select", "sentence", "action", "answer") for slash in ("", "/")]

    def index(made):
        return task.Split("warmup", [], retriever.BM25Retriever(made.corpus()), kg.KnowledgeGraph.from_triples(made.triples))

    def render(tokenizer, question, demo, place):
        env = random.Random(f"{question['_id']}/{demo.answer}").choice(("text", "kg"))
        return render_demonstration(tokenizer, question, demo, place, cfg, env)
    made_by = (render_demonstration, layers, topic_entities, first_prompt, chat, planner_request, worker_request, numbered, harmless)
    return task.tiny_policy(cfg, f"mygo_mujica, {cfg.max_words} words", words, tags, render, made_by, index)


# ---------------------------------------------------------------- evaluate

def record(trajectories, question, tokenizer, **extra):
    """Trajectories of one question as report.group: the DAG of planner turns and the workers between them."""
    nodes, paths = [{"id": 0, "parents": [], "label": "question", "sampled": False}], []
    for t in trajectories:
        path, parents, advantage = [0], [0], t.info.get("advantage")
        for k, (turn, reports) in enumerate(zip(t.turns, t.info["workers"], strict=True)):
            label = f"answer: {t.info['answer'] or '-'}" if k == len(t.turns) - 1 else f"plan {k + 1}"
            nodes.append(report.turn_node(len(nodes), parents, turn, tokenizer, label=label, role="planner", advantage=advantage))
            planner = nodes[-1]["id"]
            path.append(planner)
            parents = []
            for w in reports:
                asked = w.info["asked"] + (f" [{w.info['entity']}]" if w.info["entity"] else "")
                if w.turns:
                    node = report.turn_node(len(nodes), [planner], w.turns[0], tokenizer, label=asked, role="worker", advantage=advantage,
                                            problem=w.info["problem"] or None) | {"observation": "read:\n" + numbered(w.info["materials"])}
                else:
                    node = {"id": len(nodes), "parents": [planner], "label": asked, "sampled": False, "observation": NOTHING, "problem": w.info["problem"]}
                nodes.append(node)
                path.append(node["id"])
                parents.append(node["id"])
            parents = parents or [planner]
        i, golds = t.info, " | ".join(metrics.normalize_answer(g) for g in question.answers)
        why = [f"F1 (sec. 4.1): {metrics.normalize_answer(i['answer'] or '')!r} against {golds!r}: {t.reward:.2f}"]
        why += [f"{i['K']}{'chosen' if i['chosen'] else 'not chosen'} to learn from"] if "chosen" in i else []
        why += [f"counted: {', '.join(f'{name} {n}' for name, n in i['faults'].items())}"] if i["faults"] else []
        paths.append({"path": path, "reward": t.reward, "answer": i["answer"], "problem": i["problem"], "correct": i["em"] == 1, "why": why})
    return report.group(question, nodes, paths, **extra)


def evaluate(policy, split, cfg, progress):
    """One trajectory a question. (rows, summary)"""
    policy.search.retriever = split.retriever
    done = rollout.run_agents([plan(policy, split, q, "eval", cfg, stable_seed(cfg.seed, "eval", q.id), cfg.eval_temperature) for q in split.questions],
                              policy.engine, policy.search, progress)
    keys = ("answer", "problem", "em", "f1", "searches", "tokens", "faults")
    rows = [{"id": q.id, **{k: t.info[k] for k in keys}, "rounds": len(t.turns)} | record([t], q, None)
            for t, q in zip(done, split.questions, strict=True)]
    faults = sum((Counter(t.info["faults"]) for t in done), Counter())
    return rows, {"set": split.name, "seed": cfg.seed, "temperature": cfg.eval_temperature, "faults": dict(sorted(faults.items()))} | metrics.summarize(
        rows, ("em", "f1", "searches", "tokens", "rounds"))


# ---------------------------------------------------------------- stages

FREE_ON_RESUME = ("stage", "envs", "steps", "token_budget", "save_every", "show_every", "log", "resume", "out", "search_timeout", "search_retries")
LEARNING = ("mygo", "offline", "grpo", "star", "raft")


def sft(cfg, run, model, optimizer, groups):
    """Warm-up (D.3): sft_epochs over the kept trajectories, a cosine over all of it."""
    for epoch in range(cfg.sft_epochs):
        rate = lambda share: training.cosine_lr(epoch + share, cfg.sft_epochs, cfg.sft_lr, cfg.sft_lr_final)  # noqa: B023, E731
        order = random.Random(stable_seed(cfg.seed, "sft", epoch)).sample(groups, len(groups))
        row = {"step": epoch + 1} | update(model, None, optimizer, order, None, cfg, rate, run.path / f"nonfinite_epoch{epoch + 1}")
        report.console.print(f"warm-up | epoch {epoch + 1}/{cfg.sft_epochs} | loss {row.get('train/loss', math.nan):.4f} | {row['train/updates']} updates | "
                             f"train {row['time/train']:.1f}s")
        run.log(row)


def zero_shot(trajectory, tokenizer, env):
    """The trajectory and its workers under prompts without examples, which is what the warm-up burns in (D.3)."""
    for e in examples(trajectory):
        e.prompt_ids = first_prompt(tokenizer, env, "planner" if e is trajectory else "worker", e.info["request"], False)
    return trajectory


def warm_up(cfg, run, model, tokenizer, optimizer, policy, split):
    """Samples the few-shot model until sft_trajectories of them have EM 1, and trains on these without the examples."""
    asked, kept, tokens, started = 0, [], 0, time.time()
    questions = list(itertools.islice(data.shuffled_forever(split.questions, stable_seed(cfg.seed, "warm-up")), 10 * cfg.sft_trajectories))
    few = replace(cfg, few_shot=True)
    while len(kept) < cfg.sft_trajectories and asked < len(questions):
        batch = questions[asked:asked + cfg.questions_per_step]
        seeds = [stable_seed(cfg.seed, "warm-up", asked + i, q.id) for i, q in enumerate(batch)]
        policy.search.retriever = split.retriever
        made = rollout.run_agents([plan(policy, split, q, "warm-up", few, s, cfg.temperature) for q, s in zip(batch, seeds, strict=True)],
                                  policy.engine, policy.search)
        asked, tokens = asked + len(batch), tokens + sum(t.info["tokens"] for t in made)
        kept += [(zero_shot(t, tokenizer, cfg.envs), q) for t, q in zip(made, batch, strict=True) if t.info["em"] == 1]
        report.console.print(f"warm-up | {len(kept)} of {cfg.sft_trajectories} trajectories with EM 1 from {asked} questions | {time.time() - started:.0f}s")
    if not kept:
        raise training.ModelError(f"warm-up: none of {asked} few-shot trajectories has EM 1; see which rule fails with --stage few-shot, use a stronger model, "
                                  "or go on without: --stage mygo --checkpoint MODEL")
    if len(kept) < cfg.sft_trajectories:
        report.warn(f"warm-up: {len(kept)} trajectories with EM 1 from all {asked} questions tried, fewer than --sft-trajectories {cfg.sft_trajectories}")
    kept = kept[:cfg.sft_trajectories]
    for t, _ in kept:
        run.append("sharegpt.jsonl", sharegpt_rows(t, cfg.envs, 0))
    run.append("samples.jsonl", [record([t], q, tokenizer, step=1, prompt_ids=t.prompt_ids) for t, q in kept[:5]])
    run.write("sampling.json", {"questions": asked, "kept": len(kept), "tokens": tokens, "seconds": time.time() - started})
    sft(cfg, run, model, optimizer, [[t] for t, _ in kept])
    state = {"step": cfg.sft_epochs, "tokens": tokens, "K": cfg.threshold, "run": run.id}
    training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)


def learn(cfg, stage, run, model, tokenizer, reference, policy, split, start):
    """The loop of the paper: sample until enough attempts pass the threshold, choose, maximise their likelihood; once an iteration. With overlap the
    engine has a model of its own and the next iteration is sampled with the weights before this one's update (D.2); a resumed run samples its first
    iteration with the new weights instead, so that it does not repeat the same numbers."""
    optimizer = training.make_optimizer(model, cfg.lr, cfg.weight_decay)
    K = cfg.offline_threshold if stage == "offline" else cfg.threshold
    state = training.load_training_state(start, model, optimizer) if start else {"step": 0, "tokens": 0, "K": K}
    run.rewind(state["step"], ("sharegpt.jsonl",))
    earlier, saved = report.read_jsonl(run.path / "metrics.jsonl"), state["step"] if start else -1
    own = policy.engine.model is not model   # always so for offline MyGO, whose samples all come from the warmed-up policy
    questions = itertools.islice(data.shuffled_forever(split.questions, stable_seed(cfg.seed, "order")), state["step"] * cfg.questions_per_step, None)

    def draw(step, K):
        """One iteration's questions, attempts, K and seconds."""
        began, batch = time.time(), list(itertools.islice(questions, cfg.questions_per_step))
        return batch, *sample(policy, split, batch, cfg, stage, step, K), time.time() - began

    def fresh_weights():
        if stage != "offline":
            policy.engine.load_weights(model.named_parameters() if own else None)
    ahead, pool = None, ThreadPoolExecutor(1)
    pace = report.Pace(max(state["step"] / cfg.steps, state["tokens"] / cfg.token_budget if cfg.token_budget else 0))
    for step in range(state["step"] + 1, cfg.steps + 1):
        if cfg.token_budget and state["tokens"] >= cfg.token_budget:
            report.console.print(f"training ends after iteration {step - 1} of at most {cfg.steps}: {state['tokens']:,} tokens were sampled, the "
                                 f"budget (--token-budget) is {cfg.token_budget:,}", markup=False)
            break
        began = time.time()
        if ahead is None:
            fresh_weights()
            ahead = draw(step, state["K"])
        batch, made, K, seconds = ahead
        chosen = [select(group, stage, K, cfg) for group in made]
        row = {"step": step, "time/rollout": seconds} | rollout_metrics(made, chosen, stage) | ({"select/threshold": K} if stage in ("mygo", "offline") else {})
        state = {"step": step, "tokens": state["tokens"] + row["rollout/tokens"], "K": K, "run": run.id}
        advantage = None
        if stage == "grpo":
            row["rollout/flat_groups"] = 1 - row["select/questions"] / len(made)
            advantage = {id(t): a for g in chosen for t, a in zip(g, group_advantages([t.reward for t in g]) if g else (), strict=True)}
        done = max((step - 1) / cfg.steps, (state["tokens"] - row["rollout/tokens"]) / cfg.token_budget if cfg.token_budget else 0)

        def rate(share, done=done):
            return cfg.grpo_lr if stage == "grpo" else training.cosine_lr(min(1, done + share / cfg.steps), 1, cfg.lr, cfg.lr_final)
        work_ = lambda: update(model, reference, optimizer, chosen, advantage, cfg, rate, run.path / f"nonfinite_step{step}")  # noqa: B023, E731
        ahead = None
        if own and overlaps(cfg, stage) and step < cfg.steps and not (cfg.token_budget and state["tokens"] >= cfg.token_budget):
            future = pool.submit(work_)
            ahead = draw(step + 1, K)
            row |= future.result()
        else:
            row |= work_()
        row |= {"rollout/tokens_total": state["tokens"], "time/step": time.time() - began} | policy.search.metrics
        row |= {"mem/gpu_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}
        share = max(step / cfg.steps, state["tokens"] / cfg.token_budget if cfg.token_budget else 0)
        row |= pace.times(share, torch.get_num_threads())
        selection = f"chosen {row['select/trajectories']} of {row['select/attempts']}" + (f", K {K:.2f}" if "select/threshold" in row else "")
        report.console.print(f"{stage} | {report.step_line(step, cfg.steps, row)} | {selection}")
        row |= guards.watch(row, earlier, report.warn)
        finish_step(cfg, stage, run, tokenizer, batch, made, chosen, advantage, K, step)
        run.log(row)
        earlier.append(row)
        if ahead:
            fresh_weights()
        if cfg.save_every and step % cfg.save_every == 0:
            training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)
            saved = step
    pool.shutdown()
    if state["step"] > saved:
        training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)


def finish_step(cfg, stage, run, tokenizer, batch, made, chosen, advantage, K, step):
    """What an iteration leaves: one question's attempts for the page, its chosen trajectories as ShareGPT rows."""
    shown = next((i for i, g in enumerate(made) if len({t.reward for t in g}) > 1), 0)
    rule = f"K of this iteration {K:.3f}: " if stage in ("mygo", "offline") else ""
    for t in made[shown]:
        t.info |= {"K": rule, "chosen": any(t is c for c in chosen[shown]), "advantage": advantage.get(id(t)) if advantage else None}
    sample_ = record(made[shown], batch[shown], tokenizer, step=step, prompt_ids=made[shown][0].prompt_ids)
    if cfg.show_every and step % cfg.show_every == 0:
        report.explain(sample_, max(range(len(made[shown])), key=lambda i: made[shown][i].reward))
    run.append("samples.jsonl", [sample_])
    if stage != "grpo":
        run.append("sharegpt.jsonl", [r for g in chosen for t in g for r in sharegpt_rows(t, cfg.envs, step)])


def start_weights(cfg, stage):
    """What a stage starts from: the given checkpoint, the run's warm-up, or the model."""
    if stage in LEARNING and (not cfg.checkpoint or cfg.stage == "all"):
        folder = Path(cfg.out) / "mygo_mujica" / f"{cfg.name}-{cfg.envs}-warm-up" / "checkpoint"
        found = training.find_checkpoint(folder)
        if found is None:
            raise training.ModelError(f"{stage} starts from the warm-up, and {folder} does not exist: run --stage warm-up first, or give --checkpoint")
        return found
    source = cfg.checkpoint or cfg.model or tiny_policy(cfg)
    return training.find_checkpoint(source) or source


def stage_folder(cfg, stage):
    """The run folder of a stage, opened to go on with where --resume finds it begun."""
    name = f"{cfg.name}-{cfg.envs}-{stage}"
    begun = cfg.resume and report.begun(Path(cfg.out) / "mygo_mujica" / name)
    return report.RunFolder(cfg.out, "mygo_mujica", name, asdict(cfg), begun, FREE_ON_RESUME), begun


def resume_point(run, stage):
    """The checkpoint that a stage goes on from; a warm-up saves once, after its last epoch."""
    if stage not in ("warm-up", *LEARNING):
        return None
    return task.checkpoint_of(run, math.inf if stage == "warm-up" else None)


def overlaps(cfg, stage):
    """Whether the next iteration is sampled while this one trains. GRPO stays on-policy, since its ratio starts from the weights that sampled."""
    return stage in LEARNING and stage != "grpo" and not cfg.lora and (cfg.overlap == "on" or cfg.overlap == "auto" and torch.cuda.device_count() > 1)


def make_policy(cfg, model, tokenizer, split, sampler=""):
    """The engine shares the trainer's weights, or gets weights of its own from the folder `sampler`, on the second GPU where there is one."""
    if sampler:
        model = training.load_model(sampler).to("cuda:1" if torch.cuda.device_count() > 1 else model.device).requires_grad_(False)
    return Policy(TransformersEngine(model, tokenizer, cfg.max_batch, cfg.cache_gb, cfg.cache_gb), tokenizer, rollout.BatchedSearch(split.retriever))


def run_stage(cfg, stage, split, evals):
    """Trains or only evaluates one stage in one environment; leaves a run folder. Returns its path. What --resume finds done is not done again."""
    torch.manual_seed(cfg.seed)
    run, begun = stage_folder(cfg, stage)
    wanted = [run.path / f"eval_{s.name}.json" for s in evals]
    last = {"step": 0, "rollout/tokens_total": 0} | (report.read_jsonl(run.path / "metrics.jsonl") or [{}])[-1]
    done = stage not in LEARNING or last["step"] >= cfg.steps or 0 < cfg.token_budget <= last["rollout/tokens_total"]
    if begun and done and all(f.exists() for f in wanted):
        report.console.print(f"{cfg.envs} {stage}: done before")
        return run.path
    start = resume_point(run, stage) if begun else None
    source = start_weights(cfg, stage)
    model, tokenizer = training.load_policy(start or source, cfg.lora if stage in ("warm-up", *LEARNING) else 0, cfg.gradient_checkpointing)
    few, shown = replace(cfg, few_shot=cfg.few_shot or stage == "few-shot"), cfg.few_shot or stage in ("few-shot", "warm-up")
    policy = make_policy(cfg, model, tokenizer, evals[0], source if stage == "offline" else (start or source) if overlaps(cfg, stage) else "")

    def fits(s):
        length = lambda q: len(first_prompt(tokenizer, cfg.envs, "planner", opening(q, s, cfg)[1], shown))  # noqa: E731
        return s and replace(s, questions=task.within_limit(s.questions, length, cfg.max_prompt, cfg.skip_bad))
    split, evals = fits(split), [fits(s) for s in evals]
    run.create(threads=run.saved.get("threads", torch.get_num_threads()))
    if stage == "warm-up" or stage in LEARNING and stage != "grpo":
        run.write("dataset_info.json", DATASET_INFO)
    run.trackers = report.open_trackers(cfg.log, run)
    report.console.print(f"[bold]{cfg.envs} {stage}[/bold]: {report.plain(training.describe(start or source, model))}")
    if stage == "warm-up" and not (start and cfg.resume):
        run.rewind(-1, ("sharegpt.jsonl",))
        warm_up(cfg, run, model, tokenizer, training.make_optimizer(model, cfg.sft_lr, cfg.weight_decay), policy, split)
    elif stage in LEARNING:
        for file in wanted:  # of fewer steps
            file.unlink(missing_ok=True)
        reference = training.load_model(source).requires_grad_(False) if stage == "grpo" and cfg.kl_coef else None
        learn(cfg, stage, run, model, tokenizer, reference, policy, split, start)
        policy = make_policy(cfg, model, tokenizer, evals[0])
    results = task.evaluate_all(cfg, run, policy, evals, lambda p, s, c, progress: evaluate(p, s, few, progress))
    if stage == "few-shot":
        guards.look_at_start({name: r["summary"] for name, r in results.items()}, report.warn)
    rows = report.read_jsonl(run.path / "metrics.jsonl")
    if rows:
        report.draw_curves({stage: rows}, run.path / "curves.png", f"Mujica · {cfg.name} · {cfg.envs} · {stage}")
    report.write_page(run.path)
    return run.path


def show_table(cfg, env):
    """<name>-<env>-table.json: every stage's EM and F1 beside what it cost, differences to the warm-up paired by question."""
    base, rows = Path(cfg.out) / "mygo_mujica", []
    folders = {stage: base / f"{cfg.name}-{env}-{stage}" for stage in ("few-shot", "warm-up", *LEARNING)}
    folders = {stage: f for stage, f in folders.items() if list(f.glob("eval_*.json"))}
    results = {stage: report.evaluations(f) for stage, f in folders.items()}
    for stage, sets in results.items():
        learned = report.read_jsonl(folders[stage] / "metrics.jsonl")
        for name, result in sets.items():
            s, gain, old = result["summary"], "", results.get("warm-up", {}).get(name)
            if old and stage != "warm-up" and [p["id"] for p in old["predictions"]] == [p["id"] for p in result["predictions"]]:
                d = metrics.paired_difference([p["em"] for p in old["predictions"]], [p["em"] for p in result["predictions"]])
                gain = f"{d[0]:+.3f} [{d[1]:+.3f}, {d[2]:+.3f}]"
            cost = lambda key, form: f"{sum(r.get(key, 0) for r in learned):{form}}" if stage in LEARNING else ""  # noqa: B023, E731
            paper = PAPER.get(env, {}).get(stage, "") if name.startswith("2wiki") and "heldout" not in name else ""
            rows.append([stage, name, paper, f"{s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}]", f"{s['f1']:.3f}", gain, f"{s['tokens']:.0f}",
                         f"{s['searches']:.2f}", cost("rollout/tokens", ",.0f"), cost("time/rollout", ".0f"), cost("time/train", ".0f")])
    header = ["stage", "set", "paper EM / F1", "EM", "F1", "EM minus the warm-up's", "tokens", "sub-questions", "sampled in training", "sampling s", "update s"]
    report.table(f"{cfg.name}, {env}: 95 % intervals, differences paired by question (paper: Qwen2.5-7B, 2Wiki)", header, rows)
    report.write_atomic(base / f"{cfg.name}-{env}-table.json", json.dumps({"header": header, "rows": rows}, indent=1, ensure_ascii=False))
    curves = {stage: report.read_jsonl(f / "metrics.jsonl") for stage, f in folders.items() if stage in LEARNING}
    if any(curves.values()):
        report.draw_curves({k: v for k, v in curves.items() if v}, base / f"{cfg.name}-{env}-curves.png", f"Mujica · {cfg.name} · {env}")
    report.console.print(f"table and curves: {base}/{cfg.name}-{env}-table.json, -curves.png", markup=False)


# ---------------------------------------------------------------- main

def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, given, in_world = flags.given_flags(argv)
    cfg = flags.cli(Config, replace(Config(), **(WORLD if in_world else {})), Config(), __doc__, argv)
    ones = ("top_k max_triples max_words max_rounds max_parallel max_turn max_prompt max_batch sft_trajectories sft_epochs steps questions_per_step keep "
            "max_attempts mini_batch").split()
    task.check_flags(cfg, at_least=dict.fromkeys(ones, 1) | dict.fromkeys(("limit", "eval_limit", "lora", "token_budget", "search_retries"), 0),
                     positive=("lr", "sft_lr", "grpo_lr", "temperature", "cache_gb", "world_size", "grad_clip", "search_timeout"),
                     world_sets=WORLD_SETS)
    envs = cfg.envs.split(",")
    if any(e not in ("text", "kg", "kimi") for e in envs) or len(set(envs)) < len(envs):
        sys.exit(f"error: --envs {cfg.envs}: text, kg or kimi, or several of them with commas")
    if cfg.group_size < 2:
        sys.exit("error: --group-size must be at least 2: STaR, RAFT and GRPO choose among, or compare, samples of one question")
    for name in ("threshold", "offline_threshold"):
        if not 0 <= getattr(cfg, name) < R_SUP:
            sys.exit(f"error: --{name.replace('_', '-')} {getattr(cfg, name)}: from 0 to below 1, since the reward is F1 and has to be above it")
    if "kg" in envs and cfg.data != "world" and not cfg.graph:
        sys.exit("error: --envs kg needs --graph FILE (triples or GraphML), or --graph evidences with a data set that has them (2Wiki)")
    if cfg.few_shot and not (cfg.stage == "eval" or cfg.eval_only or cfg.ask):
        sys.exit("error: --few-shot goes with --stage eval; training is on prompts without examples")
    if "--ask" in given and not cfg.ask.strip():
        sys.exit("error: --ask is empty")
    if cfg.ask and "kimi" in envs:
        sys.exit("error: --ask has no passages of its own: --envs text or kg")
    if cfg.lora and cfg.overlap == "on":
        sys.exit("error: --overlap on hands full weights to the sampler; leave out --lora")
    search = "bm25" if cfg.corpus or cfg.data == "world" or "text" not in envs else "http://127.0.0.1:8000"
    cfg = replace(cfg, retriever=cfg.retriever or search, stage="eval" if cfg.eval_only else cfg.stage, name=cfg.name or f"seed{cfg.seed}")
    if "kimi" in envs and cfg.retriever.startswith("http"):
        sys.exit("error: --envs kimi searches each question's own passages: --retriever bm25 or dense:MODEL")
    return replace(cfg, eval_only=cfg.stage == "eval")


def load(cfg):
    """(training split or None, evaluation splits) with their graphs; in the world the questions apart by the relations they need."""
    if cfg.data == "world":
        named = cfg.eval_data or "test,other-relations"
        needs = lambda q: any(r in OTHER_RELATIONS for _, r, _ in q.evidences)  # noqa: E731
        made = {n: task.world_split("test" if n == "other-relations" else n, cfg.world_size, 4 * (cfg.eval_limit or 400) if n != "train" else cfg.limit or 2000,
                                    cfg.retriever) for n in ("train", *named.split(","))}
        for n, s in made.items():
            s.name, s.questions = n, [q for q in s.questions if needs(q) == (n == "other-relations")][:None if n == "train" else cfg.eval_limit or 400]
        return made.pop("train"), list(made.values())
    envs = cfg.envs.split(",")
    split, evals = task.load_splits(replace(cfg, limit=0), PAPER_EVAL, searched="text" in envs)
    if split and cfg.limit:  # D.3: a random subset
        split.questions = random.Random(stable_seed(cfg.seed, "subset")).sample(split.questions, min(cfg.limit, len(split.questions)))
    everything = [q for s in (split, *evals) if s for q in s.questions]
    bare = next((q for q in everything if not q.context), None) if "kimi" in envs else None
    if bare:
        raise data.DataError(f"--envs kimi: question {bare.id} has no passages of its own")
    if "kg" in envs:
        triples = [tuple(e) for q in everything for e in q.evidences]
        if cfg.graph == "evidences" and not triples:
            raise data.DataError("--graph evidences: the questions carry no evidences (2Wiki's official files do); give a file of triples")
        graph = kg.KnowledgeGraph.from_triples(triples) if cfg.graph == "evidences" else kg.load_graph(cfg.graph)
        for s in filter(None, (split, *evals)):
            s.graph = graph
            lost = sum(not topic_entities(q, graph) for q in s.questions)
            if lost:
                report.warn(f"{s.name}: {lost} of {len(s.questions)} questions have no topic entity in the graph: nothing can be searched for them")
    return split, evals


def ask(cfg, place):
    """One question, shown while it is worked on."""
    model, tokenizer = training.load_policy(start_weights(cfg, "eval"))
    policy = make_policy(cfg, model, tokenizer, place)

    def watch(turn, reports):
        report.console.print(report.plain(turn.text))
        for w in reports:
            report.console.print(f"  [dim]{report.plain(w.info['asked'])} → {report.plain(w.info['sentence'])}[/dim]")
    task.warn_of_unknown_words(tokenizer, cfg.ask)
    question = data.Question("ask", cfg.ask, [""])
    if cfg.envs == "kg":  # the entities that the question names
        question.entities = [[n, ""] for n in place.graph.graph if re.search(rf"(?<!\w){re.escape(n)}(?!\w)", cfg.ask)]
        if not question.entities:
            raise data.DataError("--ask: the question names no entity of the graph, spelled as it is there")
    agent = plan(policy, place, question, "ask", cfg, stable_seed(cfg.seed, "ask"), cfg.eval_temperature, watch)
    t = rollout.run_agents([agent], policy.engine, policy.search)[0]
    report.console.print(f"[bold]answer: {report.plain(t.info['answer'])}[/bold]")


def reproduce(cfg):
    """The stages of --stage in each of --envs, each in a run folder of its own. What can be refused without reading data is refused first."""
    task.check_model_is_named(cfg)
    stages = {"all": ("few-shot", "warm-up", "mygo")}.get(cfg.stage, (cfg.stage,))
    per_env = [replace(cfg, envs=env) for env in cfg.envs.split(",")]
    for c, stage in itertools.product(per_env, () if cfg.ask else stages):
        run, begun = stage_folder(c, stage)
        if begun:
            resume_point(run, stage)
    if cfg.checkpoint or cfg.model:
        training.find_model(cfg.checkpoint or cfg.model)
    splits = load(cfg)
    if cfg.ask:
        return ask(per_env[0], splits[1][0])
    report.console.print(" ".join(f"{k}={v}" for k, v in asdict(cfg).items() if v != ""), style="dim", markup=False)
    for c in per_env:
        for stage in stages:
            run_stage(c, stage, *splits)
        show_table(c, c.envs)


def main(argv=None):
    cfg = None
    errors = (data.DataError, kg.GraphError, retriever.RetrieverError, training.ModelError, chat.TemplateError, report.RunError, OSError)
    with process.ends_cleanly(errors, lambda: report.what_is_saved(cfg, "mygo_mujica", cfg and f"{cfg.name}-*")):
        cfg = parse_args(argv)
        transformers.utils.logging.disable_progress_bar()
        if process.settled:
            report.warn(f"{process.settled}: {torch.get_num_threads()} threads here (OMP_NUM_THREADS sets another number)")
        reproduce(cfg)


if __name__ == "__main__":
    main()
