// What the C++ tests share: checks that count, and a runner.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>

inline std::atomic<int> failed_checks{0};  // of the running test

inline void check(bool holds, const char* file, int line, const char* condition) {
  if (!holds && failed_checks++ < 10) std::printf("  %s:%d: not true: %s\n", file, line, condition);
}
#define CHECK(condition) check(condition, __FILE__, __LINE__, #condition)

template <class Error, class F>
bool throws(F&& f) {
  try {
    f();
  } catch (const Error&) {
    return true;
  } catch (...) {
  }
  return false;
}

struct Test {
  const char* name;
  void (*run)();
};
#define TEST(name) {#name, name}

// An argument runs only the tests whose name contains it.
inline int run_tests(int argc, char** argv, std::span<const Test> tests) {
  int passed = 0, failed = 0;
  for (const Test& test : tests) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    failed_checks = 0;
    try {
      test.run();
    } catch (const std::exception& error) {
      ++failed_checks;
      std::printf("  threw: %s\n", error.what());
    }
    std::printf("%s %s\n", failed_checks == 0 ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
    ++(failed_checks == 0 ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
