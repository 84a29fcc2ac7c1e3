"""What goes wrong around a batch leaves tables of a GPU as they promise: offsets that leave ids
out, memory that ends half way, other devices and threads. Under Triton's interpreter."""

from __future__ import annotations

from test_interpreted_kernels import run

START = """
import torch
from dynamicemb import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb import DynamicEmbPoolingMode as Mode
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import create_group
from dynamicemb.table.cpu import CpuTable
from dynamicemb.table.rows import Pooling

def options(**changes):
    fields = dict(dim=8, max_capacity=64, bucket_capacity=32)
    return DynamicEmbTableOptions(
        **fields | changes, score_strategy=DynamicEmbScoreStrategy.STEP
    )

def rows_of(ids):
    return ids.float()[:, None].expand(-1, 8).contiguous()
"""

UNCOVERED = """
def trained(make, ids, bounds, offsets, mode, weights):
    tables = [make(options(), seed=t) for t in range(2)]
    group = create_group(tables)
    pooling = Pooling(Mode[mode], torch.float32, (1, 1), 2, offsets, weights)
    out = torch.empty(2, 16)
    lookup = group.train(ids, bounds, pooling, out)
    # As memory may be.
    torch.empty = lambda *a, made=torch.empty, **k: made(*a, **k).fill_(1_000_000)
    gradient = torch.arange(32.0).view(2, 16)
    by_weight = None if weights is None else group.weight_gradient(lookup, pooling, gradient)
    group.update(lookup, pooling, gradient)
    return out, by_weight, tables

torch_empty = torch.empty
for mode in ("SUM", "MEAN"):
    for weighted in (False, True):
        ids = torch.arange(12) % 5
        for skip, left in ((0, 4), (3, 0), (2, 3)):  # ids before the first bag and after the last
            offsets = torch.tensor([0, 2, 4, 4, 12 - skip - left])
            weights = torch.linspace(-1, 1, 12) if weighted else None
            kept = slice(skip, 12 - left)
            torch.empty = torch_empty
            a = trained(
                CpuTable, ids[kept], (0, 4, 12 - skip - left), offsets, mode,
                None if weights is None else weights[kept].contiguous(),
            )
            torch.empty = torch_empty
            moved = offsets + skip
            b = trained(interpreter.new_table, ids, moved[::2], moved, mode, weights)
            torch.empty = torch_empty
            assert torch.equal(a[0], b[0]), (mode, skip, left)
            if weighted:
                assert torch.equal(a[1], b[1][kept]), (mode, skip, left)
                assert b[1].count_nonzero() == a[1].count_nonzero()
            for t, (one, two) in enumerate(zip(a[2], b[2])):
                own = ids[kept][(0, 4)[t] : (4, 12)[t]]
                one, two = (table.find(own) for table in (one, two))
                assert torch.equal(one.embeddings, two.embeddings), (mode, skip, left, t)
"""


def test_ids_outside_of_all_bags_are_found_and_take_no_gradient() -> None:
    """Offsets on a GPU are not looked at."""
    run(START + UNCOVERED, 0, [])


CROWDED = """
from dynamicemb.errors import OutOfMemoryError
from dynamicemb.table import cuda_batch

def no_memory(*_):
    raise torch.cuda.OutOfMemoryError("no memory")

table, expected = interpreter.new_table(options(), seed=1), CpuTable(options(), seed=1)
for one in (table, expected):
    one.find_or_insert(torch.arange(100))
place, cuda_batch.place_sorted, cuda_batch.CROWDED = cuda_batch.place_sorted, no_memory, 3
try:
    table.find_or_insert(torch.arange(100, 140))
    raise AssertionError
except OutOfMemoryError as error:
    assert "no memory" in str(error)
cuda_batch.place_sorted, cuda_batch.CROWDED = place, 128
for step in range(6):
    ids = torch.arange(200 + 4 * step, 204 + 4 * step)
    a, b = table.find_or_insert(ids), expected.find_or_insert(ids)
    assert torch.equal(a.slots, b.slots) and torch.equal(a.embeddings, b.embeddings)
"""


def test_memory_that_ends_while_newcomers_are_placed() -> None:
    """Buckets forget their lists of newcomers: the next batch would go round in them."""
    run(START + CROWDED, 0, [])


HANDED_OUT = """
from dynamicemb.errors import OutOfMemoryError
from dynamicemb.table import cuda_group

def no_memory(*_):
    raise torch.cuda.OutOfMemoryError("no memory")

given, cuda_group.Evicted = cuda_group.Evicted, no_memory
sgd = Optimizer(OptimizerKind.SGD, OptimizerArgs(learning_rate=1.0))
small = options(max_capacity=32)
for how in ("train", "insert"):
    table = interpreter.new_table(small, seed=1, optimizer=sgd)
    old, new = torch.arange(32), torch.arange(100, 110)
    table.insert(old, rows_of(old))
    out = torch.empty(32, 8)
    pooling = Pooling(Mode.NONE, torch.float32, (1,))
    lookup = table.group.train(old, (0, 32), pooling, out)
    initial = table.initial_rows(new)
    try:
        if how == "train":
            table.find_or_insert(new, return_evicted=True)
        else:
            table.insert(new, rows_of(new), return_evicted=True)
        raise AssertionError
    except OutOfMemoryError:
        pass
    found = table.find(new)
    assert found.found.all() and torch.equal(found.embeddings, initial)  # not those that left
    table.group.update(lookup, pooling, torch.ones(32, 8))
    assert torch.equal(table.find(new).embeddings, initial)
    assert table.stats().dropped_gradients == 10
"""


