"""Records of every common form are text; tables have columns; what is asked for and is not there is an error."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import folder_of, read

from andrea.config import UserError
from andrea.text import formats
from andrea.text.formats import DAMAGED_REST, values_of_array

SHAREGPT = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}]}
CONVERSATION = "user: Hello\n\nassistant: Good day\n"
FORMS = [
    ({"text": "plain", "messages": []}, "plain"),
    (SHAREGPT, CONVERSATION),
    ({"conversation": [{"role": "user", "content": "Hello"}, {"role": "model", "content": "Good day"}]}, CONVERSATION),
    ({"instruction": "Hello", "input": "", "output": "Good day"}, CONVERSATION),
    ({"instruction": "Add", "input": "1, 2", "output": "3"}, "user: Add\n\n1, 2\n\nassistant: 3\n"),
    ({"instruction": "Add", "context": "1, 2", "response": "3"}, "user: Add\n\n1, 2\n\nassistant: 3\n"),
    ({"system_prompt": "Be kind", "question": "a", "response": "b"}, "system: Be kind\n\nuser: a\n\nassistant: b\n"),
    ({"prompt": "The sky is", "completion": " blue."}, "The sky is blue."),
    ({"prompt": "Hello", "response": "Good day"}, CONVERSATION),
    ({"question": "Hello", "answer": "Good day"}, CONVERSATION),
    ({"input": "Hello", "output": "Good day"}, CONVERSATION),
    (
        {
            "prompt": [{"role": "user", "content": "Hello"}],
            "completion": [{"role": "assistant", "content": "Good day"}],
        },
        CONVERSATION,
    ),
]


@pytest.mark.parametrize(("record", "text"), FORMS)
def test_a_record_of_a_common_form_is_read_from_every_kind_of_file(tmp_path: Path, record: dict, text: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "b.json").write_text(json.dumps([record, record], indent=1))
    (tmp_path / "lines.json").write_text(f"{json.dumps(record)}\n" * 2)  # as many published files are
    documents, said = read(tmp_path)
    assert documents == [text] * 5
    assert "text" in record or any(line.startswith("the text of 5 records is ") for line in said)
    if all(isinstance(value, str) for value in record.values()):
        table = io.StringIO()
        writer = csv.writer(table)
        writer.writerows([record.keys(), record.values()])
        (tmp_path / "c.csv").write_text(table.getvalue())
        assert read(tmp_path / "c.csv")[0] == [text]


def test_records_in_parquet_have_the_same_forms(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    for number, (record, text) in enumerate(FORMS[1:]):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
        assert read(path)[0] == [text]


def test_parquet_whose_text_is_not_utf_8_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([b"one", b"tw\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("text")
    documents, said = read(tmp_path)
    assert documents[-1] == "text" and "left out 1 (unreadable parquet): a.parquet" in said


def test_parquet_that_has_no_text_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    twice = pyarrow.Table.from_arrays([["one"], ["two"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2], "n": [3, 4]}), tmp_path / "numbers.parquet")
    (tmp_path / "a.txt").write_text("text")
    documents, said = read(tmp_path)
    assert documents == ["text"]
    assert 'left out 1 (with several columns named "text"): twice.parquet' in said
    assert 'left out 2 (the field "text" is not text): numbers.parquet#0, numbers.parquet#1' in said


TABLE = 'id;title;body\n1;"One; two";first\n2;"Three\nlines ""quoted""";second\n\n3;short\n4;"é";fourth\n'


def test_a_table_has_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TABLE.encode("utf-8-sig").replace(b"\n", b"\r\n"))
    documents, said = read(tmp_path, field="title")
    assert documents == ["One; two", 'Three\r\nlines "quoted"', "é"]
    assert "left out 1 (rows that do not have the header's columns): a.csv#2" in said
    assert "the text of 3 records is title" in said
    whole, said = read(tmp_path)
    assert whole == [TABLE.replace("\n", "\r\n")]
    assert "read 1 tables as they stand: a.csv (fields found: id, title, body; choose one with data.field=…)" in said


