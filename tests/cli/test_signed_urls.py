"""Nothing that a command prints holds the query of a signed URL, or a password in one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptkit.core.errors import UsageError
from ckptkit.core.text import without_url_secrets
from ckptkit.storage.places import Place
from ckptkit_cli.main import main

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
STEP = str(FIXTURES / "accelerate_fsdp2_tied_with_config" / "checkpoint")
PLANTED = "5EKRET0a1b2c"
SIGNED = f"https://127.0.0.1:9/m?X-Amz-Signature={PLANTED}&X-Amz-Credential=A{PLANTED}"
SAS = f"https://127.0.0.1:9/c/m?sv=2024&sig={PLANTED}%3D"
USER = f"https://me:{PLANTED}@127.0.0.1:9/m"


@pytest.mark.parametrize("url", [SIGNED, SAS, USER])
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "URL"],
        ["verify", "URL"],
        ["ls", "URL"],
        ["prune", "URL", "--keep-last", "1"],
        ["consolidate", "URL", "out"],
        ["consolidate", STEP, "URL"],
        ["consolidate", STEP, "out", "--base", "URL"],
        ["consolidate", STEP, "out", "--like", "URL"],
        ["consolidate", STEP, "out", "--also", "URL"],
        ["diff", STEP, "URL"],
        ["adapter", "extract", STEP, "out", "--adapter-config", "URL"],
        ["adapter", "merge", STEP, "out", "--base", "URL"],
    ],
    ids=" ".join,
)
def test_a_failing_command_shows_no_secret(
    words: list[str],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for extra in ([], ["--json"]):
        given = [url if word == "URL" else word for word in words]
        monkeypatch.setattr(sys, "argv", ["ckptkit", *given, *extra])
        with pytest.raises(SystemExit) as ended:
            sys.exit(main())
        assert ended.value.code not in {0, None, 1}
        shown = capfd.readouterr()
        assert shown.out + shown.err
        assert PLANTED not in shown.out + shown.err


@pytest.mark.parametrize("url", [SIGNED, SAS, SIGNED.replace("https", "HTTP"), SAS + "#/x/y"])
def test_a_url_of_the_web_with_a_query_is_no_place(url: str) -> None:
    """So no manifest, journal, log, event or command to copy can hold it."""
    with pytest.raises(UsageError, match="has a query, as signed URLs do") as caught:
        Place(url)
    assert PLANTED not in str(caught.value)
    assert "a query" not in str(Place("s3://bucket/what?key=1"))


@pytest.mark.parametrize(
    "text",
    ["s3://b/what?/a b", "s3://b/a:b@c", "s3://arn:aws:s3:eu:1:accesspoint/x/k@y", "is it? yes"],
)
def test_keys_stay_as_they_are(text: str) -> None:
    assert without_url_secrets(text) == text
