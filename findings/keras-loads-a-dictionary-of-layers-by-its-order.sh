#!/bin/sh
# Keras gives the weights of a dictionary of layers to other layers, if its keys come in another
# order.
#
# Versions: keras 3.15.1 with jax 0.10.2 on a CPU, numpy 2.4.6, Python 3.11.
#
# Guess: a dictionary of sublayers is stored by its keys, so that a model that inserts them in
# another order loads the right weights.
#
# Seen: neither the keys nor the names are in the file. Sublayers are called by their class and
# numbered by their place in the dictionary ("dense", "dense_1"). With the keys in another order
# each gets the weights of another one of the same shapes, without an error or a warning: experts,
# heads and branches for languages or tasks are exchanged. Sublayers that are attributes are found
# by name.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cd "$folder"
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' 2> log || { tail log; exit 1; }
import h5py
import keras
import numpy as np


class Branches(keras.layers.Layer):
    def __init__(self, languages, named):
        super().__init__()
        make = lambda language: keras.layers.Dense(2, name=f"branch_{language}" if named else None)
        self.branches = {language: make(language) for language in languages}

    def call(self, x):
        return {language: branch(x) for language, branch in self.branches.items()}


class Attributes(keras.layers.Layer):
    def __init__(self, languages, named):
        super().__init__()
        for language in languages:
            setattr(self, language, keras.layers.Dense(2))
        self.languages = list(languages)

    def call(self, x):
        return {language: getattr(self, language)(x) for language in self.languages}


def build(kind, languages, named):
    inputs = keras.Input((3,))
    return keras.Model(inputs, kind(languages, named)(inputs))


inputs = np.ones((1, 3), np.float32)
for kind in (Branches, Attributes):
    for named in (False, True):
        saved = build(kind, ("german", "french"), named)
        saved.save_weights("model.weights.h5")
        loaded = build(kind, ("french", "german"), named)
        loaded.load_weights("model.weights.h5")
        before, after = ({k: np.asarray(v) for k, v in m(inputs).items()} for m in (saved, loaded))
        exchanged = np.array_equal(before["german"], after["french"])
        same = np.array_equal(before["german"], after["german"])
        names = []
        with h5py.File("model.weights.h5") as file:
            file.visit(lambda name: names.append(name) if name.endswith("vars/0") else None)
        print(f"{kind.__name__}, named {named}: same {same}, exchanged {exchanged}, {names}")
        assert exchanged == (kind is Branches) and same == (kind is Attributes)
        assert any("german" in name for name in names) == (kind is Attributes)
PY
