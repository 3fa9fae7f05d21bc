"""Every call that may take a name for a pattern, or a list of names for a command, is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.source_trees import parse_source

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = {"filesystem", "_filesystem"}
PATTERNS = {
    "expand_path",
    "fnmatch",
    "fnmatchcase",
    "glob",
    "glob1",
    "iglob",
    "rglob",
    "rsync",
    "system",
    "popen",
}
MODULES = {"fnmatch", "fsspec", "glob", "subprocess"}
EXACT = "the client takes the name as it is"
CONSTANT = "the pattern is a constant of ours, and the folder is no pattern"
GIVEN = "the pattern is the user's option, and the name is none"
PROGRAM = "a list of arguments without a shell, which holds no name of a checkpoint"
WORDS = "the user's own command, without a shell; a name is in one word of it"
ESCAPED = "a pattern is made of a name, in which nothing is one"
NAMELESS = "no name is given there"
S3 = "requests of S3 by exact keys"

ALLOWED = {
    ("ckptkit/consumers/table", "fits", "fnmatchcase"): CONSTANT,
    ("ckptkit/hub/package", "_is_of_step", "fnmatchcase"): CONSTANT,
    ("ckptkit/hub/package", "_divide", "fnmatchcase"): GIVEN,
    ("ckptkit/integrations/transformers/__init__", "_with_secrets", "fnmatchcase"): CONSTANT,
    ("ckptkit/integrations/transformers/__init__", "_with_secrets", "folder.rglob"): CONSTANT,
    ("ckptkit/integrations/transformers/__init__", "_with_secrets", "glob.escape"): EXACT,
    ("ckptkit/hub/package", "_reason", "fnmatchcase"): GIVEN,
    ("ckptkit/hub/download", "PullFolder._files", "files.rglob"): CONSTANT,
    ("ckptkit/hub/watch/build", "_put_state", "folder.rglob"): CONSTANT,
    ("ckptkit/integrations/accelerate/accelerator_state", "obstacle", "folder.rglob"): CONSTANT,
    (
        "ckptkit/integrations/accelerate/accelerator_state",
        "call_save_hooks",
        "folder.rglob",
    ): CONSTANT,
    (
        "ckptkit/integrations/accelerate/saves",
        "AcceleratorSaves._note_loaders",
        "folder.glob",
    ): CONSTANT,
    ("ckptkit/integrations/checkpointers", "_move_into", "hidden.rglob"): CONSTANT,
    ("ckptkit/integrations/checkpointers", "_move_into", "out.glob"): CONSTANT,
    ("ckptkit/conversion/naming_program", "_library", ".glob"): CONSTANT,
    ("ckptkit/conversion/naming_program", "start_program", "subprocess.Popen"): PROGRAM,
    ("ckptkit/name_maps/shipped", "list_map_names", "_FOLDER.glob"): CONSTANT,
    ("ckptkit/options", "find_patterns", "fnmatchcase"): ESCAPED,
    ("ckptkit/options", "find_patterns", "glob.escape"): ESCAPED,
    ("ckptkit/options", "matches", "fnmatchcase"): GIVEN,
    ("ckptkit/plan/load_report", "take_only", "glob.escape"): ESCAPED,
    ("ckptkit/storage/remote/store", "read_hub_range", "filesystem.open"): EXACT,
    ("ckptkit/storage/remote/store", "pin_revision", "filesystem.endpoint"): NAMELESS,
    ("ckptkit/storage/remote/store", "pin_revision", "filesystem.resolve_path"): EXACT,
    ("ckptkit/storage/remote/store", "pin_revision", "filesystem.token"): NAMELESS,
    ("ckptkit/training/dcp", "_place_of", "filesystem.storage_options"): NAMELESS,
    ("ckptkit/storage/place_identity", "_find_s3_endpoint", "filesystem.connect"): NAMELESS,
    ("ckptkit/storage/place_identity", "_find_s3_endpoint", "filesystem.s3"): NAMELESS,
    ("ckptkit/storage/local/workdir", "_place_all", "files.rglob"): CONSTANT,
    ("ckptkit/runs/push_journal", "read_commands", ".glob"): CONSTANT,
    ("ckptkit/runs/push_journal", "read_journals", "state.glob"): CONSTANT,
    ("ckptkit/hub/watch/command_guard", "main", "subprocess.Popen"): WORDS,
    ("ckptkit/hub/watch/commands", "StepCommands._open", "subprocess.Popen"): WORDS,
    ("ckptkit/storage/remote/store", "RemoteStore._delete", "filesystem.rm_file"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore._list_all.ask", "filesystem.find"): EXACT,
    (
        "ckptkit/storage/remote/store",
        "RemoteStore._list_all.ask",
        "filesystem.invalidate_cache",
    ): NAMELESS,
    ("ckptkit/storage/remote/store", "RemoteStore._put_new", "filesystem.makedirs"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore._put_new", "filesystem.pipe_file"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore.get_small.ask", "filesystem.cat_file"): EXACT,
    (
        "ckptkit/storage/remote/store",
        "RemoteStore.list_folders.ask",
        "filesystem.invalidate_cache",
    ): NAMELESS,
    ("ckptkit/storage/remote/store", "RemoteStore.list_folders.ask", "filesystem.ls"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore.look_up", "filesystem.info"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore.path_of", "filesystem._strip_protocol"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore.put_if", "filesystem.call_s3"): S3,
    ("ckptkit/storage/remote/store", "RemoteStore.put_small.ask", "filesystem.call_s3"): S3,
    ("ckptkit/storage/remote/store", "RemoteStore.put_small.ask", "filesystem.pipe_file"): EXACT,
    ("ckptkit/storage/remote/store", "RemoteStore.read_into.ask", "filesystem.cat_file"): EXACT,
    ("ckptkit/storage/remote/store", "_open_filesystem", "filesystem.dircache"): NAMELESS,
    ("ckptkit/storage/remote/store", "_open_filesystem", "filesystem.retries"): NAMELESS,
    ("ckptkit/storage/remote/s3", "_read", "filesystem._call_s3"): S3,
    ("ckptkit/storage/remote/s3", "delete_s3_objects", "filesystem.call_s3"): S3,
    ("ckptkit/storage/remote/s3", "get_s3_object", "filesystem.loop"): NAMELESS,
    ("ckptkit/storage/remote/s3", "get_s3_object", "sync"): NAMELESS,
    ("ckptkit/storage/remote/s3", "head_s3_object", "filesystem.call_s3"): S3,
    ("ckptkit/storage/remote/s3", "list_s3_objects", "filesystem.call_s3"): S3,
    ("ckptkit/storage/remote/s3", "read_s3_range", "filesystem.loop"): NAMELESS,
    ("ckptkit/storage/remote/s3", "read_s3_range", "sync"): NAMELESS,
    ("ckptkit/storage/remote/s3", "split_s3_path", "filesystem.version_aware"): NAMELESS,
    ("ckptkit/storage/remote/s3", "S3Uploads.__init__", "filesystem.connect"): NAMELESS,
    ("ckptkit/storage/remote/s3", "S3Uploads.__init__", "filesystem.s3"): NAMELESS,
    ("ckptkit/storage/remote/s3", "S3Uploads._call", "filesystem.call_s3"): S3,
    ("ckptkit/storage/remote/s3", "S3Uploads.get", "filesystem.cat_file"): EXACT,
    ("ckptkit/storage/remote/s3", "S3Uploads.send", "filesystem.call_s3"): S3,
    ("ckptkit/storage/local/target", "LocalTarget.free_bytes", "files.rglob"): CONSTANT,
    ("ckptkit/storage/local/target", "LocalTarget.keep", "files.rglob"): CONSTANT,
    (
        "ckptkit/storage/remote/stream_target",
        "StreamTarget.__init__",
        "filesystem.start_transaction",
    ): NAMELESS,
    ("ckptkit/storage/remote/stream_target", "StreamTarget._open", "filesystem.makedirs"): EXACT,
    ("ckptkit/storage/remote/stream_target", "StreamTarget._open", "filesystem.open"): EXACT,
    (
        "ckptkit/storage/remote/stream_target",
        "StreamTarget.abandon",
        "filesystem.transaction",
    ): NAMELESS,
    (
        "ckptkit/storage/remote/stream_target",
        "StreamTarget.commit",
        "filesystem.transaction",
    ): NAMELESS,
    ("ckptkit/storage/local/workdir", "_take_back", "files.rglob"): CONSTANT,
    ("ckptkit/training/pushing", "Pushing._launch", "subprocess.Popen"): PROGRAM,
    ("ckptkit/training/sidecar", "_below", "folder.rglob"): CONSTANT,
    ("ckptkit/training/tiers/save", "open_tier.find_ranks", "parent.glob"): CONSTANT,
    ("ckptkit/training/save/writer_process", "WriterProcess._start", "subprocess.Popen"): PROGRAM,
    ("ckptkit/writer/upload/run_store", "finish", "folder.rglob"): CONSTANT,
    ("ckptkit/writer/upload/run_store", "UploadedFiles.of", ".glob"): CONSTANT,
    ("ckptkit/writer/upload/run_store", "_stream", "filesystem.open"): EXACT,
    ("ckptkit/writer/upload/run_store", "RunStore.copy", "filesystem.cp_file"): EXACT,
    ("ckptkit/integrations/accelerate/whole_files", "capturing", "folder.rglob"): CONSTANT,
    ("ckptkit/storage/remote/store", "RemoteStore.delete", "filesystem.remove_files"): EXACT,
    (
        "ckptkit/storage/remote/stream_target",
        "BucketTarget._publish",
        "filesystem.copy_files",
    ): EXACT,
    ("ckptkit/writer/sweep", "_is_stale", "folder.rglob"): CONSTANT,
    ("ckptkit/writer/upload/run_store", "RunStore.put_file", "filesystem.put_file"): EXACT,
    ("ckptkit/writer/commit", "_copy_sidecar", "source.rglob"): CONSTANT,
    ("ckptkit/writer/commit", "_holds_more", "final.rglob"): CONSTANT,
    ("ckptkit/writer/commit", "_move_into", "folder.rglob"): CONSTANT,
    ("ckptkit/writer/commit", "remove_steps", "step.glob"): CONSTANT,
}


def calls(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the enclosing function and the text of each call that is looked for."""
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, where = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            where = f"{where}.{node.name}".lstrip(".")
        text = ""
        if isinstance(node, ast.Call):
            text = _wanted(node, names)
        elif isinstance(node, ast.Attribute) and _last(node.value) in CLIENTS:
            text = f"filesystem.{node.attr}"  # also where it is only kept, to be called later
        if text:
            yield where, text
        stack += [(child, where) for child in ast.iter_child_nodes(node)]


