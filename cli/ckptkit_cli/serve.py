"""`ckptkit serve`: a model that was never written, as the objects of a bucket."""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ckptkit.core.errors import UsageError
from ckptkit.core.text import size_text
from ckptkit.options import Resources
from ckptkit_cli import _options as options
from ckptkit_cli._output import Output, counted, escaped, stamped, wrapped
from ckptkit_cli._program import Option, command

if TYPE_CHECKING:
    from ckptkit.serving.serving import ServeEvent, Serving

_PLACE = "Where it is served"
_MERGE = "Merging an adapter"
_MOST_PORT = 65_535
_NOT_SERVED = {
    *("out", "optimizer", "dry_run", "overwrite", "if_exists", "resume", "delete_source", "check"),
    *("engine", "slice", "dst_option", "as_json", "quiet", "events", "base", "memory_budget"),
    *("share", "proof"),
}
_OF_MERGES = (
    options.ADAPTERS,
    options.WITH,
    options.ADAPTER_CONFIG,
    options.ALLOW_UNTRAINED,
    options.ALLOW_OTHER_BASE,
    options.MATCH_PEFT,
    options.QLORA_BASE,
    options.DOUBLE_QUANT,
    *options.ADAPTER_HINTS,
)


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:6]) <= _MOST_PORT):
        raise UsageError(
            f"{text!r} is not a port from 0 to {_MOST_PORT:,}",
            where="--port",
            hint="pass --port 9000, or leave it out for any free one",
        )
    return int(text)


def _parse_secret(name: str) -> str:
    """Reads the environment variable that `--secret-key-from` names."""
    secret = os.environ.get(name, "")
    if not secret:
        raise UsageError(
            f"the environment variable {name!r} contains no key",
            where="--secret-key-from",
            hint=f"set it, as in `export {name}=...`, or leave the option out for a random key",
        )
    return secret


@command(
    *(one for one in options.CONVERSION if one.name not in _NOT_SERVED),
    replace(
        options.BASE,
        help="Model folder with configuration and tokenizer, if the source has none; of an"
        " adapter, the model that it was trained on.",
    ),
    Option(
        "--host",
        _PLACE,
        "Address to listen on; 0.0.0.0 for all interfaces. What is sent is not encrypted.",
        "ADDRESS",
        default="127.0.0.1",
    ),
    Option(
        "--port",
        _PLACE,
        "Port to listen on; by default a free one.",
        "N",
        parse=_parse_port,
    ),
    Option(
        "--name",
        _PLACE,
        "Prefix of the keys; by default the name of SRC, such as llama, or llama-checkpoint-500 for"
        " a step.",
        "NAME",
        keyword="label",
    ),
    Option(
        "--follow",
        _PLACE,
        "Serve the newest step of the run SRC, and each newer one once it is committed, with the"
        " step's name in the keys. The step before it stays until the next one.",
    ),
    Option(
        "--interval",
        _PLACE,
        "With --follow, the time between two looks at SRC.  [default: 5, for a URL 30]",
        "SECONDS",
        parse=options.parse_interval,
    ),
    Option(
        "--access-key",
        _PLACE,
        "Access key that requests are signed with; by default a random one, which is shown.",
        "K",
    ),
    Option(
        "--secret-key",
        _PLACE,
        "The secret key that belongs to it; every user of this machine sees it in the list of"
        " processes.",
        "S",
    ),
    Option(
        "--secret-key-from",
        _PLACE,
        "The same, in an environment variable, which no list of processes shows.",
        "VARIABLE",
        parse=_parse_secret,
    ),
    Option("--no-auth", _PLACE, "Accept requests without a signature, from this machine only."),
    *(replace(one, group=_MERGE) for one in _OF_MERGES),
    replace(options.MEMORY_BUDGET, default="96MB"),
    options.JSON_LINES,
    options.QUIET,
    order=16,
)
def serve(output: Output, json_lines: bool, **values: Any) -> None:
    """Serve a model as objects of S3, without writing it.

        ckptkit serve runs/llama
        ckptkit serve runs/llama --follow --dtype bfloat16 --port 9000
        ckptkit serve adapters/llama --base Llama-3.2-1B

    The files that `ckptkit consolidate` or `ckptkit adapter merge` would write are objects of the
    bucket 'ckptkit', which cannot be written to. Bytes are made when they are read, and only
    proven ones are sent. Runs until it is stopped.
    """
    from ckptkit.serving.plans import refuse_missing_libraries

    refuse_missing_libraries()
    from ckptkit.serving.serving import Serving

    page = _ServePage(output, as_json=json_lines, follows=values["follow"])
    with Serving(listener=page.listen, **_read_values(values, is_quiet=output.quiet)) as serving:
        try:
            page.show(serving)
            while True:
                threading.Event().wait(3600)
        finally:
            page.show_totals(serving)


