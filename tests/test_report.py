"""Pages in a real browser, comparisons, explanations, guards that fire on
their fault and stay silent without it."""

import base64
import gzip
import hashlib
import json
import math
import re
import shlex
import shutil
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import at2po
from common import data, flags, guards, metrics, report, rollout, run
from common.files import RunError, read_jsonl
from common.folder import RunFolder
from common.of_mygo import records
from common.page import record
from common.page.writer import write_page
from common.report import __main__ as comparison
from common.report import curves
from common.report.export import export
from common.run import open_tracker
from tests.conftest import ROOT, write

pytestmark = pytest.mark.usefixtures("drawn")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ATTACK = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def tree(number, rewards=(1, 0, 0), **question):
    """A group with one first turn per trajectory, a shared root, and an attack in every text."""
    q = data.Question(
        f"q{number}", question.pop("question", f"Who directed film {number}? {ATTACK}"), ["Ada Holt"],
        hops=1 + number % 3, type=("bridge", "comparison")[number % 2], supporting_facts=[["Film", 1]],
        context=[["Film", ["It is a film.", "Its director was Ada Holt."]]])

    def turn(text, observation=""):
        return rollout.Turn([1, 2, 3], [-0.1, -2.0, -0.5], "</search>", text, [4], observation)

    nodes, trajectories = [{"id": 0, "parents": [], "label": "question", "sampled": False}], []
    seen = f'<result>\nPage 1: "Film"\nIts director was Ada Holt. {ATTACK}\n</result>'
    for i, reward in enumerate(rewards):
        a, b = 2 * i + 1, 2 * i + 2
        for k, parent, label, t in (
            (a, 0, "search: film", turn("<search> film </search>", seen)),
            (b, a, "answer", turn(f"answer {i} {ATTACK}"))):
            facts = {"label": label, "advantage": reward - 0.5, "value": 0.1, "how": [f"V = 0.1 {ATTACK}"]}
            nodes.append(record.turn_node(k, [parent], t, True, **facts))
        trajectories.append({
            "path": [0, a, b], "reward": reward, "answer": f"Ada {i}",
            "problem": "" if reward >= 0 else "no answer", "correct": reward == 1,
            "why": ["exact match: 'x' against 'y'"]})
    return record.group(q, nodes, trajectories, step=number + 1, **question)


def make_run(folder, groups, predictions=(), rows=(), **sets):
    """sets: {name of an evaluation: EM of questions 0, 1, …}"""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"lr": 1e-4, "name": ATTACK}))
    write(folder / "samples.jsonl", groups)
    write(folder / "metrics.jsonl", rows)
    (folder / "metrics.json").write_text(json.dumps(guards.STEP | guards.ROLLOUT))
    if predictions:
        evaluation(folder, "test", predictions)
    for name, ems in sets.items():
        predicted = [{"id": f"q{i}", "em": em, "em_valid": em, "tokens": 2 * em} for i, em in enumerate(ems)]
        evaluation(folder, name, predicted)
    return folder


def evaluation(folder, name, rows, **more):
    """eval_<name>.json of these rows; more of its summary."""
    shared = {"question": "Who?", "gold": ["Ada"], "type": "bridge", "hops": 2, "answer": "x", "problem": "",
              "searches": 1, "tokens": 9, "nodes": [], "trajectories": []}
    rows = [shared | {"f1": row["em"]} | row for row in rows]
    result = {"summary": metrics.summarize(rows) | more, "predictions": rows}
    (folder / f"eval_{name}.json").write_text(json.dumps(result))


ROWS = [{"step": i + 1, "reward/mean": i / 20, "reward/em": i / 20, "reward/format": 0.9,
         "rollout/entropy": 0.2, "rollout/tokens": 100} for i in range(20)]


# ---- the page

@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as p:
        b = p.chromium.launch(executable_path=CHROMIUM, args=[
            "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync"])
        yield b
        b.close()


@pytest.fixture
def shown(browser):
    """shown(run folder or file) -> its page, opened. By the end of the test nothing from the data has run in
    it, nothing went wrong, and nothing was asked of a network."""
    pages = []

    def show(place, hash="", **options):
        if place.suffix != ".html":
            place = write_page(place)
        page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        page.set_default_timeout(60_000)
        page.problems = []
        page.on("pageerror", lambda e: page.problems.append(str(e)))
        page.on("console", lambda m: page.problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or page.problems.append(r.url))
        page.on("dialog", lambda d: page.problems.append("dialog"))
        page.goto(f"file://{place}#{hash}")
        page.wait_for_selector("#list li")
        pages.append(page)
        return page

    yield show
    for page in pages:
        assert not page.problems and page.title() != "owned"
        page.close()


def test_the_page_shows_trees_and_turns_and_runs_nothing_from_them(tmp_path, shown):
    groups = [tree(i, (1, 0, -1) if i == 2 else (1, 0, 0)) for i in range(9)]
    page = shown(make_run(tmp_path / "at2po/x", groups, rows=ROWS))
    assert page.title() == "at2po / x"
    assert page.locator("#list li").count() == 9
    assert page.locator(".graph circle").count() == 4 and page.locator(".graph rect").count() == 1
    assert ATTACK in page.locator("#main").inner_text()
    assert ATTACK in page.locator("pre.seen").first.inner_text()
    assert page.locator("#main img, #main script").count() == 0
    assert page.locator("pre mark").first.inner_text() == "Its director was Ada Holt."
    assert page.locator(".turn").count() == 2
    assert page.locator(".how").first.inner_text() == f"V = 0.1 {ATTACK}"
    assert page.locator(".why").inner_text().startswith("right · reward 1")
    page.keyboard.press("l")
    assert page.locator(".why").inner_text().startswith("wrong · reward 0")
    page.locator(".graph g").nth(4).click()
    assert page.locator(".paths button[aria-pressed=true]").count() == 1
    assert page.locator(".paths button").nth(2).get_attribute("aria-pressed") == "true"
    assert "film 0" in page.locator("h2").inner_text()
    page.keyboard.press("j")
    assert "film 1" in page.locator("h2").inner_text()
    page.keyboard.press("k")
    page.keyboard.press("3")
    assert page.locator("#list li").count() == 1 and "film 2" in page.locator("h2").inner_text()
    assert "bad format" in page.locator(".why").inner_text()
    page.keyboard.press("0")
    page.keyboard.press("/")
    page.keyboard.type("film 5")
    assert page.locator("#list li").count() == 1
    assert page.locator("#count").inner_text().startswith("1 of 9 questions")
    page.keyboard.press("Escape")
    assert page.locator("#list li").count() == 9
    page.select_option("#hops", "2")
    assert page.locator("#list li").count() == 3
    page.select_option("#type", "bridge")
    assert page.locator("#list li").count() == 1
    page.locator("#search").fill("nothing like it")
    assert "No question passes" in page.locator("#main").inner_text()
    page.locator("#search").press("Escape")
    page.keyboard.press("c")
    assert page.locator("#curves").evaluate("d => d.open")


