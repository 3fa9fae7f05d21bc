"""The rules of `ckptkit doctor`, on real file systems, limits, configurations and versions."""

from __future__ import annotations

import json
import os
import shutil
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
from msgspec.structs import replace
from safetensors.numpy import save_file

import ckptkit
from ckptkit.core.errors import FormatError, InputError, UnsupportedError, UsageError
from ckptkit.diagnosis.config_checks import TrainingSetup, join_setups, judge_setup, read_setup
from ckptkit.diagnosis.disk_checks import DiskFacts, gather_disk, judge_disk
from ckptkit.diagnosis.findings import Diagnosis, Finding, SaveDemand
from ckptkit.diagnosis.machine_checks import Limit, MachineFacts, gather_machine, judge_machine
from ckptkit.diagnosis.service_checks import (
    HubFacts,
    StoreFacts,
    gather_hub,
    judge_hub,
    judge_store,
)
from ckptkit.diagnosis.version_checks import installed_versions, judge_versions

ROOT = Path(__file__).resolve().parents[3]
RUN_OF_0_1 = ROOT / "fixtures" / "written_by_0_1" / "run"
MOUNT, UNMOUNT = (shutil.which(name) or name for name in ("mount", "umount"))
GB = 10**9


def found(findings: list[Finding] | Diagnosis, name: str) -> list[Finding]:
    every = findings.findings if isinstance(findings, Diagnosis) else findings
    return [finding for finding in every if finding.id == name]


