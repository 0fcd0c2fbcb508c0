"""A corpus of your own documents: python -m common.corpus FOLDER OUT.jsonl

Reads Markdown, text, CSV and HTML files below FOLDER and writes passages of at most 100 words, as --corpus
takes them (docs/data.md). A passage's title is the heading that it stands under, behind the document's own.
"""

import argparse
import csv
import re
from collections import Counter
from pathlib import Path

from common import process
from common.files import Progress, RunError, UserError, say, write_jsonl

WORDS = 100  # of a passage, as in wiki-18
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
FENCE = ("```", "~~~")


def sections_of_markdown(text):
    """[(heading, text)] of a Markdown document; what stands before the first heading has the heading "".

    >>> sections_of_markdown("Hello.\\n# Leave\\nAsk Ann.\\n```\\n# no heading\\n```\\n## Sick leave\\nCall.")
    [('', 'Hello.'), ('Leave', 'Ask Ann.\\n```\\n# no heading\\n```'), ('Sick leave', 'Call.')]
    """
    sections = [("", [])]
    in_code = False
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # front matter
    for line in text.split("\n"):
        in_code ^= line.lstrip().startswith(FENCE)
        heading = HEADING.match(line)
        if heading and not in_code:
            sections.append((heading[1], []))
        else:
            sections[-1][1].append(line)
    return [(heading, "\n".join(lines).strip()) for heading, lines in sections]


def sections_of_html(text):
    """[(heading, text)] of an HTML page, without scripts and navigation."""
    try:
        from bs4 import BeautifulSoup
    except ImportError as error:
        raise RunError("reading HTML needs a package: pip install beautifulsoup4") from error
    page = BeautifulSoup(text, "html.parser")
    for part in page(["script", "style", "nav", "header", "footer", "template", "title"]):
        part.decompose()
    for heading in page(re.compile("^h[1-6]$")):
        words = " ".join(heading.get_text(" ").split())
        heading.replace_with(f"\n# {words}\n")
    for block in page(["p", "div", "li", "tr", "br", "pre", "section", "article"]):
        block.append("\n")
    for cell in page(["td", "th"]):
        cell.append(" | ")
    lines = [line.strip() for line in page.get_text().split("\n")]
    return sections_of_markdown("\n".join(lines))


def sections_of_table(text):
    """[(first cell, "column: cell. …")] of a CSV file with a header, whatever separates its cells."""
    try:
        dialect = csv.Sniffer().sniff(text[:10_000], ",;\t|")
    except csv.Error:  # a single column
        dialect = "excel"
    header, *rows = csv.reader(text.splitlines(keepends=True), dialect)
    sections = []
    for row in rows:
        cells = [f"{name}: {cell}." for name, cell in zip(header, row) if cell.strip()]
        sections.append((next(iter(row), ""), " ".join(cells)))
    return sections


def sections_of_text(text):
    """[(first line, the rest)] of a text whose first line is a title, which a blank line follows."""
    first, _, rest = text.strip().partition("\n\n")
    if "\n" in first or len(first.split()) > 12 or not rest:
        return [("", text)]
    return [(first, rest)]


READERS = {
    ".md": sections_of_markdown,
    ".markdown": sections_of_markdown,
    ".txt": sections_of_text,
    ".csv": sections_of_table,
    ".html": sections_of_html,
    ".htm": sections_of_html,
}


def passages_of(path):
    """[(title, text)] of a file."""
    text = path.read_text(encoding="utf-8-sig")
    sections = READERS[path.suffix.lower()](text)
    document = next((heading for heading, _ in sections if heading), path.stem)
    if path.suffix.lower() == ".csv":
        document = path.stem
    passages = []
    for heading, body in sections:
        title = heading or document
        if heading and heading != document:
            title = f"{document}: {heading}"
        words = body.split()
        for start in range(0, len(words), WORDS):
            passages.append((title, " ".join(words[start:start + WORDS])))
    return passages


def write_corpus(folder, out):
    """Writes the corpus. Returns (passages, Counter of what was skipped and why)."""
    folder, out = Path(folder), Path(out)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder")
    if out.exists():
        raise RunError(f"{out} exists: nothing was written; choose another name")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    rows, skipped, examples = [], Counter(), {}
    with Progress("documents") as progress:
        for number, path in enumerate(files, 1):
            progress(number, len(files))
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            if hidden or path.suffix.lower() not in READERS:
                skipped["hidden" if hidden else path.suffix or "without a suffix"] += 1
                continue
            try:
                found = passages_of(path)
            except (UnicodeDecodeError, csv.Error) as error:
                why = "not a table"
                if isinstance(error, UnicodeDecodeError):
                    why = "not in UTF-8: save them so"
                example = examples.setdefault(why, path.name)
                skipped[f"{why} ({example})"] += 1
                continue
            if not found:
                skipped["empty"] += 1
            for title, text in found:
                rows.append({"id": str(len(rows)), "title": title, "text": text})
    if not rows:
        raise RunError(f"{folder}: no passage in its {len(files)} files; {', '.join(READERS)} are read")
    write_jsonl(out, rows)
    return len(rows), skipped


def main(argv=None):
    """Writes a corpus of the documents below a folder."""
    parser = argparse.ArgumentParser(prog="python -m common.corpus", description=main.__doc__)
    parser.add_argument("folder")
    parser.add_argument("out", help="a .jsonl file that does not exist yet")
    given = parser.parse_args(argv)
    with process.ends_cleanly((UserError, OSError), lambda: "nothing was written"):
        passages, skipped = write_corpus(given.folder, given.out)
        say(f"{given.out}: {passages:,} passages")
        if skipped:
            counted = "; ".join(f"{number} {what}" for what, number in skipped.most_common())
            say(f"skipped: {counted}")


if __name__ == "__main__":
    main()
