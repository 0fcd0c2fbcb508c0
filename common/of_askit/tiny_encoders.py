"""Tiny encoders, with which ASKiT runs in the embedded world: real BERTs for what reads pairs of texts, a
real T5 for what writes questions, all of two layers."""

import torch
import transformers
from tokenizers import processors

from common import world
from common.world.tiny import START, word_level


def tiny_tokenizer(special=("[PAD]", "[UNK]", "[CLS]", "[SEP]"), words=(), **more):
    """The world's words and BERT's special tokens, or another model's: pad, unknown, first, end. more: other
    settings of a fast tokenizer."""
    known = [*special, "<sep>", ",", ":", *words, *world.vocabulary(vague=True)]
    pad, unknown, first, end = special
    core = word_level(known, unknown, r"<sep>|[^\w\s<>]")
    core.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {end}",
        pair=f"{first} $A {end} $B:1 {end}:1",
        special_tokens=[(t, core.token_to_id(t)) for t in (first, end)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        unk_token=unknown,
        cls_token=first,
        sep_token=end,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **more,
    )


def directions(count, width):
    """(count, width), orthonormal rows, drawn."""
    return torch.linalg.qr(torch.randn(width, count)).Q.T


SEEDS = {"encoder": 1, "action": 2, "submit": 3}


def tiny_bert(kind, auto_class="AutoModel"):
    """(model, tokenizer) of a kind of SEEDS. It starts out with what reading unseen names takes, and is free
    to change it: the encoder is a bag of words (its layers add nothing yet); in the scorers one head looks
    for a token's own word on the other side and says whether it stands there."""
    width = 64
    tokenizer = tiny_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * width,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEEDS[kind])
        model = getattr(transformers, auto_class).from_config(config)
        bert = getattr(model, "bert", model)
        bert.embeddings.word_embeddings.weight.normal_(0, 1)
        bert.embeddings.position_embeddings.weight.mul_(0.1 / 0.02 * 0.2)
        if kind == "encoder":
            for layer in bert.encoder.layer:
                layer.attention.output.dense.weight.zero_()
                layer.output.dense.weight.zero_()
        else:
            look_for_the_same_word(bert, width)
    return model, tokenizer


def look_for_the_same_word(bert, width):
    """Layer 0, head 0: a token attends to its own word in the other text, or else to itself, and notes which
    text that was in; two neurons then say "I stand in the other text too", one for each text. Layer 1, head
    0: everybody hears how many do. Six dimensions are kept for this."""
    kept = list(range(6))
    side, found, state_word, candidate_word, states, candidates_ = kept
    dim = width // 2
    words, types = bert.embeddings.word_embeddings.weight, bert.embeddings.token_type_embeddings.weight
    words[:, kept] = 0
    bert.embeddings.position_embeddings.weight[:, kept] = 0
    types.zero_()
    types[0, side], types[1, side] = -2, 2
    first, second = bert.encoder.layer

    head = first.attention
    same = 2.5 * directions(dim - 1, width)
    same[:, kept] = 0
    for projection, sign in ((head.self.query, 1), (head.self.key, -1)):
        projection.weight[: dim - 1] = same
        projection.weight[dim - 1] = 0
        projection.weight[dim - 1, side] = 2.5 * sign
    head.self.value.weight[0] = 0
    head.self.value.weight[0, side] = 1
    head.output.dense.weight[kept] = 0
    head.output.dense.weight[found, 0] = 1

    for neuron, (feature, sign) in enumerate(((state_word, 1), (candidate_word, -1))):
        first.intermediate.dense.weight[neuron] = 0
        first.intermediate.dense.weight[neuron, found] = sign
        first.intermediate.dense.weight[neuron, side] = -sign
        first.intermediate.dense.bias[neuron] = -2
        first.output.dense.weight[:, neuron] = 0
        first.output.dense.weight[feature, neuron] = 2

    head = second.attention
    head.self.query.weight[:dim] = 0
    head.self.key.weight[:dim] = 0
    head.self.value.weight[:2] = 0
    head.self.value.weight[0, state_word] = head.self.value.weight[1, candidate_word] = 1
    head.output.dense.weight[kept] = 0
    head.output.dense.weight[states, 0] = head.output.dense.weight[candidates_, 1] = 3


def tiny_t5():
    """(model, tokenizer): two layers a side, which have learned to ask (common/of_askit/tiny_t5.py)."""
    folder = START / "askit-plain"
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)