def severities(findings: list[Finding] | Diagnosis, name: str) -> list[str]:
    return [finding.severity for finding in found(findings, name)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB with room for 40 files."""
    place = tmp_path / "small"
    place.mkdir()
    command = [MOUNT, "-t", "tmpfs", "-o", "size=4m,nr_inodes=40", "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run([UNMOUNT, "--lazy", str(place)], check=True)


def test_a_disk_without_room_for_a_step_is_an_error_and_nothing_is_left_there(
    small_disk: Path,
) -> None:
    facts = gather_disk("run", small_disk / "runs" / "a", writes=True)
    assert (facts.kind, facts.problem) == ("tmpfs", "")
    assert facts.probe is not None
    assert facts.probe.has_locks
    assert facts.probe.written_bytes <= (4 << 20) // 20
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


def test_a_disk_that_cannot_be_written_is_an_error(small_disk: Path) -> None:
    subprocess.run([MOUNT, "-o", "remount,ro", str(small_disk)], check=True)
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
from ckptkit.diagnosis.machine_checks import gather_machine, judge_machine
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
        locked_bytes=Limit(64 << 10, 64 << 10),
        open_files=Limit(1024, 1 << 20),
        tasks_left=500,
        accelerators=8,
    )
    judged = judge_machine(container, SaveDemand())
    assert {finding.id for finding in judged if finding.severity == "warning"} == {
        *("shared-memory", "locked-memory", "open-files", "tasks")
    }
    (files,) = found(judged, "open-files")
    assert "ulimit -n 65536" in files.advice


@pytest.fixture(scope="module")
def configurations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `accelerate config` writes, with the questions answered in several ways."""
    from accelerate.commands.config.config_args import ClusterConfig

    folder = tmp_path_factory.mktemp("configurations")
    ways = {
        "full": {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_version": 1},
        "default1": {"fsdp_version": 1},
        "sharded2": {"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2},
        "full2": {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_version": 2},
        "local": {"fsdp_state_dict_type": "LOCAL_STATE_DICT", "fsdp_version": 1},
        "refused": {
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_sync_module_states": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "efficient": {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True},
    }
    for name, fsdp in ways.items():
        config = ClusterConfig(
            compute_environment="LOCAL_MACHINE",
            distributed_type="FSDP",
            mixed_precision="bf16",
            use_cpu=False,
            debug=False,
            num_processes=64,
            num_machines=8,
            fsdp_config=fsdp,
        )
        config.to_yaml_file(folder / f"{name}.yaml")
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="DEEPSPEED",
        mixed_precision="bf16",
        use_cpu=False,
        debug=False,
        num_processes=8,
        deepspeed_config={"zero_stage": 3, "zero3_save_16bit_model": True},
    )
    config.to_yaml_file(folder / "zero3.yaml")
    return folder


@pytest.mark.parametrize(
    ("name", "finding", "severity"),
    [
        ("full", "state-dict-type", "warning"),
        ("default1", "state-dict-type", "warning"),
        ("full2", "state-dict-type", "warning"),
        ("local", "state-dict-type", "warning"),
        ("refused", "efficient-loading", "error"),
        ("zero3", "gathered-weights", "warning"),
        ("sharded2", "configuration", "ok"),
    ],
)
def test_what_accelerate_config_writes_is_judged(
    configurations: Path, name: str, finding: str, severity: str
) -> None:
    setup = read_setup(configurations / f"{name}.yaml")
    judged = judge_setup(setup, SaveDemand(), None)
    assert severities(judged, finding) == [severity]
    assert setup.ranks == (8 if name == "zero3" else 64)


def test_a_state_that_rank_0_cannot_hold_is_an_error(configurations: Path) -> None:
    setup = read_setup(configurations / "full.yaml")
    demand = SaveDemand(step_bytes=96 * GB, basis="--model-size")
    (gathered,) = found(judge_setup(setup, demand, 64 * GB), "state-dict-type")
    assert gathered.severity == "error"
    assert "96.0 GB, where 64.0 GB are available" in gathered.found


@pytest.mark.parametrize(
    ("installed", "name", "adapter", "expected"),
    [
        ({"peft": "0.21.0"}, "full", True, "error"),
        ({"peft": "0.21.2"}, "full", None, "warning"),
        ({"peft": "0.21.2"}, "sharded2", True, ""),
        ({"peft": "0.20.0"}, "full", True, ""),
        ({"peft": "0.20.0", "accelerate": "1.14.0"}, "full2", True, "error"),
        ({"peft": "0.20.0", "accelerate": "1.15.0"}, "full2", True, ""),
        ({"accelerate": "1.14.0"}, "full2", None, ""),
        ({"transformers": "5.22.2"}, "efficient", None, "warning"),
        ({"transformers": "5.23.0"}, "efficient", None, ""),
        ({"transformers": "4.57.0"}, "efficient", None, ""),
        ({"torch": "2.5.1+cu124"}, "sharded2", None, "error"),
        ({"torch": "2.13.0+cpu"}, "sharded2", None, ""),
    ],
)
def test_versions_are_judged_for_the_job_that_a_configuration_describes(
    configurations: Path, installed: dict[str, str], name: str, adapter: bool | None, expected: str
) -> None:
    setup = join_setups(
        [read_setup(configurations / f"{name}.yaml"), TrainingSetup(trains_adapter=adapter)]
    )
    judged = severities(judge_versions(installed, setup), "known-fault")
    assert judged == ([expected] if expected else [])


def test_installed_versions_are_those_that_would_be_imported() -> None:
    import accelerate

    installed = installed_versions()
    assert installed["accelerate"] == accelerate.__version__
    assert {"peft", "torch", "transformers"} <= installed.keys()


TRAINER = {
    "output_dir": "runs/a",
    "per_device_train_batch_size": 1,
    "save_total_limit": 2,
    "optim": "paged_adamw_8bit",
    "hub_token": "hf_secretsecretsecretsecretsecret",
    "use_peft": True,
    "fsdp": "full_shard",
    "fsdp_config": {"version": 1, "cpu_ram_efficient_loading": "true"},
    "save_only_model": True,
    "enable_jit_checkpoint": True,
}


def test_arguments_of_the_trainer_are_judged_and_show_no_token(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(TRAINER))
    setup = read_setup(file)
    assert (setup.strategy, setup.state_dict, setup.keep_last) == ("fsdp1", "FULL_STATE_DICT", 2)
    assert setup.state_dict_default
    judged = judge_setup(setup, SaveDemand(ranks=8), None)
    assert {finding.id for finding in judged} == {
        *("state-dict-type", "paged-optimizer", "8-bit-optimizer", "save-only-model"),
        *("jit-checkpoint", "token-in-file"),
    }
    assert "secretsecret" not in repr(judged) + repr(setup)
    assert severities(judge_versions({"peft": "0.21.2"}, setup), "known-fault") == ["error"]
    old = judge_versions({"bitsandbytes": "0.49.1"}, setup)
    assert severities(old, "known-fault") == ["error"]
    assert severities(judge_versions({"bitsandbytes": "0.49.2"}, setup), "known-fault") == []


def test_a_gathered_state_is_warned_of_where_no_file_says_how_many_ranks_there_are(
    tmp_path: Path,
) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "fsdp": "full_shard"}))
    (gathered,) = found(ckptkit.doctor(file, probe=False), "state-dict-type")
    assert gathered.severity == "warning"
    assert gathered.advice.endswith("pass --ranks, which no file says")
    assert found(ckptkit.doctor(file, probe=False, ranks=1), "state-dict-type") == []
    (counted,) = found(ckptkit.doctor(file, probe=False, ranks=4), "state-dict-type")
    assert "of 4 ranks on rank 0" in counted.found


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


def test_a_trainer_that_pushes_needs_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    said = {"output_dir": str(tmp_path / "run"), "push_to_hub": True}
    file = tmp_path / "args.json"
    for named, repo in (({}, "run"), ({"hub_model_id": "org/model"}, "org/model")):
        file.write_text(json.dumps({**said, **named}))
        (hub,) = found(ckptkit.doctor(file, probe=False), "hub")
        assert (hub.severity, hub.where, hub.expected) == ("error", repo, "a token")
    for other in ({"push_to_hub": False}, {"hub_token": "hf_of_the_file"}):
        file.write_text(json.dumps({**said, **other}))
        assert severities(ckptkit.doctor(file, probe=False), "hub") == ["ok"]


def test_faults_that_pages_name_are_found_by_versions(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    for round_robin, expected in ((True, ["warning", "warning"]), (False, ["warning"])):
        zero = {"stage": 2, "round_robin_gradients": round_robin}
        file.write_text(json.dumps({"zero_optimization": zero}))
        setup = read_setup(file)
        assert severities(judge_versions({"deepspeed": "0.18.3"}, setup), "known-fault") == expected
        newer = judge_versions({"deepspeed": "0.19.0"}, setup)
        assert severities(newer, "known-fault") == ["warning"]
    judged = judge_versions({"fairscale": "0.4.13"}, TrainingSetup())
    assert severities(judged, "known-fault") == ["warning"]


def test_a_configuration_of_deepspeed_is_read_where_another_names_it(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    (tmp_path / "zero.json").write_text(
        json.dumps(
            {"zero_optimization": zero, "checkpoint": {"use_node_local_storage": True}}, indent="\t"
        )
    )
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "x", "deepspeed": "zero.json"}))
    for name in ("zero.json", "args.json"):
        judged = judge_setup(read_setup(tmp_path / name), SaveDemand(), None)
        assert severities(judged, "gathered-weights") == ["warning"]
        assert severities(judged, "node-local-storage") == ["warning"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"a: [1, 2", FormatError),
        (b"\xff\xfe\x00", FormatError),
        (b"[" * 5_000, FormatError),
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
        read_setup(file)
    with pytest.raises(InputError, match="cannot be read: no such file"):
        read_setup(tmp_path / "absent.yaml")


