"""The rules of `ckptkit doctor`, on real file systems, limits, configurations and versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import ckptkit
from ckptkit.core.errors import FormatError, InputError, UnsupportedError, UsageError
from ckptkit.diagnosis.examine import read_arguments
from ckptkit.diagnosis.findings import Diagnosis, Finding, SaveDemand
from ckptkit.diagnosis.machine import (
    MachineFacts,
    gather_machine,
    installed_versions,
    judge_machine,
    judge_versions,
)
from ckptkit.diagnosis.place import DiskFacts, gather_disk, judge_disk, judge_trial
from tests.files import mounted, remount, tmpfs
from tests.reflink import reflink_mount

ROOT = Path(__file__).resolve().parents[3]
RUN_OF_0_1 = ROOT / "fixtures" / "written_by_0_1" / "run"


def found(findings: list[Finding] | Diagnosis, name: str) -> list[Finding]:
    every = findings.findings if isinstance(findings, Diagnosis) else findings
    return [finding for finding in every if finding.id == name]


def severities(findings: list[Finding] | Diagnosis, name: str) -> list[str]:
    return [finding.severity for finding in found(findings, name)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB with room for 40 files."""
    with mounted(tmp_path / "small", *tmpfs("4m,nr_inodes=40")) as place:
        yield place


def test_a_disk_without_room_for_a_step_is_an_error_and_nothing_is_left_there(
    small_disk: Path,
) -> None:
    facts = gather_disk("run", small_disk / "runs" / "a", writes=True)
    assert (facts.kind, facts.problem) == ("tmpfs", "")
    assert facts.has_locks
    assert facts.written_bytes <= (4 << 20) // 20
    assert list(small_disk.iterdir()) == []
    judged = judge_disk(facts, SaveDemand(step_bytes=5 << 20, basis="a test", ranks=8))
    assert severities(judged, "disk-space") == ["error"]
    assert severities(judged, "disk-inodes") == ["error"]
    assert severities(judged, "file-system") == ["warning"]
    (room,) = found(judged, "disk-space")
    assert "room for 0 more of 5.24 MB (a test)" in room.found
    assert "ckptkit prune" in room.advice


@pytest.mark.parametrize(
    ("demand", "severity"),
    [
        (SaveDemand(step_bytes=1 << 20), "ok"),  # three fit, and no more is known
        (SaveDemand(step_bytes=3 << 19), "warning"),
        (SaveDemand(step_bytes=1 << 20, keep_last=3, kept_because="x"), "ok"),
        (SaveDemand(step_bytes=1 << 20, keep_last=5, kept_because="x"), "error"),
        (SaveDemand(step_bytes=1 << 20, keep_last=5, stored_steps=5, kept_because="x"), "ok"),
        (SaveDemand(step_bytes=1 << 20, to_come=9), "error"),
        (SaveDemand(step_bytes=1 << 20, to_come=2), "ok"),
        (SaveDemand(step_bytes=9 << 20, to_come=0), "ok"),
        (SaveDemand(step_bytes=9 << 20, to_come=0, keep_last=3, kept_because="x"), "ok"),
        (SaveDemand(step_bytes=9 << 20, to_come=1), "error"),
    ],
)
def test_room_is_compared_with_the_steps_that_stay_and_one_more(
    demand: SaveDemand, severity: str
) -> None:
    facts = DiskFacts("run", Path("/"), kind="ext4", free_bytes=4 << 20)
    assert severities(judge_disk(facts, demand), "disk-space") == [severity]


@pytest.mark.parametrize(("kind", "shares"), [("xfs", True), ("xfs_plain", False), ("btrfs", True)])
def test_it_is_tried_whether_files_share_blocks(kind: str, shares: bool, tmp_path: Path) -> None:
    with reflink_mount(kind, tmp_path) as place:
        facts = gather_disk("run", place / "run", writes=True)
        assert facts.shares_blocks is shares
        assert list(place.iterdir()) == []
        (finding,) = found(judge_disk(facts, SaveDemand()), "shared-blocks")
        assert (finding.severity, bool(finding.advice)) == ("ok", not shares)
        assert judge_disk(facts, SaveDemand(), is_local_tier=True)[-1].id != "shared-blocks"
        untried = gather_disk("run", place / "run", writes=False)
        assert found(judge_disk(untried, SaveDemand()), "shared-blocks") == []


