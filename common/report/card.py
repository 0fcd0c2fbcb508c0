"""The model card of a checkpoint, README.md: what was trained on what and by which command, and its scores.

And what serving it needs: a prompt as its agent writes it, and the strings that end a turn. The example there
runs with transformers alone; a question's text stands in it as Python quotes it."""

import shlex
import sys
from pathlib import Path

from common import checkpoint
from common.files import one_line, write_atomic

CARD = """\
---
library_name: transformers
tags: [fivehop, {script}]{base_model}
---

# {script}, {name}

Trained from {source} on {data}, {step} steps, seed {seed}. Settings: the run's config.json.

    {command}

{scores}

95 % intervals, bootstrap over questions.

## Serving it

A turn ends at {stops}. What the agent found is then appended, and the next turn sampled. The
prompt of a question, token for token as the agent writes it:

```python
import transformers

folder = "."    # this one
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
prompt = {prompt}
stops = {stop_list}
ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]


n = ids.shape[1]


def said(ids):
    return tokenizer.decode(ids[0, n:])


ids = model.generate(ids, max_new_tokens=512, do_sample=False, stopping_criteria=[
    lambda ids, scores: said(ids).endswith(tuple(stops))])
print(said(ids))
```
"""


def write(folder, policy, found):
    """Puts the card beside the weights that were evaluated. folder: RunFolder. found: of Run.evaluate.
    Nothing is written where no weights were saved, or where they are not a language model's."""
    asked = getattr(getattr(policy, "engine", None), "asked", None)
    place = folder.path / "checkpoint"
    if not asked or not (place / "trainer.json").exists():
        return
    config = folder.config
    prompt_ids, stop = asked
    model = config["checkpoint"] or config["model"]
    base_model = ""
    if model and not Path(model).exists():
        base_model = f"\nbase_model: {one_line(model)}"
    program, *flags = sys.argv
    write_atomic(place / "README.md", CARD.format(
        script=folder.path.parent.name,
        name=folder.path.name,
        base_model=base_model,
        source=quoted(model) if model else "the embedded world's tiny policy",
        data=quoted(config["data"]),
        step=checkpoint.read_state(place)["step"],
        seed=config["seed"],
        command=one_line(shlex.join(["python", Path(program).name, *flags])),
        scores=table(found),
        stops=" or ".join(f"`{s}`" for s in stop) or "the end of the sequence",
        prompt=repr(policy.tokenizer.decode(prompt_ids)),
        stop_list=list(stop),
    ))


def quoted(text):
    return f"`{one_line(text).replace('`', '')}`"


def table(found):
    lines = ["| set | questions | EM | F1 |", "| --- | --- | --- | --- |"]
    for name, evaluation in found.items():
        s = evaluation["summary"]
        em = f"{s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}]"
        lines.append(f"| {quoted(name)} | {s['n']} | {em} | {s['f1']:.3f} |")
    return "\n".join(lines)
