"""Omne-R1's tables: what the paper printed, beside what the stages of a run reached."""

from pathlib import Path

from common import report
from common.curves import draw_curves
from common.files import read_jsonl

LADDER = ["base", "stage1", "sft-think", "sft-no-think", "rl-think", "rl-no-think"]
PAPER = {  # 1/2 hop, 3+ hop of Qwen3-14B (stage 1: Qwen2.5-14B-Instruct); "" = not printed
    # Tables 6 and 8
    "base": (".349", ".156"),
    "stage1": (".575", ".321"),
    "sft-think": (".892", ".605"),
    "sft-no-think": (".941", ".684"),
    "rl-think": (".927", ".635"),
    "rl-no-think": (".940", ".693"),
    # Table 2, judged by DeepSeek-R1
    "direct": (".260", ".263"),
    "direct-no-think": (".238", ".262"),
    # Table 3
    "stage1-12": (".712", ""),
    "stage1-3": ("", ".289"),
    "stage1-mix": (".575", ".321"),
    # Table 4
    "sft-lora-no-think": (".924", ".600"),
    "sft-lora-think": (".838", ".472"),
    "sft-full-no-think": (".941", ".684"),
    "sft-full-think": (".892", ".571"),
    # Table 5
    "sft-w1": (".879", ".528"),
    "sft-w0.8": (".880", ".538"),
    "sft-w0.2": (".884", ".542"),
    "sft-w0.1": (".879", ".534"),
    "sft-w0.05": (".886", ".544"),
    "sft-w0.01": (".886", ".556"),
    "sft-w0.001": (".892", ".605"),
    "sft-w0": (".830", ".438"),
}
COLUMNS = {
    "normalised": ("normalised", ".3f"),
    "calls": ("searches", ".2f"),
    "repeated": ("repetitions", ".2f"),
    "standard pattern": ("standard", "interval"),
    "EM within it": ("em_standard", "interval"),
    "format": ("format", ".2f"),
    "tokens": ("tokens", ".1f"),
}



def show_table(cfg, own, path_of):
    """<name>-table.json: every stage on both sets beside the paper's, differences to the base.

    own: labels of the stages that were run. path_of(label): the folder of one, or where the table goes."""
    labels = ["base", *own] if cfg.sweep else [*LADDER, *own]
    folders = {label: path_of(label) for label in labels}
    path = path_of(cfg.sweep) if cfg.sweep else Path(cfg.out) / "omne_r1" / cfg.name

    def paper(label, sets):
        place = {"1-2-hop": 0, "3-hop": 1}.get(sets[0]) if len(sets) == 1 else None
        return PAPER[label][place] if label in PAPER and place is not None else ""

    title = f"Omne-R1 {cfg.name} (paper: accuracy, Qwen3-14B; stage 1: Qwen2.5-14B-Instruct)"
    first = "base" if folders["base"].exists() else own[0]
    report.stage_table(path, title, folders, first, paper, COLUMNS, means=False)
    if cfg.sweep in ("weights", "modes"):  # Figures 2 and 3
        losses = {label: read_jsonl(folders[label] / "metrics.jsonl") for label in own}
        panels = {"weighted loss": {"train/loss": "loss"}}
        draw_curves(losses, f"{path}-losses.png", f"Omne-R1 {cfg.name}: stage 2, {cfg.sweep}", panels)
