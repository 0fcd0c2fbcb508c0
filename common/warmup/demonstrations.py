"""Scripted demonstrations of real questions from their gold evidence: what a language model that never wrote
a paper's tags learns them from, before reinforcement learning can begin (common/warmup/).

| data set | its gold evidence | a hop of the demonstration |
| --- | --- | --- |
| 2WikiMultihopQA | evidences: triples | "the director of Jaws" / "The director of Jaws is Spielberg." |
| MuSiQue | question_decomposition | its sub-question / the sub-question with its answer |
| HotpotQA | supporting facts: sentences | a page's name / the sentence, around the answer where it has it |

A hop's query is demonstrated only if the retriever in use finds the gold page with it, and only if its words
can be known by then: what it names stands in the question or in what was read before, as far as the agent
reads it. What a thought claims to have found has to stand there, too. Thoughts quote data, so they are
rendered as foreign text, which can write no tag.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace

from common.metrics import normalize_answer, stands_in
from common.rollout import no_progress

QUOTED = 12  # words of a sentence that a thought repeats


@dataclass
class Hop:
    """One search: what for, with which words, and what the page says."""
    title: str            # the gold page
    need: str             # "the director of Jaws"
    queries: list[str]    # to be tried in this order
    found: str            # "The director of Jaws is Steven Spielberg."
    subject: str = ""     # "Jaws", which the agent must have read; "" = the queries name nothing else
    claim: str = ""       # "Steven Spielberg", which the pages that were read must say
    waits: bool = False   # for what an earlier hop finds
    passages: tuple = ()  # what the retriever found with the first of `queries`, once it was demonstrated


@dataclass
class Demonstration:
    """What to search for and what to answer; a script renders it in its own tags."""
    hops: list[Hop]
    answer: str
    flaw: str | None = None  # those of the embedded world have some

    def queries(self):
        return [hop.queries[0] for hop in self.hops]

    def thoughts(self):
        """One before each search and one before the answer, each on what the last search found."""
        thoughts = []
        known = ""
        for i, hop in enumerate(self.hops):
            thoughts.append(f"{known}{self.wanted(i, hop.need)}")
            known = f"{hop.found} "
        return [*thoughts, f"{known}{self.concluded()}"]

    def wanted(self, i, need):
        """What the i-th search is said to be for."""
        return WANTED[i % len(WANTED)].format(need)

    def concluded(self):
        return f"So the answer is {self.answer}."


WANTED = ("I need to find {}.", "Now I need {}.", "Next is {}.")


def plan_of(question):
    """[Hop] of a question's gold evidence, [] where it has none that can be followed."""
    if question.evidences:
        return hops_of_triples(question)
    if question.decomposition:
        return hops_of_steps(question)
    return hops_of_sentences(question)


def hops_of_triples(question):
    """2Wiki: subject, relation, object; the pages are those of the supporting facts."""
    titles = list(dict.fromkeys(title for title, _ in question.supporting_facts))
    hops = []
    for subject, relation, found in question.evidences:
        same = [t for t in titles if plain_title(t).lower() == subject.lower()]
        starts = [t for t in titles if t.lower().startswith(subject.lower())]
        title = (same or starts or [subject])[0]
        subject = plain_title(subject)  # "(director)" stands in no question
        need = f"the {relation} of {subject}"
        queries = [f"{subject} {relation}", subject]
        told = f"The {relation} of {subject} is {found}."
        hops.append(Hop(title, need, queries, told, subject, found))
    return hops


def hops_of_steps(question):
    """MuSiQue: sub-questions, in which #1 stands for the first one's answer; some are "subject >> relation".
    """
    titles = {}
    for number, (title, _) in zip(question.support_paragraphs, question.supporting_facts, strict=False):
        titles[number] = title
    answers, hops = [], []

    def earlier(match):
        number = int(match[1])
        return answers[number - 1] if number <= len(answers) else match[0]

    for step in question.decomposition:
        asked = re.sub(r"#(\d)", earlier, step["question"]).strip()
        answers.append(step["answer"])
        title = titles.get(step["paragraph_support_idx"], "")
        subject, arrow, relation = asked.partition(" >> ")
        waits = bool(re.search(r"#\d", step["question"]))
        if arrow:
            need = f"the {relation} of {subject}"
            found = f"The {relation} of {subject} is {step['answer']}."
            queries = [f"{subject} {relation}"]
        else:
            need = asked.rstrip("?. ")
            found = f"{need}: {step['answer']}."
            queries = [asked]
            subject = ""
        queries.append(f"{title} {queries[0]}")
        hops.append(Hop(title, need, queries, found, subject, step["answer"], waits))
    return hops


def hops_of_sentences(question):
    """HotpotQA: the pages of the supporting facts, those that the question names first."""
    sentences = {title: lines for title, lines in question.context}
    titles = list(dict.fromkeys(title for title, _ in question.supporting_facts))
    titles.sort(key=lambda t: plain_title(t).lower() not in question.question.lower())
    names = [plain_title(t) for t in titles]
    hops = []
    for title in titles:
        facts = [i for t, i in question.supporting_facts if t == title]
        lines = [sentences[title][i].strip() for i in facts if i < len(sentences.get(title, []))]
        if not lines:
            return []
        name = plain_title(title)
        told, claim = quote(lines, [question.answers[0], *(other for other in names if other != name)])
        hops.append(Hop(title, name, [name], told, name, claim))
    return hops


def plain_title(title):
    """
    >>> plain_title("The Zone (2017 film)"), plain_title("(Untitled)")
    ('The Zone', '(Untitled)')
    """
    return re.sub(r"\s*\([^()]*\)$", "", title) or title


