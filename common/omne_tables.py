"""Omne-R1's tables: what the paper printed, beside what the stages of a run reached."""

from pathlib import Path

from common import flags, graph_stages, report
from common.curves import draw_curves
from common.files import read_jsonl, say, table, write_json
from common.ladder import minus, over_seeds
from common.metrics import paired_difference
from common.results import evaluations, signed

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


def printed(label, name):
    """The paper's accuracy of a row on one of the two sets; "" where there is none."""
    place = {"1-2-hop": 0, "3-hop": 1}.get(name)
    return PAPER[label][place] if label in PAPER and place is not None else ""


def sweep(cfg):
    """Which table is asked for: "weights", "modes", "hops", or "", the ladder's."""
    if cfg.weights:
        return "weights"
    return "modes" if cfg.modes else "hops" if cfg.train_hops == "each" else ""


def check(cfg):
    """Refuses two tables at once, and a table of one stage."""
    asked = [name for name in ("ladder", "modes", "weights") if getattr(cfg, name)]
    if cfg.train_hops == "each":
        asked.append("train_hops")
    if not asked:
        return
    first, *others = asked
    for name in others:
        flags.refuse(name, getattr(cfg, name), f"not with --{first}: one table at a time")
    if cfg.eval_only or cfg.stage != "all":
        one = "--eval-only" if cfg.eval_only else f"--stage {cfg.stage}"
        value = getattr(cfg, first)
        flags.refuse(first, value, f"not with {one}: a table has stages of its own")


def labels_of(cfg, own):
    """The rows of a table: those of a sweep, or the ladder's."""
    return ["base", *own] if sweep(cfg) else list(dict.fromkeys([*LADDER, *own]))


def show_table(cfg, own, path_of):
    """<name>-table.json: every stage on both sets beside the paper's, differences to the base.

    own: labels of the stages that were run. path_of(label): the folder of one, or where the table goes."""
    folders = {label: path_of(label) for label in labels_of(cfg, own)}
    name = sweep(cfg)
    path = path_of(name) if name else Path(cfg.out) / "omne_r1" / cfg.name

    def paper(label, sets):
        return printed(label, sets[0]) if len(sets) == 1 else ""

    title = f"Omne-R1 {cfg.name} (paper: accuracy, Qwen3-14B; stage 1: Qwen2.5-14B-Instruct)"
    first = "base" if folders["base"].exists() else own[0]
    report.stage_table(path, title, folders, first, paper, COLUMNS, means=False)
    if name in ("weights", "modes"):  # Figures 2 and 3
        losses = {label: read_jsonl(folders[label] / "metrics.jsonl") for label in own}
        panels = {"weighted loss": {"train/loss": "loss"}}
        draw_curves(losses, f"{path}-losses.png", f"Omne-R1 {cfg.name}: stage 2, {name}", panels)


def show_seeds(configs, own):
    """<runs>/<first seed>-to-<last>[-<sweep>]-table.json: accuracy of every stage over the seeds, beside the
    paper's; its difference to the base, paired by question (each with its mean over the seeds) and by
    seed. Stages that not every seed has are left out."""
    first, *_, last = configs
    runs = {}
    for label in labels_of(first, own):
        found = [evaluations(graph_stages.path_of(cfg, label)) for cfg in configs]
        if all(found):
            runs[label] = found
    header = ["stage", "set", "paper", "EM by seed", "EM over seeds", "minus base: by question", "by seed"]
    rows = []
    for label, found in runs.items():
        for name in found[0]:
            ems = [sets[name]["summary"]["em"] for sets in found]
            each = " ".join(f"{em:.3f}" for em in ems)
            row = [label, name, printed(label, name), each, over_seeds(ems), "", ""]
            if label != "base" and "base" in runs:
                own_sets = [sets[name] for sets in found]
                base = [sets[name] for sets in runs["base"]]
                gain = paired_difference(over_questions(base), over_questions(own_sets))
                base_ems = [result["summary"]["em"] for result in base]
                row[5:] = signed(gain), minus(ems, base_ems)
            rows.append(row)
    named = first.name, "to", last.name, sweep(first)
    path = Path(first.out) / "omne_r1" / "-".join(filter(None, named))
    table("Omne-R1 over seeds: 95 % intervals (paper: accuracy, Qwen3-14B)", header, rows)
    write_json(f"{path}-table.json", {"header": header, "rows": rows})
    say(f"table: {path}-table.json")
    if sweep(first) in ("weights", "modes"):  # Figures 2 and 3
        losses = {label: mean_losses(configs, label) for label in own}
        title = f"Omne-R1: stage 2, {sweep(first)}, mean of {len(configs)} seeds"
        draw_curves(losses, f"{path}-losses.png", title, {"weighted loss": {"train/loss": "loss"}})


def mean_losses(configs, label):
    """Metrics rows of a stage: its loss by step, mean over the seeds."""
    seeds = [read_jsonl(graph_stages.path_of(cfg, label) / "metrics.jsonl") for cfg in configs]
    rows = []
    for at_step in zip(*seeds, strict=False):  # seeds differ in how many rows were left out
        losses = [row["train/loss"] for row in at_step if row.get("train/loss") is not None]
        if losses:
            rows.append({"step": at_step[0]["step"], "train/loss": sum(losses) / len(losses)})
    return rows


def over_questions(results):
    """A question's mean EM over several evaluations of the same set."""
    by_seed = [report.scores(result) for result in results]
    return [sum(ems) / len(ems) for ems in zip(*by_seed, strict=True)]
