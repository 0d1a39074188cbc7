// Runs the tests of the program and prints their names.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.hpp"

namespace unit_tests {

struct Row {
  const char* name;
  void (*body)();
};

// Made by the first test: the order in which units are initialised is unknown.
static std::vector<Row>& rows() {
  static std::vector<Row> rows;
  return rows;
}

Test::Test(const char* name, void (*body)()) {
  rows().push_back({name, body});
}

[[noreturn]] void fail(const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, message.c_str());
  std::exit(1);
}

}  // namespace unit_tests

int main() {
  for (const auto& row : unit_tests::rows()) {
    std::puts(row.name);
    std::fflush(stdout);
    row.body();
  }
}
