"""What locations and their options stand for, and that no option is ever shown."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.storage.locations import hide_values, parse_options
from ckptkit.storage.places import Place, Sources, is_url, local_path, place_of

SECRET = {"secret": "s3cr3t-value", "client_kwargs": {"endpoint_url": "http://in.house"}}


def test_a_place_is_its_location_wherever_a_text_or_a_path_is_wanted() -> None:
    place = Place("s3://bucket/run/", SECRET)
    assert place == "s3://bucket/run"
    assert os.fspath(place) == place.location == f"{place}" == "s3://bucket/run"
    assert json.loads(json.dumps({"path": place})) == {"path": "s3://bucket/run"}
    assert place.protocol == "s3"
    assert Place("runs/a").protocol == ""
    assert Place("S3://Bucket/Run//") == "s3://Bucket/Run"  # fsspec opens no `S3`


def test_options_are_in_no_text_and_survive_a_pickle() -> None:
    place = Place("s3://bucket/run", SECRET)
    assert "s3cr3t" not in repr(place) + str(place) + f"{place!r}"
    assert copy.copy(place).options == SECRET  # as pickles do it
    assert pickle.dumps(place)
    assert place_of(str(place)).options == SECRET
    assert type(place.location) is str
    assert place.beside("s3://bucket/other").options == SECRET


@pytest.mark.parametrize(
    ("text", "path"),
    [("file:///a/b", "/a/b"), ("file://localhost/a", "/a"), ("file://", "/"), ("a/b", "a/b")],
)
def test_a_file_url_is_a_path(text: str, path: str) -> None:
    assert not is_url(text)
    assert place_of(text) == path
    assert local_path(text) == Path(path)


@pytest.mark.parametrize("text", ["run", ".", "./run", "a/b", "/a"])
def test_pathlib_takes_a_place_that_is_a_path(text: str) -> None:
    assert Path(Place(text)) == local_path(Place(text)) == Path(text)
    assert Path("/above", Place(text)) == Path("/above", text)


def test_paths_and_urls_are_told_apart() -> None:
    assert is_url("hf://org/name@main/folder")
    assert is_url("memory://x")
    assert not is_url("/a://b")
    assert not is_url("checkpoint-7")


def test_a_password_in_a_url_is_refused_without_being_shown() -> None:
    with pytest.raises(UsageError, match="holds a password") as told:
        Place("https://me:geheim@host/run")
    assert "geheim" not in str(told.value)
    assert Place("s3://bucket/a:b@c") == "s3://bucket/a:b@c"


def test_options_are_used_for_further_places_of_the_same_kind_alone() -> None:
    sources = Sources("s3://bucket/run", SECRET)
    assert sources.first.options == SECRET
    assert sources.place("s3://other/run").options == SECRET
    assert sources.place("hf://org/name").options == {}
    assert sources.place("/local").options == {}
    assert sources.place(Place("s3://other", {"key": "own"})).options == {"key": "own"}
    assert Sources("/local", SECRET).place("s3://other/run").options == SECRET
    assert sources.optional(None) is None


def test_pairs_become_nested_options_and_secrets_stay_text() -> None:
    pairs = ["key=0123", "secret=12345", "anon=false", "client_kwargs.region_name=eu"]
    pairs += ["client_kwargs.verify=null", "max_concurrency=4", "empty=", "url=http://a=b"]
    assert parse_options(pairs, option="--src-option") == {
        "key": "0123",
        "secret": "12345",
        "anon": False,
        "client_kwargs": {"region_name": "eu", "verify": None},
        "max_concurrency": 4,
        "empty": "",
        "url": "http://a=b",
    }


@pytest.mark.parametrize("pairs", [["geheim"], ["=geheim"], ["a..b=geheim"]])
def test_what_is_no_pair_is_refused_without_being_shown(pairs: list[str]) -> None:
    with pytest.raises(UsageError, match="--src-option: no pair") as told:
        parse_options(pairs, option="--src-option")
    assert "geheim" not in str(told.value)


@pytest.mark.parametrize("pairs", [["a=1", "a=2"], ["a=1", "a.b=2"], ["a.b=1", "a=2"]])
def test_a_name_is_given_once(pairs: list[str]) -> None:
    with pytest.raises(UsageError, match="is given twice"):
        parse_options(pairs, option="--src-option")


def test_values_are_taken_out_of_texts() -> None:
    text = hide_values("no s3cr3t-value at http://in.house/bucket", SECRET)
    assert text == "no *** at ***/bucket"
