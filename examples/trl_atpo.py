"""AT2PO in TRL 1.16 (pip install trl): a subclass of GRPOTrainer that grows trees and takes ATPO's loss.

    python -m examples.trl_atpo            # the embedded world, two steps on a CPU

TRL keeps the optimizer, accelerate, logging and checkpoints. What is AT2PO's:

    rollout_func    a tree a prompt; its leaves are the prompt's `num_generations` completions
    reward          a reward function as TRL has them, on the leaf that a completion is
    advantages      (B, T), one number per turn, once the whole tree is scored (Eq 3)
    _compute_loss   one ratio and one clip decision a turn (Eq 10-11)

A generation batch has to hold whole groups in each process.
"""

from dataclasses import replace

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import at2po
from common import data, rollout
from common.engine import TransformersEngine
from common.model import load_policy
from common.world import hard, splits


class ATPOTrainer(GRPOTrainer):
    def __init__(self, model, cfg, tokenizer, retriever, **how):
        """cfg: at2po.Config; its tree has as many leaves as there are num_generations."""
        super().__init__(
            model,
            rollout_func=grow,
            reward_funcs=exact_match,
            processing_class=tokenizer,
            **how,
        )
        self.cfg = cfg
        self.retriever = retriever
        engine = TransformersEngine(model, tokenizer)
        self.sampler = rollout.Policy(model, tokenizer, engine)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)    # which leaves a leaf in each input
        leaves = [row["leaf"] for row in inputs]
        for root in dict.fromkeys(map(root_of, leaves)):
            at2po.assign_advantages(root, self.cfg)
        turn_ids = torch.full_like(output["completion_ids"], -1)                            # (B, T)
        advantages = torch.zeros(turn_ids.shape, device=turn_ids.device)
        for row, leaf in enumerate(leaves):
            start = 0
            for k, turn in enumerate(leaf.turns()):
                span = slice(start, start + len(turn.ids))
                turn_ids[row, span] = k
                if leaf.trajectory.advantages:  # a flat tree has none
                    advantages[row, span] = leaf.trajectory.advantages[k]
                start = span.stop + len(turn.observation_ids)
        return output | {"advantages": advantages, "turn_ids": turn_ids}

    def _compute_loss(self, model, inputs):
        if self.beta:
            raise ValueError("ATPO has no KL term: set beta=0")
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        T = inputs["completion_ids"].shape[1]
        logprobs, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention, T)  # (B, T)
        old_logprobs = inputs.get("old_per_token_logps", logprobs.detach())
        sampled = inputs["completion_mask"] * inputs["tool_mask"]
        loss, stats = at2po.atpo_loss(
            logprobs,
            old_logprobs,
            inputs["advantages"],
            sampled.bool(),
            inputs["turn_ids"],
            self.epsilon_low,
            self.epsilon_high,
        )
        clipped = stats["clipped_tokens"] / max(1, stats["tokens"])
        self._metrics["train"]["clip_ratio/turns"].append(clipped)
        return loss / self.current_gradient_accumulation_steps


def root_of(leaf):
    return leaf.lineage()[0].parent


def grow(prompts, trainer):
    """TRL's rollout_func. It gets each prompt num_generations times; the tree's leaves take their places."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainer.sampler.engine.sync(model)
    asked = prompts[::trainer.num_generations]
    questions = [data.Question(text, text, []) for text in asked]
    step = trainer.state.global_step
    roots = at2po.rollout_trees(trainer.sampler, trainer.retriever, questions, trainer.cfg, step)
    rows = [row_of(leaf) for root in roots for leaf in root.leaves()]
    return {name: [row[name] for row in rows] for name in rows[0]}


def row_of(leaf):
    """A completion as TRL knows it, with the leaf that it is."""
    ids, logprobs, mask = [], [], []
    for turn in leaf.turns():
        observed = turn.observation_ids
        ids += turn.ids + observed
        logprobs += turn.logprobs + [0.0] * len(observed)
        mask += [1] * len(turn.ids) + [0] * len(observed)
    return {
        "prompt_ids": leaf.trajectory.prompt_ids,
        "completion_ids": ids,
        "logprobs": logprobs,
        "env_mask": mask,
        "leaf": leaf,
    }


def exact_match(completions, answer, leaf, **other_columns):
    """Eq 14-16. Reads what the policy sampled, so that an observation cannot answer."""
    for node, golds in zip(leaf, answer, strict=True):
        asked = data.Question("", "", golds)
        at2po.score(node.trajectory, asked, at2po.Config())
    return [node.trajectory.reward for node in leaf]


def make_trainer(out, steps=2, questions=40, **tree):
    """The trainer of the embedded world's second level. tree: fields of at2po.Config."""
    cfg = replace(at2po.parse_args([]), **tree)
    split = splits.world_split("train", questions=questions, level=hard.parse(cfg.world))
    model, tokenizer = load_policy(at2po.tiny_policy(cfg))
    leaves = cfg.chains + cfg.rounds * cfg.expand
    args = GRPOConfig(
        out,
        max_steps=steps,
        num_generations=leaves,
        per_device_train_batch_size=2 * leaves,
        num_iterations=2,       # old log-probs are then kept
        learning_rate=cfg.lr,
        temperature=cfg.temperature,
        epsilon=cfg.clip_low,
        epsilon_high=cfg.clip_high,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    rows = Dataset.from_list([{"prompt": q.question, "answer": q.answers} for q in split.questions])
    return ATPOTrainer(model, cfg, tokenizer, split.retriever, args=args, train_dataset=rows)


if __name__ == "__main__":
    make_trainer("runs/trl").train()
