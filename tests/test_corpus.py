"""A folder of one's own documents as a corpus."""

import pytest

from common import corpus, data, files

FILES = {
    "handbook.md": "# Handbook\n\nHello there.\n\n## Leave\n\nAsk Ann Lee.\n\n```\n# no heading\n```\n",
    "depots.txt": "Depots\n\nThe Gorsley depot is run by Liv Hansen.",
    "sub/managers.csv": "\ufeffDepot;Manager\nGorsley;Liv Hansen;ext 22\nBrisk Quay;\n",
    "travel.html": "<html><title>x</title><nav>menu</nav><h1>Travel <b>policy</b></h1>"
                   "<p>Go by <b>train</b>.</p><h2>Hotels</h2><ul><li>One</li><li>Two</li></ul>"
                   "<script>bad()</script></html>",
    "long.md": "word " * 250,
    "rules.md": "---\ntitle: 'Parking rules'\nowner: Bo\n---\nPark in\nrows.\n\n## No bicycles inside\n\n"
                "| Row | For |\n|---|---|\n| A | staff |\n| B | guests |\n",
    "canteen.md": "---\nThe canteen opens at eleven.\n\n---\nSoup.\n\nDoors\n=====\nThey close.\n",
    "insurance.html": "<title>Insurance</title><header>The insurer is Tryg.</header><p>Ask Bo.<p>Or Liv.",
    "empty.md": "",
    "empty.csv": "\n",
    "picture.png": "x",
    ".hidden/notes.md": "# Secret\n\nNo."}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "own/bad.txt").write_bytes(b"\xff\xfe\x00")
    return tmp_path / "own"


def test_documents_become_passages_under_their_headings(folder, tmp_path, capsys):
    corpus.main([str(folder), str(tmp_path / "corpus.jsonl")])
    rows = data.load_corpus(tmp_path / "corpus.jsonl")
    found = [(row["title"], row["text"]) for row in rows]
    assert [len(text.split()) for title, text in found if title == "long"] == [100, 100, 50]
    assert [pair for pair in found if pair[0] != "long"] == [
        ("Doors", "The canteen opens at eleven. Soup."),
        ("Doors", "They close."),
        ("Depots", "The Gorsley depot is run by Liv Hansen."),
        ("Handbook", "Hello there."),
        ("Handbook: Leave", "Ask Ann Lee. # no heading"),
        ("Insurance", "The insurer is Tryg. Ask Bo. Or Liv."),
        ("Parking rules", "Park in rows."),
        ("Parking rules: No bicycles inside", "Row: A. For: staff. Row: B. For: guests."),
        ("managers: Gorsley", "Depot: Gorsley. Manager: Liv Hansen. ext 22."),
        ("managers: Brisk Quay", "Depot: Brisk Quay."),
        ("Travel policy", "Go by train."),
        ("Travel policy: Hotels", "One Two")]
    said = capsys.readouterr().out
    assert "15 passages" in said and "1 hidden" in said and "1 .png" in said
    assert "2 empty (empty.csv, empty.md)" in said
    assert "1 not in UTF-8" in said and "(bad.txt)" in said
    assert {row["source"] for row in files.read_jsonl(tmp_path / "corpus.jsonl")} >= {"sub/managers.csv"}


def test_what_cannot_be_made_is_one_line(folder, tmp_path, capsys):
    (tmp_path / "there.jsonl").write_text("")
    (tmp_path / "nothing").mkdir()
    for place, out, message in (
            (folder, "there.jsonl", "there.jsonl exists: nothing was written"),
            (folder, "a.csv", "a name that ends in .jsonl"),
            (tmp_path / "nowhere", "a.jsonl", "nowhere: no such folder"),
            (tmp_path / "nothing", "a.jsonl", "no passage in its 0 files")):
        with pytest.raises(SystemExit) as ended:
            corpus.main([str(place), str(tmp_path / out)])
        assert message in f"{ended.value} {capsys.readouterr().err}"


def test_numbers_of_lists_and_tables_of_html_stay_and_html_is_no_markdown():
    assert corpus.sections_of_markdown("# Lease\n\n3. The tenant pays.\n4. Pets.\n\n- Doors")[1][1] == [
        "3. The tenant pays.", "4. Pets.", "Doors"]
    assert corpus.sections_of_markdown("1986. A great year.") == [("", ["1986. A great year."])]
    page = ("<title>x</title><h1>Set up</h1><pre># no heading\nport = 1\n---\nend</pre><p>1986. A *great* "
            "year.</p><ol start=3><li>Pay.</li><li>Go.</li></ol><h2>Staff</h2><table><tr><th>City</th>"
            "<th>Mayor</th></tr><tr><td>Bergen</td><td>Ann Lee</td></tr></table>")
    assert corpus.sections_of_html(page) == [
        ("", []), ("Set up", ["# no heading port = 1 --- end", "1986. A *great* year.", "3. Pay.", "4. Go."]),
        ("Staff", ["City: Bergen. Mayor: Ann Lee."])]


def test_a_text_without_blanks_becomes_passages_that_an_agent_reads_whole(tmp_path):
    (tmp_path / "own").mkdir()
    story = ["从前有一座山，山上有一座庙。" * 12 + str(i) for i in range(20)] + ["经理是张三。"]
    (tmp_path / "own/a.md").write_text("\n\n".join([*story, "语" * 2000]), encoding="utf-8")
    corpus.main([str(tmp_path / "own"), str(tmp_path / "c.jsonl")])
    texts = [row["text"] for row in data.load_corpus(tmp_path / "c.jsonl")]
    assert max(map(len, texts)) <= 900 and min(map(len, texts[:-1])) > 400
    assert any("经理是张三。" in text for text in texts)
    assert sum(text.count("语") for text in texts) == 2000