def test_it_opens_on_an_early_tree_with_a_long_way_to_a_right_answer(tmp_path, shown):
    long = tree(1)
    nodes, first = long["nodes"], long["trajectories"][0]
    nodes.append(nodes[2] | {"id": 90, "parents": [first["path"][-1]]})
    first["path"].append(90)
    late = json.loads(json.dumps(long)) | {"step": 90, "question": "late"}
    flat = tree(0, (1, 1, 1))
    page = shown(make_run(tmp_path / "at2po/x", [flat, tree(2), long, tree(3), late]))
    assert "film 1" in page.locator("h2").inner_text()


def test_equal_turns_of_siblings_are_one_node_until_a_click(tmp_path, shown):
    group = tree(0, (1, 0, 0, 0)) | {"beside": ["value", "value V"]}
    for number in (6, 8):  # the last two answer as the second does
        group["nodes"][number] |= {"text": group["nodes"][4]["text"]}
    group["nodes"][1]["value"] = .5
    page = shown(make_run(tmp_path / "at2po/x", [group]))
    counts = page.locator(".graph .count")
    assert counts.all_text_contents() == ["×4", "×3"]
    assert [text.split() for text in page.locator(".paths button").all_inner_texts()] == [["1"], ["0", "×3"]]
    assert "0.20 mean of 4" in page.locator(".graph .value").all_text_contents()
    assert "number: value V" in page.locator(".legend").inner_text()
    counts.nth(1).click()
    assert page.locator(".graph circle").count() == 5 and page.locator(".paths button").count() == 4
    counts.nth(1).click()
    assert page.locator(".graph circle").count() == 3
    counts.first.click()
    assert page.locator(".graph circle").count() == 8


def test_a_link_leads_to_a_turn(tmp_path, shown):
    run = make_run(tmp_path / "at2po/x", [tree(0), tree(1) | {"question_id": "a/b #1"}])
    page = shown(run)
    page.keyboard.press("j")
    page.locator(".paths button").nth(1).click()
    page.locator(".anchor").nth(1).click()
    assert page.url.endswith("#a%2Fb%20%231/1/2")
    other = shown(run, hash=page.url.split("#")[1])
    assert "film 1" in other.locator("h2").inner_text() and other.locator(".turn.picked").count() == 1
    assert other.locator(".why").inner_text().startswith("wrong")
    for odd in ("%ZZ", "a%2Fb%20%231/99/99", "nowhere/0", "q0/x/y", "__proto__"):
        other.goto(other.url.split("#")[0] + "#" + odd)
        assert other.locator("h2").is_visible()


def evaluated(folder, right, when=("_before", "")):
    """A run with an evaluation before and after: right = the EM of each question, before and after."""
    make_run(folder, [])
    for suffix, ems in zip(when, right, strict=True):
        rows = [{"id": f"q{i}", "em": em} | tree(i, (em,)) for i, em in enumerate(ems)]
        evaluation(folder, f"test{suffix}", rows)
    return folder


EXPORTED = {
    "openai": lambda row: [m["content"] for m in row["messages"] if m["role"] == "assistant"],
    "atif": lambda row: [step["message"] for step in row["steps"] if step["source"] == "agent"]}


@pytest.mark.parametrize("form", EXPORTED)
def test_trajectories_leave_in_the_forms_of_others(tmp_path, form):
    run = evaluated(tmp_path / "at2po/x", [(0, 1), (1, 1)])
    write(run / "samples.jsonl", [tree(2) | {"step": 1}])
    rows = read_jsonl(export(run, form))
    assert len(rows) == 3 + 4 and len({row.get("id") or row["trajectory_id"] for row in rows}) == 7
    said = tree(2)["nodes"][tree(2)["trajectories"][0]["path"][1]]["text"]
    assert EXPORTED[form](rows[0])[0] == said
    if form == "atif":
        for row in rows:
            assert [step["step_id"] for step in row["steps"]] == [*range(1, len(row["steps"]) + 1)]
        assert rows[0]["schema_version"] == "ATIF-v1.7" and rows[0]["extra"]["reward"] == 1


@pytest.mark.parametrize("form", EXPORTED)
def test_the_page_opens_what_others_wrote(tmp_path, shown, form):
    run = evaluated(tmp_path / "at2po/x", [(0, 1), (1, 1)])
    page = shown(run)
    before = page.locator("#list li").count()
    page.locator("#load").set_input_files(str(export(run, form)))
    page.locator("#list li").nth(before + 3).wait_for()
    assert page.locator("#list li").count() == before + 4
    theirs = {"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Who? {ATTACK}"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": "search", "arguments": "{}"}}]},
        {"role": "tool", "content": [{"type": "text", "text": "seen"}]},
        {"role": "assistant", "content": "Bo"}]}
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    page.locator("#load").set_input_files(str(tmp_path / "theirs.json"))
    page.locator("#list li").nth(before + 4).wait_for()
    page.locator("#list li").last.click()
    assert page.locator(".why").inner_text().startswith("not scored")
    turns = page.locator(".turn pre").all_inner_texts()
    assert '"name":"search"' in turns[0] and turns[1:] == ["seen", "Bo"]


