"""Lifts a piece of ours into a folder, where it runs without us: python -m docs.copy PIECE FOLDER

Writes the piece's files, an example and our licence, and runs the example there. Several pieces may go into
one folder. docs/copy.md says what each is for.
"""

import argparse
import ast
import builtins
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs/copies"
DATACLASS = "from dataclasses import dataclass, field"
TREE = """SIBLING_PENALTY THINK AROUND LIMIT_MESSAGE render_passages render_result
inside Node play_turn play choose_nodes grow_tree"""
PATHS = """policy_of SearchPath finish_paths likeliest draw sample_paths
greedy_paths beam_search grow_beams rewarded returns_of state_key baselines advantages_of ppo_loss
actions_taken"""

# piece: its files, each (name, its import lines, {our file: names, or "*" for all of it})
PIECES = {
    "atpo_loss": [
        ("training.py", "import torch", {"common/training.py": "turn_sums per_token loss_stats"}),
        ("atpo.py", "import torch\nimport training", {"at2po.py": "turn_loss atpo_loss update_spread"}),
    ],
    "credit": [
        ("credit.py", f"import math\n{DATACLASS}",
         {"at2po.py": "Node leaf_values child_weights node_value turn_credit"}),
    ],
    "tree": [
        ("chat.py", "import functools\nimport re",
         {"common/chat.py": "Foreign added_tokens no_tags harmless _blank_before _ids encode"}),
        ("tree.py", f"import asyncio\nimport hashlib\nimport random\nimport re\nimport chat\n{DATACLASS}",
         {"common/rollout.py": "Turn context_ids sampled_text stable_seed", "common/agent.py": "Player",
          "at2po.py": TREE}),
    ],
    "logprobs": [
        ("logprobs.py",
         "import torch\nimport torch.nn.functional as F\nfrom torch.nn.utils.rnn import pad_sequence",
         {"common/model.py": "plain_token_logprobs"}),
    ],
    "bi_rar_reward": [
        ("bi_rar_reward.py", "import math\nfrom typing import NamedTuple\n\nimport torch",
         {"bi_rar.py": "FARTHEST information_distance ReasoningStep terms_of complexity distances "
                       "step_reward cascade"}),
    ],
    "grpo_loss": [
        ("grpo_loss.py", "import torch",
         {"common/training.py": "grpo_loss sequence_weights per_token loss_stats"}),
    ],
    "mygo": [
        ("turns.py", f"import hashlib\n{DATACLASS}",
         {"common/rollout.py": "Turn Outcome Trajectory question_seeds stable_seed"}),
        ("mygo.py", "", {
            "docs/copies/mygo_own.py": "*",
            "mygo_mujica.py": "next_threshold until_enough sample select mini_batches mle_loss",
        }),
    ],
    "askit": [
        ("own.py", "", {"docs/copies/askit_own.py": "*"}),
        ("training.py", "import torch", {"common/training.py": "loss_stats"}),
        ("askit.py",
         "import hashlib\nimport math\nimport random\nfrom collections import Counter\n"
         "from dataclasses import dataclass, replace\n\nimport torch\nimport training\n"
         "from own import log_policy, offers, path_reward, state_batches",
         {"common/of_askit/evidence.py": "SUBMIT", "common/rollout.py": "stable_seed", "askit.py": PATHS}),
    ],
    "gae": [("gae.py", "import torch", {"omne_r1.py": "gae"})],
    "weighted_loss": [
        ("weighted_loss.py", "import torch", {"omne_r1.py": "think_weights starts_of weighted_loss"}),
    ],
    "tool_calls": [
        ("tool_calls.py", "import ast\nimport json\nimport re\nimport warnings\n\n"
         'ARGUMENTS = {"search": ("query",), "open": ("title", "line")}',
         {"common/of_omne/tool_calls.py":
          "MAX_CALL Fault parse_tool_call python_call json_call once_each known_tool"}),
    ],
    "turn_logprob": [("turn_logprob.py", "", {"kernels/turn_logprob.py": "*"})],
    "weighted_ce": [
        ("turn_logprob.py", "", {"kernels/turn_logprob.py": "*"}),
        ("weighted_ce.py", "", {"kernels/weighted_ce.py": "*"}),
    ],
    "tree_attention": [("tree_attention.py", "", {"common/gpu/tree_attention.py": "*"})],
}


def definitions(source):
    """{name: text} of a module's functions, classes and constants; one line may set several names."""
    lines = source.split("\n")
    found = {}
    for node in ast.parse(source).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        text = "\n".join(lines[first - 1:node.end_lineno])
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [target.id for target in ast.walk(node.targets[0]) if isinstance(target, ast.Name)]
        found |= dict.fromkeys(names, text)
    return found


def texts_of(piece):
    """{name: text} of the files that a piece is lifted into."""
    texts = {
        f"example_{piece}.py": (EXAMPLES / f"{piece}.py").read_text(encoding="utf-8"),
        "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
    }
    for name, imports, sources in PIECES[piece]:
        parts = [f"# From fivehop (see LICENSE): {', '.join(sources)}"]
        if imports:
            parts.append(imports)
        for file, names in sources.items():
            source = (ROOT / file).read_text(encoding="utf-8")
            if names == "*":
                parts.append(source.replace("from kernels.", "from ").strip())
                continue
            found = definitions(source)
            parts += dict.fromkeys(found[one] for one in names.split())
        text = "\n\n\n".join(parts) + "\n"
        missing = names_without_meaning(text)
        assert not missing, f"{name}: nothing says what {missing} is"
        texts[name] = text
    return texts


def names_without_meaning(source):
    """Names that a module reads and never sets."""
    stored, loaded = {*dir(builtins), "__file__", "__name__"}, set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.ExceptHandler):
            stored.add(node.name)
        elif isinstance(node, ast.alias):
            stored.add((node.asname or node.name).split(".")[0])
    return loaded - stored


def main(argv=None):
    """Lifts a piece into a folder and runs its example there."""
    parser = argparse.ArgumentParser(prog="python -m docs.copy", description=main.__doc__)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("folder", type=Path, help="of your own, or one that does not exist yet")
    given = parser.parse_args(argv)
    texts = texts_of(given.piece)
    for name, text in texts.items():
        file = given.folder / name
        if file.exists() and file.read_text(encoding="utf-8") != text:
            sys.exit(f"error: {file} is there, and is another file: nothing was written")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (given.folder / name).write_text(text, encoding="utf-8")
    print(*texts, flush=True)
    ended = subprocess.run([sys.executable, f"example_{given.piece}.py"], cwd=given.folder)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
