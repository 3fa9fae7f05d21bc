"""Every secret that ckptkit is given is planted, and looked for in all that it prints and writes.

What is looked through: stdout, stderr, documents and events as JSON, tracebacks, logs at debug
level, all files and objects that were written, what requests say in URLs, `repr` and `str` of
objects and errors. `tests/crash/test_other_users.py` looks at the list of processes.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import urlopen

import psutil
import pytest
import torch

import ckptkit
from ckptkit.conversion.prepare import ConversionJob
from ckptkit.core.errors import (
    CkptkitError,
    HubError,
    StorageError,
    UsageError,
    error_from_json,
)
from ckptkit.hub.client import Hub
from ckptkit.hub.watch.watch import WatchRequest
from ckptkit.options import ConsolidateRequest
from ckptkit.serving import s3_api
from ckptkit.serving.serving import choose_keys
from ckptkit.storage.places import Place
from ckptkit.training import Checkpointer
from ckptkit.training.settings import check_options
from ckptkit.writer.messages import Remote
from tests.command_line import run_command
from tests.hub_models import consolidated
from tests.hub_server import TOKEN, HubServer
from tests.object_store import KEY, SECRET, Bucket, ObjectStore
from tests.s3_client import client_of
from tests.sampled import sampled

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint"
BUCKET = "secrets"
READ_AND_WRITE = (
    ("inspect", "upload"),
    ("ls", "verify", "stats", "diff"),
    ("consolidate", "convert", "dry-run"),
)
PLANTED = {
    "hub token": TOKEN,
    "another hub token": "hf_" + "pLaNtEd7" * 4,
    "store secret": SECRET,
    "aws secret": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzQ8rT1uVx",
    "aws session token": "FwoGZXIvYXdzEPLANTEDSESSIONTOKEN0123456789",
    "serve secret": "5eRvEsEcReTkEy0123456789",
    "azure key": "Q0ZK4M2XW9PLR5TBazurekey0123456789==",
    "azure sas": "sAsSiGnAtUrE0123456789abcdef",
    "google key": "MIIEvQgooglePLANTED0123456789",
    "proxy password": "pr0xyPLANTEDpassw0rd",
    "netrc password": "n3trcPLANTEDpassw0rd",
    "url password": "uRlPLANTEDpassw0rd",
    "url signature": "9f86d081884c7d659a2feaa0c55ad015",
    "wandb key": "0f3a9c4e7b1d5826af90c3e71b4d8265ea7f3019",
}


def forms(secret: str) -> Iterator[bytes]:
    """Yields what a secret looks like as it is, and coded as headers, URLs and JSON code it."""
    data = secret.encode()
    yield data
    yield quote(secret, safe="").encode()
    yield json.dumps(secret)[1:-1].encode()
    yield data.hex().encode()
    for shift in range(3):  # the middle of it in base64, at each position of three bytes
        coded = base64.b64encode(b"\0" * shift + data)
        yield coded[4 : len(coded) - 4]


def found_in(data: bytes | str) -> list[str]:
    data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    return [name for name, secret in PLANTED.items() if any(form in data for form in forms(secret))]


def found_below(folder: Path, but: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Returns the secrets in the files below a folder, and in their names."""
    found = {}
    for path in folder.rglob("*"):
        data = path.read_bytes() if path.is_file() and path not in but else b""
        if names := found_in(data + os.fsencode(path.name)):
            found[str(path)] = names
    return found


def test_the_search_finds_secrets_in_every_form() -> None:
    for name, secret in PLANTED.items():
        for form in forms(secret):
            assert name in found_in(b"before " + form + b" after"), (name, form)
        assert name in found_in(base64.b64encode(f"user:{secret}".encode()))
    assert found_in("nothing " * 100) == []


