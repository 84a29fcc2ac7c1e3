// The parts below tables: threads, memory, hashes, and the kernels of every instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "calls.h"
#include "check.h"
#include "dedup.h"
#include "hash.h"
#include "memory.h"
#include "parallel.h"

#define DYNAMICEMB_VARIANT test_variant
#include "kernels_variant.h"

namespace dynamicemb::baseline {
Kernels table();
}
#if defined(__x86_64__)
namespace dynamicemb::avx2 {
Kernels table();
}
namespace dynamicemb::avx512 {
Kernels table();
}
#endif

namespace {

using namespace dynamicemb;
using namespace dynamicemb::testing;

void parallel_for_runs_every_task_once() {
  for (int threads : {0, 1, 2, 4, 3, 64}) {
    for (size_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      parallel_for(threads, tasks, [&](size_t task) { ++runs[task]; });
      CHECK(std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; }));
    }
  }
}

void parallel_for_passes_exceptions_on() {
  for (int threads : kThreads) {
    for (size_t bad : {0, 5, 99}) {
      std::atomic<int> runs{0};
      CHECK(throws<std::runtime_error>([&] {
        parallel_for(threads, 100, [&](size_t task) {
          ++runs;
          if (task >= bad) throw std::runtime_error("task");
        });
      }));
      CHECK(runs > 0);
      parallel_for(threads, 10, [&](size_t) { ++runs; });  // the pool still works
    }
  }
}

void parallel_for_may_be_called_from_several_threads() {
  std::vector<std::thread> callers;
  std::atomic<size_t> total{0};
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round)
        parallel_for(1 + caller, 20, [&](size_t task) { total += task; });
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 4 * 50 * 190);
}

void mappings_are_zero_and_can_be_discarded() {
  for (size_t bytes : {size_t{1}, size_t{10000}, size_t{5} << 20}) {
    Mapping mapping(bytes);
    CHECK(mapping.size() == bytes);
    CHECK(std::all_of(mapping.data(), mapping.data() + bytes,
                      [](std::byte b) { return b == std::byte{0}; }));
    std::memset(mapping.data(), 1, bytes);
    mapping.discard(bytes / 4, bytes / 2);
    CHECK(mapping.data()[0] == std::byte{1} && mapping.data()[bytes - 1] == std::byte{1});
    if (bytes >= 10000) CHECK(mapping.data()[bytes / 2] == std::byte{0} || bytes < 16384);
    Mapping moved(std::move(mapping));
    Mapping assigned;
    assigned = std::move(moved);
    CHECK(assigned.size() == bytes && assigned.data()[0] == std::byte{1});
  }
  CHECK(Mapping(0).data() == nullptr);
  for (size_t bytes : {size_t{1000}, size_t{65} << 20, size_t{1000}}) {
    Scratch scratch(bytes);  // too large a block is not kept for the next one
    auto* numbers = scratch.take<uint32_t>(17);
    auto* next = scratch.take<uint64_t>(8);
    std::fill_n(numbers, 17, 1u);
    std::fill_n(next, 8, uint64_t{2});
    CHECK(numbers[16] == 1 && reinterpret_cast<uintptr_t>(next) % 64 == 0);
  }
  const Array<uint64_t> array(100);
  CHECK(array.bytes() == 800 && array[99] == 0);
}

void distinct_ids_come_in_order_of_first_occurrence() {
  for (const size_t count : {0, 1, 2, 15, 16, 17, 5000}) {
    std::vector<uint64_t> ids(count);
    for (size_t i = 0; i < count; ++i) ids[i] = hash_id(i * i % 701) | (i % 3 == 0 ? ~0ULL : 0);
    std::vector<uint64_t> distinct(count);
    std::vector<int64_t> places(count), counts(count);
    const size_t found =
        distinct_ids(ids.data(), count, distinct.data(), places.data(), counts.data());
    std::map<uint64_t, int64_t> expected;
    size_t first = 0;
    for (size_t i = 0; i < count; ++i) {
      if (expected[ids[i]]++ == 0) CHECK(distinct[first++] == ids[i]);
      CHECK(distinct[static_cast<size_t>(places[i])] == ids[i]);
    }
    CHECK(found == first && found == expected.size());
    for (size_t i = 0; i < found; ++i) CHECK(counts[i] == expected[distinct[i]]);
  }
}

void hash_places_ids() {
  Random random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t hash = hash_id(random.next()), buckets = 1 + random.below(1 << 20);
    CHECK(bucket_of(hash, buckets) < buckets);
    CHECK(bucket_of(hash, 2 * buckets) / 2 == bucket_of(hash, buckets));
    CHECK(digest_of(hash) != 0);
  }
  CHECK(digest_of(0x100) == 1 && digest_of(0xff) == 0xff);
}

