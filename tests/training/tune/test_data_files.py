"""Sources of data: tables, several files, folders, patterns, weights and data sets of the hub."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets.exceptions import DatasetGenerationError

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import versions
from ktc.training.tune.data_sources import HubName, data_source
from ktc.training.tune.examples import read_training_data, stream_training_data
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.tokenised import weighted

ROWS = [{"prompt": "a, b?", "completion": 'yes\n"indeed"'}, {"prompt": "c?", "completion": ""}]
TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(name: str, content: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)
    return name


def written_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def parquet(name: str, rows: list[Any]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    return name


def refusals(*names: str, **settings: Any) -> list[Diagnostic]:
    with pytest.raises(InputRefused) as refused:
        read_training_data(names, **settings)
    return list(refused.value.diagnostics)


def said(*names: str) -> list[tuple[str, int, str]]:
    return [(row.file, row.line, row.turns[0].content) for row in read_training_data(names).examples]


def test_tables_have_the_rows_of_json() -> None:
    lines = written("a.jsonl", "\n".join(map(json.dumps, ROWS)))
    table = written("a.csv", 'prompt,completion\n\n"a, b?","yes\n""indeed"""\nc?,\n')
    tabs = written("a.tsv", 'prompt\tcompletion\na, b?\t"yes\n""indeed"""\nc?\t\n')
    plain = [row.turns for row in read_training_data(lines).examples]
    for name, places in ((table, [3, 5]), (tabs, [2, 4]), (parquet("a.parquet", ROWS), [1, 2])):
        data = read_training_data(name)
        assert [row.turns for row in data.examples] == plain
        assert [row.line for row in data.examples] == places


def test_columns_of_turns_are_read_from_both_kinds_of_tables() -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    rows = [{"messages": TURNS}, {"messages": [TURNS[0], call, {"role": "tool", "content": "4"}, TURNS[1]]}]
    table = written("a.csv", 'messages\n"' + json.dumps(TURNS).replace('"', '""') + '"\n')
    assert (
        read_training_data(table).examples[0].turns == read_training_data(parquet("a.parquet", rows)).examples[0].turns
    )
    assert [turn.role for turn in read_training_data("a.parquet").examples[1].turns] == [
        *("user", "assistant", "tool", "assistant")
    ]


TABLES = {
    "a row with too many values": ("prompt,completion\na,b,c\n", "T513", 2, "double quotes"),
    "an open quote": ('prompt,completion\na,"b\n', "T513", 2, "doubled"),
    "columns that are named twice": ("prompt,prompt\na,b\n", "T513", 1, ""),
    "columns between semicolons": ("prompt;completion\na;b\n", "T513", 1, "commas"),
    "unknown columns": ("question,answer\na,b\n", "T514", 2, "prompt: `prompt`, `completion`"),
}


@pytest.mark.parametrize("case", TABLES)
def test_faults_of_a_table_have_their_line(case: str) -> None:
    content, code, line, hint = TABLES[case]
    (found,) = refusals(written("a.csv", content))
    assert (found.code, found.span.line if found.span else None) == (code, line)
    assert hint in found.hint


def test_what_is_not_parquet_is_refused() -> None:
    assert refusals(written("a.parquet", "prompt,completion\na,b\n"))[0].code == "T513"
    assert refusals("none.parquet")[0].code == "T510"


def test_text_in_parquet_that_is_not_utf_8_has_its_row() -> None:
    texts = pyarrow.array([b"a", b"b", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), "texts.parquet")
    (found,) = refusals("texts.parquet")
    assert (found.code, str(found.span), "not UTF-8" in found.message) == ("T513", "texts.parquet:3:1", True)


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parquet("a.parquet", ROWS)
    monkeypatch.setattr(versions, "installed", lambda name: None)
    with pytest.raises(HostLacks, match=r"H230.*`pyarrow`"):
        read_training_data("a.parquet")


def test_a_number_beyond_reason_is_not_called_nested() -> None:
    (found,) = refusals(written("a.jsonl", '{"text": ' + "1" * 5000 + "}"))
    assert (found.code, "nested" in found.message) == ("T513", False)


def test_files_folders_and_patterns_are_read_in_order() -> None:
    for name in ("data/b.jsonl", "data/a.jsonl", "data/in/c.jsonl", "data/.hidden/d.jsonl", "other/e.jsonl"):
        written(name, json.dumps({"text": f"row of {name}"}))
    written("data/README.md", "# not data")
    folder = [(f"data/{name}", 1, f"row of data/{name}") for name in ("a.jsonl", "b.jsonl", "in/c.jsonl")]
    assert said("data") == said("data/**/*.jsonl") == folder
    assert said("data/*.jsonl") == folder[:2]
    assert said("other/e.jsonl", "data/a.jsonl") == [("other/e.jsonl", 1, "row of other/e.jsonl"), folder[0]]