def test_quotes_in_a_table_with_tabs_are_quotes_only_if_they_match(tmp_path: Path) -> None:
    lines = ["title\tn", '"To be" he said\t1', '"not closed\t2', "third\t3"]
    (tmp_path / "plain.tsv").write_text("\n".join(lines) + "\n")
    assert read(tmp_path / "plain.tsv", field="title")[0] == ['"To be" he said', '"not closed', "third"]
    (tmp_path / "quoted.tsv").write_text('title\tn\n"a\tb"\t1\n')
    assert read(tmp_path / "quoted.tsv", field="title")[0] == ["a\tb"]


def test_a_quote_that_is_not_closed_is_named_with_the_lines_that_it_swallows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('title,n\ngood,1\n"open,2\nthird,3\nfourth,4\n')
    documents, said = read(tmp_path, field="title")
    assert documents == ["good"]
    assert "left out 1 (rows that do not have the header's columns): a.csv#1 (lines 3 to 5)" in said


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(*[st.text(st.characters(exclude_characters="\0\ufeff", exclude_categories=["Cs"]), max_size=9)] * 3),
        min_size=1,
    ),
    delimiter=st.sampled_from(",;\t|"),
)
def test_every_row_that_csv_writes_is_read_back(tmp_path_factory, rows: list, delimiter: str) -> None:
    path = tmp_path_factory.mktemp("table") / "a.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("one", "two", "three"), *rows])
    expected = [row[1] for row in rows if row[1]]
    if expected:
        assert read(path, field="two")[0] == expected


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json", "a.jsonl"])
def test_a_field_that_no_file_has_is_an_error(tmp_path: Path, name: str) -> None:
    content = {"a.txt": "just text", "a.csv": "id,name\n1,x\n", "a.json": '[{"id": 1}]', "a.jsonl": '{"id": 1}\n'}[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="title"):
        read(tmp_path, field="title")


def test_a_list_of_records_of_an_unknown_form_is_read_as_it_stands_and_named(tmp_path: Path) -> None:
    files = {
        "a.json": '[{"id": 1}, {"id": 2}]',
        "b.json": '{"text": "x"}',
        "c.json": "[1, 2]",
        "d.json": '{"id": 1}\n{"id": 2}\n',
    }
    documents, said = read(folder_of(tmp_path, {name: text.encode() for name, text in files.items()}))
    assert documents == list(files.values())
    assert (
        "read 2 lists of records as they stand: a.json, d.json (fields found: id; choose one with data.field=…)" in said
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_without_a_record_is_refused_in_whole_words(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text({"a.jsonl": "\n\n", "a.csv": "text,n\n"}[name])
    with pytest.raises(UserError, match="holds no usable text; name other files"):
        read(tmp_path)


def test_what_follows_a_list_of_records_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a.json": b'[{"text": "one"}]\n[{"text": "two"}]\n', "b.json": b'[{"text": "three"}]\n\n'})
    documents, said = read(tmp_path)
    assert documents == ["one", "three"] and "left out 1 (the rest of a damaged list of records): a.json#1" in said


def test_compressed_records_need_no_ending_of_their_own(tmp_path: Path) -> None:
    content = gzip.compress(b'{"text": "one"}\n{"text": "two"}\n')
    folder_of(tmp_path, dict.fromkeys(("a.jsonl", "b.jsonl.gz", "c.JSON.gz"), content))
    assert read(tmp_path)[0] == ["one", "two"] * 3


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(
        st.recursive(
            st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
        )
    ),
    piece=st.integers(1, 40),
    cut=st.integers(0, 30),
)
def test_a_json_array_is_read_in_pieces_of_any_size(values: list, piece: int, cut: int) -> None:
    content = json.dumps(values, indent=cut % 3 or None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "PIECE_BYTES", piece)
        assert list(values_of_array(lambda: io.BytesIO(content))) == values
        if 0 < cut < len(content) - 1:  # cut short: what is whole is read
            *whole, last = values_of_array(lambda: io.BytesIO(content[:-cut]))
            assert last == DAMAGED_REST and whole == values[: len(whole)]
