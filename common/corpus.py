"""A corpus of your own documents: python -m common.corpus FOLDER OUT.jsonl

Reads Markdown, text, CSV and HTML files below FOLDER and writes passages of at most 100 words and 900
characters, as --corpus takes them (docs/data.md), each with the file that it comes from. A passage's title is
the heading that it stands under, behind the document's own.
"""

import argparse
import csv
import re
import shlex
from itertools import zip_longest
from pathlib import Path

from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from common import process
from common.files import Progress, RunError, UserError, say, write_jsonl

WORDS = 100  # of a passage, as in wiki-18
LETTERS = 900  # of a passage: at2po.py shows 1,000
HEADING = "\x02"  # before a heading's level and words, in the text of an HTML page
# "key: value" lines between two rules, at the very beginning
FRONT_MATTER = re.compile(r"\A---\n([\w-]+:.*\n(?:[\w-]+:.*\n|[ \t#-].*\n)*)---\n")
TITLE = re.compile(r"^title:\s*[\"']?(.*?)[\"']?\s*$", re.MULTILINE)


def sections_of_markdown(text):
    """[(heading, blocks)] of a Markdown document: paragraphs, items, rows. What stands before the first
    heading has the heading ""; a heading with nothing below it is a block of its own.

    >>> sections_of_markdown("Hello.\\n# Leave\\n| Day | Who |\\n|---|---|\\n| Mon | Bo |\\n## No smoking")
    [('', ['Hello.']), ('Leave', ['Day: Mon. Who: Bo.']), ('No smoking', ['No smoking'])]
    """
    front = FRONT_MATTER.match(text)
    if front:
        title = TITLE.search(front[1])
        text = text[front.end():]
        text = f"# {title[1]}\n\n{text}" if title else text
    sections = [(0, "", [])]
    header, row, inside, number = [], [], "", ""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.nesting == 1:
            inside = token.tag
        if token.type == "list_item_open" and token.info:  # "3." is what others refer to
            number = f"{token.info}{token.markup} "
        content = " ".join(token.content.split())
        if token.type == "thead_open":
            header = []
        elif token.type == "tr_close" and row:
            sections[-1][2].append(cells_of(header, row))
            row = []
        elif token.type not in ("inline", "fence", "code_block", "html_block"):
            continue
        elif re.fullmatch("h[1-6]", inside) and token.type == "inline":
            sections.append((int(inside[1]), content, []))
        elif inside in ("th", "td"):
            (header if inside == "th" else row).append(content)
        else:
            sections[-1][2].append(number + content)
            number = ""
    return with_bare_headings(sections)


def with_bare_headings(sections):
    """[(heading, blocks)] of [(level, heading, blocks)]: a heading with nothing below it is a block."""
    following = [level for level, _, _ in sections[1:]] + [0]
    for (level, heading, blocks), below in zip(sections, following, strict=True):
        if heading and not blocks and level >= below:
            blocks.append(heading)
    return [(heading, blocks) for _, heading, blocks in sections]


def cells_of(header, row):
    """
    >>> cells_of(["Depot", "Head"], ["Gorsley", "", "ext 22"])
    'Depot: Gorsley. ext 22.'
    """
    named = zip_longest(header, row, fillvalue="")
    return " ".join(f"{name}: {cell}." if name else f"{cell}." for name, cell in named if cell.strip())


