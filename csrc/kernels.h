// The inner loops, compiled once per instruction set and chosen when the library is loaded.
//
// Every variant gives the same bits: no contraction to fused multiply-add unless it is written
// down, and sums over columns have one fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamicemb {

using std::int64_t;
using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

enum class DataType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

inline size_t bytes_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// What a slot holds beside its id and digest. `stamp` is the number of the last batch that touched
// the slot; `scalar` is the optimizer state of optimizers that keep one number per row.
struct Record {
  uint64_t score;
  uint32_t stamp;
  float scalar;
};
static_assert(sizeof(Record) == 16);

inline constexpr uint32_t kNoSlot = 0xffffffffu;

struct IndexView {
  const uint8_t* digests;
  const uint64_t* keys;
  uint64_t num_buckets;
  uint32_t width;
  bool sparse;  // most ids sit in the lower half of their bucket: a hint, for speed only
};

// How a slot of a slot map was used, and by whom: two to a line, so that finding an id and writing
// its use down touch one. The rest of a free slot means nothing.
struct alignas(32) SlotUse {
  uint64_t last = 0;   // time of the last use
  uint32_t count = 0;  // uses, where they are counted, or their logarithm
  uint32_t owner = 0;  // the id's position in the index + 1; 0: the slot is free
  uint64_t id = 0;     // the index has it too
};

enum class UseRule : uint8_t {
  kNone,
  kStamp,  // the time only; several threads may do it
  kAdd,    // the time, and one use more
  kDraw,   // the time, and one more with probability 2^-count, up to kLargestLogarithm
};
inline constexpr uint32_t kLargestLogarithm = 31;

struct Uses {
  SlotUse* slots;
  uint64_t now;
  UseRule rule;
  uint64_t draws;  // random numbers used so far
};

// Rows to read from: a row number with the top bit set is a row of `side` (rows that are not in
// the table: zeros, the missing row, rows of ids that were not admitted).
inline constexpr uint32_t kSideRow = 0x80000000u;

struct RowSource {
  const std::byte* rows;
  const std::byte* side;
  size_t stride;
  uint32_t dim;
  DataType type;

  const std::byte* at(uint32_t row) const {
    const std::byte* base = (row & kSideRow) ? side : rows;
    return base + static_cast<size_t>(row & ~kSideRow) * stride;
  }
};

// One bag: `length` row numbers to sum, each scaled by its weight where there are weights.
struct Bag {
  const uint32_t* rows;
  const float* weights;
  size_t length;
  float divisor;  // the sum is divided by it; 1 leaves it alone
};

enum class InitializerMode : uint8_t { kConstant = 0, kUniform, kNormal, kTruncatedNormal, kDebug };

// A new row is a pure function of (seed, id, column).
struct Initializer {
  InitializerMode mode = InitializerMode::kConstant;
  float value = 0;                     // constant
  float lower = 0, upper = 1;          // uniform, truncated normal
  float mean = 0, std_dev = 1;         // normal, truncated normal
  float cdf_lower = 0, cdf_upper = 1;  // of the standard normal at the truncation bounds
  uint64_t seed = 0;
};

enum class OptimizerKind : uint8_t {
  kSgd = 0,
  kMomentum,
  kAdam,
  kAdagrad,
  kRowwiseAdagrad,
  kPartialRowwiseAdam,
  kFtrl,
  kSmartDecayAdam,
};
inline constexpr size_t kOptimizerKinds = 8;

// The numbers of one optimizer step. Derived ones are computed in double by the caller.
struct OptimizerStep {
  OptimizerKind kind = OptimizerKind::kSgd;
  float learning_rate = 0.01f;
  float epsilon = 1e-8f;
  float beta2 = 0.999f;
  float one_minus_beta1 = 0.1f, one_minus_beta2 = 0.001f;
  float adam_rate = 0.01f;  // learning rate / bias correction of the first moment
  float bias_correction2_sqrt = 1;
  float momentum = 0, one_minus_dampening = 1;
  float weight_decay = 0;
  float decay_factor = 1;  // 1 - learning rate * weight decay
  float lambda1 = 0, lambda2 = 0, ftrl_beta = 0;
  float max_gradient = 0;  // incoming gradients are clamped to +-max_gradient; 0 = not
  bool nesterov = false;
  bool decoupled_decay = false;
  bool maximize = false;
  bool stochastic_rounding = false;
  uint64_t rounding_seed = 0;
  uint32_t step = 0;                    // stochastic rounding draws anew each step
  int64_t iteration = 1;                // number of the update, from 1
  double decay1 = 0.9, decay2 = 0.999;  // the betas, for powers of them
};

