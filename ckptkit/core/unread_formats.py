"""Formats of weights that are known and not read, as data: a row each.

Where nothing that is read lies beside such files, a message names the format, and says how its own
library makes of them what is read.
"""

from __future__ import annotations

from msgspec import Struct


class UnreadFormat(Struct, frozen=True):
    """Files that are recognised, and what makes a model of them.

    Attributes:
        name: The format, as its users write it.
        source: Where the facts are from: files or functions of its library, and versions.
        files: Their paths, as a regular expression; a group `stem` is what the library takes.
        starts: How such files begin, where others have these names; a regular expression.
        advice: What makes of them what is read: a command, or Python, with `{path}`, the `{stem}`,
            the `{folder}` that was searched, and `{paths}` as a list of Python.
    """

    name: str
    source: str
    files: str
    starts: bytes = b""
    advice: str = ""


_SAVE = "from safetensors.numpy import save_file"
_INTO = "'model.safetensors')"
_MADE_FROM = (
    "it is for one engine, with names and a layout of its own; pass the model that it was made from"
)

# A file that fits several is of the first of them. Each advice runs in Python with the packages
# that it imports.
UNREAD = (
    UnreadFormat(
        "GGUF",
        "gguf 0.19; Ollama keeps such files as blobs",
        files=r".+\.gguf|(?:.+/)?sha256-[0-9a-f]{64}",
        starts=rb"GGUF",
        advice=f"from gguf import GGUFReader, dequantize; {_SAVE}; save_file({{t.name: dequantize("
        f"t.data, t.tensor_type) for t in GGUFReader({{path}}).tensors}}, {_INTO}",
    ),
    UnreadFormat(
        "tensorizer",
        "tensorizer 2.12",
        files=r".+\.tensors",
        advice="from safetensors.torch import save_file; from tensorizer import TensorDeserializer;"
        f" save_file(dict(TensorDeserializer({{path}}, device='cpu').items()), {_INTO}",
    ),
    UnreadFormat(
        "Flax (msgpack)",
        "flax/serialization.py (`to_bytes`), flax/training/checkpoints.py, flax 0.12;"
        " Transformers 4 (`FLAX_WEIGHTS_NAME`)",
        files=r".+\.msgpack|(?:.+/)?checkpoint(?:_\d+)?",
        starts=rb"[\x80-\x8f\xde\xdf]",
        advice="from flax.serialization import msgpack_restore; from flax.traverse_util import"
        " flatten_dict; from safetensors.flax import save_file; import jax.numpy as jnp;"
        " save_file({k: jnp.asarray(v) for path in {paths} for k, v in flatten_dict("
        f"msgpack_restore(open(path, 'rb').read()), sep='.').items()}}, {_INTO}",
    ),
    UnreadFormat(
        "TensorFlow",
        "tensorflow/core/util/tensor_bundle, TensorFlow 2.21",
        files=r"(?P<stem>.+)\.data-\d{5}-of-\d{5}",
        advice=f"import tensorflow as tf; {_SAVE}; r = tf.train.load_checkpoint({{stem}});"
        " save_file({n: r.get_tensor(n) for n, d in r.get_variable_to_dtype_map().items() if d !="
        f" tf.string}}, {_INTO}",
    ),
    UnreadFormat(
        "Keras (HDF5)",
        "keras/src/saving, Keras 3; Transformers 4 (`TF2_WEIGHTS_NAME`)",
        files=r".+\.(?:h5|hdf5)",
        starts=rb"\x89HDF\r\n\x1a\n",
        advice=f"import h5py; {_SAVE}; d = {{}}; h5py.File({{path}}).visititems(lambda n, o:"
        " d.update({n.replace('/', '.'): o[()]}) if isinstance(o, h5py.Dataset) else None);"
        f" save_file(d, {_INTO}",
    ),
    UnreadFormat(
        "Keras",
        "keras/src/saving/saving_lib.py, Keras 3",
        files=r".+\.keras",
        advice="run `unzip -o {path} model.weights.h5`, and pass what it takes out",
    ),
    UnreadFormat(
        "PaddlePaddle",
        "python/paddle/framework/io.py, PaddlePaddle 3",
        files=r".+\.pdparams",
        advice="import paddle; from safetensors.paddle import save_file; save_file(paddle.load("
        f"{{path}}), {_INTO}",
    ),
    UnreadFormat(
        "NeMo 1",
        "nemo/core/connectors/save_restore_connector.py, NeMo 1.23",
        files=r".+\.nemo",
        advice="run `mkdir -p unpacked && tar -xf {path} -C unpacked`, and pass that folder",
    ),
    UnreadFormat(
        "zarr arrays of JAX",
        "t5x/checkpoints.py; levanter/tensorstore_serialization.py; without the tree of Orbax",
        files=r".+/(?:\.zarray|zarr\.json)",
        advice=f"import glob, os, tensorstore; {_SAVE}; f = {{folder}}; ps = [(os.path.dirname(p),"
        " d) for n, d in (('.zarray', 'zarr'), ('zarr.json', 'zarr3')) for p in glob.glob(f +"
        " '/**/' + n, recursive=True)]; save_file({os.path.relpath(p, f).replace('/', '.'):"
        " tensorstore.open({'driver': d, 'kvstore': {'driver': 'file', 'path': p}}).result()"
        f".read().result() for p, d in ps}}, {_INTO}",
    ),
    UnreadFormat(
        "ONNX",
        "onnx 1.22",
        files=r".+\.onnx",
        advice=f"import onnx; {_SAVE}; save_file({{t.name: onnx.numpy_helper.to_array(t).copy()"
        f" for t in onnx.load({{path}}).graph.initializer}}, {_INTO}",
    ),
    UnreadFormat(
        "FlexFlow",
        "python/flexflow/serve/models/llama.py (`convert_hf_model`), FlexFlow 24.1",
        files=r"(?P<stem>.+)/layers[._]\d+[._](?:self_attn\.|attention_w)[a-z_.]+",
        advice="import numpy, torch; from transformers import"
        " AutoConfig, AutoModelForCausalLM; m = AutoModelForCausalLM.from_config("
        "AutoConfig.from_pretrained('BASE')); m.load_state_dict({n: torch.from_numpy("
        "numpy.fromfile({stem} + '/' + n.replace('model.', ''), 'float16')).view(p.shape) for n, p"
        " in m.state_dict().items()}); m.save_pretrained('OUT')  # BASE: the model that FlexFlow"
        " was given; float32 where it ran in full precision",
    ),
    UnreadFormat(
        "numpy",
        "of MLX, and of JAX models such as those of Big Vision",
        files=r".+\.npz",
        starts=rb"PK",
        advice=f"import numpy; {_SAVE}; save_file({{k.replace('/', '.'): v for k, v in"
        f" numpy.load({{path}}).items()}}, {_INTO}",
    ),
    UnreadFormat(
        "GGML, from before GGUF",
        "llama.cpp up to 2023",
        files=r".+\.bin",
        starts=rb"(?:lm|fm|tj|al)gg",
        advice=_MADE_FROM,
    ),
    UnreadFormat(
        "CTranslate2",
        "python/ctranslate2/specs/model_spec.py (`_serialize`), CTranslate2 4",
        files=r"(?:.+/)?model\.bin",
        starts=rb"[\x01-\x10]\0{3}..\w+Spec\0",
        advice=_MADE_FROM,
    ),
    UnreadFormat(
        "an engine for inference",
        "TensorRT, OpenVINO, LiteRT, Core ML, ExecuTorch",
        files=r".+\.(?:engine|plan|tflite|litertlm|mlmodel|pte)|(?:.+/)?openvino_\w*model\.(?:xml|bin)",
        advice=_MADE_FROM,
    ),
)