FSDP = "distributed_type: FSDP\nnum_processes: 2\n"


@pytest.mark.parametrize(
    ("text", "found_text", "expected"),
    [
        ("distributed_type: FSPD\n", "distributed_type: FSPD", "FSDP"),
        ("distributed_type: FSDP\nnum_processes: lots\n", "num_processes: lots", "whole number"),
        (f"{FSDP}fsdp_config: {{fsdp_version: 3}}\n", "fsdp_config.fsdp_version: 3", "1, 2"),
        (
            f"{FSDP}fsdp_config: {{fsdp_state_dict_type: SHARDED}}\n",
            "fsdp_config.fsdp_state_dict_type: SHARDED",
            "SHARDED_STATE_DICT",
        ),
        (
            f"{FSDP}fsdp_config: {{fsdp_sync_module_states: maybe}}\n",
            "fsdp_config.fsdp_sync_module_states: maybe",
            "true or false",
        ),
        ("distributed_type: FSDP\nfsdp_config: [1]\n", "fsdp_config: a list", "a table"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n",
            "deepspeed_config.zero_stage: 4",
            "0, 1, 2, 3",
        ),
        (
            '{"zero_optimization": {"stage": "three"}}',
            "zero_optimization.stage: three",
            "0, 1, 2, 3",
        ),
        ('{"zero_optimization": 3}', "zero_optimization: 3", "a table"),
        ("output_dir: x\nsave_strategy: step\n", "save_strategy: step", "steps"),
        (
            "output_dir: x\ndeepspeed: {zero_optimization: {stage: x}}\n",
            "zero_optimization.stage: x",
            "0, 1, 2, 3",
        ),
    ],
)
def test_values_that_a_launcher_refuses_are_errors(
    tmp_path: Path, text: str, found_text: str, expected: str
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    (finding,) = found(judge_setup(read_setup(file), SaveDemand(), None), "setting")
    assert (finding.severity, finding.where) == ("error", str(file))
    assert finding.found.startswith(found_text)
    assert expected in finding.expected


def test_values_that_a_launcher_takes_are_none(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for text in (
        "distributed_type: NO\nnum_processes: 1\nfsdp_config: {}\n",
        "distributed_type: multi_gpu\nnum_processes: -1\nnum_machines: '2'\n",
        f"{FSDP}fsdp_config: {{fsdp_cpu_ram_efficient_loading: 'True', fsdp_version: '2'}}\n",
        '{"zero_optimization": {"stage": 3, "round_robin_gradients": "auto"}}',
        "output_dir: x\nmax_steps: -1\nsave_strategy: no\nfsdp_config: fsdp.json\n",
        '{"output_dir": "x", "max_steps": 1.0e+5}',
    ):
        file.write_text(text)
        assert not found(judge_setup(read_setup(file), SaveDemand(), None), "setting")


def test_names_that_nothing_can_have_are_told_with_their_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "x.json"
    for said, setting in (
        ({"output_dir": "a\0b", "push_to_hub": True}, "output_dir"),
        ({"output_dir": "a" * 5_000}, "output_dir"),
        ({"output_dir": "s3://a\0b/c"}, "output_dir"),
        ({"output_dir": "x", "push_to_hub": True, "hub_model_id": "a b"}, "hub_model_id"),
        ({"output_dir": "my run", "push_to_hub": True}, "hub_model_id"),
    ):
        file.write_text(json.dumps(said))
        (finding,) = found(ckptkit.doctor(str(file), probe=False), "setting")
        assert finding.found.startswith(f"{setting}: ")
        assert (finding.severity, finding.where) == ("error", str(file))
    file.write_text(json.dumps({"output_dir": "my run", "hub_model_id": "a b"}))
    assert not found(ckptkit.doctor(str(file), probe=False), "setting")


@pytest.mark.parametrize("number", ["0x" + "f" * 6_000, ":".join(["1"] * 20_000)])
def test_a_number_without_end_is_shown_as_text(tmp_path: Path, number: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"output_dir: x\nsave_total_limit: {number}\n")
    (finding,) = found(judge_setup(read_setup(file), SaveDemand(), None), "setting")
    assert finding.found == f"save_total_limit: {number[:40]}"
    assert (finding.where, finding.expected) == (str(file), "a whole number")


@pytest.mark.parametrize(
    "value",
    ['!!int ""', '!!float ""', "!!bool maybe", "!!timestamp x", f"{'1:' * 200}1.0", "2026-99-99"],
)
def test_a_value_that_its_tag_does_not_fit_is_no_crash(tmp_path: Path, value: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"output_dir: x\nsave_total_limit: {value}\n")
    with pytest.raises(FormatError, match="is neither YAML nor JSON"):
        read_setup(file)


@given(st.binary(max_size=200) | st.text("&*<>:[]{}!\"'-0x1ab\n ,=", max_size=60).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_holds_ends_in_an_error_of_its_own(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"output_dir: x\nsave_total_limit: " + content)
    with suppress(InputError):
        judge_setup(read_setup(file), SaveDemand(), None)


@pytest.mark.parametrize(
    ("document", "setting"),
    [
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: %s}\n", "d"),
        ("output_dir: x\ndeepspeed: %s\n", "deepspeed: "),
    ],
)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ('"a\\0b"', "embedded null byte"),
        ("a" * 5_000, "file name too long"),
        ("absent.json", "no such file"),
        ("x.d", "is a directory"),
        ("broken.json", "is neither YAML nor JSON"),
    ],
)
def test_a_file_of_deepspeed_that_cannot_be_read_is_named_with_its_setting(
    tmp_path: Path, document: str, setting: str, name: str, problem: str
) -> None:
    (tmp_path / "x.d").mkdir()
    (tmp_path / "broken.json").write_text("{")
    file = tmp_path / "x.yaml"
    file.write_text(document % name)
    (finding,) = found(judge_setup(read_setup(file), SaveDemand(), None), "setting")
    assert (finding.severity, finding.where) == ("error", str(file))
    assert finding.found.startswith(setting)
    assert problem in finding.found
    assert len(finding.found) < 400
    assert finding.expected == "a configuration of DeepSpeed"


