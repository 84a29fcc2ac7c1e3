// The Python face of slot maps.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <mutex>

#include "bindings.h"
#include "slot_map.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace dynamicemb {

void bind_slot_map(nb::module_& m) {
  nb::class_<IdSlots>(m, "IdSlots")
      .def("__len__", [](const IdSlots& self) { return self.ids.size(); })
      .def(
          "copy",
          [](const IdSlots& self, Address ids, Address slots) {
            std::copy(self.ids.begin(), self.ids.end(), at<uint64_t>(ids));
            std::copy(self.slots.begin(), self.slots.end(), at<int64_t>(slots));
          },
          "ids"_a, "slots"_a)
      .def(
          "copy_pairs",
          [](const IdSlots& self, Address pairs) {
            auto* to = at<uint64_t>(pairs);
            for (size_t i = 0; i < self.ids.size(); ++i) {
              to[2 * i] = self.ids[i];
              to[2 * i + 1] = self.slots[i];
            }
          },
          "pairs"_a, "(id, slot), one pair after the other.");

  nb::class_<SlotMap>(m, "SlotMap")
      .def(
          "__init__",
          [](SlotMap* self, uint64_t capacity, int policy, double decay_exponent,
             uint32_t first_logarithm, uint64_t ttl) {
            new (self) SlotMap(
                {capacity, static_cast<SlotPolicy>(policy), decay_exponent, first_logarithm, ttl});
          },
          nb::kw_only(), "capacity"_a, "policy"_a, "decay_exponent"_a, "first_logarithm"_a, "ttl"_a)
      .def_prop_ro("size", &SlotMap::size)
      .def_prop_ro("bytes", &SlotMap::bytes)
      .def_prop_ro("time", &SlotMap::time)
      .def_prop_ro("draws", &SlotMap::draws)
      .def(
          "find",
          [](const SlotMap& self, Address ids, size_t n, int threads, Address slots,
             int64_t missing, int64_t offset) {
            nb::gil_scoped_release release;
            std::shared_lock lock(self.mutex());
            self.find(at<uint64_t>(ids), n, threads, at<int64_t>(slots), missing, offset);
          },
          "ids"_a, "n"_a, "threads"_a, "slots"_a, "missing"_a, "offset"_a)
      .def(
          "map",
          [](SlotMap& self, Address ids, size_t n, Address counts, uint64_t time, bool evict,
             bool pin, bool keep, int threads, Address slots) {
            Mapped mapped;
            {
              nb::gil_scoped_release release;
              std::unique_lock lock(self.mutex());
              mapped = self.map(at<uint64_t>(ids), n, at<int64_t>(counts),
                                {time, evict, pin, threads, keep}, at<int64_t>(slots));
            }
            return std::make_tuple(std::move(mapped.inserted), std::move(mapped.evicted),
                                   mapped.refused);
          },
          "ids"_a, "n"_a, "counts"_a, nb::kw_only(), "time"_a, "evict"_a, "pin"_a, "keep"_a,
          "threads"_a, "slots"_a)
      .def(
          "evict",
          [](SlotMap& self, uint64_t count, bool expired, uint64_t time, int threads) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            return self.evict(count, expired, time, threads);
          },
          "count"_a, nb::kw_only(), "expired"_a, "time"_a, "threads"_a)
      .def(
          "erase",
          [](SlotMap& self, Address ids, size_t n, int threads) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            return self.erase(at<uint64_t>(ids), n, threads);
          },
          "ids"_a, "n"_a, "threads"_a)
      .def(
          "pin",
          [](SlotMap& self, Address slots, size_t n) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.pin(at<int64_t>(slots), n);
          },
          "slots"_a, "n"_a)
      .def(
          "unpin",
          [](SlotMap& self, Address slots, size_t n) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.unpin(at<int64_t>(slots), n);
          },
          "slots"_a, "n"_a)
      .def(
          "used_since",
          [](const SlotMap& self, uint64_t time, bool all) {
            nb::gil_scoped_release release;
            std::shared_lock lock(self.mutex());
            return self.used_since(time, all);
          },
          "time"_a, "all"_a)
      .def(
          "uses",
          [](const SlotMap& self, const IdSlots& which, Address last, Address counts) {
            nb::gil_scoped_release release;
            std::shared_lock lock(self.mutex());
            self.uses(which.slots.data(), which.slots.size(), at<uint64_t>(last),
                      at<uint32_t>(counts));
          },
          "which"_a, "last"_a, "counts"_a)
      .def(
          "restore",
          [](SlotMap& self, Address ids, Address slots, Address last, Address counts, size_t n,
             uint64_t time, uint64_t draws) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.restore(at<uint64_t>(ids), at<uint32_t>(slots), at<uint64_t>(last),
                         at<uint32_t>(counts), n, time, draws);
          },
          "ids"_a, "slots"_a, "last"_a, "counts"_a, "n"_a, "time"_a, "draws"_a);
}

}  // namespace dynamicemb
