"""Lifts a piece of ours into a folder, where it runs without us: python -m docs.copy PIECE FOLDER

Writes one file, PIECE.py, an example and our licence, and runs the example there. Several pieces may go into
one folder. docs/copy.md says what each is for.
"""

import argparse
import ast
import builtins
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs/copies"
DATACLASS = "from dataclasses import dataclass, field"
TREE = """SIBLING_PENALTY THINK LIMIT_MESSAGE render_passages render_result tags_of
inside AROUND Node play_turn play choose_nodes grow_tree"""
CHAT = """Foreign added_tokens no_tags harmless _blank_before _ids encode TemplateError today PROBE
template_parts render_reply"""
PATHS = """policy_of SearchPath finish_paths likeliest draw sample_paths
greedy_paths beam_search grow_beams rewarded returns_of state_key baselines advantages_of ppo_loss
actions_taken"""
AT2PO = "AT2PO, arXiv 2601.04767"
OMNE = "Omne-R1, arXiv 2508.17330"


class Piece(NamedTuple):
    """about: what it is, and whose. imports: its import lines. sources: {our file: names, or "*" for all}."""
    about: str
    imports: str
    sources: dict


PIECES = {
    "atpo_loss": Piece(
        f"ATPO's loss (Eq 10-12) and Eq 13 of {AT2PO}", "import torch",
        {"common/training.py": "turn_sums per_token loss_stats",
         "at2po.py": "turn_loss atpo_loss update_spread"}),
    "credit": Piece(
        f"ATPO's credit (Eq 3) of {AT2PO}", f"import math\n{DATACLASS}",
        {"at2po.py": "Node leaf_values child_weights node_value turn_credit"}),
    "tree": Piece(
        f"The tree (Algorithm 1) of {AT2PO}",
        "import asyncio\nimport datetime\nimport functools\nimport hashlib\nimport json\nimport random\n"
        f"import re\n{DATACLASS}",
        {"common/files.py": "UserError", "common/chat.py": CHAT,
         "common/tool_search.py": "CALL RESPONSE IN_RESPONSE TOOL MAX_CALL query_of result",
         "common/rollout.py": "Turn context_ids sampled_text stable_seed", "common/agent.py": "Player",
         "at2po.py": TREE}),
    "logprobs": Piece(
        "Log-probs of sampled tokens, plain",
        "import torch\nimport torch.nn.functional as F\nfrom torch.nn.utils.rnn import pad_sequence",
        {"common/model.py": "plain_token_logprobs"}),
    "bi_rar_reward": Piece(
        "The reward (Eq 2-7) of Bi-RAR, arXiv 2511.09109",
        "import math\nfrom typing import NamedTuple\n\nimport torch",
        {"bi_rar.py": "FARTHEST information_distance ReasoningStep terms_of complexity distances "
                      "step_reward cascade"}),
    "grpo_loss": Piece(
        "GRPO's loss, arXiv 2402.03300", "import torch",
        {"common/training.py": "grpo_loss sequence_weights per_token loss_stats"}),
    "mygo": Piece(
        "MyGO (sec. 3.3): threshold, attempts, selection, likelihood; Mujica-MyGO, arXiv 2505.17086",
        f"import hashlib\n{DATACLASS}",
        {"common/rollout.py": "Turn Outcome Trajectory question_seeds stable_seed",
         "docs/copies/mygo_own.py": "*",
         "mygo_mujica.py": "next_threshold until_enough sample select mini_batches mle_loss"}),
    "askit": Piece(
        "ASKiT's PPO and beam search (a CS224N project report)",
        "import hashlib\nimport math\nimport random\nfrom collections import Counter\n"
        "from dataclasses import dataclass, replace",
        {"docs/copies/askit_own.py": "*", "common/training.py": "loss_stats",
         "common/of_askit/evidence.py": "SUBMIT", "common/rollout.py": "stable_seed", "askit.py": PATHS}),
    "gae": Piece(f"GAE over sampled tokens (sec. 3.3), as in {OMNE}", "import torch", {"omne_r1.py": "gae"}),
    "weighted_loss": Piece(
        f"Algorithm 1 of {OMNE}: thoughts count less", "import torch",
        {"omne_r1.py": "think_weights starts_of weighted_loss"}),
    "tool_calls": Piece(
        "A parser of tool calls that evaluates nothing", "import ast\nimport json\nimport re\nimport warnings"
        '\n\nARGUMENTS = {"search": ("query",), "open": ("title", "line")}',
        {"common/of_omne/tool_calls.py":
         "MAX_CALL Fault parse_tool_call python_call json_call once_each known_tool"}),
    "turn_logprob": Piece(
        "Fused log-probs of sampled tokens, and their sums over turns", "", {"kernels/turn_logprob.py": "*"}),
    "weighted_ce": Piece(
        f"Fused weighted cross entropy (Algorithm 1 of {OMNE})", "",
        {"kernels/turn_logprob.py": "*", "kernels/weighted_ce.py": "*"}),
    "tree_attention": Piece("Attention over trees of any depth", "", {"common/gpu/tree_attention.py": "*"}),
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
    return {
        f"example_{piece}.py": (EXAMPLES / f"{piece}.py").read_text(encoding="utf-8"),
        "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
        f"{piece}.py": text_of(*PIECES[piece]),
    }


def text_of(about, imports, sources):
    """The file of a piece: all that it needs of ours, under the names that it has here."""
    ours = [file for file in sources if not file.startswith("docs/")]
    head, parts = [f"{about}.", f"From fivehop: {', '.join(ours)}. MIT licence, see LICENSE."], [imports]
    for file, names in sources.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        found = definitions(source)
        if names == "*":
            first = ast.parse(source).body[0]
            if file in ours:
                head.append(ast.get_docstring(ast.parse(source)))
                source = "\n".join(source.split("\n")[first.end_lineno:])
            of_ours = r"(?m)^from (kernels\.\w+|turns) import .*\n"  # which is in this file
            parts.append(re.sub(of_ours, "", source.strip()))
        else:
            parts += dict.fromkeys(found[one] for one in names.split())
    quoted = "\n\n".join(head).replace("\\", "\\\\")
    text = "\n\n\n".join(filter(None, [f'"""{quoted}\n"""', *parts])) + "\n"
    here = r"\b(training|chat|rollout|tool_search)\.(?=[a-z_A-Z]+)(?!py)"  # which is in this file now
    text = re.sub(here, "", text)
    text = without_unknown_annotations(text)
    stored, loaded = names_of(text)
    assert loaded <= stored, f"{about}: nothing says what {loaded - stored} is"
    return text


def without_unknown_annotations(text):
    """Types in quotes that are not in this file become `object`, so that tools can resolve the others."""
    known = names_of(text)[0]
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        quoted = getattr(node, "annotation", None)
        if isinstance(quoted, ast.Constant):
            read = {n.id for n in ast.walk(ast.parse(quoted.value)) if isinstance(n, ast.Name)}
            if not read <= known:
                row = quoted.lineno - 1
                lines[row] = lines[row][:quoted.col_offset] + "object" + lines[row][quoted.end_col_offset:]
    return "\n".join(lines)


def names_of(source):
    """(names that a module sets, names that it reads)"""
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
    return stored, loaded


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
            sys.exit(f"error: {file} is there, and is another file: nothing was written. Name another "
                     "folder, or move that file away")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (given.folder / name).write_text(text, encoding="utf-8")
    print(*texts, flush=True)
    ended = subprocess.run([sys.executable, f"example_{given.piece}.py"], cwd=given.folder)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
