"""What a policy answers from memory, without a tool and without instructions.

Nothing asks for a format, so all that is said behind the thoughts is the answer, and a language model judges
it (--judge). Without one, "em" asks for the gold answer alone and is close to 0 for models that write
sentences. What was said and what the judge made of it is on file at once (said_<set>.jsonl, verdicts.jsonl):
where the judge goes down, --resume asks for nothing twice.
"""

import re
from dataclasses import dataclass

from common import chat, metrics, rollout
from common.files import Keyed
from common.page import record
from common.rollout import Outcome, Trajectory, Turn, stable_seed
from common.serve.judge import verdicts

THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
KEYS = ("em", "normalised", "f1", "searches", "tokens", "repetitions", "standard")


@dataclass
class Said(Outcome):
    normalised: float = 0.0     # exact match under SQuAD's normalisation
    repetitions: int = 0        # of calls: there are none
    standard: float = 0.0       # share in the standard pattern of calls: none


async def answer(policy, question, cfg, opening, kept):
    """A Trajectory of one turn. opening: what stands before it and is not the policy's. kept: a Keyed of what
    was said before."""
    tokenizer = policy.tokenizer
    asked = chat.Foreign(question.question)
    prompt_ids = chat.render_chat(tokenizer, [("user", asked)])
    prompt_ids += chat.encode(tokenizer, opening)[1]
    key = str(stable_seed(question.id, prompt_ids))
    row = kept.get(key)
    if row is None:
        g = await policy.engine.generate(
            prompt_ids,
            stop=(),
            max_tokens=cfg.max_turn,
            temperature=cfg.eval_temperature,
            seed=stable_seed(cfg.seed, "direct", question.id),
        )
        row = {"key": key, "ids": g.token_ids, "logprobs": g.logprobs, "stop_reason": g.stop_reason}
        kept.add(row)
    text = rollout.sampled_text(tokenizer, row["ids"], row["stop_reason"])
    turn = Turn(row["ids"], row["logprobs"], row["stop_reason"], text)
    said = THOUGHT.sub("", text)
    said = said.partition("<think>")[0].strip()  # (a thought that was cut off answers nothing)
    gold = question.answers[0]
    trajectory = Trajectory(question.id, prompt_ids, [turn])
    trajectory.info = Said(
        said,
        em=float(said == gold.strip()),
        f1=metrics.f1(said, gold),
        normalised=metrics.exact_match(said, gold),
    )
    return trajectory


def evaluate_directly(policy, place, cfg, progress, folder, opening=""):
    """(rows, summary). With --judge, em is the judge's verdict; one that cannot be read counts as wrong.
    folder: where what was said is kept."""
    policy.engine.sync(policy.model)
    kept = Keyed(folder / f"said_{place.name}.jsonl")
    agents = [answer(policy, q, cfg, opening, kept) for q in place.questions]
    no_search = rollout.BatchedSearch(None)
    done = rollout.run_agents(agents, policy.engine, no_search, progress)
    kept.close()
    pairs = list(zip(done, place.questions, strict=True))
    about = {
        "set": place.name,
        "seed": cfg.seed,
        "temperature": cfg.eval_temperature,
    }
    reasons = [""] * len(done)
    if cfg.judge:
        asked = []
        for t, q in pairs:
            gold = q.answers[0]
            asked.append((q.question, gold, t.info.answer))
        found = verdicts(cfg.judge, cfg.judge_model, asked, folder / "verdicts.jsonl", progress)
        reasons = [why for _, why in found]
        for t, (right, _) in zip(done, found, strict=True):
            t.info.em = float(bool(right))
        about["judge"] = cfg.judge_model
        about["no_verdict"] = sum(right is None for right, _ in found)
    rows = []
    for (t, q), why in zip(pairs, reasons, strict=True):
        rows.append(prediction(t, q, why))
    return rows, about | metrics.summarize(rows, KEYS)


def prediction(trajectory, question, why):
    """A row of eval_<set>.json."""
    trajectory.reward = trajectory.info.em
    turn = record.turn_node(1, [0], trajectory.turns[0])
    nodes = [record.root_node(), turn]
    reasons = [f"judge: {why}"] if why else []
    outcome = record.outcome(trajectory, [0, 1], reasons)
    row = {"id": question.id, **vars(trajectory.info)}
    row["tokens"] = trajectory.sampled_tokens
    return row | record.group(question, nodes, [outcome])
