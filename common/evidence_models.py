"""The models of a search for evidence: a coarse encoder, the scorers of a fine policy, a T5 that asks.
Each comes from a folder, from the hub, or is made tiny for the embedded world."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common import encoders, flags, seq2seq
from common import model as models
from common.evidence import asked_of, tokenize
from common.world import tiny_encoders


class Scorers(torch.nn.Module):
    """A fine policy's models: "action" scores sentences, "submit" submitting; in joint training "question"
    asks. Saved as folders in Hugging Face form."""

    def __init__(self, parts):
        super().__init__()
        for name, (model, _) in parts.items():
            self.add_module(name, model)
        self.tokenizers = {name: tokenizer for name, (_, tokenizer) in parts.items()}

    def save_pretrained(self, folder):
        for name, tokenizer in self.tokenizers.items():
            getattr(self, name).save_pretrained(Path(folder) / name)
            tokenizer.save_pretrained(Path(folder) / name)


@dataclass
class Policy:
    """A fine policy: what is saved (model, tokenizer) and what a search needs besides."""

    model: Scorers
    encoder: encoders.Encoder
    action_tokenizer: encoders.PairTokenizer
    submit_tokenizer: encoders.PairTokenizer
    cfg: object
    asker: seq2seq.Writer | None = None
    may_ask: bool = False  # of its own accord

    def __post_init__(self):
        self.coarse_cache = {}  # state -> candidates; the encoder stays as it is
        self.forget()

    @property
    def tokenizer(self):
        return self.action_tokenizer.tokenizer

    def forget(self):
        """After an update."""
        self.cache = {}  # state -> (actions, log-probs) of these weights
        self.asked = {}  # state -> SubQuestion of the beams of these weights
        for case, steps in list(self.coarse_cache):
            if case.closed or asked_of(steps):  # another sub-question will be asked
                del self.coarse_cache[case, steps]


# ---------------------------------------------------------------- loading

def model_of(source, kind, layers=0):
    """(model, tokenizer) of a folder or hub id; without one the tiny ones of the embedded world."""
    if source:
        return models.load_encoder(source, kind, layers)
    return tiny_encoders.tiny_t5() if kind == "question" else tiny_encoders.tiny_bert(kind)


def load_encoder(cfg, source):
    """The coarse encoder."""
    model, tokenizer = model_of(source, "encoder")
    pair_tokenizer = encoders.PairTokenizer("coarse", tokenizer, cfg.max_tokens)
    return encoders.Encoder(model.eval(), pair_tokenizer, cfg.micro_tokens, cfg.precision)


def load_policy(cfg, source, encoder, cases, asker=""):
    """The fine policy of a folder, its T5 too where one was saved beside; without a folder of --action-model
    and --submit-model, or the first layers of --encoder with a new head each. No dropout, so that ratios
    begin at 1.

    asker: folder of the T5 of a policy that has none yet."""
    parts, tokenizers = {}, []
    for name in ("action", "submit"):
        if source:
            parts[name] = model_of(Path(source) / name, name)
        else:
            given = getattr(cfg, f"{name}_model")
            beginning = cfg.fine_layers and cfg.encoder
            parts[name] = model_of(given or beginning, name, cfg.fine_layers)
        _, tokenizer = parts[name]
        pair_tokenizer = encoders.PairTokenizer(name, tokenizer, cfg.max_tokens)
        tokenize(pair_tokenizer, cases)
        tokenizers.append(pair_tokenizer)
    if source and (Path(source) / "question").exists():
        asker = Path(source) / "question"
    asker = load_writer(cfg, asker) if asker else None
    if asker:
        parts["question"] = asker.model, asker.tokenizer
    return Policy(Scorers(parts).eval(), encoder, *tokenizers, cfg, asker, asker is not None)


def load_writer(cfg, source):
    """A T5, with <sep> among its words as in the authors' code."""
    model, tokenizer = model_of(source, "question")
    if encoders.SEP.strip() not in tokenizer.get_vocab():
        tokenizer.add_tokens([encoders.SEP.strip()])
        model.resize_token_embeddings(len(tokenizer))
    return seq2seq.Writer(
        model.eval(), tokenizer, max_new=cfg.question_tokens, micro_tokens=cfg.micro_tokens
    )


# ---------------------------------------------------------------- flags

def with_models(cfg, paper):
    """cfg with the ids of the paper's models {field: id}: for --model paper, and for data where no model is
    named. Refuses models and flags that do not go together, and stages without their model."""
    named = cfg.model or cfg.encoder or cfg.action_model or cfg.submit_model or cfg.fine_layers
    if cfg.model == "paper" or cfg.data != "world" and not named:
        names = {name: getattr(cfg, name) or value for name, value in paper.items()}
        cfg = replace(cfg, **names)
    scorers = bool(cfg.action_model) + bool(cfg.submit_model)
    own = bool(cfg.encoder)
    if cfg.model not in ("", "paper"):
        words = "this script has several models: --model paper, or --encoder with --fine-layers, or with"
        flags.refuse("model", cfg.model, f"{words} --action-model and --submit-model")
    if scorers and cfg.fine_layers:
        flags.refuse("fine_layers", cfg.fine_layers, "not beside --action-model and --submit-model")
    if own and scorers < 2 and not cfg.fine_layers or scorers and not own:
        words = "needs --fine-layers, or --action-model and --submit-model, and these need it"
        flags.refuse("encoder", cfg.encoder, words)
    if cfg.fine_layers and not own:
        flags.refuse("fine_layers", cfg.fine_layers, "needs --encoder")
    if cfg.checkpoint and cfg.stage not in ("supervised", "ppo", "joint", "eval"):
        flags.refuse("checkpoint", cfg.checkpoint, "is for one of the stages supervised, ppo, joint, eval")
    if own and not cfg.question_model and cfg.stage in ("ask", "qap", "sqg"):
        flags.refuse("stage", cfg.stage, "needs --question-model, a T5")
    return cfg