def _wanted(call: ast.Call, names: set[str]) -> str:
    function = call.func
    if any(one.arg == "shell" for one in call.keywords):
        return "shell="
    if isinstance(function, ast.Name):
        return function.id if function.id in names | {"fnmatchcase"} else ""
    if not isinstance(function, ast.Attribute):
        return ""
    last = _last(function.value)
    return f"{last}.{function.attr}" if last in MODULES or function.attr in PATTERNS else ""


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else str(getattr(node, "id", ""))


@cache
def found() -> frozenset[tuple[str, str, str]]:
    """Returns module, function and call of each call in the source."""
    rows: set[tuple[str, str, str]] = set()
    for folder in ("ckptkit", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not any(word in text for word in {"shell", *CLIENTS, *PATTERNS, *MODULES}):
                continue
            tree = parse_source(path)
            # What is imported from such a module by name.
            names = {
                alias.asname or alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] in MODULES
                for alias in node.names
            }
            module = path.relative_to(ROOT).with_suffix("").as_posix()
            rows |= {(module, where, call) for where, call in calls(tree, names)}
    return frozenset(rows)


def test_every_call_is_known_and_has_its_reason() -> None:
    now = found()
    assert sorted(now - ALLOWED.keys()) == [], "is a name taken for a pattern there?"
    assert sorted(ALLOWED.keys() - now) == []


def test_objects_are_removed_in_one_function_alone() -> None:
    removing = {"rm", "rm_file", "_rm", "_rm_file", "rmdir", "delete", "mv", "rename"}
    clients = {row for row in found() if row[2].partition(".")[2] in removing}
    assert clients == {
        ("ckptkit/storage/remote/store", "RemoteStore._delete", "filesystem.rm_file")
    }
    requests = {
        (path.stem, node.value)
        for path in (ROOT / "ckptkit").rglob("*.py")
        if "delete_object" in path.read_text(encoding="utf-8")
        for node in ast.walk(parse_source(path))
        if isinstance(node, ast.Constant) and node.value in {"delete_object", "delete_objects"}
    }
    assert {name for name, _ in requests} == {"s3"}