def test_a_disk_that_cannot_be_written_is_an_error(small_disk: Path) -> None:
    remount(small_disk, "-o", "remount,ro")
    facts = gather_disk("run", small_disk, writes=True)
    assert severities(judge_disk(facts, SaveDemand()), "disk-writable") == ["error"]


@pytest.mark.parametrize(
    ("kind", "source", "options", "name"),
    [
        ("overlay", "overlay", "rw", "file-system"),
        ("fuse", "mountpoint-s3", "rw", "file-system"),
        ("fuse.gcsfuse", "bucket", "rw", "file-system"),
        ("exfat", "/dev/sdb1", "rw", "file-system"),
        ("nfs4", "host:/x", "rw,local_lock=all", "file-locks"),
        ("lustre", "host@tcp:/x", "rw,localflock", "file-locks"),
    ],
)
def test_file_systems_that_break_a_promise_are_warned_of(
    kind: str, source: str, options: str, name: str
) -> None:
    facts = DiskFacts(
        "run",
        Path("/x"),
        kind=kind,
        mount_source=source,
        mount_options=frozenset(options.split(",")),
    )
    assert severities(judge_disk(facts, SaveDemand()), name) == ["warning"]
    plain = DiskFacts("run", Path("/x"), kind="xfs", mount_source="/dev/sda")
    assert severities(judge_disk(plain, SaveDemand()), name) in (["ok"], [])