def quote(lines, wanted, most=QUOTED):
    """Up to `most` words around the first of `wanted`, an answer and names, that one of the lines has, else
    of the first line; and the same without the sign of a cut. "yes" and "no" are said by no line.

    >>> quote(["It is an oldie.", "It was built by old Ann Lee in 1904 of stone."], ["Old"], 5)
    ('It was built by old …', 'It was built by old')
    >>> quote(["It is known.", "It is by Bo."], ["no", "Bo"])[0]
    'It is by Bo.'
    """
    said_by_pages = [text for text in wanted if text.lower() not in ("yes", "no")]
    patterns = [re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE) for text in said_by_pages]
    places = [(line, pattern.search(line)) for pattern in patterns for line in lines]
    line, place = next(((line, place) for line, place in places if place), (lines[0], None))
    words = line.split()
    end = len(line[:place.end()].split()) if place else 0
    start = max(0, end - most)
    said = " ".join(words[start:start + most])
    return said + (" …" if len(words) > start + most else ""), said


def demonstrate(question, index, top_k, max_passage=None):
    """(Demonstration or None, what is wrong or "") with the queries that find the gold pages among `top_k` of
    `index` (a retriever), of which max_passage characters are read. A page that was read already is not asked
    for again: what it says joins what is known. The first search may be for the question as it stands."""
    plan = plan_of(question)
    if not plan:
        return None, "no gold evidence that can be followed"
    hops, problem = follow(plan, question, index, top_k, max_passage)
    return None if problem else Demonstration(hops, question.answers[0]), problem


def follow(plan, question, index, top_k, max_passage):
    """([Hop], "") of a plan with the queries that find its pages; (None, what is wrong)."""
    hops = []
    read = question.question
    for hop in plan:
        if all(h.title != hop.title for h in hops):
            known = [q for q in spellings(hop, question.question) if q and is_known(q, hop, read)]
            if not hops and not known:
                known, hop.need = [question.question], "a page about the question"
            if not known:
                return None, "a page that nothing read before names"
            for query in known:
                passages = index.search([query], top_k)[0]
                if any(p.title == hop.title for p in passages):
                    break
            else:
                return None, "the retriever does not find a gold page"
            hops.append(replace(hop, queries=[query], passages=tuple(passages)))
            read = " ".join([read, *(f"{p.title} {p.text[:max_passage]}" for p in passages)])
        else:
            hops[-1].found += f" {hop.found}"
        if hop.claim and not says(read, hop.claim):
            return None, "what a page should say is not in what is read of it"
    return hops, ""


def spellings(hop, asked):
    """The queries that may find a hop's page, to be tried in this order: its own, the page's title, its name
    beside what the question says in small letters.

    >>> spellings(Hop("Heavy (film)", "", ["Heavy"], ""), "In Heavy, who directed the film and starred?")
    ['Heavy', 'Heavy (film)', 'Heavy directed film starred']
    """
    words = [word for word in re.findall(r"\w+", asked) if word.islower() and len(word) > 3]
    return [*hop.queries, hop.title, " ".join([plain_title(hop.title), *words])]


def is_known(query, hop, read):
    """Whether a query can be thought of by somebody who has read this: the words of what it names, the hop's
    subject or the gold page, stand there. A sub-question names what was found before.

    >>> hop = Hop("Ann Lee (writer)", "", [], "", subject="Ann Lee")
    >>> [is_known("Ann Lee mother", hop, read) for read in ("Who was Ann Eve Lee?", "Who was Ann?")]
    [True, False]
    """
    title = plain_title(hop.title)
    names = [name for name in (hop.subject, title) if name and (name in query or stands_in([name], query))]
    words = set(normalize_answer(read).split())
    return all(set(normalize_answer(name).split()) <= words for name in names)


def says(text, claim):
    """Whether a claim stands in a text; "South Korea" does in "a South Korean film".

    >>> says("A South Korean film.", "South Korea"), says("A part of it.", "art"), says("Lead by Ed.", "Ed")
    (True, False, True)
    """
    begins = f" {normalize_answer(claim)}"
    return stands_in([claim], text) or len(begins) > 4 and begins in f" {normalize_answer(text)}"


def of_questions(questions, index, render, reward, top_k, max_passage=None, progress=no_progress):
    """([[Trajectory]], Counter of what became of the questions): demonstrations as a script renders them.

    index, top_k, max_passage: see demonstrate. render(question, Demonstration) -> [Trajectory];
    reward(trajectories, question) is the script's own, None where its agent could not go so far, and only
    what earns 1 is kept."""
    kept, fate = [], Counter()
    for number, q in enumerate(questions, 1):
        demo, problem = demonstrate(q, index, top_k, max_passage)
        rendered = render(q, demo) if demo else []
        earned = reward(rendered, q) if demo else 1
        if earned is None:
            problem = "longer than the agent's limits"
        elif earned != 1:
            problem = "does not earn reward 1"
        if not problem:
            kept.append(rendered)
        fate[problem or "demonstrated"] += 1
        progress(number, len(questions))
    return kept, fate


def layers(steps):
    """The steps of a demonstration as a DAG's layers: a step comes one layer after the one that finds its
    subject.

    >>> from common.world.demonstrations import Step
    >>> made = layers([Step("A", "r", "X"), Step("X", "s", "1"), Step("B", "r", "Y"), Step("Y", "s", "2")])
    >>> [[s.subject for s in layer] for layer in made]
    [['A', 'B'], ['X', 'Y']]
    """
    depth = []
    for i, step in enumerate(steps):
        found = [depth[j] + 1 for j in range(i) if step.subject in (steps[j].found, steps[j].tail)]
        depth.append(max(found, default=0))
    made = [[] for _ in range(max(depth, default=-1) + 1)]
    for step, d in zip(steps, depth, strict=True):
        made[d].append(step)
    return made
