"""Objects beside the weights: which hold tensors, and what the note says of them."""

from __future__ import annotations

import time

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.index import KeyPath
from ckptkit.formats.pickle.machine import Global, InertKey, InertObject
from ckptkit.formats.pickle.objects import (
    describe_objects,
    find_holders,
    find_unread,
    is_object,
    whole_object_error,
)
from ckptkit.formats.pickle.torch_values import StorageRef, TensorRef, UnreadTensor

STORAGE = StorageRef("0", BY_NAME["float32"], 2)
TENSOR = TensorRef(STORAGE, BY_NAME["float32"], (2,), (1,), 0)
NET = Global("library", "Net")


def test_values_of_python_and_torch_are_no_objects() -> None:
    plain = [Global("argparse", "Namespace"), Global("pathlib", "PosixPath")]
    assert not any(is_object(InertObject(cls, ())) for cls in plain)
    assert not is_object(Global("torch.optim.adamw", "AdamW"))  # the name of a class
    assert is_object(NET)
    assert is_object(InertObject(NET, ()))
    assert is_object(InertObject(Global("torch.nn.modules.loss", "MSELoss"), ()))


def test_tensors_are_found_in_every_part_of_an_object() -> None:
    inside = [TENSOR]
    holders = [
        InertObject(NET, (inside,)),
        InertObject(NET, (), {"weight": TENSOR}),
        InertObject(NET, (), ({}, {"slot": inside})),
        InertObject(NET, (), None, ["key", inside]),
        InertObject(NET, (), {InertKey(TENSOR): 1}),
        InertObject(NET, (), {"lost": UnreadTensor("sparse", "")}),
    ]
    others = [InertObject(NET, ([1],), {"a": ["b"]}), InertObject(NET, ())]
    found = find_holders([*holders, *others])
    assert {id(value) for value in holders} <= found
    assert not {id(value) for value in others} & found


def test_objects_that_contain_each_other_are_walked_once() -> None:
    shared = [InertObject(NET, ()) for _ in range(3_000)]
    for value in shared:
        value.state = shared
    began = time.perf_counter()
    assert find_holders(shared) == set()
    shared.append(InertObject(NET, (TENSOR,)))
    assert {id(value) for value in shared} <= find_holders(shared[:-1])
    assert time.perf_counter() - began < 5


def test_a_note_lists_the_first_objects_and_counts_the_others() -> None:
    objects: dict[KeyPath, InertObject] = {
        ("callbacks", number): InertObject(NET, (), [TENSOR] * number) for number in range(10)
    }
    (note,) = describe_objects(objects)
    assert note.startswith(
        "left out, since they are objects of other code: callbacks.0 (Net of library), callbacks.1"
        " (Net of library, holds 1 tensor, which is not read), "
    )
    assert note.endswith(" and 2 more")
    assert describe_objects({}) == ()


def test_names_in_a_note_are_printable_and_short() -> None:
    cls = Global("m\x1b[31m", "N" * 10_000)
    (note,) = describe_objects({("a\n" * 1000,): InertObject(cls, ())})
    assert note.isprintable()
    assert len(note) < 1_000


def test_what_a_function_makes_of_a_storage_is_a_tensor() -> None:
    later = InertObject(Global("torch._utils", "_rebuild_tensor_v9"), (STORAGE, 0, (2,)))
    unread = find_unread(later)
    assert unread is not None
    assert "'torch._utils._rebuild_tensor_v9', which is not modelled" in unread.error().message
    assert find_unread(InertObject(NET, (), {"weight": TENSOR})) is None


def test_a_whole_module_is_known_by_its_state() -> None:
    state = {"training": True, "_parameters": {}, "_buffers": {}, "_modules": {}}
    module = whole_object_error(InertObject(NET, (), state), "m.pt")
    assert "a whole module, which needs the code of its class 'library.Net'" in module.message
    assert "`state_dict()`" in module.hint
    other = whole_object_error(InertObject(NET, ()), "m.pt")
    assert "module" not in other.message + other.hint