def test_before_and_after_stand_beside_each_other(tmp_path, shown):
    page = shown(evaluated(tmp_path / "at2po/x", [(0, 0, 1), (1, 0, 1)]))
    assert page.locator("#list li").count() == 3
    assert page.locator("h3").all_inner_texts() == ["before training", "after training"]
    reasons = page.locator(".why").all_inner_texts()
    assert reasons[0].startswith("wrong") and reasons[1].startswith("right")
    page.get_by_role("button", name="changed").click()
    assert page.locator("#list li").count() == 1
    assert ATTACK in page.locator(".side").nth(1).inner_text() and page.locator("#main img").count() == 0
    page.locator(".anchor").nth(3).click()
    assert page.url.endswith("#q0/1/2") and page.locator(".turn.picked").count() == 1


def test_two_runs_stand_beside_each_other_with_their_table(tmp_path, shown, capsys):
    a = evaluated(tmp_path / "r/a", [(0, 1, 0)], [""])
    b = evaluated(tmp_path / "r/b", [(1, 1, 0)], [""])
    (b / "config.json").write_text(json.dumps({"lr": 3e-4, "name": ATTACK}))
    comparison.main([str(a), str(b), "--page", str(tmp_path / "both.html")])
    assert f"page: {tmp_path}/both.html" in capsys.readouterr().out.replace("\n", "")
    page = shown(tmp_path / "both.html")
    assert page.locator("h3").all_inner_texts() == ["a", "b"]
    page.get_by_role("button", name="changed").click()
    assert page.locator("#list li").count() == 1
    page.locator("#open-table").click()
    assert "+0.333" in page.locator("#table").inner_text()
    page.keyboard.press("Escape")
    page.locator("#open-config").click()
    rows = page.locator("#config tr").all_inner_texts()
    assert rows[1].split() == ["lr", "0.0001", "0.0003"] and ATTACK in rows[-1]


def test_a_file_of_the_run_is_added_and_runs_nothing(tmp_path, shown):
    run = make_run(tmp_path / "at2po/x", [tree(i, (1, 0)) for i in range(90)])
    page = shown(run)
    assert page.locator("#list li").count() == 60
    assert "60 of the 90 questions of training" in page.locator("#left-out").inner_text()
    page.locator("#load").set_input_files(str(run / "samples.jsonl"))
    page.locator("#list li").nth(149).wait_for()
    assert page.locator("#list li").count() == 150
    (tmp_path / "odd.json").write_text('{"predictions": ["<img src=x onerror=alert(1)>"]}')
    page.locator("#load").set_input_files(str(tmp_path / "odd.json"))
    page.get_by_text("odd.json holds no trajectories").wait_for()
    odd = tree(0) | {"question": ATTACK}
    odd["nodes"][1]["advantage"] = math.nan
    (tmp_path / "more.jsonl").write_text(json.dumps(odd) + "\n")
    page.locator("#load").set_input_files(str(tmp_path / "more.jsonl"))
    page.locator("#list li").nth(150).wait_for()
    assert page.locator("#list li").count() == 151


def test_a_tree_is_saved_as_a_picture_that_runs_nothing(tmp_path, shown):
    group = tree(0)
    group["nodes"][1]["label"] = f"search: {ATTACK}"
    group["trajectories"][0]["answer"] = ATTACK
    page = shown(make_run(tmp_path / "at2po/x", [group]))
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    picture = ElementTree.parse(download.value.path()).getroot()
    tags = {node.tag.split("}")[1] for node in picture.iter()}
    assert tags == {"svg", "g", "path", "circle", "rect", "text", "title"}
    assert any("owned" in (node.text or "") for node in picture.iter())
    shapes = [node for node in picture.iter() if node.tag.endswith("circle")]
    assert all(node.get("fill").startswith("rgb(") for node in shapes)


def test_filters_that_tell_something_a_prompt_that_stays_open_and_settings_that_were_changed(tmp_path, shown):
    groups = [tree(i, (1,)) | {"type": kind, "prompt": f"<|system|> You are {i}. {ATTACK}"}
              for i, kind in ((0, "bridge"), (3, "comparison"))]
    run = make_run(tmp_path / "askit/x", groups)
    config = {"lr": 1e-4, "steps": 6, "name": ATTACK, "changed": ["steps"], "run_id": "f00"}
    (run / "config.json").write_text(json.dumps(config))
    page = shown(run)
    filters = {name: page.locator(f"#{name}").is_visible() for name in ("where", "hops", "type", "outcome")}
    assert filters == {"where": False, "hops": False, "type": True, "outcome": False}
    assert not page.get_by_text(groups[0]["prompt"]).is_visible()
    page.locator("summary").click()
    assert page.get_by_text(groups[0]["prompt"]).is_visible()
    page.keyboard.press("j")
    assert page.get_by_text(groups[1]["prompt"]).is_visible()
    page.locator("#open-config").click()
    assert page.locator("#config tr").all_inner_texts()[0].split() == ["steps", "6"]
    assert page.locator("#config tr").count() == 3 and ATTACK in page.locator("#config").inner_text()