def _read_values(values: Mapping[str, Any], *, is_quiet: bool) -> dict[str, Any]:
    """Checks the values of the options, and returns the arguments of a server."""
    from ckptkit.serving.plans import ServePlan
    from ckptkit.serving.serving import choose_keys

    if values["interval"] is not None and not values["follow"]:
        raise UsageError(
            "needs --follow, without which nothing is looked for",
            where="--interval",
            hint="add --follow, or leave it out",
        )
    access, auth = values["access_key"], not values["no_auth"]
    secret, read = values["secret_key"], values["secret_key_from"]
    if secret is not None and read is not None:
        raise UsageError(
            "cannot be combined with --secret-key, which it replaces",
            where="--secret-key-from",
            hint="leave one of the two out",
        )
    secret = read if secret is None else secret
    if is_quiet and auth and not access:
        raise UsageError(
            "hides the random keys, without which nothing can be read",
            where="--quiet",
            hint="pass --access-key and --secret-key-from",
        )
    if not auth and (access or secret):
        raise UsageError(
            "cannot be combined with keys, which sign requests",
            where="--no-auth",
            hint="leave one of the two out",
        )
    if (access is None) != (secret is None) or "" in (access, secret):
        raise UsageError(
            "--access-key and --secret-key belong together, and neither may be empty",
            where="--access-key" if access else "--secret-key",
            hint="pass both, or none for random ones",
        )
    keys = choose_keys(values["host"], (access, secret) if access else auth)
    placed = options.values_with_places(values)
    adapters = options.choose_adapters(placed, Resources.from_options(placed))
    return {
        "plan": ServePlan.from_options(placed, adapters),
        "host": values["host"],
        "port": values["port"] or 0,
        "keys": keys,
        "name": values["label"],
        "follow": values["follow"],
        "poll_seconds": values["interval"],
    }


class _ServePage:
    """Writes what is served, and what happens, as text or as JSON lines."""

    def __init__(self, output: Output, *, as_json: bool, follows: bool) -> None:
        self._output = output
        self._as_json = as_json
        self._below = "STEP/" if follows else ""
        self._lock = threading.Lock()

    def listen(self, event: ServeEvent) -> None:
        """Writes an event; they come from several threads."""
        with self._lock:
            if self._as_json:
                self._output.record(stamped(event.name, event.facts))
                return
            facts, output = event.facts, self._output
            if event.name == "added":
                size, count = size_text(facts["bytes"]), counted(len(facts["objects"]), "object")
                text = f"{facts['name']}/: {count}, {size}, from {facts['source']}"
                output.lines([output.styled(escaped(text), "bold")])
            elif event.name == "removed":
                output.lines([escaped(f"{facts['name']}/: no longer served")])
            elif event.name in {"failed", "skipped"}:
                error = facts["error"]
                where = f"{error['where']}: " if error["where"] else ""
                subject = f"{facts['name']}/ is no longer served"
                if event.name == "skipped":
                    subject = f"a newer step of {facts['name']}/ is not served"
                text = f"{subject}: {where}{error['message']}"
                output.fail(f"error[{error['code']}]", text, error["hint"])
            else:
                output.remark(facts["message"])

    def show(self, serving: Serving) -> None:
        """Shows how clients reach the server."""
        from ckptkit.serving.serving import ServeEvent

        output, place = self._output, serving.location
        if serving.warning:
            self.listen(ServeEvent("warning", {"message": serving.warning}))
        if self._as_json:
            facts = {"url": serving.url, "location": place, "environment": serving.environment}
            output.record(stamped("serving", facts))
            return
        below = escaped(place + self._below)
        uses = (
            f"aws s3 sync {below} FOLDER --exact-timestamps",
            escaped(
                f'boto3.client("s3").list_objects_v2(Bucket="ckptkit", Prefix="{serving.prefix}/")'
            ),
            f"vllm serve {below} --load-format runai_streamer",
        )
        output.lines(
            [
                f"  endpoint   {serving.url}",
                f"  objects    {escaped(place)}, which can only be read",
                "",
                *(f"export {n}={shlex.quote(escaped(v))}" for n, v in serving.environment.items()),
                "",
                f"  read it    {output.styled(uses[0], 'cyan')}",
                *(f"             {output.styled(use, 'cyan')}" for use in uses[1:]),
                *wrapped("Ctrl-C ends it.", width=output.width),
            ]
        )

    def show_totals(self, serving: Serving) -> None:
        """Shows how much was served."""
        if self._as_json:
            facts = {"requests": serving.requests, "bytes": serving.size_bytes}
            self._output.record(stamped("stopped", facts))
            return
        count, size = counted(serving.requests, "request"), size_text(serving.size_bytes)
        self._output.lines([f"answered {count}, with {size} of objects"])
