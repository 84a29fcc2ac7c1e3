"""One optimizer update of rows, in the order of operations of csrc/kernels_optimize.cpp."""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.layout import (
    ADAM_RATE,
    BETA2,
    BIAS_CORRECTION2_SQRT,
    DECAY_FACTOR,
    EPSILON,
    FTRL_BETA,
    LAMBDA1,
    LAMBDA2,
    LEARNING_RATE,
    MOMENTUM,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ONE_MINUS_DAMPENING,
    WEIGHT_DECAY,
)
from dynamicemb.kernels.numbers import ordered_dot

SGD, MOMENTUM_SGD, ADAM, ADAGRAD, ROWWISE_ADAGRAD, PARTIAL_ROWWISE_ADAM, FTRL = map(
    tl.constexpr, range(7)
)
#: Kinds of weight decay.
NO_DECAY, L2_DECAY, DECOUPLED_DECAY = map(tl.constexpr, range(3))


@triton.jit
def step_number(steps_ptr, tables, row, table, mask):
    """A number of each row's optimizer step, as a column."""
    bits = tl.load(steps_ptr + row * tables + table, mask=mask, other=0)
    return bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def fma(x, y, z, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """x * y + z, rounded once; ``x`` may be a column."""
    return tl.fma(tl.broadcast_to(x, [BLOCK, COLUMNS]), y, z)


@triton.jit
def lerp(start, end, weight, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """torch.lerp, from the end that is nearer."""
    near = weight < 0.5
    part = tl.where(near, weight, weight - 1.0)
    return fma(part, end - start, tl.where(near, start, end), BLOCK, COLUMNS)


@triton.jit
def optimize(
    weights, first, second, scalar, gradient, steps_ptr, tables, table, mask, KIND: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECAY: tl.constexpr, NESTEROV: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(weights, first, second, scalar) after the update; all float32 [BLOCK, COLUMNS] but
    ``scalar``, [BLOCK]. A kind leaves alone what it has no use for. Columns beyond the row hold 0.
    """
    if MAXIMIZE:
        gradient = -gradient
    if DECAY == L2_DECAY:
        decay = step_number(steps_ptr, tables, WEIGHT_DECAY, table, mask)
        gradient = fma(decay, weights, gradient, BLOCK, COLUMNS)
    elif DECAY == DECOUPLED_DECAY:
        weights = weights * step_number(steps_ptr, tables, DECAY_FACTOR, table, mask)
    rate = step_number(steps_ptr, tables, LEARNING_RATE, table, mask)
    epsilon = step_number(steps_ptr, tables, EPSILON, table, mask)
    if KIND == SGD:
        weights = fma(-rate, gradient, weights, BLOCK, COLUMNS)
    elif KIND == MOMENTUM_SGD:
        momentum = step_number(steps_ptr, tables, MOMENTUM, table, mask)
        new1 = step_number(steps_ptr, tables, ONE_MINUS_DAMPENING, table, mask)
        first = fma(new1, gradient, momentum * first, BLOCK, COLUMNS)
        direction = first
        if NESTEROV:
            direction = fma(momentum, first, gradient, BLOCK, COLUMNS)
        weights = fma(-rate, direction, weights, BLOCK, COLUMNS)
    elif KIND == ADAM:
        new1 = step_number(steps_ptr, tables, ONE_MINUS_BETA1, table, mask)
        new2 = step_number(steps_ptr, tables, ONE_MINUS_BETA2, table, mask)
        beta2 = step_number(steps_ptr, tables, BETA2, table, mask)
        adam_rate = step_number(steps_ptr, tables, ADAM_RATE, table, mask)
        correction = step_number(steps_ptr, tables, BIAS_CORRECTION2_SQRT, table, mask)
        first = lerp(first, gradient, new1, BLOCK, COLUMNS)
        second = fma(new2 * gradient, gradient, beta2 * second, BLOCK, COLUMNS)
        below = (
            tl.div_rn(tl.sqrt_rn(second), tl.broadcast_to(correction, [BLOCK, COLUMNS])) + epsilon
        )
        weights = weights + tl.div_rn(-adam_rate * first, below)
    elif KIND == ADAGRAD:
        first = fma(gradient, gradient, first, BLOCK, COLUMNS)
        below = tl.sqrt_rn(first) + epsilon
        weights = weights + tl.div_rn(-rate * gradient, below)
    elif KIND == ROWWISE_ADAGRAD:
        mean = tl.div_rn(
            ordered_dot(gradient, gradient, BLOCK, COLUMNS), tl.full([BLOCK], DIM, tl.float32)
        )
        scalar = scalar + mean
        row_rate = tl.div_rn(rate, tl.sqrt_rn(scalar)[:, None] + epsilon)
        weights = weights - row_rate * gradient
    elif KIND == PARTIAL_ROWWISE_ADAM:
        new1 = step_number(steps_ptr, tables, ONE_MINUS_BETA1, table, mask)
        new2 = step_number(steps_ptr, tables, ONE_MINUS_BETA2, table, mask)
        beta2 = step_number(steps_ptr, tables, BETA2, table, mask)
        adam_rate = step_number(steps_ptr, tables, ADAM_RATE, table, mask)
        correction = step_number(steps_ptr, tables, BIAS_CORRECTION2_SQRT, table, mask)
        mean = tl.div_rn(
            ordered_dot(gradient, gradient, BLOCK, COLUMNS), tl.full([BLOCK], DIM, tl.float32)
        )
        wide = beta2 * scalar[:, None] + new2 * mean[:, None]
        below = tl.div_rn(tl.sqrt_rn(wide), correction) + epsilon
        row_rate = tl.div_rn(adam_rate, below)
        scalar = tl.sum(wide, axis=1)
        first = lerp(first, gradient, new1, BLOCK, COLUMNS)
        weights = weights - row_rate * first
    else:
        lambda1 = step_number(steps_ptr, tables, LAMBDA1, table, mask)
        lambda2 = step_number(steps_ptr, tables, LAMBDA2, table, mask)
        beta = step_number(steps_ptr, tables, FTRL_BETA, table, mask)
        before = tl.sqrt_rn(second)
        second = second + gradient * gradient
        after = tl.sqrt_rn(second)
        sigma = tl.div_rn(after - before, tl.broadcast_to(rate, [BLOCK, COLUMNS]))
        first = first + (gradient - sigma * weights)
        size = tl.abs(first)
        shrunk = tl.where(first < 0, lambda1 - size, size - lambda1)
        below = tl.div_rn(beta + after, tl.broadcast_to(rate, [BLOCK, COLUMNS])) + lambda2
        weights = tl.where(size <= lambda1, 0.0, tl.div_rn(-shrunk, below))
    return weights, first, second, scalar