def test_faults_of_several_files_are_told_together() -> None:
    written("data/a.jsonl", '{"text": 3}\n{"text": "b"}\n{"text": 4}')
    written("data/b.jsonl", '{"text": 5}')
    places = [str(fault.span) for fault in refusals("data")]
    assert places == ["data/a.jsonl:1:1", "data/a.jsonl:3:1", "data/b.jsonl:1:1"]


NO_SOURCES = {
    "a folder without data": ("empty", "T545", "name a folder with data"),
    "a folder of several kinds": ("mixed", "T545", "`mixed/**/*.csv`"),
    "a pattern without files": ("mixed/*.parquet", "T545", "`mixed` has `a.csv`, `answers.jsonl`, `b.jsonl`"),
    "a part of a split": ("owner/name:train[:10%]", "T546", "`owner/name:CONFIG/SPLIT`"),
    "a weight beyond reason": ("mixed/b.jsonl:1001", "T545", "at most 1000"),
    "a weight of zero": ("mixed/b.jsonl:0", "T545", "leave the source out"),
    "a name that is nearly right": ("mixed/anwsers.jsonl", "T510", "did you mean `mixed/answers.jsonl`?"),
    "a name with another ending": ("mixed/answers.json", "T510", "did you mean `mixed/answers.jsonl`?"),
    "an unknown ending": ("mixed/b.yaml", "T510", "`capitals`"),
}


@pytest.mark.parametrize("case", NO_SOURCES)
def test_what_names_no_data_is_refused_with_what_is_there(case: str) -> None:
    Path("empty").mkdir()
    written("mixed/b.jsonl", "{}")
    written("mixed/a.csv", "a")
    written("mixed/answers.jsonl", "{}")
    named, code, hint = NO_SOURCES[case]
    (found,) = refusals(named)
    assert found.code == code
    assert hint in found.hint


def test_a_name_that_is_like_no_other_but_for_its_ending_has_no_hint() -> None:
    written("pairs.jsonl", "{}")
    written("tables.jsonl", "{}")
    (found,) = refusals("train.jsonl")
    assert (found.code, found.hint) == ("T510", "")


def test_a_weight_follows_a_name() -> None:
    assert (data_source("capitals:0.5").weight, data_source("capitals").weight) == (0.5, 1.0)
    written("odd:2", "")
    assert data_source("odd:2").files == (Path("odd:2"),)
    assert data_source("odd:2:3").weight == 3


def test_rows_appear_as_often_as_the_weight_of_their_source_says() -> None:
    sources = [0] * 10 + [1] * 4
    counts = Counter(weighted(sources, [0.5, 2.25], seed=1))
    assert sum(counts[number] for number in range(10)) == 5
    assert sorted(counts[number] for number in range(10, 14)) == [2, 2, 2, 3]
    assert weighted(sources, [0.5, 2.25], seed=1) == weighted(sources, [0.5, 2.25], seed=1)
    assert weighted(sources, [0.5, 2.25], seed=1) != weighted(sources, [0.5, 2.25], seed=2)
    assert list(weighted(sources, [1, 1], seed=1)) == list(range(14))
    assert len(weighted(sources, [1e-9, 1], seed=1)) == 5


