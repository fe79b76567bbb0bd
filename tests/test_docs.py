"""The table in docs/tools.md names the test of each line: those tests are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
FILES = {path.name: path for path in TESTS.rglob("test_*.py")}
TABLE = (TESTS.parent / "docs" / "tools.md").read_text().partition("\n## ")[0]


def test_every_test_that_the_table_names_is_there():
    named = 0
    for line in TABLE.splitlines():
        file = None
        for in_file, name in re.findall(r"`(\w+\.py)?::(\w+)`", line):
            file = in_file or file  # a name without a file is of the file before it
            assert f"def {name}(" in FILES[file].read_text(), f"{file} has no {name}"
            named += 1
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert named >= len(rows)
    assert all(re.search(r"`(\w+\.py)::\w+`", row) for row in rows)
