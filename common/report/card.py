"""The model card of a checkpoint, README.md: what was trained on what, its scores, and what serving needs: a
prompt as the agent writes it, and the strings that end a turn."""

from common import metrics
from common.files import one_line, read_json, write_atomic

CARD = """\
---
library_name: transformers
tags: [fivehop, {script}]
---

# {script}, {name}

{about}

After a turn, which ends at one of `stops`, comes what the agent found. A prompt, as Python quotes it:

```python
import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained(".")
model = transformers.AutoModelForCausalLM.from_pretrained(".")
prompt = {prompt!r}
stops = {stops!r}
ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
said = model.generate(ids, max_new_tokens=512, do_sample=False, stopping_criteria=[
    lambda ids, scores: tokenizer.decode(ids[0]).endswith(tuple(stops))])
print(tokenizer.decode(said[0, ids.shape[1]:]))
```
"""


def write(folder, policy, found):
    """Puts the card beside the weights that were evaluated. folder: RunFolder. found: of Run.evaluate.
    Nothing is written where no weights were saved, or where they are not a language model's."""
    asked = getattr(getattr(policy, "engine", None), "asked", None)
    place = folder.path / "checkpoint"
    if not asked or not (place / "trainer.json").exists():
        return
    prompt_ids, stops = asked
    config = folder.config
    source = config["checkpoint"] or config["model"] or "the embedded world's tiny policy"
    if config.get("warmup_data"):
        source += f", after a warm-up on {config['warmup_data']}"
    steps = read_json(place / "trainer.json", dict)["step"]
    about = [f"{steps} steps on {config['data']} from {source}"]
    about += [metrics.summary_line(name, evaluation["summary"]) for name, evaluation in found.items()]
    write_atomic(place / "README.md", CARD.format(
        script=folder.path.parent.name,
        name=folder.path.name,
        about="\n".join(f"- `{one_line(line).replace('`', '')}`" for line in about),
        prompt=policy.tokenizer.decode(prompt_ids),
        stops=list(stops),
    ))
