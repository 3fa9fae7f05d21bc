"""What training frameworks put beside the weights of a file, and what stands for it.

Nothing here is imported or called: classes are names, and what they were made from is kept.

Source: lightning/fabric/utilities/data.py (`AttributeDict`), omegaconf 2.1 to 2.4, torch/optim,
functools.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.formats.pickles import Builder, Global, InertObject, ordered_dict
from ckptkit.formats.torch_values import ALLOWED, TensorRef, rebuild_tensor_v2, rebuild_tensor_v3

_OPTIMIZERS = {
    **{name.lower(): name for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax")},
    **{name.lower(): name for name in ("NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "LBFGS")},
    "_adafactor": "Adafactor",
    "sparse_adam": "SparseAdam",
}
_SCHEDULERS = (
    *("LRScheduler", "_LRScheduler", "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR"),
    *("ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR", "CyclicLR"),
    *("CosineAnnealingWarmRestarts", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"),
)
_OMEGACONF = (
    *(("omegaconf.dictconfig", "DictConfig"), ("omegaconf.listconfig", "ListConfig")),
    *(("omegaconf.base", name) for name in ("ContainerMetadata", "Metadata")),
    *(
        ("omegaconf.nodes", f"{kind}Node")
        for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path")
    ),
)
_ATTRIBUTES = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "pytorch_lightning.utilities.parsing",
)
_TENSOR_CLASSES = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
)
_REBUILDERS = {"_rebuild_tensor_v2": rebuild_tensor_v2, "_rebuild_tensor_v3": rebuild_tensor_v3}
_OTHER_TENSORS = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_sparse_csr_tensor": "sparse",
    "_rebuild_qtensor": "quantized by torch",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_meta_tensor_no_storage": "on the device 'meta', without values",
    "_rebuild_device_tensor_from_numpy": "of another device, stored through numpy",
    "_rebuild_wrapper_subclass": "of a class that wraps others",
}


def _object(module: str, name: str) -> Builder:
    cls = Global(module, name)

    def build(*args: object) -> InertObject:
        return InertObject(cls, args)

    return build


def _with_attributes(*args: object) -> TensorRef:
    # How torch writes a tensor that was given attributes; they do not change its values.
    match args:
        case (Global("torch._utils", name), Global() as cls, tuple(inner), _) if (
            name in _REBUILDERS and (cls.module, cls.name) in _TENSOR_CLASSES
        ):
            return _REBUILDERS[name](*inner)
        case (_, Global() as cls, _, _):
            raise UnsupportedError(
                f"tensor is of the class '{cls}', which is not modelled",
                hint="save `tensor.data` or `tensor.dequantize()`, as plain tensors",
            )
    raise FormatError("tensor with attributes is rebuilt from something that does not describe one")


def _refused(kind: str) -> Builder:
    def build(*_args: object) -> TensorRef:
        raise UnsupportedError(
            f"tensor is {kind}, which is not modelled",
            hint="save it again as a plain tensor on the CPU",
        )

    return build


TRAINING_VALUES: Mapping[tuple[str, str], object] = {
    **ALLOWED,
    **{("torch._utils", name): _refused(kind) for name, kind in _OTHER_TENSORS.items()},
    **{name: Global(*name) for name in _TENSOR_CLASSES},
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
    **{name: _object(*name) for name in _OMEGACONF},
    **{(module, "AttributeDict"): ordered_dict for module in _ATTRIBUTES},
    ("typing", "Any"): Global("typing", "Any"),
    ("functools", "partial"): _object("functools", "partial"),
    **{
        (f"torch.optim.{module}", name): Global(f"torch.optim.{module}", name)
        for module, name in _OPTIMIZERS.items()
    },
    **{
        ("torch.optim.lr_scheduler", name): Global("torch.optim.lr_scheduler", name)
        for name in _SCHEDULERS
    },
}
"""`ALLOWED`, and the classes that the dictionaries of training frameworks hold besides."""