struct Kernels {
  const char* name;

  // slots[i] = bucket * width + position of ids[i], or kNoSlot.
  void (*find)(const IndexView& index, const uint64_t* ids, size_t n, uint32_t* slots);
  // found[i] = the slot of ids[i], or kNoSlot; buckets of 64, with their ids' slots in `values`.
  // Returns how many were not found. Uses of found[0], found[1] .. are written down. `repeated`:
  // many ids come several times; a hint, for speed only.
  size_t (*find_values)(const IndexView& index, const uint32_t* values, Uses& uses, bool repeated,
                        const uint64_t* ids, size_t n, uint32_t* found);
  // numbers[i] = the bucket of ids[i] divided by 2^shift, which fits 16 bits.
  void (*partition)(uint64_t num_buckets, int shift, const uint64_t* ids, size_t n,
                    uint16_t* numbers);
  // Lowest position with an empty digest, or `width`.
  uint32_t (*free_position)(const uint8_t* digests, uint32_t width);
  // Position of the smallest (score, position) not touched by batch `stamp`, or kNoSlot. All
  // slots of the bucket must be occupied.
  uint32_t (*victim)(const Record* records, uint32_t width, uint32_t stamp);

  void (*initialize)(const Initializer& initializer, uint64_t id, float* row, uint32_t dim);
  void (*widen)(DataType type, const void* from, float* to, uint32_t dim);
  void (*narrow)(DataType type, const float* from, void* to, uint32_t dim);
  // Rounds up or down at random, with the right expectation: a pure function of
  // (seed, id, column, step).
  void (*narrow_stochastic)(DataType type, const float* from, void* to, uint32_t dim, uint64_t seed,
                            uint64_t id, uint32_t step);

  // out[i] = row rows[i], converted to `out_type`. `stream`: the output is so large that it would
  // leave the caches before it is read, so do not read it into them to write it.
  void (*gather)(const RowSource& source, const uint32_t* rows, size_t n, bool stream,
                 DataType out_type, void* out, size_t out_stride);
  // The rows should have been fetched before.
  void (*pool)(const RowSource& source, const Bag& bag, DataType out_type, void* out);

  // sum += clamp(gradient) * scale
  void (*accumulate)(DataType type, const void* gradient, float clamp, float scale, float* sum,
                     uint32_t dim);
  // sum over columns of a * b, in the fixed order of this library
  float (*dot)(const float* a, const float* b, uint32_t dim);
  // One update of a row. `scratch` has room for dim numbers and may be `gradient`.
  void (*optimize[kOptimizerKinds])(float* weights, float* state, float* scalar,
                                    const float* gradient, float* scratch, uint32_t dim,
                                    const OptimizerStep& step);
};

// The variant for this processor. DYNAMICEMB_ISA=baseline|avx2|avx512 names the best one to use;
// another value throws.
const Kernels& kernels();

// Prefetches are always inlined: GCC takes a function that does nothing else for one without any
// effect, and drops the calls.
#define DYNAMICEMB_PREFETCH [[gnu::always_inline]] inline void

// Prefetches go to the second-level cache: it can wait for several times as many lines as the first
// (1.3 to 1.9 times faster lookups on Zen 4).
DYNAMICEMB_PREFETCH prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// On to the first level, shortly before use. Lines that wait in the shared third level are hardly
// sped up by the prefetch above alone (Zen 4: 26 ns instead of 12 for an id of a hot set).
DYNAMICEMB_PREFETCH prefetch_near(const void* address) { __builtin_prefetch(address, 0, 3); }

// Backwards: ascending lines would make the processor fetch on past the end of a row.
DYNAMICEMB_PREFETCH prefetch_bytes(const void* address, size_t bytes) {
  const auto* at = static_cast<const char*>(address);
  for (size_t end = (bytes + 63) / 64 * 64; end > 0; end -= 64) prefetch(at + end - 64);
}

DYNAMICEMB_PREFETCH prefetch_rows(const RowSource& source, const uint32_t* rows, size_t n) {
  const size_t bytes = source.dim * bytes_of(source.type);
  for (size_t i = 0; i < n; ++i) prefetch_bytes(source.at(rows[i]), bytes);
}

}  // namespace dynamicemb