# The hub -------------------------------------------------------------------------------------------------------------
def test_a_name_of_the_hub_may_have_a_configuration_a_split_and_a_weight() -> None:
    assert data_source("owner/name").hub == HubName("owner/name", None, "train")
    assert data_source("owner/name:test").hub == HubName("owner/name", None, "test")
    source = data_source("owner/name:main/test:0.5")
    assert (source.hub, source.weight) == (HubName("owner/name", "main", "test"), 0.5)
    Path("owner").mkdir()
    assert data_source("owner/name").hub is None  # a path that is mistyped


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace what asks the hub; `rows` are those of its only data set, an exception is raised."""
    answers: dict[str, Any] = {"info": None, "rows": None}

    def answer(name: str) -> Any:
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=lambda *_, **__: answer("info")))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: answer("rows"))
    return answers


def test_a_data_set_of_the_hub_is_read_as_a_file(hub: dict[str, Any]) -> None:
    hub["rows"] = [{"prompt": "a", "completion": "b", "system": None}, {"prompt": 3, "completion": "b"}]
    (found,) = refusals("owner/name")
    assert (found.code, str(found.span)) == ("T515", "owner/name:2:1")
    hub["rows"] = hub["rows"][:1]
    data = read_training_data("owner/name:0.5")
    assert (data.file, data.format, data.sources[0].digests) == ("owner/name", "prompt", {})


def _breaking() -> Iterator[Any]:
    yield {"prompt": "a", "completion": "b"}
    raise DatasetGenerationError("it breaks")


def test_without_the_hub_a_message_says_what_else_to_do(hub: dict[str, Any]) -> None:
    hub["info"] = ConnectionError("no network")
    (found,) = refusals("owner/name")
    assert (found.code, "cannot be fetched" in found.message) == ("T546", True)
    assert "--data 'folder/*.parquet'" in found.hint
    hub["info"], hub["rows"] = None, _breaking()
    (found,) = refusals("owner/name")
    assert (found.code, "it breaks" in found.message) == ("T546", True)
    hub["rows"] = ValueError("Unknown split 'train'")
    (found,) = refusals("owner/name")
    assert "Unknown split" in found.message
    assert "owner/name:CONFIG/SPLIT" in found.hint


@pytest.fixture
def cached_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set in the cache of `datasets`, as an earlier download leaves it, on a machine without a network."""
    import datasets
    import huggingface_hub.constants

    written_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "system": None}])
    builder = datasets.load_dataset_builder(
        "json", data_files={"train": str(tmp_path / "rows.jsonl")}, cache_dir=str(tmp_path / "built")
    )
    builder.download_and_prepare()
    folder = tmp_path / "datasets" / "owner___name" / "default" / "0.0.0" / ("0" * 40)
    shutil.copytree(builder.cache_dir, folder)
    (folder / "json-train.arrow").rename(folder / "name-train.arrow")
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    named = {**info, "dataset_name": "name", "config_name": "default"}
    (folder / "dataset_info.json").write_text(json.dumps(named), encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    return "owner/name"


def test_without_a_network_a_data_set_is_read_from_the_cache_of_datasets(cached_set: str) -> None:
    data = read_training_data(cached_set)
    assert (data.file, data.format, len(data.examples)) == ("owner/name", "prompt", 1)
    (found,) = refusals(f"{cached_set}:test")
    assert (found.code, "test" in found.message) == ("T546", True)
    (found,) = refusals("owner/other")
    assert (found.code, "cannot be fetched" in found.message) == ("T546", True)


# Columns -------------------------------------------------------------------------------------------------------------
def test_columns_of_other_names_are_taken_in_every_kind_of_file(tmp_path: Path) -> None:
    columns = ("prompt=question", "completion=reply")
    written_rows(tmp_path / "a.jsonl", [{"question": "2 + 2?", "reply": "4", "prompt": "other", "id": 1}])
    (tmp_path / "b.csv").write_text("question,reply\n2 + 2?,4\n", encoding="utf-8")
    for name in ("a.jsonl", "b.csv"):
        for data in (
            read_training_data(tmp_path / name, columns=columns),
            stream_training_data([str(tmp_path / name)], columns=columns),
        ):
            (example,) = data.examples
            assert (data.format, [turn.content for turn in example.turns]) == ("prompt", ["2 + 2?", "4"])


def test_a_row_without_the_column_is_refused_by_its_line_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written_rows(path, [{"question": "a", "reply": "b"}, {"questoin": "a", "reply": "b"}])
    with pytest.raises(InputRefused) as refused:
        read_training_data(path, columns=("prompt=question", "completion=reply"))
    (found,) = refused.value.diagnostics
    assert (found.code, str(found.span)) == ("T514", f"{path}:2:1")
    assert "no column `question`" in found.message and "did you mean `questoin`?" in found.hint


def test_a_column_that_no_row_has_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written_rows(path, [{"prompt": "a", "completion": "b"}] * 5)
    with pytest.raises(InputRefused) as refused:
        read_training_data(path, columns=("prompt=question",))
    (found,) = refused.value.diagnostics
    assert (found.code, str(found.span)) == ("T514", f"{path}:1:1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prompt",), "is NAME=COLUMN"),
        (("prompt=a", "prompt=b"), "gives `prompt` twice"),
        (("prompt=a", "completion=a"), "gives `a` twice"),
    ],
)
def test_columns_that_are_no_mapping_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputRefused, match=message):
        TrainSettings(column=words)


def test_a_name_that_no_format_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="did you mean `prompt`"):
        read_training_data(tmp_path / "a.jsonl", columns=("promt=question",))
