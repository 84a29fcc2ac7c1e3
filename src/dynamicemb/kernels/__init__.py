"""The GPU's kernels, in Triton, over raw buffers and sizes. Private: use ``dynamicemb.table``.

They compute what the C++ engine computes, operation by operation, so that both give the same bits.
Rules that every kernel keeps: a program does not read a buffer that another program of the same
launch writes, but through atomics whose outcome does not depend on their order; sums have one fixed
order; no fused multiply-add unless it is written down.
"""
