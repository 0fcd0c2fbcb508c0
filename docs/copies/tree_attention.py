import torch
from tree_attention import block_mask, tree_attention

# a prompt, tokens 0 to 2, and two turns behind it, 3 to 4 and 5 to 6, that do not see one another
end = torch.tensor([[7, 7, 7, 5, 5, 7, 7]])
i = torch.arange(7)
seen = (i[None] <= i[:, None]) & (i[:, None] < end[0][None])
assert seen.int().tolist()[5] == [1, 1, 1, 0, 0, 1, 0]
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
found, _ = tree_attention(None, q, k, v, block_mask(end, 128))
q, k, v = (x[:, :, :7] for x in (q, k, v))
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
assert torch.allclose(found[:, :7], wanted.transpose(1, 2), atol=1e-5)
print("the tree and the dense mask agree")