LIMITED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
from ckptkit.diagnosis.findings import SaveDemand
from ckptkit.diagnosis.machine import gather_machine, judge_machine
found = judge_machine(gather_machine(), SaveDemand(step_bytes=1 << 30, ranks=4))
assert not {"torch", "accelerate"} & sys.modules.keys()
print(json.dumps({finding.id: [finding.severity, finding.found] for finding in found}))
"""


def test_limits_of_the_process_are_found() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    judged = json.loads(done.stdout)
    assert judged["open-files"] == ["warning", "256 open files"]
    assert judged["file-size"] == ["error", "files of at most 1.05 MB"]


def test_memory_for_staging_is_compared_with_what_is_available() -> None:
    here = gather_machine()
    assert here.available_bytes is not None
    large = SaveDemand(step_bytes=2 * here.available_bytes, basis="a test")
    assert severities(judge_machine(here, large), "memory") == ["error"]
    on_four_nodes = SaveDemand(step_bytes=2 * here.available_bytes, basis="a test", nodes=4)
    assert severities(judge_machine(here, on_four_nodes), "memory") == ["ok"]


def test_docker_defaults_are_warned_of() -> None:
    container = MachineFacts(
        shared_bytes=64 << 20,
        free_shared_bytes=64 << 20,
        locked_bytes=64 << 10,
        open_files=1024,
        most_open_files=1 << 20,
        tasks_left=500,
        accelerators=8,
    )
    judged = judge_machine(container, SaveDemand())
    assert {finding.id for finding in judged if finding.severity == "warning"} == {
        *("shared-memory", "locked-memory", "open-files", "tasks")
    }
    (files,) = found(judged, "open-files")
    assert "ulimit -n 65536" in files.advice


def accelerate_config(path: Path) -> Path:
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=64,
        num_machines=8,
        fsdp_config={"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_version": 1},
    )
    config.to_yaml_file(path)
    return path


def test_what_accelerate_config_writes_says_how_many_ranks_share_a_step(tmp_path: Path) -> None:
    said = read_arguments(accelerate_config(tmp_path / "fsdp.yaml"))
    assert (said.ranks, said.nodes, said.save_every) == (64, 8, None)


def test_arguments_of_the_trainer_say_what_a_step_takes_and_show_no_token(tmp_path: Path) -> None:
    arguments = {
        "output_dir": str(tmp_path / "run"),
        "per_device_train_batch_size": 1,
        "save_total_limit": "2",
        "optim": "paged_adamw_8bit",
        "hub_token": "hf_secretsecretsecretsecretsecret",
        "fsdp_config": {"version": 1},
        "max_steps": 1.0e5,
    }
    file = tmp_path / "sft.yaml"
    for only_model, size in ((False, "6.00 MB"), (True, "4.00 MB")):
        file.write_text(yaml.safe_dump(arguments | {"save_only_model": only_model}))
        said = read_arguments(file)
        assert (said.keep_last, said.max_steps, said.save_every) == (2, 100_000, 500)
        judged = ckptkit.doctor([file, accelerate_config(tmp_path / "a.yaml")], model_size="1M")
        (room,) = found(judged, "disk-space")
        assert size in room.found
        assert "2 stay (save_total_limit)" in room.found
        assert "secretsecret" not in repr(judged.to_json()) + repr(said)


@pytest.mark.parametrize(
    ("installed", "severities_expected"),
    [
        ({"peft": "0.21.0"}, ["warning"]),
        ({"peft": "0.21.2"}, ["warning"]),
        ({"peft": "0.20.0"}, []),
        ({"peft": "0.20.0", "accelerate": "1.14.0"}, ["warning"]),
        ({"peft": "0.20.0", "accelerate": "1.15.0"}, []),
        ({"accelerate": "1.14.0"}, []),  # of adapters
        ({"transformers": "5.22.2"}, ["warning"]),
        ({"transformers": "5.23.0"}, []),
        ({"transformers": "4.57.0"}, []),
        ({"torch": "2.5.1+cu124"}, []),
        ({"torch": "2.5.1+cu124", "accelerate": "1.15.0"}, ["warning"]),
        ({"torch": "2.13.0+cpu", "accelerate": "1.15.0"}, []),
        ({"torch": "2.0.1"}, ["warning"]),
        ({"bitsandbytes": "0.48.2"}, ["warning"]),
        ({"bitsandbytes": "0.49.1"}, ["warning", "warning"]),
        ({"bitsandbytes": "0.50.2"}, ["warning", "warning"]),
        ({"deepspeed": "0.18.3"}, ["warning", "warning"]),
        ({"deepspeed": "0.19.0"}, ["warning"]),
        ({"fairscale": "0.4.13"}, ["warning"]),
    ],
)
def test_versions_with_known_faults_are_found(
    installed: dict[str, str], severities_expected: list[str]
) -> None:
    judged = judge_versions(installed)
    assert severities(judged, "known-fault") == severities_expected
    assert severities(judged, "versions") == (
        [] if severities_expected and len(installed) == 1 else ["ok"]
    )


def test_installed_versions_are_those_that_would_be_imported() -> None:
    import accelerate

    installed = installed_versions()
    assert installed["accelerate"] == accelerate.__version__
    assert {"peft", "torch", "transformers"} <= installed.keys()


@pytest.mark.parametrize(
    ("said", "to_come"),
    [
        ({"max_steps": 500, "save_steps": 50}, 8),
        ({"max_steps": 500, "save_steps": 0.2}, 4),
        ({"max_steps": 2000}, 4),  # the Trainer saves every 500 steps
        ({"max_steps": 100, "save_steps": 50}, 0),
        ({"save_steps": 20}, 5),
        ({"max_steps": 500, "save_strategy": "epoch"}, None),
        ({"max_steps": 500, "save_strategy": "steps", "save_steps": "many"}, 40),
    ],
)
def test_arguments_of_the_trainer_say_how_many_steps_are_to_come(
    tmp_path: Path, said: dict[str, object], to_come: int | None
) -> None:
    step = tmp_path / "run" / "checkpoint-100"
    step.mkdir(parents=True)
    save_file({"weight": np.zeros(4)}, step / "model.safetensors")
    state = {"global_step": 100, "max_steps": 200, "save_steps": 10}
    (step / "trainer_state.json").write_text(json.dumps(state))
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"output_dir": str(tmp_path / "run"), **said}))
    (room,) = found(ckptkit.doctor(file, probe=False, model_size="1M"), "disk-space")
    if to_come is None:
        assert "it is not known how many are to come" in room.found
    elif to_come == 0:
        assert "no more steps are to come" in room.found
    else:
        assert f"{to_come} steps are to come" in room.found + room.expected


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"a: [1, 2", FormatError),
        (b"\xff\xfe\x00", FormatError),
        (b"[" * 600, FormatError),
        (b"- 1\n- 2\n", FormatError),
        (b"", FormatError),
        (b"x" * ((1 << 20) + 1), FormatError),
        (b"!!python/object/apply:os.system ['true']", FormatError),
        (b'{"model_type": "llama"}', UnsupportedError),
        (b"1: 2\n", UnsupportedError),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    tmp_path: Path, content: bytes, error: type[InputError]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    with pytest.raises(error, match=r"x\.yaml"):
        read_arguments(file)
    with pytest.raises(InputError, match="cannot be read: no such file"):
        read_arguments(tmp_path / "absent.yaml")


@given(st.binary(max_size=200) | st.text("&*<>:[]{}!\"'-0x1ab\n ,=", max_size=60).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_holds_ends_in_an_error_of_its_own(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"output_dir: x\nsave_total_limit: " + content)
    with suppress(InputError):
        read_arguments(file)


@pytest.mark.parametrize(
    "value",
    [
        *('!!int ""', '!!float ""', "!!bool maybe", "!!timestamp x", "2026-99-99", "[1]", "~"),
        *(f"{'1:' * 200}1.0", "0x" + "f" * 6_000, ":".join(["1"] * 20_000), "9" * 5_000, "-1"),
        *(".nan", ".inf", "1.5", "many"),
    ],
)
def test_what_is_no_number_of_steps_says_nothing(tmp_path: Path, value: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"output_dir: x\nsave_total_limit: {value}\nmax_steps: 7\n")
    said = read_arguments(file)
    assert (said.keep_last, said.max_steps) == (None, 7)


def test_aliases_and_merge_keys_do_not_expand_without_end(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    laughs = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    eight = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    for bomb in (f"a0: &a0 ha\n{laughs}", f"a0: &a0 {{x: 1}}\n{eight}", "a: &a {<<: *a}\n"):
        file.write_text(f"{bomb}output_dir: x\nmax_steps: 7\n")
        assert read_arguments(file).max_steps == 7
    file.write_text("a: &a {max_steps: 5}\n<<: *a\noutput_dir: x\n")
    with pytest.raises(FormatError, match="merges settings with '<<' at its top"):
        read_arguments(file)


@pytest.mark.parametrize("folder", ["a\0b", "a" * 5_000, "s3://a\0b/c"])
def test_an_output_directory_that_nothing_can_be_is_told_with_its_file(
    tmp_path: Path, folder: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"output_dir": folder}))
    with pytest.raises(InputError, match=r"x\.json: output_dir is .*a path or a URL was expected"):
        ckptkit.doctor(str(file), probe=False)


def test_a_run_shows_what_the_next_step_needs(tmp_path: Path) -> None:
    judged = ckptkit.doctor(RUN_OF_0_1, probe=False)
    (room,) = found(judged, "disk-space")
    assert "(checkpoint-4)" in room.found
    step = ckptkit.list_run(RUN_OF_0_1).steps[-1]
    shared = ckptkit.doctor([RUN_OF_0_1], probe=False, nodes=2, keep_last=3)
    assert found(shared, "memory")
    assert step.size_bytes
    with pytest.raises(UsageError, match="names 2 runs"):
        ckptkit.doctor([RUN_OF_0_1, tmp_path])
    with pytest.raises(UsageError, match="is not a number of parameters"):
        ckptkit.doctor(model_size="8 apples")
    assert repr(judged).startswith(f"<Diagnosis '{RUN_OF_0_1}': 0 errors,")


def test_steps_of_a_small_model_make_no_room_for_those_of_a_large_one() -> None:
    def wanted(places: object, size: str) -> str:
        judged = ckptkit.doctor(places, probe=False, model_size=size, keep_last=3)  # type: ignore[arg-type]
        return found(judged, "disk-space")[0].expected

    for size in ("70B", "400B"):
        assert wanted(RUN_OF_0_1, size) == wanted(RUN_OF_0_1.parent / "new", size)


def test_an_empty_adapter_in_a_run_is_an_error(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-10"
    step.mkdir(parents=True)
    save_file({}, step / "adapter_model.safetensors", metadata={"format": "pt"})
    (step / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    state = {"global_step": 10, "max_steps": 100, "save_steps": 10}
    (step / "trainer_state.json").write_text(json.dumps(state))
    judged = ckptkit.doctor(tmp_path / "run", probe=False)
    assert severities(judged, "empty-adapter") == ["error"]


def test_a_store_that_breaks_a_promise_is_warned_of() -> None:
    writes_over = judge_trial("s3://b/x", "it writes over", keeps_checksum=None)
    assert severities(writes_over, "store-conditions") == ["warning"]
    keeps_none = judge_trial("s3://b/x", "", keeps_checksum=False)
    assert severities(keeps_none, "store-checksums") == ["warning"]