def test_merge_keys_do_not_expand_without_end(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    eight = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    wide = f"b: &b {{{', '.join(f'k{n}: 1' for n in range(1_000))}}}\n"
    for bomb in (
        f"a0: &a0 {{x: 1, y: 2}}\n{eight}",
        f"{wide}c: {{<<: [{', '.join(['*b'] * 2_000)}]}}\n",
        f"a: &a {{}}\nc: {{{', '.join(['<<: *a'] * 12_000)}}}\n",
    ):
        file.write_text(f"output_dir: x\n{bomb}")
        with pytest.raises(FormatError, match="merges more than 10,000 settings"):
            read_setup(file)
    file.write_text("a: &a {<<: *a}\noutput_dir: x\n")
    with pytest.raises(FormatError, match="is neither YAML nor JSON"):
        read_setup(file)
    file.write_text("a: &a {max_steps: 5, save_total_limit: 1}\n<<: [*a]\nsave_total_limit: 3\n")
    file.write_text(f"{file.read_text()}output_dir: x\n")
    setup = read_setup(file)
    assert (setup.max_steps, setup.keep_last) == (5, 3)


@pytest.mark.parametrize(
    "content",
    [
        "output_dir: x\ndeepspeed: other.yaml\ngradient_accumulation_steps: 1\n",
        "distributed_type: DEEPSPEED\n",
        '{"model_type": "llama"}',
    ],
)
def test_a_file_that_is_none_of_deepspeed_is_refused_where_a_setting_names_it(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "other.yaml").write_text(content)
    file = tmp_path / "x.yaml"
    file.write_text("output_dir: x\ndeepspeed: other.yaml\n")
    (finding,) = found(judge_setup(read_setup(file), SaveDemand(), None), "setting")
    assert finding.found == "deepspeed: 'other.yaml', which is no configuration of DeepSpeed"
    (tmp_path / "other.yaml").write_text('{"bf16": {"enabled": true}}')
    assert not found(judge_setup(read_setup(file), SaveDemand(), None), "setting")


def test_values_of_unexpected_kinds_are_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "distributed_type: [FSDP]\nfsdp_config: 3\nnum_processes: many\n"
        "deepspeed_config: {zero_stage: {a: 1}}\nfp8_config: no\n"
    )
    assert judge_setup(read_setup(file), SaveDemand(), None)
    laughs = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    file.write_text(f"a0: &a0 ha\n{laughs}distributed_type: *a29\nfsdp_config: {{x: *a29}}\n")
    assert judge_setup(read_setup(file), SaveDemand(), None)


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
    writes_over = StoreFacts("s3://b/x", "s3", was_tried=True, no_conditions="it writes over")
    assert severities(judge_store(writes_over), "store-conditions") == ["warning"]
    keeps_none = StoreFacts("s3://b/x", "s3", was_tried=True, has_checksum=False)
    assert severities(judge_store(keeps_none), "store-checksums") == ["warning"]
    gone = StoreFacts("s3://b/x", "s3", problem="access denied", advice="log in")
    assert severities(judge_store(gone), "store") == ["error"]


@pytest.mark.parametrize(("repo_id", "severity"), [("me/model", "error"), ("", "warning")])
def test_a_token_that_no_hub_gives_is_no_trouble_of_the_network(
    repo_id: str, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_üüüü")
    (judged,) = judge_hub(gather_hub(repo_id))
    assert judged.severity == severity
    assert judged.found == "the token is not accepted: the token has characters that no token has"
    assert "hf auth login" in judged.advice


def test_a_token_for_chosen_repositories_is_compared_with_the_one_to_push_to() -> None:
    facts = HubFacts(
        "https://hub",
        "org/model",
        has_token=True,
        is_reached=True,
        user="me",
        owners=frozenset({"me", "org"}),
        role="fineGrained",
        writes_to=frozenset({"org/other"}),
    )
    (refused,) = judge_hub(facts)
    assert (refused.severity, refused.expected) == ("error", "write access to org/model")
    (allowed,) = judge_hub(replace(facts, writes_to=frozenset({"org"})))
    assert allowed.severity == "ok"
