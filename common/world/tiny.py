"""The tiny policy of the embedded world: a word-level tokenizer, a half-million-weight Qwen3,
its warm-up on demonstrations, and where it lies: those that the scripts start from by default come with the
project (common/world/start), others are made once and cached."""

import functools
import hashlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common import cache, distributed, retriever, rollout, training, tree_blocks, world
from common.files import say
from common.model import token_logprobs
from common.world import hard

# Part of every policy's recipe. Change it when the world, the demonstrations, the rendering, the model or the
# warm-up make other weights. Cached policies are then made anew; those that come with the project are made by
# `python -m common.world make`.
VERSION = "3"
START = Path(__file__).parent / "start"


@dataclass(frozen=True)
class Recipe:
    script: str                     # who renders, with what its rendering depends on beside top_k
    steps: int                      # of the warm-up, eight demonstrations each
    flaw_rate: float                # share of the demonstrations that are flawed
    top_k: int = 0                  # passages per search
    world: str = "plain"            # or hard[:KNOB=SHARE,…]


def warm_up_of(level, steps="auto", plain=(900, .6), hard=(1550, .8)):
    """(steps, flaw rate) of a Recipe at a level of the world. steps: --warmup-steps, where it is a number.
    flaw rate: of the last fifth of the steps; before, the plain level has a sixth of it."""
    usual, flaw_rate = plain if level == "plain" else hard
    return (usual if steps == "auto" else steps), flaw_rate


def folder_of(making):
    """Folder of the tiny policy: the start weights with this recipe that come with the project; else it is
    made, or was."""
    recipe = making.full_recipe()
    for file in START.glob("*/recipe.json"):
        if json.loads(file.read_text())["recipe"] == recipe:
            return file.parent
    return distributed.first(cached_policy, recipe, making.make)


def bm25(made):
    return retriever.BM25Retriever(made.corpus())


@dataclass
class Making:
    """A tiny policy that can be made, from flawed demonstrations in worlds that training never sees."""
    recipe: Recipe
    words: list[str]         # that the script writes besides the world's, and its tags
    tags: list[str]
    render: Callable         # (tokenizer, question row, demonstration, index) -> [Trajectory]
    index: Callable = bm25   # (world) -> what render reads
    pack_tokens: int = 512   # of a row of the warm-up's batches

    def __post_init__(self):
        self.level = hard.parse(self.recipe.world)
        written = world.vocabulary(vague=bool(self.level))
        if self.level:
            written += hard.WORDS
        self.words = [*written, *self.words]

    def full_recipe(self):
        """The recipe as JSON, with all words and tags as a hash."""
        words = list(dict.fromkeys([*self.tags, *self.words]))
        made_by = asdict(self.recipe) | {"version": VERSION, "words": hashed(words, list(self.tags))}
        made_by["world"] = str(self.level or "plain")
        return made_by

    def begin(self):
        """(model, tokenizer) before the warm-up."""
        tokenizer = tiny_tokenizer(self.words, self.tags)
        return tiny_model(tokenizer), tokenizer

    def groups(self, tokenizer):
        render = functools.partial(self.render, tokenizer)
        steps, flaw_rate = self.recipe.steps, self.recipe.flaw_rate
        return hard.groups(tokenizer, render, self.index, steps, flaw_rate, self.level)

    def fingerprint(self):
        """A hash of the ids of the first three steps' demonstrations."""
        shown = []
        for trajectories in itertools.islice(self.groups(self.begin()[1]), 3):
            for t in trajectories:
                turns = [(turn.ids, turn.observation_ids) for turn in t.turns]
                shown.append((t.prompt_ids, turns))
        return hashed(shown)

    def learn(self, steps=None):
        """(model, tokenizer, losses) after the warm-up, or after its first `steps`."""
        model, tokenizer = self.begin()
        groups = itertools.islice(self.groups(tokenizer), steps)
        batches = (rollout.collate(group, pack_tokens=self.pack_tokens) for group in groups)
        losses = warm_up(model, batches, self.recipe.steps)
        return model, tokenizer, losses

    def make(self):
        say(f"warming up the tiny policy on {8 * self.recipe.steps} demonstrations, "
            f"{torch.get_num_threads()} threads (cached afterwards)")
        model, tokenizer, _ = self.learn()
        return model, tokenizer


