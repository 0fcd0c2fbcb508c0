"""Prints the table of metric keys in docs/runs.md, from the scripts' METRICS: python -m docs.metrics"""

import askit
import at2po
import bi_rar
import mygo_mujica
import omne_r1

SCRIPTS = {
    "askit": askit,
    "at2po": at2po,
    "bi_rar": bi_rar,
    "mygo_mujica": mygo_mujica,
    "omne_r1": omne_r1,
}
PRETRAINING = {"askit": askit.PRETRAIN_METRICS, "omne_r1": omne_r1.SFT_METRICS}


def rows():
    """(key, what it is, the scripts that have it; "all")"""
    metrics = {}
    for script in SCRIPTS.values():
        metrics = script.METRICS | metrics
    for table in PRETRAINING.values():
        metrics = table | metrics
    for key, metric in sorted(metrics.items()):
        scripts = [name for name, script in SCRIPTS.items() if key in script.METRICS]
        scripts = scripts or [name for name, table in PRETRAINING.items() if key in table]
        yield key, metric.words, "all" if len(scripts) == len(SCRIPTS) else ", ".join(scripts)


def table():
    lines = ["| key | what it is | scripts |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {words} | {scripts} |" for key, words, scripts in rows()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
