"""The moving picture of README: a whole tree of a run; it grows, its turns get values, some are clipped;
then a test question before and after training. Screenshots of the run's page in Chromium, no drawing of
ours; and the page itself, to be opened in docs/ or from a static host:

    python -m docs.picture runs/at2po/atpo-hard-seed0       results/at2po/page.webp, docs/page.html, tree.png
"""

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from common.page.writer import write_page

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 1000, 540
CAPTION = """text => {
  const old = document.getElementById("caption");
  if (old) old.remove();
  const line = document.createElement("p");
  line.id = "caption";
  line.style = "font: 600 15px system-ui; margin: 0 0 8px; color: var(--accent)";
  line.textContent = text;
  document.getElementById("main").prepend(line);
}"""
ALONE = """() => {
  document.querySelector("nav").hidden = document.querySelector("body > header").hidden = true;
  document.body.style.gridTemplate = "1fr / 1fr";
  const item = shown[state.at];
  render(item);
}"""
# turns up to a depth, values down to a depth, rings of clipped turns
STAGE = """([turns, values, clipped]) => {
  for (const part of document.querySelectorAll(".graph [data-depth]")) {
    const depth = Number(part.dataset.depth), dot = part.querySelector("circle");
    part.style.opacity = depth <= turns ? 1 : 0;
    for (const text of part.querySelectorAll(".value")) text.style.opacity = depth >= values ? 1 : 0;
    if (!dot) continue;
    dot.dataset.fill ??= dot.style.fill;
    dot.style.fill = depth >= values ? dot.dataset.fill : "var(--seen)";
    dot.style.strokeDasharray = clipped ? "" : "none";
    if (dot.classList.contains("clipped")) dot.style.stroke = clipped ? "" : "var(--dim)";
  }
}"""


def main(argv=None):
    """Makes the picture from the page of a run."""
    parser = argparse.ArgumentParser(prog="python -m docs.picture", description=main.__doc__)
    parser.add_argument("run", type=Path, help="a run folder of at2po.py")
    parser.add_argument("--out", type=Path, default=Path("results/at2po/page"), help="without .webp")
    args = parser.parse_args(argv)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no chromium and no google-chrome here")
    page_file = write_page(args.run).resolve()
    shutil.copyfile(page_file, DOCS / "page.html")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(page_file.as_uri())
        page.wait_for_selector(".graph")
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.evaluate(ALONE)
        shots = frames(page)
        browser.close()
    pictures = [Image.open(io.BytesIO(shot)).convert("RGB") for shot, _ in shots]
    few_colours = pictures[0].crop((0, 38, WIDTH, HEIGHT)).quantize(128)
    few_colours.save(DOCS / "tree.png", optimize=True)  # of the notebook, which keeps it
    times = [milliseconds for _, milliseconds in shots]
    out = args.out.with_suffix(".webp")
    pictures[0].save(
        out, save_all=True, append_images=pictures[1:], duration=times, loop=0, quality=70, method=6)
    print(f"{out}: {len(pictures)} pictures, {out.stat().st_size / 1e3:.0f} KB")


def frames(page):
    """[(PNG, milliseconds)] of the page that is open on a tree."""
    shots = []

    def shoot(caption, milliseconds, stage=None):
        if stage:
            page.evaluate(STAGE, stage)
        page.evaluate(CAPTION, caption)
        shots.append((page.screenshot(), milliseconds))

    deepest = page.evaluate("Math.max(...boxesOf(shown[state.at].sides[0]).map(box => box.depth))")
    leaves = page.evaluate("shown[state.at].sides[0].trajectories.length")
    never = deepest + 1
    # what is seen where nothing moves: in a link's preview, in print
    whole = [deepest, 0, True]
    shoot(f"One question, {leaves} trajectories, one tree: the page that every run leaves", 3000, whole)
    for depth in range(deepest + 1):
        stage = [depth, never, False]
        shoot("A question is answered in turns; turns of high entropy are sampled again", 700, stage)
    shoot(f"{leaves} leaves: right and wrong answers", 2000, [deepest, never, False])
    for depth in range(deepest, -1, -1):
        stage = [deepest, depth, False]
        shoot("Values go up: a turn is worth the weighted mean of its children (Eq 3)", 800, stage)
    shoot("The update: dashed turns moved past the clip window", 2500, whole)
    page.evaluate("choose('differ')")
    right = "shown.findIndex(item => outcomes(last(item.sides))[0] === 'right')"
    page.evaluate(f"show(Math.max(0, {right}))")
    shoot("A test question, before training and after", 3500)
    return shots


if __name__ == "__main__":
    main()
