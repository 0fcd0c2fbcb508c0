"""What a policy writes before it calls a tool: plans in many words, and fillers that say nothing.

Training thoughts of a language model are long, varied and partly void. These are so on purpose: a paper that
counts thoughts for less than calls is only put to the test where thoughts are worth it.
"""

FILLERS = (
    "okay let us try to figure this out step by step",
    "wait but I am not sure about this yet",
    "hmm let me think about it once more",
    "well this is a question that needs some care",
    "let me see what is known so far and what is not",
    "alright first things first then the rest",
    "I should not hurry here and look closely",
    "maybe there is another way to see it but go on",
    "it could be that I am wrong so let me check",
    "good now this looks like the right way to go",
)
PLANS = (
    "the next thing to look for is the {relation} of {subject}",
    "now I need the {relation} of {subject} from the graph",
    "so the {relation} of {subject} comes next",
    "what is missing is the {relation} of {subject}",
    "the edge for the {relation} of {subject} should tell",
    "to go on one must know the {relation} of {subject}",
    "I will read the node for the {relation} of {subject}",
    "from here the {relation} of {subject} leads further",
    "the question wants the {relation} of {subject} first",
    "let me get the {relation} of {subject} with the tool",
)
FOUND = (
    "the graph says the {relation} is {found}",
    "there it is the {relation} is {found}",
    "from the edges the {relation} is {found}",
    "so I have found that the {relation} is {found}",
    "the answer of the tool shows the {relation} is {found}",
    "one edge tells that the {relation} is {found}",
    "it is clear now the {relation} is {found}",
    "this means the {relation} is {found}",
    "reading the node the {relation} is {found}",
    "the {relation} is {found} as the graph has it",
)
STARTS = (
    "the question begins with {subject} so find that entity",
    "first I must locate {subject} in the graph",
    "the place to start is {subject}",
    "let me match the name {subject} before anything else",
    "the only name given is {subject} and it has to be found",
    "the question names {subject} so that is what to match",
    "without the entity {subject} there is no way to go on",
    "I begin by looking for {subject} among the names",
    "{subject} is where the path starts so let me find it",
    "what I have is the name {subject} and no more",
)
ENDS = (
    "that is all the question asks for",
    "nothing is left to look up",
    "this must be the answer",
    "now I can say the answer",
    "the path is at its end here",
    "with that the question is answered",
    "so this is what was wanted",
    "no more calls are needed for this",
    "everything on the way has been found",
    "it only remains to write it down",
)


def found(rng, relation, name):
    return rng.choice(FOUND).format(relation=relation, found=name)


def planned(rng, *parts):
    """A training thought, nearly twice as long as a call: what matters, and fillers around it."""
    said = [part for part in parts if part]
    fillers = rng.sample(FILLERS, 2 if len(said) < 2 or rng.random() < .5 else 1)
    for number, filler in enumerate(fillers):
        said.insert(number * len(said), filler)
    return " ".join(said)


def habit(rng, part):
    """A thought of a policy that nobody has trained to be brief: mostly a filler and the plan, sometimes a
    filler alone."""
    chance = rng.random()
    if chance < .05:
        return f"{rng.choice(FILLERS)} {rng.choice(FILLERS)}"
    if chance < .5:
        return f"{rng.choice(FILLERS)} {part}"
    return part


def words():
    """Every word that these thoughts are written with."""
    texts = [*FILLERS, *PLANS, *FOUND, *STARTS, *ENDS]
    found_words = {}
    for text in texts:
        found_words |= dict.fromkeys(text.format(relation="", subject="", found="").split())
    return list(found_words)
