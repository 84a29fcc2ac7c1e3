// One optimizer update of one row. Optimizers are applied to fp32 weights in the operations of
// torch.optim on a CPU with fused multiply-add, so that the two agree to the last bit.
#include <cmath>
#include <cstring>

#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

using Float = float* __restrict;
using Gradient = const float* __restrict;

// torch.lerp: it starts from the nearer end. Away from the farther one, a small result would keep
// the rounding error of a large one.
inline float lerp(float start, float end, float weight) {
  const bool near = weight < 0.5f;
  return std::fma(near ? weight : weight - 1.0f, end - start, near ? start : end);
}

// The sign of the objective and weight decay, which all optimizers share. Returns the gradient to
// use: the given one, or `scratch`.
inline const float* prepare(float* weights, const float* gradient, float* scratch, uint32_t dim,
                            const OptimizerStep& step) {
  if (step.maximize) {
    for (uint32_t i = 0; i < dim; ++i) scratch[i] = -gradient[i];
    gradient = scratch;
  }
  if (step.weight_decay == 0) return gradient;
  if (step.decoupled_decay) {
    for (uint32_t i = 0; i < dim; ++i) weights[i] = weights[i] * step.decay_factor;
    return gradient;
  }
  for (uint32_t i = 0; i < dim; ++i)
    scratch[i] = std::fma(step.weight_decay, weights[i], gradient[i]);
  return scratch;
}

void sgd(float* w, float*, float*, const float* g, float* scratch, uint32_t dim,
         const OptimizerStep& step) {
  Float weights = w;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  const float rate = -step.learning_rate;
  for (uint32_t i = 0; i < dim; ++i) weights[i] = std::fma(rate, gradient[i], weights[i]);
}

void momentum(float* w, float* state, float*, const float* g, float* scratch, uint32_t dim,
              const OptimizerStep& step) {
  Float weights = w, buffer = state;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  const float rate = -step.learning_rate, new1 = step.one_minus_dampening;
  for (uint32_t i = 0; i < dim; ++i) {
    buffer[i] = std::fma(new1, gradient[i], step.momentum * buffer[i]);
    const float direction =
        step.nesterov ? std::fma(step.momentum, buffer[i], gradient[i]) : buffer[i];
    weights[i] = std::fma(rate, direction, weights[i]);
  }
}

void adam(float* w, float* state, float*, const float* g, float* scratch, uint32_t dim,
          const OptimizerStep& step) {
  Float weights = w, first = state, second = state + dim;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  const float new1 = step.one_minus_beta1, new2 = step.one_minus_beta2, rate = -step.adam_rate;
  for (uint32_t i = 0; i < dim; ++i) {
    const float m = lerp(first[i], gradient[i], new1);
    const float v = std::fma(new2 * gradient[i], gradient[i], step.beta2 * second[i]);
    first[i] = m;
    second[i] = v;
    const float denominator = std::sqrt(v) / step.bias_correction2_sqrt + step.epsilon;
    weights[i] = weights[i] + rate * m / denominator;
  }
}

void adagrad(float* w, float* state, float*, const float* g, float* scratch, uint32_t dim,
             const OptimizerStep& step) {
  Float weights = w, sum = state;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  for (uint32_t i = 0; i < dim; ++i) {
    sum[i] = std::fma(gradient[i], gradient[i], sum[i]);
    weights[i] =
        weights[i] + -step.learning_rate * gradient[i] / (std::sqrt(sum[i]) + step.epsilon);
  }
}

void rowwise_adagrad(float* w, float*, float* scalar, const float* g, float* scratch, uint32_t dim,
                     const OptimizerStep& step) {
  Float weights = w;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  *scalar = *scalar + dot_columns(gradient, gradient, dim) / static_cast<float>(dim);
  const float rate = step.learning_rate / (std::sqrt(*scalar) + step.epsilon);
  for (uint32_t i = 0; i < dim; ++i) weights[i] = weights[i] - rate * gradient[i];
}

void partial_rowwise_adam(float* w, float* state, float* scalar, const float* g, float* scratch,
                          uint32_t dim, const OptimizerStep& step) {
  Float weights = w, first = state;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  const float new1 = step.one_minus_beta1;
  const float mean_square = dot_columns(gradient, gradient, dim) / static_cast<float>(dim);
  *scalar = step.beta2 * *scalar + step.one_minus_beta2 * mean_square;
  const float denominator = std::sqrt(*scalar) / step.bias_correction2_sqrt + step.epsilon;
  const float rate = step.adam_rate / denominator;
  for (uint32_t i = 0; i < dim; ++i) {
    first[i] = lerp(first[i], gradient[i], new1);
    weights[i] = weights[i] - rate * first[i];
  }
}

// FTRL-Proximal (McMahan et al. 2013) with the learning-rate power -1/2.
void ftrl(float* w, float* state, float*, const float* g, float* scratch, uint32_t dim,
          const OptimizerStep& step) {
  Float weights = w, z = state, n = state + dim;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  for (uint32_t i = 0; i < dim; ++i) {
    const float before = std::sqrt(n[i]);
    n[i] = n[i] + gradient[i] * gradient[i];
    const float after = std::sqrt(n[i]);
    const float sigma = (after - before) / step.learning_rate;
    z[i] = z[i] + (gradient[i] - sigma * weights[i]);
    const float size = std::fabs(z[i]);
    const float shrunk = z[i] < 0 ? step.lambda1 - size : size - step.lambda1;  // sign(z)(|z| - l1)
    const float rate = (step.ftrl_beta + after) / step.learning_rate + step.lambda2;
    weights[i] = size <= step.lambda1 ? 0.0f : -shrunk / rate;
  }
}

// base ** exponent by products alone: the same bits everywhere.
inline double power(double base, uint64_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

// Adam for rows that are seldom seen: what the moments would have done in the steps since the last
// one is made up for. No bias correction. State: m, v, a column that makes their number even, the
// last step (64-bit integer).
void smart_decay_adam(float* w, float* state, float*, const float* g, float* scratch, uint32_t dim,
                      const OptimizerStep& step) {
  Float weights = w, first = state, second = state + dim;
  Gradient gradient = prepare(w, g, scratch, dim, step);
  float* const at = state + 2 * dim + dim % 2;
  int64_t last;
  std::memcpy(&last, at, sizeof last);
  std::memcpy(at, &step.iteration, sizeof last);
  const uint64_t passed = step.iteration > last ? static_cast<uint64_t>(step.iteration - last) : 1;
  const auto keep1 = static_cast<float>(power(step.decay1, passed));
  const auto keep2 = static_cast<float>(power(step.decay2, passed));
  const auto missed = static_cast<float>(step.decay1 * (1 - power(step.decay1, passed - 1)) /
                                         (1 - step.decay1));  // in units of m
  const float new1 = step.one_minus_beta1, new2 = step.one_minus_beta2;
  for (uint32_t i = 0; i < dim; ++i) {
    const float m = std::fma(new1, gradient[i], keep1 * first[i]);
    const float v = std::fma(new2 * gradient[i], gradient[i], keep2 * second[i]);
    const float whole = m + missed * first[i];
    first[i] = m;
    second[i] = v;
    weights[i] = weights[i] + -step.learning_rate * whole / (std::sqrt(v) + step.epsilon);
  }
}

}  // namespace

void (*const optimize[kOptimizerKinds])(float*, float*, float*, const float*, float*, uint32_t,
                                        const OptimizerStep&) = {
    sgd, momentum, adam, adagrad, rowwise_adagrad, partial_rowwise_adam, ftrl, smart_decay_adam,
};

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