def hashed(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def word_level(words, unknown, signs):
    """A tokenizers.Tokenizer of one id per word; signs: a pattern of what is split off."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    core = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Split(Regex(signs), "isolated"),
    ])
    return core


def tiny_tokenizer(words, tags):
    """Word-level tokenizer: one id per word, punctuation mark or tag.

    Its chat template leaves out system messages, since the tiny policy learns its format from demonstrations
    and reads no instructions."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    special = ["[PAD]", "[UNK]", "[EOS]", "[USER]", "[ASSISTANT]"]
    core = word_level([*special, *tags, *words], "[UNK]", r"[^\w\s]")
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(t, normalized=False) for t in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        extra_special_tokens=["[USER]", "[ASSISTANT]"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{% for m in messages if m['role'] != 'system' %}"
        "{{ '[USER] ' if m['role'] == 'user' else '[ASSISTANT] ' }}{{ m['content'] }}"
        "{{ ' ' if m['role'] == 'user' else ' [EOS] ' }}{% endfor %}[ASSISTANT]")
    return tokenizer


def tiny_model(tokenizer, width=128, seed=0):
    """A two-layer Qwen3 of about half a million weights.

    It starts out with the circuit that copying needs (an induction head, Olsson et al. 2022), which it would
    otherwise spend most of its warm-up discovering; training is free to change all of it.

    Layer 1: heads 0 and 1 look one and two tokens back and note what they see
        (values A, outputs B_0 and B_1).
    Layer 2: looks for the place where the noted token is the present one (queries A, keys B^T)
        and copies what stands there."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    dim = width // 4
    theta = 500.0
    pairs = min(6, width // 8)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=dim, max_position_embeddings=8192,
        tie_word_embeddings=True, attention_bias=True, initializer_range=.04,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        tree_blocks.attach(model)
        one, two = (layer.self_attn for layer in model.model.layers)
        for norm in (one.q_norm, one.k_norm, two.q_norm, two.k_norm):
            norm.weight.fill_(1.5)                                    # sharp from the start
        # radians a token, of the fast rotary pairs
        angle = theta ** (-torch.arange(pairs) * 2 / dim)
        one.k_proj.bias[:pairs] = 2
        note = torch.linalg.qr(torch.randn(width, dim)).Q.T           # A, (dim, width), orthonormal rows
        one.v_proj.weight[:dim] = note
        for head, back in enumerate((1, 2)):
            rows = slice(head * dim, (head + 1) * dim)
            # turned to meet the key `back` tokens ago
            turned = one.q_proj.bias[rows]
            turned[:pairs] = 2 * torch.cos(back * angle)
            turned[dim // 2:dim // 2 + pairs] = -2 * torch.sin(back * angle)
            write = torch.linalg.qr(torch.randn(width, dim)).Q        # B, (width, dim), orthonormal columns
            one.o_proj.weight[:, rows] = .1 * write
            two.k_proj.weight[rows] = write.T
            copy = torch.linalg.qr(torch.randn(width, dim)).Q.T
            two.v_proj.weight[rows] = copy
            for query in (2 * head, 2 * head + 1):                    # two query heads share a key head
                rows = slice(query * dim, (query + 1) * dim)
                two.q_proj.weight[rows] = note
                two.o_proj.weight[:, rows] = .1 * copy.T
    return model


def likelihood_loss(model, batch):
    """Of the sampled tokens."""
    batch = batch.to(model.device)
    return -token_logprobs(model, batch).sum() / batch.response_mask.sum()


def warm_up(model, batches, total, lr=2e-3, loss_of=likelihood_loss):
    """The losses of supervised training on `total` batches."""
    began = time.time()
    losses = []
    optimizer = training.make_optimizer(model, lr, betas=(.9, .98))
    for step, batch in enumerate(batches):
        lr_now = training.cosine_lr(step, total, lr, lr / 20, warmup=20)
        training.set_lr(optimizer, lr_now)
        loss = loss_of(model, batch)
        loss.backward()
        training.clip_gradient(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step % 100 == 99 or step + 1 == total:
            seconds = time.time() - began
            say(f"  warm-up {step + 1}/{total} | loss {losses[-1]:.3f} | {seconds:.0f}s")
    return losses


def cached_policy(recipe, build):
    """Folder of the policy that `build() -> (model, tokenizer)` makes, kept under a hash of `recipe` (JSON),
    VERSION and torch's."""
    recipe = recipe | {"version": VERSION, "torch": torch.__version__}
    text = json.dumps(recipe, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(folder):
        model, tokenizer = build()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "recipe.json").write_text(json.dumps(recipe, indent=1))

    return cache.made_once(cache.folder() / f"policy-{digest}", write)
