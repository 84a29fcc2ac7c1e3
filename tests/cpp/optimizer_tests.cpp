// Row updates, pooling and its gradients.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "calls.h"
#include "check.h"
#include "group.h"

namespace {

using namespace dynamicemb;
using namespace dynamicemb::testing;

// One step in double, from the definition of each optimizer.
void optimize_plainly(const OptimizerStep& s, std::vector<double>& w, std::vector<double>& state,
                      std::vector<double> g) {
  const size_t dim = w.size();
  double square = 0;
  for (size_t i = 0; i < dim; ++i) {
    if (s.maximize) g[i] = -g[i];
    if (s.weight_decay != 0 && s.decoupled_decay) w[i] *= s.decay_factor;
    if (s.weight_decay != 0 && !s.decoupled_decay) g[i] += s.weight_decay * w[i];
    square += g[i] * g[i] / static_cast<double>(dim);
  }
  double* scalar = state.empty() ? nullptr : &state.back();
  if (s.kind == OptimizerKind::kRowwiseAdagrad) *scalar += square;
  if (s.kind == OptimizerKind::kPartialRowwiseAdam)
    *scalar = s.beta2 * *scalar + s.one_minus_beta2 * square;
  int64_t last = 0;  // its bits are the last two columns
  if (s.kind == OptimizerKind::kSmartDecayAdam) {
    Floats words(state.end() - 2, state.end());
    std::memcpy(&last, words.data(), sizeof last);
    std::memcpy(words.data(), &s.iteration, sizeof last);
    std::copy(words.begin(), words.end(), state.end() - 2);
  }
  for (size_t i = 0; i < dim; ++i) {
    switch (s.kind) {
      case OptimizerKind::kSgd:
        w[i] -= s.learning_rate * g[i];
        break;
      case OptimizerKind::kMomentum:
        state[i] = s.momentum * state[i] + s.one_minus_dampening * g[i];
        w[i] -= s.learning_rate * (s.nesterov ? g[i] + s.momentum * state[i] : state[i]);
        break;
      case OptimizerKind::kAdam:
        state[i] += s.one_minus_beta1 * (g[i] - state[i]);
        state[dim + i] = s.beta2 * state[dim + i] + s.one_minus_beta2 * g[i] * g[i];
        w[i] -= s.adam_rate * state[i] /
                (std::sqrt(state[dim + i]) / s.bias_correction2_sqrt + s.epsilon);
        break;
      case OptimizerKind::kAdagrad:
        state[i] += g[i] * g[i];
        w[i] -= s.learning_rate * g[i] / (std::sqrt(state[i]) + s.epsilon);
        break;
      case OptimizerKind::kRowwiseAdagrad:
        w[i] -= s.learning_rate * g[i] / (std::sqrt(*scalar) + s.epsilon);
        break;
      case OptimizerKind::kPartialRowwiseAdam:
        state[i] += s.one_minus_beta1 * (g[i] - state[i]);
        w[i] -= s.adam_rate * state[i] / (std::sqrt(*scalar) / s.bias_correction2_sqrt + s.epsilon);
        break;
      case OptimizerKind::kFtrl: {
        const double before = std::sqrt(state[dim + i]);
        state[dim + i] += g[i] * g[i];
        const double now = std::sqrt(state[dim + i]);
        state[i] += g[i] - (now - before) / s.learning_rate * w[i];
        const double rate = (s.ftrl_beta + now) / s.learning_rate + s.lambda2;
        const double size = std::fabs(state[i]);
        w[i] = size <= s.lambda1 ? 0 : -std::copysign(size - s.lambda1, state[i]) / rate;
        break;
      }
      case OptimizerKind::kSmartDecayAdam: {
        const auto passed = static_cast<double>(std::max<int64_t>(s.iteration - last, 1));
        const double missed =
            s.decay1 * (1 - std::pow(s.decay1, passed - 1)) / (1 - s.decay1) * state[i];
        state[i] = std::pow(s.decay1, passed) * state[i] + s.one_minus_beta1 * g[i];
        state[dim + i] =
            std::pow(s.decay2, passed) * state[dim + i] + s.one_minus_beta2 * g[i] * g[i];
        w[i] -= s.learning_rate * (state[i] + missed) / (std::sqrt(state[dim + i]) + s.epsilon);
        break;
      }
    }
  }
}

void optimizers_follow_their_definitions() {
  Random random(9);
  // Ids 0..5 with repetitions, in the order of a batch.
  const Ids ids{4, 0, 1, 0, 2, 2, 2, 5, 3, 0};
  for (size_t kind = 0; kind < kOptimizerKinds; ++kind)
    for (uint32_t dim : {1u, 7u, 16u, 37u})
      for (DataType type : kTypes)
        for (DataType gradient_type : kTypes)
          for (int option = 0; option < 4; ++option) {
            const OptimizerStep step = step_of(static_cast<OptimizerKind>(kind), option);
            const auto table = std::make_shared<Table>(
                config_of(dim, 2, 2, 16, ScoreStrategy::kStep, type), state_for(step.kind, dim));
            for (int round = 0; round < 2; ++round) {
              const SharedBatch batch = train(table, ids);
              const Rows before = lookup(*table, range(0, 6));
              const Floats gradient = exact_floats(random, ids.size() * dim);
              const Bytes narrowed = narrow(gradient_type, gradient);
              Pooling pooling = unpooled(*table);
              pooling.type = gradient_type;
              const Segment segment = segment_of(table, batch);
              Group::update({&segment, 1}, pooling, narrowed.data(), {&step, 1},
                            kThreads[option % 3]);
              const Rows after = lookup(*table, range(0, 6));
              const Floats from = widen(type, before.embeddings),
                           to = widen(type, after.embeddings);
              const size_t columns = table->state().dim();
              for (size_t id = 0; id < 6; ++id) {
                std::vector<double> w(from.begin() + id * dim, from.begin() + (id + 1) * dim);
                std::vector<double> state(before.state.begin() + id * columns,
                                          before.state.begin() + (id + 1) * columns);
                std::vector<double> g(dim, 0.0);
                for (size_t i = 0; i < ids.size(); ++i)
                  for (size_t c = 0; c < dim && ids[i] == id; ++c) {
                    const double value = gradient[i * dim + c];
                    const double most = step.max_gradient;
                    g[c] += most > 0 ? std::clamp(value, -most, most) : value;
                  }
                optimize_plainly(step, w, state, g);
                const double close = type == DataType::kFloat32   ? 1e-5
                                     : type == DataType::kFloat16 ? 0x1p-10
                                                                  : 0x1p-7;
                for (size_t c = 0; c < dim; ++c)
                  CHECK(std::fabs(to[id * dim + c] - w[c]) <= close * (std::fabs(w[c]) + 0.01));
                for (size_t c = 0; c < columns; ++c)
                  CHECK(std::fabs(after.state[id * columns + c] - state[c]) <=
                        1e-5 * (std::fabs(state[c]) + 1));
              }
            }
          }
}

// Where occurrence `i` of a call ends up: its output row and columns, and its factor.
struct Place {
  size_t output, bag, length;
  const Segment* segment;
};

std::vector<Place> places(const Call& call) {
  std::vector<Place> all;
  for (const Segment& segment : call.segments)
    for (size_t f = 0; f < segment.features; ++f)
      for (size_t b = 0; b < call.batch_size; ++b) {
        const size_t bag = (segment.first_feature + f) * call.batch_size + b;
        const auto length = static_cast<size_t>(call.offsets[bag + 1] - call.offsets[bag]);
        for (size_t i = 0; i < length; ++i)
          all.push_back({b * call.stride + segment.column + f * segment.table->config().dim, bag,
                         length, &segment});
      }
  return all;
}

bool holds_all(const Call& call) {
  for (const Segment& segment : call.segments) {
    const auto begin = call.ids.begin() + static_cast<std::ptrdiff_t>(segment.id_begin);
    const Ids ids(begin, begin + static_cast<std::ptrdiff_t>(segment.id_count));
    const std::vector<uint32_t> slots = find(*segment.table, ids);
    if (std::count(slots.begin(), slots.end(), kNoSlot) != 0) return false;
  }
  return true;
}

void pooling_and_its_gradients() {
  Random random(10);
  for (DataType type : kTypes) {
    std::vector<SharedTable> tables;
    for (uint32_t dim : {3u, 16u, 70u})
      tables.push_back(std::make_shared<Table>(
          config_of(dim, 64, 64, 16, ScoreStrategy::kStep, type), layout_of(0, false)));
    for (size_t longest : {size_t{1}, size_t{5}, size_t{40}}) {
      Call call(tables, {2, 1, 1}, 12, longest, 300, random);
      call.train(1, 2);
      const std::vector<Place> where = places(call);
      // The rows as they were read, occurrence by occurrence.
      std::vector<Floats> rows;
      for (size_t i = 0; i < call.ids.size(); ++i) {
        const Table& table = *where[i].segment->table;
        rows.push_back(find(table, {call.ids[i]})[0] == kNoSlot
                           ? Floats(table.config().dim, 0.0f)
                           : widen(type, lookup(table, {call.ids[i]}).embeddings));
      }
      for (DataType out_type : kTypes)
        for (int mean = 0; mean < 2; ++mean)
          for (int weighted = 0; weighted < 2; ++weighted) {
            const Pooling pooling = call.pooling(mean, weighted, out_type);
            Floats wanted(call.batch_size * call.stride, 0.0f);
            for (size_t i = 0; i < rows.size(); ++i)
              for (size_t c = 0; c < rows[i].size(); ++c)
                wanted[where[i].output + c] += weighted ? rows[i][c] * call.weights[i] : rows[i][c];
            std::vector<bool> divided(wanted.size());
            for (size_t i = 0; i < rows.size(); ++i)
              for (size_t c = where[i].output; c < where[i].output + rows[i].size(); ++c)
                if (mean && !divided[c]) {
                  wanted[c] /= static_cast<float>(where[i].length);
                  divided[c] = true;
                }
            Bytes out(wanted.size() * bytes_of(out_type));
            Group::read(call.segments, pooling, out.data(), 2);
            CHECK(out == narrow(out_type, wanted));
            if (holds_all(call)) {
              std::fill(out.begin(), out.end(), std::byte{1});
              Group::evaluate(call.segments, call.ids.data(), pooling, out.data(), 2);
              CHECK(out == narrow(out_type, wanted));
            }
            const Floats gradient = exact_floats(random, wanted.size());
            const Bytes narrowed = narrow(out_type, gradient);
            Floats weight_gradient(call.ids.size(), -99.0f);
            Group::weight_gradient(call.segments, pooling, narrowed.data(), weight_gradient.data(),
                                   2);
            for (size_t i = 0; i < rows.size(); ++i) {
              double dot = 0;
              for (size_t c = 0; c < rows[i].size(); ++c)
                dot += double{rows[i][c]} * gradient[where[i].output + c];
              if (mean) dot /= static_cast<double>(where[i].length);
              CHECK(std::fabs(weight_gradient[i] - dot) < 1e-4);
            }
            // The reduced gradient of every table, against a sum in double.
            for (const Segment& segment : call.segments) {
              const size_t dim = segment.table->config().dim;
              Ids ids(segment.id_count);
              Floats sums(segment.id_count * dim);
              for (float most : {0.0f, 0.25f}) {
                const size_t n = Group::reduce(segment, pooling, narrowed.data(), most, 2,
                                               ids.data(), sums.data());
                std::map<uint64_t, std::vector<double>> expected;
                for (size_t i = segment.id_begin; i < segment.id_begin + segment.id_count; ++i) {
                  if (find(*segment.table, {call.ids[i]})[0] == kNoSlot) continue;
                  auto& sum = expected[call.ids[i]];
                  sum.resize(dim);
                  for (size_t c = 0; c < dim; ++c) {
                    double g = gradient[where[i].output + c];
                    if (most > 0) g = std::clamp<double>(g, -most, most);
                    sum[c] += g * (weighted ? call.weights[i] : 1) /
                              (mean ? static_cast<double>(where[i].length) : 1);
                  }
                }
                CHECK(n == expected.size());
                for (size_t r = 0; r < n; ++r) {
                  const auto& sum = expected[ids[r]];
                  CHECK(sum.size() == dim);
                  for (size_t c = 0; c < sum.size(); ++c)
                    CHECK(std::fabs(sums[r * dim + c] - sum[c]) < 1e-3);
                }
              }
            }
          }
    }
  }
}

void gradients_of_frequent_ids_are_summed_in_blocks() {
  Random random(11);
  for (size_t n : {255, 256, 257, 1000}) {
    const auto table = std::make_shared<Table>(config_of(5, 1, 1, 16), layout_of(0, false));
    const SharedBatch batch = train(table, Ids(n, 42));
    const Floats gradient = random_floats(random, 5 * n);
    Floats wanted(5, 0.0f);
    for (size_t block = 0; block < n; block += 256) {
      Floats sum(5, 0.0f);
      for (size_t i = block; i < std::min(n, block + 256); ++i)
        for (size_t c = 0; c < 5; ++c) sum[c] += gradient[5 * i + c];
      for (size_t c = 0; c < 5; ++c) wanted[c] += sum[c];
    }
    Ids ids(n);
    Floats sums(5 * n);
    const Segment segment = segment_of(table, batch);
    CHECK(Group::reduce(segment, unpooled(*table), gradient.data(), 0, 2, ids.data(),
                        sums.data()) == 1);
    sums.resize(5);
    CHECK(ids[0] == 42 && sums == wanted);
  }
}

const Test kTests[] = {
    TEST(optimizers_follow_their_definitions),
    TEST(pooling_and_its_gradients),
    TEST(gradients_of_frequent_ids_are_summed_in_blocks),
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
