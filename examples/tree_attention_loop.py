"""Tree attention in a plain training loop: many continuations of one start, the start computed once.

    python -m examples.tree_attention_loop

A tree of tokens is laid out depth first in one row. What descends from a piece then stands right behind it,
so one number per token, `end`, says who may see it: query i sees key j where j <= i < end[j]. On a GPU
FlexAttention skips what that hides (common/gpu/tree_attention.py). It has no backward on a CPU:
there the same rule is a dense mask.
"""

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch
import torch.nn.functional as F
import transformers

from common.gpu.tree_attention import block_mask, padded_length


def lay_out(tree):
    """(ids, positions, end, before) of a tree (ids, [trees that continue it]).

    before[i]: the place of the token that token i follows, -1 for the first.

    >>> [x.tolist() for x in lay_out(([5, 6], [([7], []), ([8, 9], [])]))]
    [[5, 6, 7, 8, 9], [0, 1, 2, 2, 3], [5, 5, 3, 5, 5], [-1, 0, 1, 1, 3]]
    """
    ids = []
    positions = []
    end = []
    before = []

    def add(node, position, parent):
        own, children = node
        start = len(ids)
        last = start + len(own) - 1
        below = position + len(own)
        ids.extend(own)
        positions.extend(range(position, below))
        before.append(parent)
        before.extend(range(start, last))
        end.extend(own)     # filled in when all descendants are there
        for child in children:
            add(child, below, last)
        end[start:last + 1] = [len(ids)] * len(own)

    add(tree, 0, -1)
    return tuple(map(torch.tensor, (ids, positions, end, before)))


def tree_logprobs(model, tree):
    """log p of every token of the tree given its path, (N,); 0 for the first, which follows nothing."""
    ids, positions, end, before = (x.to(model.device) for x in lay_out(tree))
    n = length = len(ids)
    if model.device.type == "cuda":
        model.set_attn_implementation("tree")
        length = padded_length(n)                           # few lengths, few compilations
        mask = block_mask(end[None], length)
    else:
        i = torch.arange(n)
        earlier = i[None] <= i[:, None]                     # (N, N)
        before_end = i[:, None] < end[None]
        mask = (earlier & before_end)[None, None]           # (1, 1, N, N)
    padding = (0, length - n)
    out = model(
        input_ids=F.pad(ids, padding)[None],
        position_ids=F.pad(positions, padding)[None],
        attention_mask=mask,
        use_cache=False,
    )
    logits = out.logits[0, before.clamp(min=0)]          # (N, V), of what each token follows
    logprobs = logits.float().log_softmax(-1)
    of_own = logprobs.gather(1, ids[:, None])[:, 0]
    return torch.where(before >= 0, of_own, 0.0)


def main(steps=5):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = transformers.Qwen3ForCausalLM(config)
    if torch.cuda.is_available():
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tree = ([1, 2, 3, 4], [([5, 6], [([7, 8], []), ([9], [])]), ([10, 11, 12], [])])
    for step in range(steps):
        loss = -tree_logprobs(model, tree).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} | loss {loss.item():.3f}")
    return model


if __name__ == "__main__":
    main()
