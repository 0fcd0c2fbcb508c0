"""Prints what the keys of metrics.jsonl are, of all scripts: python -m docs.metrics"""

import askit
import at2po
import bi_rar
import mygo_mujica
import omne_r1

SCRIPTS = {
    "at2po": at2po,
    "bi_rar": bi_rar,
    "mygo_mujica": mygo_mujica,
    "omne_r1": omne_r1,
    "askit": askit,
}
PRETRAINING = {"askit": askit.PRETRAIN_METRICS, "omne_r1": omne_r1.SFT_METRICS}


def rows():
    """(key, what it is, the scripts that have it; "all")"""
    tables = {name: PRETRAINING.get(name, {}) | script.METRICS for name, script in SCRIPTS.items()}
    everything = {key for table in tables.values() for key in table}
    for key in sorted(everything):
        found = {name: table[key].words for name, table in tables.items() if key in table}
        words, *others = dict.fromkeys(found.values())
        for other in others:
            names = [name for name in found if found[name] == other]
            words += f"; {', '.join(names)}: {other}"
        yield key, words, "all" if len(found) == len(SCRIPTS) else ", ".join(sorted(found))


def table():
    lines = ["| key | what it is | scripts |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {words} | {scripts} |" for key, words, scripts in rows()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
