// The functions of `ktc/interface/`, once in a library.
#define KTC_UNIT interface

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "ktc/interface/attention.hpp"
#include "ktc/interface/engine.hpp"
#include "ktc/interface/host_call.hpp"
#include "ktc/interface/host_thread.hpp"
#include "ktc/interface/linear.hpp"
#include "ktc/interface/moe.hpp"
#include "ktc/interface/packed_linear.hpp"
#include "ktc/interface/step.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/mailbox_loop.hpp"
#include "ktc/scratch_block.hpp"
#include "ktc/thread_pool.hpp"

namespace ktc {

PhaseObserver* phase_observer = nullptr;

namespace {

struct Shared {
  std::mutex busy;
  ThreadPool pool;
  ScratchBlock memory;
  pid_t owner = getpid();
};

// A forked child has the parent's objects but none of its threads, and perhaps a mutex that stays locked. The child
// cannot destroy these, so it leaves the parent's objects alone and makes its own. Several threads of the child may
// make their first call together: one stores its object, the others drop theirs. A lock around this could itself have
// been held during the fork. Nothing is destroyed when the process ends, because a thread may still be inside a call.
Shared& of_this_process() {
  static std::atomic<Shared*> current{nullptr};
  Shared* shared = current.load(std::memory_order_acquire);
  while (shared == nullptr || shared->owner != getpid()) {
    auto made = std::make_unique<Shared>();
    if (current.compare_exchange_strong(shared, made.get(), std::memory_order_acq_rel)) return *made.release();
  }
  return *shared;
}

}  // namespace

Engine::Engine(int threads, NodeCpus nodes, const OpenMp& openmp)
    : threads_(threads), nodes_(std::move(nodes)), openmp_(openmp), owner_(getpid()) {
  if (nodes_.size() <= 1 && offers(openmp_, owner_, threads)) return;
  Shared& shared = of_this_process();
  const std::lock_guard lock(shared.busy);
  shared.pool.require(threads);
}

Engine::~Engine() = default;

int Engine::threads() const {
  return threads_;
}

std::size_t Engine::workspace_bytes() const {
  Shared& shared = of_this_process();
  const std::lock_guard lock(shared.busy);
  return shared.memory.size();
}

void Engine::exclusively(Call call, void* context) const {
  Shared& shared = of_this_process();
  const std::lock_guard lock(shared.busy);
  SharedThreads threads(shared.pool, threads_, nodes_, openmp_, owner_);
  call(context, threads, shared.memory);
}

HostCall::HostCall(std::function<void()> call, std::function<std::int64_t()> amount)
    : call_(std::move(call)), amount_(std::move(amount)) {
  thrown_.reserve(kMostThrown);  // a run allocates nothing
}

HostCall::~HostCall() = default;

const std::function<void()>& HostCall::call() const {
  return call_;
}

void HostCall::run(void* call) noexcept {
  auto& self = *static_cast<HostCall*>(call);
  std::int64_t amount = 1;
  std::exception_ptr error;
  if (self.amount_) amount = self.amount_();
  const auto start = std::chrono::steady_clock::now();
  try {
    self.call_();
  } catch (...) {
    error = std::current_exception();
  }
  const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - start;
  const std::lock_guard lock(self.busy_);
  ++self.ended_;
  if (error && self.thrown_.size() < kMostThrown) self.thrown_.push_back({self.ended_, error});
  if (amount == 0 || error) return;
  constexpr std::int64_t kMost = 8, kRemembered = 16;  // of usual times, and runs that these are of
  const std::int64_t time = self.usual_ == 0 ? taken.count() : std::min(taken.count(), kMost * self.usual_);
  self.usual_ += self.usual_ == 0 ? time : (time - self.usual_) / kRemembered;
  self.work_.nanoseconds += time;
  self.work_.amount += amount;
  ++self.work_.runs;
  self.work_.squares += static_cast<double>(amount) * static_cast<double>(amount);
  self.work_.products += static_cast<double>(amount) * static_cast<double>(time);
}

HostWork HostCall::work() const {
  const std::lock_guard lock(busy_);
  return work_;
}

void HostCall::rethrow(std::int64_t runs) {
  std::exception_ptr first;
  {
    const std::lock_guard lock(busy_);
    const auto later = std::ranges::find_if(thrown_, [runs](const Thrown& thrown) { return thrown.run > runs; });
    if (later != thrown_.begin()) first = thrown_.front().error;
    thrown_.erase(thrown_.begin(), later);
  }
  if (first) std::rethrow_exception(first);
}

class HostThread::Loop {
 public:
  explicit Loop(Mailbox& mailbox) : requests(mailbox) {
    try {
      thread_ = std::thread([this] { requests.run([] { return ThreadPool::Awake(of_this_process().pool); }); });
    } catch (const std::system_error& error) {
      throw std::runtime_error(std::string("the thread of host calls could not be started: ") + error.what());
    }
  }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;
  ~Loop() {
    requests.end();
    thread_.join();
  }

  bool is_of_this_process() const { return owner_ == getpid(); }

  MailboxLoop requests;

 private:
  pid_t owner_ = getpid();
  std::thread thread_;
};

HostThread::HostThread(Mailbox* mailbox) : loop_(std::make_unique<Loop>(*mailbox)) {}

// A forked child has the object and not its thread, which it cannot join.
HostThread::~HostThread() {
  if (!loop_->is_of_this_process()) static_cast<void>(loop_.release());
}

void HostThread::expect(std::uint32_t calls) {
  loop_->requests.expect(calls);
}

void HostThread::dismiss() {
  loop_->requests.dismiss();
}

bool HostThread::wait(double seconds, std::uint32_t left) {
  return loop_->requests.wait(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)), left);
}

std::uint32_t HostThread::expected() const {
  return loop_->requests.expected();
}

std::string decimal(std::int64_t number) {
  return std::to_string(number);
}

AttentionKernel::~AttentionKernel() = default;
LinearKernel::~LinearKernel() = default;
MoeKernel::~MoeKernel() = default;
PackedLinearKernel::~PackedLinearKernel() = default;

namespace step {

StepKernel::~StepKernel() = default;

}  // namespace step

}  // namespace ktc
