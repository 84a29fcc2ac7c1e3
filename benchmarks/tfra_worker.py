"""TensorFlow Recommenders-Addons in its own interpreter, timed here, one call at a time.

Started by ``peers.Tfra`` with the interpreter given as ``--tfra-python``:

    python tfra_worker.py FOLDER OPTIMIZER THREADS

FOLDER holds ``ids.npy`` (the table) and one ``<distribution>.npy`` of batches each. OPTIMIZER is
``none`` for lookups, or one of OPTIMIZERS. Prints ``{"ready": true}``, then answers each line
``DISTRIBUTION INDEX`` on standard input with ``{"ms": ..., "lost_ms": ...}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

# The interpreter of TFRA has no torch, and this module needs none.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src/dynamicemb/cli/benching"))
from timing import keep_freed_memory, others_ms, sample

DIM = 64
FILL = 2**18
# Those of Keras, and those of TensorFlow 1, which take less time in TFRA: for plain SGD about half,
# as they keep no state for it.
OPTIMIZERS = {
    "sgd": tf.keras.optimizers.SGD,
    "adam": tf.keras.optimizers.Adam,
    "adagrad": tf.keras.optimizers.Adagrad,
    "tf1-sgd": tf.compat.v1.train.GradientDescentOptimizer,
    "tf1-adam": tf.compat.v1.train.AdamOptimizer,
    "tf1-adagrad": tf.compat.v1.train.AdagradOptimizer,
}


def main() -> None:
    folder, optimizer, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    keep_freed_memory()
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    ids = np.load(folder / "ids.npy")
    batches = {
        path.stem: [tf.constant(batch) for batch in np.load(path)]
        for path in folder.glob("*.npy")
        if path.stem != "ids"
    }
    table = de.get_variable(
        "table", key_dtype=tf.int64, value_dtype=tf.float32, dim=DIM, init_size=2 * len(ids)
    )
    for start in range(0, len(ids), FILL):
        chunk = ids[start : start + FILL]
        table.upsert(tf.constant(chunk), tf.random.uniform((len(chunk), DIM)))
    call = lookup(table) if optimizer == "none" else train(table, OPTIMIZERS[optimizer](1e-4))
    if optimizer != "none":  # the optimizer's own tables fill on first use
        for batch in (b for of in batches.values() for b in of):
            call(batch)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        distribution, index = line.split()
        taken = sample(call, batches[distribution][int(index)], lost_ms=others_ms)
        print(json.dumps({"ms": taken.ms, "lost_ms": taken.lost_ms}), flush=True)


def lookup(table):
    """The plain lookup: faster here than ``embedding_lookup_unique``, even on Zipf."""
    run = tf.function(table.lookup, input_signature=[tf.TensorSpec([None], tf.int64)])

    def call(batch) -> None:
        run(batch)

    return call


def train(table, optimizer):
    """Lookup of the unique ids, backward, update; without the dedup updates would be lost."""
    optimizer = de.DynamicEmbeddingOptimizer(optimizer)
    shadow = de.shadow_ops.ShadowVariable(table, name="shadow")

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)]
    )
    def step(batch, gradient):
        with tf.GradientTape() as tape:
            rows = de.shadow_ops.embedding_lookup_unique(shadow, batch, DIM)
        gradients = tape.gradient(rows, [shadow], output_gradients=gradient)
        optimizer.apply_gradients([(gradients[0], shadow)])

    gradients: dict[int, tf.Tensor] = {}

    def call(batch) -> None:
        n = int(batch.shape[0])
        if n not in gradients:
            gradients[n] = tf.random.uniform((n, DIM)) - 0.5
        step(batch, gradients[n])

    return call


if __name__ == "__main__":
    main()
