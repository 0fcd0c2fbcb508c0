"""Kernels to copy: log-probs of sampled tokens without logits in memory, and weighted cross entropy on the
same passes.

    from kernels import turn_logprob, weighted_cross_entropy, think_weights
"""

from kernels.turn_logprob import turn_logprob
from kernels.weighted_ce import think_weights, weighted_cross_entropy

__all__ = ["think_weights", "turn_logprob", "weighted_cross_entropy"]
