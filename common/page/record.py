"""Trajectories as plain JSON, one form for every script; the page knows no paper.

A group is a question with the trajectories sampled for it:

    question_id question type hops gold step
    evidence      [[title, gold sentence]], marked where that page is observed
    prompt        the text that the policy was given; in samples.jsonl also prompt_ids
    nodes         [{id, parents [ids], label, text, observation, entropy, advantage, how, clipped, …}]
                  how: lines that say how value and advantage came about, with the numbers put in; what
                  else a script adds is shown as it is
    trajectories  [{path [node ids], reward, answer, problem, correct, why [lines]}]
    beside        the fact of a node that stands beside it in the tree, and its name: ["value", "value V"]
"""

from common.metrics import normalize_answer

OF_TOKENS = ("ids", "observation_ids", "logprobs")  # in samples.jsonl alone


def group(question, nodes, trajectories, **extra):
    """The record of a data.Question, its nodes and trajectories."""
    return {
        "question_id": question.id,
        "question": question.question,
        "type": question.type,
        "hops": question.hops,
        "gold": question.answers,
        "evidence": gold_sentences(question),
        "nodes": nodes,
        "trajectories": trajectories,
        **extra,
    }


def group_of(question, trajectories, of_turn, why, **extra):
    """The record of a question's trajectories; a turn that paths share is one node. A step's has the ids that
    were trained on.

    of_turn(trajectory, k) -> {"label", …}: what is told of its turn k. why(trajectory, question) -> lines on
    what led to its reward."""
    nodes, done, number = [root_node()], [], {}
    prompt_ids = trajectories[0].prompt_ids
    for t in trajectories:
        path = [0]
        for k, turn in enumerate(t.turns):
            if id(turn) not in number:
                number[id(turn)] = len(nodes)
                nodes.append(turn_node(len(nodes), path[-1:], turn, "step" in extra, **of_turn(t, k)))
            path.append(number[id(turn)])
        done.append(outcome(t, path, why(t, question)))
    return group(question, nodes, done, prompt_ids=prompt_ids, **extra)


def row(question, info, names, **more):
    """A row of eval_<set>.json: what a trajectory's info says under these names, and more."""
    told = {name: getattr(info, name) for name in names.split()}
    return {"id": question.id} | told | more


def root_node():
    return {"id": 0, "parents": [], "label": "question", "sampled": False}


def turn_node(number, parents, turn, with_ids=False, **extra):
    """A Turn as a node; with_ids: also the ids that were trained on, and their log-probs."""
    node = {
        "id": number,
        "parents": parents,
        "text": turn.text,
        "observation": turn.observation,
        "stopped by": turn.stop_reason,
        "tokens": len(turn.ids),
        "entropy": round(turn.entropy, 4),
    }
    node |= {key: value for key, value in extra.items() if value is not None}
    if with_ids:
        node |= {name: getattr(turn, name) for name in OF_TOKENS}
    return node


def outcome(trajectory, path, why):
    """A trajectory of a group. path: the numbers of its nodes; why: lines that say what led to its reward."""
    info = trajectory.info
    return {
        "path": path,
        "reward": trajectory.reward,
        "answer": info.answer,
        "problem": info.problem,
        "correct": info.em == 1,
        "why": why,
    }


def first_with_spread(groups):
    """Index of the first group whose rewards differ, which is worth looking at; 0 where there is none.

    >>> first_with_spread([[1, 1], [0, 1]])
    1
    """
    differ = [max(rewards) - min(rewards) > 1e-9 for rewards in groups]
    return differ.index(True) if any(differ) else 0


def compared(answer, golds):
    """The strings that exact match compares.

    >>> compared("The Beatles!", ["Beatles"])
    "'beatles' against 'beatles'"
    """
    answer = normalize_answer(answer or "")
    golds = " | ".join(map(normalize_answer, golds))
    return f"{answer!r} against {golds!r}"


def gold_sentences(question):
    """[[title, sentence]] of the question's supporting facts, where the question carries its contexts."""
    context = dict(question.context)
    found = []
    for title, index in question.supporting_facts:
        found += [[title, sentence.strip()] for sentence in context.get(title, [])[index:index + 1]]
    return found
