"""One table in four forms."""

import html
import io
import json
import re
import sys

import numpy as np
import pytest
from record_helpers import MIXTURE, catalog_record, config, curve, record

from mixnorm_lab.reports.model import groups
from mixnorm_lab.reports.tables import results
from mixnorm_lab.tables import Column, Measured, Table, text_column, wrapped

TABLE = Table(
    "A <title>",
    [text_column("run", "run"), Column("x", "x", digits=1, unit="%", missing="never"), Column("empty", "empty")],
    [
        {"run": "<b>a|b</b> & *c*", "x": Measured(1234.56, 0.04, n=2, of=3, paper=5.0)},
        {"run": "none", "x": Measured(None, n=0, of=3, paper="never")},
        {"run": "-0", "x": -0.04},
    ],
    ["a <note>"],
)


def test_cells():
    column = TABLE.columns[1]
    assert [column.text(row["x"]) for row in TABLE.rows] == ["1,234.6 ± 0.0% in 2 of 3", "never", "0.0%"]
    assert [column.paper(row["x"]) for row in TABLE.rows] == ["paper 5.0%", "paper never", ""]
    assert column.beside(Measured(6.0, n=3, of=3, paper=5.0)) == "paper 5.0%, +1.0"
    assert column.beside(TABLE.rows[0]["x"]) == "paper 5.0%"  # two of three runs are not what the paper tells of
    assert column.text(-12.34) == "−12.3%"
    assert Measured.over([1.0, None, 3.0]) == Measured(2.0, pytest.approx(np.sqrt(2)), 2, 3)


def test_html_table_escapes_and_has_every_cell():
    text = TABLE.html()
    assert "<b>" not in text
    assert "<note>" not in text
    assert html.escape("<b>a|b</b> & *c*") in text
    assert text.count("<tr>") == 4
    assert "paper 5.0%" in text


def test_markdown_table_has_equal_columns_whatever_the_names():
    lines = TABLE.markdown().splitlines()[:5]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {4}
    assert r"\<b\>a\|b\</b\> \& \*c\*" in lines[2]


def test_json_keeps_numbers():
    found = json.loads(json.dumps(TABLE.json()))
    assert found["rows"][0]["x"] == {"mean": 1234.56, "deviation": 0.04, "n": 2, "of": 3, "paper": 5.0}
    assert found["columns"]["x"] == "x"


def test_rich_table_fits_eighty_columns():
    console = pytest.importorskip("rich.console").Console(width=80, file=sys.stdout, record=True)
    made = [catalog_record(f"cifar-cnn/cifar100/{kind}", seed=seed) for kind in ("bn-2", "mn-2") for seed in (0, 1)]
    [family] = groups.families(made)
    console.print(results.by_quarters(family).rich())
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "paper 59.04" in text
    console.print(TABLE.rich())
    assert "<b>a|b</b>" in console.export_text()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_names_and_numbers_stay_in_one_piece_in_a_terminal(width):
    console = pytest.importorskip("rich.console").Console(width=width, file=io.StringIO(), record=True)
    names = ("batch-norm", "mixture-norm")
    made = [record(config(name, 20, seed, MIXTURE if name == names[1] else None), curve(20, 0.9, 0.1 + seed / 20, 8, 0, 0))
            for name in names for seed in (0, 1)]  # fmt: skip
    [family] = groups.families(made)
    shown = results.by_quarters(family), results.ends(family).without("average", "unsteady")
    for table in shown[: 2 if width >= 80 else 1]:
        console.print(table.rich(width))
        text = console.export_text()
        assert all(len(line) <= width for line in text.splitlines())
        for column in table.columns:
            assert all(word in text for word in column.heading.split())
        for row in table.rows:
            assert row["run"] in text
            for column in table.columns:
                if column.numeric:
                    number = column.text(row.get(column.key)).replace(" ± ", "±").split(" in ")
                    lines = r"(?=±)|(?<=,) |(?= \[)" if width < 100 else r"(?= \[)|(?<=\],) "
                    parts = [part.strip() for piece in number for part in re.split(lines, piece)]
                    assert all(part.rstrip(",") in text for part in parts)


def test_nothing_is_cut_off_in_a_terminal_that_is_too_narrow_for_anything():
    console = pytest.importorskip("rich.console").Console(width=24, file=io.StringIO(), record=True)
    console.print(Table("", TABLE.columns[:2], TABLE.rows).rich(24))
    text = "".join(console.export_text().split())
    assert all(part in text for part in ("1,234.6", "±0.0%", "in2of3", "paper5.0%"))


def test_columns_without_a_cell_are_left_out():
    assert [column.key for column in TABLE.used().columns] == ["run", "x"]


def shown(table, width):
    console = pytest.importorskip("rich.console").Console(width=width, file=io.StringIO(), record=True)
    console.print(table.rich(width))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    return text


LONG = "forms/cifar100/all-layers-steady-history-40 (average: 0.9)"


def test_long_names_break_where_their_parts_end():
    columns = [
        text_column("run", "run"),
        *(Column(str(i), f"heading {i}") for i in range(4)),
        text_column("what", "what it is"),
    ]
    row = {
        "run": LONG,
        **{str(i): Measured(12.34, 0.56, n=3, of=3) for i in range(4)},
        "what": "conv1 + conv2 + conv3, K 3, EM 2",
    }
    lines = shown(Table("A title", columns, [row]), 80).splitlines()
    names = [line[:25].split("  ")[0].strip() for line in lines[lines.index(next(x for x in lines if "─" in x)) + 1 :]]
    assert [name for name in names if name] == ["forms/cifar100/all-", "layers-steady-history-40", "(average: 0.9)"]
    text = shown(Table("A title", columns, [row]), 200)
    assert LONG in text  # in one piece where there is room
    assert "12.34±0.56" in text


def test_wrapped_names_lose_nothing():
    for name in (LONG, "mixture-norm, num_components=5, inference=steady", "x" * 60, "", "a b"):
        for width in (8, 16, 24):
            lines = wrapped(name, width).split("\n")
            assert "".join("".join(lines).split()) == "".join(name.split())
            assert all(len(line) <= width or not re.search(r"[\s\-/,_=]", line[:-1]) for line in lines)


def test_a_title_and_notes_use_the_width_of_the_terminal():
    title = "Steps to batch norm's best: cifar-cnn on cifar100, 100 epochs"
    note = "A note that is much longer than the two columns of the table are."
    text = shown(Table(title, [text_column("run", "run"), Column("x", "x")], [{"run": "a", "x": 1.0}], [note]), 80)
    assert title in text
    assert note in text


def test_a_page_has_what_its_style_needs():
    few = Table("few", [Column(str(i), f"<{i}>") for i in range(5)], [{"0": 1.0}])
    assert '<div class="box few" role="region"' in few.html()
    assert '<p class="more"' in few.html()
    assert 'data-label="&lt;1&gt;"' in few.html()
    many = Table("many", few.columns, [{"0": 1.0}] * 7)
    two = Table("two", few.columns[:2], few.rows)
    assert all('<div class="box" role="region"' in table.html() for table in (many, two))