struct Block {
  uint32_t words[4];
  bool operator==(const Block&) const = default;
};

Block philox(Block counter, uint32_t k0, uint32_t k1) {
  auto& c = counter.words;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)}};
  }
  return counter;
}

void philox_gives_the_known_answers() {
  // The vectors of Random123; our function cannot reach the counters of the last two, so the
  // plain one is checked with them and ours against the plain one.
  CHECK(philox({{0, 0, 0, 0}}, 0, 0) == (Block{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
  CHECK(philox({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u) ==
        (Block{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
  CHECK(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0) ==
        (Block{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
  uint32_t out[32];
  test_variant::philox_columns(0, 0, 0, 0, out);
  CHECK(out[0] == 0x6627e8d5 && out[1] == 0xe169c58d && out[2] == 0xbc57ac4c &&
        out[3] == 0x9b00dbd8);
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    const uint64_t seed = random.next(), id = i == 0 ? ~uint64_t{0} : random.next();
    const auto stream = static_cast<uint32_t>(random.next());
    const auto first = static_cast<uint32_t>(random.below(1 << 20)) * 32;
    test_variant::philox_columns(seed, id, stream, first, out);
    for (uint32_t b = 0; b < 8; ++b) {
      const Block counter{
          {first / 4 + b, stream, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)}};
      const Block want =
          philox(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      CHECK(std::memcmp(want.words, out + 4 * b, sizeof want.words) == 0);
    }
  }
}

// ---- tests: the kernels ----

std::vector<Kernels> variants() {
  std::vector<Kernels> all{baseline::table()};
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (has_avx2) all.push_back(avx2::table());
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    all.push_back(avx512::table());
#endif
  return all;
}

constexpr uint32_t kDims[] = {1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 127, 130};

// An index in exactly sized heap memory, where the address sanitizer sees reads past the end.
struct PlainIndex {
  std::vector<uint8_t> digests;
  Ids keys, ids;
  IndexView view;

  PlainIndex(uint32_t width, uint64_t buckets, Random& random)
      : digests(width * buckets), keys(width * buckets) {
    std::vector<uint32_t> filled(buckets);
    for (uint64_t i = 0; i < buckets * width; ++i) {
      const uint64_t id = random.next(), hash = hash_id(id), b = bucket_of(hash, buckets);
      ids.push_back(id);
      if (filled[b] == width) continue;
      digests[b * width + filled[b]] = digest_of(hash);
      keys[b * width + filled[b]++] = id;
    }
    view = {digests.data(), keys.data(), buckets, width, false};
  }
};

using Recording = std::map<std::string, Bytes>;

Recording record_index(const Kernels& k) {
  Recording log;
  Random random(3);
  for (uint32_t width = 16; width <= 272; width += 16) {
    PlainIndex index(width, 7, random);
    for (size_t n : {0, 1, 15, 16, 17, 31, 32, 33, 64, 65, 300}) {
      Ids ids;  // some that are there, some whose bucket was full, some unknown
      for (size_t i = 0; i < n; ++i)
        ids.push_back(i % 7 == 6 ? i : index.ids[i * 37 % index.ids.size()]);
      std::vector<uint32_t> slots(n), sparse(n);
      k.find(index.view, ids.data(), n, slots.data());
      IndexView hinted = index.view;
      hinted.sparse = true;
      k.find(hinted, ids.data(), n, sparse.data());
      CHECK(sparse == slots);
      append(log["find"], slots);
      for (size_t i = 0; i < n; ++i) {  // what brute force finds
        const auto it = std::find(index.keys.begin(), index.keys.end(), ids[i]);
        const auto slot = static_cast<uint32_t>(it - index.keys.begin());
        CHECK(slots[i] == (it == index.keys.end() ? kNoSlot : slot));
      }
    }
    std::vector<uint32_t> positions;
    std::vector<uint8_t> digests(width, 9);
    positions.push_back(k.free_position(digests.data(), width));
    CHECK(positions.back() == width);
    for (uint32_t hole = width; hole-- > 0;) {
      digests[hole] = 0;
      positions.push_back(k.free_position(digests.data(), width));
      CHECK(positions.back() == hole);
    }
    std::vector<Record> records(width);
    for (int round = 0; round < 40; ++round) {
      uint32_t best = kNoSlot;
      for (uint32_t i = 0; i < width; ++i) {
        records[i].score = round % 4 == 0 ? ~uint64_t{0} : random.below(round % 4 == 1 ? 2 : 1000);
        if (round % 4 == 3) records[i].score <<= 54;
        records[i].stamp = round < 2 ? 5 : static_cast<uint32_t>(4 + random.below(2));
        if (records[i].stamp != 5 && (best == kNoSlot || records[i].score < records[best].score))
          best = i;
      }
      positions.push_back(k.victim(records.data(), width, 5));
      CHECK(positions.back() == best);
    }
    append(log["positions"], positions);
  }
  return log;
}

Recording record_initialize(const Kernels& k) {
  Recording log;
  Random random(4);
  for (uint8_t mode = 0; mode < 5; ++mode) {
    Initializer with{.mode = static_cast<InitializerMode>(mode),
                     .value = 0.75f,
                     .lower = -0.5f,
                     .upper = 0.25f,
                     .mean = 0.1f,
                     .std_dev = 0.3f,
                     .cdf_lower = 0.0228f,
                     .cdf_upper = 0.69f,
                     .seed = 99};
    for (int wide = 0; wide < 2; ++wide) {
      if (wide) with.cdf_lower = 0, with.cdf_upper = 1, with.lower = -9, with.upper = 9;
      for (uint32_t dim : kDims)
        for (uint64_t id : {uint64_t{0}, ~uint64_t{0}, random.next()}) {
          Floats row(dim);
          k.initialize(with, id, row.data(), dim);
          for (float value : row) CHECK(std::isfinite(value));
          if (mode == 1 || mode == 3)
            for (float value : row) CHECK(value >= with.lower && value <= with.upper);
          append(log["initialize " + std::to_string(mode)], row);
          Floats longer(dim + 7);  // a value depends on its column, not on the number of columns
          k.initialize(with, id, longer.data(), dim + 7);
          CHECK(std::equal(row.begin(), row.end(), longer.begin()));
        }
    }
  }
  // Far tails: the rarest of the drawn probabilities.
  Floats tail(4096);
  k.initialize({.mode = InitializerMode::kNormal, .seed = 1}, 5, tail.data(), 4096);
  append(log["tail"], tail);
  k.initialize({.mode = InitializerMode::kTruncatedNormal,
                .lower = -9,
                .upper = 9,
                .cdf_lower = 0,
                .cdf_upper = 0x1p-24f},
               5, tail.data(), 4096);
  for (float value : tail) CHECK(std::isfinite(value));
  append(log["tail"], tail);
  return log;
}

Recording record_formats(const Kernels& k) {
  Recording log;
  Random random(5);
  // Every 16-bit pattern, and back.
  std::vector<uint16_t> patterns(65536), back(65536);
  std::iota(patterns.begin(), patterns.end(), uint16_t{0});
  Floats values(65536);
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    k.widen(type, patterns.data(), values.data(), 65536);
    append(log["widen"], values);
    k.narrow(type, values.data(), back.data(), 65536);
    for (size_t i = 0; i < 65536; ++i) CHECK(back[i] == patterns[i] || std::isnan(values[i]));
    append(log["narrow back"], back);
  }
  // Floats of every exponent, and those around the borders of the half formats.
  std::vector<uint32_t> bits;
  for (uint32_t exponent = 0; exponent < 512; ++exponent)
    for (uint32_t i = 0; i < 64; ++i)
      bits.push_back(exponent << 23 | static_cast<uint32_t>(random.below(1 << 23)));
  for (uint32_t border : {0x00000000u, 0x33000000u, 0x33800000u, 0x38800000u, 0x477fe000u,
                          0x477ff000u, 0x47800000u, 0x7f7f8000u, 0x7f800000u, 0x7fc00000u})
    for (uint32_t i = 0; i < 9; ++i) bits.push_back(border + i - 4);
  Floats floats(bits.size());
  std::memcpy(floats.data(), bits.data(), bits.size() * 4);
  for (DataType type : kTypes)
    for (uint32_t offset : {0u, 1u}) {
      const auto n = static_cast<uint32_t>(bits.size()) - offset;
      Bytes out(n * bytes_of(type));
      k.narrow(type, floats.data() + offset, out.data(), n);
      append(log["narrow"], out);
      for (uint32_t step : {0u, 1u, 77u}) {
        k.narrow_stochastic(type, floats.data() + offset, out.data(), n, 11, step * 3, step);
        append(log["narrow_stochastic"], out);
        Floats rounded(n);
        k.widen(type, out.data(), rounded.data(), n);
        for (size_t i = 0; i < n; ++i) {
          const float value = floats[i + offset];
          CHECK(std::isnan(value) == std::isnan(rounded[i]));
          if (std::isfinite(value) && std::fabs(value) < 60000 && std::fabs(value) > 1e-4)
            CHECK(std::fabs(rounded[i] - value) <=
                  std::fabs(value) * (type == DataType::kFloat16 ? 0x1p-10f : 0x1p-7f));
        }
      }
    }
  return log;
}

Recording record_rows(const Kernels& k) {
  Recording log;
  Random random(6);
  constexpr size_t kRows = 40, kSide = 3;
  for (uint32_t dim : kDims) {
    std::vector<uint32_t> rows(kRows);
    for (uint32_t& row : rows)
      row = static_cast<uint32_t>(random.below(4) ? random.below(kRows)
                                                  : kSideRow | random.below(kSide));
    const Floats weights = random_floats(random, kRows);
    const Floats content = random_floats(random, (kRows + kSide) * dim);
    const Floats gradient = random_floats(random, dim), other = random_floats(random, dim);
    for (DataType in : kTypes) {
      const Bytes from = narrow(in, content);
      const size_t stride = dim * bytes_of(in);
      const RowSource source{from.data(), from.data() + kRows * stride, stride, dim, in};
      for (DataType out_type : kTypes) {
        for (const size_t out_stride : {size_t{dim}, size_t{dim} + 1}) {
          const size_t bytes = ((kRows - 1) * out_stride + dim) * bytes_of(out_type);
          Bytes room(bytes + 64), plain;
          std::byte* out = room.data();
          while (reinterpret_cast<uintptr_t>(out) % 64 != 0) ++out;  // where whole lines can stream
          for (const bool stream : {false, true}) {
            std::fill_n(out, bytes, std::byte{0});
            for (size_t n : {size_t{0}, size_t{1}, kRows})
              k.gather(source, rows.data(), n, stream, out_type, out, out_stride);
            Bytes gathered(out, out + bytes);
            if (stream) CHECK(gathered == plain);
            plain = std::move(gathered);
          }
          append(log["gather"], plain);
        }
        Bytes pooled(dim * bytes_of(out_type));
        for (size_t length : {size_t{0}, size_t{1}, size_t{2}, size_t{19}, kRows})
          for (const float* weight : {static_cast<const float*>(nullptr), weights.data()})
            for (float divisor : {1.0f, 3.0f}) {
              k.pool(source, {rows.data(), weight, length, divisor}, out_type, pooled.data());
              append(log["pool"], pooled);
            }
      }
      const Bytes narrowed = narrow(in, gradient);
      Floats sum = other;
      for (float clamp : {0.0f, 0.4f}) {
        for (float scale : {1.0f, -0.3f})
          k.accumulate(in, narrowed.data(), clamp, scale, sum.data(), dim);
        append(log["accumulate"], sum);
      }
    }
    append(log["dot"], Floats{k.dot(gradient.data(), other.data(), dim)});
  }
  return log;
}

Recording record_optimize(const Kernels& k) {
  Recording log;
  Random random(7);
  for (size_t kind = 0; kind < kOptimizerKinds; ++kind)
    for (int option = 0; option < 4; ++option)
      for (uint32_t dim : kDims) {
        Floats weights = random_floats(random, dim), state = random_floats(random, 2 * dim + 3);
        for (float& value : state) value = std::fabs(value);
        const int64_t last = 2;  // where one optimizer keeps its last step
        std::memcpy(&state[2 * dim + dim % 2], &last, sizeof last);
        float scalar = 0.3f;
        for (int round = 0; round < 2; ++round) {
          Floats gradient = random_floats(random, dim), scratch(dim);
          k.optimize[kind](weights.data(), state.data(), &scalar, gradient.data(),
                           round == 0 ? scratch.data() : gradient.data(), dim,
                           step_of(static_cast<OptimizerKind>(kind), option));
        }
        Bytes& bytes = log["optimize " + std::to_string(kind)];
        append(bytes, weights);
        append(bytes, state);
        append(bytes, Floats{scalar});
      }
  return log;
}

template <Recording (*kRecord)(const Kernels&)>
void variants_agree() {
  const std::vector<Kernels> all = variants();
  const Recording wanted = kRecord(all[0]);
  for (size_t v = 1; v < all.size(); ++v)
    for (const auto& [kernel, bytes] : kRecord(all[v]))
      if (bytes != wanted.at(kernel)) {
        ++failed_checks;
        std::printf("  %s of %s differs from baseline\n", kernel.c_str(), all[v].name);
      }
}

const Test kTests[] = {
    TEST(parallel_for_runs_every_task_once),
    TEST(parallel_for_passes_exceptions_on),
    TEST(parallel_for_may_be_called_from_several_threads),
    TEST(mappings_are_zero_and_can_be_discarded),
    TEST(hash_places_ids),
    TEST(distinct_ids_come_in_order_of_first_occurrence),
    TEST(philox_gives_the_known_answers),
    {"variants_agree: index", variants_agree<record_index>},
    {"variants_agree: initialize", variants_agree<record_initialize>},
    {"variants_agree: formats", variants_agree<record_formats>},
    {"variants_agree: rows", variants_agree<record_rows>},
    {"variants_agree: optimize", variants_agree<record_optimize>},
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