def test_memory_that_ends_while_evicted_rows_are_handed_out() -> None:
    run(START + HANDED_OUT, 0, [])


GROWTH = """
from dynamicemb.errors import OutOfMemoryError
from dynamicemb.table import cuda_memory

cuda_memory.COPIED_BYTES = 256  # rows are copied in parts
table = interpreter.new_table(options(max_capacity=4096, init_capacity=32), seed=1)
ids = torch.arange(24)
before = table.find_or_insert(ids).embeddings
made, slots = table.buckets_of, table.capacity

def no_memory(*_):
    raise torch.cuda.OutOfMemoryError("no memory")

table.buckets_of = no_memory
try:
    table.reserve(1000)
    raise AssertionError
except OutOfMemoryError as error:
    assert "could not grow" in str(error)
assert table.capacity == slots and torch.equal(table.find(ids).embeddings, before)
table.buckets_of = made
table.reserve(1000)
assert table.capacity >= 1000 and torch.equal(table.find(ids).embeddings, before)
"""


def test_memory_that_ends_while_a_table_grows() -> None:
    run(START + GROWTH, 0, [])


ENTERED = """
from dynamicemb.kernels import launch
from dynamicemb.table.cuda_streams import Entrance

inside, outside = [0], []
enter, leave, start = Entrance.__enter__, Entrance.__exit__, launch._Launcher.__call__

def entering(self):
    inside[0] += 1
    return enter(self)

def leaving(self, *error):
    inside[0] -= 1
    return leave(self, *error)

def starting(self, function, programs, *rest, **named):
    if programs and not inside[0]:
        outside.append((name, function.fn.__name__))
    return start(self, function, programs, *rest, **named)

Entrance.__enter__, Entrance.__exit__ = entering, leaving
launch._Launcher.__call__ = starting
adam = Optimizer(OptimizerKind.ADAM, OptimizerArgs())
table = interpreter.new_table(options(max_capacity=4096, init_capacity=32), seed=1, optimizer=adam)
ids = torch.arange(20)
calls = {
    "find_or_insert": lambda: table.find_or_insert(ids, return_evicted=True),
    "insert": lambda: table.insert(ids, rows_of(ids)),
    "insert, evicted": lambda: table.insert(ids, rows_of(ids), return_evicted=True),
    "assign": lambda: table.assign(ids, rows_of(ids)),
    "erase": lambda: table.erase(ids[:3]),
    "find": lambda: table.find(ids),
    "find_slots": lambda: table.find_slots(ids),
    "contains": lambda: table.contains(ids),
    "initial_rows": lambda: table.initial_rows(ids),
    "mark_changes": table.mark_changes,
    "log_removals": table.log_removals,
    "reserve": lambda: table.reserve(2000),
    "export": lambda: list(table.export()),
    "expire": lambda: table.expire(1, slots=50),
    "load_state_dict": lambda: table.load_state_dict(table.state_dict()),
    "clear": table.clear,
}
for name, call in calls.items():
    call()
assert not outside, outside
"""


def test_all_kernels_start_on_the_device_and_stream_of_the_table() -> None:
    """Where another GPU is the current one, they would be compiled for it, and run there."""
    run(START + ENTERED, 0, [])


ADDRESSES = """
table = interpreter.new_table(options(), seed=1)
layout = table.group.layout
table.find_or_insert(torch.arange(4))
addresses = layout.meta.data_ptr(), layout.floats.data_ptr()
table.set_optimizer(Optimizer(OptimizerKind.ADAGRAD, OptimizerArgs(initial_accumulator_value=2.0)))
table.set_seed(7)
table.mark_changes()
table.find_or_insert(torch.arange(4, 8))
assert (layout.meta.data_ptr(), layout.floats.data_ptr()) == addresses
found = table.find(torch.arange(8))
assert found.state[4:].eq(2.0).all()
assert torch.equal(found.embeddings[4:], table.initial_rows(torch.arange(4, 8)))
"""


def test_a_graph_that_captured_an_evaluation_keeps_the_addresses_it_has() -> None:
    run(START + ADDRESSES, 0, [])


AT_ONCE = """
import threading

table = interpreter.new_table(options(max_capacity=4096, init_capacity=32), seed=1)
ids, more = torch.arange(8), torch.arange(1000, 1400)
table.insert(ids, rows_of(ids), scores=100 + ids)
read = type(table).states_of

def meanwhile(self, slots):
    if threading.current_thread() is threading.main_thread() and not threads:
        threads.append(threading.Thread(target=lambda: table.insert(more, rows_of(more))))
        threads[0].start()
        threads[0].join(1.0)  # it waits for the lock
        assert threads[0].is_alive()
    return read(self, slots)

threads = []
type(table).states_of = meanwhile
found = table.find(ids)
threads[0].join()
assert found.scores.tolist() == list(range(100, 108)), found.scores
assert table.capacity > 32
"""


def test_a_row_is_read_whole_while_another_thread_lets_the_table_grow() -> None:
    run(START + AT_ONCE, 0, [])
