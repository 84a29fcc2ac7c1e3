// The Python face of the SSD store.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "store.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace dynamicemb {
namespace {

using Columns = std::vector<std::pair<Address, size_t>>;

std::vector<Column> columns_of(const Columns& pairs) {
  std::vector<Column> columns;
  for (const auto& [address, bytes] : pairs) columns.push_back({at<std::byte>(address), bytes});
  return columns;
}

}  // namespace

void bind_store(nb::module_& m) {
  static nb::exception<CorruptStore> corrupt(m, "CorruptStore", PyExc_RuntimeError);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StoreError& error) {
      PyObject* arguments =
          Py_BuildValue("(iss)", error.error(), error.what(), error.path().c_str());
      if (arguments == nullptr) return;
      PyErr_SetObject(PyExc_OSError, arguments);
      Py_DECREF(arguments);
    }
  });

  nb::class_<Files>(m, "Files");
  nb::class_<FailingFiles, Files>(m, "FailingFiles")
      .def(nb::init<unsigned, uint64_t, uint64_t, int, uint64_t>(), "kinds"_a, "first"_a, "count"_a,
           "error"_a, "then"_a = UINT64_MAX, "For tests: see csrc/store_files.h.")
      .def_prop_ro("seen", &FailingFiles::seen);

  nb::class_<SsdStore>(m, "SsdStore")
      .def(
          "__init__",
          [](SsdStore* self, std::string path, uint64_t payload, uint32_t block,
             uint64_t segment_bytes, bool direct, int io_threads, std::shared_ptr<Files> files,
             std::string snapshot) {
            nb::gil_scoped_release release;
            new (self) SsdStore({std::move(path), payload, block, segment_bytes, direct, io_threads,
                                 std::move(snapshot)},
                                std::move(files));
          },
          nb::kw_only(), "path"_a, "payload"_a, "block"_a, "segment_bytes"_a, "direct"_a,
          "io_threads"_a, "files"_a.none() = nb::none(), "snapshot"_a = "")
      .def_prop_ro("size", &SsdStore::size)
      .def(
          "find",
          [](const SsdStore& self, Address ids, size_t n, Address found, const Columns& columns) {
            nb::gil_scoped_release release;
            self.find(at<uint64_t>(ids), n, at<bool>(found), columns_of(columns));
          },
          "ids"_a, "n"_a, "found"_a, "columns"_a)
      .def(
          "contains",
          [](const SsdStore& self, Address ids, size_t n, Address found) {
            nb::gil_scoped_release release;
            self.contains(at<uint64_t>(ids), n, at<bool>(found));
          },
          "ids"_a, "n"_a, "found"_a)
      .def(
          "insert",
          [](SsdStore& self, Address ids, size_t n, const Columns& columns) {
            nb::gil_scoped_release release;
            self.insert(at<uint64_t>(ids), n, columns_of(columns));
          },
          "ids"_a, "n"_a, "columns"_a)
      .def(
          "erase",
          [](SsdStore& self, Address ids, size_t n, Address removed) {
            nb::gil_scoped_release release;
            self.erase(at<uint64_t>(ids), n, at<bool>(removed));
          },
          "ids"_a, "n"_a, "removed"_a)
      .def(
          "export_rows",
          [](const SsdStore& self, std::pair<uint64_t, uint64_t> from, size_t limit, Address ids,
             const Columns& columns) {
            nb::gil_scoped_release release;
            SsdStore::Cursor cursor{from.first, from.second};
            const size_t count =
                self.export_rows(cursor, limit, at<uint64_t>(ids), columns_of(columns));
            return std::make_tuple(count, cursor.number, cursor.place);
          },
          "cursor"_a, "limit"_a, "ids"_a, "columns"_a)
      .def("set_payload", &SsdStore::set_payload, "payload"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("flush", &SsdStore::flush, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &SsdStore::clear, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &SsdStore::close, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "snapshot",
          [](SsdStore& self, const std::string& name, nb::bytes note) {
            const std::string text(note.c_str(), note.size());
            nb::gil_scoped_release release;
            self.snapshot(name, text);
          },
          "name"_a, "note"_a)
      .def(
          "load_snapshot",
          [](SsdStore& self, const std::string& name) {
            std::string note;
            {
              nb::gil_scoped_release release;
              note = self.load_snapshot(name);
            }
            return nb::bytes(note.data(), note.size());
          },
          "name"_a)
      .def("drop_snapshot", &SsdStore::drop_snapshot, "name"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("snapshots", &SsdStore::snapshots)
      .def("stats", [](const SsdStore& self) -> nb::typed<nb::dict, std::string, nb::object> {
        const StoreStats s = self.stats();
        nb::dict stats;
        stats["rows"] = s.rows;
        stats["records"] = s.records;
        stats["segments"] = s.segments;
        stats["index_bytes"] = s.index_bytes;
        stats["pending_bytes"] = s.pending_bytes;
        stats["disk_bytes"] = s.disk_bytes;
        stats["cleaned_segments"] = s.cleaned_segments;
        stats["cleaned_rows"] = s.cleaned_rows;
        stats["direct"] = s.direct;
        stats["problem"] = s.problem;
        stats["set_aside"] = s.set_aside;
        return nb::typed<nb::dict, std::string, nb::object>(stats);
      });
}

}  // namespace dynamicemb
