"""Readers of our own and of other distributions, which are asked where none of ours is certain.

And the page about formats, and files beside a checkpoint, shown in few words.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckptkit
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import InputError, MissingFileError, NotACheckpointError
from ckptkit.formats.base import FormatReader
from ckptkit.formats.registry import READERS, FileGroup, group_files, load_installed, recognise

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "fixtures"
EXAMPLE = (ROOT / "examples" / "reader_plugin" / "npy_rows.py").read_text(encoding="utf-8")
WORKING = "class Reader:\n    name = 'theirs'\n    def find(self, paths): {find}\n"
Installing = Callable[..., None]


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    load_installed.cache_clear()
    yield
    load_installed.cache_clear()


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str, str], None]]:
    """Lays a distribution with one reader where Python looks for them."""
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    modules: list[str] = []

    def lay(distribution: str, code: str, target: str = "Reader") -> None:
        module = distribution.replace("-", "_")
        modules.append(module)
        (place / f"{module}.py").write_text(code, encoding="utf-8")
        facts = place / f"{module}-1.5.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.5\n")
        declared = f"[ckptkit.readers]\nsomething = {module}:{target}\n"
        (facts / "entry_points.txt").write_text(declared)

    yield lay
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A checkpoint in the format of the example: two ranks' rows."""
    folder = tmp_path / "rows"
    folder.mkdir()
    np.save(folder / "up.weight.0-of-2.npy", np.arange(6, dtype="float32").reshape(2, 3))
    np.save(folder / "up.weight.1-of-2.npy", np.full((1, 3), 7, "float32"))
    np.save(folder / "scale.0-of-1.npy", np.array([2], "int64"))
    return folder


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """A file that our readers are not certain of, though they read it."""
    folder = tmp_path / "loose"
    folder.mkdir()
    shutil.copy(ROOT / "fixtures/torch_nested/checkpoint/last.pt", folder / "last.pt")
    return folder


def test_the_example_reads_what_ckptkit_alone_does_not(
    rows: Path, tmp_path: Path, install: Installing
) -> None:
    with pytest.raises(NotACheckpointError):
        ckptkit.inspect(rows)
    load_installed.cache_clear()
    install("npy-rows", EXAMPLE, "NpyRowsReader")
    ckptkit.consolidate(rows, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["up.weight"].tolist() == [[0, 1, 2], [3, 4, 5], [7, 7, 7]]
    assert found["scale"].tolist() == [2]
    report = ckptkit.inspect(rows)
    assert (report.format, report.world_size) == ("npy-rows", 2)
    assert report.reasons == ("3 '.npy' files",)


def test_the_example_misses_a_rank_and_damage(rows: Path, install: Installing) -> None:
    install("npy-rows", EXAMPLE, "NpyRowsReader")
    whole = (rows / "up.weight.0-of-2.npy").read_bytes()
    (rows / "up.weight.0-of-2.npy").unlink()
    with pytest.raises(MissingFileError, match="1 ranks against 2"):
        ckptkit.inspect(rows)
    for damaged in (whole[:40], whole[:-4], b"", whole.replace(b"(2, 3)", b"(9, 3)")):
        (rows / "up.weight.0-of-2.npy").write_bytes(damaged)
        with pytest.raises(InputError):
            ckptkit.consolidate(rows, rows.parent / "out")


def test_readers_of_others_are_not_looked_for_where_ours_are_certain(install: Installing) -> None:
    install("theirs", "raise SystemError('loaded')")
    for case in ("fsdp2_plain", "zero3_bf16", "hf_sharded", "torch_bin_tied"):
        assert not ckptkit.inspect(ROOT / "fixtures" / case / "checkpoint").notes
    assert load_installed.cache_info().currsize == 0


def test_readers_of_others_come_before_files_of_any_name(install: Installing) -> None:
    code = "from ckptkit.readers import Candidate\n" + WORKING.format(
        find="return [Candidate('any', '', tuple(paths), 'all of it')]"
    )
    install("greedy", f"{code}    def read_index(self, source, candidate): ...\n")
    assert [candidate.format for candidate in recognise(["last.pt"])] == ["theirs"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_module_that_is_nowhere", "ModuleNotFoundError: No module named"),
        ("raise SystemError('on  two\\nlines.')", "SystemError: on two lines"),
        ("Reader = 5", "has no method 'find'"),
        ("class Reader:\n    def __init__(self, given): ...", "TypeError: "),
        ("class Other: ...", "has no attribute 'Reader'"),
        (
            "class Reader:\n    name = 'dcp'\n    find = read_index = print",
            "'dcp' is the name of a format that ckptkit reads itself",
        ),
        (
            "class Reader:\n    name = 'A b'\n    find = read_index = print",
            "its name 'A b' is not one of",
        ),
        (
            f"{WORKING.format(find='return 1 / 0')}    read_index = print",
            "looking for checkpoints, it failed: ZeroDivisionError: division by zero",
        ),
        (f"{WORKING.format(find='return [5]')}    read_index = print", "int is no Candidate"),
        (
            "from ckptkit.readers import Candidate\n"
            + WORKING.format(find="return [Candidate('x', '', ('/etc/passwd',), '')]")
            + "    read_index = print",
            "has files that are not among those to choose from",
        ),
    ],
    ids=[
        "does not import",
        "fails when imported",
        "is no reader",
        "wants arguments",
        "is not there",
        "has a name of ours",
        "has no name",
        "fails to look",
        "finds something else",
        "finds files elsewhere",
    ],
)
def test_one_that_cannot_be_used_is_told_of_and_left_out(
    code: str, reason: str, loose: Path, tmp_path: Path, install: Installing
) -> None:
    install("broken-one", code)
    notes = ckptkit.inspect(loose).notes
    told = next(note for note in notes if "broken-one 1.5" in note)
    assert reason in told
    assert "was left out" in told
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises(NotACheckpointError) as caught:
        ckptkit.inspect(tmp_path / "empty")
    assert told in caught.value.message