def test_evidence_is_marked_on_its_own_page_alone_and_can_be_read(tmp_path, shown):
    said = "It is old. Its founder was Ada Holt."
    group = tree(0, (1,)) | {"evidence": [["Jade Hawks", "Its founder was Ada Holt."], ["Ada Holt", ""]]}
    for number, seen in enumerate((
            f'<result>\nPage 1: "Open Ravens"\n{said}\nPage 2: "Jade Hawks"\n{said}\n</result>',
            f'<information>Doc 1(Title: "Jade Hawks") {said}\nDoc 2(Title: "Ravens") {said}</information>',
            f"read:\n[0] Open Ravens is like Jade Hawks. {said}\n[1] Jade Hawks is a band. {said}")):
        turn = group["nodes"][1] | {"id": 10 + number, "parents": [0], "observation": seen}
        group["nodes"].append(turn)
        group["trajectories"][0]["path"].insert(1 + number, 10 + number)
    write_page(make_run(tmp_path / "at2po/x", [group]))
    for scheme in ("light", "dark"):
        page = shown(tmp_path / "at2po/x", color_scheme=scheme)
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert (int(red) < 60) == (scheme == "dark")
        marks = page.locator("pre mark")
        assert marks.all_inner_texts() == ["Its founder was Ada Holt."] * 3
        before = "mark => mark.previousSibling.textContent.trimEnd().split('\\n').pop()"
        assert marks.nth(0).evaluate(before) == "It is old."
        assert marks.nth(1).evaluate(before) == '<information>Doc 1(Title: "Jade Hawks") It is old.'
        assert marks.nth(2).evaluate(before) == "[1] Jade Hawks is a band. It is old."
        assert "marked gold evidence" in page.locator(".facts").first.inner_text()
        look = "mark => { const look = getComputedStyle(mark); return [look.color, look.backgroundColor]; }"
        assert contrast(*marks.first.evaluate(look)) >= 4.5


def contrast(*colours):
    """Of two rgb(…), as WCAG 2 defines it."""
    light = []
    for colour in colours:
        shares = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [s / 12.92 if s <= .04045 else ((s + .055) / 1.055) ** 2.4 for s in shares]
        light.append(.2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2] + .05)
    return max(light) / min(light)


def test_a_point_of_a_curve_leads_to_its_step(tmp_path, shown):
    page = shown(make_run(tmp_path / "at2po/x", [tree(i) for i in range(20)], rows=ROWS))
    page.keyboard.press("2")
    page.locator("#open-curves").click()
    panels = page.locator("figure")
    titles = panels.locator("b").all_inner_texts()
    assert titles == ["reward", "answers", "format", "entropy (nats per token)"]
    assert panels.nth(1).locator("text").all_text_contents() == [
        "0", "0.5", "1", "5", "10", "15", "20", "step"]
    picture = panels.nth(1).locator("svg")
    box = picture.bounding_box()
    x = box["x"] + box["width"] * (42 + 268 * 12 / 19) / 320  # of step 13, between 1 and 20
    page.mouse.move(x, box["y"] + box["height"] / 2)
    assert "step 13: EM, training 0.600" in panels.nth(1).inner_text()
    page.mouse.click(x, box["y"] + box["height"] / 2)
    assert not page.locator("#curves").evaluate("d => d.open")
    assert "film 12" in page.locator("h2").inner_text()
    assert "step 13" in page.locator("#main .facts").first.inner_text()
    for name in ("curves", "config", "help"):
        page.locator(f"#open-{name}").click()
        page.locator(f"#{name}").get_by_role("button", name="close").click()
        assert not page.locator(f"#{name}").evaluate("d => d.open")


def test_the_page_of_a_run_that_goes_on_renews_itself_where_nobody_reads(tmp_path, browser):
    run = make_run(tmp_path / "at2po/x", [])
    write_page(run, "the run has begun")
    page = browser.new_page()
    page.clock.install()
    page.goto(f"file://{run}/trajectories.html")
    page.get_by_text("Nothing has been sampled or evaluated yet.").wait_for()

    def now(groups, how_far):
        write(run / "samples.jsonl", groups)
        write_page(run, how_far)
        page.clock.run_for(25_000)

    now([tree(0), tree(1)], "step 5 of 20")
    page.get_by_text("step 5 of 20, live").wait_for()
    page.keyboard.press("j")
    assert "film 1" in page.locator("h2").inner_text()
    page.locator(".paths button").nth(1).click()
    page.locator("#main").evaluate("main => { main.scrollTop = 50; }")
    page.locator("#open-config").click()
    now([tree(i) for i in range(5)], "step 10 of 20")
    assert page.locator("#list li").count() == 2  # a dialog is read
    page.keyboard.press("Escape")
    page.clock.run_for(10_000)
    assert page.locator("#list li").count() == 2  # a hand was here
    page.clock.run_for(15_000)
    page.locator("#list li").nth(4).wait_for()
    assert "film 1" in page.locator("h2").inner_text()  # the same place
    assert page.locator(".why").inner_text().startswith("wrong")
    assert page.locator("#main").evaluate("main => main.scrollTop") == 50
    now([tree(i) for i in range(6)], "")
    page.locator("#list li").nth(5).wait_for()
    now([tree(i) for i in range(7)], "")
    assert page.locator("#list li").count() == 6 and page.locator("#live").inner_text() == ""
    page.close()


def test_questions_of_the_harder_world_are_said_plainly(tmp_path, shown):
    asked = "Who is the mum of the originator of the band Jade Hawks?"
    run = make_run(tmp_path / "at2po/x", [tree(0, question=asked)])
    (run / "config.json").write_text(json.dumps({"data": "world", "world": "hard:partial=.2"}))
    page = shown(run)
    assert page.locator("h2").inner_text() == "Who is the mother of the founder of the band Jade Hawks?"
    assert f"asked as: {asked}" in page.locator("#main").inner_text()
    assert "words that no passage has" in page.locator("nav").inner_text()
    (run / "config.json").write_text(json.dumps({"data": "my.jsonl", "world": "hard"}))
    write_page(run)
    assert "plainly" not in carried_by(run)["items"][0] and "words" not in carried_by(run)


def test_the_page_in_the_docs_is_small_and_opens_on_a_tree(shown):
    file = ROOT / "docs/page.html"
    assert file.stat().st_size < 700_000
    page = shown(file)
    assert page.locator(".graph circle").count() > 10 and page.locator("figure").count() > 5


def test_a_dag_with_several_parents_is_drawn(tmp_path, shown):
    g = tree(0, (1,))
    g["nodes"] = [
        {"id": i, "parents": p, "label": f"n{i}", "text": "t", "observation": "", "sampled": i % 2 == 0}
        for i, p in enumerate([[], [0], [0], [1, 2], [3]])]
    g["trajectories"][0]["path"] = [0, 1, 2, 3, 4]
    page = shown(make_run(tmp_path / "mygo/x", [g]))
    assert page.locator(".graph path").count() == 5 and page.locator(".graph rect").count() == 2