def sections_of_html(text):
    """[(heading, blocks)] of an HTML page, without scripts and navigation."""
    page = BeautifulSoup(text.replace(HEADING, ""), "html.parser")
    title = page.title
    for part in page(["script", "style", "nav", "template", "title"]):
        part.extract()
    for table in page("table"):
        header = []
        for row in table("tr"):
            cells = [" ".join(cell.get_text(" ").split()) for cell in row(["th", "td"])]
            if row.find("td"):
                row.string = cells_of(header, cells)
            else:
                header = cells
                row.extract()
    for items in page("ol"):
        for number, item in enumerate(items.find_all("li", recursive=False), int(items.get("start", 1))):
            item.insert(0, f"{number}. ")
    headings = page(re.compile("^h[1-6]$"))
    for heading in headings:
        words = " ".join(heading.get_text(" ").split())
        heading.replace_with(f"\n{HEADING}{heading.name[1]}{words}\n")
    for block in page(["p", "div", "li", "tr", "br", "pre", "section", "article", "header", "footer"]):
        block.insert(0, "\n\n")
        block.append("\n\n")
    sections = [(0, "", [])]
    if title and not headings:
        sections.append((1, " ".join(title.get_text().split()), []))
    for block in re.split(rf"\n\s*\n|\n(?={HEADING})|(?<=\n)(?={HEADING})", page.get_text()):
        first, _, rest = block.strip().partition("\n")
        if first.startswith(HEADING):
            sections.append((int(first[1]), first[2:], []))
            first = ""
        words = " ".join(f"{first} {rest}".split())
        if words:
            sections[-1][2].append(words)
    return with_bare_headings(sections)


def sections_of_table(text):
    """[(first cell, ["column: cell. …"])] of a CSV file with a header, whatever separates its cells."""
    if not text.strip():
        return []
    lines = text.lstrip("\r\n").splitlines(keepends=True)
    separator = max(",;\t|", key=lines[0].count)
    header, *rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    return [(row[0], [cells_of(header, row)]) for row in rows if any(row)]


def sections_of_text(text):
    """[(first line, the other lines)] of a text whose first line is a title, which a blank line follows."""
    first, _, rest = text.strip().partition("\n\n")
    if "\n" in first or len(first.split()) > 12 or not rest:
        return [("", text.split("\n"))]
    return [(first, rest.split("\n"))]


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
    for heading, blocks in sections:
        title = heading or document
        if heading and heading != document:
            title = f"{document}: {heading}"
        passages += [(title, text) for text in cut(blocks)]
    return passages


def cut(blocks):
    """Texts of at most WORDS words and LETTERS characters; blocks stay whole unless they are longer."""
    text = ""
    for block in blocks:
        for piece in pieces_of(block.split()):
            longer = f"{text} {piece}".strip()
            if text and (len(longer.split()) > WORDS or len(longer) > LETTERS):
                yield text
                longer = piece
            text = longer
    if text:
        yield text


def pieces_of(words):
    """The words as texts that fit into a passage each."""
    while words:
        count = WORDS
        while count > 1 and len(" ".join(words[:count])) > LETTERS:
            count -= 1
        yield " ".join(words[:count])[:LETTERS]
        rest = " ".join(words[:count])[LETTERS:]  # of a "word" without an end
        words = ([rest] if rest else []) + words[count:]


def write_corpus(folder, out):
    """Writes the corpus. Returns (passages, {why: files that were skipped})."""
    folder, out = Path(folder), Path(out)
    if out.suffix != ".jsonl":
        raise RunError(f"{out}: give it a name that ends in .jsonl")
    if out.exists():
        raise RunError(f"{out} exists: nothing was written; choose another name")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    rows, skipped = [], {}
    with Progress("documents") as progress:
        for number, path in enumerate(files, 1):
            progress(number, len(files))
            name = path.relative_to(folder)
            found, why = [], "empty"
            if any(part.startswith(".") for part in name.parts):
                why = "hidden"
            elif path.suffix.lower() not in READERS:
                why = path.suffix or "without a suffix"
            else:
                try:
                    found = passages_of(path)
                except (UnicodeDecodeError, csv.Error) as error:
                    why = f"not in UTF-8, or no table ({error})"
            if not found:
                skipped.setdefault(why, []).append(str(name))
            for title, text in found:
                rows.append({"id": str(len(rows)), "title": title, "text": text, "source": str(name)})
    if not rows:
        if not folder.is_dir():
            raise RunError(f"{folder}: no such folder here")
        raise RunError(f"{folder}: no passage in its {len(files)} files; {', '.join(READERS)} are read (of a "
                       "PDF first make text: pdftotext FILE.pdf)")
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
        say(f'Next: python -m common.serve search --corpus {shlex.quote(given.out)} --query "…"')
        for why, names in skipped.items():
            say(f"skipped: {len(names)} {why} ({', '.join(names)})")


if __name__ == "__main__":
    main()
