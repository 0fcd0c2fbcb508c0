"""A policy and its critic: the values of a batch's sampled tokens beside their log-probs.

    actor = load_actor_critic(policy.model, folder.start)
    logprobs, values = actor(batch, temperature, kernels)       both (B, T)

A reward that is always the same does not leave the policy where it is, unless V is exact or learns nothing
(--value-coef 0): advantages are then the critic's errors, which whitening makes as large as any signal, and
the value loss moves the weights that policy and critic share.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common import distributed
from common import model as models

HEAD = "value_head.safetensors"


class ActorCritic(torch.nn.Module):
    """A policy and V, a linear head on its hidden states. Saved as the policy's folder with
    value_head.safetensors."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)  # V = 0 to begin with
        torch.nn.init.zeros_(self.head.bias)

    @property
    def device(self):
        return self.policy.device

    def forward(self, batch, temperature, kernels, detached=False):
        """(log-probs, values), both (B, T). detached: the value loss stays out of the shared encoder."""
        hidden = models.hidden_states(self.policy, batch)
        logprobs = models.token_logprobs(self.policy, batch, temperature, kernels, hidden)
        if detached:
            hidden = hidden.detach()
        return logprobs, models.token_values(self.head, batch, hidden)

    def save_pretrained(self, folder, state_dict=None):
        weights = state_dict or self.state_dict()

        def of(part):
            return {name.removeprefix(part): w for name, w in weights.items() if name.startswith(part)}
        self.policy.save_pretrained(folder, state_dict=of("policy."))
        head = {name: value.cpu() for name, value in of("head.").items()}
        save_file(head, f"{folder}/{HEAD}")


def load_actor_critic(policy_model, resumed):
    """ActorCritic around a loaded policy; a resumed one gets its head back."""
    actor = ActorCritic(policy_model)
    if resumed:
        actor.head.load_state_dict(load_file(str(Path(resumed) / HEAD)))
    distributed.cut(actor.head)
    return actor