def objects_without_secrets(bucket: Bucket) -> list[str]:
    """Returns the keys of a bucket, whose objects have no secret."""
    keys = bucket.keys()
    assert [key for key in keys if found_in(bucket.get(key) + key.encode())] == []
    return keys


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has logged in everywhere."""
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".aws/credentials").write_text(
        f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (home / ".netrc").write_text(f"machine 127.0.0.1 login me password {PLANTED['netrc password']}")
    (home / "google.json").write_text(
        json.dumps({"type": "service_account", "private_key": PLANTED["google key"]})
    )
    (home / ".cache/huggingface/token").write_text(PLANTED["another hub token"])
    return {
        "HOME": str(home),
        "NETRC": str(home / ".netrc"),
        "HF_HOME": str(home / ".cache/huggingface"),
        "GOOGLE_APPLICATION_CREDENTIALS": str(home / "google.json"),
        "HF_TOKEN": TOKEN,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": PLANTED["aws secret"],
        "AWS_SESSION_TOKEN": PLANTED["aws session token"],
        "AZURE_STORAGE_KEY": PLANTED["azure key"],
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2024&sig={PLANTED['azure sas']}",
        "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey={PLANTED['azure key']}",
        "WANDB_API_KEY": PLANTED["wandb key"],
        "HTTPS_PROXY": f"http://me:{PLANTED['proxy password']}@127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
        "SERVE_KEY": PLANTED["serve secret"],
    }


@pytest.fixture
def bucket(object_store: ObjectStore) -> Iterator[Bucket]:
    bucket = object_store.bucket(BUCKET)
    bucket.clear()
    bucket.put_tree(STEP, "run/checkpoint-1")
    yield bucket
    bucket.clear()


def options_of(store: ObjectStore, option: str = "--src-option", **changes: str) -> list[str]:
    pairs = {"secret": SECRET, "token": PLANTED["aws session token"]} | changes
    words = [word for name, value in pairs.items() for word in (option, f"{name}={value}")]
    return [*store.arguments(option)[:2], *words, *store.arguments(option)[4:]]


def run_all(
    commands: Sequence[Sequence[object]],
    folder: Path,
    environment: Mapping[str, str],
    statuses: Sequence[int],
) -> None:
    """Runs commands with and without JSON, and looks through what they print and write."""
    for words in commands:
        for number, extra in enumerate(([], ["--json"])):
            given = [str(word).replace("OUT", str(folder / f"out{number}")) for word in words]
            result = run_command(*given, *extra, **environment)
            shown = result.stdout + result.stderr
            assert found_in(shown) == [], (words, shown)
            assert result.returncode in statuses, (words, shown)


@pytest.mark.parametrize("names", sampled(READ_AND_WRITE, READ_AND_WRITE[:1]), ids=" ".join)
def test_commands_that_read_and_write_a_store(
    bucket: Bucket, environment: dict[str, str], tmp_path: Path, names: Sequence[str]
) -> None:
    src, dst = options_of(bucket.store), options_of(bucket.store, "--dst-option")
    run, step = f"{bucket.url}/run", f"{bucket.url}/run/checkpoint-1"
    (tmp_path / "work").mkdir()
    commands: dict[str, list[object]] = {
        "inspect": ["inspect", step, *src],
        "ls": ["ls", run, *src],
        "verify": ["verify", step, *src],
        "stats": ["stats", step, *src],
        "diff": ["diff", step, STEP, *src],
        "consolidate": ["consolidate", step, "OUT", *src],
        "upload": ["consolidate", step, f"{bucket.url}/model", "--overwrite", *src, *dst],
        "convert": ["convert", step, "OUT-dcp", "--to", "dcp", *src],
        "dry-run": ["consolidate", run, "OUT-dry", "--dry-run", *src],
    }
    run_all([commands[name] for name in names], tmp_path / "work", environment, [0])
    assert found_below(tmp_path, [*(tmp_path / "home").rglob("*")]) == {}
    keys = objects_without_secrets(bucket)
    assert ("model/ckptkit.json" in keys) == ("upload" in names)


@pytest.mark.slow
def test_commands_that_fail_at_a_store(
    bucket: Bucket, environment: dict[str, str], tmp_path: Path
) -> None:
    run, step = f"{bucket.url}/run", f"{bucket.url}/run/checkpoint-1"
    wrong = options_of(bucket.store, secret=PLANTED["aws secret"])
    nowhere = [w.replace(bucket.store.endpoint, "http://127.0.0.1:9") for w in wrong]
    nowhere += ["--src-option", "config_kwargs.retries.max_attempts=1"]
    odd = ["--src-option", f"no_such_option={PLANTED['azure key']}"]
    signed = f"https://127.0.0.1:9/m?X-Amz-Signature={PLANTED['url signature']}"
    commands: list[list[object]] = [
        ["inspect", f"{bucket.url}/absent", *wrong],
        ["inspect", "s3://no-such-bucket-of-ours/x", *wrong],
        ["inspect", step, *options_of(bucket.store), *odd],
        ["inspect", f"s3://me:{PLANTED['url password']}@bucket/x", *wrong],
        ["inspect", signed, *wrong],
        ["consolidate", step, "OUT", *wrong, "--dtype", "no-such-type"],
        ["consolidate", step, "OUT", "--base", signed, *wrong],
        ["inspect", step, "--src-option", PLANTED["aws secret"]],
        ["inspect", step, "--src-option", f"secret={SECRET}", "--src-option", f"secret={SECRET}"],
        ["inspect", step, "--src-options", f"secret={SECRET}"],
        ["prune", run, "--keep-last", "no-number", *wrong],
        ["serve", step, "--access-key", "A/", "--secret-key", PLANTED["serve secret"], *wrong],
        ["serve", step, "--access-key", "", "--secret-key-from", "SERVE_KEY", *wrong],
        ["serve", step, "--port", "x", "--secret-key", PLANTED["serve secret"], *wrong],
    ]
    run_all(commands, tmp_path, environment, [2, 3, 4])
    quick = ["inspect", step, *nowhere]
    result = run_command(*quick, **environment)
    assert result.returncode not in {0, 1}
    assert found_in(result.stdout + result.stderr) == []


@pytest.mark.slow
def test_commands_of_the_hub(
    hub: HubServer, bucket: Bucket, environment: dict[str, str], tmp_path: Path
) -> None:
    at_hub = environment | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    model = consolidated(tmp_path / "made")
    state = tmp_path / "state"
    options = {"key": KEY, "secret": SECRET, "token": PLANTED["aws session token"]}
    options |= {"client_kwargs": bucket.store.options["client_kwargs"]}
    watch = ["watch", f"{bucket.url}/run", "--push", "me/watched", "--state", state, "--once"]
    watch += ["--src-options-from", "STORE_OPTIONS"]
    commands: list[list[object]] = [
        ["push", model, "me/model", "--tag", "step-30"],
        ["pull", "me/model", "OUT"],
        ["push", model, "me/model", "--dry-run"],
        watch,
    ]
    run_all(commands, tmp_path, at_hub | {"STORE_OPTIONS": json.dumps(options)}, [0])
    refused = at_hub | {"HF_TOKEN": PLANTED["another hub token"]}
    broken = at_hub | {"STORE_OPTIONS": json.dumps(options)[:-1]}
    run_all([["push", model, "me/model"], ["pull", "me/no", "OUT-no"]], tmp_path, refused, [7])
    run_all([watch], tmp_path, broken, [2])
    assert found_below(tmp_path, [*(tmp_path / "home").rglob("*")]) == {}
    for repo in ("me/model", "me/watched"):
        for path in hub.repo(repo).files():
            assert found_in(hub.read(repo, path)) == [], path
        assert found_in(repr(hub.repo(repo).commits)) == []


@pytest.mark.slow
def test_a_bug_shows_no_secret(bucket: Bucket, environment: dict[str, str]) -> None:
    """The traceback of a command has no values of variables, and hides what is in URLs."""
    program = (
        "import sys\n"
        "from ckptkit.conversion import inspect\n"
        "def fail(*arguments, **options):\n"
        f"    raise RuntimeError('a bug at https://h/x?sig={PLANTED['azure sas']}')\n"
        "inspect.open_checkpoint = fail\n"
        "from ckptkit_cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["inspect", f"{bucket.url}/run/checkpoint-1", *options_of(bucket.store)]
    for extra in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words, *extra],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | environment,
        )
        assert done.returncode == 1, done.stderr
        assert "a bug at https://h/x?…" in done.stderr.replace("\\u2026", "…")
        assert found_in(done.stdout + done.stderr) == [], done.stderr


# --- training ---


@pytest.mark.slow
def test_a_training_that_saves_to_a_store_and_pushes(
    hub: HubServer,
    bucket: Bucket,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in (environment | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}).items():
        if name not in {"HOME", "HF_TOKEN"}:
            monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG, "ckptkit")
    run, state = f"{bucket.url}/training", {"model": torch.nn.Linear(4, 3)}
    storage = bucket.store.options | {"token": PLANTED["aws session token"]}
    options: dict[str, Any] = {"local": tmp_path / "node", "storage_options": storage}
    pushing: dict[str, Any] = {
        "push_to_hub": "me/trained",
        "hub_token": TOKEN,
        "hub_timeout_seconds": 120,
    }
    with Checkpointer(run, **options, **pushing) as saver:
        shown = [repr(saver), str(vars(saver))]
        report = saver.save(1, state, metrics={"loss": 1.0}).pushed(120)
        shown += [repr(report), str(report)]
        started = [psutil.Process(), *psutil.Process().children(recursive=True)]
        words = [" ".join(process.cmdline()) for process in started]
        assert sum("ckptkit" in text for text in words) >= 2  # that uploads, and that pushes
        shown += words
    with pytest.raises(CkptkitError) as caught:
        Checkpointer(
            f"{bucket.url}-absent/x",
            **options | {"storage_options": storage | {"secret": PLANTED["aws secret"]}},
        )
    shown += traceback.format_exception(caught.value)
    logs = [f"{r.getMessage()} {r.exc_text}" for r in caplog.records if "ckptkit" in r.name]
    assert logs
    assert found_in("\n".join([*shown, *logs])) == []
    assert found_below(tmp_path / "node") == {}
    assert "training/checkpoint-1/ckptkit.json" in objects_without_secrets(bucket)
    for path in hub.repo("me/trained").files():
        assert found_in(hub.read("me/trained", path)) == [], path


def test_a_server_that_fails_logs_no_signature(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(s3_api, "answer_request", fail)
    with ckptkit.serve(STEP, name="m") as serving:
        client = client_of(serving.environment, signature_version="s3v4")
        place = {"Bucket": "ckptkit", "Key": "m/config.json"}
        url = client.generate_presigned_url("get_object", Params=place)
        with pytest.raises(HTTPError, match="500"):
            urlopen(url)  # noqa: S310  of this machine
        signature = parse_qs(urlsplit(url).query)["X-Amz-Signature"][0]
    assert "/ckptkit/m/config.json" in caplog.text
    assert signature not in caplog.text
    assert serving.environment["AWS_SECRET_ACCESS_KEY"] not in caplog.text


# --- objects and errors ---


def made_objects() -> Iterator[Callable[[], object]]:
    options = {"key": KEY, "secret": SECRET, "token": PLANTED["aws session token"]}
    nested = {"client_kwargs": {"aws_secret_access_key": PLANTED["aws secret"]}}
    place = Place("s3://bucket/run", options | nested)
    yield lambda: place
    yield lambda: ConversionJob(src=place, out=place, request=ConsolidateRequest(), also=(place,))
    yield lambda: Remote("s3://bucket/run", options)
    yield lambda: choose_keys("127.0.0.1", ("AK", PLANTED["serve secret"]))
    yield lambda: Hub("me/model", token=TOKEN, endpoint="http://127.0.0.1:9")
    yield lambda: WatchRequest(run=place, repo_id="me/model", token=TOKEN)
    yield lambda: check_options(
        {"storage_options": options, "push_to_hub": "me/model", "hub_token": TOKEN}
    )


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("make", [*made_objects()])
def test_no_object_shows_a_secret(make: Callable[[], object]) -> None:
    made = make()
    assert found_in(f"{made!r} {made} {made!s:>1} {[made]} {{1: {made!r}}}") == []


def test_no_error_shows_a_secret() -> None:
    urls = [
        f"https://h/x?X-Amz-Signature={PLANTED['url signature']}",
        f"https://a.blob.core.windows.net/c?sv=1&sig={PLANTED['azure sas']}",
        f"s3://me:{PLANTED['url password']}@bucket/x",
        f"http://me:{PLANTED['proxy password']}@127.0.0.1:9",
    ]
    for url in urls:
        for kind in (StorageError, UsageError, HubError):
            error = kind(f"no answer from {url}", where=url, hint=f"see {url}")
            again = error_from_json(error.to_json())
            for one in (error, again, error.located(url)):
                text = f"{one!r} {one} {one.args} {json.dumps(one.to_json())}"
                assert found_in(text + "".join(traceback.format_exception(one))) == []
