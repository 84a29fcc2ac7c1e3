// The Python face of native plug-ins.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "plugin.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace dynamicemb {
namespace {

using Sizes = std::vector<uint32_t>;

}  // namespace

void bind_plugin(nb::module_& m) {
  nb::exception<PluginError>(m, "PluginError", PyExc_RuntimeError);

  nb::class_<Plugin>(m, "Plugin")
      .def(
          "__init__",
          [](Plugin* self, const std::string& path) {
            nb::gil_scoped_release release;
            new (self) Plugin(path);
          },
          "path"_a)
      .def_prop_ro("type", [](const Plugin& self) { return nb::bytes(self.type().c_str()); })
      .def_prop_ro("path", &Plugin::path);

  // Plug-ins may call back from threads that wait for nobody, so the interpreter is not held.
  nb::class_<PluginStore>(m, "PluginStore")
      .def(
          "__init__",
          [](PluginStore* self, std::shared_ptr<Plugin> plugin, const nb::bytes& config) {
            const std::string text(config.c_str(), config.size());
            nb::gil_scoped_release release;
            new (self) PluginStore(std::move(plugin), text);
          },
          "plugin"_a, "config"_a)
      .def(
          "pull",
          [](PluginStore& self, const nb::bytes& table, Address ids, size_t n, const Sizes& sizes,
             int64_t timeout_ms, Address found, Address rows) {
            const std::string name(table.c_str(), table.size());
            nb::gil_scoped_release release;
            self.pull(name, at<int64_t>(ids), n, sizes, std::chrono::milliseconds(timeout_ms),
                      at<bool>(found), at<uint8_t>(rows));
          },
          "table"_a, "ids"_a, "n"_a, "sizes"_a, "timeout_ms"_a, "found"_a, "rows"_a)
      .def(
          "push",
          [](PluginStore& self, const nb::bytes& table, Address ids, size_t n, const Sizes& sizes,
             int64_t timeout_ms, Address rows) {
            const std::string name(table.c_str(), table.size());
            nb::gil_scoped_release release;
            self.push(name, at<int64_t>(ids), n, sizes, std::chrono::milliseconds(timeout_ms),
                      at<uint8_t>(rows));
          },
          "table"_a, "ids"_a, "n"_a, "sizes"_a, "timeout_ms"_a, "rows"_a);
}

}  // namespace dynamicemb