def test_of_two_with_one_name_the_first_is_used(rows: Path, install: Installing) -> None:
    install("a-rows", EXAMPLE, "NpyRowsReader")
    install("b-rows", EXAMPLE, "NpyRowsReader")
    report = ckptkit.inspect(rows)
    assert report.format == "npy-rows"
    assert "of b-rows 1.5 was left out" in report.notes[-1]
    assert "'npy-rows' is the name of a reader of a-rows 1.5, too" in report.notes[-1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("return {}['x']", "failed: KeyError: 'x'"),
        ("return 5", "returned int, where a TensorIndex was expected"),
        ("return ck.TensorIndex('x', (), R.of([ck.Record(0, 0, 4)]), {})", "a record in a file"),
        ("return ck.TensorIndex('x', (F,), R.of([ck.Record(0, 4, 0)]), {})", "before it begins"),
    ],
)
def test_one_that_fails_to_read_is_named_with_its_distribution(
    answer: str, reason: str, rows: Path, install: Installing
) -> None:
    find = "return [ck.Candidate('x', '', tuple(paths), 'all')]"
    install(
        "bad-reader",
        "from ckptkit import readers as ck\nR = ck.RecordTable\nF = ck.FileRef('x', 9, '')\n"
        f"{WORKING.format(find=find)}    def read_index(self, source, candidate): {answer}\n",
    )
    with pytest.raises(InputError) as caught:
        ckptkit.inspect(rows)
    assert "reader 'theirs' of bad-reader 1.5" in caught.value.message
    assert reason in caught.value.message
    assert "bad-reader 1.5" in caught.value.hint


def test_where_nothing_is_found_all_formats_and_what_is_there_are_named(tmp_path: Path) -> None:
    for name in ("notes.txt", "log_1.json", "log_22.json", "logs/a", "logs/deep/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(NotACheckpointError) as caught:
        ckptkit.inspect(tmp_path)
    assert caught.value.message.endswith("but log_*.json (2), logs/ (2), notes.txt")
    for reader in READERS:
        assert reader.expected in caught.value.hint


@pytest.fixture(scope="module")
def listings() -> dict[Path, list[str]]:
    """The files of each fixture."""
    return {
        fixture: sorted(str(p.relative_to(fixture)) for p in fixture.rglob("*") if p.is_file())
        for fixture in FIXTURES.iterdir()
    }


@pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])
def test_a_reader_that_is_not_asked_would_have_found_nothing(
    reader: FormatReader, listings: dict[Path, list[str]]
) -> None:
    found = 0
    for fixture, paths in listings.items():
        for path in (path for one in reader.find(paths) for path in one.files):
            found += re.search(f"(?:{reader.endings})$", path) is not None
        if not any(re.search(f"(?:{reader.endings})$", path) for path in paths):
            assert not reader.find(paths), fixture
            assert not reader.find_deep_folders(paths), fixture
    assert found


SAVED = "peft_checkpointer/checkpoint/checkpoint-2"


def shown(*paths: str, base: str = "", known: tuple[str, ...] = ()) -> list[str]:
    return [str(group) for group in group_files(paths, base=base, recognised=known)]


def test_names_that_differ_in_numbers_are_one_group() -> None:
    assert shown("rng_0.pth", "rng_1.pth", "rng_10.pth", "a.pt") == ["a.pt", "rng_*.pth (3)"]


def test_a_number_that_does_not_differ_is_kept() -> None:
    assert shown("part_7.bin") == ["part_7.bin"]


def test_a_folder_without_anything_known_is_shown_as_one() -> None:
    paths = ("logs/a", "logs/deep/b", "model/stray")
    assert shown(*paths, known=("model/.metadata",)) == ["logs/ (2)", "model/stray"]


def test_names_are_relative_to_the_folder() -> None:
    assert shown("run/step/x", "run/step/logs/y", base="run/step") == ["logs/", "x"]


def test_too_many_groups_are_counted() -> None:
    names = [chr(ord("a") + i) * 3 for i in range(26)]
    assert shown(*names)[-2:] == ["xxx", "2 more"]
    assert group_files(names)[-1] == FileGroup("", 2)