@pytest.mark.parametrize("width", [390, 760, 1024, 1400])
def test_a_tree_fits_and_its_answers_are_whole(tmp_path, shown, width):
    group = tree(0, (1, 0, -1))
    answers = "the Holy Roman Empire of the German Nation " * 3, "Oslo", "x" * 150
    for trajectory, answer in zip(group["trajectories"], answers, strict=True):
        trajectory["answer"] = answer
        deep = trajectory["path"]
        for _ in range(6):
            nodes = group["nodes"]
            nodes.append(nodes[deep[-1]] | {
                "id": len(nodes), "parents": [deep[-1]], "label": "search: " + "y" * 90})
            deep.append(len(nodes) - 1)
    page = shown(make_run(tmp_path / "at2po/x", [group]))
    page.set_viewport_size({"width": width, "height": 800})
    sticks_out = """() => {
      const pane = document.querySelector(".graph").getBoundingClientRect();
      const texts = [...document.querySelectorAll(".graph text")];
      return texts.filter(t => t.getBoundingClientRect().right > pane.right).map(t => t.textContent);
    }"""
    for _ in range(200):  # till it is drawn anew; the policy bans wait_for_function, which evaluates a string
        drawn = page.evaluate("document.querySelector('.graph svg').width.baseVal.value")
        if drawn < width and not page.evaluate(sticks_out):
            break
        page.wait_for_timeout(50)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(sticks_out) == []
    said = "".join(page.locator(".graph text").all_text_contents())
    assert all(answer.replace(" ", "") in said.replace(" ", "").replace("\xa0", "") for answer in answers)


def test_odd_text_and_numbers_lose_nothing(tmp_path, shown, capsys):
    odd = tree(0, question="line\u2028separator \x1b[31mred\x1b[0m [bold]markup[/oops] " + "w" * 9000)
    odd["nodes"][1] |= {"entropy": math.nan, "advantage": math.inf, "logprobs": [-math.inf, -0.1, -0.1]}
    run = make_run(tmp_path / "at2po/x[bold]", [])
    groups = odd, tree(1), {"step": 3, "nodes": [], "trajectories": []}
    lines = [json.dumps(g, ensure_ascii=False) + "\n" for g in groups]
    (run / "samples.jsonl").write_text("".join(lines))
    assert len(read_jsonl(run / "samples.jsonl")) == 3
    page = shown(run)
    page.keyboard.press("j")
    assert page.locator("#list li").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    with open(run / "samples.jsonl", "a") as f:
        f.write('{"cut off')
    assert len(read_jsonl(run / "samples.jsonl")) == 3  # a kill leaves such a line


