"""ATPO's loss alone in TRL 1.16, for tools or a rollout_func of your own. Turns are read off TRL's tool_mask.

    python -m docs.copy atpo_loss mine     # then `from atpo_loss import atpo_loss` in your own code
"""

import torch
from trl import GRPOTrainer

from at2po import atpo_loss


def turns_of(sampled):
    """Numbers of the turns, (B, T), -1 where nothing was sampled: a turn begins behind what was observed.

    >>> turns_of(torch.tensor([[True, True, False, True, False]])).tolist()
    [[0, 0, -1, 1, -1]]
    """
    before = torch.nn.functional.pad(sampled[:, :-1], (1, 0))
    begins = sampled & ~before
    return torch.where(sampled, begins.long().cumsum(1) - 1, -1)


class ATPOLossTrainer(GRPOTrainer):
    """Rollouts, rewards and advantages are TRL's: those of GRPO's groups, the same in every turn. The loss is
    ATPO's alone: loss_type, delta and sampling corrections are not used, and there is no KL term."""

    def _compute_loss(self, model, inputs):
        if self.beta:
            raise ValueError("ATPO has no KL term: set beta=0")
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        T = inputs["completion_ids"].shape[1]
        logprobs, *_ = self._get_per_token_logps_and_entropies(model, ids, attention, T)    # (B, T)
        old_logprobs = inputs.get("old_per_token_logps")
        if old_logprobs is None:  # TRL keeps them only where a batch is learned from twice
            old_logprobs = logprobs.detach()
        sampled = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            sampled = sampled & inputs["tool_mask"].bool()
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages[:, None].expand_as(logprobs)
        loss, stats = atpo_loss(
            logprobs,
            old_logprobs,
            advantages,
            sampled,
            turns_of(sampled),
            self.epsilon_low,
            self.epsilon_high,
        )
        clipped = stats["clipped_tokens"] / max(1, stats["tokens"])
        self._metrics["train"]["clip_ratio/turns"].append(clipped)
        return loss / self.current_gradient_accumulation_steps
