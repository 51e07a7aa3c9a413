"""docs/statecharts says what the tables say, and ``transitions`` itself would draw the same."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from transitions.extensions import GraphMachine

from kvpush.lifecycle import ENGINE, LIFECYCLES
from kvpush.statecharts import BEGIN, COMMAND, DEFAULT_DIRECTORY, END, Picture, generated_block, main, mermaid

by_table = pytest.mark.parametrize("table", LIFECYCLES, ids=lambda table: table.name)


@by_table
def test_page_and_picture_are_current(table):
    for suffix in ("md", "svg"):
        assert (DEFAULT_DIRECTORY / f"{table.name}.{suffix}").exists(), f"run: {COMMAND}"
    assert generated_block(table) in (DEFAULT_DIRECTORY / f"{table.name}.md").read_text(), f"run: {COMMAND}"
    assert (DEFAULT_DIRECTORY / f"{table.name}.svg").read_text() == Picture(table).svg(), f"run: {COMMAND}"


def test_check_agrees(capsys):
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == "all statecharts are current\n"


# --- what is drawn ---------------------------------------------------------------------------------------------------


def our_edges(table):
    """(source, trigger, dest) out of our own Mermaid text; the notes hold the internal rows."""
    text = mermaid(table)
    found = set(re.findall(r"^    (\w+) --> (\w+): (\w+)$", text, re.M))
    edges = {(source, trigger, dest) for source, dest, trigger in found}
    for state, triggers in re.findall(r"note right of (\w+)\n +stays: (.+)\n", text):
        edges |= {(state, trigger, state) for trigger in triggers.split(", ")}
    return edges


def edges_that_transitions_draws(table):
    rows = [{"trigger": row.trigger.value, "source": list(row.sources), "dest": row.dest} for row in table.rows]
    model = type("Model", (), {})()
    machine = GraphMachine(
        model, states=list(table.states), initial=table.initial, transitions=rows, auto_transitions=False,
        graph_engine="mermaid", title="title: lifecycle",
    )  # fmt: skip
    edges = set()
    for source, dest, labels in re.findall(r"^ *(\w+) --> (\w+): (.+)$", machine.get_graph().draw(None), re.M):
        edges |= {(source, label.removesuffix(" [internal]"), dest) for label in labels.split(" | ")}
    return edges


@by_table
def test_transitions_would_draw_the_same_edges(table):
    assert our_edges(table) == edges_that_transitions_draws(table)


@by_table
def test_the_diagram_begins_and_ends_where_the_table_does(table):
    text = mermaid(table)
    assert re.findall(r"^    \[\*\] --> (\w+)$", text, re.M) == [table.initial.value]
    assert set(re.findall(r"^    (\w+) --> \[\*\]$", text, re.M)) == {state.value for state in table.final}


def cells(table):
    """The From/To table, read back: (source, dest) -> text."""
    block = generated_block(table)
    lines = [line for line in block.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in lines[0].strip("|").split("|")][1:]
    assert len(lines) == len(columns) + 2
    for line in lines[2:]:
        name, *row = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(row) == len(columns), f"a cell of {name} holds a bar"
        yield from (((name.strip("*"), column), cell) for column, cell in zip(columns, row, strict=True))


@by_table
def test_every_cell_names_its_triggers_and_their_reasons_and_blank_is_forbidden(table):
    read_back = set()
    for (source, dest), cell in cells(table):
        for way in filter(None, cell.split("<br>")):
            trigger, _, why = re.fullmatch(r"`(\w+)`( \(stays\))?: (.+)", way).groups()
            read_back.add((source, trigger, dest, why))
    expected = {
        (state.value, row.trigger.value, (row.dest or state).value, row.why)
        for row in table.rows
        for state in row.sources
    }
    assert read_back == expected


@by_table
def test_the_picture_is_well_formed_and_holds_every_state_and_trigger(table):
    root = ET.fromstring(Picture(table).svg())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for state in table.states:
        assert texts.count(state.value) == 1
    for row in table.rows:
        label = f"{row.trigger.value} (stays)" if row.dest is None else row.trigger.value
        assert texts.count(label) >= len(row.sources)
    assert len(texts) == len(table.states) + sum(len(row.sources) for row in table.rows)


@by_table
def test_the_picture_stays_inside_its_frame(table):
    root = ET.fromstring(Picture(table).svg())
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        for name, bound in (("x", width), ("cx", width), ("x2", width), ("y", height), ("cy", height), ("y2", height)):
            assert 0 <= float(element.get(name, 0)) <= bound


@by_table
def test_generation_is_deterministic(table):
    assert Picture(table).svg() == Picture(table).svg()
    assert generated_block(table) == generated_block(table)


# --- prose -----------------------------------------------------------------------------------------------------------


@by_table
def test_the_prose_speaks_of_every_state_and_trigger(table):
    text = (DEFAULT_DIRECTORY / f"{table.name}.md").read_text()
    prose = text[: text.index(BEGIN)] + text[text.index(END) :]
    for name in (*table.states, *table.triggers):
        assert f"`{name.value}`" in prose, f"{table.name}.md does not explain {name.value}"


def test_the_index_links_every_page_and_picture():
    index = (DEFAULT_DIRECTORY / "README.md").read_text()
    for path in DEFAULT_DIRECTORY.iterdir():
        if path.name != "README.md":
            assert f"({path.name})" in index


def test_links_of_the_pages_lead_somewhere():
    for path in DEFAULT_DIRECTORY.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (DEFAULT_DIRECTORY / target).exists(), f"{path.name} links to {target}"


# --- the command -----------------------------------------------------------------------------------------------------


def test_write_makes_what_check_wants(tmp_path, capsys):
    empty, charts = tmp_path / "empty", tmp_path / "charts"
    empty.mkdir()
    assert main(["--check", "--directory", str(empty)]) == 1
    complaint = capsys.readouterr().err
    assert f"{empty / 'engine.md'} is stale; run: {COMMAND}" in complaint
    assert len(complaint.splitlines()) == 2 * len(LIFECYCLES)
    assert main(["--check", "--directory", str(charts)]) == 2  # nothing to check is not the same as stale pages
    assert f"{charts} is not there" in capsys.readouterr().err
    assert main(["--write", "--directory", str(charts)]) == 0
    assert main(["--check", "--directory", str(charts)]) == 0
    assert main(["--write", "--directory", str(charts)]) == 0
    assert capsys.readouterr().out.endswith("all statecharts are current\nall statecharts are current\n")


def test_write_leaves_the_prose_and_mends_the_rest(tmp_path):
    page = tmp_path / "engine.md"
    page.write_text(f"# By hand\n\nbefore\n\n{BEGIN}\nwrong\n{END}\n\nafter\n")
    assert main(["--check", "--directory", str(tmp_path)]) == 1
    assert main(["--write", "--directory", str(tmp_path)]) == 0
    assert page.read_text() == f"# By hand\n\nbefore\n\n{generated_block(ENGINE)}\n\nafter\n"


@pytest.mark.parametrize("text", ["# no markers\n", f"{BEGIN}\n", f"{END}\n{BEGIN}\n"])
def test_a_page_without_its_markers_is_refused_and_kept(tmp_path, capsys, text):
    page = tmp_path / "push.md"
    page.write_text(text)
    for mode in ("--write", "--check"):
        assert main([mode, "--directory", str(tmp_path)]) == 1
        assert str(page) in capsys.readouterr().err
    assert page.read_text() == text
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("suffix", ["md", "svg"])
def test_check_names_the_one_file_that_is_stale(tmp_path, capsys, suffix):
    assert main(["--write", "--directory", str(tmp_path)]) == 0
    path = Path(tmp_path) / f"receive.{suffix}"
    path.write_text(path.read_text().replace("holding", "keeping"))
    capsys.readouterr()
    assert main(["--check", "--directory", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{path} is stale; run: {COMMAND}\n"


def test_one_mode_must_be_chosen(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--write" in capsys.readouterr().err
