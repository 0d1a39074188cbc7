// Runs of a call on the host: their work, and the errors of some of them.
#include "ktc/interface/host_call.hpp"

#include <cstdint>
#include <stdexcept>

#include "check.hpp"

namespace unit_tests {
namespace {

using namespace ktc;

bool throws(HostCall& call, std::int64_t runs) {
  try {
    call.rethrow(runs);
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

const Test errors("host_call: an error of a later run stays", [] {
  int runs = 0;
  HostCall call([&] {
    if (++runs > 1) throw std::runtime_error("not the first run");
  });
  for (int run = 0; run < 3; ++run) HostCall::run(&call);
  CHECK(!throws(call, 1));
  CHECK(throws(call, 2) && !throws(call, 2));
  CHECK(throws(call, 3) && !throws(call, 3));
});

const Test work("host_call: runs without anything to compute are not in its work", [] {
  std::int64_t amount = 0;
  HostCall call([] {}, [&] { return amount; });
  for (amount = 0; amount < 3; ++amount) HostCall::run(&call);
  CHECK(call.work().amount == 3 && call.work().runs == 2 && call.work().nanoseconds >= 0);
  CHECK(call.work().squares == 5 && call.work().products >= 0);
  HostCall other([] {});
  HostCall::run(&other);
  CHECK(other.work().amount == 1 && other.work().runs == 1);
});

}  // namespace
}  // namespace unit_tests