def test_inspect_tells_what_it_ignored_in_the_folder_of_the_step_alone() -> None:
    run = FIXTURES / "trainer_fsdp2" / "checkpoint"
    found = ckptkit.inspect(run)
    names = ["rng_state_*.pth", "scheduler.pt", "trainer_state.json"]
    assert [group.name for group in found.ignored] == names
    document = json.loads(json.dumps(found.to_json()))
    assert document["ignored"][0] == {"name": "rng_state_*.pth", "files": 2}


def test_a_stale_file_among_the_shards_is_ignored_by_name(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(FIXTURES / "fsdp2_plain" / "checkpoint", tmp_path / "run")
    shutil.copy(checkpoint / "__1_0.distcp", checkpoint / "__7_0.distcp")
    assert [group.name for group in ckptkit.inspect(checkpoint).ignored] == ["__7_0.distcp"]


def test_side_files_that_consolidation_takes_along_are_not_ignored() -> None:
    found = ckptkit.inspect(FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint")
    assert [group.name for group in found.ignored] == ["random_states_*.pkl"]


def test_files_that_choose_a_tag_are_not_ignored() -> None:
    assert ckptkit.inspect(FIXTURES / "universal_zero1/checkpoint").ignored == ()


def test_a_step_of_ours_tells_its_version_and_its_mesh() -> None:
    found = ckptkit.inspect(FIXTURES / SAVED)
    assert (found.writer, found.version) == ("ckptkit", "0.1.0")
    assert [(axis.name, axis.size) for axis in found.mesh] == [("", 2)]
    assert json.loads(json.dumps(found.to_json()))["mesh"] == [{"name": "", "size": 2}]


@pytest.mark.parametrize(
    "mesh", [None, 3, {}, {"names": ["dp"], "shape": ["2"]}, {"names": "dp", "shape": [-2]}]
)
def test_a_mesh_that_is_none_is_left_out(mesh: object, tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / SAVED, tmp_path / "checkpoint-2")
    facts = json.loads((step / "ckptkit" / "run.json").read_text())
    facts["models"]["model"]["mesh"] = mesh
    (step / "ckptkit" / "run.json").write_text(json.dumps(facts))
    assert ckptkit.inspect(step).mesh == ()


@pytest.mark.parametrize("layout", ["hf", "dcp", "torch"])
def test_an_output_of_ours_says_who_wrote_it(layout: str, tmp_path: Path) -> None:
    run = FIXTURES / "trainer_fsdp2" / "checkpoint"
    ckptkit.convert(run, tmp_path / "out", to=layout)  # type: ignore[arg-type]
    found = ckptkit.inspect(tmp_path / "out")
    assert (found.writer, found.version, found.step) == ("ckptkit", ckptkit.__version__, 4)
    assert found.ignored == ()


@pytest.mark.parametrize(
    "path",
    ["model.safetensors", "pytorch_model.bin", "checkpoint/.metadata", "model-1.safetensors"],
)
def test_a_pointer_of_git_lfs_is_named_as_one(path: str, tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
    clone = tmp_path / "clone"
    (clone / path).parent.mkdir(parents=True)
    (clone / path).write_text(pointer)
    with pytest.raises(MissingFileError, match="is a pointer of Git LFS") as caught:
        ckptkit.consolidate(clone, tmp_path / "out")
    assert caught.value.where == str(clone / path)


PAGE = (ROOT / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:]  # after what holds for all
TITLES = [section.split("\n", 1)[0] for section in SECTIONS]
BULLETS = ("Read", "Refused", "Cannot be seen", "Proven by", "Versions")  # others are in the table


def anchor(title: str) -> str:
    """How GitHub names a heading in a link."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_reader_stands_in_the_table() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[1])}
    beside = {reader.name for reader in READERS if not reader.expected}
    assert beside == {"foreign", "torch optimizer"}  # no formats of their own
    assert {reader.name for reader in READERS} - beside <= named
    assert all(all(row.strip("| ").split(" | ")) for row in rows[:-1])  # written and recognised by


def test_every_section_is_linked_from_the_table_and_every_link_leads_somewhere() -> None:
    links = re.findall(r"^\| \[[^\]]+\]\(#([^)]+)\)", PAGE, flags=re.MULTILINE)
    assert links == [anchor(title) for title in TITLES]
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= {anchor(title) for title in TITLES}


@pytest.mark.parametrize("section", SECTIONS[:-1], ids=TITLES[:-1])
def test_a_section_says_what_is_read_refused_unseen_and_proven(section: str) -> None:
    for bullet in BULLETS:
        assert re.search(rf"^- \*\*{bullet}\*\*\S? \S", section, flags=re.MULTILINE), bullet


def test_dtypes_of_torch_that_are_refused_stand_on_the_page() -> None:
    torch = pytest.importorskip("torch")
    found = {str(one)[6:] for one in vars(torch).values() if isinstance(one, torch.dtype)}
    refused = found - BY_NAME.keys()
    ranges = re.compile(r"u?int[1-7]|bits\w+|qu?int\w+")
    assert {"complex32", "float4_e2m1fn_x2"} <= refused
    assert [
        name for name in refused if f"`{name}`" not in PAGE and not ranges.fullmatch(name)
    ] == []
