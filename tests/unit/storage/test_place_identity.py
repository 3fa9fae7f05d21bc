"""Two places are compared by what they are, however they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptkit.storage import place_identity
from ckptkit.storage.locations import Place
from ckptkit.storage.place_identity import (
    PlaceIdentity,
    PlaceRelation,
    find_filesystem_type,
    find_overlap,
    find_overlaps,
    why_not_shared,
)

KEYS = {"key": "k", "secret": "secret-value"}
HERE = "http://127.0.0.1:9000"


def place(url: str, endpoint: str = "", *, style: str = "client", **more: Any) -> Place:
    options: dict[str, Any] = {**KEYS, **more}
    if endpoint and style == "client":
        options["client_kwargs"] = {"endpoint_url": endpoint}
    elif endpoint:
        options["endpoint_url"] = endpoint
    return Place(url, options)


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own settings names an endpoint."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (place("s3://b/p", HERE), place("s3://b/p/", f"{HERE}/")),
        (place("s3://b/p", HERE), place("s3a://b/p", HERE)),
        (place("S3://b/p", HERE), place("s3://b/p", HERE)),
        (place("s3://b/p", HERE), place("s3://b/p", HERE, style="top")),
        (place("s3://b/p", HERE), place("s3://b/p", HERE, anon=False)),
        (place("s3://b/p", "http://s3.example"), place("s3://b/p", "http://S3.Example:80/")),
        (place("s3://b/p", "https://s3.example"), place("s3://b/p", "https://s3.example.:443")),
        (place("s3://b/p", "https://s3.example"), place("s3://b/p", "http://s3.example")),
        (place("s3://b/p", HERE), place("s3://b/p", "http://localhost:9000")),
        (place("s3://b/p", HERE), place("s3://b/p", "http://127.0.0.2:9000")),
        (place("s3://b/p", HERE), place("s3://b/p", "http://[::1]:9000")),
        (place("s3://b/p"), place("s3://b/p", "https://s3.eu-west-1.amazonaws.com")),
        (place("s3://b/p"), place("s3://b/p", client_kwargs={"region_name": "eu-west-3"})),
        (place("s3://b/p"), place("s3://b/p", config_kwargs={"s3": {"addressing_style": "path"}})),
        (place("s3://b/p", HERE), place("s3://b//p/./", HERE)),
        (place("s3://b/p"), place("s3://arn:aws:s3:eu-1:123456789012:accesspoint/name/p")),
        (place("s3://b/p", endpoint="no URL at all"), place("s3://b/p")),
        # Nothing shows that an address is not that of a name.
        (place("s3://b/p", "http://10.0.0.5:9000"), place("s3://b/p", "http://minio:9000")),
        (place("s3://b/p"), place("s3://b/p", "https://10.0.0.5")),
        (place("gs://b/p"), place("gcs://b/p", "https://storage.googleapis.com", style="top")),
        (Place("az://c/p", {"account_name": "a"}), Place("abfs://c@a.dfs.core.windows.net/p")),
        (Place("memory://a/p"), Place("memory:///a/p", {"any": "option"})),
    ],
    ids=str,
)
def test_one_place_written_in_two_ways(first: Place, second: Place) -> None:
    one, two = PlaceIdentity(first), PlaceIdentity(second)
    assert one.compare(two) is PlaceRelation.SAME
    assert two.compare(one) is PlaceRelation.SAME
    below = PlaceIdentity(Place(f"{first.location}/checkpoint-4", first.options))
    assert below.compare(two) is PlaceRelation.INSIDE
    assert two.compare(below) is PlaceRelation.AROUND


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (place("s3://b/p", HERE), place("s3://b/p", "http://127.0.0.1:9001")),
        (place("s3://b/p", HERE), place("s3://b/p")),
        (place("s3://b/p", "http://one.example"), place("s3://b/p", "http://two.example")),
        (place("s3://b/p", "http://10.0.0.5"), place("s3://b/p", "http://10.0.0.6")),
        (place("s3://b/p", "http://10.0.0.5:9000"), place("s3://b/p", "http://minio:9001")),
        (place("s3://b/p"), place("s3://b/p", "https://s3.cn-north-1.amazonaws.com.cn")),
        (place("s3://b/p", HERE), place("s3://b/pq", HERE)),
        (place("s3://b/p", HERE), place("s3://b2/p", HERE)),
        (place("s3://b/exp[1]", HERE), place("s3://b/exp1", HERE)),
        (place("s3://b/e\u0301", HERE), place("s3://b/\u00e9", HERE)),
        (place("s3://b/P", HERE), place("s3://b/p", HERE)),
        (Place("az://c/p", {"account_name": "a"}), Place("az://c/p", {"account_name": "other"})),
        (Place("gs://b/p"), Place("s3://b/p")),
        (Place("/b/p"), Place("memory://b/p")),
    ],
    ids=str,
)
def test_places_that_are_two(first: Place, second: Place) -> None:
    one, two = PlaceIdentity(first), PlaceIdentity(second)
    assert one.compare(two) is PlaceRelation.NONE
    assert two.compare(one) is PlaceRelation.NONE


def test_the_name_of_a_place_is_one_for_all_ways_to_write_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amazon = [
        place("s3://b/p"),
        place("s3a://b/p/", "https://s3.eu-west-1.amazonaws.com"),
        place("S3://b//p", client_kwargs={"region_name": "eu-west-3"}),
    ]
    ours = [
        place("s3://b/p", HERE),
        place("s3a://b/p//", f"{HERE}/"),
        place("s3://b/p", "http://localhost:9000", style="top"),
    ]
    example = [place("s3://b/p", "http://S3.Example/"), place("s3://b/p", "https://s3.example.")]
    other = [place("s3://b/p", "http://127.0.0.1:9001")]
    names = [{PlaceIdentity(one).name for one in group} for group in (amazon, ours, example)]
    names.append({PlaceIdentity(one).name for one in other})
    assert [len(group) for group in names] == [1] * 4
    assert len(set.union(*names)) == 4
    monkeypatch.setenv("AWS_ENDPOINT_URL", HERE)
    assert PlaceIdentity(place("s3://b/p")).name in names[1]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_is_that_of_an_option(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"{HERE}/")
    assert (
        find_overlap(place("s3://b/p/checkpoint-4"), place("s3://b/p", HERE))
        is PlaceRelation.INSIDE
    )
    other = place("s3://b/p", "http://127.0.0.1:9001")
    assert find_overlap(place("s3://b/p"), other) is PlaceRelation.NONE


def test_an_endpoint_of_a_profile_is_that_of_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text(f"[profile in-house]\nregion = eu-1\nendpoint_url = {HERE}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    first = Place("s3://b/p", {**KEYS, "profile": "in-house"})
    assert find_overlap(first, place("s3://b/p", HERE)) is PlaceRelation.SAME


def test_paths_are_followed_to_what_they_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint-4").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(run)
    for one in (f"file://{run}", f"FILE://localhost{run}", f"local://{run}", f"{run}/../run", link):
        assert find_overlap(Place(one), Place(run)) is PlaceRelation.SAME, one
        assert find_overlap(Place(run / "checkpoint-4"), Place(one)) is PlaceRelation.INSIDE, one
        assert find_overlap(Place(f"{one}/new/out"), Place(run)) is PlaceRelation.INSIDE, one
    assert find_overlap(Place(run), Place(tmp_path / "run2")) is PlaceRelation.NONE


@pytest.mark.parametrize("name", ["a\u00a0disk", "a\u2028disk", "a\x85disk", "\x1f", "a\\disk"])
def test_mounts_of_any_name_are_read(name: str, tmp_path: Path) -> None:
    """The system escapes spaces, tabs, newlines and backslashes alone."""
    table = tmp_path / "mountinfo"
    escaped = name.replace("\\", "\\134")
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"30 22 0:40 / /media/{escaped} rw - fuse  rw,user_id=0\n",  # without a source
        encoding="utf-8",
    )
    first, second = place_identity.read_mounts(table)
    assert (first.place, first.kind, first.source) == (Path("/"), "ext4", "/dev/sda1")
    assert (second.place, second.kind, second.source) == (Path("/media", name), "fuse", "")
    assert second.options == {"rw", "user_id=0"}
    assert place_identity.find_mount(Path("/media", name, "run"), [first, second]) is second


def test_of_many_places_those_that_overlap_are_found(tmp_path: Path) -> None:
    places = [
        place("s3://b/p/inner", HERE),
        place("s3://b/p", "http://127.0.0.1:9001"),
        place("s3a://b/p", f"{HERE}/"),
        place("s3://b/p/", HERE),
        Place(tmp_path / "x"),
        Place(f"file://{tmp_path}/x/y"),
        Place(tmp_path / "xy"),
    ]
    found = {frozenset((one, two)) for one, two, _ in find_overlaps(places)}
    assert found == {frozenset(pair) for pair in [(0, 2), (0, 3), (2, 3), (4, 5)]}
    inside = [(one, two) for one, two, how in find_overlaps(places) if how is PlaceRelation.INSIDE]
    assert (5, 4) in inside
    assert (0, 2) in inside


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        ("ext4", True),
        ("lustre", True),
        ("", True),
        ("fuse.fuse-overlayfs", True),
        ("nfs4", False),
        ("cifs", False),
        ("fuse.s3fs", False),
    ],
)
def test_network_file_systems_with_caches_of_their_own_are_not_shared(
    kind: str, *, is_shared: bool
) -> None:
    assert (why_not_shared(kind) == "") == is_shared
    assert is_shared or kind in why_not_shared(kind)


def test_the_ranks_of_one_machine_share_the_cache_of_a_network_file_system() -> None:
    assert why_not_shared("nfs4", is_one_machine=True) == ""
    assert "fuse.s3fs" in why_not_shared("fuse.s3fs", is_one_machine=True)


def test_the_innermost_mount_tells_the_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "21 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        f"22 21 0:9 / {tmp_path} rw - tmpfs tmpfs rw\n"
        f"23 22 0:7 / {tmp_path}/a\\040b rw,relatime - nfs4 host:/x rw\n"
        f"24 22 0:7 / {tmp_path}/over rw - nfs4 host:/x rw\n"
        f"25 22 0:8 / {tmp_path}/over rw - xfs /dev/sdb rw\n"
    )
    found = {
        place: find_filesystem_type(tmp_path / place, mounts=mounts)
        for place in ("a b/c/not/there", "a", "over/x", "..")
    }
    assert found == {"a b/c/not/there": "nfs4", "a": "tmpfs", "over/x": "xfs", "..": "ext4"}
    assert not find_filesystem_type(tmp_path, mounts=tmp_path / "absent")
