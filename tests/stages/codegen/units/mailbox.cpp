// The loop that answers the requests of a mailbox: those that are dismissed during a call, and the end of the thread.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "check.hpp"
#include "ktc/interface/host_call.hpp"
#include "ktc/interface/host_thread.hpp"
#include "ktc/mailbox_loop.hpp"

namespace unit_tests {
namespace {

using namespace ktc;

constexpr auto kLong = std::chrono::seconds(30);

// A mailbox, and what a GPU does with it.
struct Served {
  void request(HostCall& call) {
    std::atomic_ref(mailbox.done).store(0);
    std::atomic_ref(mailbox.call).store(reinterpret_cast<std::uint64_t>(&call));
  }
  bool is_done() { return std::atomic_ref(mailbox.done).load() == 1; }

  Mailbox mailbox{};
  MailboxLoop loop{mailbox};
  std::thread thread{[this] { loop.run([] { return 0; }); }};
};

template <class Condition>
void until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kLong;
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

const Test dismissed("mailbox: a call that was dismissed while it was made is none of the next ones", [] {
  Served served;
  std::atomic<bool> has_begun{false}, ends{false};
  HostCall slow([&] {
    has_begun = true;
    until([&] { return ends.load(); });
  });
  std::atomic<int> calls{0};
  HostCall call([&] {
    CHECK(!served.is_done());
    ++calls;
  });
  served.loop.expect(1);
  served.request(slow);
  until([&] { return has_begun.load(); });
  served.loop.dismiss();
  served.loop.expect(2);
  served.request(call);
  ends = true;
  for (int made = 1; made <= 2; ++made) {
    until([&] { return calls == made && served.is_done(); });
    CHECK(served.loop.wait(made == 1 ? std::chrono::nanoseconds(0) : kLong) == (made == 2));
    if (made == 1) served.request(call);
  }
  served.loop.end();
  served.thread.join();
});

const Test few("mailbox: a wait for all but some requests ends before the last of them", [] {
  Served served;
  HostCall call([] {});
  served.loop.expect(3);
  std::atomic<bool> has_one_left{false};
  std::thread waiting([&] { has_one_left = served.loop.wait(kLong, 1); });
  CHECK(!served.loop.wait(std::chrono::nanoseconds(0), 2));
  for (int made = 1; made <= 2; ++made) {
    CHECK(!has_one_left);
    served.request(call);
    until([&] { return served.is_done(); });
  }
  waiting.join();
  CHECK(has_one_left && !served.loop.wait(std::chrono::nanoseconds(0)));
  served.request(call);
  CHECK(served.loop.wait(kLong));
  served.loop.end();
  served.thread.join();
});

const Test ended("mailbox: a thread that ends answers the requests that are expected", [] {
  Served served;
  HostCall call([] {});
  served.loop.expect(2);
  served.loop.end();
  for (int made = 0; made < 2; ++made) {
    served.request(call);
    until([&] { return served.is_done(); });
  }
  served.thread.join();
  CHECK(served.loop.expected() == 0);
});

}  // namespace
}  // namespace unit_tests