def test_a_page_without_a_browser(tmp_path):
    """What the file says to any reader: one script with a matching hash, no tag from the data, no address."""
    run = make_run(tmp_path / "at2po/x", [tree(0)], rows=ROWS)
    text = write_page(run).read_text()
    script = text.rsplit("<script>", 1)[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert policy in text
    assert text.count("<script") == 2 and "owned'</script>" not in text and "https://" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    first = carried_by(run)
    assert first["items"][0]["question"].endswith(ATTACK)
    assert set(first["curves"]["panels"]) == {"reward", "answers", "format", "entropy (nats per token)"}
    assert first["curves"]["runs"]["x"][1] == {
        "step": 2, "reward/mean": .05, "reward/em": .05, "reward/format": .9, "rollout/entropy": .2}
    comparison.main([str(run)])
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("seconds, steps_shown", [(99, [0, 1, 2, 2, 4]), (-1, [0, 1, 2, 3, 4])])
def test_the_page_is_made_anew_after_the_first_step_every_evaluation_and_a_minute(
        tmp_path, monkeypatch, capsys, seconds, steps_shown):
    folder = RunFolder(tmp_path, "at2po", "x", {"name": "x"})
    cfg = at2po.parse_args(["--eval-every", "2", "--save-every", "0", "--steps", "5"])
    monkeypatch.setattr(run.Run, "save", lambda *_: None)
    monkeypatch.setattr(run, "opened", [folder])
    monkeypatch.setattr(run, "PAGE_EVERY", seconds)
    pages = []
    begun = run.Run(cfg, metrics=guards.STEP)
    begun.folder = folder
    with begun.stage("x"):
        pages.append(carried_by(folder.path)["how_far"])
        nothing = SimpleNamespace(model=None)
        for step, row in begun.steps(nothing, None, cfg.steps):
            now = carried_by(folder.path)
            pages.append((now["how_far"], len(now["curves"]["runs"]["x"])))
            row["reward/mean"] = step / 10
    assert f"Watch it: {tmp_path}/at2po/x/trajectories.html" in capsys.readouterr().out.replace("\n", "")
    assert pages == ["the run has begun", *((f"step {n} of 5", n) for n in steps_shown)]
    done = carried_by(folder.path)
    assert done["how_far"] == "" and len(done["curves"]["runs"]["x"]) == 5


def test_an_evaluation_between_steps_stands_on_the_page_till_the_last_is_there(tmp_path):
    run = evaluated(tmp_path / "at2po/x", [(0, 0), (1, 0)], ("_before", "_step4"))
    (run / "metrics.jsonl").write_text('{"step": 4, "eval/em": 0.5}\n')

    def sides():
        write_page(run)
        return [side["name"] for side in carried_by(run)["items"][0]["sides"]]

    assert sides() == ["before training", "after step 4"]
    (run / "eval_test.json").write_bytes((run / "eval_test_step4.json").read_bytes())
    assert sides() == ["before training", "after training"]


def test_ids_are_kept_of_training_alone_and_evidence_with_its_title():
    question = data.Question("q", "Who?", ["Ada"], supporting_facts=[["Film", 1]],
                             context=[["Film", ["It is.", " It was. "]]])
    turn = rollout.Turn([1, 2], [-.5, -.5], "</search>", "x", [3], "seen")
    done = rollout.Trajectory("q", [7, 8], [turn], reward=1.0, info=rollout.Outcome("Ada"))
    of_training = record.group_of(question, [done], lambda t, k: {}, lambda t, q: [], step=1)
    of_a_test = record.group_of(question, [done], lambda t, k: {}, lambda t, q: [])
    assert of_training["prompt_ids"] == [7, 8] and of_training["nodes"][1]["ids"] == [1, 2]
    assert "ids" not in of_a_test["nodes"][1] and of_a_test["evidence"] == [["Film", "It was."]]


def carried_by(run):
    """The data of its page."""
    packed = (run / "trajectories.html").read_text().split('id="data">')[1].split("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


# ---- comparison, explanation, tracker

def test_comparison_is_paired_by_question(tmp_path, capsys):
    low = [{"id": str(i), "em": float(i < 40)} for i in range(100)]
    high = [{"id": str(i), "em": float(i < 60)} for i in reversed(range(100))]
    a = make_run(tmp_path / "r/a", [], low, ROWS)
    b = make_run(tmp_path / "r/b", [], high, ROWS)
    comparison.main([str(a), str(b), "--out", str(tmp_path / "both.png")])
    out = capsys.readouterr().out
    assert "+0.200 [+0.1" in out and "100" in out and "2,000" in out
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    comparison.main([str(a), str(b), "--out", str(tmp_path / "both.pdf")])
    assert (tmp_path / "both.pdf").read_bytes()[:5] == b"%PDF-"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["both.pdf", "both.png", "r"]


def test_seeds_with_other_settings_are_named(tmp_path, capsys):
    runs = [exported(tmp_path / f"r/mine-seed{seed}", [1, 0]) for seed in range(2)]
    (runs[1] / "config.json").write_text(json.dumps({"lr": 1e-3, "name": "x"}))
    comparison.main([*map(str, runs), "--out", str(tmp_path / "c.png")])
    assert "mine: runs of one line differ in lr: 0.0001 | 0.001" in " ".join(capsys.readouterr().out.split())


def test_a_mean_of_sets_is_of_all_of_them(tmp_path):
    whole = make_run(tmp_path / "r/a-seed0", [], one=[1, 0], two=[1, 1])
    half = make_run(tmp_path / "r/a-seed1", [], one=[1, 0])
    for seeds, shown in (([whole], ["one", "two", "mean of 2 sets"]), ([whole, half], ["one", "two"])):
        assert [row[1] for row in report.method_table(None, "", {"a": seeds})["rows"]] == shown


def test_the_page_says_of_which_weights_a_score_is(tmp_path):
    def head(folder):
        write_page(folder)
        return carried_by(folder)["summary"]

    begun = make_run(tmp_path / "r/a", [], rows=ROWS[:3], test_before=[0, 1])
    assert head(begun).endswith("n 2, before training")
    ended = make_run(tmp_path / "r/b", [], rows=ROWS[:3], test_before=[0, 1], test=[1, 1])
    assert head(ended).startswith("test EM 0.500 → 1.000") and head(ended).endswith("n 2, after training")
    other = make_run(tmp_path / "r/c", [], rows=ROWS[:3], test_before=[0, 1], test=[1, 1, 1])
    assert head(other).startswith("test EM 1.000")


def test_what_is_no_exact_match_is_not_compared(tmp_path, capsys):
    given = {"coarse": [1, 1], "a": [1, 0], "b": [1, 1]}
    runs = [exported(tmp_path / name, ems) for name, ems in given.items()]
    evaluation(runs[0], "test", [{"id": "q0", "em": 1.0}, {"id": "q1", "em": 1.0}], names={"em": "hit@1"})
    comparison.main([*map(str, runs), "--out", str(tmp_path / "c.png")])
    table = capsys.readouterr().out.partition("final evaluations")[2]
    assert "coarse" not in table and "+0.500" in table and "-0.500" not in table


def exported(folder, ems):
    """A run with evaluations before, within and after, as training leaves it."""
    return make_run(folder, [], rows=ROWS, test_before=[0.0] * len(ems), test=ems, test_step3=ems)


def test_runs_whose_names_differ_by_their_seed_are_compared_over_seeds(tmp_path, capsys):
    names = []
    for seed, ems in enumerate(([1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1])):
        for name, values in ((f"star-seed{seed}", ems), (f"seed{seed}-mygo", [0, *ems[1:]])):
            names.append(str(exported(tmp_path / "run" / name, values)))
    comparison.main([*sorted(names), "--out", str(tmp_path / "c.png")])
    said = capsys.readouterr().out
    assert "over questions or, of several seeds, over seeds" in " ".join(said.split())
    # mygo .5 .25 .75, star .75 .5 1: differences .25 each, which say nothing of their spread
    assert "+0.250 " in said and "+0.250 [+0.250" not in said and "0.500 [-0.121, 1.121]" in said
    assert "up" not in said.split()
    comparison.main([names[0], "--out", str(tmp_path / "c.png")])
    assert "star-seed0" in capsys.readouterr().out


@pytest.fixture
def panel():
    """panel(runs, keys) draws into one panel: its axis."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots()

    def draw(runs, **keys):
        curves._draw_panel(plt, axis, "x", keys, runs)
        return axis

    yield draw
    plt.close(figure)


@pytest.mark.parametrize("values, bottom", [([-.9, .1], -.9), ([.1, .4], 0.0)])
def test_what_is_below_zero_is_in_the_picture(values, bottom, panel):
    rows = [{"step": i, "loss": value} for i, value in enumerate(values)]
    shown = panel({"run": [rows]}, loss="variance").get_ylim()[0]
    assert shown == 0 if bottom == 0 else bottom - .2 < shown <= bottom


def test_curves_have_whole_steps_and_legends_above_the_lines(tmp_path, monkeypatch):
    def drawn_of(rows):
        kept = []
        monkeypatch.setattr(curves, "save", lambda figure, path: kept.append(figure))
        panels = guards.panels(guards.STEP | guards.ROLLOUT)
        curves.draw_curves({"x": [rows]}, tmp_path / "x.png", "x", panels)
        figure, = kept
        figure.canvas.draw()
        return figure.axes

    rows = [{"step": n, "reward/em": n / 10, "eval/em": .9, "rollout/turns": 4.0 + n,
             "rollout/searches": 3.0 + n} for n in (1, 2, 3)]
    answers, turns = drawn_of(rows)
    assert [axis.get_title(loc="left") for axis in (answers, turns)] == ["answers", "searches and turns"]
    labels = [text.get_text() for text in answers.get_legend().get_texts()]
    assert labels == ["EM, test", "EM, training"]
    for axis in (answers, turns):
        assert all(tick == int(tick) for tick in axis.get_xticks())
        assert axis.get_legend().get_window_extent().y0 >= axis.get_window_extent().y1 - 3
    assert turns.get_ylim()[1] > 7.3  # the top line is off the frame
    written = guards.panels(guards.STEP | guards.ROLLOUT | guards.UPDATE | guards.RATIO)
    assert not any("_" in label for keys in written.values() for label in keys.values())


def test_a_folder_that_another_run_began_meanwhile_is_not_written_over(tmp_path):
    """(tests/test_inputs.py has two processes.)"""
    late = RunFolder(tmp_path, "at2po", "y", {"lr": 1})
    RunFolder(tmp_path, "at2po", "y", {"lr": 2}).create()
    with pytest.raises(RunError, match="exists: choose another --name"):
        late.create()
    assert json.loads((late.path / "config.json").read_text())["lr"] == 2


def test_a_tracker_gets_what_the_file_gets(tmp_path, monkeypatch):
    told = []

    class Tracker:
        @staticmethod
        def init(**given):
            told.append(given)

        @staticmethod
        def log(numbers, step):
            told.append((numbers, step))

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, Tracker)
        run = RunFolder(tmp_path, "at2po", name, {"lr": 1})
        run.create()
        run.tracker = open_tracker(name, run)
        run.log({"step": 3, "reward/mean": 0.5})
        assert read_jsonl(run.path / "metrics.jsonl") == [{"step": 3, "reward/mean": 0.5}]
    begun = {"project": "at2po", "config": {"lr": 1}, "resume": "never"}
    assert told == [
        begun | {"name": "wandb", "dir": str(tmp_path / "at2po/wandb"), "mode": "offline"},
        ({"reward/mean": 0.5}, 3), begun | {"name": "trackio"}, ({"reward/mean": 0.5}, 3)]


def test_curves_of_seeds_are_their_mean_where_all_have_been(panel):
    seeds = [[{"step": 1, "loss": 4.0}, {"step": 3, "loss": 2.0}],
             [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 1.0},
              {"step": 4, "loss": 9.0}]]
    axis = panel({"w = 1": seeds, "w = 0": [seeds[0]]}, loss="loss")
    mean, one = axis.lines
    assert list(mean.get_xdata()) == [1, 2, 3]
    assert list(mean.get_ydata()) == [3, 2, 1.5]  # the first is 3 in the middle
    assert list(one.get_ydata()) == [4, 2]
    band = axis.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} == {(1, 2), (1, 4), (2, 1), (2, 3), (3, 1), (3, 2)}
    last = panel({"a": [[{"step": 0, "eval/em": .1}], [{"step": 0, "eval/em": .3}]]}, **{"eval/em": "em"})
    assert list(last.lines[-1].get_ydata()) == [.2] and last.lines[-1].get_marker() == "o"


@pytest.mark.parametrize("count, near", [(40, 1e-9), (300, .06)])
def test_the_line_is_drawn_through_the_data_or_through_the_middle_of_many_steps(count, near, panel):
    falling = [math.exp(-step / 10) for step in range(count)]
    rows = [{"step": step, "loss": value} for step, value in enumerate(falling)]
    line = panel({"run": [rows]}, loss="loss").lines[-1].get_ydata()
    assert list(line[3:30]) == pytest.approx(falling[3:30], rel=near)
    assert (count > curves.MANY) == (near > .01)


def test_a_table_of_stages_by_hand(tmp_path):
    base = make_run(tmp_path / "a", [], one=[0, 0, 1, 1], two=[0, 1])
    other = make_run(tmp_path / "b", [], one=[1, 0, 1, 1], two=[1, 1])
    short = make_run(tmp_path / "c", [], one=[1, 1])  # the first two questions alone
    methods = {"base": [base], "other": [other], "short": [short], "missing": [tmp_path / "d"]}

    def paper(label, sets):
        return f"{label} {'+'.join(sets)}"

    columns = {"tokens": ("eval", "tokens", ".1f")}
    report.method_table(tmp_path / "x", "x", methods, "base", paper, columns)
    table = json.loads((tmp_path / "x-table.json").read_text())
    lines = [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]
    assert [(line["method"], line["set"], line["n"]) for line in lines] == [
        ("base", "one", 4), ("base", "two", 2), ("other", "one", 4), ("other", "two", 2), ("short", "one", 2),
        ("base", "mean of 2 sets", 6), ("other", "mean of 2 sets", 6)]
    for line, ems in zip(lines[2:5], ([1, 0, 1, 1], [1, 1], [1, 1]), strict=True):
        mean, low, high = metrics.bootstrap_interval(ems)
        assert line["EM"] == metrics.signed((mean, max(0, low), high), ".3f")
        assert line["minus"] == "base" and line["paper"] == f"{line['method']} {line['set']}"
    gain = metrics.signed(metrics.bootstrap_interval([1, 0, 0, 0]))
    assert lines[2]["by question"] == gain and lines[2]["by seed"] == lines[2]["EM by seed"] == ""
    assert lines[2]["tokens"] == "1.5"
    assert lines[4]["by question"] == "+1.000 [+0.342, +1.000]"
    assert [line["EM"] for line in lines[5:]] == ["0.500", "0.875"]  # each set counts the same
    assert lines[6]["paper"] == "other one+two" and lines[6]["by question"] == ""
    report.method_table(tmp_path / "y", "y", {"short": [short], "other": [other]}, "short", None, columns)
    rows = json.loads((tmp_path / "y-table.json").read_text())["rows"]
    assert rows[1][7] == "-0.500 [-1.000, +0.000] (n 2)"  # of what both were asked


def test_tables_fit_a_hundred_columns_and_end_in_a_verdict(tmp_path, capsys):
    runs = {}
    for label, last in (("base", 0), ("a method that has a long name", 1), ("another one", 1)):
        sets = {"2wiki-dev": [0] * 30 + [last] * 9}
        runs[label] = [make_run(tmp_path / f"{n}-{label}", [], **sets) for n in range(5)]
    runs["another one"] = runs["base"]
    capsys.readouterr()
    found = report.method_table(None, "x", runs, "base", lambda label, sets: "48.81 / 60.12")
    said = capsys.readouterr().out
    assert max(map(len, said.split("\n"))) <= 100
    assert said.count("a method that has a long name") == said.count("method  ") > 2  # in each part
    moved = found["header"].index("moved")
    assert [row[moved] for row in found["rows"]] == ["", "up", "unclear"]


# ---- guards

HEALTHY = {
    "train/not_finite": 0, "rollout/logprob_drift_mean": 1e-6, "train/first_ratio": 1.0,
    "rollout/flat_groups": 0.3, "reward/mean": 0.5, "reward/format": 0.9, "rollout/response_tokens": 100.0,
    "rollout/entropy": 0.5, "train/kl": 0.002, "rollout/searches": 2.0,
    "train/right_moved": 0.01}


@pytest.mark.parametrize("name, fault, flag", [
    ("not_finite", {"train/not_finite": 1}, "--lr"),
    ("drift", {"rollout/logprob_drift_mean": 0.2}, "--temperature"),
    ("first_ratio", {"train/first_ratio": 1.01}, "--precision"),
    ("flat_groups", {"rollout/flat_groups": 0.95}, "--group-size"),
    ("format", {"reward/format": 0.5}, "--lr"),
    ("calls", {"rollout/searches": 0.1}, "--warmup-data"),
    ("kl", {"train/kl": 0.5}, "--mini-batch"),
    ("right_moved", {"train/right_moved": -0.31}, "--kl-coef"),
    ("selection", {"select/accepted": 0.01}, "--max-attempts"),
    ("selection", {"select/accepted": 0.0}, "--threshold")])
def test_each_guard_fires_on_its_fault_alone_and_names_the_flag(name, fault, flag):
    healthy, own, said = [dict(HEALTHY) for _ in range(10)], records.GUARD, []
    counts = guards.watch(healthy[-1], healthy[:-1], said.append, HEALTHY, own)
    assert len(counts) == 9 and not any(counts.values()) and said == []
    ill = [HEALTHY | fault for _ in range(3)]
    counts = guards.watch(ill[-1], healthy + ill[:-1], said.append, HEALTHY, own)
    assert [n for n, fired in counts.items() if fired] == [f"guard/{name}"]
    message, = said
    assert message.startswith(f"guard {name}: ") and flag in message


@pytest.mark.parametrize("begins, ends, fires", [
    (.75, .10, True),   # of a base that called little, and forgot to
    (.75, .45, False),
    (4.0, 1.0, False),  # fewer, and still one each
    (.10, .08, False),  # there was nothing to fall from
    (.02, .10, False)])
def test_calls_that_fall_towards_none_are_named(begins, ends, fires):
    counts = [begins] * 3 + [(begins + ends) / 2] * 4 + [ends] * 3
    rows = [HEALTHY | {"rollout/searches": count} for count in counts]
    said = []
    assert guards.watch(rows[-1], rows[:-1], said.append, HEALTHY)["guard/calls"] == fires
    assert not fires or f"{begins:.2f} a trajectory at the start, {ends:.2f} now" in said[0]


def test_what_comes_next_can_be_pasted(tmp_path, capsys, monkeypatch):
    folders = [RunFolder(tmp_path / "my runs", "at2po", name, {}) for name in ("x", "y", "z")]
    for folder in folders[:2]:
        folder.create()
        (folder.path / "trajectories.html").write_text("")
    monkeypatch.setattr(run, "opened", folders)
    run.tell_what_next()
    lines = [shlex.split(line) for line in capsys.readouterr().out.replace("Next:", "").splitlines()]
    x, y = (str(folder.path) for folder in folders[:2])
    assert lines == [["python", "-m", "webbrowser", f"{y}/trajectories.html"],
                     ["python", "-m", "common.report", x, y]]


def test_askit_asks_the_last_policy_of_the_run_that_was_named(tmp_path, capsys, monkeypatch):
    """The coarse encoder and the T5s are no policy, and the other stages are found by the run's name."""
    folders = [RunFolder(tmp_path, "askit", f"n-{stage}", {}) for stage in ("coarse", "ppo", "sqg")]
    for folder in folders:
        folder.create()
        (folder.path / "trajectories.html").write_text("")
        (folder.path / "checkpoint").mkdir()
        (folder.path / "checkpoint/trainer.json").write_text('{"step": 1}')
        row = {"question": "Who?", "em": 1.0, "gold": ["Ada"]}
        folder.write("eval_test.json", {"summary": {}, "predictions": [row]})
    monkeypatch.setattr(flags, "typed", ["--name", "n", "--steps", "3"])
    monkeypatch.setattr(run, "opened", folders)
    run.tell_what_next()
    asked = next(line for line in capsys.readouterr().out.splitlines() if "--ask" in line)
    words = shlex.split(asked.partition("#")[0])
    assert words[words.index("--name") + 1] == "n" and "--steps" not in words
    assert words[words.index("--checkpoint") + 1] == str(folders[1].path / "checkpoint")
