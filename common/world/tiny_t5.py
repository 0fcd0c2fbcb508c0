"""A tiny T5 of the embedded world, for what writes questions."""

import torch

from common.model import ENCODERS
from common.world import tiny_bert


def tiny_tokenizer():
    """The world's words, T5's end and padding, and the words of its task."""
    tokenizer = tiny_bert.tiny_tokenizer(("<pad>", "<unk>", "<s>", "</s>"), ("generate", "question"))
    tokenizer.eos_token = "</s>"
    return tokenizer


def tiny_model(width=96, seed=4):
    """(model, tokenizer): a real T5 of two layers a side. It starts out with what copying names takes, which
    it would otherwise spend its training on, and is free to change it: head 0 of the encoder notes at every
    token the one before it (A, written to B); all heads of the decoder's second layer copy what
    they look at (C), and head 0 looks for the place whose note is the token just written."""
    from transformers import T5Config

    tokenizer = tiny_tokenizer()
    dim = width // 4
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=dim,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = ENCODERS["question"].from_config(config)
        head = slice(0, dim)
        note, written = (torch.linalg.qr(torch.randn(width, dim)).Q.T for _ in range(2))  # (dim, width)
        back = model.encoder.block[0].layer[0].SelfAttention
        back.relative_attention_bias.weight[:, 0] = 0
        back.relative_attention_bias.weight[1, 0] = 8  # the token before
        back.q.weight[head] = 0
        back.v.weight[head] = note
        back.o.weight[:, head] = 2 * written.T
        find = model.decoder.block[1].layer[1].EncDecAttention
        find.q.weight[head] = note
        find.k.weight[head] = written
        copied = torch.linalg.qr(torch.randn(width, width)).Q  # (4 dim, width), a block a head
        find.v.weight.copy_(copied)
        find.o.weight.copy_(4 * copied.T)
    return model, tokenizer
