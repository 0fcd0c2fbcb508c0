"""The tables of AT2PO's paper as rows for common/ladder.py: flags of each method, and its printed score."""

from common import ladder
from common.ladder import Row

RANDOM_TREE = ("--rollout", "tree", "--expansion", "random")
TREE_GRPO = ("--loss", "grpo", "--kl-coef", "0", *RANDOM_TREE, "--std", "sample", "--credit")
TABLE_1 = {
    "random tree, GRPO": Row((*TREE_GRPO, "outcome"), "45.42"),
    "random tree, ATPO": Row((*RANDOM_TREE, "--credit", "outcome"), "47.75"),
    "+ entropy expansion": Row(("--credit", "outcome"), "48.33"),
    "AT2PO": Row((), "48.81"),  # + turn credit
}
PRINTED = {  # Table 2 has eight of the twelve schemes
    ("value", "child-mean"): "48.43", ("value", "leaf-mean"): "48.52",
    ("td", "child-weighted"): "45.80", ("td", "leaf-mean"): "45.61",
    ("global", "child-weighted"): "48.19", ("global", "leaf-mean"): "46.98",
    ("combined", "leaf-mean"): "44.18",
}
SCHEMES = {
    f"{advantage}, {value}": Row(("--advantage", advantage, "--value", value),
                                 PRINTED.get((advantage, value), ""), "AT2PO")
    for advantage in ("value", "td", "global", "combined")
    for value in ("child-weighted", "child-mean", "leaf-mean")
    if (advantage, value) != ("value", "child-weighted")  # AT2PO's
}
TABLE_2 = {"AT2PO": Row((), "48.81")} | SCHEMES
MAIN_TABLE = {
    "AT2PO": Row((), "48.81"),
    "GRPO": Row(("--loss", "grpo"), "46.02", "AT2PO"),
    "GRPO without KL": Row(("--loss", "grpo", "--kl-coef", "0"), "", "AT2PO"),
    "DAPO": Row(("--loss", "dapo"), "46.65", "AT2PO"),
    "GSPO": Row(("--loss", "gspo"), "45.69", "AT2PO"),
    "AEPO": Row(("--loss", "aepo"), "46.95", "AT2PO"),
    "Tree-GRPO": Row((*TREE_GRPO, "tree-grpo"), "", "AT2PO"),
}
TABLES = {"ladder": TABLE_1, "schemes": TABLE_2, "baselines": MAIN_TABLE}  # by their flags


def run(cfg, argv, parse):
    """The table that cfg asks for; argv and parse as ladder.run takes them."""
    name = next(name for name in TABLES if getattr(cfg, name))
    return ladder.run(cfg, "at2po", name, TABLES[name], argv, parse, before=("ReAct", Row((), "30.01")))
